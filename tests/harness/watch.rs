//! Memory and IO of a process, observed through `/proc`. [`fletch_testkit::fuse_trace`] counts FUSE requests.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

/// Returns the first number of the line with this key in `/proc/<pid>/status` or `io`.
fn proc_number(pid: u32, file: &str, key: &str) -> u64 {
    let text =
        fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_else(|e| panic!("{pid} {file}: {e}"));
    text.lines()
        .find_map(|l| l.strip_prefix(key))
        .and_then(|v| v.trim_start_matches(':').split_whitespace().next())
        .and_then(|v| v.parse().ok())
        .unwrap_or_else(|| panic!("{key} in /proc/{pid}/{file}"))
}

/// Returns the peak resident memory of a process, in bytes.
#[must_use]
pub fn peak_rss(pid: u32) -> u64 {
    proc_number(pid, "status", "VmHWM") * 1024
}

/// Returns the current resident memory of a process, in bytes.
#[must_use]
pub fn rss(pid: u32) -> u64 {
    proc_number(pid, "status", "VmRSS") * 1024
}

/// Waits until `done` returns true.
///
/// # Panics
/// If it does not return true in time.
pub fn until(what: &str, within: Duration, mut done: impl FnMut() -> bool) {
    let end = std::time::Instant::now() + within;
    while !done() {
        assert!(std::time::Instant::now() < end, "not within {within:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for the end of a child without reaping it. Returns the bytes that it read.
///
/// These are the bytes of `read(2)` and related calls. The kernel counts the bytes over the child's whole
/// life (files, not sockets).
///
/// # Panics
/// If the child cannot be waited for.
#[must_use]
pub fn bytes_read_until_exit(pid: u32) -> u64 {
    use nix::sys::wait::{Id, WaitPidFlag, waitid};
    let id = Id::Pid(nix::unistd::Pid::from_raw(i32::try_from(pid).expect("a pid")));
    waitid(id, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).expect("waitid");
    bytes_read(pid)
}

/// Returns the bytes that a process has read so far with `read(2)` and related calls.
#[must_use]
pub fn bytes_read(pid: u32) -> u64 {
    proc_number(pid, "io", "rchar")
}

/// Returns the bytes that `dir` occupies, as `du` counts them, with the deleted files that `pid` holds open.
/// The tables of versions in it have a limit of their own and do not count.
#[must_use]
pub fn occupied(dir: &Path, pid: u32) -> u64 {
    let tables = dir.join("tables");
    fn of(p: &Path) -> u64 {
        let Ok(m) = fs::symlink_metadata(p) else { return 0 };
        let inside = || fs::read_dir(p).into_iter().flatten().flatten().map(|e| of(&e.path())).sum();
        m.blocks() * 512 + if m.is_dir() { inside() } else { 0 }
    }
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let nameless = fds.filter(|e| {
        fs::read_link(e.path())
            .is_ok_and(|t| t.starts_with(dir) && t.to_string_lossy().ends_with(" (deleted)"))
    });
    of(dir).saturating_sub(of(&tables))
        + nameless.filter_map(|e| fs::metadata(e.path()).ok()).map(|m| m.blocks() * 512).sum::<u64>()
}
