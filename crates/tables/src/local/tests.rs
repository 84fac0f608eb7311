//! The bounds of a directory of local tables, and the files that it does not believe.

use super::*;
use crate::leaf::Buffer;
use std::os::unix::fs::{PermissionsExt, symlink};

fn of(version: u8, part: usize) -> Identity {
    let hash = |n| Hash([n; 32]);
    let version = version_hash(hash(0), Root(hash(version)), LayoutId(hash(9)));
    Identity { version, part, table: LocalTable::Entries }
}

fn leaves(len: usize) -> Vec<Vec<u8>> {
    (0..3u8).map(|i| vec![i; len]).collect()
}

fn write(local: &LocalTables, of: &Identity, len: usize) -> bool {
    let bytes = leaves(len);
    local.write(of, bytes.iter().map(|b| NewLeaf { first: &b[..1], bytes: b }))
}

fn read(local: &LocalTables, of: &Identity) -> Option<Vec<Vec<u8>>> {
    let directory = local.directory(of)?;
    let leaf = |b: Buffer| Some(b.bytes().to_vec());
    local.leaves(of, &directory, 0..directory.len(), leaf)
}

#[test]
fn leaves_are_read_ahead_if_they_are_short() {
    let dir = tempfile::tempdir().expect("tempdir");
    let local = LocalTables::open(dir.path(), 1 << 20, Box::new(|| Ok(()))).expect("writable");
    for (part, len, ends) in [(0, 5000, [1, 2, 3, 3]), (1, 100_000, [1, 2, 2, 2]), (2, 200_000, [1; 4])] {
        assert!(write(&local, &of(1, part), len));
        let directory = local.directory(&of(1, part)).expect("there");
        assert_eq!([0, 1, 2, 7].map(|ahead| directory.run(0, ahead).end), ends, "of {len} bytes");
        assert_eq!([directory.run(2, 7), directory.run(3, 7)], [2..3, 3..4], "the last, and none");
        let none = local.leaves(&of(1, part), &directory, 3..4, |bytes| Some(bytes.bytes().len()));
        assert_eq!(none, None);
    }
}

#[test]
fn a_part_reads_back_and_no_other_part_does() {
    let dir = tempfile::tempdir().expect("tempdir");
    let local = LocalTables::open(dir.path(), 1 << 20, Box::new(|| Ok(()))).expect("writable");
    assert!(read(&local, &of(1, 0)).is_none(), "nothing is there yet");
    assert!(write(&local, &of(1, 0), 100));
    assert_eq!(read(&local, &of(1, 0)), Some(leaves(100)));
    let directory = local.directory(&of(1, 0)).expect("there");
    assert_eq!((0..3).map(|i| directory.first(i)).collect::<Vec<_>>(), [[0], [1], [2]]);
    // A file under another name is the file of another part.
    std::fs::copy(local.path(&of(1, 0)), local.path(&of(1, 1))).expect("copied");
    assert!(read(&local, &of(1, 1)).is_none());
    assert_eq!(local.stats().damaged, 1);
    assert!(!local.path(&of(1, 1)).exists(), "it is removed");
    // Another process of this user finds the file.
    let other = LocalTables::open(dir.path(), 1 << 20, Box::new(|| Ok(()))).expect("writable");
    assert_eq!(read(&other, &of(1, 0)), Some(leaves(100)));
    assert_eq!(other.stats().bytes, std::fs::metadata(local.path(&of(1, 0))).expect("there").len());
}

#[test]
fn every_flipped_bit_and_every_cut_is_noticed() {
    let dir = tempfile::tempdir().expect("tempdir");
    let local = LocalTables::open(dir.path(), 1 << 20, Box::new(|| Ok(()))).expect("writable");
    assert!(write(&local, &of(1, 0), 20));
    let (path, whole) = (local.path(&of(1, 0)), std::fs::read(local.path(&of(1, 0))).expect("read"));
    for at in 0..whole.len() {
        let mut flipped = whole.clone();
        flipped[at] ^= 1 << (at % 8);
        std::fs::write(&path, &flipped).expect("written");
        assert_eq!(read(&local, &of(1, 0)), None, "a flipped bit of byte {at}");
        std::fs::write(&path, &whole[..at]).expect("written");
        assert_eq!(read(&local, &of(1, 0)), None, "cut at {at}");
    }
    assert_eq!(local.stats().damaged, 2 * whole.len() as u64);
}

#[test]
fn a_link_and_a_file_that_others_may_write_are_not_believed() {
    let dir = tempfile::tempdir().expect("tempdir");
    let local = LocalTables::open(dir.path(), 1 << 20, Box::new(|| Ok(()))).expect("writable");
    assert!(write(&local, &of(1, 0), 20));
    let (path, elsewhere) = (local.path(&of(1, 0)), dir.path().join("elsewhere"));
    std::fs::rename(&path, &elsewhere).expect("moved");
    symlink(&elsewhere, &path).expect("linked");
    assert_eq!(read(&local, &of(1, 0)), None);
    assert!(!path.is_symlink() && elsewhere.exists(), "the link is gone, and what it led to is not");
    std::fs::rename(&elsewhere, &path).expect("moved back");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).expect("mode");
    assert_eq!(read(&local, &of(1, 0)), None);
    assert_eq!(local.stats().damaged, 2);
}

#[test]
fn a_directory_that_others_may_write_to_is_refused() {
    let dir = tempfile::tempdir().expect("tempdir");
    let open = dir.path().join("open");
    std::fs::create_dir(&open).expect("mkdir");
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).expect("mode");
    let told = LocalTables::open(&open, 1 << 20, Box::new(|| Ok(())))
        .expect_err("others may write there")
        .to_string();
    assert!(told.contains("only this user may write to"), "{told}");
}

#[test]
fn the_version_that_was_opened_the_longest_ago_goes_first() {
    let dir = tempfile::tempdir().expect("tempdir");
    let local = LocalTables::open(dir.path(), 20_000, Box::new(|| Ok(()))).expect("writable");
    let open = |version: u8, seconds: u64| {
        let folder = File::open(local.folder(of(version, 0).version)).expect("there");
        folder.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).expect("set");
    };
    for version in 1..=3 {
        assert!(write(&local, &of(version, 0), 2000));
    }
    open(1, 3);
    open(2, 1);
    open(3, 2);
    assert!(write(&local, &of(4, 0), 2000), "it takes the place of version 2");
    let there: Vec<u8> = (1..=4).filter(|v| read(&local, &of(*v, 0)).is_some()).collect();
    assert_eq!(there, [1, 3, 4]);
    assert!(local.stats().bytes <= 20_000);
    // A version that is larger than the limit stays in memory, and the file that is there stays readable.
    assert!(!write(&local, &of(4, 1), 10_000));
    assert_eq!((local.stats().refused, local.stats().damaged), (1, 0));
    assert_eq!(read(&local, &of(4, 0)), Some(leaves(2000)));
}

#[test]
fn nothing_is_written_where_the_file_system_is_not_mounted() {
    use std::sync::atomic::AtomicBool;
    let dir = tempfile::tempdir().expect("tempdir");
    let (at, mounted) = (dir.path().join("cache/tables"), Arc::new(AtomicBool::new(false)));
    let is_mounted = Arc::clone(&mounted);
    let check = move || match is_mounted.load(Relaxed) {
        true => Ok(()),
        false => Err(io::Error::other("unmounted")),
    };
    let local = LocalTables::open(&at, 1 << 20, Box::new(check)).expect("it may come");
    assert!(!write(&local, &of(1, 0), 20) && read(&local, &of(1, 0)).is_none());
    assert!(!dir.path().join("cache").exists());
    mounted.store(true, Relaxed);
    assert!(write(&local, &of(1, 0), 20) && read(&local, &of(1, 0)).is_some());
    assert_eq!((local.stats().refused, local.stats().written), (1, 1));
}

#[test]
fn what_a_dead_process_left_is_removed() {
    let dir = tempfile::tempdir().expect("tempdir");
    let local = LocalTables::open(dir.path(), 1 << 20, Box::new(|| Ok(()))).expect("writable");
    assert!(write(&local, &of(1, 0), 20));
    let folder = local.path(&of(1, 0)).parent().expect("folder").to_owned();
    for (name, age) in [("old", 2 * UNFINISHED_FOR), ("new", Duration::ZERO)] {
        let file = File::create(folder.join(format!("{UNFINISHED}{name}"))).expect("created");
        file.set_modified(SystemTime::now() - age).expect("set");
    }
    LocalTables::open(dir.path(), 1 << 20, Box::new(|| Ok(()))).expect("writable");
    let left = |name: &str| folder.join(format!("{UNFINISHED}{name}")).exists();
    assert!(!left("old") && left("new"));
}
