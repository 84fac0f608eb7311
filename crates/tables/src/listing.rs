//! Directory listings, paged by ordinal.
//!
//! A directory's entries are neighbours, so a listing is a walk over ordinals that jumps over
//! each subdirectory, and over each shard's members, by one search. Flat directories are read
//! row by row: no search, no memory beyond one part.

use crate::TableError;
use crate::cache::LoadedPart;
use crate::version::{Miss, Parts, Version, in_tree};
use fletch_core::manifest::EntryKind;
use fletch_core::manifest::locate::{self, DirId};
use std::sync::Arc;

/// One child of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Child {
    /// Its name.
    pub name: String,
    /// Ordinal of the entry, or of the first entry below the directory.
    pub ordinal: u64,
    /// The cookie to go on with after this child: the next child begins at this ordinal or
    /// later. Never 0, strictly ascending, valid for ever (a version never changes).
    pub next: u64,
    /// What it is.
    pub kind: ChildKind,
}

/// What a child is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChildKind {
    /// A file or a symlink.
    Entry {
        /// Which of the two.
        kind: EntryKind,
        /// Its size in bytes.
        size: u64,
    },
    /// A directory, empty or not.
    Dir(DirId),
}

impl Version {
    /// At most `max` children of the directory at `dir` (without closing slash; "" is the root),
    /// beginning with the one at `cookie` (0, or a [`Child::next`] of the same directory).
    /// They come in the order of the entries, which is the byte order of names with a `/` added
    /// to those of directories. An empty answer is the end, or no such directory.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub async fn list(&self, dir: &str, cookie: u64, max: usize) -> Result<Vec<Child>, TableError> {
        let mut walk = Walk::new(dir, cookie);
        // The walk keeps what it has when a part is missing, and goes on from there.
        self.awaited(|parts| walk.go_on(parts, max)).await?;
        Ok(walk.found)
    }

    /// [`Version::list`], only from memory: as many children as are there now, at least one
    /// unless it is the end; `None` means that the next child is not in memory.
    #[must_use]
    pub fn try_list(&self, dir: &str, cookie: u64, max: usize) -> Option<Vec<Child>> {
        let mut walk = Walk::new(dir, cookie);
        let ended = self.now(|parts| walk.go_on(parts, max)).is_some();
        (ended || !walk.found.is_empty()).then_some(walk.found)
    }
}

struct Walk<'a> {
    dir: &'a str,
    /// Components of the children's paths.
    depth: u16,
    /// Where the next child begins; `None` before the directory was found.
    at: Option<u64>,
    /// The part that the walk is in: most steps stay in it.
    near: Option<(usize, Arc<LoadedPart>)>,
    found: Vec<Child>,
}

impl<'a> Walk<'a> {
    fn new(dir: &'a str, cookie: u64) -> Self {
        let components = if dir.is_empty() { 0 } else { dir.split('/').count() };
        let depth = u16::try_from(components + 1).unwrap_or(u16::MAX);
        Walk { dir, depth, at: (cookie > 0).then_some(cookie), near: None, found: Vec::new() }
    }

    fn go_on(&mut self, parts: &Parts<'_>, max: usize) -> Result<(), Miss> {
        let mut at = match self.at {
            Some(at) => at,
            None if self.dir.is_empty() => 0,
            None => parts.lower_bound(format!("{}/", self.dir).as_bytes())?,
        };
        self.at = Some(at);
        while self.found.len() < max {
            let Some(next) = self.step(parts, at)? else { break };
            at = next;
            self.at = Some(at);
        }
        Ok(())
    }

    /// The part that holds `at`, and the row in it; `None` past the end.
    fn here(&mut self, parts: &Parts<'_>, at: u64) -> Result<Option<(Arc<LoadedPart>, usize)>, Miss> {
        let Some((part, row)) = parts.index().find(at) else { return Ok(None) };
        if let Some((near, loaded)) = &self.near
            && *near == part
        {
            return Ok(Some((Arc::clone(loaded), row)));
        }
        let loaded = parts.get(part)?;
        self.near = Some((part, Arc::clone(&loaded)));
        Ok(Some((loaded, row)))
    }

    /// Takes the child at `at`, if it is one that shows; says where the next one begins.
    fn step(&mut self, parts: &Parts<'_>, at: u64) -> Result<Option<u64>, Miss> {
        let Some((here, row)) = self.here(parts, at)? else { return Ok(None) };
        let e = here.entries.get(row);
        // The first entry not below `path`: usually in this part, so that no other is needed.
        let after = |path: String| {
            let next = here.entries.lower_bound(path.as_bytes());
            if next < here.entries.len() {
                Ok(here.entries.first_ordinal() + next as u64)
            } else {
                parts.lower_bound(path.as_bytes())
            }
        };
        let (name, next, kind) = match locate::child(self.dir, e.path) {
            None => return Ok(None),
            Some(locate::Child::Hidden) => {
                return match e.path.split_once('\0') {
                    // Past all members of this shard, which are its path, NUL, anything.
                    Some((shard, _)) => after(format!("{shard}\u{1}")).map(Some),
                    None => Ok(Some(at + 1)),
                };
            }
            Some(locate::Child::Entry(_)) if !in_tree(e.kind) => return Ok(Some(at + 1)),
            Some(locate::Child::Entry(name)) => {
                (name, at + 1, ChildKind::Entry { kind: e.kind, size: e.size })
            }
            Some(locate::Child::Dir(name)) => {
                let slash = if self.dir.is_empty() { "" } else { "/" };
                // '0' follows '/': past all that is below the subdirectory.
                let next = after(format!("{}{slash}{name}0", self.dir))?;
                (name, next, ChildKind::Dir(DirId { first: at, depth: self.depth }))
            }
        };
        self.found.push(Child { name: name.to_owned(), ordinal: at, next, kind });
        Ok(Some(next))
    }
}
