//! Jobs that came to this server without their ledgers: what their ranks have said so far.
//!
//! ```text
//! rank 0 ─▶ report ─┐                          all ranks reported
//! rank 1 ─▶ report ─┼─▶ Reclaims, in memory ──────────────────────▶ restored epochs ─▶ ledgers ─▶ served
//! operator ─▶ lost ─┘
//! ```
//! 1. Nothing is restored until the process of every rank has reported, or an operator says that it is gone.
//!    No clock ends the wait for a process. It is in memory only: after a restart the ranks report again.
//! 2. A rank belongs to the process that reported first. Its later report replaces the one before. A process
//!    without a record has its rank only if no process with one reports for as long as a lease lives.
//! 3. (I6) All reports together are bounded.

use super::Record;
use crate::training::epochs::JobError;
use fletch_api::{
    Loader, Reclaim, UnknownRanks,
    reclaim::{RECLAIMED_EPOCHS_MAX, UNKNOWN_MAX},
};
use fletch_core::{
    delivery::{Loss, lease::LeaseError, reclaim::RankRecord, reclaim::loss},
    plan::{RANKS_MAX, World},
};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};

/// The most bytes of all records that wait.
const WAITING_BYTES_MAX: usize = 256 << 20;
/// After this time a job whose ranks are missing is logged, and then as often.
const LOUD_AFTER: Duration = Duration::from_secs(30);

/// What is known of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Knowledge {
    /// All that its process consumed.
    Recorded,
    /// Its process knows nothing of what an earlier one consumed.
    Unserved,
    /// An operator said that its process is gone.
    Gone,
}

/// What a rank's process said.
struct Report {
    /// `None`: an operator said that the process is gone.
    loader: Option<Arc<Loader>>,
    /// By epoch: the record, or `None` if the epoch had not begun.
    epochs: BTreeMap<u64, Option<RankRecord>>,
    knowledge: Knowledge,
    /// What the process knows of earlier losses.
    told: Vec<UnknownRanks>,
    bytes: usize,
}

struct WaitingReports {
    name: String,
    /// The ranks of the declaration.
    declared_ranks: u32,
    since: Instant,
    logged: Option<Instant>,
    reports: BTreeMap<u32, Report>,
}

/// The reports of all jobs that wait.
pub struct Reclaims {
    /// For how long a rank's process with a record is waited for while there is one without.
    lease_ttl: Duration,
    jobs: Mutex<BTreeMap<String, WaitingReports>>,
    /// Held by whoever restores a job.
    pub restoring: tokio::sync::Mutex<()>,
    restored: AtomicU64,
}

/// The records of all ranks of a job.
pub struct AllReports {
    /// By ascending number of the epoch: the records by rank. An epoch without records begins anew, because
    /// no process knew what its rank had consumed.
    pub epochs: Vec<(u64, BTreeMap<u32, RankRecord>)>,
    /// The ranks, batch and tail in which the latest epoch goes on, if one had begun.
    pub world: Option<World>,
    /// The ranks for which nobody knows what they consumed.
    unknown: Vec<u32>,
    /// As [`AllReports::unknown`], of earlier losses of the job's server.
    told: BTreeSet<UnknownRanks>,
}

impl AllReports {
    /// Returns the losses of an epoch, the present one last. `term`: that of this server.
    #[must_use]
    pub fn losses(&self, epoch: u64, records: &BTreeMap<u32, RankRecord>, term: u64) -> Vec<Loss> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(now.as_micros()).unwrap_or(0);
        let earlier = self.told.iter().filter(|of| of.epoch == epoch);
        let earlier = earlier.map(|of| Loss { term: of.term, last_lease: 0, unknown: of.ranks.clone() });
        earlier.chain([loss(records.values(), term, now, self.unknown.clone())]).collect()
    }
}

impl WaitingReports {
    /// Returns the number of ranks of the latest epoch that a record has.
    fn ranks(&self) -> u32 {
        let records = self.reports.values().flat_map(|report| &report.epochs);
        let begun = records.filter_map(|(epoch, record)| Some((epoch, record.as_ref()?)));
        let latest = begun.max_by_key(|(epoch, _)| **epoch);
        latest.map_or(self.declared_ranks, |(_, record)| record.world().ranks)
    }

    fn missing(&self, lease_ttl: Duration) -> Vec<u32> {
        let is_late = self.since.elapsed() > lease_ttl;
        let is_there = |rank: &u32| match self.reports.get(rank) {
            Some(report) => report.knowledge != Knowledge::Unserved || is_late,
            None => false,
        };
        (0..self.ranks()).filter(|rank| !is_there(rank)).collect()
    }
}

/// Reads the records of a request.
fn parse(ask: &Reclaim) -> Result<BTreeMap<u64, Option<RankRecord>>, JobError> {
    let bad = |why: String| JobError::BadRecord(why);
    if ask.epochs.len() > RECLAIMED_EPOCHS_MAX {
        return Err(bad(format!("it has more than {RECLAIMED_EPOCHS_MAX} epochs")));
    }
    let read = |record: &str| -> Result<Option<RankRecord>, JobError> {
        if record.is_empty() {
            return Ok(None);
        }
        let bytes = STANDARD.decode(record).map_err(|e| bad(e.to_string()))?;
        RankRecord::read(&bytes, ask.rank).map(Some).map_err(|e| bad(e.to_string()))
    };
    let mut epochs = BTreeMap::new();
    for of in &ask.epochs {
        let record = read(&of.record)?;
        if let Some(other) = record.as_ref().filter(|record| record.header.epoch != of.epoch) {
            return Err(bad(format!("the record of epoch {} is of epoch {}", of.epoch, other.header.epoch)));
        }
        epochs.insert(of.epoch, record);
    }
    Ok(epochs)
}

impl Reclaims {
    /// Returns the reports of no job. `lease_ttl`: after this time without a sign of life a process loses its
    /// rank to another one.
    #[must_use]
    pub fn new(lease_ttl: Duration) -> Self {
        Reclaims {
            lease_ttl,
            jobs: Mutex::default(),
            restoring: tokio::sync::Mutex::default(),
            restored: AtomicU64::new(0),
        }
    }

    /// Notes what a rank's process says. Returns the ranks that are missing.
    ///
    /// # Errors
    /// [`JobError::BadRecord`], [`JobError::RankInUse`], [`JobError::BadLoader`], [`JobError::TooLarge`].
    pub fn report(&self, id: &str, record: &Record, ask: &Reclaim) -> Result<Vec<u32>, JobError> {
        let epochs = parse(ask)?;
        if let Some(loader) = &ask.loader {
            loader.check().map_err(JobError::BadLoader)?;
        }
        // In memory an entry takes four bytes, and in the request often one.
        let entries = |record: &RankRecord| {
            record.acked.len() + record.held.iter().map(|held| held.entries.len()).sum::<usize>()
        };
        let parsed: usize = epochs.values().flatten().map(entries).sum();
        let told: usize = ask.unknown.iter().map(|of| of.ranks.len()).sum();
        let bytes = 4 * (parsed + told) + ask.epochs.iter().map(|of| of.record.len()).sum::<usize>();
        if ask.unknown.len() > UNKNOWN_MAX || ask.unknown.iter().any(|of| of.ranks.len() > RANKS_MAX as usize)
        {
            return Err(JobError::BadRecord(format!("it tells of more than {UNKNOWN_MAX} losses")));
        }
        let (loader, told) = (ask.loader.clone().map(Arc::new), ask.unknown.clone());
        let knowledge = if ask.unserved { Knowledge::Unserved } else { Knowledge::Recorded };
        let report = Report { loader, epochs, knowledge, told, bytes };
        self.note(id, record, ask.rank, report)
    }

    /// Notes that the process of a rank is gone. Returns the ranks that are missing.
    ///
    /// # Errors
    /// As [`Reclaims::report`].
    pub fn lost(&self, id: &str, record: &Record, rank: u32) -> Result<Vec<u32>, JobError> {
        tracing::warn!(
            job = %record.ask.name, rank,
            "an operator gave a rank's process up; what only that process knew is delivered again"
        );
        let gone = Report {
            loader: None,
            epochs: BTreeMap::new(),
            knowledge: Knowledge::Gone,
            told: Vec::new(),
            bytes: 0,
        };
        self.note(id, record, rank, gone)
    }

    fn note(&self, id: &str, record: &Record, rank: u32, report: Report) -> Result<Vec<u32>, JobError> {
        let mut jobs = self.jobs.lock();
        let others =
            jobs.iter().flat_map(|(of, job)| job.reports.iter().map(move |(r, x)| (of, *r, x.bytes)));
        let held: usize = others.filter(|(of, r, _)| (of.as_str(), *r) != (id, rank)).map(|x| x.2).sum();
        if held.saturating_add(report.bytes) > WAITING_BYTES_MAX {
            let why = "the records of jobs that wait for their ranks are at the server's limit; ask again";
            return Err(JobError::TooLarge(why.to_owned()));
        }
        let new = || WaitingReports {
            name: record.ask.name.to_string(),
            declared_ranks: record.ask.world.ranks,
            since: Instant::now(),
            logged: None,
            reports: BTreeMap::new(),
        };
        let job = jobs.entry(id.to_owned()).or_insert_with(new);
        // The declaration may be older than the world of the records.
        let own = report.epochs.values().flatten().map(|record| record.world().ranks).max();
        let ranks = own.unwrap_or(0).max(job.ranks()).max(job.declared_ranks);
        if rank >= ranks {
            return Err(LeaseError::Rank { rank, ranks }.into());
        }
        if let (Some(new), Some(there)) = (&report.loader, job.reports.get(&rank))
            && let Some(by) = there.loader.as_ref().filter(|by| by.id != new.id)
            && (there.knowledge, report.knowledge) != (Knowledge::Unserved, Knowledge::Recorded)
        {
            return Err(JobError::RankInUse { job: job.name.clone(), rank, by: Arc::clone(by) });
        }
        job.reports.insert(rank, report);
        Ok(job.missing(self.lease_ttl))
    }

    /// Returns the ranks that are missing. Empty for a job that does not wait.
    #[must_use]
    pub fn waits_for(&self, id: &str) -> Vec<u32> {
        self.jobs.lock().get(id).map(|job| job.missing(self.lease_ttl)).unwrap_or_default()
    }

    /// Returns the records of all ranks of a job, if none is missing.
    #[must_use]
    pub fn complete(&self, id: &str) -> Option<AllReports> {
        let jobs = self.jobs.lock();
        let job = jobs.get(id).filter(|job| job.missing(self.lease_ttl).is_empty())?;
        let mut by_epoch: BTreeMap<u64, BTreeMap<u32, RankRecord>> = BTreeMap::new();
        for (&rank, report) in &job.reports {
            for (&epoch, record) in &report.epochs {
                if let Some(record) = record {
                    by_epoch.entry(epoch).or_default().insert(rank, record.clone());
                }
            }
        }
        if by_epoch.is_empty() {
            // The epoch begins anew with a ledger that tells of the loss.
            let unserved = job.reports.values().filter(|report| report.knowledge == Knowledge::Unserved);
            let wanted = unserved.filter_map(|report| report.epochs.last_key_value());
            if let Some(epoch) = wanted.map(|(epoch, _)| *epoch).max() {
                by_epoch.insert(epoch, BTreeMap::new());
            }
        }
        let epochs: Vec<_> = by_epoch.into_iter().collect();
        let latest = epochs.last().and_then(|(_, records)| records.values().next());
        let world = latest.map(RankRecord::world);
        let unknown = job.reports.iter().filter(|(_, report)| report.knowledge != Knowledge::Recorded);
        let unknown = unknown.map(|(rank, _)| *rank);
        let told = job.reports.values().flat_map(|report| report.told.iter().cloned());
        Some(AllReports { epochs, world, unknown: unknown.collect(), told: told.collect() })
    }

    /// Forgets what the ranks of a job said, because it contradicts itself: they report again.
    pub fn clear(&self, id: &str) {
        if let Some(job) = self.jobs.lock().get_mut(id) {
            job.reports.clear();
        }
    }

    /// Forgets a job: it is served, or somebody replaced its epochs.
    pub fn forget(&self, id: &str, is_restored: bool) {
        if let Some(job) = self.jobs.lock().remove(id).filter(|_| is_restored) {
            self.restored.fetch_add(1, Relaxed);
            tracing::info!(
                job = %job.name, ranks = job.reports.len(), waited = ?job.since.elapsed(),
                "the ranks of a job whose server is lost have said what they consumed; it goes on here"
            );
        }
    }

    /// Returns how many jobs went on here from what their ranks knew, for metrics.
    #[must_use]
    pub fn restored(&self) -> u64 {
        self.restored.load(Relaxed)
    }

    /// Forgets the jobs that do not wait here any more, and logs those whose ranks are missing for long.
    pub fn tick(&self, waits_here: impl Fn(&str) -> bool) {
        let mut jobs = self.jobs.lock();
        // It was deleted, or another server took it over.
        jobs.retain(|id, _| waits_here(id));
        for job in jobs.values_mut() {
            let since = job.logged.unwrap_or(job.since);
            if since.elapsed() >= LOUD_AFTER {
                job.logged = Some(Instant::now());
                tracing::warn!(
                    job = %job.name, ranks = ?job.missing(self.lease_ttl), waited = ?job.since.elapsed(),
                    "a job whose server is lost waits until these ranks say what they consumed; if their \
                     processes are gone: fletch jobs lost {} --rank R", job.name
                );
            }
        }
    }
}

#[cfg(test)]
mod tests;
