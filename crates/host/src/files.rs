//! Small files that a person or an operator writes: their bytes, and whether they changed.

use std::{
    fs::{File, Metadata},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

/// The longest file that [`read_small`] reads, in bytes.
const SMALL_BYTES_MAX: u64 = 1 << 20;

/// Reads a file of at most 1 MiB. Blocking.
///
/// # Errors
/// The error of the system, or one that says that the file is longer.
pub fn read_small(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // The length that the system tells may be wrong: a device has none, and a file can grow.
    File::open(path)?.take(SMALL_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > SMALL_BYTES_MAX {
        return Err(io::Error::other("the file is longer than 1 MiB"));
    }
    Ok(bytes)
}

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
    fn a_file_without_end_is_not_read_whole() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("f");
        std::fs::write(&path, vec![7; 1 << 20]).expect("write");
        assert_eq!(read_small(&path).expect("short enough").len(), 1 << 20);
        std::fs::write(&path, vec![7; (1 << 20) + 1]).expect("write");
        for too_long in [&path, Path::new("/dev/zero")] {
            let told = read_small(too_long).expect_err("too long").to_string();
            assert!(told.contains("longer than 1 MiB"), "{told}");
        }
        assert!(read_small(&dir.path().join("absent")).is_err());
    }

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
