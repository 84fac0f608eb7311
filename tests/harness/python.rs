//! The Python package as its users get it: the built wheel, installed for a Python interpreter with torch.
//!
//! `tests/install.sh` installs the interpreter.

use crate::bins::{bin_dir, repo, run, without_variables};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Returns the directory in which `tests/install.sh` installs the tools of the tests.
#[must_use]
pub fn servers() -> PathBuf {
    let named = std::env::var_os("FLETCH_TEST_SERVERS").map(PathBuf::from);
    named.unwrap_or_else(|| bin_dir().parent().expect("target").join("test-servers"))
}

/// Returns the interpreter that has torch, torchvision, pytest and mypy.
///
/// # Errors
/// The name of what is missing.
pub fn interpreter() -> Result<PathBuf, String> {
    let python = servers().join("torch/bin/python");
    if !python.is_file() {
        return Err(format!("no {}: tests/install.sh makes it", python.display()));
    }
    let find = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))";
    let mut c = Command::new(&python);
    match c.args(["-c", find, "torch", "torchvision", "PIL", "pytest", "mypy"]).status() {
        Ok(s) if s.success() => Ok(python),
        Ok(_) => Err(format!("{} lacks torch, torchvision, PIL, pytest or mypy", python.display())),
        Err(e) => Err(format!("{}: {e}", python.display())),
    }
}

/// Returns the wheel that was built beside the programs.
///
/// # Errors
/// The reason why there is none.
pub fn wheel() -> Result<PathBuf, String> {
    let dir = bin_dir().join("wheels");
    let built = fs::read_dir(&dir).into_iter().flatten().filter_map(|e| Some(e.ok()?.path()));
    let mut wheels: Vec<PathBuf> = built.filter(|p| p.extension().is_some_and(|x| x == "whl")).collect();
    match (wheels.pop(), wheels.is_empty()) {
        (Some(wheel), true) => Ok(wheel),
        _ => Err(format!("{} does not hold one wheel: run `make wheel` first", dir.display())),
    }
}

/// Returns a directory of real images with one folder for each class.
///
/// # Errors
/// The directory that does not exist.
pub fn images() -> Result<PathBuf, String> {
    let dir = servers().join("images/icons");
    if dir.is_dir() { Ok(dir) } else { Err(format!("no {}: tests/install.sh fetches it", dir.display())) }
}

/// The package, installed in a directory of its own. Dropping it removes the directory.
#[derive(Debug)]
pub struct Installed {
    python: PathBuf,
    site: TempDir,
}

impl Installed {
    /// Installs the wheel.
    ///
    /// # Panics
    /// If it cannot be installed.
    #[must_use]
    pub fn new() -> Self {
        let (python, wheel) = (interpreter().expect("python"), wheel().expect("wheel"));
        let site = TempDir::with_prefix("fletch-site-").expect("site");
        let mut pip = Command::new(&python);
        pip.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-index",
        ]);
        run(pip.arg("--target").arg(site.path()).arg(wheel));
        Installed { python, site }
    }

    /// Returns the directory of the package.
    #[must_use]
    pub fn site(&self) -> &Path {
        self.site.path()
    }

    /// Returns a command of the interpreter with the package, without this process's `FLETCH_*` variables.
    #[must_use]
    pub fn command(&self) -> Command {
        self.with_package(Command::new(&self.python))
    }

    /// As [`Installed::command`], with an empty `/dev/shm` that no other process sees, where this user may
    /// mount one.
    fn command_with_own_shared_memory(&self) -> Command {
        const SCRIPT: &str = "mount -t tmpfs tmpfs /dev/shm && exec \"$@\"";
        let in_namespace = |more: &[&str]| {
            let mut c = Command::new("unshare");
            c.arg("--mount").args(more).args(["sh", "-c", SCRIPT, "sh"]);
            c
        };
        let ways: [&[&str]; 2] = [&[], &["--map-root-user"]];
        for more in ways {
            let mut probe = in_namespace(more);
            probe.arg("true").stderr(Stdio::null());
            if probe.status().is_ok_and(|status| status.success()) {
                let mut c = in_namespace(more);
                c.arg(&self.python);
                return self.with_package(c);
            }
        }
        eprintln!("no mount namespace: tests see the shared memory of others");
        self.command()
    }

    fn with_package(&self, c: Command) -> Command {
        let mut c = without_variables(c);
        c.env("PYTHONPATH", self.site())
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("OMP_NUM_THREADS", "1")
            .env("FLETCH_BIN", bin_dir())
            .current_dir(repo().join("python/tests"))
            .stdin(Stdio::null());
        if std::env::var_os("FLETCH_SOAK").is_some() {
            c.env("SOAK", "1");
        }
        c
    }

    /// Runs tests of `python/tests`, with a temporary directory and a shared memory of their own: tests look
    /// at what is left in them, and others run at the same time.
    ///
    /// # Panics
    /// If a test fails or skips. The message has the output.
    pub fn pytest(&self, args: &[&str]) {
        let text = self.pytest_output(args);
        assert!(!text.contains(" skipped"), "{text}");
    }

    /// As [`Installed::pytest`], for tests that skip if a framework is not installed. Prints why they skip.
    ///
    /// # Panics
    /// If a test fails, or all skip. The message has the output.
    pub fn pytest_of_frameworks(&self, args: &[&str]) {
        let text = self.pytest_output(&[&["-rs"], args].concat());
        for reason in text.lines().filter(|line| line.starts_with("SKIPPED")) {
            eprintln!("{reason}");
        }
    }

    fn pytest_output(&self, args: &[&str]) -> String {
        let tmp = TempDir::with_prefix("fletch-pytest-").expect("tmp");
        let mut c = self.command_with_own_shared_memory();
        c.env("TMPDIR", tmp.path());
        c.args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp"]).arg(tmp.path().join("t"));
        let out = run(c.args(args));
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let end = text.lines().last().unwrap_or_default();
        assert!(end.contains(" passed"), "{text}");
        eprintln!("{end}");
        text
    }
}

impl Default for Installed {
    fn default() -> Self {
        Installed::new()
    }
}
