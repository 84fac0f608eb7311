//! Counts the system calls of running programs, with strace.

use crate::{bins::Running, strace};
use nix::sys::signal::Signal;
use std::{collections::BTreeMap, fs, path::PathBuf, time::Duration};

/// strace, attached to programs.
pub struct Calls {
    tracer: Running,
    summary: PathBuf,
}

impl Calls {
    /// Counts the calls of all threads of the processes from now on. `summary` is a scratch
    /// file.
    ///
    /// # Panics
    /// If strace cannot attach.
    #[must_use]
    pub fn count(pids: &[u32], summary: PathBuf) -> Self {
        let tracer = strace::attach(&["-c"], &summary, pids);
        Calls { tracer, summary }
    }

    /// Ends the count. Returns the number of calls by their names.
    ///
    /// # Panics
    /// If strace wrote no summary.
    #[must_use]
    pub fn stop(mut self) -> BTreeMap<String, u64> {
        self.tracer.signal(Signal::SIGINT);
        self.tracer.wait(Duration::from_secs(20));
        let summary = fs::read_to_string(&self.summary).expect("a summary");
        // % time, seconds, usecs/call, calls, errors if there are any, and the name.
        let row = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let calls = words.get(3)?.parse().ok()?;
            Some(((*words.last()?).to_owned(), calls))
        };
        let counts: BTreeMap<String, u64> =
            summary.lines().filter_map(row).filter(|(name, _)| name != "total").collect();
        assert!(!counts.is_empty(), "no row in {summary}");
        counts
    }
}
