//! One part of a version in memory.

use crate::leaf::{LEAF_ROWS, Leaf};
use fletch_core::manifest::{EntryRef, Part, Placed, Slice};
use std::sync::Arc;

/// A part of a version and its placement. Both were checked against the root and the layout id.
#[derive(Debug, Clone)]
pub struct LoadedPart {
    first_ordinal: u64,
    rows: usize,
    leaves: Vec<Arc<Leaf>>,
}

impl LoadedPart {
    /// Returns the part with these entries and this placement, which the caller has checked.
    pub(crate) fn new(entries: &Part, placed: &Placed) -> Self {
        let leaves = Leaf::of_part(entries, placed).into_iter().map(Arc::new).collect();
        LoadedPart { first_ordinal: entries.first_ordinal(), rows: entries.len(), leaves }
    }

    /// Returns the part with these leaves, each but the last of [`LEAF_ROWS`] rows; `None` if they are not.
    pub(crate) fn of_leaves(first_ordinal: u64, leaves: Vec<Arc<Leaf>>) -> Option<Self> {
        let rows = leaves.iter().map(|leaf| leaf.len()).sum();
        let (_, full) = leaves.split_last()?;
        let fits = full.iter().all(|leaf| leaf.len() == LEAF_ROWS);
        fits.then_some(LoadedPart { first_ordinal, rows, leaves })
    }

    /// The number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether there are no entries. A part always has some.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// The ordinal of the first entry.
    #[must_use]
    pub fn first_ordinal(&self) -> u64 {
        self.first_ordinal
    }

    /// Returns the entry of a row.
    ///
    /// # Panics
    /// When `row` is past the end.
    #[must_use]
    pub fn entry(&self, row: usize) -> EntryRef<'_> {
        self.leaves[row / LEAF_ROWS].entry(row % LEAF_ROWS)
    }

    /// Returns the slices of chunks that hold the bytes of a row's entry, in order.
    ///
    /// # Panics
    /// When `row` is past the end.
    #[must_use]
    pub fn slices(&self, row: usize) -> &[Slice] {
        self.leaves[row / LEAF_ROWS].slices(row % LEAF_ROWS)
    }

    /// The leaves, in order.
    pub(crate) fn leaves(&self) -> &[Arc<Leaf>] {
        &self.leaves
    }

    /// The size of the part in memory, in bytes.
    #[must_use]
    pub fn footprint(&self) -> usize {
        size_of::<Self>() + self.leaves.iter().map(|leaf| leaf.footprint()).sum::<usize>()
    }
}

/// Returns which of these leaves has the first row that is not below `path`, by the leaves' first paths.
///
/// The row may be past the end of the leaf: then it is the first of the next one.
pub(crate) fn leaf_of_path<'a>(leaves: usize, first: impl Fn(usize) -> &'a [u8], path: &[u8]) -> usize {
    let (mut low, mut high) = (0, leaves);
    while low < high {
        let mid = low + (high - low) / 2;
        if first(mid) <= path {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    low.saturating_sub(1)
}
