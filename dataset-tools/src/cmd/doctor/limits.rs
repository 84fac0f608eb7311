//! The limits of this machine: the memory of the cgroup, open files, and the clock.

use super::args::DoctorArgs;
use super::finding::Finding;
use super::maybe;
use crate::out::bytes;
use fletch_host::cgroup;
use nix::sys::resource::{Resource, getrlimit};
use std::fs;

pub const MEMORY: &str = "memory";
pub const OPEN_FILES: &str = "open-files";
pub const CLOCK: &str = "clock";

/// The default of `memory.max`, unless half the cgroup's limit is less.
const MEMORY_DEFAULT: u64 = 2 << 30;
/// The default of `tables.memory`, and as much again for the program itself.
const MEMORY_BESIDES: u64 = 512 << 20;
/// Files that a server with default limits opens: connections, calls to origins, slabs.
const FILES_WANTED: u64 = 6144;
/// With fewer files than this, a server with default limits does not start.
const FILES_MIN: u64 = 1024;
/// Stores reject requests whose time is 15 minutes off. A warning comes well before.
const SKEW_ERROR_S: u64 = 600;
/// Dates have no fractions of a second, and an answer takes time.
const SKEW_WARNING_S: u64 = 30;

#[derive(Debug, Clone, Copy)]
pub struct Facts {
    /// The memory limit of the cgroup, in bytes.
    limit: Option<u64>,
    /// The configured memory for chunks, in bytes.
    memory: u64,
    /// The hard limit of open files; `None` if the system does not say.
    files: Option<u64>,
}

impl Facts {
    pub fn gather(args: &DoctorArgs) -> Self {
        let membership = fs::read_to_string(args.root.join("proc/self/cgroup")).unwrap_or_default();
        let limit = cgroup::memory_limit(&membership, &args.root.join("sys/fs/cgroup"));
        let memory = limit.map_or(MEMORY_DEFAULT, |limit| (limit / 2).min(MEMORY_DEFAULT));
        Facts {
            limit,
            memory: args.memory.map_or(memory, |m| m.0),
            files: getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(_, hard)| hard),
        }
    }

    pub fn findings(&self) -> Vec<Finding> {
        [self.memory_finding(), self.files_finding()].into_iter().flat_map(maybe).collect()
    }

    fn memory_finding(&self) -> Option<Finding> {
        let (limit, memory) = (self.limit?, self.memory);
        let (has, wants) = (bytes(limit), bytes(memory));
        let fix = |fits: u64| {
            format!("give fletch-server --memory {}MiB, or raise the limit of the cgroup", fits >> 20)
        };
        if memory >= limit {
            let what =
                format!("the cgroup allows {has}, and memory.max is {wants}: the kernel kills the server");
            return Some(Finding::error(MEMORY, what, fix(limit / 2)));
        }
        if memory > limit / 2 && memory + MEMORY_BESIDES > limit {
            let what =
                format!("the cgroup allows {has}, and memory.max of {wants} leaves too little for tables");
            return Some(Finding::warning(MEMORY, what, fix(limit / 2)));
        }
        None
    }

    fn files_finding(&self) -> Option<Finding> {
        let files = self.files.filter(|files| *files < FILES_WANTED)?;
        let fix = "raise the hard limit: ulimit -Hn 65536 as root, or LimitNOFILE=65536 in a systemd unit";
        Some(if files < FILES_MIN {
            let what = format!("a process may open {files} files, too few for fletch-server to start");
            Finding::error(OPEN_FILES, what, fix)
        } else {
            let what =
                format!("a process may open {files} files, so fletch-server accepts fewer connections");
            Finding::warning(OPEN_FILES, what, fix)
        })
    }
}

/// Returns the findings about clocks. Each is the name of a machine, and by how many seconds it is ahead.
pub fn clock_findings(clocks: &[(String, i64)]) -> Vec<Finding> {
    let finding = |(who, ahead): &(String, i64)| {
        let off = ahead.unsigned_abs();
        if off < SKEW_WARNING_S {
            return None;
        }
        let word = if *ahead > 0 { "behind" } else { "ahead of" };
        let what = format!("the clock of this machine is {off} s {word} that of {who}");
        let fix = "set the clock: timedatectl set-ntp true, or start chronyd; correct the other machine if \
            it is wrong";
        let is_error = off >= SKEW_ERROR_S;
        Some(if is_error { Finding::error(CLOCK, what, fix) } else { Finding::warning(CLOCK, what, fix) })
    };
    clocks.iter().filter_map(finding).collect()
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity;
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn memory_must_fit_into_the_cgroup() {
        let found = |limit, memory| {
            let facts = Facts { limit, memory, files: None };
            facts.findings().first().map(|f| f.severity)
        };
        assert_eq!(found(None, 64 * GIB), None);
        assert_eq!((found(Some(8 * GIB), 2 * GIB), found(Some(GIB), GIB / 2)), (None, None));
        assert_eq!(found(Some(GIB), 2 * GIB), Some(Severity::Error));
        assert_eq!(found(Some(2 * GIB), 2 * GIB - (300 << 20)), Some(Severity::Warning));
        let facts = Facts { limit: Some(GIB), memory: 2 * GIB, files: None };
        assert!(facts.findings()[0].fix.contains("--memory 512MiB"), "{:?}", facts.findings());
        assert_eq!(found(Some(GIB), 512 << 20), None, "the fix");
    }

    #[test]
    fn few_open_files_are_found() {
        let found = |files| Facts { limit: None, memory: 0, files }.findings().first().map(|f| f.severity);
        assert_eq!((found(Some(65_536)), found(None)), (None, None));
        assert_eq!((found(Some(4096)), found(Some(256))), (Some(Severity::Warning), Some(Severity::Error)));
    }

    #[test]
    fn a_wrong_clock_is_found_in_both_directions() {
        let found = |ahead| clock_findings(&[("http://x".to_owned(), ahead)]).into_iter().next();
        assert_eq!((found(0), found(29), found(-29)), (None, None, None));
        let behind = found(120).expect("behind");
        assert!(
            behind.severity == Severity::Warning && behind.what.contains("120 s behind that of http://x")
        );
        let ahead = found(-3600).expect("ahead");
        assert!(
            ahead.severity == Severity::Error && ahead.what.contains("3600 s ahead of that"),
            "{ahead:?}"
        );
    }
}
