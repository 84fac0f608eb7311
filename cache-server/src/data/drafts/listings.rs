//! Lists datasets that were registered by their URIs alone, and writes the tables of their drafts.

use super::{FailedRefresh, RunPlaces, index_on_a_thread, problem_of, seals::SealContext, unix_ns};
use crate::tenancy::state::RegistrationHandle;
use fletch_api::{Code, Listing, Problem, RunState};
use fletch_core::{
    DatasetName, Domain, Root, TagName,
    manifest::{KeyRule, SampleRule},
};
use fletch_indexer::{
    failure::Failure,
    progress::Mode,
    run::{
        Counters,
        options::{OnFault, RunOptions},
        renewed::RenewedPins,
    },
    source::walk::Symlinks,
};
use parking_lot::Mutex;
use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

/// The most listings that run at once.
const RUNNING_MAX: usize = 2;
/// The most listings that run or wait.
const QUEUED_MAX: usize = 64;
/// The most datasets whose last listing is remembered.
const KNOWN_MAX: usize = 1024;

/// Too many listings run or wait.
#[derive(Debug, thiserror::Error)]
#[error("{QUEUED_MAX} datasets are being listed or wait for it, which is the limit")]
pub struct TooManyListings;

/// One listing.
struct ListingRecord {
    started_ns: u64,
    counters: Arc<Counters>,
    ended: Mutex<Option<ListingEnd>>,
}

struct ListingEnd {
    at_ns: u64,
    made: Result<Root, Problem>,
}

impl ListingRecord {
    fn is_running(&self) -> bool {
        self.ended.lock().is_none()
    }

    fn view(&self, dataset: &DatasetName) -> Listing {
        let ended = self.ended.lock();
        let (state, ended_ns, root, error) = match &*ended {
            None => (RunState::Running, None, None, None),
            Some(ListingEnd { at_ns, made: Ok(root) }) => (RunState::Done, Some(*at_ns), Some(*root), None),
            Some(ListingEnd { at_ns, made: Err(e) }) => {
                (RunState::Failed, Some(*at_ns), None, Some(e.clone()))
            }
        };
        let names = self.counters.entries.load(Relaxed);
        let (dataset, started_ns) = (dataset.clone(), self.started_ns);
        Listing { dataset, state, names, started_ns, ended_ns, root, error }
    }
}

/// All listings.
pub struct Listings {
    context: Arc<SealContext>,
    all: Mutex<HashMap<(Domain, DatasetName), Arc<ListingRecord>>>,
    permits: Semaphore,
    tasks: TaskTracker,
    stop: Arc<AtomicBool>,
}

impl Listings {
    /// Creates the room, without listings. Their work runs on `tasks`.
    #[must_use]
    pub fn new(context: Arc<SealContext>, tasks: TaskTracker) -> Arc<Self> {
        let (all, permits, stop) = (Mutex::default(), Semaphore::new(RUNNING_MAX), Arc::default());
        Arc::new(Listings { context, all, permits, tasks, stop })
    }

    /// Begins to list a registered dataset, or returns the listing that runs.
    ///
    /// # Errors
    /// [`TooManyListings`].
    pub fn start(self: &Arc<Self>, entry: &Arc<RegistrationHandle>) -> Result<Listing, TooManyListings> {
        let dataset = &entry.dataset.name;
        let key = (entry.domain.clone(), dataset.clone());
        let mut all = self.all.lock();
        if let Some(running) = all.get(&key).filter(|record| record.is_running()) {
            return Ok(running.view(dataset));
        }
        if all.values().filter(|record| record.is_running()).count() >= QUEUED_MAX {
            return Err(TooManyListings);
        }
        if all.len() >= KNOWN_MAX {
            all.retain(|_, record| record.is_running());
        }
        let record = Arc::new(ListingRecord {
            started_ns: unix_ns(),
            counters: Arc::default(),
            ended: Mutex::new(None),
        });
        all.insert(key, Arc::clone(&record));
        let view = record.view(dataset);
        drop(all);
        let (this, entry) = (Arc::clone(self), Arc::clone(entry));
        self.tasks.spawn(async move {
            let dataset = &entry.dataset.name;
            let made = this.list(&record, &entry).await;
            match &made {
                Ok(root) => tracing::info!(%dataset, draft = %root, "a dataset was listed"),
                Err(e) => tracing::warn!(%dataset, error = %e.detail, "a dataset was not listed"),
            }
            *record.ended.lock() = Some(ListingEnd { at_ns: unix_ns(), made });
        });
        Ok(view)
    }

    /// Returns the last listing of a dataset, if there was one since the start.
    #[must_use]
    pub fn get(&self, domain: &Domain, dataset: &DatasetName) -> Option<Listing> {
        let record = self.all.lock().get(&(domain.clone(), dataset.clone())).cloned();
        record.map(|record| record.view(dataset))
    }

    /// Returns the registered datasets whose last listing failed.
    #[must_use]
    pub fn failed(&self) -> Vec<FailedRefresh> {
        let all = self.all.lock();
        let failed = all.iter().filter_map(|((domain, dataset), record)| {
            let problem = record.ended.lock().as_ref()?.made.as_ref().err()?.clone();
            self.context.registrations.get(domain, dataset)?;
            Some(FailedRefresh { domain: domain.clone(), dataset: dataset.clone(), problem })
        });
        failed.collect()
    }

    /// Forgets a failed listing of a dataset that has a version now, whoever made it.
    pub fn forget_failed(&self, domain: &Domain, dataset: &DatasetName) {
        let has_failed =
            |record: &ListingRecord| record.ended.lock().as_ref().is_some_and(|e| e.made.is_err());
        self.all.lock().retain(|(d, n), record| d != domain || n != dataset || !has_failed(record));
    }

    /// Returns the number of listings that run or wait.
    #[must_use]
    pub fn running(&self) -> u64 {
        self.all.lock().values().filter(|record| record.is_running()).count() as u64
    }

    /// Ends all listings, because the server stops.
    pub fn stop(&self) {
        self.stop.store(true, Relaxed);
        self.permits.close();
    }

    async fn list(&self, record: &ListingRecord, entry: &Arc<RegistrationHandle>) -> Result<Root, Problem> {
        let Ok(_permit) = self.permits.acquire().await else {
            return Err(Problem::new(Code::NotReady, "the server stops", "list again after its start"));
        };
        let hint = || {
            let uri = &entry.dataset.uri;
            format!("send the request again; or run `fletch mount {uri} DIR` where its objects can be listed")
        };
        let made = async {
            let (context, counters) = (&self.context, Arc::clone(&record.counters));
            let made =
                index_on_a_thread(context, self.options(entry).await?, Arc::clone(&self.stop), counters)
                    .await;
            let report = made.map_err(|failed| failed.failure)?;
            report.root.parse::<Root>().map_err(|e| Failure::new(e.to_string()))
        };
        made.await.map_err(|failure: Failure| problem_of(failure, hint()))
    }

    async fn options(&self, entry: &Arc<RegistrationHandle>) -> Result<RunOptions, Failure> {
        let places = RunPlaces::of(&self.context, entry).await?;
        Ok(RunOptions {
            uri: places.objects,
            to: places.tables,
            list: None,
            parent: None,
            renewed: RenewedPins::default(),
            learned: None,
            seal: None,
            draft: Some(entry.dataset.uri.clone()),
            tag: Some(TagName::latest()),
            // The shards of a draft are files: nobody has read their members.
            rule: SampleRule::new(KeyRule::File, Vec::new()),
            shard_dirs: BTreeSet::new(),
            allow_empty: false,
            symlinks: Symlinks::Keep,
            one_file_system: false,
            // What cannot be an entry is listed in the manifest.
            on_fault: OnFault::Skip,
            allow_loss: None,
            threads: 1,
            state_dir: places.scratch,
            progress: Mode::None,
        })
    }
}
