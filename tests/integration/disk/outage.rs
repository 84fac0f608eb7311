//! I5: harm to the cache directory, under load or before a start, costs only speed.
//!
//! The server uses the disk again when it works again, without a restart.

use crate::common::{Over, appended, becomes, fetched, is, series, settle, whole};
use fletch_tests::bins::run;
use fletch_tests::fixture::Site;
use fletch_tests::readers::{Data, Got, Readers};
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

const NOBODY: u32 = 65_534;
const FLAGS: [&str; 6] = ["--memory", "64MiB", "--cache-size", "256MiB", "--cache-free-floor", "0"];

/// Reads the dataset again and again while `harm` runs. No read may fail or return a wrong byte.
fn under_load(site: &Site, root: &str, data: &Data, harm: impl FnOnce()) {
    let (readers, done) = (Readers::new(), AtomicBool::new(false));
    std::thread::scope(|s| {
        let load = s.spawn(|| {
            let (mut rounds, mut refused) = (0, 0);
            while rounds == 0 || !done.load(Relaxed) {
                refused += readers.read(site, root, &data.files, 8).failed;
                rounds += 1;
            }
            refused
        });
        let over = Over(&done);
        harm();
        drop(over);
        assert_eq!(load.join().expect("readers"), 0, "a read was refused\n{}", site.log());
    });
}

/// A mounted tmpfs, which is unmounted when dropped.
struct Mount(PathBuf);

impl Mount {
    fn tmpfs(at: &Path, size: &str) -> Self {
        fs::create_dir_all(at).expect("mkdir");
        let options = format!("size={size},mode=755");
        mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::empty(), Some(options.as_str())).expect("tmpfs");
        Mount(at.to_owned())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Err(e) = umount2(&self.0, MntFlags::MNT_DETACH) {
            eprintln!("{} stays mounted: {e}", self.0.display());
        }
    }
}

/// Renames a directory and deletes it, because the server could create files in it during the deletion.
fn delete(dir: &Path) {
    let gone = dir.with_extension("gone");
    fs::rename(dir, &gone).expect("rename");
    fs::remove_dir_all(gone).expect("remove");
}

#[test]
fn a_deleted_directory_is_begun_anew() {
    let data = Data::new(41, 700, 110_000);
    let mut site = Site::start(&FLAGS);
    let root = site.publish("gone", &data.dir);
    under_load(&site, &root, &data, || {
        until("something is kept", Duration::from_secs(20), || series(&site, "fletch_disk_chunks") > 50);
        delete(&site.cache_dir());
        until("noticed", Duration::from_secs(20), || {
            series(&site, "fletch_disk_turned_off_total") == 1 && is(&site, "on")
        });
    });
    // What memory has is not kept again; the rest is.
    let readers = Readers::new();
    assert_eq!(readers.read(&site, &root, &data.files, 8), whole(&data));
    appended(&site);
    assert!(series(&site, "fletch_disk_chunks") > 0 && site.cache_dir().join("slabs").is_dir());
    site.end();
    fs::remove_dir_all(site.cache_dir()).expect("remove");
    site.restart();
    becomes(&site, "on");
    assert_eq!(readers.read(&site, &root, &data.files, 8), whole(&data));
    assert_eq!(fetched(&site), data.bytes());
}

#[test]
fn a_directory_nobody_may_enter_is_passed_by_until_it_is_open_again() {
    if !have(&[Need::Root]) {
        return;
    }
    let mut site = Site::start_as(NOBODY, &FLAGS);
    let tree = site.place("data");
    let data = Data::within(&tree, 42, 400, 110_000);
    let to = site.place("tables-denied");
    let root = fletch_tests::fixture::index(&tree, &to, &[]);
    site.register("denied", &tree.display().to_string(), &to.display().to_string());
    let cache = site.cache_dir();
    let mode = |m: u32| fs::set_permissions(&cache, fs::Permissions::from_mode(m)).expect("chmod");
    let readers = Readers::new();
    assert_eq!(settle(&site, &readers, &root, &data.files, 8), whole(&data));
    under_load(&site, &root, &data, || {
        mode(0o000);
        becomes(&site, "denied");
    });
    mode(0o700);
    becomes(&site, "on");
    assert_eq!(series(&site, "fletch_disk_chunks"), 400, "what was kept is there again");
    site.end();
    // The same at a start.
    mode(0o000);
    site.restart();
    becomes(&site, "absent");
    assert_eq!(readers.read(&site, &root, &data.files, 8), whole(&data));
    mode(0o700);
    becomes(&site, "on");
    let before = fetched(&site);
    assert_eq!(readers.read(&site, &root, &data.files, 8), whole(&data));
    assert_eq!(fetched(&site), before, "warm again, without another start");
    site.end();
}

#[test]
fn a_full_disk_is_passed_by_until_there_is_room() {
    if !have(&[Need::Root]) {
        return;
    }
    let data = Data::new(43, 500, 110_000);
    let mut site = Site::start(&FLAGS);
    let root = site.publish("full", &data.dir);
    site.end();
    // Smaller than the limit: the file system is full first.
    let cache = site.cache_dir();
    fs::remove_dir_all(&cache).expect("remove");
    let disk = Mount::tmpfs(&cache, "40m");
    site.restart();
    under_load(&site, &root, &data, || becomes(&site, "full"));
    let kept = series(&site, "fletch_disk_chunks");
    assert!(kept > 50, "{kept} chunks are kept");
    let readers = Readers::new();
    let before = fetched(&site);
    assert_eq!(readers.read(&site, &root, &data.files, 8), whole(&data));
    let saved = data.bytes() - (fetched(&site) - before);
    assert!(saved >= kept * data.len, "what is there is still read: {saved} bytes saved by {kept} chunks");
    // Room, and it goes on.
    let grow = "size=200m";
    mount(None::<&str>, &cache, None::<&str>, MsFlags::MS_REMOUNT, Some(grow)).expect("remount");
    becomes(&site, "on");
    assert_eq!(readers.read(&site, &root, &data.files, 8), whole(&data));
    appended(&site);
    assert!(series(&site, "fletch_disk_chunks") > kept);
    // Somebody else fills it, and the next start finds it so.
    site.end();
    let filler = cache.join("somebody-elses");
    let filled = Command::new("dd")
        .arg("if=/dev/zero")
        .arg(format!("of={}", filler.display()))
        .args(["bs=1M"])
        .output();
    assert!(!filled.expect("dd").status.success(), "dd did not fill it");
    site.restart();
    assert_eq!(readers.read(&site, &root, &data.files, 8), whole(&data));
    fs::remove_file(&filler).expect("remove");
    becomes(&site, "on");
    site.end();
    drop(disk);
}

#[test]
fn a_disk_that_becomes_read_only_serves_what_it_has() {
    if !have(&[Need::Root]) {
        return;
    }
    let data = Data::new(44, 300, 110_000);
    let mut site = Site::start(&FLAGS);
    let root = site.publish("ro", &data.dir);
    site.end();
    let cache = site.cache_dir();
    fs::remove_dir_all(&cache).expect("remove");
    // A file system that meets an error and protects itself.
    let image = site.place("image").join("ext4");
    fs::File::create(&image).and_then(|f| f.set_len(300 << 20)).expect("image");
    run(Command::new("mkfs.ext4").arg("-q").arg(&image));
    fs::create_dir_all(&cache).expect("mkdir");
    let mounted = || {
        run(Command::new("mount").args(["-o", "loop,errors=remount-ro"]).arg(&image).arg(&cache));
        Mount(cache.clone())
    };
    let disk = mounted();
    site.restart();
    let readers = Readers::new();
    assert_eq!(readers.read(&site, &root, &data.files[..150], 8).failed, 0);
    appended(&site);
    let kept = series(&site, "fletch_disk_chunks");
    // What the kernel has not written yet would be lost with the journal.
    run(Command::new("sync").arg("-f").arg(&cache));
    under_load(&site, &root, &data, || {
        let device = run(Command::new("findmnt").args(["-no", "SOURCE"]).arg(&cache)).stdout;
        let device = String::from_utf8_lossy(&device).trim().replace("/dev/", "");
        fs::write(format!("/sys/fs/ext4/{device}/trigger_fs_error"), "test").expect("an error");
        becomes(&site, "read_only");
    });
    let before = fetched(&site);
    assert_eq!(readers.read(&site, &root, &data.files, 8), whole(&data));
    let saved = data.bytes() - (fetched(&site) - before);
    assert!(saved >= kept * data.len, "{saved} bytes saved by at least {kept} chunks");
    site.end();
    // A start on it, read-only as it is, and then repaired.
    site.restart();
    assert!(!is(&site, "on"));
    assert_eq!(readers.read(&site, &root, &data.files, 8), whole(&data));
    site.end();
    drop(disk);
    let checked = Command::new("e2fsck").args(["-fy"]).arg(&image).output().expect("e2fsck");
    assert!(checked.status.code().is_some_and(|c| c <= 1), "{checked:?}");
    let disk = mounted();
    site.restart();
    becomes(&site, "on");
    assert_eq!(readers.read(&site, &root, &data.files, 8), Got { bytes: data.bytes(), failed: 0 });
    assert!(fetched(&site) <= data.bytes() - kept * data.len / 2, "what the file system kept is warm");
    site.end();
    drop(disk);
}
