//! The directory of a mount: what stands there, and whether this user can mount, before anything is read.

use super::Context;
use super::doctor::cannot_mount;
use crate::failure::{Exit, Failure};
use fletch_core::Root;
use fletch_host::mounts::{self, Health};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a mount that stands there may take to say that it lives.
const HEALTH_WITHIN: Duration = Duration::from_secs(2);
/// The extended attribute with the root that a mount shows.
const ROOT_ATTRIBUTE: &str = "user.fletch.root";

/// A mount that lives.
pub struct ShownMount {
    /// The directory, without links.
    pub dir: PathBuf,
    /// The dataset that it shows.
    pub dataset: String,
}

impl ShownMount {
    /// Returns the root of the version that it shows. `None` if it does not say.
    pub fn root(&self) -> Option<Root> {
        let mut text = [0; 64];
        let len = rustix::fs::getxattr(&self.dir, ROOT_ATTRIBUTE, &mut text).ok()?;
        std::str::from_utf8(text.get(..len)?).ok()?.parse().ok()
    }
}

/// Checks whether this user can mount at a directory. Returns the mount that stands there and lives.
///
/// # Errors
/// FUSE cannot be used; the directory is a file, cannot be created, or has files.
pub fn check(dir: &Path, allow_non_empty: bool) -> Result<Option<ShownMount>, Failure> {
    if let Some(finding) = cannot_mount() {
        return Err(Failure::new(finding.what).hint(finding.fix));
    }
    let shown = dir.display();
    let cannot = |e: &io::Error| Failure::io(format_args!("cannot mount at {shown}"), e);
    let dir = std::path::absolute(dir).map_err(|e| cannot(&e))?;
    let Some(above) = dir.ancestors().skip(1).find(|above| above.exists()) else {
        return Err(Failure::new(format!("there is nothing above {shown}")));
    };
    let Ok(real) = real_path(&dir) else { return creatable(&dir, above).map(|()| None) };
    let mount = mounts::at(&real).map_err(|e| Failure::io("cannot read the mount table", &e))?;
    if let Some(dataset) = mount.as_ref().and_then(|mount| mount.dataset()) {
        // A dead one is replaced.
        let lives = mounts::health(&real, HEALTH_WITHIN) != Health::Dead;
        return Ok(lives.then(|| ShownMount { dataset: dataset.to_owned(), dir: real }));
    }
    let meta = match std::fs::symlink_metadata(&real) {
        Ok(meta) => meta,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return creatable(&dir, above).map(|()| None);
        }
        Err(e) => return Err(cannot(&e)),
    };
    if !meta.is_dir() {
        return Err(Failure::usage(format!("{shown} is a file, and a mount needs a directory"))
            .hint("give a directory, or a path where nothing is: it is created"));
    }
    let is_empty = std::fs::read_dir(&real).map_err(|e| cannot(&e))?.next().is_none();
    if !is_empty && !allow_non_empty {
        return Err(Failure::usage(format!("{shown} has files, which a mount would hide"))
            .hint("give an empty directory, or --allow-non-empty"));
    }
    Ok(None)
}

/// Checks that a directory can be created. `above` is the nearest one that exists.
fn creatable(dir: &Path, above: &Path) -> Result<(), Failure> {
    let shown = dir.display();
    if !above.is_dir() {
        return Err(Failure::usage(format!("cannot create {shown}: {} is no directory", above.display()))
            .hint("give another directory"));
    }
    nix::unistd::access(above, nix::unistd::AccessFlags::W_OK | nix::unistd::AccessFlags::X_OK).map_err(|e| {
        Failure::new(format!("cannot create {shown}: {}: {}", above.display(), e.desc()))
            .hint("give a directory that you may create")
            .exit(Exit::Denied)
    })
}

/// Returns the directory to mount at, without links. Creates it if it does not exist.
///
/// # Errors
/// It cannot be created.
pub fn create(ctx: &Context, dir: &Path) -> Result<PathBuf, Failure> {
    let shown = dir.display();
    let cannot = |e: &io::Error| Failure::io(format_args!("cannot mount at {shown}"), e);
    let dir = std::path::absolute(dir).map_err(|e| cannot(&e))?;
    if dir.symlink_metadata().is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
        std::fs::create_dir_all(&dir).map_err(|e| cannot(&e).hint("give a directory that you may create"))?;
        ctx.out.note(format_args!("created {shown}"));
    }
    real_path(&dir).map_err(|e| cannot(&e))
}

/// Returns the path of a directory without links. Does not touch the directory itself: a mount of a dead
/// process there fails or hangs.
fn real_path(dir: &Path) -> io::Result<PathBuf> {
    let (Some(above), Some(name)) = (dir.parent(), dir.file_name()) else { return Ok(dir.to_owned()) };
    let here = std::fs::canonicalize(above)?.join(name);
    match std::fs::read_link(&here) {
        Ok(_) => std::fs::canonicalize(&here),
        Err(_) => Ok(here),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn what_stands_in_the_way_is_named() {
        let home = tempfile::tempdir().expect("tempdir");
        let at = |name: &str| home.path().join(name);
        fs::write(at("file"), "").expect("write");
        fs::create_dir_all(at("full/below")).expect("mkdir");
        fs::create_dir(at("empty")).expect("mkdir");
        let why = |name: &str| check(&at(name), false).err().map(|e| e.to_string()).unwrap_or_default();
        if cannot_mount().is_some() {
            assert!(why("empty").contains("fuse"), "{}", why("empty"));
            return;
        }
        assert!(why("file").contains("is a file"), "{}", why("file"));
        assert!(why("file/below").contains("is no directory"), "{}", why("file/below"));
        assert!(why("full").contains("has files"), "{}", why("full"));
        assert!(check(&at("full"), true).is_ok() && why("empty").is_empty() && why("new/below").is_empty());
        assert!(!at("new").exists(), "a check creates nothing");
    }
}
