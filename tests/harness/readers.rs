//! Concurrent HTTP readers that know only the server's URLs, readers of mounts, and datasets with the hashes
//! that they must get.

use crate::fixture::Site;
use fletch_core::Hash;
use fletch_testkit::dataset::content;
use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    fs,
    io::Read,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// A dataset of files of one length, each with unique content.
#[derive(Debug)]
pub struct Data {
    /// The directory of the files.
    pub dir: PathBuf,
    /// The path and the content hash of each file.
    pub files: Vec<(String, Hash)>,
    /// The length of each file in bytes.
    pub len: u64,
    _own: Option<TempDir>,
}

impl Data {
    /// Writes `n` files of `len` bytes into a temporary directory.
    #[must_use]
    pub fn new(seed: u64, n: u64, len: u64) -> Self {
        let own = TempDir::with_prefix("fletch-data-").expect("a directory");
        let dir = own.path().to_owned();
        Data { _own: Some(own), ..Data::within(&dir, seed, n, len) }
    }

    /// Writes `n` files of `len` bytes into a directory of the caller.
    #[must_use]
    pub fn within(dir: &Path, seed: u64, n: u64, len: u64) -> Self {
        let file = |i: u64| {
            let path = format!("{:03}/{i:06}", i / 1000);
            if i.is_multiple_of(1000) {
                fs::create_dir_all(dir.join(format!("{:03}", i / 1000))).expect("mkdir");
            }
            let bytes = content(seed, i, len);
            fs::write(dir.join(&path), &bytes).expect("write");
            (path, Hash::of(&bytes))
        };
        Data { dir: dir.to_owned(), files: (0..n).map(file).collect(), len, _own: None }
    }

    /// Returns the same files in reverse order.
    #[must_use]
    pub fn backwards(&self) -> Self {
        let files = self.files.iter().rev().cloned().collect();
        Data { dir: self.dir.clone(), files, len: self.len, _own: None }
    }

    /// Returns the bytes of all files together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.len * self.files.len() as u64
    }
}

/// The result of reading files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Got {
    /// The bytes that were read. All of them were right.
    pub bytes: u64,
    /// The files that were refused or not sent completely.
    pub failed: u64,
}

/// A crowd of HTTP clients.
#[derive(Debug)]
pub struct Readers {
    runtime: Runtime,
    http: reqwest::Client,
}

impl Default for Readers {
    fn default() -> Self {
        Readers::new()
    }
}

impl Readers {
    /// Nobody reads yet.
    #[must_use]
    pub fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("runtime");
        let http = reqwest::Client::builder().timeout(Duration::from_secs(60)).build().expect("client");
        Readers { runtime, http }
    }

    /// Has `at_once` clients read files, each once, in the order given.
    ///
    /// # Panics
    /// I1: at the first wrong byte.
    #[must_use]
    pub fn read(&self, site: &Site, root: &str, files: &[(String, Hash)], at_once: usize) -> Got {
        self.read_through(&[&site.url], root, files, at_once)
    }

    /// As [`Self::read`], through several servers: each client through one of them.
    ///
    /// # Panics
    /// I1: at the first wrong byte.
    #[must_use]
    pub fn read_through(
        &self,
        servers: &[&str],
        root: &str,
        files: &[(String, Hash)],
        at_once: usize,
    ) -> Got {
        let left: Arc<Mutex<VecDeque<(String, Hash)>>> =
            Arc::new(Mutex::new(files.iter().cloned().collect()));
        let (bytes, failed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let client = |server: &str| {
            let base = format!("{server}/v1/versions/{root}/files/");
            let (left, http) = (Arc::clone(&left), self.http.clone());
            let (bytes, failed) = (Arc::clone(&bytes), Arc::clone(&failed));
            async move {
                loop {
                    let next = left.lock().pop_front();
                    let Some((path, hash)) = next else { return };
                    match get(&http, &format!("{base}{path}")).await {
                        Some(body) => {
                            assert!(Hash::of(&body) == hash, "I1: WRONG BYTES of {path}");
                            bytes.fetch_add(body.len() as u64, Relaxed);
                        }
                        None => {
                            failed.fetch_add(1, Relaxed);
                        }
                    }
                }
            }
        };
        self.runtime.block_on(async {
            let mut all = tokio::task::JoinSet::new();
            for i in 0..at_once {
                all.spawn(client(servers[i % servers.len()]));
            }
            while let Some(done) = all.join_next().await {
                done.expect("a reader");
            }
        });
        Got { bytes: bytes.load(Relaxed), failed: failed.load(Relaxed) }
    }
}

async fn get(http: &reqwest::Client, url: &str) -> Option<Vec<u8>> {
    let said = |why: &dyn std::fmt::Display| {
        println!("{url}: {why}");
        None
    };
    // A 429 says when to come again.
    for _ in 0..100 {
        let answer = match http.get(url).send().await {
            Ok(answer) => answer,
            Err(e) => return said(&format!("{e:?}")),
        };
        match answer.status().as_u16() {
            200 => {
                return match answer.bytes().await {
                    Ok(bytes) => Some(bytes.to_vec()),
                    Err(e) => said(&format!("{e:?}")),
                };
            }
            429 => tokio::time::sleep(Duration::from_millis(50)).await,
            status => {
                let body = answer.text().await.unwrap_or_default();
                return said(&format!("{status}: {body}"));
            }
        }
    }
    said(&"429 a hundred times")
}

/// Reads a file past the page cache.
fn read_directly(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let flags = nix::fcntl::OFlag::O_DIRECT.bits();
    fs::File::options().read(true).custom_flags(flags).open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// What a reader of a mount met.
#[derive(Debug, Default)]
pub struct MountReads {
    /// Reads that returned the right bytes.
    pub reads: u64,
    /// The files whose read failed or returned other bytes, with the reason.
    pub failed: Vec<String>,
    /// The longest time of a read.
    pub longest: Duration,
}

impl MountReads {
    /// Adds what another reader met.
    pub fn add(&mut self, other: MountReads) {
        self.reads += other.reads;
        self.failed.extend(other.failed);
        self.longest = self.longest.max(other.longest);
    }
}

/// Reads all files of a mount again and again, until `stop` is set after a whole pass.
#[must_use]
pub fn read_until(stop: &AtomicBool, dir: &Path, files: &[(String, Hash)]) -> MountReads {
    let mut met = MountReads::default();
    while !stop.load(SeqCst) {
        for (path, hash) in files {
            let begun = Instant::now();
            match read_directly(&dir.join(path)) {
                Ok(bytes) if Hash::of(&bytes) == *hash => met.reads += 1,
                Ok(_) => met.failed.push(format!("{path}: wrong bytes")),
                Err(e) => met.failed.push(format!("{path}: {e}")),
            }
            met.longest = met.longest.max(begun.elapsed());
        }
    }
    met
}
