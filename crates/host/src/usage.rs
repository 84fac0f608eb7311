//! How much of its disk and of its memory a process uses.

use std::{fs, path::Path};

/// What a process uses of its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostUsage {
    /// Free bytes of the file system of its state directory, for users other than root. `None`: unknown.
    pub state_free: Option<u64>,
    /// The size of that file system.
    pub state_size: Option<u64>,
    /// Memory that the kernel cannot take back: anonymous and shared pages.
    pub memory: Option<u64>,
    /// The limit of the process's cgroup, or all memory of the machine if that is less.
    pub memory_limit: Option<u64>,
}

impl HostUsage {
    /// Measures this process. Blocks as long as the disk of the state directory does not answer.
    #[must_use]
    pub fn of_process(state_dir: &Path) -> Self {
        let space = nix::sys::statvfs::statvfs(state_dir).ok();
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        HostUsage {
            state_free: space.as_ref().map(|s| s.blocks_available().saturating_mul(s.fragment_size())),
            state_size: space.as_ref().map(|s| s.blocks().saturating_mul(s.fragment_size())),
            memory: memory(&status),
            memory_limit: memory_limit(),
        }
    }
}

/// Returns the anonymous and shared memory of `/proc/PID/status`, in bytes.
fn memory(status: &str) -> Option<u64> {
    Some(bytes_of(status, "RssAnon:")?.saturating_add(bytes_of(status, "RssShmem:")?))
}

/// Returns the limit of this process: that of its cgroup, and at most the memory of the machine.
fn memory_limit() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok();
    let machine = machine.and_then(|text| bytes_of(&text, "MemTotal:"));
    [crate::cgroup::own_memory_limit(), machine].into_iter().flatten().min()
}

/// Returns a value of a file of `/proc` that counts in KiB.
fn bytes_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_what_the_kernel_cannot_take_back() {
        let status = "Name:\tx\nVmRSS:\t  900 kB\nRssAnon:\t  100 kB\nRssFile:\t 700 kB\nRssShmem:\t 20 kB\n";
        assert_eq!(memory(status), Some(120 << 10));
        assert_eq!((memory(""), memory("RssAnon:\tx kB\nRssShmem:\t1 kB\n")), (None, None));
        let own = HostUsage::of_process(Path::new("/"));
        assert!(own.memory.is_some_and(|bytes| bytes > 0), "{own:?}");
        assert!(own.memory_limit > own.memory, "{own:?}");
        assert!(own.state_size.is_some_and(|size| size >= own.state_free.unwrap_or(0)), "{own:?}");
        assert_eq!(HostUsage::of_process(Path::new("/no/such/dir")).state_free, None);
    }
}
