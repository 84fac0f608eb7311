//! Mounts of an ordinary user, by `fusermount3`, whose processes are killed under readers.
//!
//! Each test runs in a mount namespace of its own, where that user may open `/dev/fuse`. Only the user who
//! mounted may read, and root may not: the readers are a process of that user.

use fletch_core::Hash;
use fletch_testkit::dataset::content;
use fletch_tests::bins::{Running, bin, run, stdout, with_keeper};
use fletch_tests::fixture::{Mounted, Site, is_mounted};
use fletch_tests::namespace::{ANN, BOB, is_in_own};
use fletch_tests::prometheus::free_port;
use fletch_tests::readers::Data;
use fletch_tests::require::{Need, have};
use fletch_tests::watch;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const FILES: u64 = 300;
const FILE_BYTES: u64 = 50_000;
const SEED: u64 = 47;
const READERS: u64 = 64;
const SLOW: Duration = Duration::from_secs(10);
/// Names the mount for [`reads_as_a_user`], which another test starts.
const READ_VARIABLE: &str = "TEST_READ_AS_USER";

/// A server of root with the dataset `set`, and the home of Ann, who mounts it.
struct Stage {
    home: TempDir,
    site: Site,
}

impl Stage {
    fn new() -> Self {
        let site = Site::start(&[]);
        let data = Data::within(&site.place("tree"), SEED, FILES, FILE_BYTES);
        assert!(!site.publish("set", &data.dir).is_empty());
        let home = TempDir::with_prefix("fo-").expect("a directory");
        fs::set_permissions(home.path(), Permissions::from_mode(0o755)).expect("chmod");
        chown(home.path(), Some(ANN), Some(ANN)).expect("chown");
        let test = std::env::current_exe().expect("this program");
        for program in [bin("fletch-mount"), bin("fletch-server"), bin("fletch"), test] {
            let to = home.path().join(program.file_name().expect("a name"));
            fs::copy(program, to).expect("a copy that the user may run");
        }
        let stage = Stage { home, site };
        run(stage.by(ANN, "mkdir").arg(stage.dir()));
        stage
    }

    fn dir(&self) -> PathBuf {
        self.home.path().join("set")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.site.place("logs").join("mount")).expect("log")
    }

    /// Returns a program that a user starts: one of the home, or one of the system.
    fn by(&self, user: u32, program: &str) -> Command {
        let own = self.home.path().join(program);
        let id = user.to_string();
        let mut c = Command::new("setpriv");
        c.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--"]);
        c.arg(if own.exists() { own } else { PathBuf::from(program) });
        c.env_clear().env("PATH", "/usr/bin:/bin").env("HOME", self.home.path());
        c.env("XDG_RUNTIME_DIR", self.home.path().join("run")).current_dir(self.home.path());
        c
    }

    fn mount(&self, more: &[&str]) -> Mounted {
        self.mount_within("60s", more)
    }

    /// Mounts with a time within which each read ends.
    fn mount_within(&self, io_timeout: &str, more: &[&str]) -> Mounted {
        let log = self.site.place("logs").join("mount");
        let words = [&["set", "--io-timeout", io_timeout], more].concat();
        Mounted::start_by(self.by(ANN, "fletch-mount"), &self.site.url, self.dir(), &log, &words)
    }

    /// Starts readers that check every byte, as processes of Ann.
    fn read(&self) -> Child {
        let test = std::env::current_exe().expect("this program");
        let test = test.file_name().expect("a name").to_string_lossy().into_owned();
        let mut c = self.by(ANN, &test);
        c.args(["reads_as_a_user", "--exact", "--nocapture"]).env(READ_VARIABLE, self.dir());
        let readers = c.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("readers");
        // So that they have begun.
        watch::until("somebody reads", SLOW, || self.dir().with_extension("begun").exists());
        readers
    }

    /// Ends the readers. Returns what they say, after it was checked that none of them failed.
    fn end(&self, mut readers: Child) -> String {
        assert!(readers.try_wait().expect("readers").is_none(), "the readers ended early: {}", self.log());
        File::create(self.dir().with_extension("stop")).expect("a file");
        let done = readers.wait_with_output().expect("readers");
        for name in ["stop", "begun"] {
            fs::remove_file(self.dir().with_extension(name)).expect("there");
        }
        let said = stdout(&done);
        assert!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
        said.lines().find(|line| line.contains("readers:")).expect("figures").to_owned()
    }

    /// Reads one file of the mount as a user.
    fn cat(&self, user: u32, i: u64) -> Output {
        let path = self.dir().join(name(i));
        self.by(user, "cat").arg(path).output().expect("cat")
    }

    /// Asserts that a user reads the right bytes of a file.
    #[track_caller]
    fn shows(&self, user: u32, i: u64) {
        let read = self.cat(user, i);
        let said = String::from_utf8_lossy(&read.stderr).into_owned();
        assert!(read.status.success(), "{said}{}", self.log());
        assert!(
            Hash::of(&read.stdout) == Hash::of(&content(SEED, i, FILE_BYTES)),
            "{} bytes",
            read.stdout.len()
        );
    }
}

fn name(i: u64) -> String {
    format!("{:03}/{i:06}", i / 1000)
}

/// Returns the process that serves the mount of a keeper, as soon as it is another one than `before`.
fn worker(keeper: u32, before: Option<Pid>) -> Pid {
    let mut found = None;
    watch::until("a process serves the mount", SLOW, || {
        let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children"));
        let children = children.unwrap_or_default();
        let mut children = children.split_whitespace().map(|pid| Pid::from_raw(pid.parse().expect("a pid")));
        found = children.find(|pid| Some(*pid) != before && !is_dead(*pid));
        found.is_some()
    });
    found.expect("until says so")
}

fn is_dead(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

/// Does one thing that a program does with files, and panics at an error or another byte.
fn look(dir: &Path, rng: &mut StdRng, held: &(u64, File)) {
    let i = rng.random_range(0..FILES);
    let path = dir.join(name(i));
    let from = rng.random_range(0..FILE_BYTES as usize - 5000);
    let open = || File::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let check = |i: u64, bytes: &[u8]| {
        assert!(*bytes == content(SEED, i, FILE_BYTES)[from..from + 5000], "{}: other bytes", name(i));
    };
    // The next read asks the mount again.
    let forget = |file: &File| {
        posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).expect("advice");
    };
    let read = |i: u64, file: &File| {
        let mut bytes = [0; 5000];
        file.read_exact_at(&mut bytes, from as u64).unwrap_or_else(|e| panic!("{}: {e}", name(i)));
        check(i, &bytes);
        forget(file);
    };
    match rng.random_range(0..10) {
        0 => {
            let folder = path.parent().expect("a directory");
            let names = fs::read_dir(folder).expect("listing").map(|entry| entry.expect("an entry"));
            assert_eq!(names.count() as u64, FILES, "a listing is whole");
        }
        1 => assert_eq!(fs::metadata(&path).expect("stat").len(), FILE_BYTES),
        2 | 3 => read(held.0, &held.1),
        4 => {
            let file = open();
            #[expect(unsafe_code, reason = "no file of a mount is ever cut short")]
            // SAFETY: the mount is read-only, and shows one version.
            let map = unsafe { memmap2::Mmap::map(&file) }.expect("mapped");
            check(i, &map[from..from + 5000]);
            drop(map);
            forget(&file);
        }
        _ => read(i, &open()),
    }
}

/// The readers of [`Stage::read`].
#[test]
fn reads_as_a_user() {
    let Some(dir) = std::env::var_os(READ_VARIABLE).map(PathBuf::from) else { return };
    let stop = dir.with_extension("stop");
    let (looks, slowest) = (AtomicU64::new(0), AtomicU64::new(0));
    let begun = AtomicBool::new(false);
    thread::scope(|scope| {
        for k in 0..READERS {
            let (dir, stop, looks, slowest, begun) = (&dir, &stop, &looks, &slowest, &begun);
            scope.spawn(move || {
                let mut rng = StdRng::seed_from_u64(SEED ^ k);
                let held = (k % FILES, File::open(dir.join(name(k % FILES))).expect("open"));
                while !stop.exists() {
                    let at = Instant::now();
                    look(dir, &mut rng, &held);
                    slowest.fetch_max(at.elapsed().as_micros() as u64, SeqCst);
                    if looks.fetch_add(1, SeqCst) > 200 && !begun.swap(true, SeqCst) {
                        File::create(dir.with_extension("begun")).expect("a file");
                    }
                }
            });
        }
    });
    let (looks, slowest) = (looks.into_inner(), Duration::from_micros(slowest.into_inner()));
    println!("{READERS} readers: {looks} looks, the slowest took {slowest:?}");
    assert!(slowest < SLOW, "the slowest look took {slowest:?}");
}

/// Returns the number on the page of metrics at a port, or 0 while nobody serves it.
fn metric(port: u16, name: &str) -> u64 {
    let url = format!("http://127.0.0.1:{port}/metrics");
    let page = Command::new("curl").args(["-sS", "--max-time", "5", &url]).output().expect("curl");
    let page = String::from_utf8_lossy(&page.stdout).into_owned();
    let line = page.lines().find_map(|line| line.strip_prefix(name));
    line.map_or(0, |number| number.trim().parse().expect("a number"))
}

fn kills() -> usize {
    let given = std::env::var("FLETCH_TEST_USER_KILLS").ok();
    let default = if std::env::var_os("FLETCH_SOAK").is_some() { 500 } else { 20 };
    given.map_or(default, |given| given.parse().expect("FLETCH_TEST_USER_KILLS is a number"))
}

/// Kills what serves Ann's mount again and again, at random moments.
fn kill_under_readers(stage: &Stage, mounted: &Mounted, port: u16) {
    let (mut rng, mut resent) = (StdRng::seed_from_u64(SEED), 0);
    let readers = stage.read();
    let mut victim = worker(mounted.pid(), None);
    for _ in 0..kills() {
        thread::sleep(Duration::from_micros(rng.random_range(20_000..300_000)));
        resent += metric(port, "fletch_mount_resent_requests_total ");
        kill(victim, Signal::SIGKILL).expect("kill");
        victim = worker(mounted.pid(), Some(victim));
    }
    // So that the last one is under load for a while, too.
    thread::sleep(Duration::from_millis(500));
    let figures = stage.end(readers);
    println!("{} kills of a user's mount: {figures}, {resent} requests sent again", kills());
    assert!(resent >= kills() as u64, "{resent} requests were sent again");
    assert_eq!(stage.log().matches("readers wait for the next one").count(), kills(), "{}", stage.log());
}

const KILLED: &str = "the_process_of_a_users_mount_is_killed_under_readers_who_see_no_error";

#[test]
fn the_process_of_a_users_mount_is_killed_under_readers_who_see_no_error() {
    if !have(&[Need::Fuse, Need::Resend, Need::Namespace]) || !is_in_own(KILLED) {
        return;
    }
    let (stage, port) = (Stage::new(), free_port());
    let mounted = stage.mount(&["--metrics", &format!("127.0.0.1:{port}")]);
    assert!(!stage.cat(0, 0).status.success(), "not even root reads a mount of Ann's own");
    kill_under_readers(&stage, &mounted, port);
    mounted.stop();
    assert_eq!(fs::read_dir(stage.dir()).expect("the directory below").count(), 0);
}

const OLD: &str = "on_an_old_kernel_a_users_mount_survives_too";

#[test]
fn on_an_old_kernel_a_users_mount_survives_too() {
    if !have(&[Need::Fuse, Need::Namespace]) || !is_in_own(OLD) {
        return;
    }
    let (stage, port) = (Stage::new(), free_port());
    let log = stage.site.place("logs").join("mount");
    let mut c = stage.by(ANN, "fletch-mount");
    c.env("FLETCH_TEST_OLD_KERNEL", "1");
    let metrics = format!("127.0.0.1:{port}");
    let words = ["set", "--io-timeout", "60s", "--metrics", &metrics];
    let mounted = Mounted::start_by(c, &stage.site.url, stage.dir(), &log, &words);
    kill_under_readers(&stage, &mounted, port);
    mounted.stop();
}

const BACK: &str = "a_user_whose_keeper_died_reads_on_and_mounts_again";

#[test]
fn a_user_whose_keeper_died_reads_on_and_mounts_again() {
    if !have(&[Need::Fuse, Need::Resend, Need::Namespace]) || !is_in_own(BACK) {
        return;
    }
    let stage = Stage::new();
    let mut first = stage.mount(&[]);
    let served_by = worker(first.pid(), None);
    // The keeper alone: nobody notices.
    let readers = stage.read();
    first.daemon().signal(Signal::SIGKILL);
    first.daemon().wait(SLOW);
    thread::sleep(Duration::from_millis(500));
    println!("the keeper was killed: {}", stage.end(readers));
    // Both: an error, and never an empty directory.
    kill(served_by, Signal::SIGKILL).expect("kill");
    watch::until("it is dead", SLOW, || is_dead(served_by));
    // While the last thread of the process ends, a request is aborted.
    watch::until("nothing serves the mount", SLOW, || {
        let ls = stage.by(ANN, "ls").arg(stage.dir()).output().expect("ls");
        let said = String::from_utf8_lossy(&ls.stderr).into_owned();
        assert!(!ls.status.success(), "an empty listing");
        said.contains("not connected")
    });
    assert!(is_mounted(&stage.dir()));
    // The way back, by the same command.
    let again = stage.mount(&[]);
    assert!(stage.log().contains("detached the mount of a dead fletch-mount"), "{}", stage.log());
    stage.shows(ANN, 3);
    // Ann unmounts by herself, right after a kill.
    kill(worker(again.pid(), None), Signal::SIGKILL).expect("kill");
    stage.shows(ANN, 4);
    run(stage.by(ANN, "fusermount3").arg("-u").arg(stage.dir()));
    let mut again = again;
    assert!(again.daemon().wait(SLOW).success(), "{}", stage.log());
    assert!(!is_mounted(&stage.dir()));
}

const SHARED: &str = "a_users_mount_for_others_and_a_keeper_of_their_own_survive";

#[test]
fn a_users_mount_for_others_and_a_keeper_of_their_own_survive() {
    if !have(&[Need::Fuse, Need::Resend, Need::Namespace]) || !is_in_own(SHARED) {
        return;
    }
    let stage = Stage::new();
    let mounted = stage.mount_within("8s", &["--allow-other"]);
    for i in 0..5 {
        kill(worker(mounted.pid(), None), Signal::SIGKILL).expect("kill");
        stage.shows(BOB, i);
        stage.shows(0, i + 10);
    }
    // A frozen process is replaced, too.
    kill(worker(mounted.pid(), None), Signal::SIGSTOP).expect("stopped");
    stage.shows(BOB, 20);
    mounted.stop();
    // One keeper of Ann's for all her processes.
    let socket = stage.home.path().join("keeper").display().to_string();
    let mut c = stage.by(ANN, "fletch-mount");
    c.args(["--hold", &socket, "--hold-below"]).arg(stage.home.path());
    let log = File::create(stage.site.place("logs").join("keeper")).expect("log");
    let mut keeper = Running::spawn("fletch-mount", c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log));
    watch::until("the keeper holds mounts", SLOW, || Path::new(&socket).exists());
    // The test waits for the end of each process, which a push may delay (S29).
    let mut first = stage.mount(&["--keeper", &socket, "--push", "off"]);
    let readers = stage.read();
    for _ in 0..5 {
        first.daemon().signal(Signal::SIGKILL);
        first.daemon().wait(SLOW);
        // It says so when it has taken the mount over, not that it mounted.
        let log = stage.site.place("logs").join("next");
        let mut c = stage.by(ANN, "fletch-mount");
        c.arg("set").arg(stage.dir()).args(["--server", &stage.site.url, "--keeper", &socket]);
        c.args(["--io-timeout", "60s", "--push", "off"]).stdin(Stdio::null()).stdout(Stdio::null());
        c.stderr(File::create(&log).expect("log"));
        *first.daemon() = Running::spawn("fletch-mount", &mut c);
        watch::until("the next process serves", SLOW, || {
            fs::read_to_string(&log).expect("log").contains("took over the mount of set")
        });
        thread::sleep(Duration::from_millis(200));
    }
    println!("five processes of one keeper: {}", stage.end(readers));
    first.daemon().signal(Signal::SIGTERM);
    first.daemon().wait(SLOW);
    assert!(is_mounted(&stage.dir()), "the mount waits for the next process");
    keeper.signal(Signal::SIGTERM);
    assert!(keeper.wait(SLOW).success());
    watch::until("the keeper unmounts", SLOW, || !is_mounted(&stage.dir()));
}

const COMMAND: &str = "what_fletch_mount_of_a_user_started_survives_and_comes_back";

#[test]
fn what_fletch_mount_of_a_user_started_survives_and_comes_back() {
    if !have(&[Need::Fuse, Need::Resend, Need::Namespace]) || !is_in_own(COMMAND) {
        return;
    }
    let stage = Stage::new();
    let tree = stage.home.path().join("tree");
    let data = Data::within(&tree, SEED, FILES, FILE_BYTES);
    assert_eq!(data.files.len() as u64, FILES);
    run(stage.by(ANN, "mkdir").args(["-m", "700", "run"]));
    let fletch = |words: &[&str]| run(stage.by(ANN, "fletch").args(words));
    let mount = || fletch(&["mount", "tree", "set"]);
    let of_ann = |program: &str| -> Vec<u32> {
        let path = stage.home.path().join(program).display().to_string();
        let all = fs::read_dir("/proc").expect("processes").flatten();
        let all = all.filter_map(|process| process.file_name().to_string_lossy().parse().ok());
        all.filter(|pid| {
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&words).starts_with(&path) && !is_dead(Pid::from_raw(*pid as i32))
        })
        .collect()
    };
    let end = |pid: u32| kill(Pid::from_raw(pid as i32), Signal::SIGKILL).expect("kill");
    mount();
    let is_keeper = |pid: &u32| {
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        children.is_ok_and(|children| !children.trim().is_empty())
    };
    let keeper = of_ann("fletch-mount").into_iter().find(is_keeper).expect("a keeper");
    let readers = stage.read();
    let mut victim = worker(keeper, None);
    for _ in 0..5 {
        thread::sleep(Duration::from_millis(150));
        kill(victim, Signal::SIGKILL).expect("kill");
        victim = worker(keeper, Some(victim));
    }
    // Her server, too: the mount starts it again, and reads wait.
    of_ann("fletch-server").into_iter().for_each(end);
    watch::until("the server runs again", Duration::from_secs(30), || !of_ann("fletch-server").is_empty());
    println!("the processes of `fletch mount`: {}", stage.end(readers));
    // All at once, and the way back by the same command.
    of_ann("fletch-mount").into_iter().chain(of_ann("fletch-server")).for_each(end);
    watch::until("all are dead", SLOW, || of_ann("fletch-mount").is_empty());
    assert!(!stage.cat(ANN, 1).status.success());
    mount();
    stage.shows(ANN, 1);
    fletch(&["down"]);
    assert!(!is_mounted(&stage.dir()));
}

#[test]
fn the_first_look_of_another_user_waits_for_the_next_process_of_root() {
    if !have(&[Need::Fuse, Need::Resend, Need::Root]) {
        return;
    }
    let stage = Stage::new();
    // As where a mount of all datasets puts a version: nobody may look into the directory below.
    fs::set_permissions(stage.dir(), Permissions::from_mode(0o0)).expect("chmod");
    let log = stage.site.place("logs").join("mount");
    let words = ["set", "--allow-other"];
    let mounted = Mounted::start_by(with_keeper(), &stage.site.url, stage.dir(), &log, &words);
    kill(worker(mounted.pid(), None), Signal::SIGKILL).expect("kill");
    stage.shows(BOB, 1);
    mounted.stop();
}
