//! I6: the store stays within its limit at every moment, whichever files its mounts read.

use crate::common::{Node, read_all};
use fletch_tests::readers::Data;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::occupied;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

#[test]
fn five_times_too_much_stays_within_the_limit() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let limit: u64 = 32 << 20;
    let node = Node::of("32MiB", "64MiB");
    let lens = [110_000u64, 8192, 60_000, 1 << 20];
    let all: Vec<Data> =
        lens.iter().enumerate().map(|(i, len)| Data::new(82 + i as u64, limit * 5 / 4 / len, *len)).collect();
    let mounts: Vec<_> = all
        .iter()
        .enumerate()
        .map(|(i, data)| {
            let _ = node.site.publish(&format!("d{i}"), &data.dir);
            node.mount(&format!("d{i}"), &format!("job{i}"), &[])
        })
        .collect();
    let (done, max, samples) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|s| {
        let watch = s.spawn(|| {
            let dir = node.stores()[0].canonicalize().expect("the store");
            while !done.load(Relaxed) {
                max.fetch_max(occupied(&dir, mounts[0].pid()), Relaxed);
                samples.fetch_add(1, Relaxed);
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let readers: Vec<_> =
            mounts.iter().zip(&all).map(|(m, data)| s.spawn(|| read_all(&m.dir, data))).collect();
        let read: Vec<_> = readers.into_iter().map(|r| r.join()).collect();
        done.store(true, Relaxed);
        watch.join().expect("watch");
        read.into_iter().for_each(|r| r.expect("reads"));
    });
    let (max, samples) = (max.load(Relaxed), samples.load(Relaxed));
    assert!(samples >= 20, "{samples} samples");
    assert!(max as f64 <= 1.01 * limit as f64, "{max} of {limit}");
    assert!(max as f64 >= 0.7 * limit as f64, "it was never full: {max} of {limit}");
}
