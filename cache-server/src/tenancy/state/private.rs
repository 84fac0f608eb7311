//! Makes the files of a directory private: for the owner alone, whatever umask created them.

use std::{
    fs::{self, Permissions},
    io,
    os::unix::fs::PermissionsExt as _,
    path::Path,
};

/// The mode bits of the group and of other users.
const OTHERS: u32 = 0o077;

/// Takes from other users every right to a directory, and to all files and directories below it. Blocking.
///
/// Symbolic links are not followed.
///
/// # Errors
/// The first error of the system.
pub fn make_private(path: &Path) -> io::Result<()> {
    let meta = fs::symlink_metadata(path)?;
    if meta.is_symlink() {
        return Ok(());
    }
    let mode = meta.permissions().mode();
    if mode & OTHERS != 0 {
        fs::set_permissions(path, Permissions::from_mode(mode & 0o7777 & !OTHERS))?;
    }
    if meta.is_dir() {
        for entry in fs::read_dir(path)? {
            match make_private(&entry?.path()) {
                // The server begins to run below this directory only later, but a person may tidy up.
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_below_becomes_private_and_nothing_behind_a_link_does() {
        let dir = tempfile::tempdir().expect("tempdir");
        let at = |rel: &str| dir.path().join(rel);
        fs::create_dir_all(at("state/jobs/j")).expect("mkdir");
        for file in ["state/log", "state/jobs/j/job.json", "outside"] {
            fs::write(at(file), "x").expect("write");
        }
        std::os::unix::fs::symlink(at("outside"), at("state/link")).expect("symlink");
        let set =
            |rel: &str, mode| fs::set_permissions(at(rel), Permissions::from_mode(mode)).expect("chmod");
        for (rel, mode) in
            [("state", 0o755), ("state/jobs", 0o2775), ("state/log", 0o644), ("outside", 0o644)]
        {
            set(rel, mode);
        }
        set("state/jobs/j/job.json", 0o664);
        make_private(&at("state")).expect("private");
        let mode = |rel: &str| fs::metadata(at(rel)).expect(rel).permissions().mode() & 0o7777;
        assert_eq!((mode("state"), mode("state/jobs"), mode("state/jobs/j")), (0o700, 0o2700, 0o700));
        assert_eq!(
            (mode("state/log"), mode("state/jobs/j/job.json"), mode("outside")),
            (0o600, 0o600, 0o644)
        );
    }
}
