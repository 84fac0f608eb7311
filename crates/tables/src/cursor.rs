//! A place in the entries of a version, for walks that go from one entry to a near one.

use crate::leaf::Leaf;
use crate::search::{MissingPart, Parts};
use std::sync::Arc;

/// The leaves that are read ahead of a walk that goes from one leaf to the next.
const AHEAD: usize = 7;

/// The leaf of the last step of a walk. Most steps stay in it, and need no search.
#[derive(Default)]
pub(crate) struct Cursor {
    /// The ordinal of the leaf's first row, and the leaf.
    leaf: Option<(u64, Arc<Leaf>)>,
}

impl Cursor {
    /// Returns the leaf and the row of the entry at `at`; `None` past the end.
    pub fn locate(&mut self, parts: &Parts<'_>, at: u64) -> Result<Option<(Arc<Leaf>, usize)>, MissingPart> {
        let mut ahead = 0;
        if let Some((first, leaf)) = &self.leaf
            && let Some(row) = at.checked_sub(*first).and_then(|row| usize::try_from(row).ok())
        {
            if row < leaf.len() {
                return Ok(Some((Arc::clone(leaf), row)));
            }
            ahead = if row == leaf.len() { AHEAD } else { 0 };
        }
        let Some(found) = parts.entry_ahead(at, ahead)? else { return Ok(None) };
        self.leaf = Some((at - found.row as u64, Arc::clone(&found.leaf)));
        Ok(Some((found.leaf, found.row)))
    }
}

/// Returns the ordinal of the first entry at or after `path`, which comes after the entry at `at`. `leaf` and
/// `row` are where that entry lies; the leaf may hold the answer, too.
pub(crate) fn after(
    parts: &Parts<'_>,
    (leaf, row): (&Leaf, usize),
    at: u64,
    path: &[u8],
) -> Result<u64, MissingPart> {
    let next = leaf.lower_bound(path);
    if next < leaf.len() { Ok(at - row as u64 + next as u64) } else { parts.lower_bound(path) }
}
