//! Whether a file changed since it was last looked at.

use std::{fs::Metadata, io, os::unix::fs::MetadataExt as _, path::Path};

/// What distinguishes one state of a file from another.
///
/// A symbolic link counts as the file to which it leads. So a link that leads elsewhere is noticed, too:
/// Kubernetes changes the files of a Secret in this way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStamp {
    inode: (u64, u64),
    len: u64,
    changed: [(i64, i64); 2],
}

impl FileStamp {
    /// Returns the stamp of a file. Blocking.
    ///
    /// # Errors
    /// The error of the system, for example if the file does not exist.
    pub fn at(path: &Path) -> io::Result<Self> {
        std::fs::metadata(path).map(|m| FileStamp::of(&m))
    }

    fn of(m: &Metadata) -> Self {
        let changed = [(m.mtime(), m.mtime_nsec()), (m.ctime(), m.ctime_nsec())];
        FileStamp { inode: (m.dev(), m.ino()), len: m.len(), changed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_link_that_leads_elsewhere_is_another_state() {
        let dir = tempfile::tempdir().expect("tempdir");
        let at = |name: &str| dir.path().join(name);
        // As Kubernetes mounts a Secret: file → ..data/file, and ..data → a directory with a new name.
        for version in ["one", "two"] {
            std::fs::create_dir(at(version)).expect("mkdir");
            std::fs::write(at(version).join("f"), "same length").expect("write");
        }
        symlink("one", at("..data")).expect("symlink");
        symlink("..data/f", at("f")).expect("symlink");
        let first = FileStamp::at(&at("f")).expect("stamp");
        assert_eq!(FileStamp::at(&at("f")).expect("stamp"), first);
        symlink("two", at("..tmp")).expect("symlink");
        std::fs::rename(at("..tmp"), at("..data")).expect("rename");
        assert_ne!(FileStamp::at(&at("f")).expect("stamp"), first);
        assert!(FileStamp::at(&at("absent")).is_err());
    }
}
