//! A server that is run as a service of a machine, and mounts of all its datasets.
//!
//! A *service* is a server with a settings file and a fixed port, and with scripts that start and stop it. So
//! commands of a document can change its settings and restart it.

use crate::bins::{Running, bin, bin_dir, command, run, stdout, without_variables};
use crate::fixture::is_mounted;
use crate::prometheus::{Answer, Prometheus, free_port};
use crate::watch::until;
use nix::sys::signal::Signal;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// A server with a settings file. Dropping it ends the server.
#[derive(Debug)]
pub struct Service {
    /// The URL of the server.
    pub url: String,
    scratch: TempDir,
}

fn script(path: &Path, text: &str) {
    fs::write(path, format!("#!/bin/sh\nset -eu\n{text}")).expect("script");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("mode");
}

impl Service {
    /// Starts a server. `cache` has lines of the table `[cache]`, and `origins` has tables `[[origin]]`.
    ///
    /// # Panics
    /// If the server does not start.
    #[must_use]
    pub fn start(cache: &str, origins: &str) -> Self {
        let scratch = TempDir::with_prefix("fletch-service-").expect("scratch");
        let url = format!("http://127.0.0.1:{}", free_port());
        let this = Service { url, scratch };
        let listen = this.url.trim_start_matches("http://");
        let at = |name: &str| this.path(name).display().to_string();
        let dir =
            if cache.contains("dir = ") { String::new() } else { format!("dir = \"{}\"\n", at("cache")) };
        let settings = format!(
            "listen = \"{listen}\"\nsocket = \"{}\"\n\n[cache]\n{dir}{cache}\n\
             [state]\ndir = \"{}\"\n\n{origins}",
            at("s.sock"),
            at("state")
        );
        fs::write(this.config(), settings).expect("settings");
        // The command `fletch` knows no settings of a server.
        fs::write(this.path("origins.toml"), origins).expect("origins");
        let (server, config, log, pid) =
            (bin("fletch-server"), at("fletch.toml"), at("server.log"), at("pid"));
        let start = format!(
            "env -i PATH=\"$PATH\" setsid '{}' --config '{config}' >>'{log}' 2>&1 </dev/null &\n\
             echo $! >'{pid}'\n\
             for i in $(seq 400); do curl -sf '{}/readyz' >'{log}.ready' && exit 0; sleep 0.05; done\n\
             tail '{log}' >&2\nexit 1\n",
            server.display(),
            this.url
        );
        script(&this.path("start"), &start);
        // Who adopted the server may not reap it.
        let ended = "! [ -d /proc/$pid ] || grep -q '^State:.*Z' /proc/$pid/status";
        let stop = format!("pid=$(cat '{pid}')\nkill $pid\nuntil {ended}; do sleep 0.02; done\n");
        script(&this.path("stop"), &stop);
        script(&this.path("restart"), &format!("'{}'\nexec '{}'\n", at("stop"), at("start")));
        this.call("start");
        this
    }

    /// Runs `start`, `stop` or `restart`.
    ///
    /// # Panics
    /// If it fails.
    pub fn call(&self, what: &str) {
        let mut c = without_variables(Command::new(self.path(what)));
        run(&mut c);
    }

    /// Returns a path in the scratch directory: `fletch.toml`, `server.log`, `cache`, or one of your own.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Returns a directory in the scratch directory, and creates it if necessary.
    ///
    /// # Panics
    /// If it cannot be created.
    #[must_use]
    pub fn place(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(&path).expect("scratch");
        path
    }

    /// Returns the settings file.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.path("fletch.toml")
    }

    /// Returns what the server wrote to its log.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.path("server.log")).unwrap_or_default()
    }

    /// Indexes a tree, or packs it into chunks of a size, and registers it. Its tables are in
    /// `tables-NAME`. Returns the root.
    pub fn publish(&self, name: &str, source: &str, pack: Option<&str>) -> String {
        let tables = self.place(&format!("tables-{name}"));
        let mut c = command("fletch");
        c.arg(if pack.is_some() { "pack" } else { "index" }).args([source, "--tables"]).arg(&tables);
        c.args(["--quiet", "--state-dir"])
            .arg(self.place("publish-state"))
            .arg("--config")
            .arg(self.path("origins.toml"));
        if let Some(chunk) = pack {
            c.args(["--chunk-size", chunk]);
        }
        let root = stdout(&run(&mut c));
        self.register(name, source, &tables.display().to_string());
        root
    }

    /// Registers a dataset.
    pub fn register(&self, name: &str, source: &str, tables: &str) {
        let mut c = command("fletch");
        run(c.args(["register", name, source, "--tables", tables, "--server", &self.url]));
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let stopped = Command::new("timeout").arg("12").arg(self.path("stop")).stderr(Stdio::null()).status();
        if !stopped.is_ok_and(|s| s.success())
            && let Ok(pid) = fs::read_to_string(self.path("pid")).unwrap_or_default().trim().parse::<i32>()
        {
            // It may have ended before.
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL).ok();
        }
    }
}

/// Mounts of all datasets of a server, with a metrics page and a cache of the node. Dropping it unmounts
/// them.
#[derive(Debug)]
pub struct NodeMounts {
    daemon: Running,
    /// The directory with the datasets.
    pub dir: PathBuf,
    /// The URL of the metrics page's host.
    pub metrics: String,
}

impl NodeMounts {
    /// Mounts all datasets.
    ///
    /// # Panics
    /// If the mounts are not usable in time.
    #[must_use]
    pub fn start(service: &Service) -> Self {
        let (dir, ready) = (service.path("node").join("datasets"), service.path("mounts-ready"));
        let metrics = format!("http://127.0.0.1:{}", free_port());
        fs::create_dir_all(&dir).expect("scratch");
        let log = fs::File::create(service.path("mounts.log")).expect("log");
        let mut c = command("fletch-mount");
        c.arg("--datasets").arg(&dir).args([
            "--server",
            &service.url,
            "--interval",
            "1s",
            "--io-timeout",
            "2s",
        ]);
        c.args(["--metrics", metrics.trim_start_matches("http://"), "--cache-size", "64MiB", "--cache-dir"]);
        c.arg(service.place("node-cache")).arg("--state-dir").arg(service.place("node-state"));
        c.arg("--ready-file").arg(&ready).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut daemon = Running::spawn("fletch-mount", &mut c);
        until("the datasets are mounted", Duration::from_secs(20), || {
            let log = || fs::read_to_string(service.path("mounts.log")).unwrap_or_default();
            assert!(daemon.alive(), "the mounts ended: {}", log());
            ready.exists()
        });
        NodeMounts { daemon, dir, metrics }
    }
}

impl Drop for NodeMounts {
    fn drop(&mut self) {
        self.daemon.signal(Signal::SIGTERM);
        self.daemon.wait(Duration::from_secs(12));
        if is_mounted(&self.dir) {
            eprintln!("{} stays mounted", self.dir.display());
        }
    }
}

/// Runs a block of commands of a runbook, with its variables. Returns what it printed, and whether it
/// succeeded.
///
/// # Panics
/// If there is no bash.
#[must_use]
pub fn run_block(block: &str, variables: &[(&str, &str)]) -> (String, bool) {
    let mut c = without_variables(Command::new("bash"));
    let path = format!("{}:{}", bin_dir().display(), std::env::var("PATH").unwrap_or_default());
    c.args(["-euc", &format!("exec 2>&1\n{block}")]).env("PATH", path).envs(variables.iter().copied());
    let out = c.stdin(Stdio::null()).output().expect("bash");
    (String::from_utf8_lossy(&out.stdout).into_owned(), out.status.success())
}

/// Asks for the series of an alert. `window` takes the place of the windows of minutes and hours.
#[must_use]
pub fn ask(prometheus: &Prometheus, alert: &str, window: &str) -> Answer {
    let mut found = Answer::new();
    for query in prometheus.alerts().remove(alert).unwrap_or_else(|| panic!("no alert {alert}")) {
        let windows = ["5m", "10m", "15m", "1h"].map(|w| format!("[{w}]"));
        let query = windows.iter().fold(query, |query, w| query.replace(w, &format!("[{window}]")));
        found.extend(prometheus.query(&query, None));
    }
    found
}
