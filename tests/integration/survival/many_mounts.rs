//! The mounts of `--datasets` and of a keeper for many processes.

use crate::common::{
    KEEPER_KIB_MAX, Kernel, SLOW, content_of, keeper_on, metrics_at, resident_kib, until, worker,
};
use fletch_tests::bins::{Running, bin, command, run, with_keeper, without_variables};
use fletch_tests::fixture::{Site, is_mounted};
use fletch_tests::prometheus::free_port;
use fletch_tests::require::{Need, have};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::signal::{Signal, kill};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Returns the number of datasets in the tests of `--datasets`.
pub(crate) fn sets() -> usize {
    let given = std::env::var("FLETCH_TEST_MOUNTS").ok();
    given.map_or(12, |given| given.parse().expect("FLETCH_TEST_MOUNTS is a number"))
}

/// The files of each of these datasets, and the length of a file.
pub(crate) const SET_FILES: usize = 40;

const SET_FILE_BYTES: usize = 20_000;
pub(crate) fn set_file(site: &Site, set: usize, i: usize) -> std::path::PathBuf {
    site.place("datasets").join(format!("set-{set:02}/f{i:03}"))
}

pub(crate) fn set_content(set: usize, i: usize) -> Vec<u8> {
    content_of(1000 * (set + 1) + i, SET_FILE_BYTES)
}

pub(crate) fn publish_set(site: &Site, set: usize) {
    let tree = site.place(&format!("tree-{set:02}"));
    for i in 0..SET_FILES {
        fs::write(tree.join(format!("f{i:03}")), set_content(set, i)).expect("write");
    }
    assert!(!site.publish(&format!("set-{set:02}"), &tree).is_empty());
}

/// Reads files of all datasets, through their links, until a file tells it to stop. Returns how many, and the
/// slowest.
fn read_sets(datasets: &Path, seed: u64, stop: &Path) -> (u64, Duration) {
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut reads, mut slowest) = (0, Duration::ZERO);
    while !stop.exists() {
        let (set, i) = (rng.random_range(0..sets()), rng.random_range(0..SET_FILES));
        let path = datasets.join(format!("set-{set:02}/f{i:03}"));
        let begun = Instant::now();
        let mut bytes = vec![0; SET_FILE_BYTES];
        let file = File::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        file.read_exact_at(&mut bytes, 0).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert!(bytes == set_content(set, i), "{}: other bytes", path.display());
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).expect("advice");
        slowest = slowest.max(begun.elapsed());
        reads += 1;
    }
    (reads, slowest)
}

/// Names the directory of the datasets for [`reads_in_a_process_of_its_own`], which another test starts.
const READ_VARIABLE: &str = "TEST_READ_DATASETS";

/// The readers of [`under_readers`]. They are a process of their own: a process whose threads wait for a
/// mount cannot start the one that is to serve it, because its children wait, too.
#[test]
fn reads_in_a_process_of_its_own() {
    let Some(datasets) = std::env::var_os(READ_VARIABLE).map(std::path::PathBuf::from) else { return };
    let stop = datasets.with_extension("stop");
    let (reads, slowest) = thread::scope(|scope| {
        let (datasets, stop) = (&datasets, &stop);
        let readers: Vec<_> =
            (0..16).map(|seed| scope.spawn(move || read_sets(datasets, seed, stop))).collect();
        let all = readers.into_iter().map(|reader| reader.join().expect("a reader"));
        all.fold((0, Duration::ZERO), |(sum, slowest), (reads, took)| (sum + reads, slowest.max(took)))
    });
    println!("16 readers: {reads} reads, the slowest took {slowest:?}");
    assert!(reads > 100 && slowest < SLOW, "{reads} reads, the slowest took {slowest:?}");
}

/// Does `what` under readers that check each byte.
fn under_readers(site: &Site, name: &str, what: impl FnOnce()) {
    let datasets = site.place("datasets");
    let mut c = Command::new(std::env::current_exe().expect("this program"));
    c.args(["many_mounts::reads_in_a_process_of_its_own", "--exact", "--nocapture"])
        .env(READ_VARIABLE, &datasets);
    let mut readers = c.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("readers");
    // So that they have begun.
    thread::sleep(Duration::from_millis(200));
    what();
    assert!(readers.try_wait().expect("readers").is_none(), "the readers ended early");
    File::create(datasets.with_extension("stop")).expect("a file");
    let done = readers.wait_with_output().expect("readers");
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
    let figures = said.lines().find(|line| line.contains("16 readers")).expect("figures");
    println!("{name}, {} mounts, {figures}", sets());
}

/// Returns a process that mounts all datasets of the site's server, with its ready file.
pub(crate) fn datasets(
    site: &Site,
    mut c: Command,
    log: &str,
    more: &[&str],
) -> (Running, std::path::PathBuf) {
    let ready = site.place("ready-files").join(log);
    c.arg("--datasets").arg(site.place("datasets")).args(["--interval", "1s", "--io-timeout", "60s"]);
    c.args(["--server", &site.url]).arg("--ready-file").arg(&ready).args(more);
    // One more is published later, and another process may still show one that is gone.
    c.arg("--mounts-max").arg((sets() + 4).to_string());
    c.stdin(Stdio::null()).stdout(Stdio::null());
    c.stderr(File::create(site.place("logs").join(log)).expect("log"));
    (Running::spawn("fletch-mount", &mut c), ready)
}

#[test]
fn all_mounts_of_a_process_survive_it_and_it_follows_the_server_again() {
    if !have(&[Need::Fuse, Need::Resend, Need::Root]) {
        return;
    }
    let kills = if std::env::var_os("FLETCH_SOAK").is_some() { 100 } else { 8 };
    let site = Site::start(&[]);
    (0..sets()).for_each(|set| publish_set(&site, set));
    let dir = site.place("datasets");
    let (mut keeper, ready) = datasets(&site, with_keeper(), "datasets", &[]);
    until(SLOW, || ready.exists().then_some(()));
    under_readers(&site, &format!("{kills} kills"), || {
        let mut rng = StdRng::seed_from_u64(11);
        for _ in 0..kills {
            thread::sleep(Duration::from_millis(rng.random_range(50..400)));
            let victim = until(SLOW, || worker(keeper.pid()));
            kill(victim, Signal::SIGKILL).expect("kill");
            until(SLOW, || worker(keeper.pid()).filter(|next| *next != victim));
            assert!(ready.exists(), "the ready file stays");
        }
    });

    // The next process follows the server as the first one did. A link that leads nowhere any more goes.
    publish_set(&site, sets());
    until(SLOW, || {
        fs::read(set_file(&site, sets(), 7)).ok().filter(|bytes| *bytes == set_content(sets(), 7))
    });
    kill(until(SLOW, || worker(keeper.pid())), Signal::SIGKILL).expect("kill");
    run(command("fletch").args(["unregister", "set-00", "--server", &site.url]));
    until(SLOW, || (!set_file(&site, 0, 0).exists()).then_some(()));
    assert_eq!(fs::read(set_file(&site, sets(), 8)).expect("read"), set_content(sets(), 8));
    assert_eq!(fs::read_dir(dir.join("set-05")).expect("listing").count(), SET_FILES);
    let kib = until(SLOW, || Some(resident_kib(keeper.pid())).filter(|kib| *kib <= KEEPER_KIB_MAX));
    println!("the keeper of {} mounts has {kib} KiB", sets());
    keeper.signal(Signal::SIGTERM);
    let log = site.place("logs").join("datasets");
    assert!(keeper.wait(Duration::from_secs(26)).success(), "{}", fs::read_to_string(&log).expect("log"));
    assert!(!ready.exists() && !is_mounted(&dir));
    assert_eq!(fs::metadata(&dir).expect("the directory").permissions().mode() & 0o777, 0);
    assert_eq!(fs::read_dir(&dir).expect("listing").count(), 1, "the file that says why");
}

/// Returns a keeper of other processes that mount below the site's directory for that.
pub(crate) fn hold(site: &Site, log: &str, kernel: Kernel) -> Running {
    hold_by(keeper_on(kernel), site, log)
}

/// As [`hold`], by this command.
pub(crate) fn hold_by(mut c: Command, site: &Site, log: &str) -> Running {
    let socket = site.place("keeper").join("socket");
    c.arg("--hold")
        .arg(&socket)
        .arg("--hold-below")
        .arg(site.place("datasets").parent().expect("a directory"));
    c.stdin(Stdio::null()).stdout(Stdio::null());
    c.stderr(File::create(site.place("logs").join(log)).expect("log"));
    let keeper = Running::spawn("fletch-mount", &mut c);
    let text = || fs::read_to_string(site.place("logs").join(log)).unwrap_or_default();
    until(SLOW, || text().contains("holding mounts").then_some(()));
    keeper
}

/// Returns a command of `fletch-mount` without any capability, as in a pod without privileges.
pub(crate) fn without_capabilities() -> Command {
    let mut c = without_variables(Command::new("setpriv"));
    c.args(["--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all", "--"]).arg(bin("fletch-mount"));
    c
}

#[test]
fn a_process_without_privileges_is_replaced_under_the_keeper_of_a_node() {
    if have(&[Need::Fuse, Need::Resend, Need::Root]) {
        replace_in_five_ways(Kernel::Resends);
    }
}

#[test]
fn on_an_old_kernel_a_process_is_replaced_under_the_keeper_of_a_node() {
    if have(&[Need::Fuse, Need::Root]) {
        replace_in_five_ways(Kernel::Old);
    }
}

fn replace_in_five_ways(kernel: Kernel) {
    let site = Site::start(&[]);
    (0..sets()).for_each(|set| publish_set(&site, set));
    let dir = site.place("datasets");
    let mut keeper = hold(&site, "keeper", kernel);
    let socket = site.place("keeper").join("socket").display().to_string();
    let tables = site.place("cache").display().to_string();
    // While two run, the second one cannot have the port yet.
    let port = free_port();
    let metrics = format!("127.0.0.1:{port}");
    let flags = ["--keeper", &socket, "--allow-other", "--cache-dir", &tables, "--metrics", &metrics];
    let start = |log: &str| datasets(&site, without_capabilities(), log, &flags);
    let (mut first, ready) = start("first");
    until(SLOW, || ready.exists().then_some(()));
    under_readers(&site, "replaced in five ways", || {
        // Killed: the pod was over its memory.
        first.signal(Signal::SIGKILL);
        first.wait(SLOW);
        thread::sleep(Duration::from_millis(300));
        let (mut second, ready) = start("second");
        until(SLOW, || ready.exists().then_some(()));
        // Ended: the pod was deleted. Its mounts stay.
        second.signal(Signal::SIGTERM);
        assert!(second.wait(SLOW).success());
        assert!(is_mounted(&dir.join(".versions").join(only_root(&dir, "set-03"))));
        let (mut third, ready) = start("third");
        until(SLOW, || ready.exists().then_some(()));
        // Two at once: the next pod starts before this one ends.
        let (mut fourth, ready) = start("fourth");
        until(SLOW, || ready.exists().then_some(()));
        third.signal(Signal::SIGTERM);
        assert!(third.wait(SLOW).success());
        thread::sleep(Duration::from_millis(300));
        let taken_over = format!("fletch_mount_takeovers_total {}", sets());
        until(SLOW, || metrics_at(port).contains(&taken_over).then_some(()));
        // The keeper is killed, and started again: it gets the mounts back, and gives them to the next one.
        keeper.signal(Signal::SIGKILL);
        keeper.wait(SLOW);
        thread::sleep(Duration::from_millis(300));
        keeper = hold(&site, "keeper-again", kernel);
        let text = || fs::read_to_string(site.place("logs").join("fourth")).expect("log");
        until(SLOW, || text().contains("has the mounts back").then_some(()));
        fourth.signal(Signal::SIGKILL);
        fourth.wait(SLOW);
        let (fifth, ready) = start("fifth");
        until(SLOW, || ready.exists().then_some(()));
        first = fifth;
    });
    // A new version is mounted, and an old name goes, by a process that may not do either.
    publish_set(&site, sets());
    until(SLOW, || {
        fs::read(set_file(&site, sets(), 7)).ok().filter(|bytes| *bytes == set_content(sets(), 7))
    });
    run(command("fletch").args(["unregister", "set-00", "--server", &site.url]));
    until(SLOW, || (!set_file(&site, 0, 0).exists()).then_some(()));
    // A stranger's process gets nothing, and mounts nowhere else.
    let elsewhere = TempDir::new().expect("a directory");
    let mut c = without_capabilities();
    c.args(["set-01"]).arg(elsewhere.path()).args(["--server", &site.url, "--keeper", &socket]);
    let refused = c.output().expect("the program");
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("--hold-below"), "{said}");
    let kib = until(SLOW, || Some(resident_kib(keeper.pid())).filter(|kib| *kib <= KEEPER_KIB_MAX));
    println!("the keeper of a node has {kib} KiB");
    // Both end: nothing stays.
    keeper.signal(Signal::SIGTERM);
    first.signal(Signal::SIGTERM);
    assert!(first.wait(SLOW).success() && keeper.wait(SLOW).success());
    let table = fs::read_to_string("/proc/self/mounts").expect("mounts");
    assert!(!table.contains(&dir.display().to_string()), "{table}");
}

/// Returns the root to which a name leads.
fn only_root(dir: &Path, name: &str) -> String {
    let target = fs::read_link(dir.join(name)).expect("a link");
    target.file_name().expect("a root").to_string_lossy().into_owned()
}

#[test]
fn a_signal_ends_all_mounts_of_a_process_that_is_dead() {
    if !have(&[Need::Fuse, Need::Resend, Need::Root]) {
        return;
    }
    let mut site = Site::start(&[]);
    (0..2).for_each(|set| publish_set(&site, set));
    let socket = format!("unix:{}", site.socket().display());
    let (dir, ready) = (site.place("datasets"), site.place("ready-files").join("file"));
    let mut c = with_keeper();
    c.arg("--datasets").arg(&dir).args(["--server", &socket, "--io-timeout", "1s", "--interval", "1s"]);
    c.arg("--ready-file").arg(&ready).stdin(Stdio::null()).stdout(Stdio::null());
    c.stderr(File::create(site.place("logs").join("datasets")).expect("log"));
    let mut keeper = Running::spawn("fletch-mount", &mut c);
    until(SLOW, || ready.exists().then_some(()));
    // Without the server nothing can be taken over: reads fail in time, and names stay.
    site.end();
    kill(until(SLOW, || worker(keeper.pid())), Signal::SIGKILL).expect("kill");
    let failed = fs::read(set_file(&site, 1, 3)).expect_err("nothing serves the mount");
    assert_eq!(failed.raw_os_error(), Some(nix::libc::EIO));
    site.restart();
    until(SLOW, || fs::read(set_file(&site, 1, 4)).ok().filter(|bytes| *bytes == set_content(1, 4)));
    let held = File::open(set_file(&site, 0, 1)).expect("open");
    keeper.signal(Signal::SIGTERM);
    kill(until(SLOW, || worker(keeper.pid())), Signal::SIGKILL).expect("kill");
    assert!(!keeper.wait(SLOW).success() || !is_mounted(&dir));
    let table = fs::read_to_string("/proc/self/mounts").expect("mounts");
    assert!(!table.contains(&dir.display().to_string()), "{table}");
    assert!(held.read_at(&mut [0; 10], 0).is_err(), "the mount of the open file is gone");
}
