//! `fletch-mount --datasets`: all datasets of a server below one directory, with real mounts.
//!
//! `make accept-datasets-mount` lists 200 datasets of 10,000 files; by default the test has 12 of 300.

use fletch_core::Hash;
use fletch_testkit::scripted::{ScriptedServer, answer, header};
use fletch_testkit::tls;
use fletch_tests::bins::{Running, command, run, stdout, with_keeper};
use fletch_tests::fixture::{Site, files, index};
use fletch_tests::prometheus::free_port;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::{peak_rss, until};
use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::Signal;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A daemon with `--datasets`. Dropping it ends the daemon and unmounts everything.
struct Datasets {
    daemon: Running,
    dir: PathBuf,
    log: PathBuf,
    ready: PathBuf,
}

/// How soon the daemon follows the server.
const SOON: Duration = Duration::from_secs(10);

impl Datasets {
    fn start(site: &Site, place: &str, more: &[&str]) -> Self {
        let (dir, log) = (site.place(place).join("datasets"), site.place("logs").join(place));
        let ready = site.place("ready-files").join(place);
        let daemon = Datasets::spawn(site, &dir, &log, &ready, more);
        Datasets { daemon, dir, log, ready }
    }

    fn spawn(site: &Site, dir: &Path, log: &Path, ready: &Path, more: &[&str]) -> Running {
        let mut c = command("fletch-mount");
        c.arg("--datasets").arg(dir).args(["--server", &site.url, "--interval", "1s", "--allow-other"]);
        c.arg("--ready-file").arg(ready).args(more);
        c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(log).expect("log"));
        let mut daemon = Running::spawn("fletch-mount", &mut c);
        let text = || fs::read_to_string(log).unwrap_or_default();
        until("the daemon is ready", Duration::from_secs(20), || {
            assert!(daemon.alive(), "the daemon ended: {}", text());
            // A killed daemon leaves its ready file.
            ready.exists() && text().contains("mounted ")
        });
        daemon
    }

    /// Kills the daemon with SIGKILL.
    fn kill(&mut self) {
        self.daemon.signal(Signal::SIGKILL);
        self.daemon.wait(SOON);
    }

    /// Starts a new daemon in the place of one that was killed.
    fn restart(&mut self, site: &Site) {
        self.daemon = Datasets::spawn(site, &self.dir, &self.log, &self.ready, &[]);
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Returns the names below the directory.
    fn names(&self) -> Vec<String> {
        let all = fs::read_dir(&self.dir).expect("the directory").flatten();
        let mut names: Vec<String> = all.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.retain(|name| name != ".versions");
        names.sort();
        names
    }

    fn has(&self, names: &[&str]) {
        until(&format!("{names:?} are shown"), SOON, || self.names() == names);
    }

    /// Ends the daemon with SIGTERM, and checks that it leaves a closed directory.
    fn stop(mut self) {
        self.daemon.signal(Signal::SIGTERM);
        let status = self.daemon.wait(Duration::from_secs(26));
        assert!(status.success(), "{status}: {}", self.log());
        assert!(mounts_below(&self.dir).is_empty(), "{:?}", mounts_below(&self.dir));
        let mode = fs::metadata(&self.dir).expect("the directory").permissions().mode() & 0o777;
        assert_eq!((mode, self.names()), (0, vec!["NOT-MOUNTED".to_owned()]));
        assert!(!self.ready.exists(), "the ready file stays");
    }
}

impl Drop for Datasets {
    fn drop(&mut self) {
        self.daemon.signal(Signal::SIGTERM);
        self.daemon.wait(Duration::from_secs(26));
        while !mounts_below(&self.dir).is_empty() {
            umount2(&self.dir, MntFlags::MNT_DETACH).expect("detached");
        }
    }
}

/// Returns the mount points at and below a directory.
fn mounts_below(dir: &Path) -> Vec<String> {
    let table = fs::read_to_string("/proc/self/mounts").expect("the mount table");
    let points = table.lines().filter_map(|line| line.split(' ').nth(1));
    points.filter(|point| Path::new(point).starts_with(dir)).map(str::to_owned).collect()
}

fn write_files(tree: &Path, seed: u8, count: u8) {
    fs::create_dir_all(tree.join("sub")).expect("mkdir");
    for i in 0..count {
        fs::write(tree.join(format!("sub/{i}.bin")), vec![seed.wrapping_add(i); 20_000]).expect("write");
    }
}

/// Returns the hash of each file of a tree.
fn content(tree: &Path) -> BTreeMap<PathBuf, String> {
    let hash = |rel: &PathBuf| Hash::of(&fs::read(tree.join(rel)).expect("read")).to_string();
    files(tree).into_iter().map(|rel| (rel.clone(), hash(&rel))).collect()
}

fn fletch(site: &Site, args: &[&str]) -> String {
    stdout(&run(command("fletch").args(args).args(["--server", &site.url])))
}

#[test]
fn datasets_come_and_go_and_a_link_follows_latest() {
    if !have(&[Need::Fuse, Need::Root]) {
        return;
    }
    let site = Site::start(&["--cache-size", "64MiB", "--cache-free-floor", "0"]);
    let data = site.place("data");
    let (one, two) = (data.join("one"), data.join("two"));
    write_files(&one, 1, 20);
    write_files(&two, 50, 10);
    drop(site.publish("one", &one));
    let cache = site.place("node").display().to_string();
    let more = ["--tags", "v*", "--cache-size", "64MiB", "--cache-free-floor", "0", "--cache-dir", &cache];
    let all = Datasets::start(&site, "node-a", &more);
    assert_eq!(all.names(), ["one"]);
    assert_eq!(content(&all.dir.join("one")), content(&one));

    drop(site.publish("two", &two));
    all.has(&["one", "two"]);
    assert_eq!(content(&all.dir.join("two")), content(&two));

    // The version that `latest` leaves has another tag, so it stays by that name.
    let old = content(&one);
    let (first, tables) = (fs::read_link(all.dir.join("one")).expect("a link"), site.place("tables-one"));
    run(command("fletch").args(["tag", &tables.display().to_string(), "v1", "latest"]));
    all.has(&["one", "one@v1", "two"]);
    let held = fs::File::open(all.dir.join("one/sub/7.bin")).expect("open");
    write_files(&one, 200, 21);
    // Files were changed in place, so what is not cached of the old version is gone. Read it first.
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = vec![first.clone()];
            let mut is_last = false;
            while !is_last {
                // One look more after the link moved.
                is_last = stop.load(Ordering::Relaxed);
                let to = fs::read_link(all.dir.join("one")).expect("the link is always there");
                if seen.last() != Some(&to) {
                    seen.push(to);
                }
            }
            seen
        });
        drop(index(&one, &tables, &[]));
        until("the link moved", SOON, || fs::read_link(all.dir.join("one")).is_ok_and(|to| to != first));
        stop.store(true, Ordering::Relaxed);
        assert_eq!(reader.join().expect("the reader").len(), 2, "the old version, then the new one");
    });
    assert_eq!(content(&all.dir.join("one")), content(&one));
    assert_eq!(content(&all.dir.join("one@v1")), old, "the old version goes on");
    let mut byte = [0];
    std::os::unix::fs::FileExt::read_at(&held, &mut byte, 0).expect("an open file goes on");
    assert_eq!(byte, [8]);

    fletch(&site, &["unregister", "one"]);
    all.has(&["two"]);
    let gone = || std::os::unix::fs::FileExt::read_at(&held, &mut [0], 0).err();
    until("the open file fails", SOON, || gone().is_some());
    assert_eq!(content(&all.dir.join("two")), content(&two));
    all.stop();
}

#[test]
fn a_dataset_with_the_name_of_the_closed_file_is_left_out_and_logged_once() {
    if !have(&[Need::Fuse, Need::Root]) {
        return;
    }
    let site = Site::start(&["--cache-size", "0"]);
    let tree = site.place("data");
    write_files(&tree, 1, 2);
    for name in ["one", "NOT-MOUNTED"] {
        drop(site.publish(name, &tree));
    }
    let all = Datasets::start(&site, "node", &[]);
    assert_eq!(all.names(), ["one"]);
    let lines = || all.log().lines().filter(|line| line.contains("dataset NOT-MOUNTED")).count();
    assert_eq!(lines(), 1, "{}", all.log());
    // Several passes later.
    drop(site.publish("two", &tree));
    all.has(&["one", "two"]);
    assert_eq!(lines(), 1, "{}", all.log());
    all.stop();
}

#[test]
fn a_killed_daemon_leaves_errors_and_the_next_one_serves_again() {
    if !have(&[Need::Fuse, Need::Root]) {
        return;
    }
    let site = Site::start(&["--cache-size", "64MiB", "--cache-free-floor", "0"]);
    let tree = site.place("data");
    write_files(&tree, 1, 10);
    drop(site.publish("d", &tree));
    let mut all = Datasets::start(&site, "node", &[]);
    let shown = all.dir.join("d");
    assert_eq!(content(&shown), content(&tree));

    // A second daemon leaves the directory alone.
    let mut c = command("fletch-mount");
    c.arg("--datasets").arg(&all.dir).args(["--server", &site.url]);
    let refused = c.output().expect("runs");
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && why.contains("served by another fletch-mount"), "{why}");

    // A listing fails or is whole; it is never empty.
    let list = || -> std::io::Result<usize> {
        fs::read_dir(&shown)?.collect::<std::io::Result<Vec<_>>>().map(|all| all.len())
    };
    for _ in 0..2 {
        all.kill();
        assert_eq!(nix::sys::statvfs::statvfs(&shown).err(), Some(Errno::ENOTCONN));
        for _ in 0..20 {
            match list() {
                // From the kernel's cache.
                Ok(entries) => assert_eq!(entries, 1, "the whole listing"),
                Err(e) => assert_eq!(e.raw_os_error(), Some(Errno::ENOTCONN as i32)),
            }
        }
        assert!(fs::read(shown.join("sub/not-seen-before")).is_err());
        all.restart(&site);
        assert_eq!(content(&shown), content(&tree));
        assert!(all.log().contains("detached what a dead fletch-mount left"), "{}", all.log());
    }

    // Another program unmounts a version: the daemon mounts it again.
    let version = fs::canonicalize(&shown).expect("a link");
    umount2(&version, MntFlags::empty()).expect("unmounted");
    until("it is mounted again", SOON, || shown.join("sub").exists());
    assert_eq!(content(&shown), content(&tree));

    // A busy mount delays the stop by the grace time only.
    let busy = fs::File::open(shown.join("sub/1.bin")).expect("open");
    all.stop();
    assert_eq!(nix::sys::statvfs::fstatvfs(&busy).err(), Some(Errno::ENOTCONN));

    // Another user cannot list the closed directory.
    let dir = site.place("node").join("datasets");
    let mut c = std::process::Command::new("setpriv");
    c.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--", "ls"]).arg(&dir);
    let listed = c.output().expect("runs");
    assert!(!listed.status.success(), "{}", String::from_utf8_lossy(&listed.stdout));
}

#[test]
fn versions_beyond_the_limit_are_named_and_mounted_when_there_is_room() {
    if !have(&[Need::Fuse, Need::Root]) {
        return;
    }
    let site = Site::start(&["--cache-size", "64MiB", "--cache-free-floor", "0"]);
    let data = site.place("data");
    for (name, seed) in [("a", 1), ("b", 2)] {
        write_files(&data.join(name), seed, 3);
        drop(site.publish(name, &data.join(name)));
    }
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").expect("bind").local_addr().expect("address").port();
    let page = format!("127.0.0.1:{port}");
    let all = Datasets::start(&site, "node", &["--mounts-max", "1", "--metrics-listen", &page]);
    assert_eq!(all.names(), ["a"]);
    assert!(
        all.log().contains("--mounts-max is reached") && all.log().contains("names=\"b\""),
        "{}",
        all.log()
    );
    let metrics =
        || stdout(&run(std::process::Command::new("curl").args(["-sS", &format!("{page}/metrics")])));
    assert!(metrics().contains("fletch_mount_datasets{state=\"over_limit\"} 1"), "{}", metrics());
    until("status names it", SOON, || {
        let status = fletch(&site, &["status"]);
        status.lines().any(|line| line.contains("datasets/b") && line.contains("--mounts-max 1 is reached"))
    });

    // A new version of `a` does not fit either: its link stays. Then `a` goes, and `b` fits.
    let (first, tables) = (fs::read_link(all.dir.join("a")).expect("a link"), site.place("tables-a"));
    write_files(&data.join("a"), 9, 4);
    drop(index(&data.join("a"), &tables, &[]));
    until("both are over the limit", SOON, || {
        metrics().contains("fletch_mount_datasets{state=\"over_limit\"} 2")
    });
    assert_eq!(fs::read_link(all.dir.join("a")).expect("a link"), first);
    fletch(&site, &["unregister", "a"]);
    all.has(&["b"]);
    assert_eq!(content(&all.dir.join("b")), content(&data.join("b")));
    assert!(metrics().contains("fletch_mount_versions_mounted 1"), "{}", metrics());
    all.stop();
}

#[test]
fn a_domain_sees_its_own_datasets_only() {
    if !have(&[Need::Fuse, Need::Root]) {
        return;
    }
    let home = TempDir::with_prefix("fletch-datasets-").expect("home");
    let tokens = home.path().join("tokens.toml");
    let token = |tenant: &str| -> PathBuf {
        let mut c = command("fletch-server");
        c.args(["token", "new", "--tenant", tenant, "--append"]).arg(&tokens);
        let at = home.path().join(tenant);
        fs::write(&at, stdout(&run(&mut c))).expect("token");
        at
    };
    let (a, b) = (token("a"), token("b"));
    let (data, tables) = (home.path().join("data"), home.path().join("tables"));
    write_files(&data, 1, 3);
    fs::create_dir(&tables).expect("mkdir");
    let root = index(&data, &tables, &[]);
    let dirs = format!("{}=*:{}=*", data.display(), tables.display());
    let site = Site::start(&["--auth-tokens", tokens.to_str().expect("utf-8"), "--local-dirs", &dirs]);
    let register = |name: &str, token: &Path| {
        let (uri, at) = (data.display().to_string(), tables.display().to_string());
        let token = token.display().to_string();
        fletch(&site, &["register", name, &uri, "--tables", &at, "--token-file", &token]);
    };
    register("of-a", &a);
    let path = |token: &Path| token.display().to_string();
    let (of_a, of_b) = (
        Datasets::start(&site, "node-a", &["--token-file", &path(&a)]),
        Datasets::start(&site, "node-b", &["--token-file", &path(&b)]),
    );
    assert_eq!(of_a.names(), ["of-a"]);
    register("of-b", &b);
    of_b.has(&["of-b"]);
    assert_eq!(of_a.names(), ["of-a"]);
    assert_eq!(content(&of_b.dir.join("of-b")), content(&data), "the same version in both domains");
    fletch(&site, &["unregister", "of-b", "--token-file", &path(&b)]);
    of_b.has(&[]);
    let version = of_b.dir.join(".versions").join(&root);
    until("the version is gone in this domain", SOON, || fs::read(version.join("sub/1.bin")).is_err());
    assert_eq!(content(&of_a.dir.join("of-a")), content(&data));

    // A token that the server does not know: the daemon ends, and the directory is closed.
    let wrong = home.path().join("wrong");
    fs::write(&wrong, "fletch_wrong").expect("write");
    let mut c = command("fletch-mount");
    let dir = site.place("node-c").join("datasets");
    c.arg("--datasets").arg(&dir).args(["--server", &site.url]).arg("--token-file").arg(&wrong);
    assert_eq!(c.output().expect("runs").status.code(), Some(5));
    assert_eq!(fs::metadata(&dir).expect("the directory").permissions().mode() & 0o777, 0);

    // The same for a process that takes over what an earlier one showed: it stays, and so do the names.
    let (changing, ready) = (home.path().join("changing"), site.place("ready-files").join("node-d"));
    fs::copy(&a, &changing).expect("copy");
    let dir = site.place("node-d").join("datasets");
    let mut c = with_keeper();
    c.arg("--datasets").arg(&dir).args(["--server", &site.url, "--interval", "1s"]);
    c.arg("--token-file").arg(&changing).arg("--ready-file").arg(&ready);
    let log = fs::File::create(site.place("logs").join("node-d")).expect("log");
    let mut keeper = Running::spawn("fletch-mount", c.stdout(Stdio::null()).stderr(log));
    until("the daemon is ready", SOON, || ready.exists());
    fs::write(&changing, "fletch_wrong").expect("write");
    let children = format!("/proc/{0}/task/{0}/children", keeper.pid());
    let worker = || fs::read_to_string(&children).expect("children").trim().parse().ok();
    let first: i32 = worker().expect("a worker");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(first), Signal::SIGKILL).expect("kill");
    until("another one runs", SOON, || worker().is_some_and(|next: i32| next != first));
    let second = worker();
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(worker(), second, "it stays");
    assert!(keeper.alive() && dir.join("of-a").is_symlink());
    fs::copy(&a, &changing).expect("copy");
    until("the token is right", SOON, || fs::read(dir.join("of-a/sub/1.bin")).is_ok());
    assert_eq!(content(&dir.join("of-a")), content(&data));
    keeper.signal(Signal::SIGTERM);
    assert!(keeper.wait(Duration::from_secs(26)).success());
}

/// Returns the numbers of datasets and of files in each: those of the accept target, or a few.
#[test]
fn a_node_has_its_label_while_all_datasets_are_mounted() {
    if !have(&[Need::Fuse, Need::Root]) {
        return;
    }
    let api = ScriptedServer::start_tls(|head| match header(head, "authorization") {
        Some("Bearer of-the-pod") => answer("200 OK", &[], b"{}"),
        _ => answer("401 Unauthorized", &[], b"{}"),
    });
    let site = Site::start(&[]);
    let tree = site.place("tree");
    write_files(&tree, 1, 3);
    assert!(!site.publish("one", &tree).is_empty());
    let (account, ready) = (site.place("account"), site.place("ready-files").join("default"));
    fs::write(account.join("token"), "of-the-pod").expect("token");
    fs::copy(tls::authority(), account.join("ca.crt")).expect("the CA");
    let (dir, log) = (site.place("node").join("datasets"), site.place("logs").join("labels"));
    let metrics = format!("127.0.0.1:{}", free_port());
    let mut c = command("fletch-mount");
    c.arg("--datasets").arg(&dir).args(["--server", &site.url, "--metrics", &metrics]);
    c.args(["--label-node", "node-7", "--label-account"]).arg(&account).arg("--ready-file").arg(&ready);
    c.env("KUBERNETES_SERVICE_HOST", "127.0.0.1");
    c.env("KUBERNETES_SERVICE_PORT", api.address().port().to_string());
    c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&log).expect("log"));
    let mut daemon = Running::spawn("fletch-mount", &mut c);
    let last = || {
        let all = api.requests();
        let last = all.last()?.split_once("\r\n\r\n")?;
        assert!(last.0.starts_with("PATCH /api/v1/nodes/node-7?"), "{}", last.0);
        Some(last.1.to_owned())
    };
    let set = r#"{"metadata":{"labels":{"fletch/mounts":"ready"}}}"#;
    until("the node has its label", SOON, || {
        assert!(daemon.alive(), "{}", fs::read_to_string(&log).unwrap_or_default());
        last().as_deref() == Some(set)
    });
    assert!(ready.exists() && dir.join("one").exists());
    let page = format!("http://{metrics}/metrics");
    until("the page says so", SOON, || {
        let page = stdout(&run(std::process::Command::new("curl").args(["-sS", "--max-time", "5", &page])));
        page.lines().any(|line| line == "fletch_mount_node_label 1")
    });
    daemon.signal(Signal::SIGTERM);
    assert!(daemon.wait(Duration::from_secs(26)).success());
    assert_eq!(last().as_deref(), Some(r#"{"metadata":{"labels":{"fletch/mounts":null}}}"#));
    assert_eq!(mounts_below(&dir), Vec::<String>::new());
}

fn sizes() -> (usize, usize) {
    if std::env::var_os("FLETCH_DATASETS_MOUNT").is_some() { (200, 10_000) } else { (12, 300) }
}

#[test]
fn many_datasets_share_memory_and_threads() {
    if !have(&[Need::Fuse, Need::Root]) {
        return;
    }
    let (datasets, count) = sizes();
    let versions = (datasets + 1).to_string();
    let site = Site::start(&["--limits-versions", &versions]);
    let data = site.place("data");
    for n in 0..datasets {
        let tree = data.join(format!("d{n:03}"));
        for sub in 0..10 {
            fs::create_dir_all(tree.join(format!("class-{sub}"))).expect("mkdir");
        }
        // Empty files: the test is about names and attributes. One file makes each version another.
        for i in 0..count - 1 {
            fs::File::create(tree.join(format!("class-{}/sample-{i:06}.jpg", i % 10))).expect("create");
        }
        fs::write(tree.join("name"), n.to_string()).expect("write");
        drop(site.publish(&format!("d{n:03}"), &tree));
    }
    let begun = Instant::now();
    let all = Datasets::start(&site, "node", &[]);
    let mounted = begun.elapsed();
    assert_eq!(all.names().len(), datasets);
    let begun = Instant::now();
    for name in all.names() {
        let shown = all.dir.join(&name);
        let listed = files(&shown);
        assert_eq!(listed.len(), count, "{name}");
        // As `ls -l` does: the attributes of each file.
        for rel in &listed {
            fs::symlink_metadata(shown.join(rel)).expect("attributes");
        }
        let number = fs::read_to_string(shown.join("name")).expect("read");
        assert_eq!(format!("d{number:0>3}"), name);
    }
    let listed = begun.elapsed();
    let pid = all.daemon.pid();
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("threads").count();
    let rss = peak_rss(pid);
    println!(
        "{datasets} datasets of {count} files: mounted in {:.1} s, listed in {:.1} s, peak {} MB, \
         {threads} threads",
        mounted.as_secs_f64(),
        listed.as_secs_f64(),
        rss / 1_000_000
    );
    assert!(rss <= 400_000_000, "{} MB", rss / 1_000_000);
    assert!(threads <= 64, "{threads} threads");
    // With all these datasets, a new one is still seen in time.
    fs::create_dir_all(data.join("late/sub")).expect("mkdir");
    fs::write(data.join("late/sub/file"), "late").expect("write");
    drop(site.publish("late", &data.join("late")));
    until("a new dataset is shown", SOON, || all.dir.join("late/sub/file").exists());
    all.stop();
}
