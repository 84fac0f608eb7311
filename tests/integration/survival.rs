//! Mounts whose process is killed again and again: programs that read wait, and see no error.

use fletch_tests::bins::{Running, bin, command, run, stdout, with_keeper, without_variables};
use fletch_tests::fixture::{Mounted, Site, is_mounted};
use fletch_tests::prometheus::free_port;
use fletch_tests::require::{Need, have};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, chown};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const FILES: usize = 600;
const IN_A_DIRECTORY: usize = 60;
const FILE_BYTES: usize = 50_000;
const READERS: u64 = 64;
/// A server that runs beside 64 readers on two cores has others to wait for, too.
const SLOW: Duration = Duration::from_secs(10);

fn name(i: usize) -> String {
    format!("d{}/f{i:04}", i / IN_A_DIRECTORY)
}

fn content(i: usize) -> Vec<u8> {
    content_of(i, FILE_BYTES)
}

fn content_of(seed: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Starts a server with the dataset `set`.
fn serve() -> Site {
    let site = Site::start(&[]);
    let tree = site.place("tree");
    for i in 0..FILES {
        let path = tree.join(name(i));
        fs::create_dir_all(path.parent().expect("a directory")).expect("mkdir");
        fs::write(path, content(i)).expect("write");
    }
    let root = site.publish("set", &tree);
    assert!(!root.is_empty());
    site
}

/// Waits until there is an answer, and returns it.
fn until<T>(within: Duration, mut ask: impl FnMut() -> Option<T>) -> T {
    let mut answer = None;
    fletch_tests::watch::until("an answer", within, || {
        answer = ask();
        answer.is_some()
    });
    answer.expect("until says so")
}

/// Returns the process that serves the mount of a keeper, if there is one.
fn worker(keeper: u32) -> Option<Pid> {
    let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok().map(Pid::from_raw)
}

/// Returns the memory of a process that is in use, in KiB, with the pages of its program.
fn resident_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process has memory");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// A keeper has at most so much memory, in KiB.
const KEEPER_KIB_MAX: u64 = 4096;

/// Does one thing that a program does with files, and panics at an error or another byte.
fn look(dir: &Path, rng: &mut StdRng, held: &(usize, File)) {
    let i = rng.random_range(0..FILES);
    let path = dir.join(name(i));
    let from = rng.random_range(0..FILE_BYTES - 5000);
    let check = |i: usize, file: &File| {
        let mut bytes = [0; 5000];
        file.read_exact_at(&mut bytes, from as u64).unwrap_or_else(|e| panic!("{}: {e}", name(i)));
        assert!(bytes == content(i)[from..from + 5000], "{}: other bytes", name(i));
        // The next read asks the mount again.
        posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).expect("advice");
    };
    match rng.random_range(0..10) {
        0 => {
            let folder = path.parent().expect("a directory");
            let names = fs::read_dir(folder).expect("listing").map(|entry| entry.expect("an entry"));
            assert_eq!(names.count(), IN_A_DIRECTORY, "a listing is whole");
        }
        1 => assert_eq!(fs::metadata(&path).expect("stat").len(), FILE_BYTES as u64),
        2 | 3 => check(held.0, &held.1),
        4 => {
            let file = File::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            #[expect(unsafe_code, reason = "no file of a mount is ever cut short")]
            // SAFETY: the mount is read-only, and shows one version.
            let map = unsafe { memmap2::Mmap::map(&file) }.expect("mapped");
            assert!(map[from..from + 5000] == content(i)[from..from + 5000], "{}: other bytes", name(i));
            drop(map);
            posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).expect("advice");
        }
        _ => check(i, &File::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))),
    }
}

/// Returns the page of metrics at a port, or nothing.
fn metrics_at(port: u16) -> String {
    let url = format!("http://127.0.0.1:{port}/metrics");
    let page = Command::new("curl").args(["-sS", "--max-time", "5", &url]).output().expect("curl");
    String::from_utf8_lossy(&page.stdout).into_owned()
}

/// Returns how many requests the kernel sent to this process that it had sent to another one, by the page of
/// metrics at a port.
fn resent(port: u16) -> u64 {
    let page = metrics_at(port);
    let line = page.lines().find_map(|line| line.strip_prefix("fletch_mount_resent_requests_total "));
    line.map_or(0, |number| number.parse().expect("a number"))
}

/// Kills what serves the mount at random moments under readers. Returns the looks that were taken, the
/// slowest, and how many requests were sent again, as far as the page of metrics at a port could be asked.
fn kill_under_readers(mounted: &Mounted, kills: usize, seed: u64, port: u16) -> (u64, Duration, u64) {
    let mut sent_again = 0;
    let (stop, looks, slowest) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS)
            .map(|k| {
                let (stop, looks, slowest) = (&stop, &looks, &slowest);
                scope.spawn(move || {
                    let mut rng = StdRng::seed_from_u64(seed ^ k);
                    let held = k as usize % FILES;
                    let held = (held, File::open(mounted.dir.join(name(held))).expect("open"));
                    while !stop.load(SeqCst) {
                        let begun = Instant::now();
                        look(&mounted.dir, &mut rng, &held);
                        slowest.fetch_max(begun.elapsed().as_micros() as u64, SeqCst);
                        looks.fetch_add(1, SeqCst);
                    }
                })
            })
            .collect();
        let mut rng = StdRng::seed_from_u64(seed);
        let keeper = mounted.pid();
        for _ in 0..kills {
            thread::sleep(Duration::from_micros(rng.random_range(20_000..300_000)));
            let victim = until(SLOW, || worker(keeper));
            sent_again += resent(port);
            kill(victim, Signal::SIGKILL).expect("kill");
            until(SLOW, || worker(keeper).filter(|next| *next != victim));
            if readers.iter().any(thread::ScopedJoinHandle::is_finished) {
                break;
            }
        }
        let before = looks.load(SeqCst);
        until(SLOW, || (looks.load(SeqCst) > before + 10 * READERS).then_some(()));
        stop.store(true, SeqCst);
    });
    (looks.into_inner(), Duration::from_micros(slowest.into_inner()), sent_again)
}

/// A kernel and how a mount uses it.
#[derive(Clone, Copy, PartialEq)]
enum Kernel {
    /// It sends unanswered requests again.
    Resends,
    /// It sends none again, as before Linux 6.9.
    Old,
}

/// Returns a command of `fletch-mount` with a keeper, which uses the kernel as one of that kind.
fn keeper_on(kernel: Kernel) -> Command {
    let mut c = with_keeper();
    if kernel == Kernel::Old {
        c.env("FLETCH_TEST_OLD_KERNEL", "1");
    }
    c
}

#[test]
fn what_serves_a_mount_is_killed_under_readers_who_see_no_error() {
    if have(&[Need::Fuse, Need::Resend]) {
        kill_and_count(Kernel::Resends);
    }
}

#[test]
fn an_old_kernel_sends_nothing_again_and_readers_see_no_error() {
    if have(&[Need::Fuse]) {
        kill_and_count(Kernel::Old);
    }
}

fn kill_and_count(kernel: Kernel) {
    let kills = if std::env::var_os("FLETCH_SOAK").is_some() { 500 } else { 20 };
    let site = serve();
    let log = site.place("logs").join("survivor");
    let port = free_port();
    let words = ["set", "--io-timeout", "60s", "--metrics", &format!("127.0.0.1:{port}")];
    let mounted = Mounted::start_by(keeper_on(kernel), &site.url, site.place("mnt"), &log, &words);
    let (looks, slowest, resent) = kill_under_readers(&mounted, kills, 7, port);
    println!(
        "{kills} kills under {READERS} readers: {looks} looks, {resent} requests sent again, the slowest \
         took {slowest:?}"
    );
    assert!(slowest < SLOW, "the slowest look took {slowest:?}");
    // The page of a process is not always there before it is killed.
    assert!(resent >= kills as u64, "{resent} requests were sent again");
    let log = fs::read_to_string(log).expect("log");
    assert_eq!(log.matches("readers wait for the next one").count(), kills, "{log}");
    // Some are killed before they can say so.
    assert!(log.matches("took over the mount of set").count() > kills / 4, "{log}");
    let kib = until(SLOW, || Some(resident_kib(mounted.pid())).filter(|kib| *kib <= KEEPER_KIB_MAX));
    println!("the keeper of one mount has {kib} KiB");
    let dir = mounted.dir.clone();
    mounted.stop();
    assert!(!is_mounted(&dir));
}

#[test]
fn the_program_is_replaced_under_a_mount() {
    if !have(&[Need::Fuse, Need::Resend]) {
        return;
    }
    let site = serve();
    let program = site.place("programs").join("fletch-mount");
    fs::copy(bin("fletch-mount"), &program).expect("copy");
    let mut c = without_variables(Command::new(&program));
    c.env("FLETCH_CACHE_DIR", site.place("cache"));
    let log = site.place("logs").join("log");
    let mounted = Mounted::start_by(c, &site.url, site.place("mnt"), &log, &["set", "--survive"]);
    // As a package manager does, slowly: for a moment there is no program.
    fs::remove_file(&program).expect("removed");
    kill(worker(mounted.pid()).expect("a worker"), Signal::SIGKILL).expect("kill");
    thread::sleep(Duration::from_millis(300));
    fs::copy(bin("fletch-mount"), &program).expect("the new program");
    assert!(fs::read(mounted.dir.join(name(5))).expect("read") == content(5));
    assert!(fs::read_to_string(&log).expect("log").contains("cannot start a process for the mount"));
    mounted.stop();
}

/// Returns the hash of all files below a directory, in the order of their names, read by other programs.
fn sum(mut c: Command, dir: &Path) -> Command {
    c.args(["-c", "find \"$1\" -type f | LC_ALL=C sort | xargs cat | sha256sum", "sum"]).arg(dir);
    c
}

#[test]
fn an_ordinary_users_mount_survives_too() {
    const USER: u32 = 12_345;
    if !have(&[Need::Fuse, Need::Resend, Need::Root]) {
        return;
    }
    let device = fs::metadata("/dev/fuse").expect("have says so").permissions().mode();
    if device & 0o006 != 0o006 {
        eprintln!("SKIPPED: only root may use /dev/fuse here, so no other user can mount");
        return;
    }
    let site = serve();
    let home = TempDir::with_prefix("fs-").expect("a directory");
    fs::set_permissions(home.path(), Permissions::from_mode(0o755)).expect("chmod");
    chown(home.path(), Some(USER), Some(USER)).expect("chown");
    let program = home.path().join("fletch-mount");
    fs::copy(bin("fletch-mount"), &program).expect("a copy that the user may run");
    let dir = home.path().join("set");
    fs::create_dir(&dir).expect("mkdir");
    chown(&dir, Some(USER), Some(USER)).expect("chown");
    let as_user = |program: &Path| {
        let id = USER.to_string();
        let mut c = Command::new("setpriv");
        c.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--"]).arg(program);
        c.env_clear().env("PATH", "/usr/bin:/bin").env("HOME", home.path());
        c
    };
    let log = site.place("user").join("log");
    let words = ["set", "--survive", "--push", "off"];
    let mounted = Mounted::start_by(as_user(&program), &site.url, dir.clone(), &log, &words);
    let reader = sum(as_user(Path::new("/bin/sh")), &dir).stdout(Stdio::piped()).spawn().expect("a reader");
    for _ in 0..5 {
        thread::sleep(Duration::from_millis(40));
        kill(until(SLOW, || worker(mounted.pid())), Signal::SIGKILL).expect("kill");
    }
    let read = reader.wait_with_output().expect("the reader");
    let wanted = run(&mut sum(Command::new("sh"), &site.place("tree")));
    assert!(read.status.success());
    assert_eq!(stdout(&read), stdout(&wanted));
    mounted.stop();
}

#[test]
fn an_old_kernels_requests_fail_in_time_when_no_process_comes() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let mut site = serve();
    let log = site.place("logs").join("survivor");
    let words = ["set", "--io-timeout", "3s", "--threads", "2"];
    let mounted = Mounted::start_by(keeper_on(Kernel::Old), &site.url, site.place("mnt"), &log, &words);
    // The process has the requests, and does not answer while the server does not.
    site.server().signal(Signal::SIGSTOP);
    let readers: Vec<_> = (0..8)
        .map(|i| {
            let path = mounted.dir.join(name(i));
            let reads = Command::new("cat").arg(path).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
            reads.expect("a reader")
        })
        .collect();
    thread::sleep(Duration::from_millis(500));
    let begun = Instant::now();
    kill(worker(mounted.pid()).expect("a worker"), Signal::SIGKILL).expect("kill");
    for reader in readers {
        let read = reader.wait_with_output().expect("the reader");
        let said = String::from_utf8_lossy(&read.stderr);
        assert!(!read.status.success() && said.contains("Input/output error"), "{said}");
    }
    let took = begun.elapsed();
    println!("8 requests of a dead process failed after {took:?}");
    assert!(took > Duration::from_secs(2) && took < SLOW, "{took:?}");
    site.server().signal(Signal::SIGCONT);
    for i in 0..8 {
        until(Duration::from_secs(30), || {
            fs::read(mounted.dir.join(name(i))).ok().filter(|b| *b == content(i))
        });
    }
    mounted.stop();
}

/// Ends a process that serves nothing any more.
fn ended(keeper: &mut Running) -> bool {
    keeper.wait(SLOW).success()
}

#[test]
fn a_mount_without_a_process_fails_reads_in_time_and_recovers() {
    if !have(&[Need::Fuse, Need::Resend]) {
        return;
    }
    let mut site = serve();
    // A restarted server has another port, and the same socket.
    let socket = format!("unix:{}", site.socket().display());
    let mut mounted = site.mount_from(&socket, "set", "survivor", &["--survive", "--io-timeout", "2s"]);
    let read = |dir: &Path, i: usize| fs::read(dir.join(name(i)));
    assert!(read(&mounted.dir, 0).expect("read") == content(0));
    // No worker can open the version while the server is away.
    site.end();
    kill(worker(mounted.pid()).expect("a worker"), Signal::SIGKILL).expect("kill");
    let begun = Instant::now();
    let failed = read(&mounted.dir, 1).expect_err("nothing serves the mount");
    assert_eq!(failed.raw_os_error(), Some(nix::libc::EIO));
    assert!(begun.elapsed() < SLOW, "{:?}", begun.elapsed());
    assert!(read(&mounted.dir, 0).expect("the kernel has its pages") == content(0));
    site.restart();
    until(Duration::from_secs(30), || read(&mounted.dir, 2).ok().filter(|bytes| *bytes == content(2)));
    assert_eq!(fs::read_dir(mounted.dir.join("d0")).expect("listing").count(), IN_A_DIRECTORY);
    // A signal unmounts, whoever serves the mount by now.
    let dir = mounted.dir.clone();
    mounted.daemon().signal(Signal::SIGTERM);
    assert!(ended(mounted.daemon()) && !is_mounted(&dir));
}

#[test]
fn a_mount_that_another_program_unmounts_ends_its_keeper() {
    if !have(&[Need::Fuse, Need::Resend]) {
        return;
    }
    let site = serve();
    let mut mounted = site.mount("set", "survivor", &["--survive"]);
    kill(worker(mounted.pid()).expect("a worker"), Signal::SIGKILL).expect("kill");
    assert!(fs::read(mounted.dir.join(name(3))).expect("read") == content(3));
    let unmounted = Command::new("umount").arg(&mounted.dir).status().expect("umount");
    assert!(unmounted.success());
    assert!(ended(mounted.daemon()), "{}", site.mount_log("survivor"));
}

/// Returns the number of datasets in the tests of `--datasets`.
fn sets() -> usize {
    let given = std::env::var("FLETCH_TEST_MOUNTS").ok();
    given.map_or(12, |given| given.parse().expect("FLETCH_TEST_MOUNTS is a number"))
}

/// The files of each of these datasets, and the length of a file.
const SET_FILES: usize = 40;
const SET_FILE_BYTES: usize = 20_000;

fn set_file(site: &Site, set: usize, i: usize) -> std::path::PathBuf {
    site.place("datasets").join(format!("set-{set:02}/f{i:03}"))
}

fn set_content(set: usize, i: usize) -> Vec<u8> {
    content_of(1000 * (set + 1) + i, SET_FILE_BYTES)
}

fn publish_set(site: &Site, set: usize) {
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
    c.args(["reads_in_a_process_of_its_own", "--exact", "--nocapture"]).env(READ_VARIABLE, &datasets);
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
fn datasets(site: &Site, mut c: Command, log: &str, more: &[&str]) -> (Running, std::path::PathBuf) {
    let ready = site.place("ready-files").join(log);
    c.arg("--datasets").arg(site.place("datasets")).args(["--interval", "1s", "--io-timeout", "60s"]);
    c.args(["--server", &site.url]).arg("--ready-file").arg(&ready).args(more);
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
fn hold(site: &Site, log: &str, kernel: Kernel) -> Running {
    let socket = site.place("keeper").join("socket");
    let mut c = keeper_on(kernel);
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
fn without_capabilities() -> Command {
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
fn a_mount_of_fstab_survives() {
    if !have(&[Need::Fuse, Need::Resend, Need::Root]) {
        return;
    }
    let site = serve();
    let helper = site.place("sbin").join("mount.fletch");
    std::os::unix::fs::symlink(bin("fletch-mount"), &helper).expect("symlink");
    let (dir, log) = (site.place("mnt"), site.place("logs").join("fstab"));
    let options =
        format!("server={},log_file={},cache_dir={}", site.url, log.display(), site.place("c").display());
    let mut mount = without_variables(Command::new(&helper));
    run(mount.arg("set").arg(&dir).args(["-o", &format!("rw,{options},nofail")]));
    let of_the_mount = |pid: &u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&words).contains(&dir.display().to_string())
    };
    let all = fs::read_dir("/proc").expect("processes").flatten();
    let all = all.filter_map(|process| process.file_name().to_string_lossy().parse().ok());
    let keeper = all.filter(of_the_mount).find(|pid| worker(*pid).is_some()).expect("a keeper");
    for i in 0..5 {
        kill(until(SLOW, || worker(keeper)), Signal::SIGKILL).expect("kill");
        assert!(fs::read(dir.join(name(i))).expect("read") == content(i));
    }
    run(Command::new("umount").arg(&dir));
    until(SLOW, || (!Path::new(&format!("/proc/{keeper}")).exists()).then_some(()));
}

#[test]
fn a_process_that_does_not_run_any_more_is_replaced() {
    if !have(&[Need::Fuse, Need::Resend]) {
        return;
    }
    let site = serve();
    let log = site.place("logs").join("survivor");
    let words = ["set", "--io-timeout", "8s"];
    let mounted = Mounted::start_by(with_keeper(), &site.url, site.place("mnt"), &log, &words);
    let stopped = worker(mounted.pid()).expect("a worker");
    kill(stopped, Signal::SIGSTOP).expect("stopped");
    assert!(fs::read(mounted.dir.join(name(9))).expect("read") == content(9));
    assert_ne!(worker(mounted.pid()), Some(stopped));
    assert!(fs::read_to_string(&log).expect("log").contains("does not run any more"));
    mounted.stop();
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
