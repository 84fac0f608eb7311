//! Attributes, as `stat` shows them. Entries differ in inode number, kind and size only.

use super::inode::Ino;
use fletch_core::manifest::{EntryKind, EntryRef};
use std::time::SystemTime;

/// The value of `st_blksize`: a program that uses it as its buffer size reads a typical sample in one
/// request.
pub const IO_BYTES: u32 = 128 << 10;
/// The `st_size` of a directory.
const DIR_BYTES: u64 = 4096;

/// The kinds of inodes in a tree.
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
    /// Returns the kind of an entry's inode; `None` for a tar member, which the tree hides.
    #[must_use]
    pub fn of(kind: EntryKind) -> Option<Self> {
        match kind {
            EntryKind::File => Some(InodeKind::File),
            EntryKind::Symlink => Some(InodeKind::Symlink),
            EntryKind::EmptyDir => Some(InodeKind::Directory),
            EntryKind::Member => None,
        }
    }

    /// Returns the permission bits: no inode can be written, no file executed.
    #[must_use]
    pub fn mode(self) -> u16 {
        match self {
            InodeKind::Directory => 0o555,
            InodeKind::File => 0o444,
            InodeKind::Symlink => 0o777,
        }
    }
}

/// The attributes of one inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attr {
    /// The inode number.
    pub ino: u64,
    pub kind: InodeKind,
    /// The size in bytes: of the content, or of a symlink's target.
    pub size: u64,
}

impl Attr {
    /// Returns the attributes of a directory.
    #[must_use]
    pub fn dir(ino: u64) -> Self {
        Attr { ino, kind: InodeKind::Directory, size: DIR_BYTES }
    }

    /// Returns the attributes of an entry; `None` for a tar member, which the tree hides.
    #[must_use]
    pub fn entry(ordinal: u64, entry: &EntryRef<'_>) -> Option<Self> {
        Attr::new(ordinal, entry.kind, entry.size)
    }

    /// Returns the attributes of the entry with this ordinal, kind and size; `None` for a tar member.
    #[must_use]
    pub fn new(ordinal: u64, kind: EntryKind, size: u64) -> Option<Self> {
        Some(Attr { ino: Ino::Entry(ordinal).number()?, kind: InodeKind::of(kind)?, size })
    }

    /// Returns the number of 512-byte blocks, as `du` counts them. A symlink takes none.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        match self.kind {
            InodeKind::Symlink => 0,
            _ => self.size.div_ceil(512),
        }
    }
}

/// The attributes that all inodes of a mount share.
#[derive(Debug, Clone, Copy)]
pub struct CommonAttr {
    /// The user who mounted.
    pub uid: u32,
    /// The group of that user.
    pub gid: u32,
    /// The creation time of the version.
    pub created: SystemTime,
}
