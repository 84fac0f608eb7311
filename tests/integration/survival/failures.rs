//! What else may die, hang or be misused. One test for each such line of SEMANTICS, S29.

use crate::common::{Kernel, SLOW, content, keeper_on, name, serve, until, worker};
use crate::many_mounts::{datasets, hold, hold_by, publish_set, set_content, set_file, without_capabilities};
use fletch_tests::bins::{Running, bin, with_keeper};
use fletch_tests::fixture::{Mounted, Site, is_mounted};
use fletch_tests::require::{Need, have};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, recv, send, socket};
use std::fs;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A killed program is gone after so long, however loaded the machine is.
const KILLED_WITHIN: Duration = Duration::from_secs(1);

/// Returns a program that prints a file.
fn cat(path: &Path) -> Child {
    let mut c = Command::new("cat");
    c.arg(path).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    c.spawn().expect("a reader")
}

/// Returns a program that reads a file past the kernel's pages: it waits for the reply itself.
fn direct(path: &Path) -> Child {
    let mut c = Command::new("dd");
    c.arg(format!("if={}", path.display())).args(["iflag=direct", "bs=4096", "of=/dev/null"]);
    c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("a reader")
}

/// Kills a program, and returns how long it took to go.
fn kill_reader(mut reader: Child) -> Duration {
    assert!(reader.try_wait().expect("a reader").is_none(), "it does not wait");
    let begun = Instant::now();
    reader.kill().expect("kill");
    until(SLOW, || reader.try_wait().expect("a reader"));
    begun.elapsed()
}

#[test]
fn each_reader_can_be_killed_while_no_process_serves() {
    if have(&[Need::Fuse, Need::Resend]) {
        kill_readers(Kernel::Resends);
    }
}

#[test]
fn on_an_old_kernel_each_reader_can_be_killed_while_no_process_serves() {
    if have(&[Need::Fuse]) {
        kill_readers(Kernel::Old);
    }
}

fn kill_readers(kernel: Kernel) {
    let mut site = serve();
    let log = site.place("logs").join("survivor");
    let words = ["set", "--io-timeout", "60s", "--threads", "2"];
    let mounted = Mounted::start_by(keeper_on(kernel), &site.url, site.place("mnt"), &log, &words);
    // The first close of a file asks the process whether it wants to hear of closes, and cannot be killed.
    assert!(fs::read(mounted.dir.join(name(16))).expect("read") == content(16));
    // The process has the first requests, and does not answer while the server does not.
    site.server().signal(Signal::SIGSTOP);
    let read = |i: usize| {
        let path = mounted.dir.join(name(i));
        if i.is_multiple_of(2) { cat(&path) } else { direct(&path) }
    };
    let before: Vec<Child> = (0..8).map(read).collect();
    thread::sleep(Duration::from_millis(500));
    kill(worker(mounted.pid()).expect("a worker"), Signal::SIGKILL).expect("kill");
    let after: Vec<Child> = (8..16).map(read).collect();
    thread::sleep(Duration::from_millis(500));
    let took = before.into_iter().chain(after).map(kill_reader).max().expect("16 readers");
    println!("the last of 16 readers ended {took:?} after it was killed");
    assert!(took < KILLED_WITHIN, "{took:?}");
    site.server().signal(Signal::SIGCONT);
    for i in 0..16 {
        assert!(fs::read(mounted.dir.join(name(i))).expect("read") == content(i));
    }
    mounted.stop();
}

#[test]
fn the_death_of_the_keeper_costs_nothing_and_that_of_both_shows_no_empty_directory() {
    if !have(&[Need::Fuse, Need::Resend]) {
        return;
    }
    let site = serve();
    let (dir, log) = (site.place("mnt"), site.place("logs").join("survivor"));
    let words = ["set", "--push", "off"];
    let mut mounted = Mounted::start_by(with_keeper(), &site.url, dir.clone(), &log, &words);
    let orphan = worker(mounted.pid()).expect("a worker");
    mounted.daemon().signal(Signal::SIGKILL);
    assert!(!mounted.daemon().wait(SLOW).success());
    for i in 0..20 {
        assert!(fs::read(dir.join(name(i))).expect("the other process serves") == content(i));
    }
    kill(orphan, Signal::SIGKILL).expect("kill");
    let dead = |what: std::io::Result<()>| what.is_err_and(|error| is_dead(&error));
    until(SLOW, || dead(fs::read_dir(dir.join("d5")).map(drop)).then_some(()));
    assert!(dead(fs::read_dir(&dir).and_then(|mut names| names.next().expect("an entry").map(drop))));
    assert!(dead(fs::read(dir.join(name(400))).map(drop)));
    // The next one begins anew at the same directory.
    let again = Mounted::start_by(with_keeper(), &site.url, dir.clone(), &log, &words);
    assert!(fs::read(dir.join(name(400))).expect("read") == content(400));
    again.stop();
    assert!(!is_mounted(&dir));
}

/// A keeper for many processes, with one of them that mounts two datasets.
struct Held {
    site: Site,
    keeper: Running,
    process: Running,
}

impl Held {
    fn start(keeper: Command) -> Self {
        let site = Site::start(&[]);
        (0..2).for_each(|set| publish_set(&site, set));
        let keeper = hold_by(keeper, &site, "keeper");
        let process = next_process(&site, "first");
        Held { site, keeper, process }
    }

    /// Reads a file that nobody read before.
    fn read(&self, i: usize) {
        assert_eq!(fs::read(set_file(&self.site, 1, i)).expect("read"), set_content(1, i));
    }

    /// Kills the process, and starts the next one.
    fn replace(&mut self, log: &str) {
        self.process.signal(Signal::SIGKILL);
        self.process.wait(SLOW);
        self.process = next_process(&self.site, log);
    }

    fn socket(&self) -> std::path::PathBuf {
        self.site.place("keeper").join("socket")
    }

    /// Returns how many descriptors the keeper has.
    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.keeper.pid())).expect("the keeper").count()
    }

    fn end(mut self) {
        self.keeper.signal(Signal::SIGTERM);
        self.process.signal(Signal::SIGTERM);
        assert!(self.process.wait(SLOW).success() && self.keeper.wait(2 * SLOW).success());
        let table = fs::read_to_string("/proc/self/mounts").expect("mounts");
        assert!(!table.contains(&self.site.place("datasets").display().to_string()), "{table}");
    }
}

fn next_process(site: &Site, log: &str) -> Running {
    let socket = site.place("keeper").join("socket").display().to_string();
    let tables = site.place("cache").display().to_string();
    let flags = ["--keeper", &socket, "--cache-dir", &tables, "--push", "off"];
    let (process, ready) = datasets(site, without_capabilities(), log, &flags);
    until(SLOW, || ready.exists().then_some(()));
    process
}

#[test]
fn a_frozen_process_of_a_keeper_for_many_is_replaced() {
    if !have(&[Need::Fuse, Need::Resend, Need::Root]) {
        return;
    }
    let mut held = Held::start(keeper_on(Kernel::Resends));
    held.process.signal(Signal::SIGSTOP);
    let readers: Vec<Child> = (0..4).map(|i| cat(&set_file(&held.site, 0, i))).collect();
    // It has the requests, and the next process gets them after the keeper sent them again.
    thread::sleep(Duration::from_millis(300));
    let next = next_process(&held.site, "next");
    for (i, reader) in readers.into_iter().enumerate() {
        assert_eq!(reader.wait_with_output().expect("a reader").stdout, set_content(0, i));
    }
    // It speaks again, and another one serves its mounts by now.
    let mut frozen = std::mem::replace(&mut held.process, next);
    frozen.signal(Signal::SIGCONT);
    held.read(5);
    frozen.signal(Signal::SIGTERM);
    assert!(frozen.wait(SLOW).success());
    held.read(6);
    held.end();
}

#[test]
fn mounts_that_no_process_served_for_long_fail_and_show_no_empty_directory() {
    if !have(&[Need::Fuse, Need::Resend, Need::Root]) {
        return;
    }
    let mut c = keeper_on(Kernel::Resends);
    c.args(["--hold-for", "2s"]);
    let mut held = Held::start(c);
    held.process.signal(Signal::SIGKILL);
    held.process.wait(SLOW);
    let begun = Instant::now();
    let waiting = fs::read(set_file(&held.site, 1, 0)).expect_err("nobody serves it");
    assert!(is_dead(&waiting), "{waiting}");
    assert!(begun.elapsed() > Duration::from_secs(1), "{:?}", begun.elapsed());
    let listing = fs::read_dir(held.site.place("datasets").join("set-01/"))
        .and_then(|mut names| names.next().expect("no listing is empty"));
    assert!(is_dead(&listing.expect_err("nobody serves it")));
    // The next process begins anew, at the same directory.
    held.process = next_process(&held.site, "next");
    held.read(0);
    held.end();
}

/// Whether an error says that nobody will ever serve the mount.
fn is_dead(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(nix::libc::ENOTCONN | nix::libc::ECONNABORTED))
}

/// Returns a connection to a keeper. Messages do not wait for it.
fn connection(path: &Path) -> OwnedFd {
    let new = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).expect("socket");
    connect(new.as_raw_fd(), &UnixAddr::new(path).expect("a short path")).expect("connected");
    new
}

/// Asks a keeper, and returns its answer.
fn ask(socket: &OwnedFd, message: &[u8]) -> String {
    send(socket.as_raw_fd(), message, MsgFlags::empty()).expect("sent");
    let mut answer = [0; 4096];
    let len = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty()).expect("an answer");
    String::from_utf8_lossy(&answer[..len]).into_owned()
}

fn hello(name: &Path) -> Vec<u8> {
    let hello = serde_json::json!({ "hello": { "name": name, "io_timeout_ms": 1000, "links": false } });
    hello.to_string().into_bytes()
}

#[test]
fn processes_that_say_nothing_or_nonsense_stop_nobody() {
    if !have(&[Need::Fuse, Need::Resend, Need::Root]) {
        return;
    }
    let mut held = Held::start(keeper_on(Kernel::Resends));
    let before = held.descriptors();
    let silent: Vec<OwnedFd> = (0..50).map(|_| connection(&held.socket())).collect();
    let strange = connection(&held.socket());
    for nonsense in [&b"\xff\x00garbage"[..], b"{}", b"{\"explode\":7}", &[b'['; 60_000]] {
        assert!(ask(&strange, nonsense).contains("failed"));
    }
    assert!(ask(&strange, b"\"alive\"").contains("say hello first"));
    // It never reads an answer. The keeper does not wait for it.
    let deaf = connection(&held.socket());
    fcntl(&deaf, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).expect("flags");
    send(deaf.as_raw_fd(), &hello(&held.site.place("datasets").join("deaf")), MsgFlags::empty())
        .expect("sent");
    until(SLOW, || match send(deaf.as_raw_fd(), b"\"alive\"", MsgFlags::MSG_NOSIGNAL) {
        Ok(_) | Err(Errno::EAGAIN) => None,
        Err(error) => Some(error),
    });
    held.read(0);
    held.replace("second");
    held.read(1);
    drop((silent, strange, deaf));
    until(SLOW, || (held.descriptors() <= before).then_some(()));
    held.end();
}

#[test]
fn a_keeper_without_a_free_descriptor_goes_on_when_it_has_one() {
    if !have(&[Need::Fuse, Need::Resend, Need::Root]) {
        return;
    }
    let mut limited = Command::new("prlimit");
    limited.args(["--nofile=40:40", "--"]).arg(bin("fletch-mount"));
    let mut held = Held::start(limited);
    let idle: Vec<OwnedFd> = (0..60).map(|_| connection(&held.socket())).collect();
    until(SLOW, || (held.descriptors() >= 40).then_some(()));
    held.read(0);
    held.process.signal(Signal::SIGKILL);
    held.process.wait(SLOW);
    let waiting = cat(&set_file(&held.site, 0, 3));
    thread::sleep(Duration::from_millis(500));
    drop(idle);
    held.process = next_process(&held.site, "next");
    assert_eq!(waiting.wait_with_output().expect("a reader").stdout, set_content(0, 3));
    held.read(1);
    held.end();
}

#[test]
fn a_link_leads_no_process_out_of_the_keepers_directory() {
    if !have(&[Need::Fuse, Need::Resend, Need::Root]) {
        return;
    }
    let site = Site::start(&[]);
    let below = site.place("datasets").parent().expect("a directory").to_owned();
    let mut keeper = hold(&site, "keeper", Kernel::Resends);
    let elsewhere = TempDir::new().expect("a directory");
    let outside = elsewhere.path().canonicalize().expect("real").join("outside");
    fs::create_dir(&outside).expect("mkdir");
    let flags = MsFlags::empty();
    mount(Some("tmpfs"), &outside, Some("tmpfs"), flags, None::<&str>).expect("mounted");
    fs::write(outside.join("file"), "x").expect("write");
    std::os::unix::fs::symlink(outside.parent().expect("above"), below.join("link")).expect("symlink");
    let socket = connection(&site.place("keeper").join("socket"));
    assert_eq!(ask(&socket, &hello(&below.join("set"))), "\"done\"");
    let state = serde_json::json!({});
    for question in [
        serde_json::json!({ "unmount": { "dir": below.join("link/outside"), "detach": true } }),
        serde_json::json!({ "mount_links": { "dir": below.join("link/outside") } }),
        serde_json::json!({ "mount": { "source": "fletch:x", "allow_other": false,
            "dir": below.join("link/outside"), "state": state } }),
        serde_json::json!({ "mount_links": { "dir": below.join("../outside") } }),
    ] {
        let answer = ask(&socket, question.to_string().as_bytes());
        assert!(answer.contains("failed"), "{question}: {answer}");
        assert!(outside.join("file").exists(), "{question}");
    }
    umount2(&outside, MntFlags::empty()).expect("mounted once");
    drop(socket);
    keeper.signal(Signal::SIGTERM);
    assert!(keeper.wait(SLOW).success());
}
