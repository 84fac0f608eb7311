//! Watches the calls in flight: waits for permits, and ends the attempts that [`Stalls`] revokes.

use super::{CallId, Stalls, WaitsFor};
use crate::OriginError;
use crate::backend::Backend;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, sleep};

/// How often a caller that waits looks for stalled calls.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How often a call tells of bytes that came. Many pieces come in this time.
const TELL_EVERY: Duration = Duration::from_millis(50);

tokio::task_local! {
    /// The attempt that this task makes.
    static ATTEMPT: Arc<Progress>;
}

/// Records that the head or a piece of the answer came, if the task makes a watched attempt.
pub(crate) fn heard() {
    // A write or a listing is not watched.
    ATTEMPT.try_with(|attempt| attempt.heard()).unwrap_or_default();
}

/// The calls in flight of a process, with the way to end each one.
pub(crate) struct StallWatch(Mutex<Watched>);

struct Watched {
    stalls: Stalls,
    revocations: HashMap<CallId, Arc<Notify>>,
    /// The turns of the callers that wait for a slot for suspects.
    turns: BTreeMap<Backend, Arc<Semaphore>>,
    looked: Instant,
}

/// One attempt in flight. Dropping it ends it.
pub(crate) struct Progress {
    watch: Arc<StallWatch>,
    backend: Backend,
    id: CallId,
    began: Instant,
    /// When the attempt told of bytes last, in milliseconds since it began; 0 before the first byte.
    told_ms: AtomicU64,
    revoked: Arc<Notify>,
}

/// A permit that counts as held. Dropping it ends that.
pub(crate) struct Holding {
    watch: Arc<StallWatch>,
    backend: Backend,
}

/// A slot for a call to a suspect. Dropping it gives it back.
pub(crate) struct SuspectSlot {
    watch: Arc<StallWatch>,
    backend: Backend,
}

/// A caller that waits. Dropping it ends that.
struct Waiting<'a> {
    watch: &'a StallWatch,
    what: WaitsFor<'a>,
}

impl fmt::Debug for StallWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StallWatch({} attempts in flight)", self.lock().revocations.len())
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        let mut watched = self.watch.lock();
        watched.stalls.ended(&self.backend, self.id, Instant::now());
        watched.revocations.remove(&self.id);
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.watch.lock().stalls.held(&self.backend, -1);
    }
}

impl Drop for SuspectSlot {
    fn drop(&mut self) {
        self.watch.lock().stalls.give_slot_back(&self.backend);
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.watch.lock().stalls.waiting(self.what, -1);
    }
}

impl Progress {
    fn heard(&self) {
        let now = Instant::now();
        let ms = u64::try_from((now - self.began).as_millis()).unwrap_or(u64::MAX).max(1);
        let told = self.told_ms.load(Relaxed);
        if told == 0 || ms.saturating_sub(told) >= TELL_EVERY.as_millis() as u64 {
            self.told_ms.store(ms, Relaxed);
            self.watch.lock().stalls.heard(&self.backend, self.id, now);
        }
    }
}

impl StallWatch {
    /// Creates a watch over `permits_max` permits. An attempt is given up after `attempt_max` of silence.
    pub fn new(permits_max: usize, attempt_max: Duration) -> Arc<Self> {
        Arc::new(StallWatch(Mutex::new(Watched {
            stalls: Stalls::new(permits_max, attempt_max),
            revocations: HashMap::new(),
            turns: BTreeMap::new(),
            looked: Instant::now(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Watched> {
        self.0.lock()
    }

    /// Returns how many attempts began so far.
    #[cfg(test)]
    pub fn begun(&self) -> CallId {
        self.lock().stalls.next
    }

    /// Counts a permit of the backend as held until the value is dropped.
    pub fn holding(self: &Arc<Self>, backend: &Backend) -> Holding {
        self.lock().stalls.held(backend, 1);
        Holding { watch: Arc::clone(self), backend: backend.clone() }
    }

    pub fn is_suspect(&self, backend: &Backend, object: &str) -> bool {
        self.lock().stalls.is_suspect(backend, object, Instant::now())
    }

    /// Waits for a slot for a call to a suspect, of a backend with `permits`. The caller bounds the time.
    ///
    /// Returns `None` if the object is no suspect any more: the backend turned out to be slow.
    pub async fn suspect_slot(
        self: &Arc<Self>,
        (backend, permits): (&Backend, usize),
        object: &str,
    ) -> Option<SuspectSlot> {
        let turns = {
            let mut watched = self.lock();
            Arc::clone(watched.turns.entry(backend.clone()).or_insert_with(|| Arc::new(Semaphore::new(1))))
        };
        // The semaphore is never closed. The caller with the turn looks, and the others wait in their order.
        let _turn = turns.acquire().await;
        while self.is_suspect(backend, object) {
            if self.lock().stalls.take_slot(backend, permits, Instant::now()) {
                return Some(SuspectSlot { watch: Arc::clone(self), backend: backend.clone() });
            }
            sleep(LOOK_EVERY).await;
        }
        None
    }

    /// Waits for a permit. Until it comes, stalled calls that hold more than their half are revoked.
    pub async fn waited<T>(&self, what: WaitsFor<'_>, permit: impl Future<Output = T>) -> T {
        let mut permit = pin!(permit);
        // Without a wait nobody is counted.
        tokio::select! {
            biased;
            permit = &mut permit => return permit,
            () = std::future::ready(()) => {}
        }
        self.lock().stalls.waiting(what, 1);
        let _waiting = Waiting { watch: self, what };
        loop {
            tokio::select! {
                biased;
                permit = &mut permit => return permit,
                () = sleep(LOOK_EVERY) => self.look(Instant::now()),
            }
        }
    }

    pub fn is_awaited_outside(&self, backend: &Backend) -> bool {
        self.lock().stalls.is_awaited_outside(backend)
    }

    /// Waits until a caller waits for a permit that a call to the backend holds outside of this crate.
    pub async fn awaited_outside(&self, backend: &Backend) {
        while !self.is_awaited_outside(backend) {
            sleep(LOOK_EVERY).await;
        }
    }

    /// Revokes what may be revoked now. Many callers wait, and one look serves them all.
    fn look(&self, now: Instant) {
        let mut watched = self.lock();
        if now.saturating_duration_since(watched.looked) < LOOK_EVERY / 2 {
            return;
        }
        watched.looked = now;
        for id in watched.stalls.revoke(now) {
            if let Some(revoked) = watched.revocations.get(&id) {
                revoked.notify_one();
            }
        }
    }

    /// Runs an attempt to read an object. Returns the error of a revoked one, and whether it was revoked.
    pub async fn attempt<T>(
        self: &Arc<Self>,
        backend: &Backend,
        (what, has_slot): (&str, bool),
        sent: impl Future<Output = Result<T, OriginError>>,
    ) -> (Result<T, OriginError>, bool) {
        let (began, revoked) = (Instant::now(), Arc::new(Notify::new()));
        let id = {
            let mut watched = self.lock();
            let id = watched.stalls.began(backend, (what, has_slot), began);
            watched.revocations.insert(id, Arc::clone(&revoked));
            id
        };
        let (watch, backend, told_ms) = (Arc::clone(self), backend.clone(), AtomicU64::new(0));
        let progress = Arc::new(Progress { watch, backend, id, began, told_ms, revoked });
        tokio::select! {
            biased;
            result = ATTEMPT.scope(Arc::clone(&progress), sent) => (result, false),
            () = progress.revoked.notified() => {
                let silence = self.lock().stalls.patience(&progress.backend).as_secs_f64();
                let why = format!("no byte came for {silence:.1} s while other reads waited for a permit");
                (Err(OriginError::Unavailable { what: what.to_owned(), why }), true)
            }
        }
    }
}
