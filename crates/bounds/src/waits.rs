//! How long a read, a request or a job waited at each gate.
//!
//! Invariants:
//! 1. A wait is recorded once in the [`Waits`] of its task, and once in each one above it.
//! 2. A gate that is open at once costs no clock and is not recorded.
//! 3. A wait that is given up is recorded with the time until then.
//! 4. A request that waits nowhere gets no span: making one takes longer than an answer from memory.

use crate::{Gate, RequestId};
use parking_lot::Mutex;
use pin_project_lite::pin_project;
use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};
use tokio::{task::futures::TaskLocalFuture, task_local};
use tokio_util::either::Either;
use tracing::{Instrument as _, Span};

task_local! {
    static CURRENT: Arc<Waits>;
}

/// Gets each wait besides the [`Waits`] themselves, such as a histogram.
pub trait RecordWait: Send + Sync {
    fn record_wait(&self, gate: Gate, waited: Duration);
}

/// Makes the span of a request.
pub type MakeSpan = Box<dyn Fn() -> Span + Send + Sync>;

/// What waits besides, of which these waits are a part.
#[derive(Default)]
enum Above {
    #[default]
    Nothing,
    Record(Arc<dyn RecordWait>),
    Whole(Arc<Waits>),
}

/// The time that something waited at each gate.
#[derive(Default)]
pub struct Waits {
    nanos: [AtomicU64; Gate::ALL.len()],
    under_way: Mutex<Vec<(Gate, Instant)>>,
    above: Above,
    request: Option<(RequestId, MakeSpan)>,
    /// Made by the first wait, or by the first task.
    span: OnceLock<Span>,
    /// Set when it is known for which job a request reads.
    job: OnceLock<Arc<dyn RecordWait>>,
    has_waited: AtomicBool,
    is_noted: AtomicBool,
}

impl std::fmt::Debug for Waits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(self.longest_first().iter().map(|(gate, time)| (gate.as_str(), time))).finish()
    }
}

impl RecordWait for Waits {
    fn record_wait(&self, gate: Gate, waited: Duration) {
        let nanos = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
        self.has_waited.store(true, Relaxed);
        self.nanos[gate as usize].fetch_add(nanos, Relaxed);
        match &self.above {
            Above::Nothing => {}
            Above::Record(above) => above.record_wait(gate, waited),
            Above::Whole(whole) => whole.record_wait(gate, waited),
        }
        if let Some(job) = self.job.get() {
            job.record_wait(gate, waited);
        }
    }
}

impl Waits {
    /// Creates the waits of background work. Each wait is also recorded in `above`.
    #[must_use]
    pub fn in_background(above: Arc<dyn RecordWait>) -> Arc<Self> {
        Arc::new(Waits { above: Above::Record(above), ..Waits::default() })
    }

    /// Creates the waits of a request. Each wait is also recorded in `above`.
    #[must_use]
    pub fn of_request(above: Arc<dyn RecordWait>, id: RequestId, span: MakeSpan) -> Arc<Self> {
        Arc::new(Waits { above: Above::Record(above), request: Some((id, span)), ..Waits::default() })
    }

    /// Creates the waits of a part of what the current task does, such as one read of a request.
    #[must_use]
    pub fn of_part() -> Arc<Self> {
        let Some(whole) = Waits::current() else { return Arc::default() };
        Arc::new(Waits { above: Above::Whole(whole), ..Waits::default() })
    }

    fn whole(&self) -> &Waits {
        match &self.above {
            Above::Whole(whole) => whole.whole(),
            Above::Nothing | Above::Record(_) => self,
        }
    }

    /// Returns the span of the request, which is made now if need be. Background work has none.
    pub fn span(&self) -> Span {
        let whole = self.whole();
        match &whole.request {
            Some((_, make)) => whole.span.get_or_init(make).clone(),
            None => Span::none(),
        }
    }

    /// Returns the waits of the current task.
    #[must_use]
    pub fn current() -> Option<Arc<Self>> {
        CURRENT.try_with(Arc::clone).ok()
    }

    /// Returns the id of the request for which the current task works.
    #[must_use]
    pub fn current_request() -> Option<RequestId> {
        let id = |waits: &Arc<Waits>| waits.whole().request.as_ref().map(|(id, _)| id.clone());
        CURRENT.try_with(id).ok().flatten()
    }

    /// Records all later waits in those of a job, too. The first job stays.
    pub fn record_for_job(&self, job: &Arc<impl RecordWait + 'static>) {
        // Of two at the same moment one is kept: a request reads for one job.
        self.job.get_or_init(|| -> Arc<dyn RecordWait> { Arc::clone(job) as _ });
    }

    /// Returns how long it waited at a gate, until now if it waits there.
    #[must_use]
    pub fn time_at(&self, gate: Gate) -> Duration {
        let ended = Duration::from_nanos(self.nanos[gate as usize].load(Relaxed));
        let under_way = self.under_way.lock();
        let now = under_way.iter().filter(|one| one.0 == gate).map(|one| one.1.elapsed());
        ended + now.sum::<Duration>()
    }

    /// Returns whether a wait ended here.
    #[must_use]
    pub fn has_waited(&self) -> bool {
        self.has_waited.load(Relaxed)
    }

    /// Returns whether nobody called this before: the log has one line for one request.
    pub fn is_first_note(&self) -> bool {
        !self.is_noted.swap(true, Relaxed)
    }

    /// Returns the gates with a wait, the longest wait first.
    #[must_use]
    pub fn longest_first(&self) -> Vec<(Gate, Duration)> {
        let mut waits: Vec<_> = Gate::ALL.into_iter().map(|gate| (gate, self.time_at(gate))).collect();
        waits.retain(|(_, time)| !time.is_zero());
        waits.sort_by_key(|(_, time)| std::cmp::Reverse(*time));
        waits
    }
}

/// A wait under way. Dropping it records the wait, whatever ends it.
struct Passing {
    waits: Arc<Waits>,
    gate: Gate,
    since: Instant,
}

impl Passing {
    /// Begins a wait of the current task. `None` where nobody records waits.
    fn begin(gate: Gate) -> Option<Self> {
        let passing = Passing { waits: Waits::current()?, gate, since: Instant::now() };
        passing.waits.under_way.lock().push((gate, passing.since));
        Some(passing)
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        let wait = (self.gate, self.since);
        let mut under_way = self.waits.under_way.lock();
        if let Some(at) = under_way.iter().position(|one| *one == wait) {
            under_way.swap_remove(at);
        }
        drop(under_way);
        self.waits.record_wait(self.gate, self.since.elapsed());
    }
}

pin_project! {
    /// A wait at a gate. See [`pass_gate`].
    ///
    /// A type of its own: an `async fn` would have its argument twice, and every read has many of these.
    pub struct PassGate<F> {
        #[pin]
        wait: F,
        gate: Gate,
        passing: Option<Passing>,
        is_first: bool,
    }
}

impl<F: Future> Future for PassGate<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let polled = this.wait.poll(cx);
        match polled {
            Poll::Ready(_) => *this.passing = None,
            Poll::Pending if std::mem::take(this.is_first) => *this.passing = Passing::begin(*this.gate),
            Poll::Pending => {}
        }
        polled
    }
}

/// Waits at a gate: runs `wait`, and records how long it took if it was not ready at once.
pub fn pass_gate<F: Future>(gate: Gate, wait: F) -> PassGate<F> {
    PassGate { wait, gate, passing: None, is_first: true }
}

/// Runs a future whose waits are recorded in `waits`.
pub fn in_waits<F: Future>(waits: Arc<Waits>, work: F) -> TaskLocalFuture<Arc<Waits>, F> {
    CURRENT.scope(waits, work)
}

/// Prepares a future for a task of its own: it records in the current waits, and logs in the current span.
pub fn carried<F: Future>(work: F) -> impl Future<Output = F::Output> {
    let (waits, span) = (Waits::current(), Span::current());
    let span = match &waits {
        Some(waits) if span.is_none() => waits.span(),
        _ => span,
    };
    let work = work.instrument(span);
    match waits {
        Some(waits) => Either::Left(CURRENT.scope(waits, work)),
        None => Either::Right(work),
    }
}

pin_project! {
    /// A request that runs. See [`in_request`].
    pub struct InRequest<F> {
        #[pin]
        work: TaskLocalFuture<Arc<Waits>, F>,
        waits: Arc<Waits>,
    }
}

impl<F: Future> Future for InRequest<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let entered = this.waits.span.get().map(Span::enter);
        let polled = this.work.poll(cx);
        drop(entered);
        if polled.is_pending() {
            this.waits.span();
        }
        polled
    }
}

/// Runs a request in its waits, and from its first wait on in its span.
pub fn in_request<F: Future>(waits: Arc<Waits>, work: F) -> InRequest<F> {
    InRequest { work: CURRENT.scope(Arc::clone(&waits), work), waits }
}

/// A value that is polled in the waits and the span of a request, such as the body of its reply.
#[derive(Debug)]
pub struct InWaits<T> {
    inner: T,
    waits: Arc<Waits>,
}

impl<T> InWaits<T> {
    /// Ties a value to waits.
    pub fn new(inner: T, waits: Arc<Waits>) -> Self {
        InWaits { inner, waits }
    }

    /// Polls the value in its waits, and from its first wait on in its span.
    pub fn poll<R>(&mut self, poll: impl FnOnce(&mut T) -> Poll<R>) -> Poll<R> {
        let entered = self.waits.whole().span.get().map(Span::enter);
        let polled = CURRENT.sync_scope(Arc::clone(&self.waits), || poll(&mut self.inner));
        drop(entered);
        if polled.is_pending() {
            self.waits.span();
        }
        polled
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;
    use tokio::{sync::Semaphore, time::sleep};
    use tokio_util::task::TaskTracker;
    use tracing::info_span;

    fn of_request(above: Arc<Waits>) -> Arc<Waits> {
        Waits::of_request(above, RequestId::new("r1").expect("valid"), Box::new(|| info_span!("request")))
    }

    #[tokio::test]
    async fn a_request_has_a_span_from_its_first_wait_on() {
        let waits = of_request(Arc::default());
        in_request(Arc::clone(&waits), async {}).await;
        assert!(waits.span.get().is_none(), "it did not wait");
        in_request(Arc::clone(&waits), pass_gate(Gate::Disk, sleep(Duration::from_millis(1)))).await;
        assert!(waits.span.get().is_some());
        let mut body = InWaits::new((), of_request(Arc::default()));
        assert!(body.poll(|()| Poll::Ready(())).is_ready() && body.waits.span.get().is_none());
        assert!(body.poll(|()| Poll::<()>::Pending).is_pending() && body.waits.span.get().is_some());
    }

    #[tokio::test]
    async fn a_wait_is_recorded_in_all_waits_above_and_once() {
        let server = Arc::new(Waits::default());
        let (job, request) = (Arc::new(Waits::default()), of_request(server.clone()));
        let ms = Duration::from_millis;
        in_waits(Arc::clone(&request), async {
            pass_gate(Gate::Disk, sleep(ms(20))).await;
            Waits::current().expect("in a request").record_for_job(&job);
            let read = Waits::of_part();
            let of_read = in_waits(Arc::clone(&read), async { Waits::current_request() }).await;
            assert_eq!(of_read, RequestId::new("r1"));
            in_waits(Arc::clone(&read), pass_gate(Gate::Origin, sleep(ms(30)))).await;
            assert_eq!(read.time_at(Gate::Disk), Duration::ZERO, "that was before the read");
            assert!(read.time_at(Gate::Origin) >= ms(30));
        })
        .await;
        for waits in [&request, &server] {
            assert!(
                waits.time_at(Gate::Origin) >= ms(30) && waits.time_at(Gate::Origin) < ms(2_000),
                "{waits:?}"
            );
            assert!(waits.time_at(Gate::Disk) >= ms(20), "{waits:?}");
            assert_eq!(waits.longest_first().len(), 2);
        }
        assert_eq!(job.longest_first().len(), 1, "later waits only: {job:?}");
    }

    #[tokio::test]
    async fn an_open_gate_is_not_recorded_and_a_wait_that_is_given_up_is() {
        let (waits, gate) = (Arc::new(Waits::default()), Semaphore::new(1));
        in_waits(Arc::clone(&waits), async {
            let _held = pass_gate(Gate::DiskQueue, gate.acquire()).await.expect("open");
            assert_eq!(Waits::current().expect("set").longest_first(), []);
            let late = tokio::time::timeout(Duration::from_millis(20), async {
                pass_gate(Gate::DiskQueue, gate.acquire()).await.expect("closed").forget();
            });
            late.await.expect_err("nobody opens it");
        })
        .await;
        assert!(waits.time_at(Gate::DiskQueue) >= Duration::from_millis(20));
        assert!(pass_gate(Gate::Disk, async { 7 }).now_or_never() == Some(7), "also outside of a request");
    }

    #[tokio::test]
    async fn a_task_works_for_the_request_that_started_it() {
        let waits = Arc::new(Waits::default());
        let tasks = TaskTracker::new();
        in_waits(Arc::clone(&waits), async {
            tasks.spawn(carried(pass_gate(Gate::Origin, sleep(Duration::from_millis(20)))));
        })
        .await;
        tasks.close();
        tasks.wait().await;
        assert!(waits.time_at(Gate::Origin) >= Duration::from_millis(20));
    }
}
