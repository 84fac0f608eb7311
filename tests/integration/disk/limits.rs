//! I6: the cache directory stays within its limit at every moment, whichever files are read.

use crate::common::{Over, series, whole};
use fletch_tests::fixture::Site;
use fletch_tests::readers::{Data, Readers};
use fletch_tests::watch::occupied;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

fn overload(limit: u64, policy: &str) {
    let size = limit.to_string();
    let site = Site::start(&[
        "--memory",
        "64MiB",
        "--cache-size",
        &size,
        "--cache-free-floor",
        "0",
        "--cache-policy",
        policy,
    ]);
    // Ten times the limit, dataset after dataset, so that chunks of several lengths die in between.
    let (readers, done, max, samples) =
        (Readers::new(), AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|s| {
        s.spawn(|| {
            let (dir, pid) = (site.cache_dir().canonicalize().expect("the cache"), site.pid());
            while !done.load(Relaxed) {
                max.fetch_max(occupied(&dir, pid), Relaxed);
                samples.fetch_add(1, Relaxed);
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let _over = Over(&done);
        let (mut read, mut round) = (0, 0);
        while read < 10 * limit {
            let len = [110_000u64, 8192, 60_000, 1 << 20][round % 4];
            let data = Data::new(50 + round as u64, (2 * limit / len).min(20_000), len);
            let root = site.publish(&format!("d{round}"), &data.dir);
            assert_eq!(readers.read(&site, &root, &data.files, 8), whole(&data));
            (read, round) = (read + data.bytes(), round + 1);
        }
    });
    let (max, samples) = (max.load(Relaxed), samples.load(Relaxed));
    assert!(samples >= 50, "{samples} samples");
    assert!(max as f64 <= 1.01 * limit as f64, "{max} of {limit} ({policy})");
    assert!(max as f64 >= 0.8 * limit as f64, "it was never full: {max} of {limit} ({policy})");
    assert!(series(&site, "fletch_disk_evicted_chunks_total") > 0);
}

#[test]
fn ten_times_too_much_stays_within_the_limit() {
    overload(64 << 20, "lru");
    if std::env::var_os("FLETCH_SOAK").is_some() {
        overload(64 << 20, "fletch");
        overload(10 << 30, "lru");
    }
}
