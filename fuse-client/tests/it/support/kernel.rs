//! A real mount, made by the built program.

use fletch_host::mounts;
use nix::{
    mount::{MntFlags, umount2},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Returns whether tests that need a kernel mount can run here. Prints why not.
///
/// # Panics
/// `FLETCH_TEST_REQUIRE` names `fuse` and the tests cannot run.
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

/// Returns whether the kernel's FUSE tracepoints can be read. Prints why not.
///
/// # Panics
/// `FLETCH_TEST_REQUIRE` names `trace` and the tracepoints cannot be read.
pub fn can_trace() -> bool {
    can("trace", || fletch_testkit::fuse_trace::tracefs().map(drop))
}

fn can(what: &str, check: impl FnOnce() -> Result<(), String>) -> bool {
    let Err(why) = check() else { return true };
    let required = std::env::var("FLETCH_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|w| w == what), "required: {what}: {why}");
    eprintln!("SKIPPED: needs {what}: {why}");
    false
}

/// A mount made by the built program. Dropping it unmounts and ends the program.
pub struct Mount {
    pub child: Child,
    pub lines: Receiver<String>,
    dir: PathBuf,
    /// The directory, if the mount made one.
    _own: Option<TempDir>,
    seen: Vec<String>,
}

impl Mount {
    /// Mounts dataset `d` of a server and waits until it is usable.
    pub fn start(server: &str, args: &[&str]) -> Self {
        let mut m = Mount::begin(server, args);
        m.wait_for("mounted d ");
        m
    }

    /// Mounts at a directory that exists, and waits until the mount is usable.
    pub fn start_at(server: &str, dir: &Path, args: &[&str]) -> Self {
        let mut m = Mount::begin_at(server, dir.to_owned(), None, args);
        m.wait_for("mounted d ");
        m
    }

    pub fn begin(server: &str, args: &[&str]) -> Self {
        let own = tempfile::tempdir().expect("tempdir");
        Mount::begin_at(server, own.path().to_owned(), Some(own), args)
    }

    fn begin_at(server: &str, dir: PathBuf, own: Option<TempDir>, args: &[&str]) -> Self {
        let mut child = command()
            .arg("d")
            .arg(&dir)
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
        Mount { child, lines, dir, _own: own, seen: Vec::new() }
    }

    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Returns whether a line with `text` came before the one that was waited for.
    pub fn seen(&self, text: &str) -> bool {
        self.seen.iter().any(|line| line.contains(text))
    }

    /// Waits for a log line that contains `text`.
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

    /// Waits for the program to end, for at most `within`.
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

    /// Returns the entry of the mount table for this directory.
    pub fn entry(&self) -> Option<mounts::MountEntry> {
        mounts::at(&fs::canonicalize(&self.dir).unwrap_or_else(|_| self.dir.clone())).expect("mountinfo")
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
        while mounts::at(&self.dir).is_ok_and(|m| m.is_some()) {
            umount2(&self.dir, MntFlags::MNT_DETACH).expect("unmount what was mounted");
        }
    }
}

pub fn command() -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_fletch-mount"));
    // These tests look at the process that they started.
    c.env("FLETCH_SURVIVE", "false");
    c.stdin(Stdio::null()).stdout(Stdio::null());
    c
}
