//! Searches over the parts of a version that are at hand: those in memory, and those in local files
//! (`local_reads.rs`).
//!
//! Every search is a synchronous function. It returns the part that it lacks as a [`MissingPart`]. A `try_`
//! method of a version stops there. The other methods load that part and search again. So one algorithm
//! serves threads that must not wait and tasks that may.

use crate::cache::{Cached, CachedKind};
use crate::leaf::{LEAF_ROWS, Leaf};
use crate::loaded_part::leaf_of_path;
use crate::local::Directory;
use crate::version::{Found, Resolved, Version};
use crate::{LoadedPart, TableError};
use fletch_core::manifest::locate::{DirId, PartIndex, prefix};
use std::sync::Arc;

/// A part that a search needs and that is not in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MissingPart(pub usize);

/// A part at hand.
pub(crate) enum PartAtHand {
    /// In memory.
    Whole(Arc<LoadedPart>),
    /// In a local file with these leaves.
    Filed(Arc<Directory>),
}

/// The parts at hand: those that a caller holds, those in the cache, and those in local files.
pub(crate) struct Parts<'a> {
    version: &'a Version,
    held: &'a [(usize, Arc<LoadedPart>)],
}

/// The number of parts that a search holds.
///
/// No step needs more at once, so a search ends even if the cache keeps nothing.
const HELD_MAX: usize = 4;

/// The parts that a walk loads with the one that it needs next. Two at once keep two cores busy; more would
/// take more memory.
const PARTS_AHEAD: usize = 1;

/// The most slices of a part that is loaded ahead: some 6 MB. A part of large files can have 200 MB of them.
const ROWS_AHEAD_MAX: u32 = 1 << 17;

impl Version {
    /// Runs a search over the parts at hand. Returns `None` if it needs another part.
    pub(crate) fn search_memory<T>(
        &self,
        search: impl FnOnce(&Parts<'_>) -> Result<T, MissingPart>,
    ) -> Option<T> {
        search(&Parts { version: self, held: &[] }).ok()
    }

    /// Runs a search, and loads each part that it misses. `search` is called again after each load.
    pub(crate) async fn search<T>(
        &self,
        search: impl FnMut(&Parts<'_>) -> Result<T, MissingPart>,
    ) -> Result<T, TableError> {
        self.search_ahead(0, search).await
    }

    /// [`Version::search`] for a walk, which keeps its position in its own state and continues there. It will
    /// need the next part, too.
    pub(crate) async fn walk<T>(
        &self,
        walk: impl FnMut(&Parts<'_>) -> Result<T, MissingPart>,
    ) -> Result<T, TableError> {
        self.search_ahead(PARTS_AHEAD, walk).await
    }

    async fn search_ahead<T>(
        &self,
        ahead: usize,
        mut search: impl FnMut(&Parts<'_>) -> Result<T, MissingPart>,
    ) -> Result<T, TableError> {
        let mut held: Vec<(usize, Arc<LoadedPart>)> = Vec::new();
        loop {
            let MissingPart(part) = match search(&Parts { version: self, held: &held }) {
                Ok(answer) => return Ok(answer),
                Err(missing) => missing,
            };
            let loaded = self.load_ahead(part, ahead).await?;
            if held.len() == HELD_MAX {
                held.remove(0);
            }
            held.push((part, loaded));
        }
    }

    /// Loads a part. If the part before it is at hand, loads the `ahead` parts after it at the same time,
    /// unless they are long.
    async fn load_ahead(&self, part: usize, ahead: usize) -> Result<Arc<LoadedPart>, TableError> {
        let follows = part.checked_sub(1).is_some_and(|before| self.at_hand(before).is_some());
        let after = if follows { part + 1..self.0.index.parts().len().min(part + 1 + ahead) } else { 0..0 };
        let is_short = |after: &usize| self.0.placement.rows(*after) <= ROWS_AHEAD_MAX;
        let is_wanted = |after: &usize| is_short(after) && self.at_hand(*after).is_none();
        let after = after.filter(is_wanted).map(|after| self.load(after));
        // Whoever needs one that failed loads it again, and gets the error.
        let (loaded, _after) = futures::join!(self.load(part), futures::future::join_all(after));
        loaded
    }

    /// Returns a part as a search sees it, if it is at hand.
    fn at_hand(&self, part: usize) -> Option<PartAtHand> {
        if let Some(directory) = self.try_directory(part) {
            return Some(PartAtHand::Filed(directory));
        }
        match self.0.cache.get(&self.key(CachedKind::Part, part)) {
            Some(Cached::Part(p)) => Some(PartAtHand::Whole(p)),
            _ => None,
        }
    }
}

impl Parts<'_> {
    pub fn index(&self) -> &PartIndex {
        &self.version.0.index
    }

    fn get(&self, part: usize) -> Result<PartAtHand, MissingPart> {
        if let Some((_, whole)) = self.held.iter().find(|(i, _)| *i == part) {
            return Ok(PartAtHand::Whole(Arc::clone(whole)));
        }
        self.version.at_hand(part).ok_or(MissingPart(part))
    }

    fn leaf(
        &self,
        part: usize,
        at_hand: &PartAtHand,
        leaf: usize,
        ahead: usize,
    ) -> Result<Arc<Leaf>, MissingPart> {
        let found = match at_hand {
            PartAtHand::Whole(whole) => whole.leaves().get(leaf).map(Arc::clone),
            PartAtHand::Filed(directory) => self.version.try_leaf(part, directory, leaf, ahead),
        };
        found.ok_or(MissingPart(part))
    }

    pub fn entry(&self, ordinal: u64) -> Result<Option<Found>, MissingPart> {
        self.entry_ahead(ordinal, 0)
    }

    /// Returns the entry at an ordinal; `None` past the end. If it has to be read from a file, the `ahead`
    /// leaves that follow are read, too.
    pub fn entry_ahead(&self, ordinal: u64, ahead: usize) -> Result<Option<Found>, MissingPart> {
        let Some((part, row)) = self.index().find(ordinal) else { return Ok(None) };
        let leaf = self.leaf(part, &self.get(part)?, row / LEAF_ROWS, ahead)?;
        Ok(Some(Found { ordinal, leaf, row: row % LEAF_ROWS }))
    }

    /// Returns the leaf of a part that has `path` if the part has it; the number of the leaf's first row; and
    /// the first row of the leaf whose path is not below `path`, or the number of its rows.
    fn seek(&self, part: usize, path: &[u8]) -> Result<(Arc<Leaf>, usize, usize), MissingPart> {
        let at_hand = self.get(part)?;
        let leaf = match &at_hand {
            PartAtHand::Whole(whole) => {
                let leaves = whole.leaves();
                leaf_of_path(leaves.len(), |i| leaves[i].first_path(), path)
            }
            PartAtHand::Filed(directory) => leaf_of_path(directory.len(), |i| directory.first(i), path),
        };
        let found = self.leaf(part, &at_hand, leaf, 0)?;
        let row = found.lower_bound(path);
        if leaf * LEAF_ROWS + row == self.index().parts()[part].entries as usize
            && part + 1 < self.index().parts().len()
        {
            // Only the manifest says that the next part begins after `path`; loading the part checks it.
            self.get(part + 1)?;
        }
        Ok((found, leaf * LEAF_ROWS, row))
    }

    pub fn lower_bound(&self, path: &[u8]) -> Result<u64, MissingPart> {
        let Some(part) = self.index().candidate(path) else { return Ok(0) };
        let (_, first, row) = self.seek(part, path)?;
        Ok(self.index().first_ordinal(part) + (first + row) as u64)
    }

    pub fn find(&self, path: &str) -> Result<Option<Found>, MissingPart> {
        let Some(part) = self.index().candidate(path.as_bytes()) else { return Ok(None) };
        let (leaf, first, row) = self.seek(part, path.as_bytes())?;
        if row == leaf.len() || leaf.entry(row).path != path {
            return Ok(None);
        }
        let ordinal = self.index().first_ordinal(part) + (first + row) as u64;
        Ok(Some(Found { ordinal, leaf, row }))
    }

    pub fn resolve(&self, path: &str) -> Result<Option<Resolved>, MissingPart> {
        if path.is_empty() {
            return Ok(Some(Resolved::Dir(DirId { first: 0, depth: 0 })));
        }
        if path.ends_with('/') || path.contains('\0') {
            return Ok(None);
        }
        if let Some(found) = self.find(path)? {
            return Ok(Some(Resolved::Entry(found)));
        }
        let below = format!("{path}/");
        let first = self.lower_bound(below.as_bytes())?;
        let is_dir = self.entry(first)?.is_some_and(|f| f.entry().path.starts_with(&below));
        let depth = u16::try_from(path.split('/').count()).unwrap_or(u16::MAX);
        Ok(is_dir.then_some(Resolved::Dir(DirId { first, depth })))
    }

    pub fn dir_path(&self, dir: DirId) -> Result<Option<String>, MissingPart> {
        if dir.depth == 0 {
            return Ok((dir.first == 0).then(String::new));
        }
        let first = self.entry(dir.first)?;
        Ok(first.and_then(|f| prefix(f.entry().path, dir.depth).map(str::to_owned)))
    }
}
