//! Counts the system calls of running programs, with strace.

use crate::{bins::Running, watch::until};
use nix::sys::signal::Signal;
use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

/// strace, attached to programs.
pub struct Calls {
    tracer: Running,
    summary: PathBuf,
}

impl Calls {
    /// Counts the calls of all threads of the processes from now on. `summary` is a scratch file.
    ///
    /// # Panics
    /// If strace cannot attach.
    #[must_use]
    pub fn count(pids: &[u32], summary: PathBuf) -> Self {
        let mut c = Command::new("strace");
        c.args(["-f", "-c", "-qq", "-e", "signal=none", "-o"]).arg(&summary);
        pids.iter().for_each(|pid| {
            c.args(["-p", &pid.to_string()]);
        });
        c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut tracer = Running::spawn("strace", &mut c);
        let by = format!("TracerPid:\t{}", tracer.pid());
        for pid in pids {
            until("strace is attached", Duration::from_secs(20), || {
                assert!(tracer.alive(), "strace cannot attach to {pid}");
                let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
                tasks
                    .map(|t| fs::read_to_string(t.path().join("status")).unwrap_or_default())
                    .all(|s| s.lines().any(|l| l == by))
            });
        }
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
