//! I5: after `kill -9` the server serves the appended chunks again, without the origin.

use crate::common::{becomes, delivered, fetched, series, settle, whole};
use fletch_tests::fixture::Site;
use fletch_tests::readers::{Data, Got, Readers};
use fletch_tests::watch::until;
use std::fs;
use std::os::unix::fs::FileExt;
use std::time::Duration;

const SMALL: [&str; 6] = ["--memory", "64MiB", "--cache-size", "256MiB", "--cache-free-floor", "0"];

#[test]
fn after_kill_9_what_was_appended_needs_no_origin() {
    let data = Data::new(21, 1500, 110_000);
    let mut site = Site::start(&SMALL);
    let root = site.publish("warm", &data.dir);
    let readers = Readers::new();
    assert_eq!(settle(&site, &readers, &root, &data.files, 8), whole(&data));
    assert_eq!(series(&site, "fletch_disk_chunks"), 1500);
    // Memory is smaller than the dataset, and yet nothing is fetched again.
    assert_eq!(readers.read(&site, &root, &data.files, 8), whole(&data));
    assert_eq!(fetched(&site), data.bytes());
    assert!(delivered(&site, "hit", "disk") > data.bytes() / 2);
    site.kill();
    // Whoever asks the origin now gets nothing.
    let away = data.dir.with_extension("away");
    fs::rename(&data.dir, &away).expect("rename");
    site.restart();
    let got = readers.read(&site, &root, &data.files, 8);
    fs::rename(&away, &data.dir).expect("rename back");
    assert_eq!((got, fetched(&site)), (whole(&data), 0));
    site.end();
    // A clean end, too, and then without the catalogue, and with one of noise.
    for damage in ["none", "removed", "noise"] {
        let catalogue = site.cache_dir().join("catalogue");
        match damage {
            "removed" => fs::remove_dir_all(&catalogue).expect("remove"),
            "noise" => {
                for e in fs::read_dir(&catalogue).expect("catalogue") {
                    let path = e.expect("entry").path();
                    if path.is_file() {
                        let file = fs::File::options().write(true).open(&path).expect("open");
                        file.write_all_at(&[0xa5; 4096], 0).expect("damage");
                    }
                }
            }
            _ => {}
        }
        site.restart();
        becomes(&site, "on");
        assert_eq!(
            (readers.read(&site, &root, &data.files, 8), fetched(&site)),
            (whole(&data), 0),
            "{damage}"
        );
        site.end();
    }
}

#[test]
fn killed_at_any_moment_while_writing_loses_nothing_that_was_committed() {
    let data = Data::new(22, 2000, 60_000);
    let readers = Readers::new();
    for round in 0..3u64 {
        let mut site = Site::start(&SMALL);
        let root = site.publish("crash", &data.dir);
        let committed = std::thread::scope(|s| {
            let reading = s.spawn(|| readers.read(&site, &root, &data.files, 8));
            let mut committed = 0;
            until("some chunks are on disk", Duration::from_secs(30), || {
                committed = series(&site, "fletch_disk_put_chunks_total");
                committed > 300 * round
            });
            let pid = nix::unistd::Pid::from_raw(i32::try_from(site.pid()).expect("pid"));
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("kill");
            let Got { failed, .. } = reading.join().expect("readers");
            assert!(failed > 0, "round {round}: it was killed too late to mean anything");
            committed
        });
        site.kill();
        site.restart();
        let kept = series(&site, "fletch_disk_chunks");
        assert!(kept >= committed, "round {round}: {kept} of {committed} committed chunks are there");
        assert_eq!(readers.read(&site, &root, &data.files, 8), whole(&data));
        assert_eq!(
            fetched(&site),
            (2000 - kept) * 60_000,
            "round {round}: a chunk that is there was fetched"
        );
    }
}
