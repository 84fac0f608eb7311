//! Taking the mount away, within a bound, whoever still uses it.

use crate::mountinfo;
use nix::{
    errno::Errno,
    mount::{MntFlags, umount2},
};
use std::{
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// How long programs that still use the mount are waited for.
const GRACE: Duration = Duration::from_secs(3);
const RETRY_EVERY: Duration = Duration::from_millis(100);

/// How the mount went away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmounted {
    /// Nobody used it.
    Clean,
    /// Somebody still does: it is out of the tree, and ends for them when this process ends.
    Detached,
}

/// Unmounts `dir` if `device` is still mounted there. Blocking, at most [`GRACE`] and a little.
///
/// # Errors
/// When not even detaching works.
pub fn unmount(dir: &Path, device: &str) -> anyhow::Result<Unmounted> {
    let until = Instant::now() + GRACE;
    let mut told = false;
    loop {
        if mountinfo::of_device(device)?.is_none() {
            return Ok(Unmounted::Clean);
        }
        match attempt(dir, false) {
            Ok(()) => return Ok(Unmounted::Clean),
            Err(why) if Instant::now() >= until => {
                tracing::debug!(why, "detaching");
                break;
            }
            Err(why) => {
                if !told {
                    tracing::info!(dir = %dir.display(), grace = ?GRACE, "in use ({why}); waiting");
                    told = true;
                }
                std::thread::sleep(RETRY_EVERY);
            }
        }
    }
    attempt(dir, true).map_err(|why| anyhow::anyhow!("cannot unmount {}: {why}", dir.display()))?;
    tracing::warn!(
        dir = %dir.display(),
        "still in use: detached; programs that have files open there will get errors"
    );
    Ok(Unmounted::Detached)
}

fn attempt(dir: &Path, detach: bool) -> Result<(), String> {
    let lazy = if detach { MntFlags::MNT_DETACH } else { MntFlags::empty() };
    match umount2(dir, lazy | MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) | Err(Errno::EINVAL) => Ok(()),
        Err(Errno::EPERM) => fusermount(dir, detach),
        Err(e) => Err(e.desc().to_owned()),
    }
}

fn fusermount(dir: &Path, detach: bool) -> Result<(), String> {
    let out = Command::new("fusermount3")
        .args(if detach { &["-u", "-z"][..] } else { &["-u"][..] })
        .arg("--")
        .arg(dir)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("fusermount3: {e}"))?;
    if out.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&out.stderr).trim().to_owned())
}
