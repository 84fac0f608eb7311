//! I5, with real mounts: a cache whose file system is not mounted is not begun anew in its place.

use super::*;
use crate::{DiskOwner, disk::MountMemory, maintenance};
use std::{path::PathBuf, process::Command};

/// A file system that can be mounted at the directory of a cache, and taken away again.
struct Disk {
    dir: tempfile::TempDir,
}

fn run(command: &str, args: &[&str]) -> Result<(), String> {
    let out = Command::new(command).args(args).output().map_err(|e| format!("{command}: {e}"))?;
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    if out.status.success() { Ok(()) } else { Err(format!("{command} {args:?}: {said}")) }
}

impl Disk {
    /// Returns `None`, and prints why, where this process may not mount.
    fn new() -> Option<Self> {
        let dir = tempfile::tempdir().expect("tempdir");
        for name in ["held", "mnt"] {
            std::fs::create_dir(dir.path().join(name)).expect("mkdir");
        }
        let disk = Disk { dir };
        if let Err(why) = run("mount", &["-t", "tmpfs", "-o", "size=64m", "tmpfs", &disk.path("held")]) {
            let required = std::env::var("FLETCH_TEST_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|w| w == "root"), "required: root: {why}");
            eprintln!("SKIPPED: needs root: {why}");
            return None;
        }
        disk.mount();
        Some(disk)
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().expect("utf-8").to_owned()
    }

    fn mount(&self) {
        run("mount", &["--bind", &self.path("held"), &self.path("mnt")]).expect("mounts");
    }

    /// Unmounts, even while a tier has files open there.
    fn unmount(&self) {
        run("umount", &["--lazy", &self.path("mnt")]).expect("unmounts");
    }

    fn is_empty(&self) -> bool {
        std::fs::read_dir(self.path("mnt")).expect("the directory").next().is_none()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        for name in ["mnt", "held"] {
            // Not mounted is fine, too.
            drop(run("umount", &["--lazy", &self.path(name)]));
        }
    }
}

struct Owner(DiskConfig);

impl Owner {
    fn of(disk: &Disk) -> Self {
        let dir = PathBuf::from(disk.path("mnt/deep/cache"));
        let mount_memory = Some(MountMemory::new(&dir, &disk.dir.path().join("records")));
        Owner(DiskConfig { size_max: 32 << 20, mount_memory, ..config(&dir, Policy::Fletch) })
    }
}

impl DiskOwner for Owner {
    fn config(&self) -> Result<DiskConfig, String> {
        Ok(self.0.clone())
    }
}

fn keep(disk: &DiskTier, n: u8) -> StoreKey {
    let chunk = Verified::of(vec![n; 50_000].into());
    let key = StoreKey { domain: Domain::default_domain(), hash: chunk.hash() };
    let engine = disk.engine().expect("open");
    assert_eq!(engine.put(&key, DatasetId(1), &chunk).expect("kept"), crate::disk::Stored::Yes);
    key
}

fn absent(disk: &DiskTier) -> String {
    match disk.state() {
        DiskState::Absent(why) => why,
        open => panic!("{open:?}"),
    }
}

#[test]
fn i5_a_start_without_the_file_system_waits_for_it_and_creates_nothing_in_its_place() {
    let Some(disk) = Disk::new() else { return };
    let (owner, tier) = (Owner::of(&disk), DiskTier::new(1 << 20));
    maintenance::open(&owner, &tier).expect("opens");
    let key = keep(&tier, 1);
    tier.detach("the server stops".into());
    disk.unmount();
    for _ in 0..3 {
        assert!(maintenance::open(&owner, &tier).is_err());
        assert!(absent(&tier).contains("mount it again"), "{}", absent(&tier));
        assert!(disk.is_empty(), "nothing on the file system below");
    }
    disk.mount();
    maintenance::open(&owner, &tier).expect("opens");
    assert!(tier.has(&key, 50_000), "with its chunks");
    tier.detach("end".into());
    // Emptied in place, the cache is begun anew at once.
    std::fs::remove_dir_all(&owner.0.dir).expect("removed");
    maintenance::open(&owner, &tier).expect("opens");
    assert!(!tier.has(&key, 50_000));
    keep(&tier, 2);
    tier.detach("end".into());
    // Another disk at the same mount point is meant for the cache.
    disk.unmount();
    run("mount", &["-t", "tmpfs", "-o", "size=64m", "tmpfs", &disk.path("mnt")]).expect("mounts");
    maintenance::open(&owner, &tier).expect("opens");
    keep(&tier, 3);
    tier.detach("end".into());
    disk.unmount();
    // The operator gives the disk up, as the error says.
    assert!(maintenance::open(&owner, &tier).is_err());
    std::fs::remove_dir_all(disk.dir.path().join("records")).expect("removed");
    maintenance::open(&owner, &tier).expect("opens on the file system below");
    keep(&tier, 4);
    tier.detach("end".into());
}

#[test]
fn i5_a_file_system_that_is_unmounted_while_the_tier_is_open_makes_it_absent_until_it_is_back() {
    let Some(disk) = Disk::new() else { return };
    let (owner, tier) = (Owner::of(&disk), DiskTier::new(1 << 20));
    maintenance::open(&owner, &tier).expect("opens");
    let key = keep(&tier, 1);
    disk.unmount();
    let mut now = SystemTime::now();
    for _ in 0..3 {
        now += Duration::from_secs(5);
        tier.probe(now);
        assert!(absent(&tier).contains("is not mounted now"), "{}", absent(&tier));
        assert!(disk.is_empty(), "nothing on the file system below");
        assert!(!tier.has(&key, 50_000), "reads skip it");
        assert!(maintenance::open(&owner, &tier).is_err());
    }
    disk.mount();
    maintenance::open(&owner, &tier).expect("opens");
    assert!(tier.has(&key, 50_000), "with its chunks");
    tier.detach("end".into());
}
