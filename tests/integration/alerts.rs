//! The alerts of the chart and their runbooks: the rules and their unit tests hold, every diagnostic command
//! of a runbook runs, and remedies end the alerts of a real server.
//!
//! A seeded alert: a server, a mount or a disk is put into the state of the alert. A Prometheus with the
//! chart's rules finds the alert's expression true. Then the test runs the runbook's remedy, as it is written
//! there, and the expression becomes false. The windows of expressions are shortened to seconds.
//!
//! `make accept-alerts` runs all of them; `make test` leaves out those that take longest.

use fletch_api::{BatchTimes, OrderKind, PlanSpec, StartJob, Visitation, WorldSpec};
use fletch_client::{Client, ClientConfig, Endpoint, epochs::Next};
use fletch_core::plan::Tail;
use fletch_tests::{
    bins::{repo, run},
    console::blocks,
    monitored::{NodeMounts, Service, ask, run_block},
    prometheus::Prometheus,
    require::{Need, have},
    watch::until,
};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use tempfile::TempDir;

const SET: &str = "set";
const JOB: &str = "train";
/// Stands for the windows of minutes and hours in expressions.
const WINDOW: &str = "6s";
const SOON: Duration = Duration::from_secs(40);

/// Whether the scenarios run that take longest.
fn is_full() -> bool {
    let full = std::env::var("FLETCH_ALERTS").is_ok_and(|v| v == "full");
    if !full {
        eprintln!("SKIPPED: `make accept-alerts` runs this scenario");
    }
    full
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

/// A directory with files of different content.
fn tree(files: u64, len: usize) -> TempDir {
    let dir = TempDir::with_prefix("fletch-alerts-").expect("scratch");
    for i in 0..files {
        fs::write(dir.path().join(format!("f{i:03}")), bytes(i, len)).expect("file");
    }
    dir
}

fn runbook(alert: &str) -> String {
    let at = repo().join(format!("docs/runbooks/{alert}.md"));
    fs::read_to_string(&at).unwrap_or_else(|e| panic!("{}: {e}", at.display()))
}

/// A service with a dataset, and its Prometheus.
struct Stage {
    prometheus: Prometheus,
    mounts: Option<NodeMounts>,
    service: Service,
    data: TempDir,
    root: String,
    /// Variables of the runbook beside those that every stage has.
    variables: Vec<(&'static str, String)>,
}

impl Stage {
    fn start(cache: &str, data: TempDir, with_mounts: bool) -> Stage {
        let service = Service::start(cache, "");
        let root = service.publish(SET, &data.path().display().to_string(), None);
        let mounts = with_mounts.then(|| NodeMounts::start(&service));
        let mut targets = vec![("fletch", service.url.as_str())];
        targets.extend(mounts.iter().map(|m| ("fletch-mounts", m.metrics.as_str())));
        let prometheus = Prometheus::watch(&targets, "");
        Stage { prometheus, mounts, service, data, root, variables: Vec::new() }
    }

    fn run(&self, block: &str) -> (String, bool) {
        let text = |path: PathBuf| path.display().to_string();
        let service = &self.service;
        let mut all = vec![
            ("FLETCH_SERVER", service.url.clone()),
            ("PROMETHEUS", self.prometheus.url().to_owned()),
            ("DATASET", SET.to_owned()),
            ("UNUSED_DATASET", SET.to_owned()),
            ("JOB", JOB.to_owned()),
            ("LOG", text(service.path("server.log"))),
            ("CONFIG", text(service.config())),
            ("CACHE_DIR", text(service.path("cache"))),
            ("START_SERVER", text(service.path("start"))),
            ("RESTART_SERVER", text(service.path("restart"))),
            ("DATA", text(self.data.path().to_owned())),
            ("TABLES", text(service.path("tables-set"))),
            ("FLETCH_STATE_DIR", text(service.place("user-state"))),
        ];
        all.extend(self.mounts.iter().map(|m| ("MOUNT_METRICS", format!("{}/metrics", m.metrics))));
        all.extend(self.variables.iter().cloned());
        let all: Vec<_> = all.iter().map(|(name, value)| (*name, value.as_str())).collect();
        run_block(block, &all)
    }

    /// Runs the blocks of a runbook with an info string. Returns how many there are.
    fn run_all(&self, alert: &str, info: &str) -> usize {
        let blocks = blocks(&runbook(alert), info);
        for (line, block) in &blocks {
            let (printed, succeeded) = self.run(block);
            eprintln!("--- {alert}.md:{line}\n{printed}");
            assert!(succeeded, "docs/runbooks/{alert}.md:{line} failed:\n{block}\n{printed}");
        }
        blocks.len()
    }

    fn is_true(&self, alert: &str) -> bool {
        !ask(&self.prometheus, alert, WINDOW).is_empty()
    }

    fn becomes_true(&self, alert: &str) {
        until(&format!("{alert} is true"), SOON, || self.is_true(alert));
    }

    /// Diagnoses an alert that is true, runs the remedy of its runbook, and waits until it is false.
    fn remedy(&self, alert: &str) {
        assert!(self.run_all(alert, "sh diagnose") > 0);
        assert!(self.run_all(alert, "sh remedy") > 0, "{alert} has no remedy");
        until(&format!("{alert} is false"), SOON, || !self.is_true(alert));
    }

    /// Fetches a file with curl. Returns whether the server delivered it.
    fn get(&self, name: &str) -> bool {
        let mut c = Command::new("curl");
        c.args(["-s", "--fail", "--max-time", "20", "-o", "/dev/null"]);
        let url = format!("{}/v1/versions/{}/files/{name}", self.service.url, self.root);
        c.arg(url).status().expect("curl").success()
    }
}

/// Trains an epoch.
fn train(url: &str) {
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    runtime.block_on(async {
        let endpoint: Endpoint = url.parse().expect("url");
        let client = Client::new(ClientConfig::new(endpoint, "loader")).expect("client");
        let job = StartJob {
            name: JOB.parse().expect("name"),
            dataset: Some(SET.parse().expect("name")),
            version: None,
            root: None,
            layout: None,
            seed: Some(7),
            order: OrderKind::Substitute,
            buckets: None,
            replay: None,
            plan: PlanSpec::default(),
            world: WorldSpec { ranks: 1, batch: 2, tail: Tail::Keep },
            visitation: Visitation::ExactlyOnce,
        };
        let job = client.declare(&job).await.expect("declared");
        let mut reader = job.reader(0, 0, 0).patience(Duration::from_secs(60));
        loop {
            match reader.next(2).await.expect("a lease") {
                Next::Batch(batch) => {
                    let times = BatchTimes { entries: 2, stepped_ns: 1_000_000, ..BatchTimes::default() };
                    job.ack(0, 0, &[batch.token.ack(times)]).await.expect("acknowledged");
                    job.held().release(0, 0, batch.token.lease);
                }
                Next::Full | Next::Last => tokio::time::sleep(Duration::from_millis(20)).await,
                Next::Done => return,
            }
        }
    });
}

#[test]
fn the_rules_and_their_unit_tests_hold() {
    if !have(&[Need::Prometheus]) {
        return;
    }
    let files = |dir: &str| {
        let found = fs::read_dir(repo().join(dir)).unwrap_or_else(|e| panic!("{dir}: {e}"));
        let mut found: Vec<PathBuf> = found.map(|e| e.expect("entry").path()).collect();
        found.retain(|p| p.extension().is_some_and(|x| x == "yaml"));
        found.sort();
        found
    };
    run(Command::new("promtool").args(["check", "rules"]).args(files("helm/fletch/rules")));
    let tests = files("tests/alerts");
    let out = run(Command::new("promtool").args(["test", "rules"]).args(&tests));
    assert_eq!(String::from_utf8_lossy(&out.stdout).matches("SUCCESS").count(), tests.len());
    for test in &tests {
        let text = fs::read_to_string(test).expect("test");
        assert!(text.contains("exp_labels") && text.contains("exp_alerts: []"), "{}", test.display());
    }
}

#[test]
fn a_wrong_expectation_of_an_alert_is_noticed() {
    if !have(&[Need::Prometheus]) {
        return;
    }
    let at = repo().join("tests/alerts/FletchOriginErrors.yaml");
    let text = fs::read_to_string(at).expect("test").replace("../..", &repo().display().to_string());
    let dir = TempDir::with_prefix("fletch-alerts-").expect("scratch");
    let passes = |text: &str| {
        let file = dir.path().join("t.yaml");
        fs::write(&file, text).expect("write");
        Command::new("promtool")
            .args(["test", "rules"])
            .arg(file)
            .output()
            .expect("promtool")
            .status
            .success()
    };
    assert!(passes(&text));
    assert!(!passes(&text.replacen("fails", "succeeds", 1)), "another summary");
    assert!(!passes(&text.replacen("0x5 1x60", "0x65", 1)), "an origin that never fails");
}

#[test]
fn every_diagnostic_command_runs() {
    if !have(&[Need::Prometheus, Need::Fuse, Need::Root]) {
        return;
    }
    // A file system of its own, which `du` walks quickly.
    let scratch = TempDir::with_prefix("fletch-alerts-disk-").expect("scratch");
    let disk = Disk::new(&scratch.path().join("disk"), "100m");
    let cache = disk.0.join("cache").display().to_string();
    let mut stage = Stage::start(&format!("dir = \"{cache}\"\nsize = \"64MiB\"\n"), tree(24, 20_000), true);
    stage.variables.push(("CACHE_DIR", cache));
    assert!(stage.get("f000"));
    let alerts = stage.prometheus.alerts();
    assert_eq!(alerts.len(), 20, "{:?}", alerts.keys());
    for alert in alerts.keys() {
        let found = ask(&stage.prometheus, alert, WINDOW);
        assert!(found.is_empty(), "{alert} on a healthy machine: {found:?}");
    }
    train(&stage.service.url);
    for alert in alerts.keys() {
        assert!(stage.run_all(alert, "sh diagnose") > 0, "{alert} has no diagnostic command");
        // Nothing but these two kinds of commands, and settings.
        let all = runbook(alert).matches("\n```sh").count();
        let known = runbook(alert).matches("\n```sh diagnose").count()
            + runbook(alert).matches("\n```sh remedy").count();
        assert_eq!(all, known, "{alert}");
    }
    // What a stalled job can be given.
    assert!(stage.run_all("FletchJobStalled", "sh remedy") > 0);
}

#[test]
fn a_server_that_stopped_is_started_again() {
    if !have(&[Need::Prometheus, Need::Fuse, Need::Root]) || !is_full() {
        return;
    }
    let stage = Stage::start("size = \"64MiB\"\n", tree(4, 20_000), true);
    let dir = stage.mounts.as_ref().expect("mounts").dir.join(SET);
    assert!(!stage.is_true("FletchMountBroken") && !stage.is_true("FletchScrapeDown"));
    stage.service.call("stop");
    // A reader finds out that the server is gone.
    fs::read(dir.join("f000")).expect_err("nothing is cached");
    stage.becomes_true("FletchScrapeDown");
    stage.becomes_true("FletchMountBroken");
    stage.remedy("FletchMountBroken");
    until("FletchScrapeDown is false", SOON, || !stage.is_true("FletchScrapeDown"));
    until("the mount reads again", SOON, || fs::read(dir.join("f000")).is_ok_and(|b| b == bytes(0, 20_000)));
    // The other runbook has the same remedy.
    stage.service.call("stop");
    stage.becomes_true("FletchScrapeDown");
    stage.remedy("FletchScrapeDown");
}

/// A file system in memory that is unmounted when dropped.
struct Disk(PathBuf);

impl Disk {
    fn new(at: &Path, size: &str) -> Disk {
        fs::create_dir_all(at).expect("mkdir");
        let options = format!("size={size},mode=0755");
        mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::empty(), Some(options.as_str())).expect("tmpfs");
        Disk(at.to_owned())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(e) = umount2(&self.0, MntFlags::MNT_DETACH) {
            eprintln!("{} stays mounted: {e}", self.0.display());
        }
    }
}

#[test]
fn a_disk_that_is_full_or_read_only_is_repaired() {
    if !have(&[Need::Prometheus, Need::Root]) {
        return;
    }
    let scratch = TempDir::with_prefix("fletch-alerts-disk-").expect("scratch");
    let disk = Disk::new(&scratch.path().join("disk"), "64m");
    let cache = disk.0.join("cache");
    let settings = format!("dir = \"{}\"\nsize = \"32MiB\"\n", cache.display());
    let mut stage = Stage::start(&settings, tree(60, 100_000), false);
    stage.variables.push(("CACHE_DIR", cache.display().to_string()));
    // Somebody else fills the file system.
    let others = disk.0.join("somebody-elses");
    fs::create_dir(&others).expect("mkdir");
    stage.variables.push(("OTHER_FILES", others.display().to_string()));
    let mut filler = Command::new("dd");
    filler.arg("if=/dev/zero").arg(format!("of={}", others.join("large").display())).arg("bs=1M");
    assert!(!filler.output().expect("dd").status.success(), "dd did not fill it");
    for i in 0..20 {
        assert!(stage.get(&format!("f{i:03}")), "a full disk costs no read");
    }
    stage.becomes_true("FletchCacheFull");
    stage.remedy("FletchCacheFull");
    // The file system is read-only when the server starts next.
    stage.service.call("stop");
    let remount =
        |flags| mount(None::<&str>, &disk.0, None::<&str>, MsFlags::MS_REMOUNT | flags, None::<&str>);
    remount(MsFlags::MS_RDONLY).expect("read-only");
    stage.service.call("start");
    stage.becomes_true("FletchDiskFailing");
    assert!(stage.get("f030"), "a disk that does not work costs no read");
    stage.remedy("FletchDiskFailing");
    stage.service.call("stop");
}

#[test]
fn a_dataset_that_moved_is_registered_anew() {
    if !have(&[Need::Prometheus]) || !is_full() {
        return;
    }
    let mut stage = Stage::start("size = \"64MiB\"\n", tree(20, 20_000), false);
    assert!(stage.get("f000") && !stage.is_true("FletchOriginErrors"));
    let new = TempDir::with_prefix("fletch-alerts-").expect("scratch");
    let place = new.path().join("moved");
    fs::rename(stage.data.path(), &place).expect("moved");
    stage.variables.push(("NEW_PLACE", place.display().to_string()));
    stage.variables.push(("DATA", place.display().to_string()));
    assert!(!stage.get("f010"), "it is gone");
    stage.becomes_true("FletchOriginErrors");
    stage.remedy("FletchOriginErrors");
    assert!(stage.get("f010"));
}

#[test]
fn a_dataset_that_was_changed_is_indexed_anew() {
    if !have(&[Need::Prometheus]) || !is_full() {
        return;
    }
    let mut stage = Stage::start("size = \"64MiB\"\n", tree(20, 20_000), false);
    assert!(stage.get("f000") && !stage.is_true("FletchWrongBytes"));
    fs::write(stage.data.path().join("f010"), bytes(99, 20_000)).expect("changed");
    assert!(!stage.get("f010"), "wrong bytes were delivered");
    stage.becomes_true("FletchWrongBytes");
    stage.remedy("FletchWrongBytes");
    // The new version has the new bytes.
    let shown = run(fletch_tests::bins::command("fletch")
        .arg("show")
        .arg(stage.service.path("tables-set"))
        .arg("--json"));
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).expect("JSON");
    stage.root = shown["root"].as_str().expect("root").to_owned();
    assert!(stage.get("f010"));
}

#[test]
fn a_cache_that_thrashes_gets_another_policy() {
    if !have(&[Need::Prometheus]) || !is_full() {
        return;
    }
    // More than memory and disk hold together.
    let settings = "size = \"48MiB\"\npolicy = \"lru\"\n[memory]\nmax = \"64MiB\"\n";
    let stage = Stage::start(settings, tree(130, 1 << 20), false);
    let pass = || {
        for i in 0..130 {
            assert!(stage.get(&format!("f{i:03}")));
        }
    };
    let alert = "FletchThrashing";
    let ask = || ask(&stage.prometheus, alert, "20s");
    pass();
    // Prometheus extrapolates a rise to the ends of its window: by little, once it has several samples.
    std::thread::sleep(Duration::from_secs(6));
    assert!(ask().is_empty(), "a first pass is no thrashing");
    (0..3).for_each(|_| pass());
    until("FletchThrashing is true", SOON, || !ask().is_empty());
    assert!(stage.run_all(alert, "sh diagnose") > 0);
    assert!(stage.run_all(alert, "sh remedy") > 0);
    (0..4).for_each(|_| pass());
    until("FletchThrashing is false", SOON, || {
        pass();
        ask().is_empty()
    });
    let saved = stage.prometheus.query("sum(fletch_avoided_bytes_total)", None);
    assert!(saved.values().any(|n| *n > 1e7), "the cache saves something now: {saved:?}");
}
