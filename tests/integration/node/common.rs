//! Helpers of the node tests: mounts that share a store, and questions to the store's owner.

use fletch_core::Hash;
use fletch_tests::bins::run;
use fletch_tests::fixture::{Mounted, Site};
use fletch_tests::readers::Data;
use fletch_tests::watch::until;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A server with almost no cache, and the cache directory of the node.
pub struct Node {
    pub site: Site,
    pub cache: PathBuf,
    /// The limit of a store, as a size.
    pub size: &'static str,
    /// The memory of each mount. The append queue has a quarter of it.
    pub memory: &'static str,
}

impl Node {
    pub fn start() -> Self {
        Node::with(&[])
    }

    pub fn with(more: &[&str]) -> Self {
        let site = Site::start(&[&["--memory", "64MiB", "--cache-size", "0"], more].concat());
        let cache = site.place("node");
        Node { site, cache, size: "256MiB", memory: "64MiB" }
    }

    pub fn of(size: &'static str, memory: &'static str) -> Self {
        Node { size, memory, ..Node::start() }
    }

    /// Mounts a dataset with a cache on this node, and with little memory, so that reads depend on the disk.
    pub fn mount(&self, name: &str, job: &str, more: &[&str]) -> Mounted {
        let cache = self.cache.display().to_string();
        let own = ["--cache-dir", &cache, "--cache-size", self.size, "--cache-free-floor", "0"];
        let small = ["--memory", self.memory, "--push", "off"];
        self.site.mount(name, job, &[&own[..], &small, more].concat())
    }

    /// Returns the directories of the node's stores, one for each principal.
    pub fn stores(&self) -> Vec<PathBuf> {
        let all = self.cache.join(format!("mounts-{}", nix::unistd::geteuid()));
        let all = fs::read_dir(all).into_iter().flatten().flatten();
        // Beside them lies the id of the cache directory, a file.
        all.map(|e| e.path()).filter(|path| path.is_dir()).collect()
    }

    /// Returns the state of the only store, as its owner reports it; `None` while there is no store.
    pub fn state(&self) -> Option<Value> {
        let stores = self.stores();
        assert!(stores.len() <= 1, "{stores:?}");
        state_of(stores.first()?)
    }

    /// Waits until the store's owner is this process, and has this number of chunks on disk.
    pub fn settled(&self, owner: u32, chunks: u64) {
        until(
            &format!("{chunks} chunks are kept by {owner}: {:?}", self.state()),
            Duration::from_secs(30),
            || {
                self.state().is_some_and(|s| {
                    (&s["pid"], &s["chunks"], &s["queued_bytes"])
                        == (&owner.into(), &chunks.into(), &0.into())
                })
            },
        );
    }

    /// Waits until the append queue is empty.
    pub fn appended(&self) {
        until("appended", Duration::from_secs(30), || self.state().is_some_and(|s| s["queued_bytes"] == 0));
    }

    /// Reads every file of a mount, so slowly that the append queue has room for all chunks.
    pub fn read_to_keep(&self, mount: &Path, data: &Data) {
        for some in data.files.chunks((4 << 20) / data.len as usize) {
            some.iter().for_each(|(path, hash)| read_one(mount, path, *hash));
            self.appended();
        }
    }

    /// Returns the bytes of content that the server sent to a job; an empty string stands for all jobs.
    pub fn sent(&self, job: &str) -> u64 {
        let label = format!("train_job=\"{job}\"");
        let of = |k: &str| k.starts_with("fletch_bytes_total{") && (job.is_empty() || k.contains(&label));
        self.site.metrics().iter().filter(|(k, _)| of(k)).map(|(_, n)| *n as u64).sum()
    }
}

/// Returns the state of a store, as its owner reports it.
pub fn state_of(store: &Path) -> Option<Value> {
    let dir = fs::File::open(store).ok()?;
    let socket =
        format!("/proc/{}/fd/{}/node.sock", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&dir));
    let mut c = Command::new("curl");
    c.args(["-sS", "--max-time", "5", "--unix-socket", &socket, "http://localhost/node/v1/state"]);
    let out = c.output().expect("curl");
    out.status.success().then(|| serde_json::from_slice(&out.stdout).expect("JSON"))
}

/// Reads and checks every file of a mount, and drops each from the page cache.
pub fn read_all(mount: &Path, data: &Data) {
    data.files.iter().for_each(|(path, hash)| read_one(mount, path, *hash));
}

/// Reads and checks one file, and drops it from the page cache.
pub fn read_one(mount: &Path, path: &str, hash: Hash) {
    let bytes = fs::read(mount.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    assert!(Hash::of(&bytes) == hash, "I1: WRONG BYTES of {path}");
    let file = fs::File::open(mount.join(path)).expect("open");
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).expect("drop");
}

/// Ends a mount and returns its report.
pub fn end(mount: Mounted, report: &Path) -> Value {
    mount.stop();
    serde_json::from_slice(&fs::read(report).expect("report")).expect("JSON")
}

/// Creates a token for a tenant, and appends its entry to the tokens file `file`. Returns the token's path.
pub fn token(home: &Path, file: &Path, tenant: &str) -> PathBuf {
    let mut c = fletch_tests::bins::command("fletch-server");
    c.args(["token", "new", "--tenant", tenant, "--append"]).arg(file);
    let at = home.join(format!("{tenant}.token"));
    fs::write(&at, fletch_tests::bins::stdout(&run(&mut c))).expect("token");
    at
}
