//! Directory listings, paged by ordinal.
//!
//! The entries of a directory have neighbouring ordinals. So a listing walks over ordinals, and jumps over
//! each subdirectory and over the members of each shard with one search. It reads a flat directory row by
//! row, with no search and no memory beyond two parts.

use crate::TableError;
use crate::cursor::{self, Cursor};
use crate::search::{MissingPart, Parts};
use crate::version::{Version, in_tree};
use fletch_core::manifest::EntryKind;
use fletch_core::manifest::locate::{self, DirId};

/// One child of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Child {
    /// The child's name.
    pub name: String,
    /// The ordinal of the entry, or of the first entry below the directory.
    pub ordinal: u64,
    /// The cookie that continues the listing after this child: the next child is at this ordinal or later.
    ///
    /// Cookies are never 0, ascend strictly, and stay valid because a version never changes.
    pub next: u64,
    /// The child's kind.
    pub kind: ChildKind,
}

/// The kind of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChildKind {
    /// A file or a symlink.
    Entry {
        /// File or symlink.
        kind: EntryKind,
        /// The entry's size in bytes.
        size: u64,
    },
    /// A directory, empty or not.
    Dir(DirId),
}

impl Version {
    /// Returns at most `max` children of the directory `dir`, from the one at `cookie` on.
    ///
    /// `dir` has no trailing slash; `""` is the root. `cookie` is 0 or a [`Child::next`] of the same
    /// directory. Children come in the byte order of their names, where a directory's name ends with `/`. An
    /// empty list means the end of the directory, or that there is no such directory.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub async fn list(&self, dir: &str, cookie: u64, max: usize) -> Result<Vec<Child>, TableError> {
        let mut walk = Walk::new(dir, cookie);
        // The walk keeps its children and its position while a part is loaded.
        self.walk(|parts| walk.advance(parts, max)).await?;
        Ok(walk.found)
    }

    /// [`Version::list`] over the parts in memory: returns the children before the first missing part.
    ///
    /// An empty list is the end of the directory; `None` means that the next child is not in memory.
    #[must_use]
    pub fn try_list(&self, dir: &str, cookie: u64, max: usize) -> Option<Vec<Child>> {
        let mut walk = Walk::new(dir, cookie);
        let ended = self.search_memory(|parts| walk.advance(parts, max)).is_some();
        (ended || !walk.found.is_empty()).then_some(walk.found)
    }
}

struct Walk<'a> {
    dir: &'a str,
    /// The number of components of the children's paths.
    depth: u16,
    /// The ordinal of the next child; `None` until the directory is found.
    next: Option<u64>,
    cursor: Cursor,
    found: Vec<Child>,
}

impl<'a> Walk<'a> {
    fn new(dir: &'a str, cookie: u64) -> Self {
        let components = if dir.is_empty() { 0 } else { dir.split('/').count() };
        let depth = u16::try_from(components + 1).unwrap_or(u16::MAX);
        Walk {
            dir,
            depth,
            next: (cookie > 0).then_some(cookie),
            cursor: Cursor::default(),
            found: Vec::new(),
        }
    }

    fn advance(&mut self, parts: &Parts<'_>, max: usize) -> Result<(), MissingPart> {
        let mut at = match self.next {
            Some(at) => at,
            None if self.dir.is_empty() => 0,
            None => parts.lower_bound(format!("{}/", self.dir).as_bytes())?,
        };
        self.next = Some(at);
        while self.found.len() < max {
            let Some(next) = self.step(parts, at)? else { break };
            at = next;
            self.next = Some(at);
        }
        Ok(())
    }

    /// Adds the entry or directory at `at` if it shows in the listing. Returns the ordinal of the next one.
    fn step(&mut self, parts: &Parts<'_>, at: u64) -> Result<Option<u64>, MissingPart> {
        let Some((leaf, row)) = self.cursor.locate(parts, at)? else { return Ok(None) };
        let e = leaf.entry(row);
        let after = |path: String| cursor::after(parts, (&leaf, row), at, path.as_bytes());
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
