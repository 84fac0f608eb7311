//! The components of the machine that a test needs.
//!
//! If a component is missing, the test prints the reason and skips. It fails if `FLETCH_TEST_REQUIRE` (a
//! comma-separated list) names the component.

use std::path::Path;

/// A component of the machine that a test needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// `/dev/fuse` and the permission to mount.
    Fuse,
    /// The kernel's FUSE tracepoints (root, tracefs).
    Trace,
    /// `python3`.
    Python,
    /// Root, to mount file systems and to run programs as another user.
    Root,
    /// A memory cgroup (root; version 1 or 2 of cgroups).
    Cgroup,
    /// The built Python package, and an interpreter with torch and torchvision.
    Torch,
    /// A directory of real images.
    Images,
    /// `prometheus` and `curl`.
    Prometheus,
    /// `chromium`, `node` and playwright-core.
    Chromium,
    /// `nginx`, which serves plain files over HTTP.
    Http,
    /// `etcd`, which coordinates servers.
    Etcd,
    /// A kernel that sends unanswered FUSE requests again (Linux 6.9).
    Resend,
    /// `strace`, and the permission to attach it to a child process.
    Strace,
    /// The permission to make a mount namespace and a device in it (root), and `fusermount3`.
    Namespace,
}

impl Need {
    fn word(self) -> &'static str {
        match self {
            Need::Fuse => "fuse",
            Need::Trace => "trace",
            Need::Python => "python",
            Need::Root => "root",
            Need::Cgroup => "cgroup",
            Need::Torch => "torch",
            Need::Images => "images",
            Need::Prometheus => "prometheus",
            Need::Chromium => "chromium",
            Need::Http => "http",
            Need::Etcd => "etcd",
            Need::Resend => "resend",
            Need::Strace => "strace",
            Need::Namespace => "namespace",
        }
    }

    fn missing(self) -> Option<String> {
        let root = nix::unistd::geteuid().is_root();
        match self {
            Need::Fuse if !Path::new("/dev/fuse").exists() => Some("no /dev/fuse".into()),
            Need::Fuse if !root && !on_path("fusermount3") => Some("not root, and no fusermount3".into()),
            Need::Trace if !root => Some("tracepoints need root".into()),
            Need::Trace => fletch_testkit::fuse_trace::tracefs().err(),
            Need::Python if !on_path("python3") => Some("no python3".into()),
            Need::Root | Need::Cgroup if !root => Some("not root".into()),
            Need::Root if !on_path("setpriv") => Some("no setpriv (util-linux)".into()),
            Need::Cgroup => crate::cgroup::Memory::new(64 << 20).err(),
            Need::Images => crate::python::images().err(),
            Need::Prometheus if !on_path("prometheus") => Some("no prometheus".into()),
            Need::Chromium if !on_path("chromium") => Some("no chromium".into()),
            Need::Chromium if !on_path("node") => Some("no node".into()),
            Need::Chromium if !crate::browser::modules().join("playwright-core").is_dir() => {
                Some("no playwright-core: run tests/install.sh".into())
            }
            Need::Http if !on_path("nginx") && !Path::new("/usr/sbin/nginx").is_file() => {
                Some("no nginx".into())
            }
            Need::Etcd if !on_path("etcd") => Some("no etcd".into()),
            Need::Resend if kernel() < (6, 9) => Some("Linux is older than 6.9".into()),
            Need::Strace if !on_path("strace") => Some("no strace".into()),
            Need::Strace if !root => Some("attaching to another process needs root".into()),
            Need::Namespace if !root => Some("not root".into()),
            Need::Namespace if !on_path("fusermount3") => Some("no fusermount3".into()),
            Need::Namespace => crate::namespace::check().err(),
            Need::Torch => crate::python::interpreter().and(crate::python::wheel()).err(),
            _ => None,
        }
    }
}

/// Returns the version of the running kernel.
fn kernel() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn on_path(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|p| std::env::split_paths(&p).any(|d| d.join(program).is_file()))
}

/// Whether the machine has these components. Prints which one is missing.
///
/// # Panics
/// If a component is missing that `FLETCH_TEST_REQUIRE` names.
#[must_use]
pub fn have(needs: &[Need]) -> bool {
    let required = std::env::var("FLETCH_TEST_REQUIRE").unwrap_or_default();
    for need in needs {
        if let Some(why) = need.missing() {
            assert!(!required.split(',').any(|w| w == need.word()), "required: {}: {why}", need.word());
            eprintln!("SKIPPED: needs {}: {why}", need.word());
            return false;
        }
    }
    true
}
