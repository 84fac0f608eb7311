# `make help` lists the targets. `make demo` shows Fletch; run `make check` after an edit, and `make test`
# before a change lands.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
CARGO ?= cargo
JOBS ?= $(shell n=$$(nproc); echo $$((n > 8 ? 8 : n)))
DATA ?= /usr/share
SOAK_CASES ?= 20000
TARGET := $(or $(CARGO_TARGET_DIR),target)
SERVERS := $(or $(FLETCH_TEST_SERVERS),$(TARGET)/test-servers)
comma := ,
# In CI a missing component is a failure; on a laptop the same tests skip and print the reason.
IN_CI := fuse trace python torch images strace prometheus chromium root cgroup s3 azure http etcd \
    namespace
FLETCH_TEST_REQUIRE ?= $(if $(CI),$(shell echo $(IN_CI) | tr ' ' $(comma)),)
# Tests wait as much as they work.
TESTS_AT_ONCE ?= $(shell echo $$(($(JOBS) + 2)))
export FLETCH_TEST_REQUIRE

.PHONY: help build programs wheel dist image page chart dashboards install ready-and-linted demo check \
    test lint format-check formats soak fuzz bench deny clean accept accept-alerts accept-allocation \
    accept-allocator accept-attacks accept-buckets accept-check-time accept-cluster-trouble \
    accept-clusters accept-code-size accept-comments accept-contributing accept-dashboards \
    accept-data-plane accept-datasets-mount accept-dist accept-domains accept-drafts \
    accept-estimator accept-formats accept-frameworks accept-fsspec accept-fuzz accept-help \
    accept-hung-objects accept-images accept-lines accept-lost-servers accept-lost-tests \
    accept-mistakes accept-mount accept-neighbour accept-old-names accept-outside accept-page \
    accept-paragraphs accept-paused-primary accept-pool accept-queries accept-questions \
    accept-ranges accept-readme accept-s3 accept-sentences accept-servers accept-structure \
    accept-survival accept-test-time accept-two-releases accept-without-fuse accept-without-torch

help: ## this list
	@grep -hE '^[a-z0-9-]+:.* ## ' $(MAKEFILE_LIST) | sed -E 's/:.* ## /\t/' | expand -t24

build: ## the programs and the timed tables, release
	$(CARGO) build --release --workspace --bins -j$(JOBS)

# The timed tables have no tests, and the linter compiles them.
TESTED := --workspace --exclude fletch-benches

programs: ## the programs alone
	$(CARGO) build --release $(TESTED) --bins -j$(JOBS)

wheel: ## the Python package, release, as a wheel in the target directory's release/wheels
	CARGO="$(CARGO)" JOBS=$(JOBS) python/build.sh release

dist: programs ## what can be installed, in target/dist: a tarball, a Debian package, a wheel
	CARGO="$(CARGO)" JOBS=$(JOBS) packaging/dist.sh

# BASE has a default for the accept targets below, which is no image.
image: ## container images, by podman or docker; BASE=IMAGE: runtime base, BIN=DIR: programs built already
	BASE="$(if $(filter-out file,$(origin BASE)),$(BASE))" BIN="$(BIN)" packaging/image.sh

page: install ## the admin page's charting library, from npm's lock file
	cache-server/page/build.sh "$(abspath $(SERVERS))/page/node_modules" cache-server/page/vendor

demo: programs ## your own folder behind a mount: make demo DATA=/some/folder
	BIN="$(abspath $(TARGET))/release" DATA="$(DATA)" tests/demo/demo.sh

install: ## what the tests need beside Rust (the table is in tests/README.md)
	tests/install.sh

format-check: ## formatting alone
	$(CARGO) fmt --all --check

lint: format-check ## formatting and clippy, warnings are errors
	$(CARGO) clippy --release --workspace --all-targets -j$(JOBS) -- -D warnings

# The packages whose unit tests need no program, no mount and no network.
LIBRARIES := core api tables settings host bounds origin store window client indexer sim
UNITS := $(LIBRARIES:%=-p fletch-%)
CHECK_CASES ?= 32

check: format-check ## formatting, lints, unit tests of the libraries: after every edit, at most 2 minutes
	$(CARGO) clippy --release $(TESTED) --all-targets -j$(JOBS) -- -D warnings
	PROPTEST_CASES=$(CHECK_CASES) $(CARGO) nextest run --release --profile check $(UNITS) --lib \
	    --build-jobs $(JOBS) -j$(TESTS_AT_ONCE)

formats: install ## the second implementation of the formats, and the judge of the parity study
	tests/formats/run.sh
	python3 -m unittest discover -q -s benches/parity

chart: install ## the Helm chart: rendered by Helm, against the schemas of Kubernetes
	"$(abspath $(SERVERS))/chart/bin/python" -m unittest discover -q -s tests/chart

dashboards: install ## the dashboards of the chart, written by helm/dashboards
	"$(abspath $(SERVERS))/chart/bin/python" -B helm/dashboards/generate.py

# Packages come over the network: they come while the linter compiles.
ready-and-linted: ## install and lint at the same time
	@mkdir -p "$(TARGET)"
	@tests/install.sh > "$(TARGET)/install.log" 2>&1 & installing=$$!; \
	$(MAKE) --no-print-directory lint && linted=0 || linted=$$?; \
	wait $$installing || { cat "$(TARGET)/install.log" >&2; exit 1; }; \
	cat "$(TARGET)/install.log"; exit $$linted

# `make check`, and `make test` in CI, compile for a short time: each crate is optimised less (Cargo.toml
# lists the exceptions), by itself, and in as many parts as there are cores. `make check` keeps what it can
# reuse after an edit.
QUICK := check $(if $(CI),test)
$(QUICK): export CARGO_PROFILE_RELEASE_OPT_LEVEL := 1
$(QUICK): export CARGO_PROFILE_RELEASE_LTO := off
$(QUICK): export CARGO_PROFILE_RELEASE_CODEGEN_UNITS := $(JOBS)
check: export CARGO_INCREMENTAL := 1

test: ready-and-linted deny programs wheel formats chart ## everything that must hold before a change lands
	$(CARGO) nextest run --release $(TESTED) --no-fail-fast \
	    --build-jobs $(JOBS) -j$(TESTS_AT_ONCE)
	$(CARGO) test --release $(TESTED) --doc -q

SOAK := package(fletch-core) or package(fletch-tables) or package(fletch-store) or test(capped_at_500) \
    or (package(fletch-tests) and (binary(disk) or binary(epochs) or binary(python) or binary(scale) \
        or binary(survival) or binary(ordinary_user) or binary(/^cluster/)))

soak: install programs wheel ## the promises for hours: kill -9, 10 GiB, properties with many cases
	FLETCH_SOAK=1 PROPTEST_CASES=$(SOAK_CASES) \
	    $(CARGO) nextest run --release $(TESTED) --profile soak --no-fail-fast \
	    --build-jobs $(JOBS) -j$(JOBS) -E '$(SOAK)'

# `make test` runs each fuzz target for a second without libFuzzer (tests/README.md, "Fuzzing").
FUZZ_MINUTES ?= 1
fuzz: ## every parser of foreign bytes for FUZZ_MINUTES (1); FUZZ_TARGETS="tar slab" picks some
	CARGO="$(CARGO)" JOBS=$(JOBS) FUZZ_MINUTES="$(FUZZ_MINUTES)" FUZZ_TARGETS="$(FUZZ_TARGETS)" \
	    tests/fuzz/run.sh

bench: build ## the timed tables of benches/ (not part of make test)
	benches/run.sh

deny: install ## licences, sources and bans of every dependency
	PATH="$(abspath $(SERVERS))/tools/bin:$$PATH" \
	    $(CARGO) deny --locked --log-level error check licenses sources bans

clean: ## removes what was built
	$(CARGO) clean

# What an issue's table asks for is a target here: run it before the closing note. BASE is the revision
# before the work.
BASE ?= 93d5cb9
CODE_LINES_MAX := 116100
TREE := $(CARGO) nextest run --release $(TESTED) --no-fail-fast

# Those that take seconds.
ACCEPT := formats structure code-size lines paragraphs sentences old-names outside questions help \
    contributing comments

accept: $(ACCEPT:%=accept-%) ## the accept targets that take seconds

accept-structure: ## packages, rooms and folders depend in one direction
	$(TREE) --test structure

accept-lines: ## no line has more than 110 characters
	$(TREE) --test prose -E 'test(=lines_are_short)'

accept-paragraphs: ## no paragraph of a document or a comment has more than 6 lines
	$(TREE) --test prose -E 'test(=paragraphs_of_documents_and_comments_are_short)'

accept-sentences: ## no sentence of a document has more than 40 words
	$(TREE) --test prose -E 'test(=sentences_of_documents_are_short)'

accept-old-names: ## no old type, function or file name is left
	$(TREE) --test prose -E 'test(=old_names_are_gone)'

accept-outside: ## no document outside the repository is cited
	$(TREE) --test prose -E 'test(=nothing_cites_a_document_outside_the_repository)'

accept-questions: ## CONTRIBUTING answers "in which file" with files that exist
	$(TREE) --test prose -E 'test(=contributing_says_in_which_file_with_files_that_exist)'

accept-fuzz: export FUZZ_MINUTES := 10
accept-fuzz: ## the planted bug of each parser is found within 60 s; 10 minutes of each parser are clean
	CARGO="$(CARGO)" JOBS=$(JOBS) FUZZ_TARGETS="$(FUZZ_TARGETS)" tests/fuzz/run.sh planted
	CARGO="$(CARGO)" JOBS=$(JOBS) FUZZ_MINUTES="$(FUZZ_MINUTES)" FUZZ_TARGETS="$(FUZZ_TARGETS)" \
	    tests/fuzz/run.sh

accept-help: ## targets, .PHONY, help and documents agree
	$(TREE) --test kit -E 'test(=every_target_is_phony_and_in_help) or test(=documents_call_targets_that_exist)'

accept-contributing: ## the table of packages and the hooks agree with what runs
	$(TREE) --test kit -E 'test(=what_is_installed_is_in_the_table) or test(=hooks_call_make)'

accept-comments: ## comments have no fewer invariants and sources than at BASE
	python3 tests/audit/sources.py --verbose $(BASE)

accept-code-size: ## product code has at most CODE_LINES_MAX lines
	python3 tests/audit/code_lines.py --most $(CODE_LINES_MAX)

accept-alerts: programs ## seeded alerts are true, and false after the remedies of their runbooks
	FLETCH_ALERTS=full $(TREE) --test alerts --no-capture -j1

accept-allocator: export FLETCH_ALLOCATOR_CASES := 2000
accept-allocator: ## the allocator against brute force (2,000 cases), and decisions under noise
	$(CARGO) nextest run --release -p fletch-core --lib -E 'test(capacity::)' --no-capture

accept-allocation: build ## the disk goes to the job that waits: its bytes, its time, the other's rate
	"$(TARGET)/release/bench-allocation"

accept-attacks: programs ## attacks on connections, heads, bodies and replies shut nobody else out
	FLETCH_ATTACKS=full $(TREE) --test attacks --no-capture -j1

accept-buckets: programs ## every form of bucket, outages of each kind, folders of consoles, 1 M keys
	FLETCH_BUCKETS=full $(TREE) --test buckets --no-capture -j1

accept-drafts: programs ## 200,000 objects are files after their listing, 1.28 M in 300 MB
	FLETCH_DRAFTS=full $(TREE) --test drafts --no-capture -j1

accept-paused-primary: ## a primary that was paused for 20 s confirms no ack
	$(TREE) --test cluster_primary --run-ignored all

# LOSSES= says how often each of the four orders loses its server.
LOSSES ?= 5
accept-lost-servers: programs ## servers that are lost in mid-epoch, with their disks, stop no job (LOSSES=5)
	FLETCH_TEST_LOSSES=$(LOSSES) $(TREE) --test cluster_reclaim a_lost_server_stops_no_job

# TROUBLE_SECONDS= says how long; FLETCH_TEST_SEED repeats a run.
TROUBLE_SECONDS ?= 480
accept-cluster-trouble: programs ## random trouble of servers and etcd under mounts and jobs, 8 minutes
	FLETCH_TEST_TROUBLE_SECONDS=$(TROUBLE_SECONDS) $(TREE) --no-capture --test cluster_trouble random_trouble

accept-clusters: export FLETCH_CLUSTER_SEEDS := 8
accept-clusters: ## no way to divide a cache slows jobs down less, in simulated clusters
	$(CARGO) nextest run --release -p fletch-sim --test capacity --no-capture

# NEXT= names a fletch-server of another minor version, to which the rolling restart goes, and back.
accept-servers: programs ## several servers and etcd: disks, lost owners, restarts (NEXT=), stale views
	FLETCH_CLUSTER=full $(if $(NEXT),FLETCH_NEXT_SERVER="$(abspath $(NEXT))") \
	    $(TREE) --no-capture -j1 -E 'binary(/^cluster/)'

# RELEASE_BEFORE= is the newest tag, or while there is none the commit before servers proved their leases.
# BEFORE_BIN= names a folder with programs that are built already.
RELEASE_BEFORE ?= $(or $(shell git describe --tags --abbrev=0 HEAD^ 2>/dev/null),4c0128d5)
BEFORE_DIR ?= $(abspath $(TARGET))/release-before
TWO_RELEASES := binary(cluster_releases) or test(=a_rolling_restart_fails_no_read_and_loses_no_sample) \
    or test(=how_to_back_up_and_upgrade_does_what_it_says)
accept-two-releases: programs ## a rolling upgrade from the release before, and back, under mounts and jobs
	$(if $(BEFORE_BIN),,CARGO="$(CARGO)" JOBS=$(JOBS) \
	    tests/release_before.sh "$(RELEASE_BEFORE)" "$(BEFORE_DIR)")
	FLETCH_TEST_BEFORE="$(abspath $(or $(BEFORE_BIN),$(BEFORE_DIR)/release))" \
	    $(TREE) --no-capture -j1 --test cluster_releases --test cluster_jobs --test documents \
	    -E '$(TWO_RELEASES)'

accept-dashboards: programs chart ## every query of every panel returns data of a real server under load
	FLETCH_DASHBOARDS=full $(TREE) --test dashboards --no-capture -j1

accept-dist: dist ## the packages are installed, used and removed in empty roots of Debian
	packaging/check.sh

accept-estimator: export FLETCH_ESTIMATOR_CASES := 600
accept-estimator: ## the estimator of jobs on 600 simulated loaders that it was not made on
	$(CARGO) nextest run --release -p fletch-core --lib -E 'test(benefit::)' --no-capture

accept-domains: programs ## with tokens, an origin or a directory without domains stops the start
	$(CARGO) nextest run --release $(TESTED) -E \
	    'test(with_tokens_an_origin_and_a_directory_without_domains) or test(browser::)'

# It installs 6 GB below the directory of the test servers, and runs for about half an hour.
accept-frameworks: programs wheel ## today's Lightning, transformers, Accelerate, torchdata: killed, resumed
	python/tests/frameworks/run.sh "$(abspath $(SERVERS))/frameworks" "$(abspath $(TARGET))/release"

# They install packages from PyPI below the directory of the test servers.
accept-without-torch: programs wheel ## today's numpy, JAX, tf.data, Grain, Ray Train: killed, resumed
	python/tests/without_torch/run.sh "$(abspath $(SERVERS))/without-torch" "$(abspath $(TARGET))/release"

# It needs root and Debian's podman, runc, catatonit and mmdebstrap.
accept-without-fuse: programs wheel ## containers without FUSE, root, torch: read, train, killed, resumed
	python3 tests/chart/accept_without_fuse.py "$(TARGET)/release"

accept-fsspec: programs wheel ## pandas, pyarrow, polars, DuckDB, Hugging Face, webdataset over fletch://
	python/tests/fsspec_readers/run.sh "$(abspath $(SERVERS))/fsspec" "$(abspath $(TARGET))/release"

accept-formats: formats ## golden files are those of BASE, and every implementation reads them
	git diff --exit-code --stat $(BASE) -- tests/golden ':(glob)**/*.slab'
	$(CARGO) nextest run --release $(TESTED) --lib -E 'test(golden)'

# It needs root, /dev/fuse and Debian's podman, runc, catatonit and mmdebstrap.
accept-images: install $(if $(BIN),,programs) ## images and pods of the chart in real containers (BASE=, BIN=)
	"$(abspath $(SERVERS))/chart/bin/python" tests/chart/accept_images.py \
	    "$(or $(BIN),$(TARGET)/release)" $(if $(filter-out file,$(origin BASE)),$(BASE))

accept-lost-tests: ## no test of BEFORE (a saved list) is lost; RENAMES names files of renames
	@test -n "$(BEFORE)" || { echo 'give BEFORE=FILE, made at the revision before with'; \
	    echo '  cargo nextest list --workspace --message-format oneline > FILE'; exit 2; }
	$(CARGO) nextest list --release $(TESTED) --message-format oneline > "$(TARGET)/tests-after.txt"
	python3 tests/audit/lost_tests.py "$(BEFORE)" "$(TARGET)/tests-after.txt" $(RENAMES)

accept-mistakes: programs wheel ## the mistakes of a new user are named, with the next command, which works
	$(TREE) --test mistakes --no-capture
	$(CARGO) nextest run --release $(TESTED) --build-jobs $(JOBS) \
	    -E 'test(one_screen_with_an_example_first) or test(words_of_other_tools) or test(named_in_words)'

accept-mount: programs ## one command to a bucket's files: a bare read + 3 s; a second run takes 1 s
	FLETCH_MOUNT_OBJECTS=2000 $(TREE) --test mount_command --no-capture -j1 \
	    -E 'test(=a_bucket_is_mounted_with_the_credentials_of_the_terminal)'

accept-datasets-mount: programs ## 200 datasets of 10,000 files in one process: at most 400 MB, 64 threads
	FLETCH_DATASETS_MOUNT=full $(TREE) --test datasets_mount --no-capture -j1

accept-data-plane: programs ## system calls a file; hits beside hanging origins, dying servers, wrong bytes
	$(CARGO) nextest run --release $(TESTED) --no-fail-fast --no-capture \
	    -E 'binary(mount_hits) or package(fletch-window) or test(/^(hits|windows|leases)::/)'

accept-hung-objects: ## healthy reads beside 500 that hang at one origin: within twice their time alone
	FLETCH_HUNG_OBJECTS=full $(CARGO) nextest run --release -p fletch-origin --no-capture \
	    -E 'test(/^hung::/)'

accept-neighbour: programs ## a dataset is read past a dead neighbour: first read at most 1 s
	FLETCH_NEIGHBOUR_FILES=400 $(TREE) --test neighbour --no-capture

# With FLETCH_PAGE_FIGURES=DIR it writes pictures.
accept-page: programs ## the admin page in a browser: a stalled job, a failing origin, 1,000 jobs
	FLETCH_PAGE=full $(TREE) --test page --no-capture -j1

accept-pool: programs ## a mount and two jobs on a dataset of three times the disk keep their parts
	FLETCH_POOL=full $(TREE) --test disk --no-capture -j1 -E 'test(/^pool::/)'

accept-queries: programs ## the queries of METRICS.md agree with the truth within 1 % on four workloads
	FLETCH_QUERIES=full $(TREE) --test queries --no-capture -j1

accept-ranges: build ## random reads of a large file: rate, processor time, bytes and requests at the origin
	FLETCH_BIN="$(TARGET)/release" python3 benches/python/ranges.py --check

accept-readme: programs wheel ## README's commands print what README says
	$(TREE) --test documents -E 'test(=readme_commands_do_what_it_says)'

# It needs root for Debian's rclone and s3fs, and installs 1 GB below the directory of the test servers.
# S3_TESTS= names a checkout of Ceph's s3-tests, whose reading tests run, too.
accept-s3: programs ## stock S3 clients, pinned, read odd keys through the S3 door (S3_TESTS=)
	FLETCH_S3=full $(TREE) --test s3 --no-capture -j1 \
	    -E 'test(=a_listing_costs_by_the_items_that_it_returns) or test(/^object_store_/)'
	tests/s3/accept.sh "$(abspath $(SERVERS))/s3-clients" "$(abspath $(TARGET))/release"
	$(if $(S3_TESTS),tests/s3/ceph.sh "$(S3_TESTS)" "$(abspath $(SERVERS))/s3-clients" \
	    "$(abspath $(TARGET))/release")

accept-survival: programs ## a mount's process is killed 20 times (make soak: 500) under readers: no error
	FLETCH_TEST_MOUNTS=50 FLETCH_TEST_USER_KILLS=100 $(TREE) --test survival --test ordinary_user

accept-check-time: check ## make check, warm, takes at most 2 minutes
	touch crates/core/src/lib.rs
	@start=$$(date +%s); $(MAKE) --no-print-directory check; took=$$(( $$(date +%s) - start )); \
	echo "make check after an edit of the core: $$took s"; test $$took -le 120

accept-test-time: ## make test in a new clone and an empty target directory takes at most 25 minutes
	@scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
	git clone -q . "$$scratch/fletch"; start=$$(date +%s); \
	env -u CARGO_TARGET_DIR CI=true $(MAKE) --no-print-directory -C "$$scratch/fletch" test; \
	took=$$(( $$(date +%s) - start )); echo "make test from nothing: $$took s"; test $$took -le 1500
