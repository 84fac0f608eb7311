//! The entries of a run that cannot be part of a version.

use super::options::OnFault;
use crate::failure::Failure;
use crate::out::{Out, count};
use fletch_tables::Fault;

/// A run with more faults than this fails: something is wrong with the whole tree.
const FAULTS_MAX: usize = 100_000;

/// Collects faults and decides whether the run goes on.
pub struct Faults {
    on_fault: OnFault,
    found: Vec<Fault>,
    /// How many of them are entries that could not be read.
    lost: u64,
    out: Out,
}

impl Faults {
    /// Starts with no fault.
    #[must_use]
    pub fn new(on_fault: OnFault, out: Out) -> Self {
        Faults { on_fault, found: Vec::new(), lost: 0, out }
    }

    /// Adds an entry that could not be read: the version would lose it.
    ///
    /// # Errors
    /// [`Failure`] when the run ends with this fault.
    pub fn lose(&mut self, fault: Fault) -> Result<(), Failure> {
        self.lost += 1;
        self.push(fault)
    }

    /// The number of entries that could not be read.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Adds a fault: what no version can have as an entry.
    ///
    /// # Errors
    /// [`Failure`] when the run ends with this fault.
    pub fn push(&mut self, fault: Fault) -> Result<(), Failure> {
        let text = format!("{}: {}", fault.path, fault.why);
        if self.on_fault != OnFault::Stop {
            self.out.warn(&text);
        }
        if self.found.len() == FAULTS_MAX {
            return Err(Failure::new(format!("more than {FAULTS_MAX} entries cannot be part of a version"))
                .hint("see the first faults: something is wrong with the whole tree"));
        }
        self.found.push(fault);
        if self.on_fault != OnFault::Stop {
            return Ok(());
        }
        Err(Failure::new(text).hint("--keep-going reports all such entries, --skip-failed leaves them out"))
    }

    /// The number of faults so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.found.len()
    }

    /// Whether there is no fault so far.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Warns that a file named like a tar shard is treated as a plain file.
    pub fn warn_plain_shard(&self, path: &str, why: &str) {
        self.out.warn(format_args!("{path}: treated as a plain file, without members: {why}"));
    }

    /// Whether the run writes no version any more and only looks for more faults (`--keep-going`).
    #[must_use]
    pub fn report_only(&self) -> bool {
        self.on_fault == OnFault::Report && !self.found.is_empty()
    }

    /// The failure of a run that only reported its faults.
    #[must_use]
    pub fn failure(faults: usize) -> Failure {
        Failure::new(format!("no version was written; cannot be part of one: {}", count(faults, "entry")))
            .hint("repair them, or leave them out with --skip-failed")
    }

    /// All faults, in order of their paths.
    #[must_use]
    pub fn finish(mut self) -> Vec<Fault> {
        self.found.sort_by(|a, b| a.path.cmp(&b.path));
        self.found
    }
}
