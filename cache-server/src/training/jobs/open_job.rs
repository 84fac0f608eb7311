//! An open job: its record, and everything that its epochs need.
//!
//! ```text
//! state_dir/jobs/<id>/job.json             the declaration, and what its names resolved to
//!                    /settings.json        what users set, if they set anything
//!                    /epoch-<n>.ledger     one for each remembered epoch
//! ```
//!
//! 1. The record is durable before the declaration is answered. A crash before that may leave a part of it;
//!    the next start logs it and the next declaration replaces it. A durable record is only replaced as a
//!    whole. The same holds for ledgers: no client was told of a ledger that is shorter than its head.
//! 2. A job reads what its names meant when it was declared.

mod loaders;
mod measured;
mod progress;
mod reclaimed;
mod rollback;
mod states;
mod worlds;

use super::{
    loaders::RankLoaders,
    plan::{bucketed_of, check_ledger_size, plan_of},
    record::{Record, RecordSummary},
    settings::StoredSettings,
};
use crate::data::versions::{Source, Sources};
use crate::{
    data::versions::Samples,
    tenancy::tenants::JobCharges,
    training::{
        benefit::JobWindow,
        epochs::{
            Epoch, JobContext, JobError, JobSetup, ReplaySource, Schedule, is_unsynced, replayed_ledger,
            world_of,
        },
        sweep::Sweep,
    },
};
use fletch_api::{
    Epoch as EpochView, EpochState, Job as View, JobSweep, LeaseRequest, OrderKind, Times, Visitation,
    WorldSpec, epochs::ACKS_MAX, jobs::default_seed,
};
use fletch_core::{
    Hash, JobName,
    delivery::{Request, lease::LeaseError},
    manifest::LayoutKind,
    plan::{PlanUnits, Tail, World},
};
use fletch_host::replace::sync_parent;
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{
            AtomicBool,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::Instant,
};
use tokio::{
    sync::{OnceCell, OwnedSemaphorePermit},
    task::spawn_blocking,
};

pub use progress::JobProgress;

/// Most epochs of a job that are remembered.
const EPOCHS_MAX: usize = 16;
/// Units in a block of a strict order by units.
const BLOCK_UNITS: u64 = 64;

/// A declared job in memory.
pub struct OpenJob {
    /// Directory of the job's files.
    dir: PathBuf,
    /// What its epochs share.
    pub setup: Arc<JobSetup>,
    /// Sources of its version, as the access check returned them.
    pub sources: Arc<Sources>,
    /// The version in the job's layout.
    pub source: Arc<Source>,
    /// What users set.
    pub settings: Arc<StoredSettings>,
    /// When it was opened.
    opened: Instant,
    known: Mutex<RecordSummary>,
    epochs: Mutex<BTreeMap<u64, Arc<Epoch>>>,
    /// The processes that read as its ranks. Locked before `epochs`.
    loaders: Mutex<RankLoaders>,
    /// Serializes what opens, begins or replaces epochs.
    opening: Arc<tokio::sync::Mutex<()>>,
    /// Nothing is opened any more: the job was deleted, or is open elsewhere.
    gone: AtomicBool,
    contents: OnceCell<Arc<Vec<Hash>>>,
}

/// Returns the number of the epoch whose ledger has this file name.
pub(super) fn epoch_of_file(name: &str) -> Option<u64> {
    name.strip_prefix("epoch-")?.strip_suffix(".ledger")?.parse().ok()
}

/// Runs work that waits for the disk on a blocking thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, JobError> + Send + 'static,
) -> Result<T, JobError> {
    spawn_blocking(work).await.map_err(|_| JobError::TaskLost)?
}

impl OpenJob {
    /// Opens a job: reads the parts of the tables that its plan needs.
    ///
    /// `permit` covers the long part of the record. It is held until the long part is dropped, even when the
    /// caller goes away, and then returned.
    pub(super) async fn open(
        record: Record,
        permit: Option<OwnedSemaphorePermit>,
        (dir, charges, settings): (PathBuf, Arc<JobCharges>, Arc<StoredSettings>),
        context: &Arc<JobContext>,
        sources: Arc<Sources>,
        source: Arc<Source>,
        (samples, sweep): (Arc<Samples>, Option<Arc<Sweep>>),
    ) -> Result<(Self, Option<OwnedSemaphorePermit>), JobError> {
        let ask = &record.ask;
        let ledger = replayed_ledger(ask)?;
        let told_seed = ledger.as_ref().map(|l| l.header.seed);
        let seed = ask.seed.or(told_seed).unwrap_or_else(|| default_seed(&ask.name));
        let plan = plan_of(ask, seed, record.root, &source, &samples).await?;
        world_of(&ask.world).check()?;
        let most = context.ledger_bytes;
        check_ledger_size(&plan, None, world_of(&ask.world), most)?;
        let bucketed = bucketed_of(ask, &plan, &source, &samples).await?;
        check_ledger_size(&plan, bucketed.as_ref(), world_of(&ask.world), most)?;
        if let Some(ledger) = &ledger {
            check_ledger_size(&plan, bucketed.as_ref(), ledger.header.world, most)
                .map_err(|e| JobError::BadLedger(format!("in the ledger's world {e}")))?;
        }
        let plan_units = PlanUnits::new(&plan, &samples.unit_map)?;
        let packed = source.version.layout_doc().params.kind == LayoutKind::Pack;
        let per_unit = samples.len().div_ceil(samples.unit_map.units().max(1) as u64);
        let block = u32::try_from(BLOCK_UNITS * per_unit).unwrap_or(u32::MAX);
        let strict = OrderKind::Strict;
        let by_units = ledger.as_ref().map_or(ask.order == strict, |l| l.header.order == strict.as_str());
        let exact = sources.with_source(&source, sources.dataset_id());
        let mut setup = JobSetup {
            exact,
            tenant: record.tenant.clone(),
            charges,
            job: ask.name.to_string(),
            root: record.root,
            layout: record.layout,
            hash: bucketed.as_ref().map_or_else(|| plan.hash(), |c| c.buckets.hash(plan.hash())),
            plan,
            bucketed,
            replay: None,
            plan_units,
            block: if packed && by_units { block } else { 0 },
            samples,
            sweep,
            order: ask.order,
            seed,
            visitation: ask.visitation,
            window: JobWindow::default(),
            context: Arc::clone(context),
        };
        let world = world_of(&ask.world);
        let (setup, permit) = blocking(move || {
            // A plan that cannot be ordered is rejected now.
            Schedule::new(&setup, 0, world)?;
            if let Some(ledger) = &ledger {
                let told = ReplaySource::new(&setup, ledger)?;
                told.check(world)?;
                setup.replay = Some(Arc::new(told));
            }
            Ok((setup, permit))
        })
        .await?;
        let opened = OpenJob {
            dir,
            setup: Arc::new(setup),
            sources,
            source,
            settings,
            opened: Instant::now(),
            known: Mutex::new(record.known()),
            epochs: Mutex::default(),
            loaders: Mutex::default(),
            opening: Arc::default(),
            gone: AtomicBool::new(false),
            contents: OnceCell::new(),
        };
        Ok((opened, permit))
    }

    /// Returns the record without its long parts.
    #[must_use]
    pub fn known(&self) -> RecordSummary {
        self.known.lock().clone()
    }

    /// Returns the job's name.
    #[must_use]
    pub fn name(&self) -> JobName {
        self.known.lock().ask.name.clone()
    }

    /// Returns the world of epochs that begin now.
    fn current_world(&self) -> WorldSpec {
        self.known.lock().ask.world
    }

    /// Checks whether a declaration has the same settings as this job.
    ///
    /// # Errors
    /// [`JobError::Differs`].
    pub fn is(&self, asked: &RecordSummary) -> Result<(), JobError> {
        let known = self.known();
        let name = known.ask.name.to_string();
        match known.header_mismatch(asked) {
            Some(what) => Err(JobError::Differs { name, what }),
            None if known.ask.world != asked.ask.world => Err(JobError::Differs { name, what: "world" }),
            None => Ok(()),
        }
    }

    fn path(&self, epoch: u64) -> PathBuf {
        self.dir.join(format!("epoch-{epoch}.ledger"))
    }

    /// Returns the numbers of the epochs that have a ledger, readable or not.
    ///
    /// A ledger that a crash cut off before its first sync does not count: no client was told of it.
    fn epochs_on_disk(&self) -> Result<Vec<u64>, JobError> {
        let failed = |error| JobError::Io { path: self.dir.clone(), error };
        let mut out = Vec::new();
        for file in std::fs::read_dir(&self.dir).map_err(failed)? {
            let name = file.map_err(failed)?.file_name();
            let Some(number) = name.to_str().and_then(epoch_of_file) else { continue };
            // The head of every ledger is at least this long.
            let shortest = Epoch::head(&self.setup, number, World { ranks: 1, batch: 1, tail: Tail::Keep });
            match is_unsynced(&self.path(number), shortest.len()) {
                Ok(true) => {}
                // The epoch was forgotten in the meantime.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Ok(false) | Err(_) => out.push(number),
            }
        }
        out.sort_unstable();
        Ok(out)
    }

    fn loaded(&self, epoch: u64) -> Option<Arc<Epoch>> {
        self.epochs.lock().get(&epoch).filter(|e| e.ledger().works()).cloned()
    }

    /// Returns an epoch that has begun.
    ///
    /// # Errors
    /// [`JobError::NoEpoch`], and what its ledger says.
    pub async fn epoch(self: &Arc<Self>, number: u64) -> Result<Arc<Epoch>, JobError> {
        self.find(number, false).await
    }

    /// Returns the epoch of a lease request, and begins it if necessary.
    ///
    /// A new epoch ends the epochs before it. A request that a new epoch would reject begins none.
    ///
    /// # Errors
    /// As [`Epoch::lease`], and what its ledger says.
    pub async fn epoch_for_lease(
        self: &Arc<Self>,
        number: u64,
        ask: &LeaseRequest,
    ) -> Result<Arc<Epoch>, JobError> {
        match self.epoch(number).await {
            Err(JobError::NoEpoch(_)) => {}
            there => return there,
        }
        Epoch::check_want(ask)?;
        let ranks = self.current_world().ranks;
        if ask.rank >= ranks {
            return Err(LeaseError::Rank { rank: ask.rank, ranks }.into());
        }
        if ask.renew.len().max(ask.release.len()) > ACKS_MAX {
            return Err(JobError::TooLarge(format!(
                "more than {ACKS_MAX} renewals or releases in one request"
            )));
        }
        if let Some(ack) = ask.acks.first() {
            return Err(LeaseError::Gone(ack.lease).into());
        }
        self.setup.check_state_bytes(1)?;
        self.find(number, true).await
    }

    /// Returns the epoch of a commit request, and begins it if necessary.
    ///
    /// # Errors
    /// [`JobError::NoCommits`], and what its ledger says.
    pub async fn epoch_for_commit(self: &Arc<Self>, number: u64) -> Result<Arc<Epoch>, JobError> {
        if self.setup.visitation != Visitation::Checkpoint {
            return Err(JobError::NoCommits);
        }
        if let Err(JobError::NoEpoch(_)) = self.epoch(number).await {
            self.setup.check_state_bytes(1)?;
        }
        self.find(number, true).await
    }

    /// Returns the epoch of a request for its state. Begins the epoch if it is the job's first, or if the one
    /// before it is finished: so a checkpoint can be saved before the first step.
    ///
    /// # Errors
    /// [`JobError::NoEpoch`], and what its ledger says.
    pub async fn epoch_for_state(self: &Arc<Self>, number: u64) -> Result<Arc<Epoch>, JobError> {
        let absent = match self.epoch(number).await {
            Err(absent @ JobError::NoEpoch(_)) => absent,
            there => return there,
        };
        let this = Arc::clone(self);
        let follows = match blocking(move || this.epochs_on_disk()).await?.last() {
            None => number == 0,
            Some(&last) => {
                last.checked_add(1) == Some(number)
                    && self.epoch(last).await?.view().state == EpochState::Finished
            }
        };
        if !follows {
            return Err(absent);
        }
        self.setup.check_state_bytes(1)?;
        self.find(number, true).await
    }

    async fn find(self: &Arc<Self>, number: u64, begin: bool) -> Result<Arc<Epoch>, JobError> {
        if let Some(epoch) = self.loaded(number) {
            return Ok(epoch);
        }
        let this = Arc::clone(self);
        self.exclusively(async move { this.epoch_exclusively(number, begin).await }).await
    }

    /// Runs work that opens, begins or replaces epochs, one at a time. It goes on when the caller goes away,
    /// so that two tasks never write one file.
    async fn exclusively<T: Send + 'static>(
        &self,
        what: impl Future<Output = Result<T, JobError>> + Send + 'static,
    ) -> Result<T, JobError> {
        let permit = Arc::clone(&self.opening).lock_owned().await;
        if self.gone.load(SeqCst) {
            return Err(JobError::Reopening);
        }
        let task = self.setup.context.tasks.spawn(async move {
            let _permit = permit;
            what.await
        });
        task.await.map_err(|_| JobError::TaskLost)?
    }

    async fn epoch_exclusively(self: &Arc<Self>, number: u64, begin: bool) -> Result<Arc<Epoch>, JobError> {
        if let Some(epoch) = self.loaded(number) {
            return Ok(epoch);
        }
        // An epoch whose ledger failed ends its subscription before it is opened anew.
        if let Some(old) = self.epochs.lock().remove(&number) {
            old.abandon();
        }
        let this = Arc::clone(self);
        let opened = blocking(move || this.open_epoch(number, begin)).await;
        if opened.as_ref().is_err_and(JobError::is_file_damage) {
            self.setup.context.counts.damaged.fetch_add(1, Relaxed);
        }
        let epoch = opened?;
        self.epochs.lock().insert(number, Arc::clone(&epoch));
        Ok(epoch)
    }

    fn open_epoch(&self, number: u64, begin: bool) -> Result<Arc<Epoch>, JobError> {
        let known = self.epochs_on_disk()?;
        let world = world_of(&self.current_world());
        let path = self.path(number);
        let failed = |error| JobError::Io { path: path.clone(), error };
        let over = known.last().is_some_and(|&last| last > number.saturating_add(1));
        let fresh = !known.contains(&number);
        if fresh {
            if !begin {
                return Err(JobError::NoEpoch(number));
            }
            if over {
                return Err(JobError::Closed { epoch: number, what: "before epochs that have begun" });
            }
            self.make_room(&known, number)?;
        }
        let begun = || {
            if fresh {
                std::fs::write(&path, Epoch::head(&self.setup, number, world)).map_err(failed)?;
            }
            // This syncs the file and its directory entry, which a killed server may have left unsynced.
            let epoch = Epoch::open(&self.setup, &path, number, world, over)?;
            sync_parent(&path).map_err(failed)?;
            Ok(epoch)
        };
        begun().inspect_err(|_| {
            if fresh {
                self.setup.charges.forget(number);
            }
            if fresh && let Err(error) = std::fs::remove_file(&path) {
                tracing::warn!(
                    file = %path.display(), %error,
                    "the ledger of an epoch that could not begin stays behind"
                );
            }
        })
    }

    /// Ends the epochs before the predecessor of a new epoch, and forgets the oldest.
    fn make_room(&self, known: &[u64], number: u64) -> Result<(), JobError> {
        let mut epochs = self.epochs.lock();
        for (_, old) in epochs.range(..number.saturating_sub(1)) {
            if old.abandon() {
                self.setup.context.counts.abandoned.fetch_add(1, Relaxed);
                tracing::warn!(
                    job = %self.setup.job, epoch = old.number(),
                    "the job went on to a later epoch without finishing this one: \
                     it did not get every sample of it"
                );
            }
        }
        let others = known.iter().filter(|&&n| n != number).count();
        let too_many = (others + 1).saturating_sub(EPOCHS_MAX);
        for &n in known.iter().filter(|&&n| n < number.saturating_sub(1)).take(too_many) {
            let path = self.path(n);
            std::fs::remove_file(&path).map_err(|error| JobError::Io { path, error })?;
            self.setup.charges.forget(n);
            epochs.remove(&n);
        }
        Ok(())
    }

    /// Returns whether a later epoch has begun. Blocking.
    fn has_later(&self, number: u64) -> Result<bool, JobError> {
        Ok(self.epochs_on_disk()?.last().is_some_and(|&last| last > number))
    }

    /// Returns the content hash of every sample.
    ///
    /// # Errors
    /// Those of the tables.
    pub async fn contents(&self) -> Result<Arc<Vec<Hash>>, JobError> {
        let made = self.contents.get_or_try_init(|| async {
            Ok::<_, JobError>(Arc::new(self.setup.samples.contents(&self.source).await?))
        });
        made.await.cloned()
    }

    /// Returns the job as the API shows it, with every remembered epoch.
    ///
    /// # Errors
    /// What a ledger says.
    pub async fn view(self: &Arc<Self>) -> Result<View, JobError> {
        let this = Arc::clone(self);
        let known = blocking(move || this.epochs_on_disk()).await?;
        let mut epochs: Vec<EpochView> = Vec::new();
        for n in known {
            match self.epoch(n).await {
                Ok(e) => epochs.push(e.view()),
                // The epoch was forgotten in the meantime.
                Err(JobError::NoEpoch(_)) => {}
                // Only this epoch is damaged: the others go on, and a state may replace it.
                Err(error) if error.is_file_damage() => {
                    tracing::error!(
                        job = %self.setup.job, epoch = n, %error,
                        "an epoch's ledger is damaged; PUT a state with ?replace=true"
                    );
                    epochs.push(self.damaged(n));
                }
                Err(e) => return Err(e),
            }
        }
        Ok(self.view_with(epochs))
    }

    /// Returns the job as the API shows it, with these epochs.
    pub(super) fn view_with(&self, epochs: Vec<EpochView>) -> View {
        let record = self.known();
        let (setup, world) = (&self.setup, record.ask.world);
        View {
            id: record.id(),
            name: record.ask.name.clone(),
            dataset: record.dataset.clone(),
            root: record.root,
            layout: record.layout,
            seed: setup.seed,
            order: setup.order,
            visitation: setup.visitation,
            world,
            plan: setup.hash,
            samples: setup.samples.len(),
            entries: setup.plan.entries(),
            steps: setup.steps(world_of(&world)),
            epochs,
            sweep: self.sweep_size(),
            benefit: Some(self.benefit()),
            doing: None,
            settings: self.settings.get(),
            share: None,
            loaders: Some(self.loaders_view()),
            // Those of the server, which knows them, are added there.
            waits: Vec::new(),
            is_away: false,
        }
    }

    /// Returns how much the job's sweep can hold, if the job has a sweep and the disk has a share for it.
    #[must_use]
    pub fn sweep_size(&self) -> Option<JobSweep> {
        self.setup.sweep.as_ref().and_then(|sweep| sweep.size())
    }

    /// Returns the view of the latest epoch in memory.
    #[must_use]
    pub fn last_epoch(&self) -> Option<EpochView> {
        let last = self.epochs.lock().last_key_value().map(|(_, epoch)| Arc::clone(epoch));
        last.map(|epoch| epoch.view())
    }

    /// Returns the view of an epoch whose ledger is damaged.
    fn damaged(&self, epoch: u64) -> EpochView {
        EpochView {
            epoch,
            state: EpochState::Damaged,
            world: self.current_world(),
            planned: 0,
            acked: 0,
            held: 0,
            leases: 0,
            redelivered: 0,
            padded: 0,
            commits: Vec::new(),
            ledger_bytes: std::fs::metadata(self.path(epoch)).map_or(0, |m| m.len()),
            times: Times::default(),
        }
    }

    /// Renews a lease whose stream is being read.
    pub fn touch(&self, epoch: u64, lease: u64, request: Request) {
        let epoch = self.epochs.lock().get(&epoch).cloned();
        if let Some(epoch) = epoch {
            epoch.touch(lease, request);
        }
    }

    /// Maintenance: expired leases and idle prefetches.
    pub fn tick(&self) {
        let open: Vec<_> = self.epochs.lock().values().cloned().collect();
        open.iter().for_each(|e| e.tick());
    }

    /// Returns whether a lease of any epoch lives.
    #[must_use]
    pub fn has_leases(&self) -> bool {
        self.epochs.lock().values().any(|e| e.has_leases())
    }

    /// Returns the number of epochs in memory, and of those that are open.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        let epochs = self.epochs.lock();
        let open = epochs.values().filter(|e| e.state_now() == EpochState::Open).count();
        (epochs.len() as u64, open as u64)
    }

    /// Closes the job: nothing is granted or written any more when this returns. Goes on when the caller goes
    /// away.
    pub async fn close(self: &Arc<Self>) {
        self.gone.store(true, SeqCst);
        // An opening under way ends first.
        let last = Arc::clone(&self.opening).lock_owned().await;
        let this = Arc::clone(self);
        let closing = self.setup.context.tasks.spawn(async move {
            let _last = last;
            let epochs = std::mem::take(&mut *this.epochs.lock());
            let close = move || {
                epochs.values().for_each(|e| e.close());
                Ok(())
            };
            blocking(close).await
        });
        if let Err(e) = closing.await.map_err(|_| JobError::TaskLost).and_then(|closed| closed) {
            tracing::error!(job = %self.setup.job, error = %e, "the job's ledgers were not closed");
        }
    }
}
