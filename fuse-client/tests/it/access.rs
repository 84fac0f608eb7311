//! A version that the server refuses after it was mounted: the kernel forgets what it caches of it.

use crate::support::{
    dataset::Dataset,
    kernel::{Mount, can_mount},
    stub::Stub,
};
use fletch_api::Code;
use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// The bound of SEMANTICS S21.
const WITHIN: Duration = Duration::from_secs(5);

fn until(what: &str, within: Duration, done: impl Fn() -> bool) {
    let until = Instant::now() + within;
    while !done() {
        assert!(Instant::now() < until, "not within {within:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn errno<T>(outcome: io::Result<T>) -> Option<i32> {
    outcome.err().and_then(|e| e.raw_os_error())
}

fn everything(dir: &Path, found: &mut Vec<u8>) -> io::Result<()> {
    for e in fs::read_dir(dir)? {
        let path = e?.path();
        if fs::symlink_metadata(&path)?.is_dir() {
            everything(&path, found)?;
        } else {
            found.extend(fs::read(&path)?);
        }
    }
    Ok(())
}

#[test]
fn the_kernel_forgets_a_refused_version_until_it_is_allowed_again() {
    if !can_mount() {
        return;
    }
    let dataset = Arc::new(Dataset::many(60, 20_000));
    let stub = Stub::start(Arc::clone(&dataset));
    let mut mount = Mount::start(&stub.url(), &[]);
    let (mut first, mut second) = (Vec::new(), Vec::new());
    everything(mount.path(), &mut first).expect("reads");
    let chunks = stub.chunks();
    everything(mount.path(), &mut second).expect("reads");
    assert_eq!((first == second, stub.chunks()), (true, chunks), "all of it is in the page cache");
    let path = mount.path().join(dataset.nodes.keys().next().expect("a file"));
    let held = File::open(&path).expect("open");
    let page = || held.read_at(&mut [0; 4096], 0);
    assert_eq!(page().expect("a page"), 4096);

    for (code, want) in [(Code::NotFound, libc::ESTALE), (Code::Unauthorized, libc::EACCES)] {
        stub.refuse(Some(code));
        let begun = Instant::now();
        until("an open file's cached pages are gone", WITHIN, || page().is_err());
        until("a path's are", WITHIN, || fs::read(&path).is_err());
        mount.wait_for("the kernel forgot the version");
        assert!(begun.elapsed() < WITHIN, "{:?}", begun.elapsed());
        assert_eq!(errno(page()), Some(want), "{code}");
        for path in dataset.nodes.keys().map(|p| mount.path().join(p)) {
            assert_eq!(errno(fs::read(&path)), Some(want), "{code}: {}", path.display());
            assert_eq!(errno(fs::symlink_metadata(&path)), Some(want), "{code}: {}", path.display());
            assert_eq!(errno(File::open(&path)), Some(want), "not even the name: {}", path.display());
        }
        assert_eq!(errno(fs::read_dir(mount.path()).and_then(|mut d| d.next().transpose())), Some(want));
        stub.refuse(None);
        until("it is granted again", WITHIN, || page().is_ok());
        let mut again = Vec::new();
        everything(mount.path(), &mut again).expect("reads again");
        assert!(again == first);
    }
}

#[test]
fn a_server_that_is_away_refuses_nothing() {
    if !can_mount() {
        return;
    }
    let dataset = Arc::new(Dataset::many(5, 20_000));
    let mut stub = Stub::start(Arc::clone(&dataset));
    let mut mount = Mount::start(&stub.url(), &["--io-timeout", "2s"]);
    everything(mount.path(), &mut Vec::new()).expect("reads");
    stub.kill();
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        everything(mount.path(), &mut Vec::new()).expect("the kernel has it all");
        std::thread::sleep(Duration::from_millis(50));
    }
    // What happened meanwhile is known soon after it is back.
    stub.refuse(Some(Code::NotFound));
    stub.restart();
    mount.wait_for("the kernel forgot the version");
    assert!(everything(mount.path(), &mut Vec::new()).is_err());
}

#[test]
fn a_refusal_and_reads_in_flight_do_not_wait_for_each_other() {
    if !can_mount() {
        return;
    }
    let dataset = Arc::new(Dataset::many(400, 60_000));
    let stub = Stub::start(Arc::clone(&dataset));
    let mut mount = Mount::start(&stub.url(), &["--memory", "32MiB"]);
    let paths: Vec<_> = dataset.nodes.keys().map(|p| mount.path().join(p)).collect();
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..8)
            .map(|r| {
                let paths = &paths;
                scope.spawn(move || {
                    let until = Instant::now() + Duration::from_secs(4);
                    let mut longest = Duration::ZERO;
                    let mut outcomes = [0u32; 2];
                    for i in (0..).map(|i| (i * 7 + r * 50) % paths.len()) {
                        let begun = Instant::now();
                        if begun > until {
                            return (longest, outcomes);
                        }
                        outcomes[usize::from(fs::read(&paths[i]).is_err())] += 1;
                        longest = longest.max(begun.elapsed());
                    }
                    unreachable!("the numbers do not end")
                })
            })
            .collect();
        for _ in 0..2 {
            stub.refuse(Some(Code::NotFound));
            mount.wait_for("the kernel forgot the version");
            stub.refuse(None);
            mount.wait_for("allows the version again");
        }
        for r in readers {
            let (longest, [read, refused]) = r.join().expect("reader");
            assert!(longest < WITHIN, "a read took {longest:?}");
            assert!(read > 0 && refused > 0, "{read} {refused}");
        }
    });
}
