//! Flat listings of a version by prefix, as object stores give them.
//!
//! A listing is a range read of the tables. It begins at the prefix, goes on from entry to entry, and jumps
//! with one search over all that is below a common prefix and over the members of each shard. So it costs by
//! the items that it returns, and not by the entries of the version.

use crate::TableError;
use crate::cursor::{Cursor, after};
use crate::search::{MissingPart, Parts};
use crate::version::{Found, Version};
use fletch_core::manifest::EntryKind;

/// The keys that a listing returns.
#[derive(Debug, Clone, Copy)]
pub struct KeyRange<'a> {
    /// What every key begins with.
    pub prefix: &'a str,
    /// Keys that have this text after the prefix are rolled up into a common prefix, which ends with it.
    pub delimiter: Option<&'a str>,
    /// The first key that may be listed, in byte order. It need not be UTF-8.
    pub from: &'a [u8],
}

/// A key, and what it names.
#[derive(Debug, Clone)]
pub struct Key {
    /// The path of the file or link. That of an empty directory ends in `/`.
    pub path: String,
    /// The file that has the key's bytes: itself, or the one to which the link leads. `None` for an empty
    /// directory.
    pub file: Option<Found>,
}

/// An item of a listing.
#[derive(Debug, Clone)]
pub enum KeyItem {
    Key(Key),
    /// A common prefix.
    Prefix(String),
}

impl KeyItem {
    /// Returns the key from which a listing goes on after this item. `None`: nothing can come after it.
    #[must_use]
    pub fn next(&self) -> Option<Vec<u8>> {
        match self {
            KeyItem::Key(key) => Some([key.path.as_bytes(), b"\0"].concat()),
            KeyItem::Prefix(prefix) => successor(prefix.as_bytes()),
        }
    }
}

/// Returns the first text, in byte order, after all that begin with `prefix`. `None` if there is none.
#[must_use]
pub fn successor(prefix: &[u8]) -> Option<Vec<u8>> {
    let last = prefix.iter().rposition(|byte| *byte != u8::MAX)?;
    let mut next = prefix[..=last].to_vec();
    next[last] += 1;
    Some(next)
}

impl Version {
    /// Returns at most `max` keys and common prefixes, in byte order.
    ///
    /// Files are keys, and so are empty directories (`void/`) and links that lead to a file of this version.
    /// Other links and members of shards are not listed, and a common prefix has at least one key.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub async fn keys(&self, range: KeyRange<'_>, max: usize) -> Result<Vec<KeyItem>, TableError> {
        let mut walk = KeyWalk { range, cursor: Cursor::default(), at: None, items: Vec::new() };
        while walk.items.len() < max {
            // A link is followed between two searches: its file may lie in any part.
            match self.walk(|parts| walk.advance(parts, max)).await? {
                Pause::Done => break,
                Pause::Link { path, target } => {
                    let file = self.follow(&path, &target).await?;
                    self.search(|parts| walk.decide(parts, &path, file.as_ref())).await?;
                }
            }
        }
        Ok(walk.items)
    }

    /// Returns what one key names; `None` if the version has no such key.
    ///
    /// # Errors
    /// As [`Version::part`].
    pub async fn find_key(&self, path: &str) -> Result<Option<Key>, TableError> {
        let Some(found) = self.find(path).await? else { return Ok(None) };
        let (kind, target) = (found.entry().kind, found.entry().target.to_owned());
        let key = |file| Some(Key { path: path.to_owned(), file });
        Ok(match kind {
            EntryKind::File => key(Some(found)),
            EntryKind::EmptyDir => key(None),
            EntryKind::Symlink => self.follow(path, &target).await?.and_then(|file| key(Some(file))),
            EntryKind::Member => None,
        })
    }
}

/// Why a walk stopped.
enum Pause {
    /// It has as many items as are wanted, or there are no more.
    Done,
    /// Whether this link is listed depends on where it leads.
    Link { path: String, target: String },
}

struct KeyWalk<'a> {
    range: KeyRange<'a>,
    cursor: Cursor,
    /// The ordinal of the next entry; `None` until the beginning is found.
    at: Option<u64>,
    items: Vec<KeyItem>,
}

impl KeyWalk<'_> {
    /// Goes on until there are `max` items, or a link. Keeps its place when a part is missing.
    fn advance(&mut self, parts: &Parts<'_>, max: usize) -> Result<Pause, MissingPart> {
        let prefix = self.range.prefix;
        while self.items.len() < max {
            let at = self.place(parts)?;
            let Some((leaf, row)) = self.cursor.locate(parts, at)? else { return Ok(Pause::Done) };
            let entry = leaf.entry(row);
            if !entry.path.starts_with(prefix) {
                return Ok(Pause::Done);
            }
            let file = match entry.kind {
                EntryKind::Member => {
                    // Past all members of this shard, which are its path, NUL, anything.
                    let shard = entry.path.split('\0').next().unwrap_or(entry.path);
                    let end = [shard.as_bytes(), b"\x01"].concat();
                    self.at = Some(after(parts, (&leaf, row), at, &end)?);
                    continue;
                }
                EntryKind::Symlink => {
                    let (path, target) = (entry.path.to_owned(), entry.target.to_owned());
                    return Ok(Pause::Link { path, target });
                }
                EntryKind::EmptyDir => None,
                EntryKind::File => Some(Found { ordinal: at, leaf: leaf.clone(), row }),
            };
            let path = entry.path.to_owned();
            self.push(parts, at, Key { path, file })?;
        }
        Ok(Pause::Done)
    }

    /// Lists the link at which the walk stopped if it leads to a file, and goes past it.
    fn decide(&mut self, parts: &Parts<'_>, path: &str, file: Option<&Found>) -> Result<(), MissingPart> {
        let at = self.place(parts)?;
        match file {
            Some(file) => self.push(parts, at, Key { path: path.to_owned(), file: Some(file.clone()) }),
            None => {
                self.at = Some(at + 1);
                Ok(())
            }
        }
    }

    fn place(&mut self, parts: &Parts<'_>) -> Result<u64, MissingPart> {
        match self.at {
            Some(at) => Ok(at),
            None => {
                let at = parts.lower_bound(self.range.from.max(self.range.prefix.as_bytes()))?;
                self.at = Some(at);
                Ok(at)
            }
        }
    }

    /// Adds the key at `at`, or the common prefix to which it belongs, and goes past it.
    fn push(&mut self, parts: &Parts<'_>, at: u64, key: Key) -> Result<(), MissingPart> {
        let begin = self.range.prefix.len();
        let rolled = self.range.delimiter.and_then(|delimiter| {
            let end = begin + key.path[begin..].find(delimiter)? + delimiter.len();
            Some(key.path[..end].to_owned())
        });
        let (item, next) = match rolled {
            None => (KeyItem::Key(key), at + 1),
            Some(prefix) => {
                let next = match (successor(prefix.as_bytes()), self.cursor.locate(parts, at)?) {
                    (Some(end), Some((leaf, row))) => after(parts, (&leaf, row), at, &end)?,
                    _ => u64::MAX,
                };
                (KeyItem::Prefix(prefix), next)
            }
        };
        self.items.push(item);
        self.at = Some(next);
        Ok(())
    }
}
