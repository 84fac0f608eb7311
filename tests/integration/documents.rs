//! Documents that run: the commands of README, tutorial and how-to pages, the promises of SEMANTICS, and the
//! demo.

use fletch_origin::{Credentials, OriginConfig, OriginLimits, OriginUri, Origins, PutMode};
use fletch_testkit::servers;
use fletch_tests::bins::{Running, bin_dir, command, repo, run, with_keeper};
use fletch_tests::commands::is_a_test;
use fletch_tests::console;
use fletch_tests::fixture::{Mounted, Site, index};
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use nix::sys::signal::Signal;
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// A command that sees the built programs and nothing of the test runner's cargo.
fn shell(program: &str) -> Command {
    let mut c = Command::new(program);
    for (k, _) in std::env::vars_os() {
        let k = k.to_string_lossy();
        if (k.starts_with("CARGO") && k != "CARGO_HOME")
            || k.starts_with("NEXTEST")
            || k.starts_with("FLETCH_")
            || k == "CI"
        {
            c.env_remove(&*k);
        }
    }
    let target = bin_dir().parent().expect("target").to_owned();
    c.env("CARGO_TARGET_DIR", target).current_dir(repo());
    c
}

/// Documents whose `console` blocks are executed below, each by a test of its own.
const EXECUTED: &[&str] = &[
    "README.md",
    "docs/TUTORIAL.md",
    "docs/howto/back-up-and-upgrade.md",
    "docs/howto/mount-a-bucket.md",
    "docs/howto/s3.md",
    "docs/howto/see-what-it-saves.md",
    "docs/howto/serve-and-mount.md",
    "docs/howto/several-tenants.md",
    "docs/howto/tls.md",
    "docs/howto/train-from-python.md",
    "docs/howto/warm-up.md",
    "docs/howto/why-does-my-job-wait.md",
];

/// The document whose `console` blocks need a cluster: `documents_cluster` executes them.
const EXECUTED_IN_A_CLUSTER: &str = "docs/CLUSTER.md";

fn read(document: &str) -> String {
    fs::read_to_string(repo().join(document)).unwrap_or_else(|e| panic!("{document}: {e}"))
}

/// Runs all commands of a document in one shell, with `env` as the variables that its reader sets. The folder
/// that a document reads, unless told otherwise, is below the reader's home, and the test has a home of its
/// own.
fn execute(document: &str, env: &[(&str, &str)]) {
    assert!(EXECUTED.contains(&document), "{document} is not listed in EXECUTED");
    let steps = console::steps(&read(document), "console");
    assert!(steps.len() >= 8, "{document} shows {} commands", steps.len());
    let home = TempDir::with_prefix("fletch-document-").expect("home");
    readers_folder(&home.path().join("data"));
    let target = bin_dir().parent().expect("target").display().to_string();
    // rustup finds its toolchain through HOME; the document's HOME is a scratch one.
    let below_home = |variable: &str, dir: &str| {
        std::env::var(variable)
            .unwrap_or_else(|_| format!("{}/{dir}", std::env::var("HOME").unwrap_or_default()))
    };
    let (rustup, cargo) = (below_home("RUSTUP_HOME", ".rustup"), below_home("CARGO_HOME", ".cargo"));
    let own = [
        ("HOME", home.path().to_str().expect("utf-8")),
        ("CARGO_TARGET_DIR", &target),
        ("RUSTUP_HOME", &rustup),
        ("CARGO_HOME", &cargo),
        ("DATA", ""),
        ("CI", ""),
        ("MAKEFLAGS", ""),
        ("MAKELEVEL", "0"),
    ];
    if let Err(faults) = console::run(&steps, &repo(), &[&own[..], env].concat()) {
        panic!("{document} differs from what happens:\n{faults}");
    }
}

/// Makes the folder that documents read: many small files, equal files, a link, a large file.
fn readers_folder(dir: &Path) {
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let mut bytes = vec![0; 9 << 20];
    random.fill_bytes(&mut bytes);
    for package in 0..60 {
        let folder = dir.join(format!("package-{package:02}"));
        fs::create_dir_all(&folder).expect("mkdir");
        fs::write(folder.join("copyright"), &bytes[..2000]).expect("write");
        for file in 0..10 {
            let begin = package * 90_000 + file * 9_000;
            let content = &bytes[begin..begin + 500 + 37 * package * file % 8_000];
            fs::write(folder.join(format!("file-{file}.txt")), content).expect("write");
        }
    }
    symlink("package-00/copyright", dir.join("LICENCE")).expect("symlink");
    fs::write(dir.join("large.bin"), &bytes).expect("write");
}

/// The one `python` block of a document is a program of `python/examples`.
fn shows_the_program(document: &str, example: &str) {
    let program = read(&format!("python/examples/{example}"));
    let shown: Vec<String> = console::blocks(&read(document), "python").into_iter().map(|b| b.1).collect();
    assert_eq!(shown, [program], "{document} and python/examples/{example}");
}

#[test]
fn every_document_with_commands_is_executed() {
    let mut found = Vec::new();
    let mut todo = vec![repo().join("docs")];
    let mut files = vec![repo().join("README.md")];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir).expect("docs") {
            let path = entry.expect("entry").path();
            if path.is_dir() { &mut todo } else { &mut files }.push(path);
        }
    }
    for file in files.iter().filter(|f| f.extension().is_some_and(|x| x == "md")) {
        let text = fs::read_to_string(file).expect("document");
        if !console::steps(&text, "console").is_empty() {
            found.push(file.strip_prefix(repo()).expect("below").display().to_string());
        }
    }
    found.retain(|document| document != EXECUTED_IN_A_CLUSTER);
    found.sort();
    assert_eq!(found, EXECUTED);
}

#[test]
fn every_setting_of_the_server_is_documented() {
    let shown = run(command("fletch-server").args(["config", "show", "--effective"]));
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    let text = read("docs/OPERATIONS.md");
    let keys: Vec<&str> = shown.lines().filter_map(|l| Some(l.split_once(" = ")?.0)).collect();
    assert!(keys.len() > 20, "{shown}");
    let missing: Vec<&&str> = keys.iter().filter(|k| !text.contains(&format!("| `{k}` |"))).collect();
    assert_eq!(missing, Vec::<&&str>::new(), "settings that docs/OPERATIONS.md does not list");
}

/// Returns what is wrong with the last column of the table of failures: each row names tests that exist.
fn untested_failures(text: &str) -> Vec<String> {
    let rows =
        text.lines().skip_while(|l| !l.starts_with("| what fails |")).take_while(|l| l.starts_with('|'));
    let rows: Vec<&str> = rows.skip(2).collect();
    let mut faults = Vec::new();
    for row in &rows {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").collect();
        let [fails, .., tests] = &cells[..] else { panic!("{row}") };
        let named: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        if cells.len() != 6 || cells.iter().any(|cell| cell.trim().is_empty()) || named.is_empty() {
            faults.push(format!("{fails}: a column is empty"));
        }
        let absent = named.into_iter().filter(|test| !is_a_test(test));
        faults.extend(absent.map(|test| format!("{fails}: there is no test {test}")));
    }
    if rows.len() < 15 {
        faults.push(format!("{} rows", rows.len()));
    }
    // The list of refusals below the table names its tests in the text.
    let below = text.split("A server is refused at the start").nth(1).unwrap_or_default();
    let named = below.split('`').skip(1).step_by(2).take_while(|span| span.contains("::"));
    let named: Vec<&str> = named.collect();
    if named.len() != 2 || named.iter().any(|test| !is_a_test(test)) {
        faults.push(format!("tests of refusals: {named:?}"));
    }
    faults
}

#[test]
fn every_failure_in_the_table_of_clusters_has_tests() {
    let text = read(EXECUTED_IN_A_CLUSTER);
    assert_eq!(untested_failures(&text), Vec::<String>::new());
    let test = "`cluster_failures::servers_that_do_not_reach_each_other_fail_no_read`";
    assert_eq!(untested_failures(&text.replace(test, "`cluster_failures::no_such_test`")).len(), 1);
    assert_eq!(untested_failures(&text.replace(test, "tested by hand")).len(), 1);
    assert_eq!(untested_failures(&text.replace("| what fails |", "| what breaks |")).len(), 1);
}

#[test]
fn readme_commands_do_what_it_says() {
    if !have(&[Need::Fuse, Need::Python]) {
        return;
    }
    // The two commands that everything begins with are pinned here: one runs below as part of
    // the steps, the other is what runs this test.
    let readme = read("README.md");
    let first: Vec<String> =
        console::steps(&readme, "console").into_iter().map(|s| s.command).take(2).collect();
    assert_eq!(first, ["export DATA=${DATA:-$HOME/data}    # any folder of yours", "make demo"]);
    let blocks: Vec<String> = console::blocks(&readme, "sh").into_iter().map(|(_, text)| text).collect();
    let [bucket, tests, cluster] = &blocks[..] else { panic!("{blocks:?}") };
    assert_eq!(tests, "make test\n");
    // `make accept-images` runs the images and what the chart renders.
    assert!(cluster.contains(" make image ") && cluster.contains("\nhelm install fletch "), "{cluster}");
    // `mount_command` runs this command with a bucket of its own.
    assert!(bucket.starts_with("make programs ") && bucket.contains("\nfletch mount s3://"), "{bucket}");
    assert!(!readme.contains("/usr/share"), "README's commands read a shared folder of the machine");
    let ci = fs::read_to_string(repo().join(".ci/run")).expect(".ci/run");
    assert!(ci.lines().any(|l| l == "exec make test"), ".ci/run calls README's test command");
    execute("README.md", &[]);
}

#[test]
fn how_to_serve_and_mount_does_what_it_says() {
    if have(&[Need::Fuse, Need::Python]) {
        execute("docs/howto/serve-and-mount.md", &[]);
    }
}

#[test]
fn how_to_mount_a_bucket_does_what_it_says() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let Some(store) = servers::s3("bucket") else { return };
    let (endpoint, dir) = (store.endpoint(), TempDir::with_prefix("fletch-bucket-").expect("scratch"));
    put_photos(&endpoint, dir.path());
    execute(
        "docs/howto/mount-a-bucket.md",
        &[
            ("DATA", "s3://bucket/photos"),
            ("AWS_ENDPOINT_URL", &endpoint),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
        ],
    );
}

#[test]
fn how_to_train_from_python_does_what_it_says() {
    shows_the_program("docs/howto/train-from-python.md", "train.py");
    if have(&[Need::Python, Need::Torch, Need::Images]) {
        execute("docs/howto/train-from-python.md", &[]);
    }
}

#[test]
fn how_to_find_why_a_job_waits_does_what_it_says() {
    if have(&[Need::Python, Need::Torch, Need::Images, Need::Prometheus, Need::Http]) {
        execute("docs/howto/why-does-my-job-wait.md", &[]);
    }
}

/// `BEFORE` names a folder with the programs of an earlier release, to upgrade from and to roll back to.
#[test]
fn how_to_back_up_and_upgrade_does_what_it_says() {
    let before = std::env::var("FLETCH_TEST_BEFORE").unwrap_or_default();
    execute("docs/howto/back-up-and-upgrade.md", &[("BEFORE", &before)]);
}

#[test]
fn how_to_warm_up_does_what_it_says() {
    execute("docs/howto/warm-up.md", &[]);
}

#[test]
fn how_to_serve_several_tenants_does_what_it_says() {
    execute("docs/howto/several-tenants.md", &[]);
}

#[test]
fn how_to_read_with_s3_clients_does_what_it_says() {
    execute("docs/howto/s3.md", &[]);
}

#[test]
fn how_to_use_tls_does_what_it_says() {
    execute("docs/howto/tls.md", &[]);
}

#[test]
fn how_to_see_what_the_cache_saves_does_what_it_says() {
    if have(&[Need::Fuse]) {
        execute("docs/howto/see-what-it-saves.md", &[]);
    }
}

/// Puts a dataset of 120 MB into a bucket: four times what the tutorial's server has in cache or memory.
fn put_photos(endpoint: &str, dir: &Path) {
    let credentials = dir.join("credentials");
    fs::write(&credentials, "[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
        .expect("write");
    let config = OriginConfig {
        prefix: "s3://bucket".to_owned(),
        endpoint: Some(endpoint.to_owned()),
        region: Some("us-east-1".to_owned()),
        credentials: Some(Credentials::File(credentials)),
        allow_http: true,
        ..OriginConfig::default()
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    let origins = Origins::new(vec![config], OriginLimits::default()).expect("origins");
    let origin = origins.open(&OriginUri::parse("s3://bucket/photos").expect("uri")).expect("open");
    runtime.block_on(async {
        for i in 0..800u64 {
            let mut bytes = vec![0; 150_000];
            ChaCha8Rng::seed_from_u64(i).fill_bytes(&mut bytes);
            let path = format!("class {}/{i:03}.jpg", i % 10);
            origin.put(&path, bytes.into(), PutMode::Overwrite).await.expect("put");
        }
    });
}

#[test]
fn the_tutorial_does_what_it_says() {
    shows_the_program("docs/TUTORIAL.md", "read.py");
    if !have(&[Need::Python, Need::Torch]) {
        return;
    }
    let Some(store) = servers::s3("bucket") else { return };
    let (endpoint, dir) = (store.endpoint(), TempDir::with_prefix("fletch-tutorial-").expect("scratch"));
    put_photos(&endpoint, dir.path());
    execute(
        "docs/TUTORIAL.md",
        &[
            ("DATA", "s3://bucket/photos"),
            ("ENDPOINT", &endpoint),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
        ],
    );
}

/// The server refuses a cache below 16 MiB, and a quarter of a small dataset is less.
#[test]
fn the_tutorial_gives_a_small_dataset_the_smallest_cache() {
    let page = read("docs/TUTORIAL.md");
    let size = page.split("--cache-size ").nth(1).and_then(|rest| rest.split(" --").next()).expect("a size");
    let given = |bytes: u64| {
        let out = shell("sh").args(["-c", &format!("BYTES={bytes}; echo {size}")]).output().expect("sh runs");
        String::from_utf8(out.stdout).expect("UTF-8").trim().parse::<u64>().expect("a number")
    };
    assert_eq!([1_000, 64 << 20, 400 << 20].map(given), [16 << 20, 16 << 20, 100 << 20]);
}

/// A tree that holds one of everything that SEMANTICS speaks of.
fn semantics_tree(dir: &Path) {
    let put = |p: &str, b: &[u8]| {
        let p = dir.join(p);
        fs::create_dir_all(p.parent().expect("parent")).expect("mkdir");
        fs::write(p, b).expect("write");
    };
    let bytes = |n: usize, seed: u64| {
        let mut b = vec![0; n];
        ChaCha8Rng::seed_from_u64(seed).fill_bytes(&mut b);
        b
    };
    put("README.txt", b"a small file\n");
    put("empty", b"");
    put("a/b/c/deep.bin", &bytes(300_000, 1));
    put("a/one.jpg", &bytes(110_000, 2));
    put("a/two.jpg", &bytes(131_072, 3));
    put("big.bin", &bytes(9_500_000, 4));
    put("odd names/with space", b"1");
    put("odd names/x#1", b"2");
    put("odd names/é", b"3");
    put("odd names/-dash", b"4");
    fs::create_dir_all(dir.join("void")).expect("mkdir");
    symlink("../README.txt", dir.join("a/link")).expect("symlink");
    symlink("nowhere", dir.join("dangling")).expect("symlink");
    let script = dir.join("run.sh");
    fs::write(&script, "#!/bin/sh\necho ran\n").expect("write");
}

/// Runs executable statements of SEMANTICS. Returns those that failed, with their output.
fn failed_statements(blocks: &[(usize, String)], variables: &[(&str, &Path)]) -> String {
    let mut faults = String::new();
    for (line, body) in blocks {
        let out = Command::new("bash")
            .args(["-euo", "pipefail", "-c", body])
            .envs(variables.iter().copied())
            .env("PATH", format!("{}:{}", bin_dir().display(), std::env::var("PATH").unwrap_or_default()))
            .stdin(Stdio::null())
            .output()
            .expect("bash");
        if !out.status.success() {
            faults.push_str(&format!(
                "docs/SEMANTICS.md:{line}: {}\n{body}{}{}\n",
                out.status,
                String::from_utf8_lossy(&out.stdout),
                String::from_utf8_lossy(&out.stderr)
            ));
        }
    }
    faults
}

fn semantics(info: &str) -> Vec<(usize, String)> {
    let text = fs::read_to_string(repo().join("docs/SEMANTICS.md")).expect("docs/SEMANTICS.md");
    console::blocks(&text, info)
}

#[test]
fn semantics_are_executed() {
    if !have(&[Need::Fuse, Need::Python]) {
        return;
    }
    let blocks = semantics("sh semantics");
    assert!(blocks.len() >= 10, "SEMANTICS has {} executable statements", blocks.len());
    let tree = TempDir::with_prefix("fletch-semantics-").expect("tree");
    semantics_tree(tree.path());
    let site = Site::start(&[]);
    let root = site.publish("known", tree.path());
    let mounted = site.mount("known", "semantics", &[]);
    let variables = [("MNT", &*mounted.dir), ("SRC", tree.path()), ("ROOT", Path::new(&root))];
    let faults = failed_statements(&blocks, &variables);
    assert!(faults.is_empty(), "{faults}");
    mounted.stop();
}

#[test]
fn semantics_are_executed_among_all_datasets() {
    if !have(&[Need::Fuse, Need::Root, Need::Python]) {
        return;
    }
    let tree = TempDir::with_prefix("fletch-semantics-").expect("tree");
    semantics_tree(tree.path());
    let site = Site::start(&[]);
    let root = site.publish("known", tree.path());
    let tables = site.place("tables-known");
    let tag = |tag: &str, to: &str| run(command("fletch").arg("tag").arg(&tables).args([tag, to]));
    // Another version, which has one more file.
    fs::write(tree.path().join("new.txt"), "new").expect("write");
    let other_root = index(tree.path(), &tables, &[]);
    fs::remove_file(tree.path().join("new.txt")).expect("remove");
    tag("stable", &root);
    tag("latest", &root);
    let dir = site.place("node").join("datasets");
    let log = site.place("logs").join("datasets");
    let mut c = command("fletch-mount");
    c.arg("--datasets").arg(&dir).args(["--server", &site.url, "--tags", "s*"]);
    c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&log).expect("log"));
    let mut daemon = Running::spawn("fletch-mount", &mut c);
    until("the datasets are mounted", Duration::from_secs(20), || {
        assert!(daemon.alive(), "{}", fs::read_to_string(&log).unwrap_or_default());
        dir.join("known/README.txt").exists()
    });
    let mounted = dir.join(".versions").join(&root);
    let variables = [
        ("MNT", &*mounted),
        ("SRC", tree.path()),
        ("ROOT", Path::new(&root)),
        ("DATASETS", &*dir),
        ("TABLES", &*tables),
        ("OTHER", Path::new(&other_root)),
    ];
    let faults = failed_statements(
        &[semantics("sh semantics"), semantics("sh semantics-datasets")].concat(),
        &variables,
    );
    daemon.signal(Signal::SIGTERM);
    let ended = daemon.wait(Duration::from_secs(11));
    assert!(faults.is_empty(), "{faults}");
    assert!(ended.success(), "{ended}: {}", fs::read_to_string(&log).unwrap_or_default());
}

#[test]
fn semantics_of_survival_are_executed() {
    if !have(&[Need::Fuse, Need::Resend, Need::Root, Need::Python]) {
        return;
    }
    let blocks = semantics("sh semantics-survival");
    assert_eq!(blocks.len(), 3, "S29, S30 and S31");
    // A reader that waits for ever is a fault.
    let timed = |(line, body)| (line, format!("timeout 60 bash -euo pipefail <<'BLOCK'\n{body}\nBLOCK\n"));
    let blocks: Vec<_> = blocks.into_iter().map(timed).collect();
    let tree = TempDir::with_prefix("fletch-semantics-").expect("tree");
    semantics_tree(tree.path());
    let site = Site::start(&[]);
    assert!(!site.publish("known", tree.path()).is_empty());
    let (dir, log) = (site.place("mnt"), site.place("logs").join("mount"));
    let words = ["known", "--io-timeout", "3s"];
    let mounted = Mounted::start_by(with_keeper(), &site.url, dir.clone(), &log, &words);
    let (server, keeper) = (site.pid().to_string(), mounted.pid().to_string());
    let variables = [
        ("MNT", &*dir),
        ("SRC", tree.path()),
        ("KEEPER", Path::new(&keeper)),
        ("SERVER", Path::new(&server)),
        ("URL", Path::new(&site.url)),
        ("FLETCH_STATE_DIR", &site.place("state-of-a-user")),
        ("FLETCH_CACHE_DIR", &site.place("cache-of-a-user")),
    ];
    let faults = failed_statements(&blocks, &variables);
    run(Command::new("umount").arg(&dir));
    assert!(faults.is_empty(), "{faults}{}", fs::read_to_string(&log).unwrap_or_default());
}

#[test]
fn readers_that_wait_go_on_as_the_runbook_says() {
    if !have(&[Need::Fuse, Need::Resend, Need::Root]) {
        return;
    }
    let tree = TempDir::with_prefix("fletch-runbook-").expect("tree");
    fs::write(tree.path().join("f"), "content").expect("write");
    let site = Site::start(&[]);
    assert!(!site.publish("known", tree.path()).is_empty());
    let (below, log) = (site.place("mounts"), site.place("logs").join("mount"));
    let (dir, socket) = (site.place("mounts/known"), site.place("keeper").join("socket"));
    let mut c = with_keeper();
    c.arg("--hold").arg(&socket).arg("--hold-below").arg(&below).stdout(Stdio::null()).stderr(Stdio::null());
    let mut keeper = Running::spawn("fletch-mount", &mut c);
    until("the keeper holds mounts", Duration::from_secs(10), || socket.exists());
    let words = ["known", "--io-timeout", "60s", "--keeper", &socket.display().to_string()];
    let mut mounted = Mounted::start_by(with_keeper(), &site.url, dir.clone(), &log, &words);
    mounted.daemon().signal(Signal::SIGKILL);
    mounted.daemon().wait(Duration::from_secs(10));
    let mut reader = Running::spawn("cat", Command::new("cat").arg(dir.join("f")).stdout(Stdio::null()));
    // The command of this machine.
    let start = site.place("bin").join("start");
    let script = format!(
        "#!/bin/sh\nexec {} known {} --server {} --keeper {} --io-timeout 60s --daemon --log-file {}\n",
        bin_dir().join("fletch-mount").display(),
        dir.display(),
        site.url,
        socket.display(),
        log.display()
    );
    fs::write(&start, script).expect("write");
    fs::set_permissions(&start, fs::Permissions::from_mode(0o755)).expect("chmod");
    let variables = [
        ("MOUNT_DIR", &*dir),
        ("MOUNT_LOG", &*log),
        ("FLETCH_SERVER", Path::new(&site.url)),
        ("START_MOUNT", &*start),
        ("FLETCH_STATE_DIR", &*site.place("state-of-a-user")),
        ("FLETCH_CACHE_DIR", &*site.place("cache-of-a-user")),
    ];
    let page = fs::read_to_string(repo().join("docs/runbooks/readers-wait.md")).expect("the runbook");
    let status = || {
        let status = run(with_keeper().arg("--status").arg(&dir));
        String::from_utf8_lossy(&status.stdout).into_owned()
    };
    assert!(status().contains("survives  waiting"), "{}", status());
    let diagnose = console::blocks(&page, "sh diagnose");
    let remedy = console::blocks(&page, "sh remedy");
    assert_eq!((diagnose.len(), remedy.len()), (1, 1));
    let faults = failed_statements(&diagnose, &variables);
    assert!(faults.is_empty() && reader.alive(), "the reader waits: {faults}");
    let faults = failed_statements(&remedy, &variables);
    assert!(faults.is_empty(), "{faults}");
    assert!(reader.wait(Duration::from_secs(10)).success());
    assert!(status().contains("survives  yes"), "{}", status());
    keeper.signal(Signal::SIGTERM);
    run(Command::new("umount").arg(&dir));
    assert!(keeper.wait(Duration::from_secs(10)).success());
}

fn leftovers(tmp: &Path) -> Vec<String> {
    let here: Vec<String> = fs::read_dir(tmp)
        .expect("tmp")
        .map(|e| e.expect("entry").file_name().to_string_lossy().into_owned())
        .collect();
    let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
    let here = here
        .into_iter()
        .chain(mounts.lines().filter(|l| l.contains(tmp.to_str().expect("utf-8"))).map(str::to_owned));
    here.collect()
}

fn demo(tree: &Path, tmp: &Path) -> Command {
    let mut c = shell("bash");
    c.arg(repo().join("tests/demo/demo.sh")).env("BIN", bin_dir()).env("DATA", tree).env("TMPDIR", tmp);
    c
}

#[test]
fn the_demo_compares_everything_and_leaves_nothing() {
    if !have(&[Need::Fuse, Need::Python]) {
        return;
    }
    let tree = TempDir::with_prefix("fletch-demo-tree-").expect("tree");
    semantics_tree(tree.path());
    let tmp = TempDir::with_prefix("fletch-demo-tmp-").expect("tmp");
    let out = run(&mut demo(tree.path(), tmp.path()));
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let value = |key: &str| {
        text.lines()
            .find_map(|l| l.trim().strip_prefix(key))
            .unwrap_or_else(|| panic!("no {key:?} in:\n{text}"))
            .trim()
            .to_owned()
    };
    assert!(value("files ").starts_with("11, "), "{text}");
    assert!(value("origin read").contains("= 1.000 x the dataset"), "{text}");
    assert!(value("find ").ends_with("0 bytes of data read from the origin"), "{text}");
    assert_eq!(leftovers(tmp.path()), Vec::<String>::new());
}

#[test]
fn the_demo_notices_a_wrong_byte() {
    if !have(&[Need::Fuse, Need::Python]) {
        return;
    }
    // The comparison itself must be able to fail: hand the reader a different original.
    let tree = TempDir::with_prefix("fletch-demo-tree-").expect("tree");
    let other = TempDir::with_prefix("fletch-demo-tree-").expect("tree");
    semantics_tree(tree.path());
    semantics_tree(other.path());
    fs::write(other.path().join("README.txt"), "a smalL file\n").expect("write");
    let tables = TempDir::with_prefix("fletch-demo-tables-").expect("tables");
    run(command("fletch")
        .arg("index")
        .arg(tree.path())
        .arg("--to")
        .arg(tables.path())
        .arg("--state-dir")
        .arg(tables.path()));
    let read = |original: &Path| {
        Command::new("python3")
            .arg(repo().join("tests/demo/reader.py"))
            .args([original, tree.path()])
            .arg(bin_dir().join("fletch"))
            .arg(tables.path())
            .arg(tables.path().join("out"))
            .output()
            .expect("python3")
    };
    assert!(read(tree.path()).status.success());
    let out = read(other.path());
    assert!(!out.status.success());
    assert!(String::from_utf8_lossy(&out.stderr).contains("README.txt"), "{out:?}");
}

#[test]
fn the_demo_leaves_nothing_after_ctrl_c() {
    if !have(&[Need::Fuse, Need::Python]) {
        return;
    }
    let tree = TempDir::with_prefix("fletch-demo-tree-").expect("tree");
    semantics_tree(tree.path());
    for after in ["1. index", "2. serve", "3. mount", "4. read", "find "] {
        let tmp = TempDir::with_prefix("fletch-demo-tmp-").expect("tmp");
        let said =
            tmp.path().parent().expect("parent").join(format!("fletch-demo-said-{}", std::process::id()));
        let mut c = demo(tree.path(), tmp.path());
        let log = fs::File::create(&said).expect("log");
        c.stderr(log.try_clone().expect("log")).stdout(log);
        // A group of its own, so that the whole of it gets the signal as from a terminal.
        std::os::unix::process::CommandExt::process_group(&mut c, 0);
        let mut child = Running::spawn("demo", &mut c);
        until("the demo is under way", Duration::from_secs(60), || {
            fs::read_to_string(&said).is_ok_and(|s| s.contains(after)) || !child.alive()
        });
        let group = nix::unistd::Pid::from_raw(i32::try_from(child.pid()).expect("pid"));
        let sent = nix::sys::signal::killpg(group, Signal::SIGINT);
        let status = child.wait(Duration::from_secs(40));
        let text = fs::read_to_string(&said).expect("log");
        fs::remove_file(&said).expect("log");
        if sent.is_ok() && status.code() != Some(0) {
            assert_eq!(status.code(), Some(130), "after {after:?}:\n{text}");
        }
        assert_eq!(leftovers(tmp.path()), Vec::<String>::new(), "{after}");
    }
}
