//! Reads the memory limit of a process's cgroup, for both versions of cgroups.

use std::path::Path;

/// A value from here on means "no limit" (version 1 writes a huge number).
const UNLIMITED_FROM: u64 = 1 << 60;

/// Returns the smallest memory limit of a process, in bytes, or `None` if it has no limit.
///
/// `membership` is the text of its `/proc/<pid>/cgroup`; `mount` is where cgroups are mounted
/// (`/sys/fs/cgroup`).
#[must_use]
pub fn memory_limit(membership: &str, mount: &Path) -> Option<u64> {
    membership.lines().filter_map(|line| of_line(line, mount)).min()
}

/// Returns the memory limit of this process, in bytes.
#[must_use]
pub fn own_memory_limit() -> Option<u64> {
    // Without /proc there are no cgroups, and so no limit.
    let membership = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    memory_limit(&membership, Path::new("/sys/fs/cgroup"))
}

fn of_line(line: &str, mount: &Path) -> Option<u64> {
    let mut fields = line.splitn(3, ':');
    let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let path = Path::new(path.trim_start_matches('/'));
    let (base, file) = if controllers.is_empty() {
        (mount.to_owned(), "memory.max")
    } else if controllers.split(',').any(|c| c == "memory") {
        (mount.join("memory"), "memory.limit_in_bytes")
    } else {
        return None;
    };
    // Every ancestor's limit holds too. In a container the path may be the host's and not
    // exist here; then the mount itself shows the container's own group.
    path.ancestors().filter_map(|p| read(&base.join(p).join(file))).min()
}

fn read(file: &Path) -> Option<u64> {
    let n = std::fs::read_to_string(file).ok()?.trim().parse().ok()?;
    (n < UNLIMITED_FROM).then_some(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("tempdir");
        for (path, text) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().expect("parent")).expect("mkdir");
            std::fs::write(path, text).expect("write");
        }
        dir
    }

    #[test]
    fn version_2_takes_the_tightest_ancestor() {
        let dir = fixture(&[
            ("kubepods/memory.max", "8589934592\n"),
            ("kubepods/pod1/memory.max", "536870912\n"),
            ("kubepods/pod1/box/memory.max", "max\n"),
        ]);
        assert_eq!(memory_limit("0::/kubepods/pod1/box\n", dir.path()), Some(512 << 20));
        assert_eq!(memory_limit("0::/\n", dir.path()), None);
    }

    #[test]
    fn version_1_ignores_its_number_for_no_limit_and_other_controllers() {
        let dir = fixture(&[
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/docker/abc/memory.limit_in_bytes", "1073741824\n"),
        ]);
        let membership =
            "12:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/x\n0::/docker/abc\n";
        assert_eq!(memory_limit(membership, dir.path()), Some(1 << 30));
        assert_eq!(memory_limit("4:memory:/\n", dir.path()), None);
    }

    #[test]
    fn a_hosts_path_inside_a_container_falls_back_to_the_mount() {
        let dir = fixture(&[("memory/memory.limit_in_bytes", "268435456\n")]);
        assert_eq!(memory_limit("4:memory:/docker/of-the-host\n", dir.path()), Some(256 << 20));
    }
}
