//! Mounts that share a store, and what they are asked.

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

/// A server that keeps next to nothing, and the node's cache directory.
pub struct Node {
    pub site: Site,
    pub cache: PathBuf,
    /// What a store may occupy.
    pub size: &'static str,
    /// The memory of its mounts: a quarter of it is the disk's queue.
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

    /// A mount that keeps chunks on this node, in little memory, so that the disk is what counts.
    pub fn mount(&self, name: &str, job: &str, more: &[&str]) -> Mounted {
        let cache = self.cache.display().to_string();
        let own = ["--cache-dir", &cache, "--cache-size", self.size, "--cache-free-floor", "0"];
        let small = ["--memory", self.memory, "--push", "off"];
        self.site.mount(name, job, &[&own[..], &small, more].concat())
    }

    /// The directories of its stores, one for each principal.
    pub fn stores(&self) -> Vec<PathBuf> {
        let all = self.cache.join(format!("mounts-{}", nix::unistd::geteuid()));
        let all = fs::read_dir(all).into_iter().flatten().flatten();
        all.map(|e| e.path()).collect()
    }

    /// What the owner of the only store says of it; nothing while there is none.
    pub fn state(&self) -> Option<Value> {
        let stores = self.stores();
        assert!(stores.len() <= 1, "{stores:?}");
        state_of(stores.first()?)
    }

    /// Waits until the owner's process is this, and `n` chunks are on disk.
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

    /// Waits until nothing waits to be appended.
    pub fn appended(&self) {
        until("appended", Duration::from_secs(30), || self.state().is_some_and(|s| s["queued_bytes"] == 0));
    }

    /// Reads every file of a mount, no faster than the disk takes it, so that all of it can be kept: what does not
    /// fit into the queue is dropped, rightly.
    pub fn read_to_keep(&self, mount: &Path, data: &Data) {
        for some in data.files.chunks((4 << 20) / data.len as usize) {
            some.iter().for_each(|(path, hash)| read_one(mount, path, *hash));
            self.appended();
        }
    }

    /// Bytes of content that the server has sent, to all jobs or to one.
    pub fn sent(&self, job: &str) -> u64 {
        let label = format!("train_job=\"{job}\"");
        let of = |k: &str| k.starts_with("fletch_bytes_total{") && (job.is_empty() || k.contains(&label));
        self.site.metrics().iter().filter(|(k, _)| of(k)).map(|(_, n)| *n as u64).sum()
    }
}

/// What the owner of a store says of it.
pub fn state_of(store: &Path) -> Option<Value> {
    let dir = fs::File::open(store).ok()?;
    let socket =
        format!("/proc/{}/fd/{}/node.sock", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&dir));
    let mut c = Command::new("curl");
    c.args(["-sS", "--max-time", "5", "--unix-socket", &socket, "http://localhost/node/v1/state"]);
    let out = c.output().expect("curl");
    out.status.success().then(|| serde_json::from_slice(&out.stdout).expect("JSON"))
}

/// Reads every file of a mount and checks it; the kernel forgets it then.
pub fn read_all(mount: &Path, data: &Data) {
    data.files.iter().for_each(|(path, hash)| read_one(mount, path, *hash));
}

/// Reads one file and checks it; the kernel forgets it then.
pub fn read_one(mount: &Path, path: &str, hash: Hash) {
    let bytes = fs::read(mount.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    assert!(Hash::of(&bytes) == hash, "I1: WRONG BYTES of {path}");
    let file = fs::File::open(mount.join(path)).expect("open");
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).expect("drop");
}

/// Ends a mount and reads its report.
pub fn end(mount: Mounted, report: &Path) -> Value {
    mount.stop();
    serde_json::from_slice(&fs::read(report).expect("report")).expect("JSON")
}

/// Makes a token for a tenant, appended to `file`; where it lies.
pub fn token(home: &Path, file: &Path, tenant: &str) -> PathBuf {
    let mut c = fletch_tests::bins::command("fletch-server");
    c.args(["token", "new", "--tenant", tenant, "--append"]).arg(file);
    let at = home.join(format!("{tenant}.token"));
    fs::write(&at, fletch_tests::bins::stdout(&run(&mut c))).expect("token");
    at
}
