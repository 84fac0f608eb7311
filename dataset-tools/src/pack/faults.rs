//! Entries that cannot be packed, and what happens at them.

use crate::failure::Failure;
use crate::index::OnFault;
use crate::out::Out;
use fletch_tables::Fault;

/// More failed entries than this are a failure of the whole tree.
const FAULTS_MAX: usize = 100_000;

/// Collects faults.
pub struct Faults {
    on_fault: OnFault,
    found: Vec<Fault>,
    out: Out,
}

impl Faults {
    /// None yet.
    #[must_use]
    pub fn new(on_fault: OnFault, out: Out) -> Self {
        Faults { on_fault, found: Vec::new(), out }
    }

    /// Takes one.
    ///
    /// # Errors
    /// When the run ends with it.
    pub fn push(&mut self, fault: Fault) -> Result<(), Failure> {
        let Fault { path, why } = &fault;
        if self.on_fault != OnFault::Stop {
            self.out.warn(format_args!("{path}: {why}"));
        }
        if self.found.len() == FAULTS_MAX {
            return Err(Failure::new(format!("more than {FAULTS_MAX} entries cannot be packed"))
                .hint("something is wrong with the whole tree: see the first of them"));
        }
        let stop = Failure::new(format!("{path}: {why}"))
            .hint("--keep-going reports all such entries, --skip-failed leaves them out");
        self.found.push(fault);
        if self.on_fault == OnFault::Stop { Err(stop) } else { Ok(()) }
    }

    /// Says what is odd about an entry and no fault.
    pub fn warn(&self, path: &str, why: &str) {
        self.out.warn(format_args!("{path}: a file like any other, without members: {why}"));
    }

    /// Tells of compressed archives that were found.
    pub fn tell_compressed(&self, archives: u64) {
        self.out.tell_compressed(archives);
    }

    /// Whether nothing will be published any more.
    #[must_use]
    pub fn in_vain(&self) -> bool {
        self.on_fault == OnFault::Report && !self.found.is_empty()
    }

    /// All of them, in order of their paths.
    #[must_use]
    pub fn finish(mut self) -> Vec<Fault> {
        self.found.sort_by(|a, b| a.path.cmp(&b.path));
        self.found
    }
}
