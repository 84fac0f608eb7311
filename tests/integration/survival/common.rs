//! What the tests of mounts that survive share: a dataset, and the processes of a mount.

use fletch_tests::bins::with_keeper;
use fletch_tests::fixture::Site;
use nix::unistd::Pid;
use std::fs;
use std::process::Command;
use std::time::Duration;

pub(crate) const FILES: usize = 600;
pub(crate) const IN_A_DIRECTORY: usize = 60;
pub(crate) const FILE_BYTES: usize = 50_000;
/// A server that runs beside 64 readers on two cores has others to wait for, too.
pub(crate) const SLOW: Duration = Duration::from_secs(10);

/// A keeper has at most so much memory, in KiB.
pub(crate) const KEEPER_KIB_MAX: u64 = 4096;

pub(crate) fn name(i: usize) -> String {
    format!("d{}/f{i:04}", i / IN_A_DIRECTORY)
}

pub(crate) fn content(i: usize) -> Vec<u8> {
    content_of(i, FILE_BYTES)
}

pub(crate) fn content_of(seed: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Starts a server with the dataset `set`.
pub(crate) fn serve() -> Site {
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
pub(crate) fn until<T>(within: Duration, mut ask: impl FnMut() -> Option<T>) -> T {
    let mut answer = None;
    fletch_tests::watch::until("an answer", within, || {
        answer = ask();
        answer.is_some()
    });
    answer.expect("until says so")
}

/// Returns the process that serves the mount of a keeper, if there is one.
pub(crate) fn worker(keeper: u32) -> Option<Pid> {
    let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok().map(Pid::from_raw)
}

/// Returns the memory of a process that is in use, in KiB, with the pages of its program.
pub(crate) fn resident_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process has memory");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// Returns the page of metrics at a port, or nothing.
pub(crate) fn metrics_at(port: u16) -> String {
    let url = format!("http://127.0.0.1:{port}/metrics");
    let page = Command::new("curl").args(["-sS", "--max-time", "5", &url]).output().expect("curl");
    String::from_utf8_lossy(&page.stdout).into_owned()
}

/// A kernel and how a mount uses it.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Kernel {
    /// It sends unanswered requests again.
    Resends,
    /// It sends none again, as before Linux 6.9.
    Old,
}

/// Returns a command of `fletch-mount` with a keeper, which uses the kernel as one of that kind.
pub(crate) fn keeper_on(kernel: Kernel) -> Command {
    let mut c = with_keeper();
    if kernel == Kernel::Old {
        c.env("FLETCH_TEST_OLD_KERNEL", "1");
    }
    c
}
