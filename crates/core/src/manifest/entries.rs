//! Entries: one file, symbolic link, empty directory or tar member, and its canonical encoding.
//!
//! Invariants of a sequence of entries, checked by [`super::PartCutter`]:
//! 1. Paths ascend strictly, by bytes.
//! 2. Paths are relative and UTF-8, without empty, `.` or `..` components and without NUL. Two exceptions: an
//!    empty directory's path ends in `/`, so that it sorts where its children would; and a member's path is
//!    its shard's path, NUL, and the member's name, so that it follows its shard.
//! 3. No path is both a file and a directory (`a` and `a/b`).

use super::{COMPONENT_BYTES_MAX, PATH_BYTES_MAX};
use crate::Hash;
use serde::{Deserialize, Serialize};

/// The kind of an entry. The numbers are part of format 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum EntryKind {
    /// A regular file.
    File = 1,
    /// A symbolic link. Fletch keeps its target verbatim and never resolves it.
    Symlink = 2,
    /// A directory without entries.
    EmptyDir = 3,
    /// A member of a tar shard.
    Member = 4,
}

impl EntryKind {
    /// Returns the kind's word in tables and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            EntryKind::File => "file",
            EntryKind::Symlink => "symlink",
            EntryKind::EmptyDir => "empty-dir",
            EntryKind::Member => "member",
        }
    }

    /// Returns the kind with this word.
    #[must_use]
    pub fn from_word(s: &str) -> Option<Self> {
        [Self::File, Self::Symlink, Self::EmptyDir, Self::Member].into_iter().find(|k| k.as_str() == s)
    }

    /// Returns the kind with this number.
    #[must_use]
    pub fn from_number(n: u8) -> Option<Self> {
        [Self::File, Self::Symlink, Self::EmptyDir, Self::Member].into_iter().find(|k| *k as u8 == n)
    }

    /// Returns whether an entry of this kind has bytes of its own.
    #[must_use]
    pub fn has_bytes(self) -> bool {
        matches!(self, EntryKind::File | EntryKind::Member)
    }
}

/// The sample that an entry belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Sample {
    /// The entry belongs to no sample.
    None,
    /// The entry is a sample by itself.
    Single,
    /// The entry belongs to the sample of all neighbouring entries with this key.
    Keyed(String),
}

/// [`Sample`], borrowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SampleRef<'a> {
    /// The entry belongs to no sample.
    None,
    /// The entry is a sample by itself.
    Single,
    /// The entry belongs to the sample of all neighbouring entries with this key.
    Keyed(&'a str),
}

/// One entry, owned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The relative path (see the module's invariant 2).
    pub path: String,
    /// The entry's kind.
    pub kind: EntryKind,
    /// Bytes of the content, or of a link's target; 0 for an empty directory.
    pub size: u64,
    /// The BLAKE3 of the content; present exactly for kinds with bytes.
    pub hash: Option<Hash>,
    /// The link target; empty for other kinds.
    pub target: String,
    /// The sample that it belongs to.
    pub sample: Sample,
}

/// One entry, borrowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryRef<'a> {
    /// See [`Entry::path`].
    pub path: &'a str,
    /// See [`Entry::kind`].
    pub kind: EntryKind,
    /// See [`Entry::size`].
    pub size: u64,
    /// See [`Entry::hash`].
    pub hash: Option<Hash>,
    /// See [`Entry::target`].
    pub target: &'a str,
    /// See [`Entry::sample`].
    pub sample: SampleRef<'a>,
}

/// Why an entry cannot be part of a version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadEntry {
    /// The path is empty or absolute, or has an empty, `.` or `..` component.
    #[error("path {0:?} is not a clean relative path")]
    Path(String),
    /// The path, a component or a link target is too long or holds a NUL.
    #[error("path or target {0:?} is longer than 4096 bytes, has a component over 255 bytes, or holds a NUL")]
    Length(String),
    /// Kind, size, hash and target do not fit together.
    #[error("entry {0:?}: kind, size, hash and link target do not fit together")]
    Fields(String),
    /// The entry does not come after its predecessor.
    #[error("entry {path:?} does not come after {previous:?} in byte order")]
    Order {
        /// The path of the entry before.
        previous: String,
        /// The entry's path.
        path: String,
    },
    /// The path of a file or link is also a directory.
    #[error("{0:?} is both a file and a directory")]
    FileAndDirectory(String),
}

/// Returns whether a path is relative, with components that are not empty, `.` or `..`.
fn is_clean(path: &str) -> bool {
    !path.is_empty() && path.split('/').all(|c| !c.is_empty() && c != "." && c != "..")
}

/// Returns whether a path and its components are short enough.
fn fits(path: &str) -> bool {
    path.len() <= PATH_BYTES_MAX && path.split('/').all(|c| c.len() <= COMPONENT_BYTES_MAX)
}

impl Entry {
    /// Returns a file of `size` bytes that is a sample by itself.
    #[must_use]
    pub fn file(path: impl Into<String>, size: u64, hash: Hash) -> Self {
        Entry {
            path: path.into(),
            kind: EntryKind::File,
            size,
            hash: Some(hash),
            target: String::new(),
            sample: Sample::Single,
        }
    }

    /// Returns a symbolic link.
    #[must_use]
    pub fn symlink(path: impl Into<String>, target: impl Into<String>) -> Self {
        let target = target.into();
        Entry {
            path: path.into(),
            kind: EntryKind::Symlink,
            size: target.len() as u64,
            hash: None,
            target,
            sample: Sample::None,
        }
    }

    /// Returns an empty directory. `path` has no closing slash; this function adds it.
    #[must_use]
    pub fn empty_dir(path: impl Into<String>) -> Self {
        let mut path = path.into();
        path.push('/');
        Entry {
            path,
            kind: EntryKind::EmptyDir,
            size: 0,
            hash: None,
            target: String::new(),
            sample: Sample::None,
        }
    }

    /// Returns the entry, borrowed.
    #[must_use]
    pub fn as_ref(&self) -> EntryRef<'_> {
        EntryRef {
            path: &self.path,
            kind: self.kind,
            size: self.size,
            hash: self.hash,
            target: &self.target,
            sample: match &self.sample {
                Sample::None => SampleRef::None,
                Sample::Single => SampleRef::Single,
                Sample::Keyed(k) => SampleRef::Keyed(k),
            },
        }
    }
}

impl EntryRef<'_> {
    /// Returns an owned copy.
    #[must_use]
    pub fn to_owned(&self) -> Entry {
        Entry {
            path: self.path.to_owned(),
            kind: self.kind,
            size: self.size,
            hash: self.hash,
            target: self.target.to_owned(),
            sample: match self.sample {
                SampleRef::None => Sample::None,
                SampleRef::Single => Sample::Single,
                SampleRef::Keyed(k) => Sample::Keyed(k.to_owned()),
            },
        }
    }

    /// Checks all rules that concern one entry alone.
    ///
    /// # Errors
    /// [`BadEntry`] with the first rule that the entry breaks.
    pub fn validate(&self) -> Result<(), BadEntry> {
        let named = || self.path.to_owned();
        let (file, member) = match (self.kind, self.path.split_once('\0')) {
            (EntryKind::Member, Some((shard, member))) => (shard, Some(member)),
            (EntryKind::Member, None) => return Err(BadEntry::Path(named())),
            (EntryKind::EmptyDir, None) => {
                (self.path.strip_suffix('/').ok_or_else(|| BadEntry::Path(named()))?, None)
            }
            (_, None) => (self.path, None),
            (_, Some(_)) => return Err(BadEntry::Length(named())),
        };
        if !is_clean(file) || member.is_some_and(str::is_empty) {
            return Err(BadEntry::Path(named()));
        }
        let member_fits = member.is_none_or(|m| m.len() <= PATH_BYTES_MAX && !m.contains('\0'));
        if !fits(file) || !member_fits || self.target.len() > PATH_BYTES_MAX || self.target.contains('\0') {
            return Err(BadEntry::Length(named()));
        }
        let fields_fit = match self.kind {
            EntryKind::File | EntryKind::Member => self.hash.is_some() && self.target.is_empty(),
            EntryKind::Symlink => {
                self.hash.is_none() && !self.target.is_empty() && self.size == self.target.len() as u64
            }
            EntryKind::EmptyDir => self.hash.is_none() && self.target.is_empty() && self.size == 0,
        };
        if fields_fit { Ok(()) } else { Err(BadEntry::Fields(named())) }
    }

    /// Appends the canonical encoding (`docs/FORMATS.md`, "Entry"), little-endian.
    ///
    /// kind u8 · path u32+bytes · size u64 · hash 32 (file, member) or target u32+bytes (symbolic link) or
    /// nothing · sample tag u8 (0 none, 1 single, 2 keyed) · key u32+bytes if keyed.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(self.kind as u8);
        put_text(out, self.path);
        out.extend_from_slice(&self.size.to_le_bytes());
        match (self.kind, &self.hash) {
            (EntryKind::Symlink, _) => put_text(out, self.target),
            (_, Some(h)) => out.extend_from_slice(h.as_bytes()),
            (_, None) => {}
        }
        match self.sample {
            SampleRef::None => out.push(0),
            SampleRef::Single => out.push(1),
            SampleRef::Keyed(k) => {
                out.push(2);
                put_text(out, k);
            }
        }
    }
}

pub(super) fn put_text(out: &mut Vec<u8>, s: &str) {
    let len = u32::try_from(s.len()).unwrap_or(u32::MAX);
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(s.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_of_one_entry() {
        let h = Hash::of(b"");
        let ok = [
            Entry::file("a/b c/é", 0, h),
            Entry::symlink("l", "../anything/at all"),
            Entry::empty_dir("d/e"),
            Entry { path: "s.tar\0dir/0001.jpg".into(), kind: EntryKind::Member, ..Entry::file("x", 3, h) },
        ];
        for e in ok {
            assert_eq!(e.as_ref().validate(), Ok(()), "{}", e.path);
        }
        let bad = [
            Entry::file("", 0, h),
            Entry::file("/etc/passwd", 0, h),
            Entry::file("a/../b", 0, h),
            Entry::file("a//b", 0, h),
            Entry::file("a/", 0, h),
            Entry::file("./a", 0, h),
            Entry::file("a\0b", 0, h),
            Entry::file("x".repeat(256), 0, h),
            Entry::file("x/".repeat(2050) + "y", 0, h),
            Entry { hash: None, ..Entry::file("a", 0, h) },
            Entry { size: 7, ..Entry::symlink("a", "b") },
            Entry::symlink("a", ""),
            Entry::symlink("a", "b\0c"),
            Entry { path: "d".into(), ..Entry::empty_dir("d") },
            Entry { kind: EntryKind::Member, ..Entry::file("no-shard", 0, h) },
        ];
        for e in bad {
            assert!(e.as_ref().validate().is_err(), "{:?}", e.path);
        }
    }
}
