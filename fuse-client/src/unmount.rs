//! Unmounts within a bound, even if programs still use the mount.

use crate::fusermount;
use crate::keeper::Keeper;
use crate::kernel_mount::umount;
use fletch_host::mounts;
use std::{
    io,
    path::Path,
    time::{Duration, Instant},
};

/// How long the unmount waits for programs that still use the mount.
const GRACE: Duration = Duration::from_secs(3);
const RETRY_EVERY: Duration = Duration::from_millis(100);

/// How the unmount ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmounted {
    /// No program used the mount.
    Clean,
    /// The mount is still there: a keeper has it for the next process.
    Kept,
    /// Programs still use the mount. It is out of the tree, and its open files fail when this process ends.
    Detached,
}

/// Unmounts `dir` if `device` is still mounted there. Detaches it after [`GRACE`] if it is in use. Blocks.
///
/// # Errors
/// The mount cannot even be detached.
pub fn unmount(dir: &Path, device: &str) -> anyhow::Result<Unmounted> {
    let until = Instant::now() + GRACE;
    let mut logged = false;
    loop {
        if mounts::of_device(device)?.is_none() {
            return Ok(Unmounted::Clean);
        }
        match attempt(dir, false) {
            Ok(()) => return Ok(Unmounted::Clean),
            Err(why) if Instant::now() >= until => {
                tracing::debug!(why, "the mount is still in use: detaching it");
                break;
            }
            Err(why) => {
                if !logged {
                    let dir = dir.display();
                    tracing::info!(%dir, grace = ?GRACE, "the mount is in use ({why}): waiting");
                    logged = true;
                }
                std::thread::sleep(RETRY_EVERY);
            }
        }
    }
    attempt(dir, true).map_err(|why| anyhow::anyhow!("cannot unmount {}: {why}", dir.display()))?;
    tracing::warn!(
        dir = %dir.display(),
        "the mount is still in use and was detached: programs with open files there get errors"
    );
    Ok(Unmounted::Detached)
}

/// Detaches the mount at `dir` from the tree, also if it is in use.
///
/// # Errors
/// Why the kernel and `fusermount3` refuse.
pub fn detach(dir: &Path) -> Result<(), String> {
    attempt(dir, true)
}

/// Unmounts `dir` once, or detaches it. A process without privileges has its keeper do it, if that is one of
/// many processes.
///
/// # Errors
/// The error of the kernel.
pub(crate) fn once(dir: &Path, detach: bool) -> io::Result<()> {
    match (umount(dir, detach), Keeper::of_many()) {
        (Err(e), Some(keeper)) if e.raw_os_error() == Some(libc::EPERM) => keeper.unmount(dir, detach),
        (unmounted, _) => unmounted,
    }
}

pub(crate) fn attempt(dir: &Path, detach: bool) -> Result<(), String> {
    match once(dir, detach) {
        Ok(()) => Ok(()),
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => fusermount::unmount(dir, detach),
        Err(e) => Err(e.to_string()),
    }
}
