//! The registry of declared jobs: their records, which of them are open, and the sweeps that they share.
//!
//! 1. (I7) A job belongs to its tenant: for others it does not exist.
//! 2. A job is opened at its first request, by one caller while others wait; a restart opens none.
//!    Declarations and deletions of one job follow each other. Those of different jobs do not wait for each
//!    other, except for a permit where a job has a long part.
//! 3. (I6) Each declared job holds a place of its tenant, and a charge for its record and its ledgers
//!    (`tenants`). Jobs of one (domain, root, layout) share its samples
//!    and its sweep, which end with the last of them.
//! 4. The least bytes that all jobs together set never exceed what [`Registry::change_settings`] allows.
//! 5. (I6) An open job without a request during `job_ttl` and without a live lease is closed. The next
//!    request opens it from its record and its ledgers.

mod describing;
mod moving;
mod preparing;
mod registered_job;
mod removing;

pub use moving::MovedJob;
use registered_job::{RegisteredJob, RegisteredJobs, charges_of, close};
use removing::remove_all;

use super::{
    ledger_term,
    open_job::{JobProgress, OpenJob},
    record::{Record, RecordSummary, is_long},
    settings::{self, StoredSettings},
};
use crate::{
    app::limits::DECLARED_MAX,
    data::versions::{Home, Samples, SamplesError, Source, Sources},
    tenancy::tenants::{JobCharges, ShareUse, Stream, TenantLimit},
    training::{
        allocation::Reader,
        benefit::busy_rate,
        epochs::{JobContext, JobError},
        sweep::Sweep,
    },
};
use fletch_api::{JobLine, JobSettings, OrderKind, StartJob};
use fletch_core::{DatasetName, Domain, LayoutId, Root, Tenant, order::sweep::SweepProgress};
use fletch_store::{DatasetId, ReaderKind};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::{Path, PathBuf},
    sync::{Arc, Weak, atomic::Ordering::SeqCst},
};
use tokio::{
    sync::{OnceCell, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore},
    task::spawn_blocking,
};

/// Most jobs with a long part that are declared or opened at once.
const LONG_JOBS_AT_ONCE: usize = 2;

type VersionKey = (Domain, Root, LayoutId);

/// What jobs of one (domain, root, layout) share.
#[derive(Default)]
struct Shared {
    samples: tokio::sync::Mutex<Weak<Samples>>,
    sweep: tokio::sync::Mutex<Weak<Sweep>>,
}

/// All declared jobs of the server.
pub struct Registry {
    dir: PathBuf,
    /// What all jobs share.
    pub context: Arc<JobContext>,
    jobs: Arc<RegisteredJobs>,
    /// By job: the permit to declare or delete it.
    changing: Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>,
    /// Permits to declare or open jobs with a long part.
    long: Arc<Semaphore>,
    places: Mutex<HashMap<VersionKey, Arc<Shared>>>,
    /// The permit to change settings.
    settings: Arc<tokio::sync::Mutex<()>>,
    /// Jobs that go to another server now: they are not opened.
    moving: Mutex<BTreeSet<String>>,
    /// The datasets whose samples are worked out before a job needs them.
    preparing: preparing::Queue,
}

/// Numbers for metrics.
#[derive(Debug, Default)]
pub struct RegistryStats {
    /// Declared jobs.
    pub declared: u64,
    /// Declared jobs that are in memory, with their epochs.
    pub open: u64,
    /// Open epochs in memory.
    pub epochs_open: u64,
    /// The numbers of each sweep.
    pub sweeps: Vec<SweepProgress>,
}

/// The version that a declared job reads.
#[derive(Debug, Clone)]
pub struct Place {
    /// The dataset through which the job reads.
    pub dataset: DatasetName,
    pub root: Root,
    pub layout: LayoutId,
}

impl Registry {
    /// Reads the records of all jobs below the state directory. A job whose record is damaged stays there and
    /// is logged.
    ///
    /// # Errors
    /// The error of the directory itself.
    pub fn open(state: &Path, context: JobContext) -> std::io::Result<Self> {
        let dir = state.join("jobs");
        std::fs::create_dir_all(&dir)?;
        // Entries that this run relies on survive the next crash, too.
        std::fs::File::open(&dir)?.sync_all()?;
        let mut jobs = BTreeMap::new();
        for entry in std::fs::read_dir(&dir)? {
            let path = entry?.path();
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            if name.starts_with("gone-") {
                // A crash interrupted the deletion.
                if let Err(error) = remove_all(&path) {
                    tracing::warn!(dir = %path.display(), %error, "a deleted job leaves files");
                }
                continue;
            }
            match Record::read(&path) {
                Ok(record) if record.id() == name => {
                    let charges = charges_of(&context, &record.tenant, &path);
                    let settings = Arc::new(StoredSettings::read(&path));
                    let job = RegisteredJob::new(record.known(), charges, settings, OnceCell::new());
                    jobs.insert(name, job);
                }
                Ok(_) => {
                    tracing::error!(
                        dir = %path.display(),
                        "a job's directory holds the record of another job; the server ignores it"
                    )
                }
                Err(e) => {
                    tracing::error!(
                        dir = %path.display(), error = %e,
                        "a job's record cannot be read; the server ignores the job"
                    )
                }
            }
        }
        Ok(Registry {
            dir,
            context: Arc::new(context),
            jobs: Arc::new(Mutex::new(jobs)),
            changing: Mutex::default(),
            long: Arc::new(Semaphore::new(LONG_JOBS_AT_ONCE)),
            places: Mutex::default(),
            settings: Arc::default(),
            moving: Mutex::default(),
            preparing: preparing::Queue::default(),
        })
    }

    fn registered(&self, domain: &Domain, tenant: &Tenant, id: &str) -> Result<Arc<RegisteredJob>, JobError> {
        let registered = self.jobs.lock().get(id).cloned();
        let registered = registered.inspect(|s| s.asked.store(true, SeqCst));
        registered
            .filter(|s| s.known.tenant == *tenant && s.known.domain == *domain)
            .ok_or(JobError::NotFound)
    }

    /// Returns the version that a declared job reads.
    ///
    /// # Errors
    /// [`JobError::NotFound`].
    pub fn place(&self, domain: &Domain, tenant: &Tenant, id: &str) -> Result<Place, JobError> {
        let known = &self.registered(domain, tenant, id)?.known;
        Ok(Place { dataset: known.dataset.clone(), root: known.root, layout: known.layout })
    }

    /// Returns the version that the declared job of a name reads, if there is one.
    #[must_use]
    pub fn declared(&self, domain: &Domain, tenant: &Tenant, name: &str) -> Option<Place> {
        self.place(domain, tenant, &Record::id_of(domain, tenant, name)).ok()
    }

    /// Returns a tenant's jobs by name.
    #[must_use]
    pub fn list(&self, domain: &Domain, tenant: &Tenant) -> Vec<JobLine> {
        let jobs: Vec<_> = {
            let all = self.jobs.lock();
            let mine = all.values().filter(|s| s.known.tenant == *tenant && s.known.domain == *domain);
            mine.cloned().collect()
        };
        let mut lines: Vec<JobLine> = jobs.iter().map(|s| s.line()).collect();
        lines.sort_by(|a, b| a.name.cmp(&b.name));
        lines
    }

    /// Returns all jobs, each with its domain and tenant.
    #[must_use]
    pub fn all(&self) -> Vec<(Domain, Tenant, JobLine)> {
        let jobs: Vec<_> = self.jobs.lock().values().cloned().collect();
        jobs.iter().map(|s| (s.known.domain.clone(), s.known.tenant.clone(), s.line())).collect()
    }

    /// Returns a job of any tenant that is open already. For admins, who do not keep it open by asking.
    #[must_use]
    pub fn peek(&self, id: &str) -> Option<Arc<OpenJob>> {
        self.jobs.lock().get(id).and_then(|s| s.opened.get().cloned())
    }

    /// Returns a declared job, opened if it was not. `sources` and `source` lead to its bytes.
    ///
    /// # Errors
    /// [`JobError`].
    pub async fn get(
        &self,
        domain: &Domain,
        tenant: &Tenant,
        id: &str,
        sources: &Arc<Sources>,
        source: &Arc<Source>,
    ) -> Result<Arc<OpenJob>, JobError> {
        let registered = self.registered(domain, tenant, id)?;
        if self.moving.lock().contains(id) {
            return Err(JobError::Reopening);
        }
        let opened = registered
            .opened
            .get_or_try_init(|| async {
                let shared = self.shared(domain, registered.known.ask.order, sources, source).await?;
                let long = self.permit_for_long(registered.known.is_long).await;
                let dir = self.dir.join(id);
                let record =
                    spawn_blocking(move || Record::read(&dir)).await.map_err(|_| JobError::TaskLost)??;
                let kept = (Arc::clone(&registered.charges), Arc::clone(&registered.settings));
                let (opened, _long) = self.open_record(record, kept, long, shared, (sources, source)).await?;
                Ok::<_, JobError>(Arc::new(opened))
            })
            .await?;
        // The job was deleted or closed while it was being opened.
        if !self.jobs.lock().get(id).is_some_and(|there| Arc::ptr_eq(there, &registered)) {
            opened.close().await;
            return Err(JobError::Reopening);
        }
        Ok(Arc::clone(opened))
    }

    /// Returns a job that is open already.
    ///
    /// # Errors
    /// [`JobError::NotFound`].
    pub fn opened(
        &self,
        domain: &Domain,
        tenant: &Tenant,
        id: &str,
    ) -> Result<Option<Arc<OpenJob>>, JobError> {
        Ok(self.registered(domain, tenant, id)?.opened.get().cloned())
    }

    /// Closes a job whose sources are gone; the next request opens it anew.
    pub async fn close(&self, id: &str, stale: &Arc<OpenJob>) {
        close(&self.jobs, id, stale).await;
    }

    /// Returns the samples of a version and layout, which its jobs share, and what else they share.
    async fn samples(
        &self,
        domain: &Domain,
        source: &Arc<Source>,
    ) -> Result<(Arc<Shared>, Arc<Samples>), SamplesError> {
        let place = (domain.clone(), source.version.root(), source.version.layout());
        let shared = Arc::clone(self.places.lock().entry(place).or_default());
        let mut weak = shared.samples.lock().await;
        let samples = match weak.upgrade() {
            Some(samples) => samples,
            None => {
                let samples = Arc::new(Samples::load(source).await?);
                *weak = Arc::downgrade(&samples);
                samples
            }
        };
        drop(weak);
        Ok((shared, samples))
    }

    /// Returns what a job shares with others of its version and layout.
    async fn shared(
        &self,
        domain: &Domain,
        order: OrderKind,
        sources: &Arc<Sources>,
        source: &Arc<Source>,
    ) -> Result<(Arc<Samples>, Option<Arc<Sweep>>), JobError> {
        let root = source.version.root();
        let (shared, samples) = self.samples(domain, source).await?;
        let sweep = match order {
            OrderKind::Strict | OrderKind::Bucketed | OrderKind::Replay => {
                // The use is noted before the first read, so that the disk keeps what that read fetches.
                let now = u64::try_from(self.context.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
                let footprint = source.footprint();
                self.context.sweep.shares.note(
                    sources.version_ids_in(source),
                    root,
                    footprint,
                    ReaderKind::Ordered,
                    now,
                );
                None
            }
            OrderKind::Substitute => {
                let mut weak = shared.sweep.lock().await;
                match weak.upgrade() {
                    Some(sweep) => Some(sweep),
                    None => {
                        let sweep =
                            Sweep::start(&self.context.sweep, sources, source, Arc::clone(&samples)).await;
                        *weak = Arc::downgrade(&sweep);
                        Some(sweep)
                    }
                }
            }
        };
        Ok((samples, sweep))
    }

    async fn open_record(
        &self,
        record: Record,
        (charges, settings): (Arc<JobCharges>, Arc<StoredSettings>),
        permit: Option<OwnedSemaphorePermit>,
        shared: (Arc<Samples>, Option<Arc<Sweep>>),
        (sources, source): (&Arc<Sources>, &Arc<Source>),
    ) -> Result<(OpenJob, Option<OwnedSemaphorePermit>), JobError> {
        let (dir, sources, source) = (self.dir.join(record.id()), Arc::clone(sources), Arc::clone(source));
        OpenJob::open(record, permit, (dir, charges, settings), &self.context, sources, source, shared).await
    }

    /// Waits for the permit to open a job with a long part. This is the last thing that an opening waits for.
    async fn permit_for_long(&self, is_long: bool) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed.
        if is_long { Arc::clone(&self.long).acquire_owned().await.ok() } else { None }
    }

    /// Declares a job; returns whether it is new. `record_elsewhere` is called before a
    /// new job is written here.
    ///
    /// # Errors
    /// [`JobError`]; nothing was declared.
    pub async fn declare<R>(
        &self,
        (domain, tenant): (&Domain, &Tenant),
        ask: StartJob,
        sources: &Arc<Sources>,
        source: &Arc<Source>,
        record_elsewhere: impl FnOnce(RecordSummary) -> R + Send + 'static,
    ) -> Result<(Arc<OpenJob>, bool), JobError>
    where
        R: Future<Output = Result<(), JobError>> + Send,
    {
        let id = Record::id_of(domain, tenant, ask.name.as_str());
        let record = Record {
            domain: domain.clone(),
            tenant: tenant.clone(),
            ask,
            dataset: sources.dataset().clone(),
            root: source.version.root(),
            layout: source.version.layout(),
        };
        let permit = self.permit_to_change(&id).await;
        if self.jobs.lock().contains_key(&id) {
            // The long parts are hashed and dropped here.
            let asked = record.known();
            let there = self.get(domain, tenant, &id, sources, source).await?;
            there.is(&asked)?;
            return Ok((there, false));
        }
        let charges = self.reserve(&record)?;
        let shared = self.shared(domain, record.ask.order, sources, source).await?;
        let long = self.permit_for_long(is_long(&record.ask)).await;
        let settings = Arc::new(StoredSettings::of_new(&self.dir.join(&id)));
        let kept = (Arc::clone(&charges), Arc::clone(&settings));
        let (opened, long) = self.open_record(record.clone(), kept, long, shared, (sources, source)).await?;
        let (dir, jobs, opened) = (self.dir.join(&id), Arc::clone(&self.jobs), Arc::new(opened));
        // The declaration goes on if the caller goes away, so that what is written is also registered.
        let task = self.context.tasks.spawn(async move {
            let _held = (permit, long);
            let known = opened.known();
            record_elsewhere(known.clone()).await?;
            spawn_blocking(move || record.write(&dir)).await.map_err(|_| JobError::TaskLost)??;
            let cell = OnceCell::new_with(Some(Arc::clone(&opened)));
            jobs.lock().insert(id, RegisteredJob::new(known, charges, settings, cell));
            Ok::<_, JobError>(opened)
        });
        Ok((task.await.map_err(|_| JobError::TaskLost)??, true))
    }

    /// Returns the records of all jobs.
    #[must_use]
    pub fn records(&self) -> Vec<RecordSummary> {
        let jobs: Vec<_> = self.jobs.lock().values().cloned().collect();
        jobs.iter()
            .map(|job| job.opened.get().map_or_else(|| job.known.clone(), |open| open.known()))
            .collect()
    }

    /// Returns the term of the cluster in which a job's ledgers came here. 1: they were always here.
    pub async fn ledger_term(&self, id: &str) -> u64 {
        let dir = self.dir.join(id);
        spawn_blocking(move || ledger_term::read(&dir)).await.unwrap_or(1)
    }

    /// Remembers the term in which a job's ledgers came to this server.
    ///
    /// # Errors
    /// [`JobError::Io`].
    pub async fn keep_ledger_term(&self, id: &str, term: u64) -> Result<(), JobError> {
        let dir = self.dir.join(id);
        spawn_blocking(move || ledger_term::write(&dir, term)).await.map_err(|_| JobError::TaskLost)?
    }

    /// Replaces a job's settings. `check` gets the least bytes that all other jobs have set, in sum.
    ///
    /// # Errors
    /// [`JobError`]; nothing was changed.
    pub async fn change_settings(
        &self,
        domain: &Domain,
        tenant: &Tenant,
        id: &str,
        new: JobSettings,
        check: impl FnOnce(u64) -> Result<(), JobError>,
    ) -> Result<(), JobError> {
        settings::check(new)?;
        // Before the permit: whoever has no such job waits for nobody.
        self.registered(domain, tenant, id)?;
        let permit = self.permit_to_change(id).await;
        // One change at a time, so that two of them cannot both take the last bytes.
        let turn = Arc::clone(&self.settings).lock_owned().await;
        let registered = self.registered(domain, tenant, id)?;
        check(self.min_shares(Some(id)))?;
        // The change goes on if the caller goes away, so that what is written is also in force.
        let task = self.context.tasks.spawn(async move {
            let _held = (permit, turn);
            spawn_blocking(move || registered.settings.set(new)).await.map_err(|_| JobError::TaskLost)?
        });
        task.await.map_err(|_| JobError::TaskLost)?
    }

    /// Returns the sum of the least bytes that all jobs, or all but one, have set.
    #[must_use]
    pub fn min_shares(&self, except: Option<&str>) -> u64 {
        let jobs = self.jobs.lock();
        let others = jobs.iter().filter(|(id, _)| Some(id.as_str()) != except);
        let least = others.filter_map(|(_, job)| job.settings.get().min_share_bytes);
        least.fold(0, u64::saturating_add)
    }

    /// Returns the ids of the jobs that run now, with their settings.
    #[must_use]
    pub fn running(&self) -> BTreeMap<String, JobSettings> {
        let running = self.all_opened().into_iter().filter(|job| job.is_running());
        running.map(|job| (job.known().id(), job.settings.get())).collect()
    }

    /// Returns the weights of the datasets that jobs read now: for each, the sum of its jobs' weights.
    #[must_use]
    pub fn stream_weights(&self) -> BTreeMap<Stream, f64> {
        let mut weights = BTreeMap::new();
        for job in self.all_opened().into_iter().filter(|job| job.is_running()) {
            let sources = &job.sources;
            let stream = (sources.domain.clone(), sources.dataset().clone());
            *weights.entry(stream).or_default() += job.settings.get().weight();
        }
        weights
    }

    /// Returns the jobs that run now, with what is known of them.
    #[must_use]
    pub fn readers(&self) -> Vec<Reader> {
        let running: Vec<_> = self.all_opened().into_iter().filter(|job| job.is_running()).collect();
        let mut logs: BTreeMap<String, Vec<Arc<Home>>> = BTreeMap::new();
        for job in &running {
            let (link, home) = job.link();
            let homes = logs.entry(link).or_default();
            if !homes.iter().any(|known| Arc::ptr_eq(known, &home)) {
                homes.push(home);
            }
        }
        let bandwidth =
            |homes: &Vec<Arc<Home>>| busy_rate(&homes.iter().map(|home| home.reads()).collect::<Vec<_>>());
        let bandwidths: BTreeMap<&str, _> =
            logs.iter().map(|(link, homes)| (link.as_str(), bandwidth(homes))).collect();
        let reader = |job: &Arc<OpenJob>| job.reader(|link| bandwidths.get(link).copied().flatten());
        running.iter().map(reader).collect()
    }

    /// Waits for the permit to declare or delete a job.
    async fn permit_to_change(&self, id: &str) -> OwnedMutexGuard<()> {
        let turns = {
            let mut changing = self.changing.lock();
            changing.retain(|_, turns| turns.strong_count() > 0);
            let known = changing.get(id).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let turns = Arc::default();
                changing.insert(id.to_owned(), Arc::downgrade(&turns));
                turns
            })
        };
        turns.lock_owned().await
    }

    /// Takes a place and the bytes of a new job's record from its tenant.
    fn reserve(&self, record: &Record) -> Result<Arc<JobCharges>, JobError> {
        let (tenants, tenant) = (&self.context.tenants, &record.tenant);
        let place = tenants.declared_jobs.try_acquire(tenant, 1).map_err(|_| {
            tenants.count_refusal(tenant, TenantLimit::DeclaredJobs);
            let ShareUse { used, max, .. } = tenants.declared_jobs.of(tenant);
            JobError::AtLimit(format!(
                "this tenant has declared {used} jobs; it may declare {max}, and all tenants together \
                 {DECLARED_MAX}"
            ))
        })?;
        let bytes = record.bytes()?;
        let charges = tenants.state_bytes.job(tenant, place);
        // Charged first and checked then, so that two callers cannot both take the last bytes.
        charges.record().set(bytes);
        if let Err(mut full) = tenants.check_state_bytes(tenant, 0) {
            (full.used, full.more) = (full.used.saturating_sub(bytes), bytes);
            return Err(full.into());
        }
        Ok(charges)
    }

    fn sweeps(&self) -> Vec<Arc<Sweep>> {
        let places: Vec<_> = self.places.lock().values().cloned().collect();
        places.iter().filter_map(|p| p.sweep.try_lock().ok()?.upgrade()).collect()
    }

    fn all_opened(&self) -> Vec<Arc<OpenJob>> {
        self.jobs.lock().values().filter_map(|s| s.opened.get().cloned()).collect()
    }

    /// Closes jobs that nobody uses, as of `now_ns`.
    fn close_unused(&self, now_ns: u64) {
        let ttl_ns = u64::try_from(self.context.job_ttl.as_nanos()).unwrap_or(u64::MAX);
        let unused: Vec<_> = self
            .jobs
            .lock()
            .iter()
            .filter(|(_, s)| s.is_unused(now_ns, ttl_ns) && !s.closing.swap(true, SeqCst))
            .filter_map(|(id, s)| Some((id.clone(), Arc::clone(s.opened.get()?))))
            .collect();
        for (id, opened) in unused {
            let has_dataset = opened.sources.is_registered();
            tracing::info!(job = %opened.setup.job, has_dataset, "an unused job is closed until it asks");
            let jobs = Arc::clone(&self.jobs);
            self.context.tasks.spawn(async move { close(&jobs, &id, &opened).await });
        }
    }

    /// Maintenance, as of `now_ns` (nanoseconds since the start): expired leases, changed shares, jobs that
    /// nobody uses, versions without a job.
    pub fn tick(&self, now_ns: u64) {
        // A reading at each tick, also without jobs: the clock takes longer gaps for pauses.
        let _unused = self.context.lease_clock.now_ms();
        self.close_unused(now_ns);
        self.all_opened().iter().for_each(|o| o.tick());
        self.sweeps().iter().for_each(|w| w.tick(now_ns));
        let unused = |p: &Shared| p.samples.try_lock().is_ok_and(|s| s.strong_count() == 0);
        self.places.lock().retain(|_, p| Arc::strong_count(p) > 1 || !unused(p));
    }

    /// Writes the recorded calls of sweeps that are not in their trace files yet. Blocking.
    pub fn end_traces(&self) {
        self.sweeps().iter().for_each(|w| w.end_trace());
    }

    /// Returns the identities of a dataset's sweeps at the disk tier.
    #[must_use]
    pub fn sweeps_of(&self, domain: &Domain, dataset: &DatasetName) -> Vec<DatasetId> {
        let of = |w: &Arc<Sweep>| w.kept_sources.domain == *domain && w.kept_sources.dataset() == dataset;
        self.sweeps().iter().filter(|w| of(w)).map(|w| w.kept_sources.dataset_id()).collect()
    }

    /// Returns the progress of at most `jobs` open jobs, in the order of their ids, with at most `ranks`
    /// ranks each.
    #[must_use]
    pub fn progress(&self, jobs: usize, ranks: usize) -> Vec<JobProgress> {
        let mut open: Vec<_> = self.all_opened().into_iter().map(|job| (job.known().id(), job)).collect();
        open.sort_by(|a, b| a.0.cmp(&b.0));
        open.iter().take(jobs).map(|(_, job)| job.progress(ranks)).collect()
    }

    /// Returns numbers for metrics.
    #[must_use]
    pub fn stats(&self) -> RegistryStats {
        let declared = self.jobs.lock().len() as u64;
        RegistryStats {
            declared,
            open: self.all_opened().len() as u64,
            epochs_open: self.all_opened().iter().map(|o| o.counts().1).sum(),
            sweeps: self.sweeps().iter().map(|w| w.progress()).collect(),
        }
    }
}
