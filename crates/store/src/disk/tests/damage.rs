//! I1 and I5: whatever happens to the files, speed is all that is lost.

use super::*;
use rand::Rng;

fn filled(dir: &Path, size: u64, n: u64, len: usize) -> Vec<Verified> {
    let (tier, _) = open(dir, size, Policy::Fletch);
    let chunks: Vec<_> = (0..n).map(|n| chunk(n, len)).collect();
    chunks.iter().for_each(|c| assert_eq!(tier.put(&key(c), D1, c).expect("no error"), Stored::Yes));
    tier.close().expect("closed");
    chunks
}

/// (hits, wrong bytes that the caller noticed)
fn read_all(tier: &DiskEngine, chunks: &[Verified]) -> (usize, usize) {
    let all: Vec<_> = chunks.iter().map(|c| read(tier, &key(c))).collect();
    (all.iter().filter(|r| r.0.is_some()).count(), all.iter().filter(|r| r.1).count())
}

/// Where the payload of a chunk lies: (file, offset).
fn location(tier: &DiskEngine, c: &Verified) -> (std::path::PathBuf, u64) {
    let (location, slab) = tier.locate(&key(c)).expect("it is there");
    (tier.files.path(slab.id), location.at + HEAD)
}

fn flip(path: &Path, at: u64) {
    let f = fs::OpenOptions::new().read(true).write(true).open(path).expect("a file");
    let mut b = [0];
    f.read_exact_at(&mut b, at).expect("a byte");
    f.write_all_at(&[b[0] ^ 0x10], at).expect("flipped");
}

#[test]
fn i1_one_percent_flipped_is_found_by_readers_and_by_scrubbing() {
    for scrub in [false, true] {
        let dir = tempfile::tempdir().expect("a directory");
        let chunks = filled(dir.path(), 64 << 20, 1000, 20_000);
        let (tier, _) = open(dir.path(), 64 << 20, Policy::Fletch);
        for c in chunks.iter().step_by(100) {
            let (path, at) = location(&tier, c);
            flip(&path, at + 12_345);
        }
        if scrub {
            let mut bad = 0;
            loop {
                let r = tier.scrub_next(3 << 20).expect("scrubbed");
                bad += r.bad;
                if r.wrapped {
                    break;
                }
            }
            assert_eq!(bad, 10);
            assert_eq!(read_all(&tier, &chunks), (990, 0));
        } else {
            assert_eq!(read_all(&tier, &chunks), (990, 10));
        }
        assert_eq!(tier.stats().counts.quarantined, 10);
        // Fetched again and kept again; the damaged ones do not come back.
        for c in chunks.iter().step_by(100) {
            assert_eq!(tier.put(&key(c), D1, c).expect("no error"), Stored::Yes);
        }
        drop(tier);
        let (tier, _) = open(dir.path(), 64 << 20, Policy::Fletch);
        assert_eq!(read_all(&tier, &chunks), (1000, 0));
    }
}

#[test]
fn i1_truncated_slabs_give_misses() {
    let dir = tempfile::tempdir().expect("a directory");
    let chunks = filled(dir.path(), 64 << 20, 1000, 20_000);
    let (tier, _) = open(dir.path(), 64 << 20, Policy::Fletch);
    let files = slab_files(dir.path());
    let half = |p: &Path| {
        let f = fs::OpenOptions::new().write(true).open(p).expect("a slab");
        f.set_len(f.metadata().expect("its length").len() / 2).expect("cut");
    };
    // Under the running tier, and before it starts.
    half(&files[0]);
    let (hits, wrong) = read_all(&tier, &chunks);
    assert!(wrong == 0 && hits < 1000 && hits > 980, "{hits} {wrong}");
    drop(tier);
    half(&files[1]);
    fs::write(&files[2], b"").expect("emptied");
    fs::write(&files[3], vec![0x46; 5000]).expect("overwritten");
    let (tier, found) = open(dir.path(), 64 << 20, Policy::Fletch);
    let (hits, wrong) = read_all(&tier, &chunks);
    assert_eq!((hits as u64, wrong), (found.records, 0));
    assert!(hits > 900 && found.walked >= 1, "{found:?}");
    tier.read_index().check();
}

#[test]
fn i1_any_flip_in_the_files_costs_at_most_some_records() {
    let mut rng = seeded(11);
    let dir = tempfile::tempdir().expect("a directory");
    let chunks = filled(dir.path(), 16 << 20, 200, 3000);
    for round in 0..60 {
        let (tier, _) = open(dir.path(), 16 << 20, Policy::Fletch);
        chunks.iter().for_each(|c| {
            assert!(!matches!(tier.put(&key(c), D1, c).expect("no error"), Stored::Refused(_)))
        });
        if round % 2 == 0 {
            tier.close().expect("closed");
        }
        drop(tier);
        let files = slab_files(dir.path());
        for _ in 0..3 {
            let path = &files[rng.random_range(0..files.len())];
            let len = fs::metadata(path).expect("a slab").len();
            // Half of them where headers, tables and footers are.
            let at = if rng.random() {
                rng.random_range(0..len)
            } else {
                rng.random_range(len.saturating_sub(1024)..len)
            };
            flip(path, at);
        }
        let (tier, _) = open(dir.path(), 16 << 20, Policy::Fletch);
        let (hits, wrong) = read_all(&tier, &chunks);
        assert!(hits >= 197 && wrong <= 3, "round {round}: {hits} hits, {wrong} wrong");
        // What was quarantined stays so once the catalogue was told.
        tier.reap(0).expect("reaped");
        tier.read_index().check();
    }
}

#[test]
fn i5_a_slab_of_another_format_is_removed() {
    let dir = tempfile::tempdir().expect("a directory");
    filled(dir.path(), 16 << 20, 3, 3000);
    let old = dir.path().join("slabs/0000000000000007.slab");
    fs::write(&old, include_bytes!("../layout/golden-1.slab")).expect("written");
    let (tier, found) = open(dir.path(), 16 << 20, Policy::Fletch);
    assert_eq!((found.records, found.removed, old.exists()), (3, 1, false));
    assert_eq!(tier.health(), Health::On);
    drop(tier);
    // Its footer says so, too.
    let mut headless = include_bytes!("../layout/golden-1.slab").to_vec();
    headless[..32].fill(0);
    fs::write(&old, headless).expect("written");
    let (_, found) = open(dir.path(), 16 << 20, Policy::Fletch);
    assert_eq!((found.records, found.walked, found.removed, old.exists()), (3, 0, 1, false));
}

#[test]
fn i5_a_walk_finds_every_record_however_it_lies_in_what_is_read_no_wait() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = || DiskConfig { slab_bytes: Some(8 << 20), ..config(dir.path(), 64 << 20, Policy::Fletch) };
    let (tier, _) = DiskEngine::open(config(), SystemTime::now()).expect("the tier opens");
    // Short ones, so that headers lie across the ends of windows.
    let chunks: Vec<_> = (0..20_000).map(|n| chunk(n, (n as usize * 37) % 600)).collect();
    chunks
        .iter()
        .for_each(|c| assert!(!matches!(tier.put(&key(c), D1, c).expect("no error"), Stored::Refused(_))));
    let different = tier.stats().chunks;
    drop(tier);
    let (tier, found) = DiskEngine::open(config(), SystemTime::now()).expect("the tier opens");
    assert_eq!((found.records, found.walked, found.dropped), (different, 1, 0));
    assert_eq!(read_all(&tier, &chunks), (chunks.len(), 0));
}

#[test]
fn i5_a_deleted_slab_loses_its_records_only() {
    let dir = tempfile::tempdir().expect("a directory");
    let chunks = filled(dir.path(), 64 << 20, 1000, 20_000);
    // No open files: the tier sees the directory as it is.
    let (tier, _) = DiskEngine::open(
        DiskConfig { files_max: 1, ..config(dir.path(), 64 << 20, Policy::Fletch) },
        SystemTime::now(),
    )
    .expect("the tier opens");
    let files = slab_files(dir.path());
    fs::remove_file(&files[1]).expect("removed");
    let (hits, wrong) = read_all(&tier, &chunks);
    assert!(wrong == 0 && hits > 950 && hits < 1000, "{hits}");
    assert_eq!((tier.stats().counts.slabs_lost, tier.health()), (1, Health::On));
    let used: u64 = tier.read_index().slabs().map(|(_, m)| m.blocks).sum();
    assert_eq!(used, tier.space.used());
    tier.close().expect("closed");
    drop(tier);
    fs::remove_file(&files[2]).expect("removed");
    let (tier, _) = open(dir.path(), 64 << 20, Policy::Fletch);
    assert!(read_all(&tier, &chunks).0 > 900);
}

#[test]
fn i5_a_deleted_directory_turns_the_tier_off_and_a_probe_on_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let (cache, now) = (dir.path().join("cache"), SystemTime::now());
    let chunks = filled(&cache, 64 << 20, 300, 20_000);
    let (tier, _) = open(&cache, 64 << 20, Policy::Fletch);
    fs::remove_dir_all(&cache).expect("removed");
    // Without a look at the directory: files that are open still give right bytes.
    assert_eq!(read_all(&tier, &chunks).1, 0);
    let mut wrote = Ok(Stored::Yes);
    for n in 1000..1100 {
        let c = chunk(n, 110_000);
        wrote = tier.put(&key(&c), D1, &c);
        if wrote.is_err() {
            break;
        }
    }
    assert!(wrote.is_err(), "writing into a directory that is gone");
    assert!(matches!(tier.health(), Health::Off { why: OffReason::Vanished, .. }));
    assert!(matches!(tier.get(&key(&chunks[0])), Err(DiskError::Off(OffReason::Vanished))));
    assert_eq!(tier.admit(&key(&chunks[0]), D1, 100), Admission::No);
    assert_eq!(tier.probe(now), Health::On);
    assert_eq!((tier.stats().chunks, tier.space.used()), (0, 0));
    for c in &chunks {
        assert_eq!(tier.put(&key(c), D1, c).expect("no error"), Stored::Yes);
    }
    assert_eq!(read_all(&tier, &chunks), (300, 0));
    tier.close().expect("closed");
    drop(tier);
    let (tier, _) = open(&cache, 64 << 20, Policy::Fletch);
    assert_eq!(read_all(&tier, &chunks), (300, 0));
}

#[test]
fn i5_another_directory_in_its_place_is_noticed() {
    let dir = tempfile::tempdir().expect("a directory");
    let (cache, other) = (dir.path().join("cache"), dir.path().join("other"));
    let chunks = filled(&cache, 64 << 20, 10, 20_000);
    let (tier, _) = open(&cache, 64 << 20, Policy::Fletch);
    fs::rename(&cache, &other).expect("moved");
    let (second, _) = open(&cache, 64 << 20, Policy::Fletch);
    let now = SystemTime::now();
    // Somebody else owns what is there now: stay off, however often and whatever the clock says.
    for at in [now, now + Duration::from_secs(10), now - Duration::from_secs(1000)] {
        assert!(matches!(tier.probe(at), Health::Off { why: OffReason::Vanished, .. }));
    }
    drop(second);
    assert_eq!(tier.probe(now + Duration::from_secs(20)), Health::On);
    assert_eq!(read_all(&tier, &chunks), (0, 0));
}

#[test]
fn i5_a_damaged_catalogue_is_set_aside_and_nothing_is_lost() {
    let dir = tempfile::tempdir().expect("a directory");
    let chunks = filled(dir.path(), 64 << 20, 1000, 20_000);
    let mut rng = seeded(5);
    type Damage = fn(&Path, &mut ChaCha8Rng);
    let damages: [Damage; 5] = [
        |c, _| fs::remove_dir_all(c).expect("removed"),
        |c, _| fs::write(c.join("conf"), b"nonsense: yes\n").expect("written"),
        |c, _| fs::write(c.join("db"), vec![0xff; 100_000]).expect("written"),
        |c, rng| {
            for _ in 0..200 {
                let len = fs::metadata(c.join("db")).expect("the file").len();
                flip(&c.join("db"), rng.random_range(0..len));
            }
        },
        |c, _| {
            fs::remove_dir_all(c).expect("removed");
            fs::write(c, b"a file").expect("written");
        },
    ];
    for (n, damage) in damages.iter().cycle().take(10).enumerate() {
        let (tier, _) = open(dir.path(), 64 << 20, Policy::Fletch);
        // Something for the catalogue to say.
        assert!(tier.evict(&key(&chunks[n])));
        tier.reap(u64::MAX).expect("reaped");
        tier.close().expect("closed");
        drop(tier);
        damage(&dir.path().join("catalogue"), &mut rng);
        let (tier, found) = open(dir.path(), 64 << 20, Policy::Fletch);
        let (hits, wrong) = read_all(&tier, &chunks);
        assert!(hits >= 999 - n && wrong == 0, "damage {n}: {hits} hits, {wrong} wrong, {found:?}");
        assert!(tier.usage().du <= 64 << 20);
        let asides = fs::read_dir(dir.path()).expect("the directory").flatten();
        let asides = asides.filter(|e| e.file_name().to_string_lossy().contains(".bad-")).count();
        assert!(asides <= 2, "{asides} damaged catalogues are kept");
        // It is a good one again.
        tier.close().expect("closed");
        drop(tier);
        assert!(!open(dir.path(), 64 << 20, Policy::Fletch).1.rebuilt);
    }
}

#[test]
fn i5_without_a_catalogue_punched_records_stay_dead() {
    let dir = tempfile::tempdir().expect("a directory");
    let size = 16 << 20;
    let (tier, _) = open(dir.path(), size, Policy::Fletch);
    let chunks: Vec<_> = (0..138).map(|n| chunk(n, 90 << 10)).collect();
    chunks.iter().for_each(|c| assert_eq!(tier.put(&key(c), D1, c).expect("no error"), Stored::Yes));
    chunks.iter().step_by(3).for_each(|c| assert!(tier.evict(&key(c))));
    tier.reap(u64::MAX).expect("reaped");
    assert!(tier.stats().counts.punched_bytes > 1 << 19, "{:?}", tier.stats().counts);
    drop(tier);
    fs::remove_dir_all(dir.path().join("catalogue")).expect("removed");
    let (tier, _) = open(dir.path(), size, Policy::Fletch);
    let (hits, wrong) = read_all(&tier, &chunks);
    assert!(hits >= 92 && wrong == 0, "{hits} hits, {wrong} wrong");
}

#[test]
fn i5_reads_skip_a_full_disk_until_it_works_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=24m", "tmpfs"])
        .arg(dir.path())
        .output()
        .is_ok_and(|o| o.status.success());
    if !mounted {
        eprintln!("SKIPPED: a small file system cannot be mounted here");
        return;
    }
    struct Unmount(std::path::PathBuf);
    impl Drop for Unmount {
        fn drop(&mut self) {
            drop(std::process::Command::new("umount").arg("-l").arg(&self.0).output());
        }
    }
    let _unmount = Unmount(dir.path().into());
    let (cache, now) = (dir.path().join("cache"), SystemTime::now());
    let (tier, _) = open(&cache, 64 << 20, Policy::Fletch);
    let mut kept = Vec::new();
    for n in 0..400 {
        let c = chunk(n, 110 << 10);
        if let Ok(Stored::Yes) = tier.put(&key(&c), D1, &c) {
            kept.push(c);
        }
    }
    assert!(matches!(tier.health(), Health::Off { why: OffReason::Full, .. }), "{:?}", tier.health());
    assert!(kept.len() > 150, "{}", kept.len());
    // Hits go on, nothing is written.
    assert_eq!(read_all(&tier, &kept), (kept.len(), 0));
    assert_eq!(tier.admit(&key(&chunk(1000, 10)), D1, 10), Admission::No);
    assert!(matches!(tier.probe(now), Health::Off { why: OffReason::Full, .. }));
    // Space comes back.
    kept.drain(..100).for_each(|c| assert!(tier.evict(&key(&c))));
    tier.set_shares(&[(D1, 5 << 20)]);
    kept.retain(|c| tier.contains(&key(c)));
    while tier.stats().slab_bytes > 12 << 20 {
        assert!(tier.reap(u64::MAX).expect("reaped").freed > 0);
    }
    assert_eq!(tier.probe(now + Duration::from_secs(2)), Health::On);
    let c = chunk(2000, 110 << 10);
    tier.set_shares(&[(D1, 6 << 20)]);
    assert_eq!(tier.put(&key(&c), D1, &c).expect("no error"), Stored::Yes);
}

/// Runs a system tool on the directory; whether it could.
fn tool(name: &str, arg: &str, dir: &Path) -> bool {
    std::process::Command::new(name).arg(arg).arg(dir).output().is_ok_and(|o| o.status.success())
}

#[test]
fn i5_permission_taken_away_turns_the_tier_off_until_it_is_back() {
    let dir = tempfile::tempdir().expect("a directory");
    let chunks = filled(dir.path(), 64 << 20, 100, 20_000);
    let (tier, _) = open(dir.path(), 64 << 20, Policy::Fletch);
    let (slabs, now) = (dir.path().join("slabs"), SystemTime::now());
    // For root, permission bits mean nothing: an immutable directory does.
    if !tool("chattr", "+i", &slabs) {
        eprintln!("SKIPPED: no immutable directories here");
        return;
    }
    let c = chunk(1000, 300_000);
    let refused = tier.put(&key(&c), D1, &c);
    assert!(tool("chattr", "-i", &slabs));
    assert!(refused.is_err_and(|e| e.kind() == fletch_core::Kind::Unavailable));
    assert!(matches!(tier.health(), Health::Off { why: OffReason::Denied, .. }), "{:?}", tier.health());
    assert!(tier.get(&key(&chunks[0])).is_err() && !tier.contains(&key(&chunks[0])));
    assert_eq!(tier.probe(now), Health::On);
    assert_eq!(tier.put(&key(&c), D1, &c).expect("no error"), Stored::Yes);
    assert_eq!(read_all(&tier, &chunks), (100, 0));
}

#[test]
fn what_an_errno_says() {
    use rustix::io::Errno;
    let says = |e: Errno| error::off_reason_for(&e.into());
    assert_eq!(says(Errno::NOSPC), Some(OffReason::Full));
    assert_eq!(says(Errno::ROFS), Some(OffReason::ReadOnly));
    assert_eq!(says(Errno::IO), Some(OffReason::Io));
    assert_eq!(says(Errno::ACCESS), Some(OffReason::Denied));
    assert_eq!(says(Errno::STALE), Some(OffReason::Vanished));
    assert_eq!(says(Errno::MFILE), None);
    assert_eq!(error::off_reason_for(&io::ErrorKind::UnexpectedEof.into()), None);
    for why in [
        OffReason::Full,
        OffReason::ReadOnly,
        OffReason::Io,
        OffReason::Denied,
        OffReason::Vanished,
        OffReason::Closed,
    ] {
        assert_eq!(why.allows_reads(), matches!(why, OffReason::Full | OffReason::ReadOnly));
    }
}

#[test]
fn i5_a_read_only_disk_serves_what_it_has() {
    let dir = tempfile::tempdir().expect("a directory");
    let chunks = filled(dir.path(), 64 << 20, 100, 20_000);
    let (tier, _) = open(dir.path(), 64 << 20, Policy::Fletch);
    // What the kernel says after it remounted a file system under us.
    tier.note_io_error(&DiskError::io("create", dir.path(), rustix::io::Errno::ROFS.into()));
    assert!(matches!(tier.health(), Health::Off { why: OffReason::ReadOnly, .. }));
    let c = chunk(1000, 100);
    assert!(matches!(tier.put(&key(&c), D1, &c), Err(DiskError::Off(OffReason::ReadOnly))));
    assert_eq!(read_all(&tier, &chunks), (100, 0));
    assert_eq!(tier.probe(SystemTime::now()), Health::On);
    assert_eq!(tier.put(&key(&c), D1, &c).expect("no error"), Stored::Yes);
}
