//! All seals: starts them, remembers the last one of each dataset, and begins those that cost nothing.

use super::{FailedRefresh, known::KnownShares, unix_ns};
use crate::{
    data::versions::{Reader, VersionError, Versions},
    tenancy::state::{RegistrationHandle, Registrations},
};
use fletch_api::{Draft, Problem, RunState, Sealing};
use fletch_core::{DatasetName, Domain, Root, TagName};
use fletch_indexer::run::Counters;
use fletch_origin::Origins;

use parking_lot::Mutex;
use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

/// The most seals that run at once.
const RUNNING_MAX: usize = 2;
/// The most seals that run or wait.
const QUEUED_MAX: usize = 64;
/// The most datasets whose last seal is remembered.
const KNOWN_MAX: usize = 1024;
/// How long after a failed seal the server does not begin one by itself.
const RETRY_AFTER: Duration = Duration::from_secs(3600);

/// What seals use of the server.
pub struct SealContext {
    /// The open versions.
    pub versions: Arc<Versions>,
    /// The registered datasets.
    pub registrations: Arc<Registrations>,
    /// Where objects are read and tables written.
    pub origins: Origins,
    /// The directory for journals and temporary tables.
    pub dir: PathBuf,
    /// The most objects of one seal that are read at once.
    pub parallel: usize,
}

/// Too many seals run or wait.
#[derive(Debug, thiserror::Error)]
#[error("{QUEUED_MAX} drafts are being sealed or wait for it, which is the limit")]
pub struct TooManySeals;

/// One seal.
pub(super) struct SealRecord {
    pub(super) draft: Root,
    pub(super) entries: u64,
    pub(super) bytes: u64,
    pub(super) started_ns: u64,
    pub(super) counters: Arc<Counters>,
    pub(super) ended: Mutex<Option<SealEnd>>,
}

/// How a seal ended.
pub(super) struct SealEnd {
    pub(super) at: Instant,
    pub(super) at_ns: u64,
    pub(super) state: RunState,
    pub(super) root: Option<Root>,
    pub(super) error: Option<Problem>,
}

impl SealRecord {
    fn is_running(&self) -> bool {
        self.ended.lock().is_none()
    }

    fn view(&self, dataset: &DatasetName) -> Sealing {
        let (ended, counters) = (self.ended.lock(), &self.counters);
        let (state, ended_ns, root, error) = match &*ended {
            Some(end) => (end.state, Some(end.at_ns), end.root, end.error.clone()),
            None => (RunState::Running, None, None, None),
        };
        Sealing {
            dataset: dataset.clone(),
            draft: self.draft,
            state,
            entries: self.entries,
            bytes: self.bytes,
            entries_done: counters.entries.load(Relaxed),
            bytes_known: counters.bytes_reused.load(Relaxed),
            bytes_read: counters.bytes_read.load(Relaxed),
            started_ns: self.started_ns,
            ended_ns,
            root,
            error,
        }
    }
}

/// Totals of all seals, for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SealStats {
    /// Seals that run or wait.
    pub running: u64,
    /// Seals that made a version.
    pub done: u64,
    /// Seals that objects blocked.
    pub blocked: u64,
    /// Seals that failed.
    pub failed: u64,
    /// Bytes that were read for seals.
    pub bytes_read: u64,
}

/// All seals.
pub struct Seals {
    pub(super) context: Arc<SealContext>,
    pub(super) all: Mutex<HashMap<(Domain, DatasetName), Arc<SealRecord>>>,
    pub(super) shares: KnownShares,
    pub(super) permits: Semaphore,
    pub(super) tasks: TaskTracker,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) ended: [AtomicU64; 3],
    pub(super) bytes_read: AtomicU64,
}

impl Seals {
    /// Creates the room, without seals. Their work runs on `tasks`.
    #[must_use]
    pub fn new(context: Arc<SealContext>, tasks: TaskTracker) -> Arc<Self> {
        Arc::new(Seals {
            context,
            all: Mutex::default(),
            shares: KnownShares::default(),
            permits: Semaphore::new(RUNNING_MAX),
            tasks,
            stop: Arc::default(),
            ended: Default::default(),
            bytes_read: AtomicU64::new(0),
        })
    }

    /// Begins to seal the draft that the tag `latest` of a dataset names, or returns the seal that runs. If
    /// the latest version is no draft, the seal is done.
    ///
    /// # Errors
    /// Those of the tables, and [`SealError::TooMany`].
    pub async fn start(self: &Arc<Self>, entry: &Arc<RegistrationHandle>) -> Result<Sealing, SealError> {
        let source = self.context.versions.resolve_tag(entry, &TagName::latest()).await?;
        let manifest = source.version.manifest();
        let dataset = &entry.dataset.name;
        let key = (entry.domain.clone(), dataset.clone());
        let new = SealRecord {
            draft: source.version.root(),
            entries: manifest.entries,
            bytes: manifest.shown().bytes,
            started_ns: unix_ns(),
            counters: Arc::default(),
            ended: Mutex::new(None),
        };
        if !source.is_draft() {
            let (at, at_ns, state, root) = (Instant::now(), new.started_ns, RunState::Done, Some(new.draft));
            new.counters.entries.store(new.entries, Relaxed);
            *new.ended.lock() = Some(SealEnd { at, at_ns, state, root, error: None });
            return Ok(new.view(dataset));
        }
        let reader = Reader { domain: &entry.domain, tenant: &entry.tenant, dataset: Some(dataset) };
        let sources = self.context.versions.sources(reader, source.version.root()).await?;
        let record = {
            let mut all = self.all.lock();
            if let Some(running) = all.get(&key).filter(|record| record.is_running()) {
                return Ok(running.view(dataset));
            }
            if all.values().filter(|record| record.is_running()).count() >= QUEUED_MAX {
                return Err(SealError::TooMany(TooManySeals));
            }
            if all.len() >= KNOWN_MAX {
                all.retain(|_, record| record.is_running());
            }
            let record = Arc::new(new);
            all.insert(key, Arc::clone(&record));
            record
        };
        let view = record.view(dataset);
        let (this, entry) = (Arc::clone(self), Arc::clone(entry));
        self.tasks.spawn(async move { this.run(&record, &entry, sources).await });
        Ok(view)
    }

    /// Returns the last seal of a dataset, if there was one since the start.
    #[must_use]
    pub fn get(&self, domain: &Domain, dataset: &DatasetName) -> Option<Sealing> {
        let record = self.all.lock().get(&(domain.clone(), dataset.clone())).cloned();
        record.map(|record| record.view(dataset))
    }

    /// Returns the registered datasets whose last seal failed, or was blocked.
    #[must_use]
    pub fn failed(&self) -> Vec<FailedRefresh> {
        let all = self.all.lock();
        let failed = all.iter().filter_map(|((domain, dataset), record)| {
            let problem = record.ended.lock().as_ref()?.error.clone()?;
            self.context.registrations.get(domain, dataset)?;
            Some(FailedRefresh { domain: domain.clone(), dataset: dataset.clone(), problem })
        });
        failed.collect()
    }

    /// Forgets a failed seal of a draft in whose place the dataset has another version, whoever made it.
    pub fn forget_failed(&self, domain: &Domain, dataset: &DatasetName, latest: Root) {
        let is_over = |record: &SealRecord| {
            record.draft != latest && record.ended.lock().as_ref().is_some_and(|end| end.error.is_some())
        };
        self.all.lock().retain(|(d, n), record| d != domain || n != dataset || !is_over(record));
    }

    /// Returns the drafts of a domain that are in use, in the order of the names of their datasets.
    #[must_use]
    pub fn drafts(&self, domain: &Domain) -> Vec<Draft> {
        self.shares.of(domain)
    }

    /// Returns the bytes of the drafts in use that are known, and those that are not.
    #[must_use]
    pub fn known_bytes(&self) -> (u64, u64) {
        self.shares.bytes()
    }

    /// Counts what is known of each draft in use, and seals those of which everything is known. Call it every
    /// few seconds.
    pub async fn tick(self: &Arc<Self>) {
        for (entry, draft) in self.count_known().await {
            let key = (entry.domain.clone(), entry.dataset.name.clone());
            let is_due = match self.all.lock().get(&key) {
                Some(record) if record.draft == draft => {
                    let ended = record.ended.lock();
                    ended.as_ref().is_some_and(|end| end.at.elapsed() >= RETRY_AFTER)
                }
                Some(record) => !record.is_running(),
                None => true,
            };
            if !is_due {
                continue;
            }
            let dataset = &entry.dataset.name;
            match self.start(&entry).await {
                Ok(seal) if seal.state == RunState::Done => {}
                Ok(_) => tracing::info!(%dataset, %draft, "every byte of a draft is known: it is sealed"),
                Err(e) => tracing::warn!(%dataset, %draft, error = %e, "a draft cannot be sealed"),
            }
        }
    }

    /// Ends all seals, because the server stops. Their journals stay.
    pub fn stop(&self) {
        self.stop.store(true, Relaxed);
        self.permits.close();
    }

    /// Returns the totals.
    #[must_use]
    pub fn stats(&self) -> SealStats {
        let running = self.all.lock().values().filter(|record| record.is_running()).count() as u64;
        let [done, blocked, failed] = self.ended.each_ref().map(|count| count.load(Relaxed));
        SealStats { running, done, blocked, failed, bytes_read: self.bytes_read.load(Relaxed) }
    }
}

/// Why a seal does not begin.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    /// The draft cannot be opened.
    #[error(transparent)]
    Version(#[from] VersionError),
    /// See [`TooManySeals`].
    #[error(transparent)]
    TooMany(TooManySeals),
}
