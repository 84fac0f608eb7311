//! Whether this user can mount, and whether other users can read the mounts.

use super::finding::Finding;
use super::maybe;
use nix::errno::Errno;
use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

pub const DEVICE: &str = "fuse-device";
pub const FUSERMOUNT: &str = "fusermount3";
pub const ALLOW_OTHER: &str = "user-allow-other";

const LOAD_FUSE: &str = "load the module as root: modprobe fuse; start a container with --device /dev/fuse \
    --cap-add SYS_ADMIN; or read without a mount: docs/howto/without-fuse.md";

/// The state of `/dev/fuse`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Device {
    Usable,
    Absent,
    /// Something else has its name.
    Foreign,
    Refused(Errno),
}

#[derive(Debug, Clone)]
pub struct Facts {
    device: Device,
    has_fusermount: bool,
    is_root: bool,
    /// Whether `/etc/fuse.conf` lets users other than root mount for everybody.
    user_allow_other: bool,
    /// Whether the caller wants that.
    allow_other: bool,
}

impl Facts {
    pub fn gather(root: &Path, allow_other: bool) -> Self {
        let conf = fs::read_to_string(root.join("etc/fuse.conf")).unwrap_or_default();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let program = |dir: PathBuf| below(root, &dir).join("fusermount3").is_file();
        Facts {
            device: device(&root.join("dev/fuse")),
            has_fusermount: std::env::split_paths(&path).any(program),
            is_root: nix::unistd::geteuid().is_root(),
            user_allow_other: conf.lines().any(|l| l.trim() == "user_allow_other"),
            allow_other,
        }
    }

    pub fn findings(&self) -> Vec<Finding> {
        [self.device_finding(), self.fusermount_finding(), self.allow_other_finding()]
            .into_iter()
            .flat_map(maybe)
            .collect()
    }

    fn device_finding(&self) -> Option<Finding> {
        let (what, fix) = match self.device {
            Device::Usable => return None,
            Device::Absent => ("/dev/fuse does not exist, so nothing can be mounted".to_owned(), LOAD_FUSE),
            Device::Foreign => (
                "/dev/fuse is not a character device, so nothing can be mounted".to_owned(),
                "make it anew as root: rm /dev/fuse && mknod -m 666 /dev/fuse c 10 229",
            ),
            Device::Refused(Errno::ENODEV | Errno::ENXIO) => {
                ("the kernel has no FUSE: /dev/fuse gives ENODEV".to_owned(), LOAD_FUSE)
            }
            Device::Refused(Errno::EACCES) => (
                "your user may not open /dev/fuse".to_owned(),
                "let every user mount, as root: chmod 666 /dev/fuse",
            ),
            Device::Refused(e) => (
                format!("/dev/fuse cannot be opened: {}", e.desc()),
                "start the container with --device /dev/fuse --cap-add SYS_ADMIN",
            ),
        };
        Some(Finding::error(DEVICE, what, fix))
    }

    fn fusermount_finding(&self) -> Option<Finding> {
        (!self.is_root && !self.has_fusermount).then(|| {
            Finding::error(
                FUSERMOUNT,
                "fusermount3 is not in PATH: without it only root can mount",
                "install it as root: apt-get install fuse3",
            )
        })
    }

    fn allow_other_finding(&self) -> Option<Finding> {
        if self.is_root || self.user_allow_other {
            return None;
        }
        let what = "only your user can read your mounts: /etc/fuse.conf has no line user_allow_other";
        let fix = "as root: echo user_allow_other >> /etc/fuse.conf; then mount with --allow-other";
        let finding = if self.allow_other { Finding::error } else { Finding::note };
        Some(finding(ALLOW_OTHER, what.to_owned(), fix.to_owned()))
    }
}

/// Returns why this user cannot mount anything here.
pub fn cannot_mount() -> Option<Finding> {
    let facts = Facts::gather(Path::new("/"), false);
    facts.device_finding().or_else(|| facts.fusermount_finding())
}

fn device(path: &Path) -> Device {
    match fs::metadata(path) {
        Err(_) => Device::Absent,
        Ok(meta) if !meta.file_type().is_char_device() => Device::Foreign,
        Ok(_) => match fs::File::options().read(true).write(true).open(path) {
            Ok(_) => Device::Usable,
            Err(e) => Device::Refused(Errno::from_raw(e.raw_os_error().unwrap_or(0))),
        },
    }
}

/// Returns an absolute path below `root`.
pub fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy() -> Facts {
        Facts {
            device: Device::Usable,
            has_fusermount: true,
            is_root: false,
            user_allow_other: true,
            allow_other: true,
        }
    }

    /// Returns the check and the severity of the only finding.
    fn only(facts: &Facts) -> Finding {
        let found = facts.findings();
        assert_eq!(found.len(), 1, "{found:?}");
        found.into_iter().next().expect("one")
    }

    #[test]
    fn each_fault_has_its_finding() {
        assert_eq!(healthy().findings(), []);
        let root = Facts { is_root: true, has_fusermount: false, user_allow_other: false, ..healthy() };
        assert_eq!(root.findings(), [], "root needs neither");
        for (state, says) in [
            (Device::Absent, "modprobe fuse"),
            (Device::Foreign, "mknod"),
            (Device::Refused(Errno::EACCES), "chmod 666"),
            (Device::Refused(Errno::ENODEV), "modprobe fuse"),
            (Device::Refused(Errno::EPERM), "--device /dev/fuse"),
        ] {
            let found = only(&Facts { device: state, ..healthy() });
            assert!(found.check == DEVICE && found.fix.contains(says), "{found:?}");
        }
        assert_eq!(only(&Facts { has_fusermount: false, ..healthy() }).check, FUSERMOUNT);
        let other = Facts { user_allow_other: false, ..healthy() };
        assert_eq!(only(&other).severity, super::super::finding::Severity::Error);
        let unasked = Facts { allow_other: false, ..other };
        assert_eq!(only(&unasked).severity, super::super::finding::Severity::Note);
    }

    #[test]
    fn facts_come_from_the_given_root() {
        let root = tempfile::tempdir().expect("tempdir");
        let facts = Facts::gather(root.path(), true);
        assert!(facts.device == Device::Absent && !facts.user_allow_other && !facts.has_fusermount);
        fs::create_dir_all(root.path().join("dev")).expect("mkdir");
        fs::create_dir_all(root.path().join("etc")).expect("mkdir");
        fs::write(root.path().join("dev/fuse"), "").expect("write");
        fs::write(root.path().join("etc/fuse.conf"), "# user_allow_other\n").expect("write");
        let facts = Facts::gather(root.path(), true);
        assert!(facts.device == Device::Foreign && !facts.user_allow_other, "a comment is no setting");
        fs::write(root.path().join("etc/fuse.conf"), "user_allow_other\n").expect("write");
        assert!(Facts::gather(root.path(), true).user_allow_other, "the fix");
    }
}
