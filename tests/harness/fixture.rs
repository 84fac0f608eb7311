//! Datasets, servers and mounts, set up with the programs as a user would set them up.

use crate::bins::{Running, bin, command, run, stdout, without_variables};
use crate::watch::until;
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// A server with its own scratch directory. Dropping it removes both.
#[derive(Debug)]
pub struct Site {
    server: Running,
    /// The base URL of the server.
    pub url: String,
    scratch: TempDir,
    /// The command line of the server: a wrapper, the program, and flags.
    words: Vec<String>,
}

/// A mount. Dropping it ends its daemon and unmounts it.
#[derive(Debug)]
pub struct Mounted {
    daemon: Running,
    /// The mount point.
    pub dir: PathBuf,
}

/// Indexes a local tree, and writes the tables to `to`. Returns the root.
#[must_use]
pub fn index(tree: &Path, to: &Path, more: &[&str]) -> String {
    let state = to.join("index-state");
    fs::create_dir_all(&state).expect("state dir");
    let mut c = command("fletch");
    c.arg("index").arg(tree).arg("--to").arg(to).arg("--state-dir").arg(&state).args(more);
    stdout(&run(&mut c))
}

/// Starts a server over a scratch directory, and waits until it is ready.
fn serve(scratch: &Path, words: &[String]) -> (Running, String) {
    let at = |p: &str| scratch.join(p);
    let ready = at("ready");
    fs::remove_file(&ready).ok();
    let log = fs::File::options().create(true).append(true).open(at("server.log")).expect("log");
    let mut c = without_variables(std::process::Command::new(&words[0]));
    c.args(&words[1..])
        .args(["--listen", "127.0.0.1:0", "--socket"])
        .arg(at("s.sock"))
        .arg("--cache-dir")
        .arg(at("cache"))
        .arg("--state-dir")
        .arg(at("state"))
        .arg("--ready-file")
        .arg(&ready)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    let mut server = Running::spawn("fletch-server", &mut c);
    let log = || fs::read_to_string(at("server.log")).unwrap_or_default();
    until("the server is ready", Duration::from_secs(20), || {
        assert!(server.alive(), "the server ended: {}", log());
        fs::read_to_string(&ready).is_ok_and(|s| s.trim().starts_with("http"))
    });
    let url = fs::read_to_string(&ready).expect("ready file").trim().to_owned();
    (server, url)
}

impl Site {
    /// Starts a server on a free loopback port.
    #[must_use]
    pub fn start(more: &[&str]) -> Self {
        Site::start_by(&[], more)
    }

    /// Starts a server by a wrapper that executes it: `setpriv …`, `sh -c 'exec "$@"' …`.
    #[must_use]
    pub fn start_by(wrapper: &[&str], more: &[&str]) -> Self {
        let scratch = TempDir::with_prefix("fletch-test-").expect("scratch");
        Site::begin(scratch, wrapper, bin("fletch-server"), more)
    }

    /// Starts a server as another user, who owns the scratch directory and the copy of the program in it.
    ///
    /// # Panics
    /// If the test does not run as root.
    #[must_use]
    pub fn start_as(uid: u32, more: &[&str]) -> Self {
        let scratch = TempDir::with_prefix("fletch-test-").expect("scratch");
        let program = scratch.path().join("fletch-server");
        fs::copy(bin("fletch-server"), &program).expect("copy of the program");
        std::os::unix::fs::chown(scratch.path(), Some(uid), Some(uid)).expect("chown");
        let id = uid.to_string();
        let wrapper = ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", "--"];
        Site::begin(scratch, &wrapper, program, more)
    }

    fn begin(scratch: TempDir, wrapper: &[&str], program: PathBuf, more: &[&str]) -> Self {
        let program = program.display().to_string();
        let words = [wrapper, &[&*program], more].concat();
        let words: Vec<String> = words.into_iter().map(str::to_owned).collect();
        let (server, url) = serve(scratch.path(), &words);
        Site { server, url, scratch, words }
    }

    /// Returns the server's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.server.pid()
    }

    /// Kills the server with SIGKILL.
    pub fn kill(&mut self) {
        self.server.signal(Signal::SIGKILL);
        self.server.wait(Duration::from_secs(10));
    }

    /// Ends the server with SIGTERM.
    ///
    /// # Panics
    /// If it does not end cleanly in time.
    pub fn end(&mut self) {
        self.server.signal(Signal::SIGTERM);
        let s = self.server.wait(Duration::from_secs(10));
        assert!(s.success(), "fletch-server: {s}\n{}", self.log());
    }

    /// Starts the server again over its directories. It listens on another port.
    pub fn restart(&mut self) {
        let (server, url) = serve(self.scratch.path(), &self.words);
        (self.server, self.url) = (server, url);
    }

    /// Returns a directory in the scratch directory, and creates it if necessary.
    #[must_use]
    pub fn place(&self, name: &str) -> PathBuf {
        let p = self.scratch.path().join(name);
        fs::create_dir_all(&p).unwrap_or_else(|e| panic!("{}: {e}", p.display()));
        p
    }

    /// Returns the server's cache directory.
    #[must_use]
    pub fn cache_dir(&self) -> PathBuf {
        self.scratch.path().join("cache")
    }

    /// Returns the server's state directory.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        self.scratch.path().join("state")
    }

    /// Returns the path of the server's unix socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.scratch.path().join("s.sock")
    }

    /// Returns the server's process.
    #[must_use]
    pub fn server(&mut self) -> &mut Running {
        &mut self.server
    }

    /// Returns the server's log.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.scratch.path().join("server.log")).unwrap_or_default()
    }

    /// Indexes a tree and registers it under a name. Returns the root.
    #[must_use]
    pub fn publish(&self, name: &str, tree: &Path) -> String {
        let to = self.place(&format!("tables-{name}"));
        let root = index(tree, &to, &[]);
        self.register(name, &tree.display().to_string(), &to.display().to_string());
        root
    }

    /// Registers a dataset.
    pub fn register(&self, name: &str, uri: &str, tables: &str) {
        let mut c = command("fletch");
        c.args(["register", name, uri, "--tables", tables, "--server", &self.url]);
        run(&mut c);
    }

    /// Mounts a dataset, and waits until the mount is usable.
    #[must_use]
    pub fn mount(&self, name: &str, job: &str, more: &[&str]) -> Mounted {
        let server = self.url.clone();
        self.mount_from(&server, name, job, more)
    }

    /// Mounts a dataset through another address of the server, such as a proxy or the socket.
    #[must_use]
    pub fn mount_from(&self, server: &str, name: &str, job: &str, more: &[&str]) -> Mounted {
        self.mount_at(server, self.place(&format!("mnt-{name}-{job}")), name, job, more)
    }

    /// Mounts a dataset at a directory that exists.
    #[must_use]
    pub fn mount_at(&self, server: &str, dir: PathBuf, name: &str, job: &str, more: &[&str]) -> Mounted {
        let log = self.scratch.path().join(format!("mount-{job}.log"));
        Mounted::start(server, dir, &log, &[&[name, "--job", job], more].concat())
    }

    /// Returns the log of a mount's daemon.
    #[must_use]
    pub fn mount_log(&self, job: &str) -> String {
        fs::read_to_string(self.scratch.path().join(format!("mount-{job}.log"))).unwrap_or_default()
    }

    /// Sends a GET to the server's API. Returns the response as JSON.
    #[must_use]
    pub fn json(&self, path: &str) -> Value {
        let text = self.get(path);
        serde_json::from_slice(&text)
            .unwrap_or_else(|e| panic!("{path}: {e}: {}", String::from_utf8_lossy(&text)))
    }

    /// Sends a GET to the server. Returns the body.
    #[must_use]
    pub fn get(&self, path: &str) -> Vec<u8> {
        run(std::process::Command::new("curl")
            .args(["-sS", "--fail", "--max-time", "30"])
            .arg(format!("{}{path}", self.url)))
        .stdout
    }

    /// Returns all series of the server's metrics.
    #[must_use]
    pub fn metrics(&self) -> BTreeMap<String, f64> {
        String::from_utf8_lossy(&self.get("/metrics"))
            .lines()
            .filter(|l| !l.starts_with('#'))
            .filter_map(|l| l.rsplit_once(' '))
            .filter_map(|(k, v)| Some((k.to_owned(), v.parse().ok()?)))
            .collect()
    }

    /// Returns the sum of all series of one metric.
    #[must_use]
    pub fn metric(&self, name: &str) -> f64 {
        self.metrics().iter().filter(|(k, _)| k.split('{').next() == Some(name)).map(|(_, v)| v).sum()
    }
}

/// Whether a FUSE file system is mounted at `dir`.
#[must_use]
pub fn is_mounted(dir: &Path) -> bool {
    let mounts = fs::read("/proc/self/mounts").unwrap_or_default();
    let dir = dir.as_os_str().as_bytes();
    mounts.split(|&b| b == b'\n').any(|l| {
        let mut f = l.split(|&b| b == b' ');
        f.nth(1) == Some(dir) && f.next().is_some_and(|t| t.starts_with(b"fuse"))
    })
}

impl Mounted {
    /// Mounts a dataset at `dir`, and waits until the mount is usable. `words`: its name, and flags.
    ///
    /// # Panics
    /// If it does not get usable.
    #[must_use]
    pub fn start(server: &str, dir: PathBuf, log: &Path, words: &[&str]) -> Self {
        Mounted::start_by(command("fletch-mount"), server, dir, log, words)
    }

    /// As [`Mounted::start`], by a build of `fletch-mount`.
    ///
    /// # Panics
    /// If it does not get usable.
    #[must_use]
    pub fn start_by(mut c: Command, server: &str, dir: PathBuf, log: &Path, words: &[&str]) -> Self {
        let (name, more) = words.split_first().expect("a name");
        c.arg(name)
            .arg(&dir)
            .args(["--server", server])
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(log).expect("log"));
        let mut daemon = Running::spawn("fletch-mount", &mut c);
        until("the mount is usable", Duration::from_secs(20), || {
            assert!(daemon.alive(), "the mount ended: {}", fs::read_to_string(log).unwrap_or_default());
            // A dead mount may be there before. The daemon says when its own is usable.
            is_mounted(&dir) && fs::read_to_string(log).is_ok_and(|text| text.contains("mounted "))
        });
        Mounted { daemon, dir }
    }

    /// Returns the daemon's process.
    #[must_use]
    pub fn daemon(&mut self) -> &mut Running {
        &mut self.daemon
    }

    /// Returns the daemon's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// Ends the daemon with SIGTERM.
    ///
    /// # Panics
    /// If it does not end cleanly, or leaves its mount.
    pub fn stop(mut self) {
        self.daemon.signal(Signal::SIGTERM);
        let s = self.daemon.wait(Duration::from_secs(11));
        assert!(s.success(), "fletch-mount: {s}");
        assert!(!is_mounted(&self.dir), "still mounted: {}", self.dir.display());
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.daemon.signal(Signal::SIGTERM);
        let end = std::time::Instant::now() + Duration::from_secs(11);
        while self.daemon.alive() && std::time::Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        if is_mounted(&self.dir)
            && let Err(e) = umount2(&self.dir, MntFlags::MNT_DETACH)
        {
            eprintln!("{} stays mounted: {e}", self.dir.display());
        }
    }
}

/// Returns the relative paths of all regular files below a directory, sorted. It does not follow symlinks.
///
/// # Panics
/// If a directory cannot be read.
#[must_use]
pub fn files(dir: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(d) = todo.pop() {
        for e in fs::read_dir(&d).unwrap_or_else(|e| panic!("{}: {e}", d.display())) {
            let e = e.expect("entry");
            let t = e.file_type().expect("type");
            if t.is_dir() {
                todo.push(e.path());
            } else if t.is_file() {
                out.push(e.path().strip_prefix(dir).expect("below").to_owned());
            }
        }
    }
    out.sort();
    out
}
