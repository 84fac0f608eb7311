//! One declared job: its file, and what it is opened to.
//!
//! ```text
//! state_dir/jobs/<id>/job.json             what was asked, and what it was resolved to
//!                    /epoch-<n>.ledger     one for each epoch that is remembered
//! ```
//!
//! 1. The file is durable before the job is answered. A crash before that may leave a part of it, which is said at the next
//!    start and replaced when the job is declared again; what is durable is only ever replaced whole. So with ledgers: one that
//!    is shorter than its head was never told to anybody.
//! 2. A job reads what its names meant when it was declared.

mod rollback;
mod worlds;

use super::{
    plan::{bucketed_of, can_be_kept, plan_of},
    record::{Record, RecordSummary},
};
use crate::versions::{Source, Sources};
use crate::{
    epochs::{
        Epoch, JobContext, JobError, ReplaySource, Schedule, Setup, differs, ledger_of, never_was,
        sync_beside, world_of,
    },
    sweep::Sweep,
    versions::Samples,
};
use fletch_api::{
    Epoch as EpochView, EpochState, Job as View, LeaseRequest, OrderKind, Times, Visitation, WorldSpec,
    epochs::ACKS_MAX, jobs::default_seed,
};
use fletch_core::{
    Hash, JobName,
    delivery::{
        Event, Leases, Request,
        lease::LeaseError,
        ledger::{Header, Ledger},
    },
    manifest::LayoutKind,
    plan::{Bits, PlanUnits, Tail, World},
};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};
use tokio::{
    sync::{OnceCell, OwnedSemaphorePermit},
    task::spawn_blocking,
};

/// Epochs remembered of a job.
const EPOCHS_MAX: usize = 16;
/// Units of a block of a strict order by units.
const BLOCK_UNITS: u64 = 64;

/// A declared job, opened: everything its epochs need.
pub struct OpenJob {
    /// Where its files are.
    dir: PathBuf,
    /// What its epochs share.
    pub setup: Arc<Setup>,
    /// The ways to its bytes that were granted.
    pub sources: Arc<Sources>,
    /// The version in its layout.
    pub source: Arc<Source>,
    known: Mutex<RecordSummary>,
    epochs: Mutex<BTreeMap<u64, Arc<Epoch>>>,
    /// One epoch is opened, begun or replaced at a time.
    opening: Arc<tokio::sync::Mutex<()>>,
    /// Nothing is opened any more: the job is gone, or opened anew elsewhere.
    gone: AtomicBool,
    contents: OnceCell<Arc<Vec<Hash>>>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs what waits for the disk.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, JobError> + Send + 'static,
) -> Result<T, JobError> {
    spawn_blocking(work).await.map_err(|_| JobError::Lost)?
}

impl OpenJob {
    /// Opens a job: reads what its plan needs of the tables. A `turn` that is held for what is long in it is held until that
    /// is gone, even when whoever asked goes away, and given back.
    pub(super) async fn open(
        record: Record,
        turn: Option<OwnedSemaphorePermit>,
        dir: PathBuf,
        context: &Arc<JobContext>,
        sources: Arc<Sources>,
        source: Arc<Source>,
        (samples, sweep): (Arc<Samples>, Option<Arc<Sweep>>),
    ) -> Result<(Self, Option<OwnedSemaphorePermit>), JobError> {
        let ask = &record.ask;
        let ledger = ledger_of(ask)?;
        let told_seed = ledger.as_ref().map(|l| l.header.seed);
        let seed = ask.seed.or(told_seed).unwrap_or_else(|| default_seed(&ask.name));
        let plan = plan_of(ask, seed, record.root, &source, &samples).await?;
        world_of(&ask.world).check()?;
        let most = context.ledger_bytes;
        can_be_kept(&plan, None, world_of(&ask.world), most)?;
        let bucketed = bucketed_of(ask, &plan, &source, &samples).await?;
        can_be_kept(&plan, bucketed.as_ref(), world_of(&ask.world), most)?;
        if let Some(ledger) = &ledger {
            can_be_kept(&plan, bucketed.as_ref(), ledger.header.world, most)
                .map_err(|e| JobError::BadLedger(format!("in the ledger's world {e}")))?;
        }
        let plan_units = PlanUnits::new(&plan, &samples.unit_map)?;
        let packed = source.version.layout_doc().params.kind == LayoutKind::Pack;
        let per_unit = samples.len().div_ceil(samples.unit_map.units().max(1) as u64);
        let block = u32::try_from(BLOCK_UNITS * per_unit).unwrap_or(u32::MAX);
        let strict = OrderKind::Strict;
        let by_units = ledger.as_ref().map_or(ask.order == strict, |l| l.header.order == strict.as_str());
        let exact = sources.with_source(&source, sources.dataset_id());
        let mut setup = Setup {
            exact,
            job: ask.name.to_string(),
            root: record.root,
            layout: record.layout,
            hash: bucketed.as_ref().map_or_else(|| plan.hash(), |c| c.buckets.hash(plan.hash())),
            plan,
            bucketed,
            told: None,
            plan_units,
            block: if packed && by_units { block } else { 0 },
            samples,
            sweep,
            order: ask.order,
            seed,
            visitation: ask.visitation,
            context: Arc::clone(context),
        };
        let world = world_of(&ask.world);
        let (setup, turn) = blocking(move || {
            // Whatever cannot be ordered is refused now.
            Schedule::new(&setup, 0, world)?;
            if let Some(ledger) = &ledger {
                let told = ReplaySource::new(&setup, ledger)?;
                told.check(world)?;
                setup.told = Some(Arc::new(told));
            }
            Ok((setup, turn))
        })
        .await?;
        let opened = OpenJob {
            dir,
            setup: Arc::new(setup),
            sources,
            source,
            known: Mutex::new(record.known()),
            epochs: Mutex::default(),
            opening: Arc::default(),
            gone: AtomicBool::new(false),
            contents: OnceCell::new(),
        };
        Ok((opened, turn))
    }

    /// What is known of it without its file.
    #[must_use]
    pub fn known(&self) -> RecordSummary {
        lock(&self.known).clone()
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> JobName {
        lock(&self.known).ask.name.clone()
    }

    /// Who shares a step of epochs that begin now.
    fn world_now(&self) -> WorldSpec {
        lock(&self.known).ask.world
    }

    /// Whether somebody who asks for this context this job.
    ///
    /// # Errors
    /// [`JobError::Differs`].
    pub fn is(&self, asked: &RecordSummary) -> Result<(), JobError> {
        let known = self.known();
        let name = known.ask.name.to_string();
        match known.differs(asked) {
            Some(what) => Err(JobError::Differs { name, what }),
            None if known.ask.world != asked.ask.world => Err(JobError::Differs { name, what: "world" }),
            None => Ok(()),
        }
    }

    fn path(&self, epoch: u64) -> PathBuf {
        self.dir.join(format!("epoch-{epoch}.ledger"))
    }

    /// Numbers of the epochs that have a ledger, whether it can be read or not. Of one that a crash cut off before its first
    /// sync nothing was told to anybody: it has none.
    fn on_disk(&self) -> Result<Vec<u64>, JobError> {
        let failed = |error| JobError::Io { path: self.dir.clone(), error };
        let mut out = Vec::new();
        for file in std::fs::read_dir(&self.dir).map_err(failed)? {
            let name = file.map_err(failed)?.file_name();
            let number: Option<u64> =
                name.to_str().and_then(|n| n.strip_prefix("epoch-")?.strip_suffix(".ledger")?.parse().ok());
            let Some(number) = number else { continue };
            // No world has a shorter head.
            let shortest = Epoch::head(&self.setup, number, World { ranks: 1, batch: 1, tail: Tail::Keep });
            match never_was(&self.path(number), shortest.len()) {
                Ok(true) => {}
                // It was forgotten meanwhile.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Ok(false) | Err(_) => out.push(number),
            }
        }
        out.sort_unstable();
        Ok(out)
    }

    fn loaded(&self, epoch: u64) -> Option<Arc<Epoch>> {
        lock(&self.epochs).get(&epoch).filter(|e| e.ledger().works()).cloned()
    }

    /// An epoch that has begun.
    ///
    /// # Errors
    /// [`JobError::NoEpoch`], and what its ledger says.
    pub async fn epoch(self: &Arc<Self>, number: u64) -> Result<Arc<Epoch>, JobError> {
        self.find(number, false).await
    }

    /// The epoch of which this asks a lease; begun, if it was not. A beginning ends epochs before it: what an epoch that
    /// has just begun would refuse begins none.
    ///
    /// # Errors
    /// As [`Epoch::lease`], and what its ledger says.
    pub async fn to_lease(self: &Arc<Self>, number: u64, ask: &LeaseRequest) -> Result<Arc<Epoch>, JobError> {
        match self.epoch(number).await {
            Err(JobError::NoEpoch(_)) => {}
            there => return there,
        }
        Epoch::can_want(ask)?;
        let ranks = self.world_now().ranks;
        if ask.rank >= ranks {
            return Err(LeaseError::Rank { rank: ask.rank, ranks }.into());
        }
        if ask.renew.len() > ACKS_MAX {
            return Err(JobError::Request(format!("more than {ACKS_MAX} renewals in one request")));
        }
        if let Some(ack) = ask.acks.first() {
            return Err(LeaseError::Gone(ack.lease).into());
        }
        self.find(number, true).await
    }

    /// The epoch of which something is to be committed; begun, if it was not.
    ///
    /// # Errors
    /// [`JobError::Uncommitted`], and what its ledger says.
    pub async fn to_commit(self: &Arc<Self>, number: u64) -> Result<Arc<Epoch>, JobError> {
        if self.setup.visitation != Visitation::Checkpoint {
            return Err(JobError::Uncommitted);
        }
        self.find(number, true).await
    }

    async fn find(self: &Arc<Self>, number: u64, begin: bool) -> Result<Arc<Epoch>, JobError> {
        if let Some(epoch) = self.loaded(number) {
            return Ok(epoch);
        }
        let this = Arc::clone(self);
        self.alone(async move { this.epoch_alone(number, begin).await }).await
    }

    /// Runs what opens, begins or replaces epochs: one at a time, and to its end even when whoever asked goes away, so
    /// that no file is ever written by two.
    async fn alone<T: Send + 'static>(
        &self,
        what: impl Future<Output = Result<T, JobError>> + Send + 'static,
    ) -> Result<T, JobError> {
        let turn = Arc::clone(&self.opening).lock_owned().await;
        if self.gone.load(SeqCst) {
            return Err(JobError::Reopening);
        }
        let task = self.setup.context.tasks.spawn(async move {
            let _turn = turn;
            what.await
        });
        task.await.map_err(|_| JobError::Lost)?
    }

    async fn epoch_alone(self: &Arc<Self>, number: u64, begin: bool) -> Result<Arc<Epoch>, JobError> {
        if let Some(epoch) = self.loaded(number) {
            return Ok(epoch);
        }
        // One whose ledger failed gives its subscriber back before it is read anew.
        if let Some(old) = lock(&self.epochs).remove(&number) {
            old.abandon();
        }
        let this = Arc::clone(self);
        let epoch = blocking(move || this.open_epoch(number, begin)).await?;
        lock(&self.epochs).insert(number, Arc::clone(&epoch));
        Ok(epoch)
    }

    fn open_epoch(&self, number: u64, begin: bool) -> Result<Arc<Epoch>, JobError> {
        let known = self.on_disk()?;
        let world = world_of(&self.world_now());
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
            // Which syncs the file; and the way to it, which a server that was killed may have left.
            let epoch = Epoch::open(&self.setup, &path, number, world, over)?;
            sync_beside(&path).map_err(failed)?;
            Ok(epoch)
        };
        begun().inspect_err(|_| {
            if fresh && let Err(error) = std::fs::remove_file(&path) {
                tracing::warn!(file = %path.display(), %error, "an epoch that could not begin leaves a part of its ledger");
            }
        })
    }

    /// A new epoch begins: those before its predecessor are over, and the oldest are forgotten.
    fn make_room(&self, known: &[u64], number: u64) -> Result<(), JobError> {
        let mut epochs = lock(&self.epochs);
        for (_, old) in epochs.range(..number.saturating_sub(1)) {
            old.abandon();
        }
        let others = known.iter().filter(|&&n| n != number).count();
        let too_many = (others + 1).saturating_sub(EPOCHS_MAX);
        for &n in known.iter().filter(|&&n| n < number.saturating_sub(1)).take(too_many) {
            let path = self.path(n);
            std::fs::remove_file(&path).map_err(|error| JobError::Io { path, error })?;
            epochs.remove(&n);
        }
        Ok(())
    }

    /// Puts a state: the epoch is what it says.
    ///
    /// # Errors
    /// [`JobError::BadState`], [`JobError::StateDiffers`], [`JobError::StateBehind`].
    pub async fn put_state(
        self: &Arc<Self>,
        number: u64,
        bytes: &[u8],
        replace: bool,
    ) -> Result<Arc<Epoch>, JobError> {
        let bad = |why: String| JobError::BadState(why);
        let read = Ledger::read(bytes).map_err(|e| bad(e.to_string()))?;
        if read.len != bytes.len() {
            return Err(bad("it ends in the middle of a record".to_owned()));
        }
        read.header.world.check()?;
        can_be_kept(
            &self.setup.plan,
            self.setup.bucketed.as_ref(),
            read.header.world,
            self.setup.context.ledger_bytes,
        )?;
        if read.events.iter().any(|e| !matches!(e, Event::Resume { .. })) {
            return Err(bad("it has more than what was acknowledged; use …/state, not …/ledger".to_owned()));
        }
        let header = Epoch::header(&self.setup, number, read.header.world);
        if let Some((what, got, want)) = differs(&read.header, &header, self.setup.block > 0) {
            return Err(JobError::StateDiffers { what, got, want });
        }
        let schedule = Schedule::new(&self.setup, number, read.header.world)?;
        let mut leases = Leases::new(schedule.planned(), read.header.world)?;
        read.replay(&mut leases, 0).map_err(|e| bad(e.to_string()))?;
        let acked = leases.acked().clone();
        schedule.may_become(number, &acked, read.header.world, world_of(&self.world_now()))?;
        let this = Arc::clone(self);
        self.alone(async move { this.put_alone(number, header, acked, replace).await }).await
    }

    async fn put_alone(
        self: Arc<Self>,
        number: u64,
        header: Header,
        acked: Bits,
        replace: bool,
    ) -> Result<Arc<Epoch>, JobError> {
        let there = match self.epoch_alone(number, false).await {
            Ok(there) => Some(there),
            // What cannot be read may be replaced.
            Err(e) if replace && e.is_of_its_file() => None,
            Err(JobError::NoEpoch(_)) => None,
            Err(e) => return Err(e),
        };
        let same = there.as_ref().is_some_and(|there| there.is_at(&acked));
        // Whoever held something when the model died may live; and a full ledger is replaced by a short one.
        let full = |there: &Epoch| there.state_now() == EpochState::Open && there.is_full();
        let anew = replace && there.as_ref().is_some_and(|there| there.has_leases() || full(there));
        let keeps = same && !anew;
        let this = Arc::clone(&self);
        if replace || self.setup.visitation == Visitation::Checkpoint {
            // What came since is forgotten; later ones first: after a crash in between the same request finds what is left
            // to do.
            blocking(move || this.forget_after(number)).await?;
        } else if !same && (there.is_some() || blocking(move || this.has_later(number)).await?) {
            return Err(JobError::StateBehind(number));
        }
        if let Some(there) = there {
            if keeps && there.state_now() != EpochState::Abandoned {
                there.durable().await?;
                return Ok(there);
            }
            blocking(move || {
                there.close();
                Ok(())
            })
            .await?;
        }
        lock(&self.epochs).remove(&number);
        if !keeps {
            let this = Arc::clone(&self);
            blocking(move || {
                let known = this.on_disk()?;
                this.make_room(&known, number)?;
                Epoch::begin(&this.path(number), &header, &acked)
            })
            .await?;
        }
        self.epoch_alone(number, false).await
    }

    /// Whether a later epoch has begun. Blocking.
    fn has_later(&self, number: u64) -> Result<bool, JobError> {
        Ok(self.on_disk()?.last().is_some_and(|&last| last > number))
    }

    /// The content hash of every sample.
    ///
    /// # Errors
    /// Those of the tables.
    pub async fn contents(&self) -> Result<Arc<Vec<Hash>>, JobError> {
        let made = self.contents.get_or_try_init(|| async {
            Ok::<_, JobError>(Arc::new(self.setup.samples.contents(&self.source).await?))
        });
        made.await.cloned()
    }

    /// As it is now, with every epoch that is remembered.
    ///
    /// # Errors
    /// What a ledger says.
    pub async fn view(self: &Arc<Self>) -> Result<View, JobError> {
        let this = Arc::clone(self);
        let known = blocking(move || this.on_disk()).await?;
        let mut epochs: Vec<EpochView> = Vec::new();
        for n in known {
            match self.epoch(n).await {
                Ok(e) => epochs.push(e.view()),
                // Forgotten meanwhile.
                Err(JobError::NoEpoch(_)) => {}
                // It alone cannot be believed: the others go on, and it may be replaced.
                Err(error) if error.is_of_its_file() => {
                    tracing::error!(job = %self.setup.job, epoch = n, %error, "an epoch's ledger cannot be believed");
                    epochs.push(self.damaged(n));
                }
                Err(e) => return Err(e),
            }
        }
        let record = self.known();
        let (setup, world) = (&self.setup, record.ask.world);
        Ok(View {
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
        })
    }

    /// An epoch of which nothing is known.
    fn damaged(&self, epoch: u64) -> EpochView {
        EpochView {
            epoch,
            state: EpochState::Damaged,
            world: self.world_now(),
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

    /// The stream of a lease is being read.
    pub fn touch(&self, epoch: u64, lease: u64, request: Request) {
        let epoch = lock(&self.epochs).get(&epoch).cloned();
        if let Some(epoch) = epoch {
            epoch.touch(lease, request);
        }
    }

    /// Housekeeping.
    pub fn tick(&self) {
        let open: Vec<_> = lock(&self.epochs).values().cloned().collect();
        open.iter().for_each(|e| e.tick());
    }

    /// Whether a lease of any of its epochs lives.
    #[must_use]
    pub fn has_leases(&self) -> bool {
        lock(&self.epochs).values().any(|e| e.has_leases())
    }

    /// Epochs in memory, and of them those that go on.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        let epochs = lock(&self.epochs);
        let open = epochs.values().filter(|e| e.state_now() == EpochState::Open).count();
        (epochs.len() as u64, open as u64)
    }

    /// The job is gone, or opened anew: nothing is granted or written any more when this returns. Goes on to its end even
    /// when whoever asked goes away.
    pub async fn close(self: &Arc<Self>) {
        self.gone.store(true, SeqCst);
        // What is being opened is opened first.
        let last = Arc::clone(&self.opening).lock_owned().await;
        let this = Arc::clone(self);
        let closing = self.setup.context.tasks.spawn(async move {
            let _last = last;
            let epochs = std::mem::take(&mut *lock(&this.epochs));
            let close = move || {
                epochs.values().for_each(|e| e.close());
                Ok(())
            };
            blocking(close).await
        });
        if let Err(e) = closing.await.map_err(|_| JobError::Lost).and_then(|closed| closed) {
            tracing::error!(job = %self.setup.job, error = %e, "its ledgers were not closed");
        }
    }
}
