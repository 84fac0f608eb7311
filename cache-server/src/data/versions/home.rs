//! The homes of datasets: each origin of a dataset, with what the server knows about its health.
//!
//! A home is an origin's URI in one domain. Domains share no health, so that the time of a reply does not
//! tell what other domains read (I7). Every call to a home goes through [`HomeOrigin`], which records its
//! outcome. Whether a home is asked at all is the choice of `race.rs`.

use super::{
    breaker::{Admission, Breaker, BreakerState, Change, Outcome},
    changed_objects::ChangedObjects,
    condition::{Condition, ConditionView},
    patience::Patience,
    renewed_pins::RenewedPins,
};
use crate::{
    tenancy::accounting::{Accounts, NO_JOB},
    training::benefit::ServiceLog,
};
use fletch_bounds::{Gate, pass_gate};
use fletch_core::{DatasetName, Domain, Tenant};
use fletch_origin::{Meter, ObjectBytes, ObjectMeta, Origin, OriginError, OriginUri, Pin};
use futures::stream::BoxStream;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};
use tokio::{
    sync::{Notify, Semaphore, SemaphorePermit, watch},
    time::{Instant, sleep},
};

/// The most calls at once to a home that is left alone.
///
/// Readers that have no other home ask it all the same. They must not use up the calls of healthy homes.
const UNHEALTHY_CALLS_MAX: usize = 4;
/// The most homes that are remembered. Beyond it, healthy ones that no version uses are forgotten.
const HOMES_MAX: usize = 32_768;

/// What all homes count.
#[derive(Debug, Default)]
pub struct HomeCounts {
    /// Calls to a second home while the first still might answer.
    pub hedged: AtomicU64,
    /// Times that a breaker opened.
    pub opened: AtomicU64,
}

/// One origin of a dataset, and its health.
#[derive(Debug)]
pub struct Home {
    uri: OriginUri,
    /// The dataset for which the home was opened first, for the log.
    dataset: DatasetName,
    health: Mutex<Health>,
    condition: Mutex<Condition>,
    /// The latest reads of content.
    reads: ServiceLog,
    /// Permits for calls while the home is not healthy.
    unhealthy_permits: Semaphore,
    /// Notified when the home answers again: no call waits for a permit then.
    closed: Notify,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Health {
    breaker: Breaker,
    patience: Patience,
}

#[derive(Debug)]
struct Shared {
    counts: HomeCounts,
    call_timeout: Duration,
    /// Notified when a breaker opens: calls that wait for that home turn to another.
    opened: watch::Sender<()>,
    renewed: RenewedPins,
    changed: ChangedObjects,
}

impl Home {
    /// Returns the URI, which holds no secret.
    #[must_use]
    pub fn uri(&self) -> &OriginUri {
        &self.uri
    }

    /// Returns the renewed pins, which all homes share.
    pub(super) fn renewed_pins(&self) -> &RenewedPins {
        &self.shared.renewed
    }

    /// Returns the changed objects, which all homes share.
    pub(super) fn changed_objects(&self) -> &ChangedObjects {
        &self.shared.changed
    }

    /// Returns the latest reads of content.
    #[must_use]
    pub fn reads(&self) -> &ServiceLog {
        &self.reads
    }

    /// Returns the state of the breaker.
    #[must_use]
    pub fn state(&self) -> BreakerState {
        self.health.lock().breaker.state()
    }

    /// Returns whether the home works, and what its calls did.
    #[must_use]
    pub fn condition(&self) -> ConditionView {
        let view = self.condition.lock().view((Instant::now(), SystemTime::now()));
        ConditionView { failing: view.failing || !self.is_healthy(), ..view }
    }

    /// Returns whether the home fails, and nobody asked it lately.
    pub(super) fn is_probe_due(&self) -> bool {
        self.condition.lock().probe_due(Instant::now()).is_some()
    }

    /// Returns whether the home is asked.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.state() == BreakerState::Closed
    }

    /// Returns what a caller may do with the home now.
    pub(super) fn admit(&self) -> Admission {
        self.health.lock().breaker.admit(Instant::now())
    }

    /// Returns how long a call waits for a hedge, and the silence after which it counts as failed.
    pub(super) fn patience(&self) -> (Duration, Duration) {
        let health = self.health.lock();
        (health.patience.hedge_after(), health.patience.silent_after())
    }

    /// Takes a hedge from this home's budget, and counts it. Returns whether the budget had one.
    pub(super) fn take_hedge(&self) -> bool {
        let taken = self.health.lock().patience.take_hedge();
        self.shared.counts.hedged.fetch_add(u64::from(taken), Relaxed);
        taken
    }

    /// Records the outcome of a call, and logs a change.
    pub(super) fn report(&self, outcome: Outcome) {
        let change = self.health.lock().breaker.report(outcome, Instant::now());
        match change {
            None => {}
            Some(Change::Tripped(cooldown)) => {
                self.shared.counts.opened.fetch_add(1, Relaxed);
                let why = match outcome {
                    Outcome::Overtaken(silent) => format!("no answer in {silent:.1?}"),
                    Outcome::Silent => format!("no answer in {:.1?}", self.patience().1),
                    Outcome::Failed | Outcome::Answered => "several calls in a row failed".to_owned(),
                };
                tracing::warn!(
                    origin = %self.uri, dataset = %self.dataset, %why, probe_in = ?cooldown,
                    "an origin does not answer: the server reads from other datasets with the same root, \
                     where there are any"
                );
                self.shared.opened.send_replace(());
            }
            Some(Change::Closed(after)) => {
                self.closed.notify_waiters();
                tracing::info!(
                    origin = %self.uri, dataset = %self.dataset, ?after, "an origin answers again"
                );
            }
        }
    }

    /// Waits until a call may be made. Returns the permit that the call holds, if it needs one.
    async fn permit(&self) -> Result<Option<SemaphorePermit<'_>>, OriginError> {
        let closed = self.closed.notified();
        tokio::pin!(closed);
        closed.as_mut().enable();
        if self.is_healthy() {
            return Ok(None);
        }
        tokio::select! {
            () = closed => Ok(None),
            // The semaphore is never closed.
            permit = pass_gate(Gate::SilentOrigin, self.unhealthy_permits.acquire()) => Ok(permit.ok()),
            () = sleep(self.shared.call_timeout) => {
                let why = format!(
                    "it does not answer, and {UNHEALTHY_CALLS_MAX} other calls wait for it; retry later"
                );
                Err(OriginError::Unavailable { what: self.uri.to_string(), why })
            }
        }
    }

    /// Records the outcome of a finished call that began at `begun`.
    fn observe<T>(&self, begun: Instant, result: &Result<T, OriginError>) {
        match result {
            Err(OriginError::Unavailable { .. } | OriginError::Throttled { .. }) => {
                self.report(Outcome::Failed);
            }
            // A missing, changed or corrupt object is the answer of a home that works.
            Err(_) => self.report(Outcome::Answered),
            Ok(_) => {
                self.health.lock().patience.record(begun.elapsed());
                self.report(Outcome::Answered);
            }
        }
    }
}

/// An origin whose calls are recorded in its home's health. Cheap to clone.
#[derive(Debug, Clone)]
pub struct HomeOrigin {
    origin: Origin,
    home: Arc<Home>,
}

impl HomeOrigin {
    #[must_use]
    pub fn home(&self) -> &Arc<Home> {
        &self.home
    }

    /// Returns the origin, whose calls are not recorded in the home.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    #[must_use]
    pub fn uri(&self) -> &OriginUri {
        self.origin.uri()
    }

    /// Reads a table, as [`Origin::get`].
    ///
    /// # Errors
    /// As [`Origin::get`].
    pub async fn get(
        &self,
        path: &str,
        range: Option<Range<u64>>,
        pin: Option<&Pin>,
    ) -> Result<ObjectBytes, OriginError> {
        self.observed((path, pin.is_some()), || self.origin.get(path, range.clone(), pin)).await
    }

    /// Reads content, as [`Origin::get_hashed`]. The meter of the job that asked counts the bytes.
    ///
    /// # Errors
    /// As [`Origin::get_hashed`].
    pub async fn get_content(
        &self,
        meter: &Meter,
        path: &str,
        range: Range<u64>,
        pin: &Pin,
    ) -> Result<ObjectBytes, OriginError> {
        let origin = self.origin.clone().metered(meter);
        let begun = Instant::now();
        let got = self.observed((path, true), || origin.get_hashed(path, Some(range.clone()), pin)).await?;
        self.home.reads.note(begun.into_std(), got.bytes.len() as u64);
        Ok(got)
    }

    /// Whether content can be read here and now: from a disk of this machine that works.
    #[must_use]
    pub fn is_near(&self) -> bool {
        self.origin.is_near() && self.home.is_healthy()
    }

    /// Reads content on this thread, as [`Origin::fill_here`]. Its outcome is not recorded in the home: a
    /// caller that fails reads it as usual.
    ///
    /// # Errors
    /// As [`Origin::fill_here`].
    pub fn fill_here(
        &self,
        meter: &Meter,
        path: &str,
        at: (u64, &Pin),
        buffer: &mut [u8],
    ) -> Result<(), OriginError> {
        let begun = Instant::now();
        self.origin.clone().metered(meter).fill_here(path, at, buffer)?;
        self.home.reads.note(begun.into_std(), buffer.len() as u64);
        Ok(())
    }

    /// Returns an object's metadata, as [`Origin::head`].
    ///
    /// # Errors
    /// As [`Origin::get`].
    pub async fn head(&self, path: &str) -> Result<ObjectMeta, OriginError> {
        self.observed((path, false), || self.origin.head(path)).await
    }

    /// Lists objects, as [`Origin::list`]. The caller records the outcome with [`HomeOrigin::observed`].
    pub(super) fn list(&self, prefix: &str) -> BoxStream<'static, Result<ObjectMeta, OriginError>> {
        self.origin.list(prefix)
    }

    /// Runs a call to the origin, and records its outcome and latency. A call that is dropped has no outcome.
    ///
    /// `at` is the path, and whether the tables say that it exists.
    ///
    /// When the home answers again after an outage, a call that began before is made anew: it may hang on a
    /// connection that is dead.
    pub(super) async fn observed<T, F: Future<Output = Result<T, OriginError>>>(
        &self,
        at: (&str, bool),
        call: impl Fn() -> F,
    ) -> Result<T, OriginError> {
        loop {
            let _permit = self.home.permit().await?;
            let closed = self.home.closed.notified();
            tokio::select! {
                biased;
                () = closed => {}
                result = self.recorded(at, call()) => return result,
            }
        }
    }

    /// Reads an object beside the readers, past the bound on calls to a home that is not healthy.
    pub(super) async fn probe_get(&self, path: &str, range: Range<u64>, pin: &Pin) {
        drop(self.recorded((path, true), self.origin.get_hashed(path, Some(range), pin)).await);
    }

    /// Asks for an object's metadata, as [`HomeOrigin::probe_get`].
    pub(super) async fn probe_head(&self, path: &str) {
        drop(self.recorded((path, false), self.origin.head(path)).await);
    }

    /// Asks a failing home that nobody asks whether it works again, if that is due.
    pub(super) async fn probe_failing(&self) {
        let due = self.home.condition.lock().probe_due(Instant::now());
        if let Some((path, exists)) = due {
            drop(self.recorded((&path, exists), self.origin.head(&path)).await);
        }
    }

    async fn recorded<T>(
        &self,
        at: (&str, bool),
        call: impl Future<Output = Result<T, OriginError>>,
    ) -> Result<T, OriginError> {
        let begun = Instant::now();
        self.home.health.lock().patience.earn();
        let running = RunningCall::begin(&self.home, at, begun);
        let result = call.await;
        if let Err(OriginError::GaveWay { .. }) = &result {
            // One object hangs. That counts like a caller who gave up, and is no outcome of the home.
            return result;
        }
        running.end(result.as_ref().err());
        self.home.observe(begun, &result);
        result
    }
}

/// A call that runs. If it is dropped before its result, its caller gave it up.
struct RunningCall<'a> {
    home: &'a Home,
    call: u64,
    at: (&'a str, bool),
}

impl<'a> RunningCall<'a> {
    fn begin(home: &'a Home, at: (&'a str, bool), now: Instant) -> Self {
        RunningCall { home, call: home.condition.lock().begin(now), at }
    }

    fn end(&self, error: Option<&OriginError>) {
        let now = (Instant::now(), SystemTime::now());
        self.home.condition.lock().end(self.call, self.at, error, now);
    }
}

impl Drop for RunningCall<'_> {
    fn drop(&mut self) {
        let now = (Instant::now(), SystemTime::now());
        self.home.condition.lock().give_up(self.call, self.at, now);
    }
}

/// The homes of all domains.
#[derive(Debug)]
pub struct Homes {
    homes: Mutex<HashMap<(Domain, OriginUri), Arc<Home>>>,
    accounts: Arc<Accounts>,
    shared: Arc<Shared>,
}

impl Homes {
    /// Creates the homes. A call waits at most `call_timeout` for a home that does not answer.
    pub(super) fn new(call_timeout: Duration, accounts: Arc<Accounts>) -> Self {
        let shared = Shared {
            counts: HomeCounts::default(),
            call_timeout,
            opened: watch::Sender::new(()),
            renewed: RenewedPins::default(),
            changed: ChangedObjects::default(),
        };
        Homes { homes: Mutex::default(), accounts, shared: Arc::new(shared) }
    }

    /// Returns the renewed pins of all domains.
    pub(super) fn renewed_pins(&self) -> &RenewedPins {
        &self.shared.renewed
    }

    /// Returns the changed objects of all domains.
    pub(super) fn changed_objects(&self) -> &ChangedObjects {
        &self.shared.changed
    }

    /// Returns an origin of a dataset with its home.
    pub(super) fn with_home(
        &self,
        (domain, tenant): (&Domain, &Tenant),
        dataset: &DatasetName,
        origin: Origin,
    ) -> HomeOrigin {
        let costs = self.accounts.costs.of_server((domain, tenant), dataset, NO_JOB);
        let origin = origin.metered(&costs.tables_meter());
        let mut homes = self.homes.lock();
        let key = (domain.clone(), origin.uri().clone());
        if let Some(home) = homes.get(&key) {
            return HomeOrigin { origin, home: Arc::clone(home) };
        }
        if homes.len() >= HOMES_MAX {
            homes.retain(|_, home| Arc::strong_count(home) > 1 || !home.is_healthy());
        }
        let home = Arc::new(Home {
            uri: origin.uri().clone(),
            dataset: dataset.clone(),
            health: Mutex::default(),
            condition: Mutex::default(),
            reads: ServiceLog::default(),
            unhealthy_permits: Semaphore::new(UNHEALTHY_CALLS_MAX),
            closed: Notify::new(),
            shared: Arc::clone(&self.shared),
        });
        // Every place may be taken by a home in use: then this one is not remembered.
        if homes.len() < HOMES_MAX {
            homes.insert(key, Arc::clone(&home));
        }
        HomeOrigin { origin, home }
    }

    /// Returns what all homes count.
    #[must_use]
    pub fn counts(&self) -> &HomeCounts {
        &self.shared.counts
    }

    /// Returns a receiver that changes whenever a breaker opens.
    pub(super) fn openings(&self) -> watch::Receiver<()> {
        self.shared.opened.subscribe()
    }

    /// Returns all homes, by domain and URI.
    #[must_use]
    pub fn all(&self) -> Vec<(Domain, Arc<Home>)> {
        self.homes.lock().iter().map(|((domain, _), home)| (domain.clone(), Arc::clone(home))).collect()
    }

    /// Returns the homes that are not healthy, by domain and URI.
    #[must_use]
    pub fn unhealthy(&self) -> HashMap<(Domain, OriginUri), BreakerState> {
        let homes = self.homes.lock();
        let states = homes.iter().map(|(key, home)| (key, home.state()));
        states.filter(|(_, s)| *s != BreakerState::Closed).map(|(key, s)| (key.clone(), s)).collect()
    }
}
