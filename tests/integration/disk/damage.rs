//! I1: the server never sends bytes that changed on disk.
//!
//! It counts them, quarantines them and fetches them again.

use crate::common::{appended, fetched, series, settle, whole};
use fletch_tests::fixture::Site;
use fletch_tests::readers::{Data, Readers};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

fn slabs(site: &Site) -> Vec<PathBuf> {
    let all = fs::read_dir(site.cache_dir().join("slabs")).expect("slabs");
    let mut all: Vec<_> = all.map(|e| e.expect("entry").path()).collect();
    all.sort();
    all
}

/// Returns the offsets of the payloads in a slab, found by the magic number of its records.
fn payloads(slab: &[u8]) -> Vec<usize> {
    (512..slab.len()).step_by(64).filter(|&at| slab[at..].starts_with(b"FLRC")).map(|at| at + 256).collect()
}

#[test]
fn one_percent_flipped_and_one_percent_cut_cost_only_their_own_fetch() {
    let (n, len) = (1500, 50_000);
    let data = Data::new(31, n, len);
    let mut site = Site::start(&["--memory", "64MiB", "--cache-size", "256MiB", "--cache-free-floor", "0"]);
    let root = site.publish("damage", &data.dir);
    let readers = Readers::new();
    assert_eq!(settle(&site, &readers, &root, &data.files, 8), whole(&data));
    site.end();
    // One record in a hundred gets a flipped bit somewhere; of one in a hundred the second half of the
    // payload is gone (zeros, as a file system leaves it after a crash).
    let (mut flipped, mut cut, mut seen) = (0, 0, 0u64);
    for path in slabs(&site) {
        let bytes = fs::read(&path).expect("read");
        let file = fs::File::options().write(true).open(&path).expect("open");
        for at in payloads(&bytes) {
            seen += 1;
            let middle = at + len as usize / 2;
            match seen % 100 {
                17 => {
                    let at = at + (seen as usize * 7919) % len as usize;
                    file.write_all_at(&[bytes[at] ^ (1 << (seen % 8))], at as u64).expect("flip");
                    flipped += 1;
                }
                71 => {
                    let zeros = vec![0; at + len as usize - middle];
                    file.write_all_at(&zeros, middle as u64).expect("cut");
                    cut += 1;
                }
                _ => {}
            }
        }
    }
    assert_eq!((seen, flipped, cut), (n, n / 100, n / 100));
    site.restart();
    assert_eq!(readers.read(&site, &root, &data.files, 8), whole(&data), "0 wrong bytes, nothing refused");
    let damaged = flipped + cut;
    assert_eq!(series(&site, "fletch_disk_quarantined_total"), damaged);
    assert_eq!(series(&site, "fletch_corrupt_total{source=\"disk\"}"), damaged);
    assert_eq!(fetched(&site), damaged * len, "only what was damaged is fetched again");
    appended(&site);
    assert_eq!(series(&site, "fletch_disk_chunks"), n, "and kept again");
    site.end();
    // The last slab loses its end, its table and a record in the middle of it.
    let last = slabs(&site).pop().expect("a slab");
    let size = fs::metadata(&last).expect("metadata").len();
    fs::File::options().write(true).open(&last).expect("open").set_len(size * 2 / 3).expect("cut");
    site.restart();
    let there = series(&site, "fletch_disk_chunks");
    assert!(there < n && there > n / 2, "{there}");
    assert_eq!(readers.read(&site, &root, &data.files, 8), whole(&data));
    assert_eq!(fetched(&site), (n - there) * len);
}
