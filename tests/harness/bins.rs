//! The built programs, and child processes that do not outlive their test.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Returns the root of the checkout that runs this test.
///
/// Cargo names it when it runs a test. Two checkouts that share a target directory share compiled tests, so
/// the name at compile time may be the other one's; it serves a test that is run by hand.
#[must_use]
pub fn repo() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    package.parent().expect("tests/ has a parent").to_owned()
}

/// Returns the directory of the programs that `make build` built beside this test.
#[must_use]
pub fn bin_dir() -> PathBuf {
    let exe = std::env::current_exe().expect("this test's own path");
    exe.parent().and_then(|deps| deps.parent()).expect("target/<profile>/deps/<test>").to_owned()
}

/// Returns the path of a built program.
///
/// # Panics
/// If it is not built. A test that skipped itself would prove nothing.
#[must_use]
pub fn bin(name: &str) -> PathBuf {
    let path = bin_dir().join(name);
    assert!(path.is_file(), "{} is not built: run `make build` first", path.display());
    path
}

/// Returns a command of a built program, without the `FLETCH_*` variables of this process.
///
/// What `fletch` remembers for its user, it remembers for this process. Otherwise a test would find which
/// store another one called by the same bucket name. A mount has no keeper unless the test asks for one
/// ([`with_keeper`]): most tests look at the process that they started, or kill it.
#[must_use]
pub fn command(name: &str) -> Command {
    static STATE: LazyLock<PathBuf> = LazyLock::new(|| {
        let state = bin_dir().join("test-state").join(std::process::id().to_string());
        // That of a former process with the same number.
        match std::fs::remove_dir_all(&state) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => panic!("{}: {e}", state.display()),
            _ => state,
        }
    });
    let mut command = without_variables(Command::new(bin(name)));
    command.env("FLETCH_SURVIVE", "false");
    if name == "fletch" {
        command.env("FLETCH_STATE_DIR", &*STATE);
    }
    if name == "fletch-mount" {
        // A mount keeps tables in the cache directory of its user.
        command.env("FLETCH_CACHE_DIR", STATE.join("cache"));
    }
    command
}

/// Returns a command of `fletch-mount` as a user calls it: a keeper holds the mount.
#[must_use]
pub fn with_keeper() -> Command {
    let mut command = command("fletch-mount");
    command.env_remove("FLETCH_SURVIVE");
    command
}

/// Returns a program of the release before, from the folder that `FLETCH_TEST_BEFORE` names.
#[must_use]
pub fn before(name: &str) -> Option<PathBuf> {
    let dir = std::env::var_os("FLETCH_TEST_BEFORE").filter(|dir| !dir.is_empty())?;
    Some(PathBuf::from(dir).join(name))
}

/// Removes the `FLETCH_*` variables of this process from a command.
#[must_use]
pub fn without_variables(mut c: Command) -> Command {
    for (k, _) in std::env::vars_os() {
        if k.to_string_lossy().starts_with("FLETCH_") {
            c.env_remove(k);
        }
    }
    c
}

/// Runs a command to its end.
///
/// # Panics
/// If the command fails. The message has its output.
pub fn run(c: &mut Command) -> Output {
    let out = c.output().unwrap_or_else(|e| panic!("{c:?}: {e}"));
    assert!(
        out.status.success(),
        "{c:?}: {}\n--- stdout\n{}\n--- stderr\n{}",
        out.status,
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    out
}

/// Returns the stdout of a command, without the trailing newline.
#[must_use]
pub fn stdout(out: &Output) -> String {
    String::from_utf8_lossy(&out.stdout).trim_end().to_owned()
}

/// A child process. Dropping it ends the process by its pid.
#[derive(Debug)]
pub struct Running {
    child: Child,
    /// The name of the process in messages.
    pub name: String,
}

impl Running {
    /// Starts a process.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn spawn(name: &str, c: &mut Command) -> Self {
        let child = c.spawn().unwrap_or_else(|e| panic!("{c:?}: {e}"));
        Running { child, name: name.to_owned() }
    }

    /// Returns the process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Takes the process's piped stdin. Dropping the result closes it.
    ///
    /// # Panics
    /// If stdin is not a pipe, or was taken before.
    #[must_use]
    pub fn stdin(&mut self) -> std::process::ChildStdin {
        self.child.stdin.take().expect("a piped stdin")
    }

    /// Sends a signal to the process, which may have ended already.
    pub fn signal(&self, s: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).expect("a pid"));
        match kill(pid, s) {
            Ok(()) | Err(nix::errno::Errno::ESRCH) => {}
            Err(e) => panic!("{}: kill: {e}", self.name),
        }
    }

    /// Waits for the end of the process.
    ///
    /// # Panics
    /// If it does not end in time.
    pub fn wait(&mut self, within: Duration) -> ExitStatus {
        let until = Instant::now() + within;
        loop {
            if let Some(s) = self.child.try_wait().expect("wait") {
                return s;
            }
            assert!(Instant::now() < until, "{} did not end within {within:?}", self.name);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Whether the process still runs.
    pub fn alive(&mut self) -> bool {
        self.child.try_wait().expect("wait").is_none()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.alive() {
            return;
        }
        self.signal(Signal::SIGTERM);
        let until = Instant::now() + Duration::from_secs(12);
        while self.alive() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        if self.alive() {
            self.signal(Signal::SIGKILL);
            // Waiting fails only if the process was reaped already.
            self.child.wait().ok();
        }
    }
}
