//! Extended attributes: what a node is, for programs that want to know.
//!
//! The kernel shows `user.*` attributes of files and directories only, never of symlinks.

use super::error::FsError;
use super::inode::Ino;
use super::tree::Tree;

/// The version's root, on every node.
pub const ROOT: &str = "user.fletch.root";
/// The BLAKE3 of the content (as `b3sum` prints it), on files.
pub const BLAKE3: &str = "user.fletch.blake3";

impl Tree {
    /// The value of an attribute.
    ///
    /// # Errors
    /// [`FsError::NoAttribute`] for a name it does not have.
    pub async fn xattr(&self, ino: u64, name: &[u8]) -> Result<Vec<u8>, FsError> {
        if name == ROOT.as_bytes() {
            return Ok(self.version().root().to_string().into_bytes());
        }
        if name != BLAKE3.as_bytes() || !matches!(Ino::decode(ino), Some(Ino::Entry(_))) {
            return Err(FsError::NoAttribute);
        }
        match self.file(ino).await {
            Ok(found) => Ok(found.entry().hash.ok_or(FsError::NoAttribute)?.to_string().into_bytes()),
            Err(FsError::Invalid) => Err(FsError::NoAttribute),
            Err(e) => Err(e),
        }
    }

    /// The names of its attributes, each closed by a NUL.
    ///
    /// # Errors
    /// [`FsError`].
    pub async fn xattr_names(&self, ino: u64) -> Result<Vec<u8>, FsError> {
        let mut names = format!("{ROOT}\0");
        match self.xattr(ino, BLAKE3.as_bytes()).await {
            Ok(_) => {
                names.push_str(BLAKE3);
                names.push('\0');
            }
            Err(FsError::NoAttribute) => {}
            Err(e) => return Err(e),
        }
        Ok(names.into_bytes())
    }
}
