//! The time after which a kernel ends a mount that left a request without a reply (since Linux 6.15).
//!
//! A mount that waits for its next process would end then, and its readers would get ENOTCONN for good.

use anyhow::{Result, bail};
use std::{fs, path::Path, time::Duration};

/// Where the kernel has its settings for FUSE.
pub(crate) const SETTINGS: &str = "/proc/sys/fs/fuse";
/// A reply comes at most so long after `--io-timeout`.
const LATE: Duration = Duration::from_secs(10);

/// Checks that the kernel waits for longer than a read may take.
///
/// # Errors
/// It does not. The message names the setting.
pub(crate) fn check(settings: &Path, io_timeout: Duration) -> Result<()> {
    let needed = io_timeout + LATE;
    for name in ["default_request_timeout", "max_request_timeout"] {
        // An earlier kernel has no such setting, and waits for ever. So does one with 0.
        let Ok(text) = fs::read_to_string(settings.join(name)) else { continue };
        let limit = text.trim().parse().map_or(Duration::ZERO, Duration::from_secs);
        if !limit.is_zero() && limit < needed {
            bail!(
                "the kernel ends a mount whose request waits for {limit:?}, and --io-timeout is \
                 {io_timeout:?}: set the sysctl fs.fuse.{name} to 0 or to at least {}, or give a shorter \
                 --io-timeout",
                needed.as_secs_f64().ceil()
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_ends_mounts_too_early_is_named() {
        let dir = tempfile::tempdir().expect("tempdir");
        let checked = |seconds| check(dir.path(), Duration::from_secs(seconds)).map_err(|e| e.to_string());
        assert_eq!(checked(3600), Ok(()), "an earlier kernel");
        fs::write(dir.path().join("default_request_timeout"), "0\n").expect("write");
        assert_eq!(checked(3600), Ok(()));
        fs::write(dir.path().join("max_request_timeout"), "40\n").expect("write");
        assert_eq!(checked(30), Ok(()));
        let error = checked(31).expect_err("the kernel does not wait so long");
        assert!(error.contains("fs.fuse.max_request_timeout") && error.contains("at least 41"), "{error}");
    }
}
