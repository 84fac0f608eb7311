//! Watching from outside: FUSE requests by tracepoint, memory and IO by `/proc`.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The kernel's tracing directory, mounted if need be.
///
/// # Errors
/// Why there is none.
pub fn tracefs() -> Result<PathBuf, String> {
    let dir = PathBuf::from("/sys/kernel/tracing");
    let event = dir.join("events/fuse/fuse_request_send");
    if !event.exists() {
        nix::mount::mount(Some("none"), &dir, Some("tracefs"), nix::mount::MsFlags::empty(), None::<&str>)
            .map_err(|e| format!("cannot mount tracefs: {e}"))?;
    }
    if event.exists() { Ok(dir) } else { Err("this kernel has no fuse tracepoints".into()) }
}

/// Counts the requests that the kernel sends to one FUSE connection, by opcode name.
/// A tracing instance of its own, so that tests do not disturb each other.
#[derive(Debug)]
pub struct FuseTrace {
    instance: PathBuf,
    connection: u64,
}

impl FuseTrace {
    /// Begins to count for the mount at `dir`.
    ///
    /// # Panics
    /// When tracing cannot be set up; ask [`crate::require::have`] first.
    #[must_use]
    pub fn start(dir: &Path) -> Self {
        let dev = fs::metadata(dir).expect("the mount answers").dev();
        // The connection's number is the minor of the mount's device.
        let connection = u64::from(nix::libc::minor(dev));
        let name = format!("fletch-{}-{connection}", std::process::id());
        let instance = tracefs().expect("tracefs").join("instances").join(name);
        fs::create_dir_all(&instance).expect("tracing instance");
        let t = FuseTrace { instance, connection };
        t.write("buffer_size_kb", "65536");
        t.write("events/fuse/fuse_request_send/filter", &format!("connection == {connection}"));
        t.write("events/fuse/fuse_request_send/enable", "1");
        t.write("tracing_on", "1");
        t
    }

    fn write(&self, file: &str, value: &str) {
        fs::write(self.instance.join(file), value).unwrap_or_else(|e| panic!("tracing {file}: {e}"));
    }

    /// The requests since the last call, by opcode (`FUSE_READ`, …).
    ///
    /// # Panics
    /// When the kernel dropped events: a count that may be short is no count.
    #[must_use]
    pub fn take(&self) -> BTreeMap<String, u64> {
        self.write("tracing_on", "0");
        let mut pipe = fs::OpenOptions::new()
            .read(true)
            .custom_flags(nix::libc::O_NONBLOCK)
            .open(self.instance.join("trace_pipe"))
            .expect("trace_pipe");
        let mut text = Vec::new();
        let mut buf = vec![0; 1 << 16];
        loop {
            match pipe.read(&mut buf) {
                Ok(0) => break,
                Ok(n) => text.extend_from_slice(&buf[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(e) => panic!("trace_pipe: {e}"),
            }
        }
        self.write("tracing_on", "1");
        let text = String::from_utf8_lossy(&text);
        assert!(!text.contains("LOST"), "the kernel dropped trace events");
        let mut counts = BTreeMap::new();
        for line in text.lines() {
            let Some((_, event)) = line.split_once("fuse_request_send: ") else { continue };
            assert!(event.contains(&format!("connection {} ", self.connection)), "foreign event: {event}");
            let op = event.split('(').nth(1).and_then(|s| s.split(')').next()).unwrap_or("?");
            *counts.entry(op.to_owned()).or_insert(0) += 1;
        }
        counts
    }
}

impl Drop for FuseTrace {
    fn drop(&mut self) {
        self.write("tracing_on", "0");
        self.write("events/fuse/fuse_request_send/enable", "0");
        if let Err(e) = fs::remove_dir(&self.instance) {
            eprintln!("tracing instance {} stays: {e}", self.instance.display());
        }
    }
}

/// Whether a line of `/proc/<pid>/status` or `io` begins with this key; its first number.
fn proc_number(pid: u32, file: &str, key: &str) -> u64 {
    let text =
        fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_else(|e| panic!("{pid} {file}: {e}"));
    text.lines()
        .find_map(|l| l.strip_prefix(key))
        .and_then(|v| v.trim_start_matches(':').split_whitespace().next())
        .and_then(|v| v.parse().ok())
        .unwrap_or_else(|| panic!("{key} in /proc/{pid}/{file}"))
}

/// Peak resident memory of a process, bytes.
#[must_use]
pub fn peak_rss(pid: u32) -> u64 {
    proc_number(pid, "status", "VmHWM") * 1024
}

/// Resident memory of a process now, bytes.
#[must_use]
pub fn rss(pid: u32) -> u64 {
    proc_number(pid, "status", "VmRSS") * 1024
}

/// Waits until `done` says so.
///
/// # Panics
/// When it does not in time.
pub fn until(what: &str, within: Duration, mut done: impl FnMut() -> bool) {
    let end = std::time::Instant::now() + within;
    while !done() {
        assert!(std::time::Instant::now() < end, "not within {within:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for a child's end without reaping it, and returns the bytes it read by `read(2)` and
/// its kin over its whole life (files, not sockets), as the kernel counted them.
///
/// # Panics
/// When the child cannot be waited for.
#[must_use]
pub fn bytes_read_until_exit(pid: u32) -> u64 {
    use nix::sys::wait::{Id, WaitPidFlag, waitid};
    let id = Id::Pid(nix::unistd::Pid::from_raw(i32::try_from(pid).expect("a pid")));
    waitid(id, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).expect("waitid");
    bytes_read(pid)
}

/// Bytes that a process has read so far by `read(2)` and its kin.
#[must_use]
pub fn bytes_read(pid: u32) -> u64 {
    proc_number(pid, "io", "rchar")
}
