//! The FUSE requests of one mount, counted by the kernel's tracepoints.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Returns the kernel's tracing directory, and mounts it if necessary.
///
/// # Errors
/// The reason why there is no such directory.
pub fn tracefs() -> Result<PathBuf, String> {
    let dir = PathBuf::from("/sys/kernel/tracing");
    let event = dir.join("events/fuse/fuse_request_send");
    if !event.exists() {
        nix::mount::mount(Some("none"), &dir, Some("tracefs"), nix::mount::MsFlags::empty(), None::<&str>)
            .map_err(|e| format!("cannot mount tracefs: {e}"))?;
    }
    if event.exists() { Ok(dir) } else { Err("this kernel has no fuse tracepoints".into()) }
}

/// The kernel's event for a page that leaves the page cache.
const DROPPED: &str = "events/filemap/mm_filemap_delete_from_page_cache";

/// Counts the requests that the kernel sends to one FUSE connection, by opcode name.
///
/// It uses its own tracing instance, so that tests do not disturb each other. A kernel may drop clean pages
/// at any time, because of memory pressure or proactive reclaim, and must read them again.
/// [`FuseTrace::take_again`] leaves such reads out: at most one for each page that was seen to leave.
#[derive(Debug)]
pub struct FuseTrace {
    instance: PathBuf,
    connection: u64,
    /// The number of pages that left and that were not seen to be read again.
    dropped: Cell<u64>,
}

impl FuseTrace {
    /// Starts counting for the mount at `dir`.
    ///
    /// # Panics
    /// If tracing cannot be set up. A test checks [`tracefs`] first.
    #[must_use]
    pub fn start(dir: &Path) -> Self {
        let dev = fs::metadata(dir).expect("the mount answers").dev();
        // The connection's number is the minor of the mount's device.
        let connection = u64::from(libc::minor(dev));
        let name = format!("fletch-{}-{connection}", std::process::id());
        let instance = tracefs().expect("tracefs").join("instances").join(name);
        fs::create_dir_all(&instance).expect("tracing instance");
        let t = FuseTrace { instance, connection, dropped: Cell::new(0) };
        t.write("buffer_size_kb", "65536");
        t.write("events/fuse/fuse_request_send/filter", &format!("connection == {connection}"));
        t.write("events/fuse/fuse_request_send/enable", "1");
        t.write(&format!("{DROPPED}/filter"), &format!("s_dev == {connection}"));
        t.write(&format!("{DROPPED}/enable"), "1");
        t.write("tracing_on", "1");
        t
    }

    fn write(&self, file: &str, value: &str) {
        fs::write(self.instance.join(file), value).unwrap_or_else(|e| panic!("tracing {file}: {e}"));
    }

    /// Returns the number of requests since the last call, by opcode (`FUSE_READ`, …).
    ///
    /// # Panics
    /// If the kernel dropped events, because the counts would be too low.
    #[must_use]
    pub fn take(&self) -> BTreeMap<String, u64> {
        let mut pipe = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
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
        let text = String::from_utf8_lossy(&text);
        assert!(!text.contains("LOST"), "the kernel dropped trace events");
        let mut counts = BTreeMap::new();
        for line in text.lines() {
            if line.contains("mm_filemap_delete_from_page_cache: ") {
                self.dropped.set(self.dropped.get() + 1);
            }
            let Some((_, event)) = line.split_once("fuse_request_send: ") else { continue };
            assert!(event.contains(&format!("connection {} ", self.connection)), "foreign event: {event}");
            let op = event.split('(').nth(1).and_then(|s| s.split(')').next()).unwrap_or("?");
            *counts.entry(op.to_owned()).or_insert(0) += 1;
        }
        // The kernel sends forgets at any time, and they get no answer.
        counts.retain(|op, _| op != "FUSE_FORGET" && op != "FUSE_BATCH_FORGET");
        counts
    }

    /// Returns the number of pages that the kernel dropped, and whose next read was not left out yet.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.get()
    }

    /// [`FuseTrace::take`] without the reads of pages that the kernel had and dropped by itself.
    ///
    /// Use it for a phase in which the kernel has every page already.
    ///
    /// # Panics
    /// As [`FuseTrace::take`].
    #[must_use]
    pub fn take_again(&self) -> BTreeMap<String, u64> {
        let mut counts = self.take();
        if let Some(reads) = counts.get_mut("FUSE_READ") {
            let again = self.dropped.get().min(*reads);
            self.dropped.set(self.dropped.get() - again);
            *reads -= again;
        }
        counts.retain(|_, n| *n > 0);
        counts
    }
}

impl Drop for FuseTrace {
    fn drop(&mut self) {
        self.write("tracing_on", "0");
        self.write("events/fuse/fuse_request_send/enable", "0");
        self.write(&format!("{DROPPED}/enable"), "0");
        if let Err(e) = fs::remove_dir(&self.instance) {
            eprintln!("tracing instance {} stays: {e}", self.instance.display());
        }
    }
}
