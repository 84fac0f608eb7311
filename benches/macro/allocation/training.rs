//! A job with an emulated accelerator.

use fletch_api::{Ack, BatchTimes, OrderKind, StartJob, Visitation, WorldSpec, jobs::PlanSpec};
use fletch_client::{
    Client,
    epochs::{JobHandle, LeaseBatch, Next},
};
use fletch_core::plan::Tail;
use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

/// Prepared batches that wait for the loop.
const PREPARED_MAX: usize = 4;
/// A batch that came within this time lay ready.
const READY: Duration = Duration::from_micros(200);

/// How a job trains. The speeds may change while it runs.
#[derive(Debug)]
pub struct Training {
    /// What the accelerator and the worker that prepares batches do, in bytes a second.
    speeds: Mutex<(f64, f64)>,
    steps: AtomicU64,
    stop: AtomicBool,
}

/// How a job fared.
#[derive(Debug, Clone, Copy)]
pub struct Fared {
    pub seconds: f64,
    pub bytes: u64,
}

impl Fared {
    /// Returns the rate in bytes a second.
    pub fn rate(self) -> f64 {
        self.bytes as f64 / self.seconds
    }
}

/// Declares the job `job-NAME` of the dataset `dDATASET`, which takes `batch` samples a step.
pub async fn declare(
    client: &Client,
    (name, dataset): (&str, usize),
    order: OrderKind,
    batch: u32,
) -> JobHandle {
    let declaration = StartJob {
        name: format!("job-{name}").parse().expect("name"),
        dataset: format!("d{dataset}").parse().ok(),
        version: None,
        root: None,
        layout: None,
        seed: Some(dataset as u64),
        order,
        buckets: None,
        replay: None,
        plan: PlanSpec::default(),
        world: WorldSpec { ranks: 1, batch, tail: Tail::Keep },
        visitation: Visitation::ExactlyOnce,
    };
    client.declare(&declaration).await.expect("declared")
}

fn ns(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

impl Training {
    /// A job whose accelerator computes `compute` bytes a second, and which prepares nothing.
    pub fn new(compute: f64) -> Arc<Self> {
        let speeds = Mutex::new((compute, f64::INFINITY));
        Arc::new(Training { speeds, steps: AtomicU64::new(0), stop: AtomicBool::new(false) })
    }

    /// Changes what the accelerator and the worker do, in bytes a second.
    pub fn set_speeds(&self, compute: f64, prepare: f64) {
        *self.speeds.lock() = (compute, prepare);
    }

    fn speeds(&self) -> (f64, f64) {
        *self.speeds.lock()
    }

    /// Returns how many steps were acknowledged.
    pub fn steps(&self) -> u64 {
        self.steps.load(Relaxed)
    }

    /// Ends the training after the present step.
    pub fn stop(&self) {
        self.stop.store(true, Relaxed);
    }

    /// Trains for the epochs `epochs`, or until [`Training::stop`].
    pub async fn run(self: Arc<Self>, job: JobHandle, epochs: std::ops::Range<u64>) -> Fared {
        let begun = Instant::now();
        let (mut due, mut bytes) = (begun, 0);
        let tasks = TaskTracker::new();
        for epoch in epochs {
            let (to, mut from) = mpsc::channel::<(LeaseBatch, Duration)>(PREPARED_MAX);
            let worker = tasks.spawn(Arc::clone(&self).prepare(job.clone(), epoch, to));
            let _worker = AbortOnDropHandle::new(worker);
            let (acks, mut done) = mpsc::unbounded_channel::<Ack>();
            let of = job.clone();
            // Acks go out beside the next step, as those of the loader do.
            let acker = tasks.spawn(async move {
                while let Some(ack) = done.recv().await {
                    let lease = ack.lease;
                    of.ack(epoch, 0, &[ack]).await.expect("an ack");
                    of.held().forget(epoch, 0, lease);
                }
            });
            loop {
                let asked = Instant::now();
                let Some((batch, prepared)) = from.recv().await else { break };
                let got = Instant::now();
                let content: u64 = batch.samples.iter().map(|s| s.bytes.len() as u64).sum();
                bytes += content;
                // Late by less than a batch that lies ready is the timer's fault, and is made up for.
                if got - asked > READY {
                    due = due.max(got);
                }
                due += Duration::from_secs_f64(content as f64 / self.speeds().0);
                sleep_until(due).await;
                let times = BatchTimes {
                    entries: u32::try_from(batch.samples.len()).expect("few"),
                    waited_ns: ns(got - asked),
                    received_ns: Some(ns(batch.received)),
                    prepared_ns: ns(prepared),
                    stepped_ns: ns(got.elapsed()),
                    ..BatchTimes::default()
                };
                acks.send(batch.token.ack(times)).expect("the acker runs");
                self.steps.fetch_add(1, Relaxed);
                if self.stop.load(Relaxed) {
                    return Fared { seconds: begun.elapsed().as_secs_f64(), bytes };
                }
            }
            drop(acks);
            acker.await.expect("the acks of the epoch");
        }
        Fared { seconds: begun.elapsed().as_secs_f64(), bytes }
    }

    /// Receives the batches of an epoch and prepares them.
    async fn prepare(self: Arc<Self>, job: JobHandle, epoch: u64, to: mpsc::Sender<(LeaseBatch, Duration)>) {
        let mut reader = job.reader(epoch, 0, 0).patience(Duration::from_secs(60));
        let want = job.info().world.batch;
        while let Next::Batch(batch) = reader.next(want).await.expect("a lease") {
            let got = Instant::now();
            let content: u64 = batch.samples.iter().map(|s| s.bytes.len() as u64).sum();
            let (_, rate) = self.speeds();
            if rate.is_finite() {
                sleep_until(got + Duration::from_secs_f64(content as f64 / rate)).await;
            }
            if to.send((batch, got.elapsed())).await.is_err() {
                return;
            }
        }
    }
}
