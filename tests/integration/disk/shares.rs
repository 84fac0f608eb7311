//! I4: a plain reader of a dataset that is larger than the cache.
//!
//! Cached chunks stay, a second dataset gets its share, and the eviction policies reach their theoretical hit
//! shares.

use crate::common::{Over, appended, delivered, fetched, one_rank, series, settle};
use fletch_api::OrderKind;
use fletch_client::epochs::Next;
use fletch_client::{Client, ClientConfig, ClientError};
use fletch_core::Hash;
use fletch_tests::bins::Running;
use fletch_tests::cgroup::Memory;
use fletch_tests::fixture::Site;
use fletch_tests::readers::{Data, Readers};
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

/// Returns the bytes that a chunk of `len` bytes occupies on disk.
pub fn footprint(len: u64) -> u64 {
    256 + len.next_multiple_of(64)
}

/// One epoch of an unmodified program: drops the page cache, then reads every file of the mount in a cgroup.
pub fn epoch(group: &Memory, mount: &Path, files: &[(String, Hash)], first: bool) {
    for (path, _) in files.iter().filter(|_| !first) {
        let file = fs::File::open(mount.join(path)).expect("open");
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).expect("drop");
    }
    let mut c = Command::new("sh");
    c.args(&group.wrapper()[1..]).args(["xargs", "-0", "cat"]).current_dir(mount);
    let sink = fs::File::create("/dev/null").expect("null");
    let mut reader = Running::spawn("reader", c.stdin(Stdio::piped()).stdout(sink));
    let names: Vec<u8> = files.iter().flat_map(|(p, _)| [p.as_bytes(), b"\0"].concat()).collect();
    reader.stdin().write_all(&names).expect("names");
    assert!(reader.wait(Duration::from_secs(300)).success(), "the reader failed");
}

fn plain_reader(len: u64, cache: &str, second: bool) {
    let site = Site::start(&["--memory", "64MiB", "--cache-size", cache, "--cache-free-floor", "0"]);
    let capacity = series(&site, "fletch_disk_capacity_bytes");
    let n = capacity * 100 / 35 / footprint(len);
    let data = Data::new(61, n, len);
    assert!(data.bytes() > 60 << 20, "memory must not be able to hide what the disk does");
    let _ = site.publish("one", &data.dir);
    let group = Memory::new(64 << 20).expect("cgroup");
    let one = site.mount("one", "plain", &["--memory", "32MiB", "--push", "off"]);
    // What an epoch costs the origin, in hundredths of the dataset, beside what was sent of it.
    let cost = |mount: &Path, data: &Data, first: bool| {
        let (before, sent) = (fetched(&site), delivered(&site, "", ""));
        epoch(&group, mount, &data.files, first);
        appended(&site);
        let share = |n: u64| n as f64 * 100.0 / data.bytes() as f64;
        let sent = share(delivered(&site, "", "") - sent);
        assert!(
            (sent - 100.0).abs() < 1.0,
            "{sent} % were asked of the server: the page cache was not dropped"
        );
        share(fetched(&site) - before)
    };
    let first = cost(&one.dir, &data, true);
    assert!((first - 100.0).abs() < 1.0, "epoch 1 costs {first} %");
    let payload = |chunks: u64| chunks as f64 * len as f64 * 100.0 / data.bytes() as f64;
    for e in 2..=if second { 3 } else { 2 } {
        let kept = payload(series(&site, "fletch_disk_chunks"));
        let origin = cost(&one.dir, &data, false);
        assert!((kept - 35.0).abs() <= 1.0, "{kept} % are kept");
        assert!((origin - (100.0 - kept)).abs() <= 1.0, "epoch {e} costs {origin} %, {kept} % are kept");
        assert!((origin - 65.0).abs() <= 1.0, "epoch {e} costs {origin} %");
    }
    assert_eq!(series(&site, "fletch_disk_evicted_chunks_total"), 0, "nothing thrashes");
    if !second {
        return;
    }
    // A second dataset, on the full cache: half of it is its own after one epoch.
    let other = Data::new(62, n, len);
    let _ = site.publish("two", &other.dir);
    let two = site.mount("two", "plain2", &["--memory", "32MiB", "--push", "off"]);
    cost(&two.dir, &other, true);
    let origin = cost(&two.dir, &other, false);
    assert!(
        (origin - 82.5).abs() <= 2.0,
        "the second dataset's epoch 2 costs {origin} %, its share is 17.5 %"
    );
    let origin = cost(&one.dir, &data, false);
    assert!((origin - 82.5).abs() <= 2.0, "the first's next epoch costs {origin} %");
    one.stop();
    two.stop();
}

#[test]
fn a_plain_reader_is_spared_what_its_share_holds_110_kb() {
    if have(&[Need::Fuse, Need::Cgroup]) {
        plain_reader(110_000, "64MiB", true);
    }
}

#[test]
fn a_plain_reader_is_spared_what_its_share_holds_4_kb() {
    if have(&[Need::Fuse, Need::Cgroup]) {
        plain_reader(4096, "28MiB", false);
    }
}

/// Returns the mean hit share of random epochs after the first, with a cache of a fifth of the data.
fn arm(policy: &str) -> f64 {
    let len = 60_000;
    let flags =
        ["--memory", "64MiB", "--cache-size", "64MiB", "--cache-free-floor", "0", "--cache-policy", policy];
    let site = Site::start(&flags);
    let capacity = series(&site, "fletch_disk_capacity_bytes");
    let data = Data::new(63, capacity * 5 / footprint(len), len);
    let root = site.publish("arm", &data.dir);
    let (readers, mut rng, mut order) = (Readers::new(), ChaCha8Rng::seed_from_u64(9), data.files.clone());
    let mut hits = Vec::new();
    for e in 0..4 {
        order.shuffle(&mut rng);
        let before = [delivered(&site, "hit", "disk"), delivered(&site, "hit", "memory")];
        assert_eq!(settle(&site, &readers, &root, &order, 2).failed, 0);
        if e > 0 {
            let disk = (delivered(&site, "hit", "disk") - before[0]) as f64;
            let memory = (delivered(&site, "hit", "memory") - before[1]) as f64;
            // Under `lru` what memory has is on disk too, of the newest there; under `pin` it would
            // have been looked for on disk with the same luck as any other.
            let all = data.bytes() as f64;
            hits.push(if policy == "lru" { (disk + memory) / all } else { disk / (all - memory) });
        }
    }
    hits.iter().sum::<f64>() / hits.len() as f64
}

#[test]
fn the_arms_are_what_theory_says() {
    let (lru, pin) = (arm("lru"), arm("pin"));
    assert!((pin - 0.2).abs() <= 0.02, "pin {pin}");
    assert!((lru - 0.02).abs() <= 0.02, "lru {lru}");
}

/// Runs a job in the substitute order until `over`; `epochs` counts its complete epochs.
pub fn substitutes(url: &str, over: &AtomicBool, epochs: &AtomicU64) -> Result<(), ClientError> {
    let ask = one_rank("sweeping", OrderKind::Substitute);
    let work = async {
        let client = Client::new(ClientConfig::new(url.parse().expect("url"), "loader"))?;
        let job = client.declare(&ask).await?;
        for epoch in 0.. {
            let mut reader = job.reader(epoch, 0, 0);
            loop {
                match reader.next(32).await? {
                    _ if over.load(Relaxed) => return Ok::<_, ClientError>(()),
                    Next::Batch(b) => drop(job.ack(epoch, 0, &[b.token.ack(Default::default())]).await?),
                    Next::Done => break,
                    Next::Full | Next::Last => {}
                }
            }
            epochs.fetch_add(1, Relaxed);
        }
        Ok(())
    };
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    runtime.block_on(work)
}

/// A sweep over the same dataset stays within its own share.
///
/// The files that a plain reader of the mount reads again and again stay cached if they are at most half of
/// the share, however much the sweep fetches and evicts.
#[test]
fn a_plain_reader_keeps_its_share_beside_a_sweep() {
    if !have(&[Need::Fuse, Need::Cgroup]) {
        return;
    }
    let len = 110_000;
    let site = Site::start(&["--memory", "64MiB", "--cache-size", "64MiB", "--cache-free-floor", "0"]);
    let n = series(&site, "fletch_disk_capacity_bytes") * 100 / 35 / footprint(len);
    let data = Data::new(64, n, len);
    let _ = site.publish("one", &data.dir);
    let group = Memory::new(64 << 20).expect("cgroup");
    let mount = site.mount("one", "plain", &["--memory", "32MiB", "--push", "off"]);
    // 15 % of the dataset; half of the disk is 17.5 %.
    let part = &data.files[..data.files.len() * 15 / 100];
    // What came from the origin for the reader, in hundredths of what it read.
    let fetched = || -> u64 {
        let its = |k: &str| k.starts_with("fletch_bytes_total{") && k.contains("train_job=\"plain\"");
        let all = site.metrics();
        let past = all.iter().filter(|(k, _)| its(k) && !k.contains("result=\"hit\""));
        past.map(|(_, n)| *n as u64).sum()
    };
    let cost = |first: bool| {
        let before = fetched();
        epoch(&group, &mount.dir, part, first);
        appended(&site);
        (fetched() - before) as f64 * 100.0 / (part.len() as u64 * len) as f64
    };
    let first = cost(true);
    assert!((first - 100.0).abs() < 1.0, "epoch 1 costs {first} %");
    let alone = cost(false);
    assert!(alone < 1.0, "alone an epoch costs {alone} %");
    let (flag, epochs) = (AtomicBool::new(false), AtomicU64::new(0));
    let dropped = || series(&site, "fletch_sweep_evicted_units_total");
    thread::scope(|s| {
        let _over = Over(&flag);
        s.spawn(|| substitutes(&site.url, &flag, &epochs).expect("epochs"));
        // Its share is what it keeps from the first epoch on.
        until("a whole epoch of the sweep", Duration::from_secs(120), || epochs.load(Relaxed) > 0);
        for _ in 0..3 {
            let (before, beside) = (dropped(), cost(false));
            println!("beside a sweep an epoch costs {beside:.1} %, while that drops {}", dropped() - before);
            assert!(beside < 5.0, "beside a sweep an epoch costs {beside} %, its share is 17.5 % of all");
        }
        until("the sweep goes on", Duration::from_secs(120), || epochs.load(Relaxed) > 2);
        assert!(dropped() > 2 * part.len() as u64, "what the sweep drops is more than the reader has");
        let beside = cost(false);
        assert!(beside < 5.0, "at last an epoch costs {beside} %");
    });
    mount.stop();
}
