//! The space of a file system, for settings that depend on it before a tier is opened.

use super::catalogue;
use std::{io, path::Path};

/// The space of a file system, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FsSpace {
    /// All bytes of the file system.
    pub total: u64,
    /// Bytes that this process may still use.
    pub available: u64,
    /// Bytes that a tier in the directory occupies already.
    pub own: u64,
}

impl FsSpace {
    /// Returns the space of the file system that `dir` lies on, or would lie on if it existed.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn at(dir: &Path) -> io::Result<Self> {
        let v = nearest(dir)?;
        let bytes = |blocks: u64| blocks.saturating_mul(v.f_frsize);
        // Other files in the directory are not the tier's.
        let all = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let ours = all.filter(|e| {
            let name = e.file_name();
            let name = name.to_string_lossy();
            name == "slabs" || name.starts_with("catalogue")
        });
        let own = ours.map(|e| catalogue::du(&e.path())).sum();
        Ok(FsSpace { total: bytes(v.f_blocks), available: bytes(v.f_bavail), own })
    }
}

/// Returns the file system of the nearest existing ancestor.
fn nearest(dir: &Path) -> io::Result<rustix::fs::StatVfs> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for at in dir.ancestors() {
        match rustix::fs::statvfs(at) {
            Ok(v) => return Ok(v),
            Err(e) => last = e.into(),
        }
        if !matches!(last.kind(), io::ErrorKind::NotFound) {
            break;
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_is_not_there_yet_has_the_room_of_its_parent() {
        let dir = tempfile::tempdir().expect("a directory");
        let room = FsSpace::at(&dir.path().join("a/b/c")).expect("room");
        assert!(room.total > 0 && room.available <= room.total && room.own == 0, "{room:?}");
        std::fs::create_dir(dir.path().join("slabs")).expect("mkdir");
        std::fs::write(dir.path().join("slabs/x"), vec![1; 100_000]).expect("write");
        std::fs::write(dir.path().join("other"), vec![1; 500_000]).expect("write");
        let own = FsSpace::at(dir.path()).expect("room").own;
        assert!((100_000..300_000).contains(&own), "{own}");
        std::fs::write(dir.path().join("file"), b"x").expect("write");
        assert!(FsSpace::at(&dir.path().join("file/below")).is_err(), "below a file there is none");
    }
}
