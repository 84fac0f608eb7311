//! Helpers of the disk tests: metrics of a server, and waits for a state of its disk tier.

use fletch_api::{OrderKind, PlanSpec, StartJob, Visitation, WorldSpec};
use fletch_core::{Hash, plan::Tail};
use fletch_tests::fixture::Site;
use fletch_tests::readers::{Data, Got, Readers};
use fletch_tests::watch::until;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Returns one series of the server's metrics. `name{label="value"}` is written as the server writes it.
pub fn series(site: &Site, name: &str) -> u64 {
    let all = site.metrics();
    let n = all.get(name).unwrap_or_else(|| panic!("{name} in {all:#?}"));
    *n as u64
}

/// Returns the bytes of chunks that were fetched from the origin and were right.
pub fn fetched(site: &Site) -> u64 {
    series(site, "fletch_chunk_fetched_bytes_total")
}

/// Whether the disk tier is in this state.
pub fn is(site: &Site, state: &str) -> bool {
    series(site, &format!("fletch_disk_state{{state=\"{state}\"}}")) == 1
}

/// Waits until the disk tier is in this state.
pub fn becomes(site: &Site, state: &str) {
    until(&format!("the disk is {state}\n{}", site.log()), Duration::from_secs(20), || is(site, state));
    let said = site.json("/v1/info")["disk"]["state"].as_str().map(str::to_owned);
    assert_eq!(said.as_deref(), Some(state));
}

/// Waits until all that the append queue holds now is appended.
///
/// Beside a sweep the queue may never be empty. It is first in, first out.
pub fn appended(site: &Site) {
    let queued = series(site, "fletch_disk_append_queue_bytes");
    let written = || series(site, "fletch_disk_put_bytes_total");
    let end = written() + queued;
    until("appended", Duration::from_secs(20), || {
        written() >= end || series(site, "fletch_disk_append_queue_bytes") == 0
    });
}

/// Reads files in order, a few at a time, so that the append queue always has room.
///
/// The queue has a quarter of the server's 64 MiB. A chunk that did not fit would be fetched from the origin
/// again.
pub fn settle(site: &Site, readers: &Readers, root: &str, files: &[(String, Hash)], at_once: usize) -> Got {
    let mut all = Got { bytes: 0, failed: 0 };
    for some in files.chunks(100) {
        let got = readers.read(site, root, some, at_once);
        appended(site);
        all = Got { bytes: all.bytes + got.bytes, failed: all.failed + got.failed };
    }
    all
}

/// Sets the flag when dropped, also by a failed assertion, so that no thread waits for it for ever.
pub struct Over<'a>(pub &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// The result of reading a whole dataset without failures.
pub fn whole(data: &Data) -> Got {
    Got { bytes: data.bytes(), failed: 0 }
}

/// Returns the delivered bytes of a result and tier; an empty string stands for all of them.
pub fn delivered(site: &Site, result: &str, tier: &str) -> u64 {
    let is = |k: &str, label: &str, v: &str| v.is_empty() || k.contains(&format!("{label}=\"{v}\""));
    let of = |k: &str| k.starts_with("fletch_bytes_total{") && is(k, "result", result) && is(k, "tier", tier);
    site.metrics().iter().filter(|(k, _)| of(k)).map(|(_, n)| *n as u64).sum()
}

/// A job of one rank over the dataset `one`.
pub fn one_rank(name: &str, order: OrderKind) -> StartJob {
    StartJob {
        name: name.parse().expect("name"),
        dataset: Some("one".parse().expect("name")),
        version: None,
        root: None,
        layout: None,
        seed: None,
        order,
        buckets: None,
        replay: None,
        plan: PlanSpec::default(),
        world: WorldSpec { ranks: 1, batch: 32, tail: Tail::Keep },
        visitation: Visitation::ExactlyOnce,
    }
}
