//! I4, I8: a dataset that fits the disk is read from its origin once, whoever reads it first, and each of its
//! bytes counts once.

use crate::common::{Over, appended, fetched, one_rank, series, settle, whole};
use crate::shares::substitutes;
use fletch_api::OrderKind;
use fletch_client::epochs::Next;
use fletch_client::{Client, ClientConfig, ClientError};
use fletch_tests::bins::{command, run};
use fletch_tests::fixture::Site;
use fletch_tests::readers::{Data, Readers};
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

const LEN: u64 = 110_000;
/// The most chunks that a busy machine loses: a twentieth of a dataset.
const LOST_CHUNKS_MAX: u64 = 52;
const EVICTED: &str = "fletch_disk_evicted_chunks_total";
const FLAGS: [&str; 6] = ["--memory", "64MiB", "--cache-size", "128MiB", "--cache-free-floor", "0"];

/// Who reads a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reads {
    /// Programs that read its files from the server.
    Plain,
    /// A program that reads its files through a mount.
    Mount,
    Warmup,
    Strict,
    Substitute,
}

/// Reads epochs of a job.
fn epochs(site: &Site, name: &str, order: OrderKind, epochs: u64) {
    let ask = one_rank(name, order);
    let work = async {
        let client = Client::new(ClientConfig::new(site.url.parse().expect("url"), "loader"))?;
        let job = client.declare(&ask).await?;
        for epoch in 0..epochs {
            let mut reader = job.reader(epoch, 0, 0);
            loop {
                match reader.next(32).await? {
                    Next::Batch(b) => drop(job.ack(epoch, 0, &[b.token.ack(Default::default())]).await?),
                    Next::Done => break,
                    Next::Full | Next::Last => {}
                }
            }
        }
        Ok::<_, ClientError>(())
    };
    tokio::runtime::Runtime::new().expect("runtime").block_on(work).expect("epochs");
    appended(site);
}

impl Reads {
    /// Reads all of the dataset. `nth` tells jobs and mounts apart.
    fn read(self, site: &Site, root: &str, data: &Data, nth: usize) {
        match self {
            Reads::Plain => {
                assert_eq!(settle(site, &Readers::new(), root, &data.files, 8), whole(data));
            }
            Reads::Mount => {
                let mounted = site.mount("one", &format!("mount-{nth}"), &["--memory", "32MiB"]);
                for (path, _) in &data.files {
                    let read = fs::read(mounted.dir.join(path)).expect("a file").len();
                    assert_eq!(read as u64, LEN);
                }
                mounted.stop();
                appended(site);
            }
            Reads::Warmup => {
                let mut c = command("fletch");
                let told = c.args(["warmup", "one", "--wait", "--pin", "0s", "--server", &site.url]);
                let told = told.output().expect("runs");
                assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
            }
            Reads::Strict => epochs(site, &format!("strict-{nth}"), OrderKind::Strict, 1),
            Reads::Substitute => epochs(site, &format!("sweep-{nth}"), OrderKind::Substitute, 2),
        }
    }
}

/// A dataset of `percent` % of the disk.
fn dataset(site: &Site, seed: u64, percent: u64) -> Data {
    let footprint = 256 + LEN.next_multiple_of(64);
    Data::new(seed, series(site, "fletch_disk_capacity_bytes") * percent / 100 / footprint, LEN)
}

/// Checks the line of the dataset: there is one, its parts add up, and each byte counts once.
fn check_line(site: &Site) {
    let allocation = site.json("/v1/allocation");
    let lines = allocation["datasets"].as_array().expect("datasets");
    let of = |name: &str| lines.first().and_then(|line| line[name].as_u64()).unwrap_or_default();
    assert_eq!(lines.len(), 1, "{allocation:#}");
    assert!(of("share_bytes") <= of("size_bytes"), "{allocation:#}");
    assert!(of("sweep_share_bytes") <= of("share_bytes"), "{allocation:#}");
    assert!(of("sweep_cached_bytes") <= of("cached_bytes"), "{allocation:#}");
    assert_eq!(of("cached_bytes"), series(site, "fletch_disk_chunk_bytes"), "{allocation:#}");
    let part = |of: &str| series(site, &format!("fletch_share_bytes{{dataset=\"one\",of=\"{of}\"}}"));
    assert_eq!(part("share"), part("sweep") + part("plain"));
    assert_eq!(part("share"), of("share_bytes"));
}

/// Checks that `more` bytes came from the origin, `new` of them for the first time.
///
/// On a machine that is busy, the append queue is full at times, and a sweep displaces a few units that came
/// late. What was not kept then comes once more.
fn check_fetched(site: &Site, more: u64, new: u64, who: &str) {
    let dropped = series(site, "fletch_disk_append_dropped_bytes_total");
    let lost = site.metric("fletch_disk_refused_total") as u64 + series(site, EVICTED);
    let again = dropped + lost.min(LOST_CHUNKS_MAX) * LEN;
    let what = format!("{who}: {more} bytes, {new} new; {dropped} were not queued, {lost} chunks lost");
    assert!(more >= new && more <= new + again, "{what}");
}

fn once(orders: &[&[Reads]], seed: u64) {
    for order in orders {
        let site = Site::start(&FLAGS);
        let data = dataset(&site, seed, 90);
        let root = site.publish("one", &data.dir);
        for (nth, reads) in order.iter().enumerate() {
            let before = fetched(&site);
            reads.read(&site, &root, &data, nth);
            let more = fetched(&site) - before;
            println!("{order:?}: {reads:?} read {more} bytes of {} from the origin", data.bytes());
            let new = if nth == 0 { data.bytes() } else { 0 };
            check_fetched(&site, more, new, &format!("{order:?}: {reads:?}"));
            check_line(&site);
        }
        let evicted = series(&site, EVICTED);
        assert!(evicted <= LOST_CHUNKS_MAX, "{evicted} chunks were evicted");
    }
}

#[test]
fn a_dataset_that_plain_readers_cached_costs_a_job_nothing() {
    once(&[&[Reads::Plain, Reads::Substitute, Reads::Plain]], 71);
    if have(&[Need::Fuse]) {
        once(&[&[Reads::Mount, Reads::Substitute, Reads::Mount]], 71);
    }
}

#[test]
fn a_dataset_that_a_warm_up_or_a_job_cached_costs_a_job_nothing() {
    once(
        &[
            &[Reads::Warmup, Reads::Substitute, Reads::Warmup],
            &[Reads::Strict, Reads::Substitute, Reads::Strict],
        ],
        72,
    );
}

#[test]
fn a_dataset_that_a_sweep_cached_costs_nobody_anything() {
    let others = [Reads::Substitute, Reads::Strict, Reads::Plain, Reads::Warmup, Reads::Substitute];
    let order: Vec<Reads> = [Reads::Substitute].into_iter().chain(others).collect();
    once(&[&order], 73);
    if have(&[Need::Fuse]) {
        once(&[&[Reads::Substitute, Reads::Mount, Reads::Strict]], 73);
    }
}

/// What a sweep took over is there after `kill -9`, for a sweep and for plain readers.
#[test]
fn what_a_sweep_took_over_is_there_after_kill_9() {
    let mut site = Site::start(&FLAGS);
    let data = dataset(&site, 74, 90);
    let root = site.publish("one", &data.dir);
    Reads::Plain.read(&site, &root, &data, 0);
    Reads::Substitute.read(&site, &root, &data, 1);
    check_fetched(&site, fetched(&site), data.bytes(), "a sweep after plain readers");
    for (nth, reads) in [(2, Reads::Plain), (3, Reads::Substitute)] {
        site.kill();
        site.restart();
        until("the disk is on", Duration::from_secs(20), || {
            series(&site, "fletch_disk_state{state=\"on\"}") == 1
        });
        reads.read(&site, &root, &data, nth);
        check_fetched(&site, fetched(&site), 0, &format!("{reads:?}"));
        check_line(&site);
    }
}

/// `fletch evict` and `fletch unregister` beside a job: each byte counts once, and others get their share.
#[test]
fn a_dataset_is_evicted_and_removed_while_its_sweep_runs() {
    let site = Site::start(&FLAGS);
    let (data, other) = (dataset(&site, 76, 90), dataset(&site, 77, 90));
    let root = site.publish("one", &data.dir);
    Reads::Plain.read(&site, &root, &data, 0);
    let fletch = |words: &[&str]| drop(run(command("fletch").args(words).args(["--server", &site.url])));
    let (over, epochs) = (AtomicBool::new(false), AtomicU64::new(0));
    let more = |n: u64| {
        let before = epochs.load(Relaxed);
        until("more epochs", Duration::from_secs(120), || epochs.load(Relaxed) >= before + n);
    };
    thread::scope(|s| {
        let _over = Over(&over);
        let job = s.spawn(|| substitutes(&site.url, &over, &epochs));
        more(1);
        fletch(&["evict", "one"]);
        more(2);
        let before = fetched(&site);
        more(1);
        check_fetched(&site, fetched(&site) - before, 0, "the job has all of the dataset again");
        check_line(&site);
        fletch(&["unregister", "one"]);
        until("the job has no dataset", Duration::from_secs(60), || job.is_finished());
        let ended = job.join().expect("a job");
        assert!(ended.is_err(), "a dataset that is gone was read: {ended:?}");
    });
    let root = site.publish("two", &other.dir);
    let readers = Readers::new();
    let capacity = series(&site, "fletch_disk_capacity_bytes");
    let cached = || {
        assert_eq!(settle(&site, &readers, &root, &other.files, 8), whole(&other));
        let allocation = site.json("/v1/allocation");
        let lines = allocation["datasets"].as_array().expect("datasets");
        let line = lines.iter().find(|line| line["dataset"] == "two").expect("a line");
        println!("{line} with {} on disk", series(&site, "fletch_disk_chunk_bytes"));
        line["cached_bytes"].as_u64().unwrap_or_default()
    };
    // The dataset that is gone keeps a share for an hour, as one that nobody reads does.
    until("another dataset has its half", Duration::from_secs(60), || cached() * 100 >= capacity * 48);
    let used = series(&site, "fletch_disk_chunk_bytes");
    assert!(used <= capacity && used * 100 >= capacity * 97, "{used} of {capacity}");
}

/// Plain readers that filled the disk: a job begins with what is there, and both keep their parts.
#[test]
fn a_dataset_three_times_the_disk_keeps_what_its_readers_claim() {
    let site = Site::start(&FLAGS);
    let data = dataset(&site, 75, 300);
    let root = site.publish("one", &data.dir);
    // Plain readers fill the disk. A job takes half of it, and begins with what is there.
    Reads::Plain.read(&site, &root, &data, 0);
    let (capacity, before) = (series(&site, "fletch_disk_capacity_bytes"), fetched(&site));
    assert!(series(&site, "fletch_disk_chunk_bytes") * 100 >= capacity * 97);
    epochs(&site, "sweep", OrderKind::Substitute, 1);
    let cost = (fetched(&site) - before) as f64 / data.bytes() as f64;
    println!("the first epoch costs {cost:.3} of the dataset");
    // Half of a disk that holds a third of the dataset is kept for the sweep; the plain readers' half is
    // found in passing.
    assert!(cost < 0.84, "the first epoch costs {cost} of the dataset");
    let full = series(&site, "fletch_disk_chunk_bytes") as f64 / capacity as f64;
    println!("the disk is {full:.3} full");
    assert!(full > 0.97, "the disk is {full} full");
    check_line(&site);
    let line = &site.json("/v1/allocation")["datasets"][0];
    let plain = line["cached_bytes"].as_u64().unwrap_or_default()
        - line["sweep_cached_bytes"].as_u64().unwrap_or_default();
    let part = plain as f64 / capacity as f64;
    println!("plain readers have {part:.3} of the disk");
    assert!(part > 0.48, "plain readers have {part} of the disk");
}
