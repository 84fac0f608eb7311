//! The last hour: a ring of samples of what the server counted.

use fletch_api::dashboard::{DashboardHistory, HistorySeries, HistorySource};
use fletch_core::{DatasetName, Domain};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

/// The time between two samples.
pub const SAMPLE_EVERY: Duration = Duration::from_secs(5);
/// The most samples: one hour.
pub const SAMPLES_MAX: usize = 720;
/// The time between two samples of datasets.
const DATASETS_EVERY: Duration = Duration::from_secs(60);
/// The most samples of datasets: one hour.
const DATASET_SAMPLES_MAX: usize = 61;
/// The most datasets of a sample: those that were read most.
const DATASETS_MAX: usize = 64;
/// The most domains of a sample. The numbers of further domains belong to no domain, and to the sum.
const DOMAINS_MAX: usize = 64;

/// What was counted of the datasets of one domain, in bytes since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes sent.
    pub delivered: u64,
    /// Bytes read from origins.
    pub origin: u64,
    /// Bytes sent beyond those that were read.
    pub avoided: u64,
}

impl Totals {
    fn since(self, before: Totals) -> Totals {
        Totals {
            delivered: self.delivered.saturating_sub(before.delivered),
            origin: self.origin.saturating_sub(before.origin),
            avoided: self.avoided.saturating_sub(before.avoided),
        }
    }

    /// Adds the numbers of another dataset.
    pub fn add(&mut self, other: Totals) {
        self.delivered += other.delivered;
        self.origin += other.origin;
        self.avoided += other.avoided;
    }
}

/// What the server counted, since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests answered.
    pub requests: u64,
    /// Requests answered with a status from 500 on.
    pub errors: u64,
    /// Wrong bytes that were found.
    pub corrupt: u64,
    /// Times that an origin asked the server to slow down.
    pub pauses: u64,
    /// Calls to origins that failed because the origin asked the server to slow down.
    pub throttled: u64,
    /// Failed operations on files of the disk tier.
    pub disk_errors: u64,
    /// Damaged chunks on disk.
    pub quarantined: u64,
    /// Acks that came after their lease was gone.
    pub late_acks: u64,
    /// Epochs that their job left unfinished.
    pub abandoned: u64,
    /// Times that an epoch could not be opened because its ledger is damaged.
    pub damaged_epochs: u64,
    /// Bytes that the disk tier evicted.
    pub evicted_bytes: u64,
    /// Bytes that were appended to the disk tier.
    pub put_bytes: u64,
}

impl Counts {
    fn since(self, before: Counts) -> Counts {
        Counts {
            requests: self.requests.saturating_sub(before.requests),
            errors: self.errors.saturating_sub(before.errors),
            corrupt: self.corrupt.saturating_sub(before.corrupt),
            pauses: self.pauses.saturating_sub(before.pauses),
            throttled: self.throttled.saturating_sub(before.throttled),
            disk_errors: self.disk_errors.saturating_sub(before.disk_errors),
            quarantined: self.quarantined.saturating_sub(before.quarantined),
            late_acks: self.late_acks.saturating_sub(before.late_acks),
            abandoned: self.abandoned.saturating_sub(before.abandoned),
            damaged_epochs: self.damaged_epochs.saturating_sub(before.damaged_epochs),
            evicted_bytes: self.evicted_bytes.saturating_sub(before.evicted_bytes),
            put_bytes: self.put_bytes.saturating_sub(before.put_bytes),
        }
    }
}

/// What the server had counted at one time.
#[derive(Debug, Clone, Default)]
pub struct Sample {
    /// The time, in nanoseconds since 1970.
    pub at_ns: u64,
    /// The numbers of all domains together.
    pub all: Totals,
    /// The numbers of each domain.
    pub domains: BTreeMap<Domain, Totals>,
    /// The numbers of the server.
    pub counts: Counts,
}

/// A dataset with its domain.
pub type DatasetOf = (Domain, DatasetName);

/// The samples of the last hour, the oldest first.
#[derive(Debug, Default)]
pub struct History(VecDeque<Sample>, VecDeque<DatasetSample>);

/// What was counted of each dataset at one time.
#[derive(Debug, Default)]
struct DatasetSample {
    at_ns: u64,
    datasets: BTreeMap<DatasetOf, Totals>,
}

impl History {
    /// Adds a sample, and forgets what is older than an hour.
    pub fn push(&mut self, mut sample: Sample) {
        while sample.domains.len() > DOMAINS_MAX {
            sample.domains.pop_last();
        }
        if self.0.len() == SAMPLES_MAX {
            self.0.pop_front();
        }
        self.0.push_back(sample);
    }

    /// Adds what was counted of each dataset, once a minute. Keeps those that were read most.
    pub fn push_datasets(&mut self, at_ns: u64, datasets: BTreeMap<DatasetOf, Totals>) {
        // A sample may come a little early.
        let least = DATASETS_EVERY.saturating_sub(SAMPLE_EVERY / 2);
        let due = self.1.back().is_none_or(|last| {
            Duration::from_nanos(at_ns.saturating_sub(last.at_ns)) >= least || at_ns < last.at_ns
        });
        if !due {
            return;
        }
        let mut most: Vec<_> = datasets.into_iter().collect();
        most.sort_by_key(|(_, totals)| Reverse(totals.origin));
        most.truncate(DATASETS_MAX);
        if self.1.len() == DATASET_SAMPLES_MAX {
            self.1.pop_front();
        }
        self.1.push_back(DatasetSample { at_ns, datasets: most.into_iter().collect() });
    }

    /// Returns what was counted of each dataset in the last hour.
    ///
    /// A dataset that is in no earlier sample was first read in this hour, or was not among those that were
    /// read most. Nobody knows which, so its first sample counts as its beginning.
    #[must_use]
    pub fn datasets_hour(&self) -> BTreeMap<DatasetOf, Totals> {
        let Some(now) = self.1.back() else { return BTreeMap::new() };
        let since = |(of, totals): (&DatasetOf, &Totals)| {
            let first = self.1.iter().find_map(|sample| sample.datasets.get(of)).copied();
            (of.clone(), totals.since(first.unwrap_or(*totals)))
        };
        now.datasets.iter().map(since).collect()
    }

    /// Returns what was counted in the last `window`, and the numbers of all domains in it.
    #[must_use]
    pub fn last(&self, window: Duration) -> (Counts, Totals) {
        let Some(now) = self.0.back() else { return Default::default() };
        let from = now.at_ns.saturating_sub(u64::try_from(window.as_nanos()).unwrap_or(u64::MAX));
        let before = self.0.iter().rev().find(|s| s.at_ns <= from).or(self.0.front());
        let before = before.cloned().unwrap_or_default();
        (now.counts.since(before.counts), now.all.since(before.all))
    }

    /// Returns the hour of one domain, or of the whole server with its errors.
    #[must_use]
    pub fn hour(&self, domain: Option<&Domain>) -> DashboardHistory {
        let totals = |s: &Sample| match domain {
            Some(domain) => s.domains.get(domain).copied().unwrap_or_default(),
            None => s.all,
        };
        let rate = |of: fn(&Totals, &Counts) -> u64| {
            let pairs = self.0.iter().zip(self.0.iter().skip(1));
            let rates = pairs.map(|(a, b)| {
                let seconds = b.at_ns.saturating_sub(a.at_ns) as f64 / 1e9;
                let more = of(&totals(b), &b.counts).saturating_sub(of(&totals(a), &a.counts)) as f64;
                (seconds > 0.0).then(|| more / seconds)
            });
            rates.collect()
        };
        let series = |name: &str, of| HistorySeries { name: name.to_owned(), values: rate(of) };
        let mut all = vec![
            series("delivered", |t, _| t.delivered),
            series("origin", |t, _| t.origin),
            series("avoided", |t, _| t.avoided),
        ];
        if domain.is_none() {
            all.push(series("errors", |_, c| c.errors));
        }
        let times = self.0.iter().skip(1).map(|s| s.at_ns as f64 / 1e9).collect();
        DashboardHistory { source: HistorySource::Memory, times, series: all }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at_s: u64, delivered: u64, errors: u64) -> Sample {
        let (a, b) = (Totals { delivered, ..Totals::default() }, Totals::default());
        let domain = |name: &str| Domain::new(name).expect("name");
        let counts = Counts { errors, requests: at_s, ..Counts::default() };
        let domains = [(domain("a"), a), (domain("b"), b)].into();
        Sample { at_ns: at_s * 1_000_000_000, all: a, domains, counts }
    }

    #[test]
    fn i6_an_hour_is_kept_and_nothing_more() {
        let mut history = History::default();
        (0..10_000).for_each(|i| history.push(sample(i * 5, i * 100, 0)));
        let hour = history.hour(None);
        assert_eq!((hour.times.len(), hour.times[0]), (SAMPLES_MAX - 1, (10_000.0 - 719.0) * 5.0));
        assert!(hour.series.iter().all(|s| s.values.len() == hour.times.len()));
        let mut crowded = sample(0, 0, 0);
        crowded.domains =
            (0..1000).map(|i| (Domain::new(&format!("d{i}")).expect("name"), Totals::default())).collect();
        history.push(crowded);
        assert_eq!(history.0.back().map(|s| s.domains.len()), Some(DOMAINS_MAX));
    }

    #[test]
    fn i6_datasets_have_an_hour_and_nothing_more() {
        let mut history = History::default();
        let of = |i: u64| (Domain::default_domain(), DatasetName::new(&format!("d{i}")).expect("name"));
        let totals = |origin| Totals { origin, ..Totals::default() };
        for at in (0..7200).step_by(5) {
            let datasets = (0..100).map(|i| (of(i), totals(at * i))).collect();
            history.push_datasets(at * 1_000_000_000, datasets);
        }
        assert_eq!(history.1.len(), DATASET_SAMPLES_MAX);
        let hour = history.datasets_hour();
        assert_eq!(hour.len(), DATASETS_MAX);
        assert_eq!(hour[&of(99)], totals(3600 * 99), "the dataset that was read most");
        history.push_datasets(7200 * 1_000_000_000, [(of(500), totals(1 << 40))].into());
        assert_eq!(history.datasets_hour(), [(of(500), totals(0))].into(), "it begins now");
    }

    #[test]
    fn rates_are_of_one_domain_or_of_all() {
        let mut history = History::default();
        for (at_s, delivered, errors) in [(0, 0, 0), (5, 500, 10), (10, 500, 10)] {
            history.push(sample(at_s, delivered, errors));
        }
        let values = |h: &DashboardHistory, name: &str| {
            h.series.iter().find(|s| s.name == name).map(|s| s.values.clone())
        };
        let all = history.hour(None);
        assert_eq!(values(&all, "delivered"), Some(vec![Some(100.0), Some(0.0)]));
        assert_eq!(values(&all, "errors"), Some(vec![Some(2.0), Some(0.0)]));
        let of = |name: &str| history.hour(Some(&Domain::new(name).expect("name")));
        assert_eq!(values(&of("a"), "delivered"), Some(vec![Some(100.0), Some(0.0)]));
        for name in ["b", "unknown"] {
            assert_eq!(values(&of(name), "delivered"), Some(vec![Some(0.0), Some(0.0)]), "{name}");
            assert_eq!(values(&of(name), "errors"), None, "errors are those of the server");
        }
        let (counts, totals) = history.last(Duration::from_secs(5));
        assert_eq!((counts.errors, counts.requests, totals.delivered), (0, 5, 0));
        let (counts, totals) = history.last(Duration::from_secs(3600));
        assert_eq!((counts.errors, totals.delivered), (10, 500));
    }
}
