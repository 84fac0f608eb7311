//! A real mount by the built program, and the kernel's requests to it, counted from outside.

use fletch_mount::mountinfo;
use nix::{
    mount::{MntFlags, MsFlags, umount2},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Whether tests that need a kernel mount can run here; says why not.
///
/// # Panics
/// When `FLETCH_TEST_REQUIRE` names `fuse` and they cannot.
pub fn can_mount() -> bool {
    can("fuse", || {
        let open = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
        match open {
            Ok(_) if nix::unistd::geteuid().is_root() => Ok(()),
            Ok(_) => Err("these tests mount as root".into()),
            Err(e) => Err(format!("/dev/fuse: {e}")),
        }
    })
}

/// Whether the kernel's FUSE tracepoints can be read; says why not.
///
/// # Panics
/// When `FLETCH_TEST_REQUIRE` names `trace` and they cannot.
pub fn can_trace() -> bool {
    can("trace", || {
        let event = Path::new(TRACING).join("events/fuse/fuse_request_send");
        if !event.exists() {
            nix::mount::mount(Some("none"), TRACING, Some("tracefs"), MsFlags::empty(), None::<&str>)
                .map_err(|e| format!("tracefs: {e}"))?;
        }
        if event.exists() { Ok(()) } else { Err("no fuse tracepoints".into()) }
    })
}

fn can(what: &str, check: impl FnOnce() -> Result<(), String>) -> bool {
    let Err(why) = check() else { return true };
    let required = std::env::var("FLETCH_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|w| w == what), "required: {what}: {why}");
    eprintln!("SKIPPED: needs {what}: {why}");
    false
}

const TRACING: &str = "/sys/kernel/tracing";

/// A mount by the built program; unmounted and gone when dropped.
pub struct Mount {
    pub child: Child,
    pub lines: Receiver<String>,
    dir: TempDir,
    seen: Vec<String>,
}

impl Mount {
    /// Mounts dataset `d` of a server and waits until it is usable.
    pub fn start(server: &str, args: &[&str]) -> Self {
        let mut m = Mount::begin(server, args);
        m.wait_for("mounted d ");
        m
    }

    pub fn begin(server: &str, args: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("tempdir");
        let mut child = command()
            .arg("d")
            .arg(dir.path())
            .args(["--server", server])
            .args(args)
            .stderr(Stdio::piped())
            .spawn()
            .expect("fletch-mount starts");
        let (tell, lines) = channel();
        let stderr = BufReader::new(child.stderr.take().expect("piped"));
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        Mount { child, lines, dir, seen: Vec::new() }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line of its log.
    pub fn wait_for(&mut self, text: &str) -> String {
        let until = Instant::now() + Duration::from_secs(15);
        loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) if line.contains(text) => return line,
                Ok(line) => self.seen.push(line),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("no line with {text:?}; it said: {:#?}", self.seen)
                }
            }
        }
    }

    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("pid");
        kill(Pid::from_raw(pid), signal).expect("it runs");
    }

    /// Waits for its end, which must come in time.
    pub fn ended(&mut self, within: Duration) -> ExitStatus {
        let until = Instant::now() + within;
        loop {
            if let Some(status) = self.child.try_wait().expect("our child") {
                return status;
            }
            assert!(Instant::now() < until, "still running after {within:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// What is mounted there now.
    pub fn entry(&self) -> Option<mountinfo::MountEntry> {
        mountinfo::at(&fs::canonicalize(self.dir.path()).unwrap_or_else(|_| self.dir.path().into()))
            .expect("mountinfo")
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|s| s.is_none()) {
            self.signal(Signal::SIGTERM);
            let until = Instant::now() + Duration::from_secs(10);
            while self.child.try_wait().is_ok_and(|s| s.is_none()) && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(10));
            }
            drop(self.child.kill());
            drop(self.child.wait());
        }
        while mountinfo::at(self.dir.path()).is_ok_and(|m| m.is_some()) {
            umount2(self.dir.path(), MntFlags::MNT_DETACH).expect("unmount what was mounted");
        }
    }
}

pub fn command() -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_fletch-mount"));
    c.stdin(Stdio::null()).stdout(Stdio::null());
    c
}

/// Requests of the kernel to one mount, from the kernel's own tracepoint.
pub struct Trace {
    instance: PathBuf,
}

impl Trace {
    pub fn start(mount: &Mount) -> Self {
        let entry = mount.entry().expect("mounted");
        let connection = entry.device.split(':').nth(1).expect("minor").to_owned();
        let instance = Path::new(TRACING).join(format!("instances/fletch-mount-{}", mount.pid()));
        fs::create_dir_all(&instance).expect("tracing instance");
        let t = Trace { instance };
        t.write("buffer_size_kb", "16384");
        t.write("events/fuse/fuse_request_send/filter", &format!("connection == {connection}"));
        t.write("events/fuse/fuse_request_send/enable", "1");
        t.write("tracing_on", "1");
        t
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.instance.join(file), text).unwrap_or_else(|e| panic!("tracing {file}: {e}"));
    }

    /// Requests since the last call, by opcode.
    pub fn take(&self) -> BTreeMap<String, u64> {
        let mut pipe = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(self.instance.join("trace_pipe"))
            .expect("trace_pipe");
        let mut text = Vec::new();
        let mut buf = vec![0; 1 << 16];
        while let Ok(n @ 1..) = pipe.read(&mut buf) {
            text.extend_from_slice(&buf[..n]);
        }
        let text = String::from_utf8_lossy(&text);
        assert!(!text.contains("LOST"), "events were dropped: the count would be short");
        let mut counts = BTreeMap::new();
        for event in text.lines().filter_map(|l| l.split_once("fuse_request_send: ")) {
            let op = event.1.split(['(', ')']).nth(1).unwrap_or("?");
            *counts.entry(op.to_owned()).or_insert(0) += 1;
        }
        // Forgets are sent whenever the kernel likes and are answered by nobody.
        counts.remove("FUSE_FORGET");
        counts.remove("FUSE_BATCH_FORGET");
        counts
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.write("events/fuse/fuse_request_send/enable", "0");
        if let Err(e) = fs::remove_dir(&self.instance) {
            eprintln!("tracing instance stays: {e}");
        }
    }
}
