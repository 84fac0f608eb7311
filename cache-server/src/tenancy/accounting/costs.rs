//! What jobs and datasets cost: the bytes that the server read from origins for them, and the time that their
//! replies waited.
//!
//! Each (domain, tenant, job, dataset) has one [`JobCosts`]. Each (domain, dataset) has one [`Balance`]: what
//! one job of the dataset fetched, another one reads from the cache.
//!
//! 1. Every byte that [`crate::data::versions`] reads from an origin is in exactly one [`JobCosts`].
//! 2. `avoided − due = delivered − read`, where `due` are the bytes that were read and not yet delivered. So
//!    a chunk that is fetched before its files are delivered avoids nothing. In a cluster, what a server
//!    sends to another one counts with `delivered`, and what it receives with `read`. So the sum over all
//!    servers is right.

use crate::training::benefit::ServiceSums;
use fletch_bounds::{Gate, RecordWait, Waits};
use fletch_core::{DatasetName, Domain, JobName, Tenant};
use fletch_origin::Meter;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// The job of reads that no job asked for: those of tables, and of probes.
pub const NO_JOB: &str = "none";
/// The job of what warm-ups read.
pub const WARMUP: &str = "warmup";
/// The job of what other servers of the cluster made this one read.
pub const PEERS: &str = "peers";

/// The bytes of one dataset: delivered, read from its origins, and avoided.
#[derive(Debug, Default)]
pub struct Balance {
    delivered: AtomicU64,
    read: Arc<AtomicU64>,
    avoided: AtomicU64,
    /// The part of `avoided` from before the server's latest start.
    avoided_before: AtomicU64,
    /// Sent to other servers of the cluster, which deliver them.
    sent: AtomicU64,
    /// Received from other servers, which read or avoided them.
    received: AtomicU64,
}

impl Balance {
    /// Counts `n` delivered bytes. What exceeds the bytes read so far was avoided.
    pub fn deliver(&self, n: u64) {
        self.delivered.fetch_add(n, Relaxed);
        self.avoid();
    }

    fn avoid(&self) {
        let given = self.delivered.load(Relaxed) + self.sent.load(Relaxed);
        let taken = self.read.load(Relaxed) + self.received.load(Relaxed);
        self.avoided.fetch_max(given.saturating_sub(taken), Relaxed);
    }

    fn saved(&self) -> SavedBytes {
        SavedBytes {
            delivered: self.delivered.load(Relaxed),
            read: self.read.load(Relaxed),
            avoided: self.avoided.load(Relaxed),
            sent: self.sent.load(Relaxed),
            received: self.received.load(Relaxed),
        }
    }

    fn add(&self, before: SavedBytes) {
        self.delivered.fetch_add(before.delivered, Relaxed);
        self.read.fetch_add(before.read, Relaxed);
        self.avoided.fetch_add(before.avoided, Relaxed);
        self.avoided_before.fetch_add(before.avoided, Relaxed);
        self.sent.fetch_add(before.sent, Relaxed);
        self.received.fetch_add(before.received, Relaxed);
    }

    /// Returns the bytes: delivered, read from origins, and avoided.
    #[must_use]
    pub fn bytes(&self) -> DatasetBytes {
        DatasetBytes {
            delivered: self.delivered.load(Relaxed),
            read: self.read.load(Relaxed),
            avoided: self.avoided.load(Relaxed),
        }
    }
}

/// All counters of a [`Balance`], as they survive a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SavedBytes {
    /// Content handed to connections.
    pub delivered: u64,
    /// Read from origins.
    pub read: u64,
    /// Delivered bytes that needed no read.
    pub avoided: u64,
    /// Sent to other servers of the cluster.
    #[serde(default)]
    pub sent: u64,
    /// Received from other servers of the cluster.
    #[serde(default)]
    pub received: u64,
}

/// The bytes of a dataset since the server first ran with its state directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DatasetBytes {
    /// Content handed to connections.
    pub delivered: u64,
    /// Read from origins: content, tables and probes.
    pub read: u64,
    /// Delivered bytes that needed no read. Never falls.
    pub avoided: u64,
}

/// The time in which at least one reply of a job waited. Pure: the caller passes `now`.
#[derive(Debug, Default)]
struct WaitClock {
    waiting: u32,
    since: Option<Instant>,
    total: Duration,
}

impl WaitClock {
    fn begin(&mut self, now: Instant) {
        self.waiting += 1;
        self.since.get_or_insert(now);
    }

    fn end(&mut self, now: Instant) {
        self.waiting = self.waiting.saturating_sub(1);
        if self.waiting == 0 {
            self.total = self.total_at(now);
            self.since = None;
        }
    }

    fn total_at(&self, now: Instant) -> Duration {
        self.total + self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }
}

/// What one job's reads of one dataset cost.
#[derive(Debug)]
pub struct JobCosts {
    /// The job's label in metrics.
    pub label: Arc<str>,
    content: Arc<AtomicU64>,
    tables: Arc<AtomicU64>,
    waits: Mutex<WaitClock>,
    /// How long the job's reads waited at each gate.
    gates: Waits,
    balance: Arc<Balance>,
}

impl RecordWait for JobCosts {
    fn record_wait(&self, gate: Gate, waited: Duration) {
        self.gates.record_wait(gate, waited);
    }
}

impl JobCosts {
    fn new(label: Arc<str>, balance: Arc<Balance>) -> Self {
        let (content, tables, waits, gates) = Default::default();
        JobCosts { label, content, tables, waits, gates, balance }
    }

    /// Returns the meter for reads of content.
    #[must_use]
    pub fn content_meter(&self) -> Meter {
        Meter::new([Arc::clone(&self.content), Arc::clone(&self.balance.read)])
    }

    /// Returns the meter for reads of tables and for probes.
    #[must_use]
    pub fn tables_meter(&self) -> Meter {
        Meter::new([Arc::clone(&self.tables), Arc::clone(&self.balance.read)])
    }

    /// Counts `n` delivered bytes of the dataset.
    pub fn deliver(&self, n: u64) {
        self.balance.deliver(n);
    }

    /// Counts `n` bytes that were sent to another server of the cluster.
    pub fn send(&self, n: u64) {
        self.balance.sent.fetch_add(n, Relaxed);
        self.balance.avoid();
    }

    /// Counts `n` bytes that another server of the cluster sent.
    pub fn receive(&self, n: u64) {
        self.balance.received.fetch_add(n, Relaxed);
    }

    /// Returns how long the job's reads waited at each gate, the longest wait first.
    #[must_use]
    pub fn gates(&self) -> Vec<(Gate, Duration)> {
        self.gates.longest_first()
    }

    /// Records that a reply of the job waits, until the guard is dropped.
    #[must_use]
    pub fn wait(self: &Arc<Self>) -> Waiting {
        self.waits.lock().begin(Instant::now());
        Waiting(Arc::clone(self))
    }

    fn take_over(&self, other: &JobCosts) {
        for (a, b) in [(&self.content, &other.content), (&self.tables, &other.tables)] {
            a.fetch_add(b.load(Relaxed), Relaxed);
        }
        self.waits.lock().total += other.waits.lock().total;
    }
}

/// A reply that waits for bytes.
#[derive(Debug)]
pub struct Waiting(Arc<JobCosts>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waits.lock().end(Instant::now());
    }
}

/// The job of costs, and the dataset that it reads.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CostsOf {
    /// The domain of the dataset.
    pub domain: Domain,
    /// The tenant of the job.
    pub tenant: Tenant,
    pub job: JobName,
    pub dataset: DatasetName,
}

/// One row of the costs.
#[derive(Debug, Clone)]
pub struct CostRow {
    /// The job and the dataset.
    pub of: CostsOf,
    /// The job's label in metrics.
    pub label: Arc<str>,
    /// Content that was read from origins, in bytes.
    pub content: u64,
    /// Tables and probes that were read from origins, in bytes.
    pub tables: u64,
    /// The time in which at least one reply of the job waited.
    pub stalled: Duration,
}

/// The costs of all jobs.
#[derive(Debug, Default)]
pub struct Costs {
    jobs: Mutex<BTreeMap<CostsOf, Arc<JobCosts>>>,
    balances: Mutex<BTreeMap<(Domain, DatasetName), Arc<Balance>>>,
    /// The requests to origins before the server's latest start.
    requests_before: Mutex<BTreeMap<(Domain, DatasetName), ServiceSums>>,
}

impl Costs {
    /// Returns the costs of a job's reads of a dataset; `label` is the job's label in metrics.
    #[must_use]
    pub fn of(&self, of: CostsOf, label: &Arc<str>) -> Arc<JobCosts> {
        let mut jobs = self.jobs.lock();
        if let Some(costs) = jobs.get(&of) {
            return Arc::clone(costs);
        }
        let key = (of.domain.clone(), of.dataset.clone());
        let balance = Arc::clone(self.balances.lock().entry(key).or_default());
        Arc::clone(jobs.entry(of).or_insert(Arc::new(JobCosts::new(Arc::clone(label), balance))))
    }

    /// Returns the costs of a job's reads of a dataset, if it has read some.
    #[must_use]
    pub fn find(&self, of: &CostsOf) -> Option<Arc<JobCosts>> {
        self.jobs.lock().get(of).cloned()
    }

    /// Returns the costs that belong to no job of a person: `word` is [`NO_JOB`], [`WARMUP`] or [`PEERS`].
    ///
    /// # Panics
    /// For another word that is not a valid name.
    #[must_use]
    pub fn of_server(
        &self,
        (domain, tenant): (&Domain, &Tenant),
        dataset: &DatasetName,
        word: &'static str,
    ) -> Arc<JobCosts> {
        let job = JobName::new(word).expect("the words are valid names");
        let (domain, tenant, dataset) = (domain.clone(), tenant.clone(), dataset.clone());
        self.of(CostsOf { domain, tenant, job, dataset }, &word.into())
    }

    /// Returns all rows, in order.
    #[must_use]
    pub fn rows(&self) -> Vec<CostRow> {
        let now = Instant::now();
        let row = |(of, costs): (&CostsOf, &Arc<JobCosts>)| CostRow {
            of: of.clone(),
            label: Arc::clone(&costs.label),
            content: costs.content.load(Relaxed),
            tables: costs.tables.load(Relaxed),
            stalled: costs.waits.lock().total_at(now),
        };
        self.jobs.lock().iter().map(row).collect()
    }

    /// Returns the bytes of each dataset.
    #[must_use]
    pub fn datasets(&self) -> BTreeMap<(Domain, DatasetName), DatasetBytes> {
        self.balances.lock().iter().map(|(of, b)| (of.clone(), b.bytes())).collect()
    }

    /// Returns what was avoided of each dataset since the server's latest start. Metrics count from there: a
    /// counter that goes on after a restart, and lost its last minute, would look like one that began anew.
    #[must_use]
    pub fn avoided_since_start(&self) -> BTreeMap<(Domain, DatasetName), u64> {
        let since = |b: &Balance| b.avoided.load(Relaxed).saturating_sub(b.avoided_before.load(Relaxed));
        self.balances.lock().iter().map(|(of, b)| (of.clone(), since(b))).collect()
    }

    /// Returns all counters of each dataset.
    #[must_use]
    pub fn saved(&self) -> BTreeMap<(Domain, DatasetName), SavedBytes> {
        self.balances.lock().iter().map(|(of, b)| (of.clone(), b.saved())).collect()
    }

    /// Adds the counters of a dataset from before the server's latest start.
    pub fn restore(&self, of: (Domain, DatasetName), bytes: SavedBytes, requests: ServiceSums) {
        self.balances.lock().entry(of.clone()).or_default().add(bytes);
        if requests.bytes > 0 {
            self.requests_before.lock().insert(of, requests);
        }
    }

    /// Returns the requests to the origins of each dataset before the server's latest start.
    #[must_use]
    pub fn requests_before(&self) -> BTreeMap<(Domain, DatasetName), ServiceSums> {
        self.requests_before.lock().clone()
    }

    /// Moves the costs of jobs that are no longer live to the job `expired`.
    pub fn fold(&self, expired: &JobName, is_live: impl Fn(&Tenant, &JobName) -> bool) {
        let mut jobs = self.jobs.lock();
        let kept = |job: &JobName| job == expired || [NO_JOB, WARMUP, PEERS].contains(&job.as_str());
        let over: Vec<_> = jobs
            .extract_if(.., |of, costs| {
                // A request still holds the costs and will add to them: a later call moves them.
                !kept(&of.job) && !is_live(&of.tenant, &of.job) && Arc::strong_count(costs) == 1
            })
            .collect();
        for (of, costs) in over {
            let of = CostsOf { job: expired.clone(), ..of };
            let new = || Arc::new(JobCosts::new(expired.as_str().into(), Arc::clone(&costs.balance)));
            jobs.entry(of).or_insert_with(new).take_over(&costs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_of_a_cluster_avoid_a_byte_once() {
        // The owner reads 10 bytes and sends them to two servers, each of which delivers them once.
        let (owner, others) = (Balance::default(), [Balance::default(), Balance::default()]);
        owner.read.fetch_add(10, Relaxed);
        for other in &others {
            owner.sent.fetch_add(10, Relaxed);
            owner.avoid();
            other.received.fetch_add(10, Relaxed);
            other.deliver(10);
        }
        assert_eq!(others.each_ref().map(|b| b.bytes().avoided), [0, 0]);
        assert_eq!(owner.bytes(), DatasetBytes { delivered: 0, read: 10, avoided: 10 });
    }

    #[test]
    fn what_was_read_before_it_is_delivered_avoids_nothing() {
        let balance = Balance::default();
        let read = |n| balance.read.fetch_add(n, Relaxed);
        // A chunk of 100 bytes is fetched, and its files are delivered one by one.
        read(100);
        (0..10).for_each(|_| balance.deliver(10));
        assert_eq!(balance.bytes(), DatasetBytes { delivered: 100, read: 100, avoided: 0 });
        // Another job reads the same files.
        balance.deliver(100);
        assert_eq!(balance.bytes().avoided, 100);
        // What is fetched and never delivered does not take back what was avoided.
        read(40);
        balance.deliver(30);
        assert_eq!(balance.bytes(), DatasetBytes { delivered: 230, read: 140, avoided: 100 });
        balance.deliver(20);
        assert_eq!(balance.bytes().avoided, 110, "10 bytes were due, and 10 more were avoided");
    }

    #[test]
    fn replies_that_wait_at_once_wait_once() {
        let (begin, mut clock) = (Instant::now(), WaitClock::default());
        let at = |s| begin + Duration::from_secs(s);
        clock.begin(at(0));
        clock.begin(at(1));
        clock.end(at(3));
        assert_eq!(clock.total_at(at(4)), Duration::from_secs(4), "it still waits");
        clock.end(at(5));
        assert_eq!(clock.total_at(at(9)), Duration::from_secs(5));
        clock.begin(at(10));
        clock.end(at(11));
        assert_eq!(clock.total_at(at(20)), Duration::from_secs(6));
    }

    #[test]
    fn costs_of_expired_jobs_stay_in_the_sums() {
        let costs = Costs::default();
        let (domain, tenant) = (Domain::default_domain(), Tenant::default_tenant());
        let name = |s: &str| JobName::new(s).expect("name");
        let dataset = DatasetName::new("d").expect("name");
        for job in ["a", "b"] {
            let of = CostsOf {
                domain: domain.clone(),
                tenant: tenant.clone(),
                job: name(job),
                dataset: dataset.clone(),
            };
            costs.of(of, &job.into()).content.fetch_add(7, Relaxed);
        }
        let of_warmup = costs.of_server((&domain, &tenant), &dataset, WARMUP);
        of_warmup.content.fetch_add(1, Relaxed);
        drop(of_warmup);
        costs.fold(&name("expired"), |_, job| job.as_str() == "b");
        let rows: Vec<_> = costs.rows().iter().map(|r| (r.label.to_string(), r.content)).collect();
        assert_eq!(rows, [("b".to_owned(), 7), ("expired".to_owned(), 7), ("warmup".to_owned(), 1)]);
    }
}
