//! A memory cgroup for one test, in version 1 or 2 of cgroups.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A cgroup with a memory limit. Dropping it removes it; no process may run in it then.
#[derive(Debug)]
pub struct Memory {
    dir: PathBuf,
    v1: bool,
}

impl Memory {
    /// Creates a cgroup with a limit of `bytes`.
    ///
    /// # Errors
    /// The reason why it cannot be created.
    pub fn new(bytes: u64) -> Result<Self, String> {
        let v1 = Path::new("/sys/fs/cgroup/memory").is_dir();
        let base = if v1 { "/sys/fs/cgroup/memory" } else { "/sys/fs/cgroup" };
        let name = format!("fletch-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let dir = Path::new(base).join(name);
        fs::create_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let group = Memory { dir, v1 };
        let limit = if v1 { "memory.limit_in_bytes" } else { "memory.max" };
        let file = group.dir.join(limit);
        fs::write(&file, bytes.to_string()).map_err(|e| format!("{}: {e}", file.display()))?;
        Ok(group)
    }

    /// Returns the words to put before a command, so that it runs in the cgroup.
    #[must_use]
    pub fn wrapper(&self) -> [String; 4] {
        let enter = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.dir.display());
        ["sh".to_owned(), "-c".to_owned(), enter, "sh".to_owned()]
    }

    /// Returns the memory of its processes in bytes, without the page cache.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.number("memory.stat", if self.v1 { "total_rss " } else { "anon " })
    }

    /// Moves a process into it. Memory that the process takes from now on counts here.
    ///
    /// # Panics
    /// If the process is gone.
    pub fn add(&self, pid: u32) {
        fs::write(self.dir.join("cgroup.procs"), pid.to_string()).expect("the process is moved");
    }

    /// Returns the shared memory that counts for its processes, in bytes.
    #[must_use]
    pub fn shared(&self) -> u64 {
        self.number("memory.stat", if self.v1 { "total_shmem " } else { "shmem " })
    }

    /// Returns the number of its processes that the OOM killer killed.
    #[must_use]
    pub fn kills(&self) -> u64 {
        self.number(if self.v1 { "memory.oom_control" } else { "memory.events" }, "oom_kill ")
    }

    fn number(&self, file: &str, key: &str) -> u64 {
        let file = self.dir.join(file);
        let text = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let value = text.lines().find_map(|l| l.strip_prefix(key));
        value.and_then(|v| v.trim().parse().ok()).unwrap_or_else(|| panic!("{key}in {text}"))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // The cgroup is busy for a moment after its last process ended.
        let until = Instant::now() + Duration::from_secs(2);
        while let Err(e) = fs::remove_dir(&self.dir) {
            if Instant::now() >= until {
                eprintln!("cgroup {} stays: {e}", self.dir.display());
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
