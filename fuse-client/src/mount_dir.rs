//! The directory to mount at: checks it, and detaches a mount of Fletch there whose process is dead.
//!
//! The mount table decides first. To touch a mount whose process is dead or hangs fails or hangs.
//!
//! 1. Only a mount of Fletch is detached, and only when the kernel says that no process serves it.
//! 2. A mount that a living process serves stays, whosever it is.

use crate::unmount;
use anyhow::{Context, Result, anyhow};
use fletch_core::DatasetName;
use fletch_host::mounts::{self, Health, MountEntry};
use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

/// How long a mount may take to say that it lives.
const HEALTH_WITHIN: Duration = Duration::from_secs(2);
/// The most dead mounts that are detached from one directory. Each crash leaves one.
const DEAD_MOUNTS_MAX: usize = 64;
/// The most links on the way to the directory, as the kernel's own limit.
const LINKS_MAX: usize = 40;

/// What to do about the mount that a directory has.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    /// Nothing is mounted there, or nothing that is in the way.
    Use,
    /// Detach it and look again.
    Detach,
    /// Leave it, and fail with this text.
    Refuse(String),
}

/// Decides about the topmost mount of a directory. `health` is asked only for a mount of Fletch.
fn decide(mount: Option<&MountEntry>, wanted: &DatasetName, health: impl FnOnce() -> Health) -> Decision {
    let Some((mount, shown)) = mount.and_then(|m| Some((m, m.dataset()?))) else { return Decision::Use };
    let dir = mount.dir.display();
    match health() {
        Health::Dead => Decision::Detach,
        Health::Living if shown == wanted.as_str() => Decision::Refuse(format!(
            "{dir} shows {shown} already: it is a fletch mount already, and its process lives; to mount \
             again, unmount it first: fusermount3 -u {dir}"
        )),
        Health::Living => Decision::Refuse(format!(
            "{dir} is a fletch mount already, of {shown}; unmount it first: fusermount3 -u {dir}"
        )),
        Health::Silent => Decision::Refuse(format!(
            "{dir} is a fletch mount of {shown}, whose process did not answer within {HEALTH_WITHIN:?}; end \
             that process, or detach the mount: fusermount3 -u -z {dir}"
        )),
    }
}

/// Returns the directory to mount `wanted` at, without links. Detaches dead mounts of Fletch there.
///
/// # Errors
/// What is wrong with the directory, and what to do.
pub fn prepare(dir: &Path, wanted: &DatasetName) -> Result<PathBuf> {
    let real = real_path(dir)?;
    let shown = real.display();
    for _ in 0..DEAD_MOUNTS_MAX {
        let mount = mounts::at(&real).context("cannot read the mount table")?;
        match decide(mount.as_ref(), wanted, || mounts::health(&real, HEALTH_WITHIN)) {
            Decision::Use => {
                let meta = std::fs::metadata(&real).map_err(|e| unusable(&real, e))?;
                return if meta.is_dir() { Ok(real) } else { Err(anyhow!("{shown} is not a directory")) };
            }
            Decision::Refuse(why) => return Err(anyhow!(why)),
            Decision::Detach => {
                unmount::detach(&real).map_err(|why| {
                    anyhow!(
                        "{shown} is the mount of a dead process and cannot be detached: {why}; as root, \
                         run: umount -l {shown}"
                    )
                })?;
                tracing::warn!(dir = %shown, "detached the mount of a dead fletch-mount: mounting anew");
            }
        }
    }
    Err(anyhow!("{shown} has more than {DEAD_MOUNTS_MAX} mounts of dead processes; run: umount -l {shown}"))
}

/// Returns the absolute path of `dir` without links. Does not touch a mount at the directory itself.
pub(crate) fn real_path(dir: &Path) -> Result<PathBuf> {
    let mut dir = std::path::absolute(dir).with_context(|| format!("{}", dir.display()))?;
    for _ in 0..LINKS_MAX {
        // The root, and a path that ends in `..`, have no name.
        let (Some(above), Some(name)) = (dir.parent(), dir.file_name()) else {
            return std::fs::canonicalize(&dir).map_err(|e| unusable(&dir, e));
        };
        let above = std::fs::canonicalize(above).map_err(|e| unusable(&dir, e))?;
        let here = above.join(name);
        match std::fs::read_link(&here) {
            Ok(to) => dir = above.join(to),
            // Not a link: EINVAL from a directory, and ENOTCONN or nothing at all from a dead mount.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(unusable(dir.as_path(), e)),
            Err(_) => return Ok(here),
        }
    }
    Err(anyhow!("{} has more than {LINKS_MAX} links on its way", dir.display()))
}

fn unusable(dir: &Path, e: io::Error) -> anyhow::Error {
    let shown = dir.display();
    match e.raw_os_error() {
        Some(libc::ENOENT) => anyhow!("{shown} does not exist; create it first: mkdir -p {shown}"),
        Some(libc::ENOTCONN) => {
            anyhow!(
                "{shown} is in the mount of a dead process; detach that mount first: fusermount3 -u -z DIR"
            )
        }
        _ => anyhow::Error::new(e).context(format!("{shown}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(fs_type: &str, source: &str) -> MountEntry {
        MountEntry { device: "0:9".into(), dir: "/m".into(), fs_type: fs_type.into(), source: source.into() }
    }

    #[test]
    fn only_a_dead_mount_of_fletch_is_detached() {
        let d = DatasetName::new("d").expect("name");
        let ours = mount("fuse.fletch", "fletch:d");
        let with = |m: Option<&MountEntry>, health| decide(m, &d, || health);
        assert_eq!(with(None, Health::Dead), Decision::Use);
        assert_eq!(with(Some(&ours), Health::Dead), Decision::Detach);
        for foreign in [mount("fuse.sshfs", "fletch:d"), mount("fuse.fletch", "x"), mount("ext4", "/dev/a")] {
            assert_eq!(with(Some(&foreign), Health::Dead), Decision::Use, "{foreign:?}");
        }
        let refused = |m: &MountEntry, health| match with(Some(m), health) {
            Decision::Refuse(why) => why,
            other => panic!("{other:?}"),
        };
        assert!(refused(&ours, Health::Living).contains("/m shows d already"));
        assert!(refused(&mount("fuse.fletch", "fletch:e"), Health::Living).contains("already, of e;"));
        assert!(refused(&ours, Health::Silent).contains("did not answer"));
    }

    #[test]
    fn links_lead_to_the_directory() {
        let top = tempfile::tempdir().expect("tempdir");
        let top = std::fs::canonicalize(top.path()).expect("real");
        std::fs::create_dir_all(top.join("a/b")).expect("mkdir");
        std::os::unix::fs::symlink("a/b", top.join("link")).expect("symlink");
        std::os::unix::fs::symlink("loop", top.join("loop")).expect("symlink");
        let real = |p: &str| real_path(&top.join(p)).map_err(|e| format!("{e:#}"));
        assert_eq!((real("a/b"), real("link")), (Ok(top.join("a/b")), Ok(top.join("a/b"))));
        assert_eq!((real("a/b/.."), real("a/./b/")), (Ok(top.join("a")), Ok(top.join("a/b"))));
        assert!(real("loop").expect_err("a loop").contains("40 links"));
        assert!(real("none").expect_err("absent").contains("mkdir -p"));
    }
}
