//! The tree of a version: names, directories, attributes and extended attributes.
//!
//! It has no state beyond the version's own parts: it computes every answer from an inode number. The kernel
//! shows `user.*` attributes of files and directories only, never of symlinks.

use super::attr::{Attr, InodeKind};
use super::error::FsError;
use super::inode::Ino;
use fletch_core::manifest::locate::DirId;
use fletch_tables::version::{Found, Resolved};
use fletch_tables::{ChildKind, Version};
use std::sync::Arc;

/// The most children read from the tables at once.
const PAGE: usize = 128;
/// Added to a child's cookie to make its directory offset. Offset 1 is after `.`, and 2 after `..`.
const OFFSET_BASE: u64 = 2;
/// The extended attribute with the version's root, on every inode.
pub const XATTR_ROOT: &str = "user.fletch.root";
/// The extended attribute with the BLAKE3 of the content, as `b3sum` prints it, on files.
pub const XATTR_BLAKE3: &str = "user.fletch.blake3";

/// The namespace of all extended attributes that a mount has. The kernel owns the others, for example
/// `system.` for ACLs and `security.` for labels.
const XATTR_NAMESPACE: &[u8] = b"user.";

/// Whether a mount supports the namespace of an extended attribute's name. Reads no table.
#[must_use]
pub fn has_namespace(name: &[u8]) -> bool {
    name.starts_with(XATTR_NAMESPACE)
}

/// One entry of a directory listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    pub name: String,
    /// The offset at which a listing continues after this entry.
    pub offset: u64,
    /// The attributes of the inode.
    pub attr: Attr,
}

/// The totals of a version, for `statfs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Totals {
    /// Content bytes.
    pub bytes: u64,
    pub entries: u64,
}

/// The tree of one version.
#[derive(Clone)]
pub struct Tree {
    version: Version,
}

impl Tree {
    /// Returns the tree of `version`.
    #[must_use]
    pub fn new(version: Version) -> Self {
        Tree { version }
    }

    #[must_use]
    pub fn version(&self) -> &Version {
        &self.version
    }

    /// Returns the totals of the version.
    #[must_use]
    pub fn totals(&self) -> Totals {
        let m = self.version.manifest();
        Totals { bytes: m.bytes, entries: m.entries }
    }

    /// Looks up `name` in directory `parent`; `None` if the directory has no such name.
    ///
    /// # Errors
    /// [`FsError`].
    pub async fn lookup(&self, parent: u64, name: &[u8]) -> Result<Option<Attr>, FsError> {
        let dir = self.dir_path(parent).await?;
        let Ok(name) = std::str::from_utf8(name) else { return Ok(None) };
        if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
            return Ok(None);
        }
        let path = join(&dir, name);
        Ok(match self.version.resolve(&path).await? {
            None => None,
            Some(Resolved::Dir(id)) => Some(Attr::dir(number(Ino::Dir(id))?)),
            Some(Resolved::Entry(found)) => Attr::entry(found.ordinal, &found.entry()),
        })
    }

    /// Returns the attributes of an inode. Reads no table for a directory.
    ///
    /// # Errors
    /// [`FsError`].
    pub async fn attr(&self, ino: u64) -> Result<Attr, FsError> {
        match decode(ino)? {
            Ino::Dir(_) => Ok(Attr::dir(ino)),
            Ino::Entry(ordinal) => {
                let found = self.entry(ordinal).await?;
                Attr::entry(ordinal, &found.entry()).ok_or(FsError::NotFound)
            }
        }
    }

    /// Returns the file with an inode number.
    ///
    /// # Errors
    /// [`FsError`]; [`FsError::IsDirectory`] or [`FsError::Invalid`] if the inode is no file.
    pub async fn file(&self, ino: u64) -> Result<Found, FsError> {
        match decode(ino)? {
            Ino::Dir(_) => Err(FsError::IsDirectory),
            Ino::Entry(ordinal) => {
                let found = self.entry(ordinal).await?;
                match InodeKind::of(found.entry().kind) {
                    Some(InodeKind::File) => Ok(found),
                    Some(_) => Err(FsError::Invalid),
                    None => Err(FsError::NotFound),
                }
            }
        }
    }

    /// Returns the target of a symlink, verbatim.
    ///
    /// # Errors
    /// [`FsError`]; [`FsError::Invalid`] if the inode is no symlink.
    pub async fn target(&self, ino: u64) -> Result<String, FsError> {
        let Ino::Entry(ordinal) = decode(ino)? else { return Err(FsError::Invalid) };
        let found = self.entry(ordinal).await?;
        let entry = found.entry();
        match InodeKind::of(entry.kind) {
            Some(InodeKind::Symlink) => Ok(entry.target.to_owned()),
            _ => Err(FsError::Invalid),
        }
    }

    /// Lists directory `ino` from `offset` on. Calls `add` for each entry until it returns true (the reply is
    /// full) or the directory ends. An offset never changes its meaning.
    ///
    /// # Errors
    /// [`FsError`], if the listing fails before its first entry.
    pub async fn list(
        &self,
        ino: u64,
        offset: u64,
        mut add: impl FnMut(DirEntry) -> bool + Send,
    ) -> Result<(), FsError> {
        let Ino::Dir(id) = decode(ino)? else { return Err(FsError::NotDirectory) };
        let dir = self.dir_path(ino).await?;
        let dot = |name: &str, offset, ino| DirEntry { name: name.into(), offset, attr: Attr::dir(ino) };
        if offset < 1 && add(dot(".", 1, ino)) {
            return Ok(());
        }
        if offset < 2 && add(dot("..", 2, self.parent(id, &dir).await?)) {
            return Ok(());
        }
        let mut cookie = offset.saturating_sub(OFFSET_BASE);
        let mut any = offset < 2;
        loop {
            let page = match self.version.list(&dir, cookie, PAGE).await {
                Ok(page) => page,
                // The entries so far are right, and the next call meets the error again.
                Err(_) if any => return Ok(()),
                Err(e) => return Err(e.into()),
            };
            if page.is_empty() {
                return Ok(());
            }
            for child in page {
                let attr = match child.kind {
                    ChildKind::Dir(id) => Some(Attr::dir(number(Ino::Dir(id))?)),
                    ChildKind::Entry { kind, size } => Attr::new(child.ordinal, kind, size),
                };
                cookie = child.next;
                let Some(attr) = attr else { continue };
                let offset = child.next + OFFSET_BASE;
                if add(DirEntry { name: child.name, offset, attr }) {
                    return Ok(());
                }
                any = true;
            }
        }
    }

    /// Returns the value of an extended attribute.
    ///
    /// # Errors
    /// [`FsError::NoAttribute`] if the inode has no such attribute.
    pub async fn xattr(&self, ino: u64, name: &[u8]) -> Result<Vec<u8>, FsError> {
        if name == XATTR_ROOT.as_bytes() {
            return Ok(self.version().root().to_string().into_bytes());
        }
        if name != XATTR_BLAKE3.as_bytes() || !matches!(Ino::decode(ino), Some(Ino::Entry(_))) {
            return Err(FsError::NoAttribute);
        }
        match self.file(ino).await {
            Ok(found) => Ok(found.entry().hash.ok_or(FsError::NoAttribute)?.to_string().into_bytes()),
            Err(FsError::Invalid) => Err(FsError::NoAttribute),
            Err(e) => Err(e),
        }
    }

    /// Returns the names of the extended attributes, each ended by a NUL.
    ///
    /// # Errors
    /// [`FsError`].
    pub async fn xattr_names(&self, ino: u64) -> Result<Vec<u8>, FsError> {
        let mut names = format!("{XATTR_ROOT}\0");
        match self.xattr(ino, XATTR_BLAKE3.as_bytes()).await {
            Ok(_) => {
                names.push_str(XATTR_BLAKE3);
                names.push('\0');
            }
            Err(FsError::NoAttribute) => {}
            Err(e) => return Err(e),
        }
        Ok(names.into_bytes())
    }

    async fn entry(&self, ordinal: u64) -> Result<Found, FsError> {
        self.version.entry(ordinal).await?.ok_or(FsError::NotFound)
    }

    /// Returns the path of a directory, "" for the root.
    async fn dir_path(&self, ino: u64) -> Result<Arc<str>, FsError> {
        let Ino::Dir(id) = decode(ino)? else { return Err(FsError::NotDirectory) };
        if id.depth == 0 {
            return Ok("".into());
        }
        self.version.dir_path(id).await?.ok_or(FsError::NotFound)
    }

    async fn parent(&self, id: DirId, path: &str) -> Result<u64, FsError> {
        let Some((above, _)) = path.rsplit_once('/') else { return number(Ino::ROOT) };
        debug_assert!(id.depth > 1);
        match self.version.resolve(above).await? {
            Some(Resolved::Dir(id)) => number(Ino::Dir(id)),
            _ => Err(FsError::NotFound),
        }
    }
}

fn decode(ino: u64) -> Result<Ino, FsError> {
    Ino::decode(ino).ok_or(FsError::NotFound)
}

fn number(ino: Ino) -> Result<u64, FsError> {
    ino.number().ok_or(FsError::NotFound)
}

fn join(dir: &str, name: &str) -> String {
    if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") }
}
