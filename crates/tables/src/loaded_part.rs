//! One part of a version in memory.

use fletch_core::manifest::{Part, Placed};

/// A part of a version and its placement. Both were checked against the root and the layout id.
#[derive(Debug, Clone)]
pub struct LoadedPart {
    /// The part's entries.
    pub entries: Part,
    /// The chunks that hold the entries' bytes.
    pub placed: Placed,
}

impl LoadedPart {
    /// The approximate size of the part in memory, in bytes.
    #[must_use]
    pub fn footprint(&self) -> usize {
        self.entries.footprint() + self.placed.footprint()
    }
}
