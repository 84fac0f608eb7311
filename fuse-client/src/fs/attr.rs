//! Attributes: what `stat` says. Nothing but kind and size differs between entries.

use super::inode::Ino;
use fletch_core::manifest::{EntryKind, EntryRef};
use std::time::SystemTime;

/// What tools are told to read at once: a program that takes `st_blksize` as its buffer reads a
/// sample in one request.
pub const IO_BYTES: u32 = 128 << 10;
/// The size shown for a directory.
const DIR_BYTES: u64 = 4096;

/// Kinds that a tree can show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InodeKind {
    /// A directory, empty or not.
    Directory,
    /// A regular file.
    File,
    /// A symbolic link.
    Symlink,
}

impl InodeKind {
    /// The kind shown for an entry; `None` for what the tree hides.
    #[must_use]
    pub fn of(kind: EntryKind) -> Option<Self> {
        match kind {
            EntryKind::File => Some(InodeKind::File),
            EntryKind::Symlink => Some(InodeKind::Symlink),
            EntryKind::EmptyDir => Some(InodeKind::Directory),
            EntryKind::Member => None,
        }
    }

    /// Permission bits: nobody writes, nothing is executed.
    #[must_use]
    pub fn mode(self) -> u16 {
        match self {
            InodeKind::Directory => 0o555,
            InodeKind::File => 0o444,
            InodeKind::Symlink => 0o777,
        }
    }
}

/// What a node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attr {
    /// Its inode number.
    pub ino: u64,
    /// Its kind.
    pub kind: InodeKind,
    /// Bytes of content, or of a link's target.
    pub size: u64,
}

impl Attr {
    /// Of a directory.
    #[must_use]
    pub fn dir(ino: u64) -> Self {
        Attr { ino, kind: InodeKind::Directory, size: DIR_BYTES }
    }

    /// Of an entry; `None` for what the tree hides.
    #[must_use]
    pub fn entry(ordinal: u64, entry: &EntryRef<'_>) -> Option<Self> {
        Attr::new(ordinal, entry.kind, entry.size)
    }

    /// Of a file or symlink.
    #[must_use]
    pub fn new(ordinal: u64, kind: EntryKind, size: u64) -> Option<Self> {
        Some(Attr { ino: Ino::Entry(ordinal).number()?, kind: InodeKind::of(kind)?, size })
    }

    /// 512-byte blocks, as `du` counts them. Links live in their inode.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        match self.kind {
            InodeKind::Symlink => 0,
            _ => self.size.div_ceil(512),
        }
    }
}

/// What all nodes of a mount share.
#[derive(Debug, Clone, Copy)]
pub struct CommonAttr {
    /// Who mounted.
    pub uid: u32,
    /// The group of who mounted.
    pub gid: u32,
    /// When the version was made.
    pub created: SystemTime,
}
