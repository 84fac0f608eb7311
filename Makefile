# `make demo` and `make test` are the two commands; `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
CARGO ?= cargo
JOBS ?= $(shell n=$$(nproc); echo $$((n > 8 ? 8 : n)))
DATA ?= /usr/share
SOAK_CASES ?= 20000
TARGET := $(or $(CARGO_TARGET_DIR),target)
# In CI a missing component is a failure; on a laptop the same tests skip with a visible reason.
FLETCH_TEST_REQUIRE ?= $(if $(CI),fuse$(comma)trace$(comma)python$(comma)torch$(comma)images$(comma)strace$(comma)root$(comma)cgroup$(comma)s3$(comma)azure$(comma)http,)
comma := ,
# Tests wait as much as they work.
TESTS_AT_ONCE ?= $(shell echo $$(($(JOBS) + 1)))
export FLETCH_TEST_REQUIRE

.PHONY: help build programs wheel install ready-and-linted demo test lint docs-check formats soak bench deny clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t14

build: ## the programs and the timed tables, release
	$(CARGO) build --release --workspace --bins -j$(JOBS)

# The timed tables have no tests, and the linter compiles them.
TESTED := --workspace --exclude fletch-benches

programs: ## the programs alone
	$(CARGO) build --release $(TESTED) --bins -j$(JOBS)

wheel: ## the Python package, release, as a wheel in the target directory's release/wheels
	CARGO="$(CARGO)" JOBS=$(JOBS) python/build.sh release

demo: programs ## your own folder behind a mount: make demo DATA=/some/folder
	BIN="$(abspath $(TARGET))/release" DATA="$(DATA)" tests/demo/demo.sh

install: ## what the tests need beside Rust
	tests/install.sh

lint: ## formatting and clippy, warnings are errors
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --workspace --all-targets -j$(JOBS) -- -D warnings

formats: install ## the second implementation of the formats against the golden files; the judge of the parity study
	tests/formats/run.sh
	python3 -m unittest discover -q -s benches/parity

# What is installed comes over the network: it comes while the linter compiles.
ready-and-linted:
	@mkdir -p "$(TARGET)"
	@tests/install.sh > "$(TARGET)/install.log" 2>&1 & installing=$$!; \
	$(MAKE) --no-print-directory lint && linted=0 || linted=$$?; \
	wait $$installing || { cat "$(TARGET)/install.log" >&2; exit 1; }; \
	cat "$(TARGET)/install.log"; exit $$linted

# Nothing is timed in CI: there a crate is optimised less (Cargo.toml names those that are not), in as many parts as there are
# cores, and each by itself, to take less long.
ifneq ($(CI),)
test: export CARGO_PROFILE_RELEASE_OPT_LEVEL := 1
test: export CARGO_PROFILE_RELEASE_LTO := off
test: export CARGO_PROFILE_RELEASE_CODEGEN_UNITS := $(JOBS)
endif

test: ready-and-linted programs wheel formats ## everything that must hold before a change lands
	$(CARGO) nextest run --release $(TESTED) --no-fail-fast --build-jobs $(JOBS) -j$(TESTS_AT_ONCE)
	$(CARGO) test --release $(TESTED) --doc -q

SOAK := package(fletch-core) or package(fletch-tables) or package(fletch-store) or test(capped_at_500) \
    or (package(fletch-tests) and (binary(disk) or binary(epochs) or binary(python)))

soak: install programs wheel ## long counts: kill -9 of the disk tier and of epochs, limits at 10 GiB, every way to start workers, properties with many cases
	FLETCH_SOAK=1 PROPTEST_CASES=$(SOAK_CASES) $(CARGO) nextest run --release $(TESTED) --profile soak --no-fail-fast \
	    --build-jobs $(JOBS) -j$(JOBS) -E '$(SOAK)'

bench: build ## the timed tables of benches/ (not part of make test)
	benches/run.sh

deny: ## licences, sources and bans (needs cargo-deny)
	$(CARGO) deny check licenses sources bans

clean: ## removes what was built
	$(CARGO) clean
