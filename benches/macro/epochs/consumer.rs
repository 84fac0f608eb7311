//! One job: it leases ahead of its steps, consumes by absolute deadlines, and acknowledges.

use fletch_api::{BatchTimes, StartJob};
use fletch_client::{
    Client, ClientError,
    epochs::{AckToken, JobHandle, LeaseBatch, Next},
};
use fletch_sim::JobSpec;
use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::{mpsc::Receiver, watch},
    task::JoinHandle,
    time::{Instant, sleep_until},
};
use tokio_util::task::TaskTracker;

/// Maps the cell's seconds to this machine's clock.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    /// Second 0 of the cell.
    pub begin: Instant,
    /// Seconds of the cell in one second of the machine.
    pub speed: f64,
}

impl Clock {
    /// Returns the instant of second `t` of the cell.
    #[must_use]
    pub fn at(&self, t: f64) -> Instant {
        self.begin + Duration::from_secs_f64(t / self.speed)
    }
}

/// The part of a run that is measured.
#[derive(Debug, Clone, Copy)]
pub enum Span {
    /// Everything between two instants.
    Time { warm: Instant, end: Instant },
    /// Whole epochs of a lone job: from `first` on, before `after`.
    Epochs { first: u64, after: u64 },
}

/// A job of a cell. `spec` has the size of its leases.
pub struct Consumer {
    pub client: Client,
    pub what: StartJob,
    pub spec: JobSpec,
    pub clock: Clock,
    pub span: Span,
    /// Receives the number of each epoch that begins, and one more at the end.
    pub begins: watch::Sender<u64>,
    pub counted: Arc<AtomicU64>,
    /// File for the sample numbers of whole epochs, an epoch a line.
    pub orders: Option<PathBuf>,
}

/// Waiting times of a job.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fared {
    /// Time that the job waited for samples inside the measured span.
    pub waited: Duration,
    /// Time until its first batch.
    pub first: Duration,
}

impl Consumer {
    /// Reads epoch after epoch until the job's end.
    pub async fn consume(self) -> Fared {
        let start = self.clock.at(self.spec.start);
        sleep_until(start).await;
        let job = self.client.declare(&self.what).await.expect("a job");
        let tasks = TaskTracker::new();
        let beating = job.clone();
        let beat = tasks.spawn(async move { beating.keep_alive().await });
        let early = self.spec.end.map(|t| self.clock.at(t));
        let (leaves, epochs) = match self.span {
            Span::Time { end, .. } => (Some(early.map_or(end, |t| t.min(end))), u64::MAX),
            Span::Epochs { after, .. } => (None, after),
        };
        let mut reading = Reading { due: start, waited: Duration::ZERO, first: None, orders: String::new() };
        for epoch in 0..epochs {
            self.begins.send_replace(epoch);
            if self.epoch(&job, epoch, leaves, &tasks, &mut reading).await {
                break;
            }
            reading.orders.push('\n');
        }
        self.begins.send_replace(epochs);
        beat.abort();
        if early.is_some() && early == leaves {
            self.client.delete_job(job.info().id.as_str()).await.expect("a job that leaves");
        }
        if let Some(path) = &self.orders {
            // The last line is of an epoch that was cut.
            let whole = reading.orders.rfind('\n').map_or("", |at| &reading.orders[..=at]);
            std::fs::write(path, whole).expect("orders");
        }
        Fared { waited: reading.waited, first: reading.first.unwrap_or_default() }
    }

    /// Reads one epoch. Returns whether the job must leave.
    async fn epoch(
        &self,
        job: &JobHandle,
        epoch: u64,
        leaves: Option<Instant>,
        tasks: &TaskTracker,
        reading: &mut Reading,
    ) -> bool {
        let (to, mut from) = tokio::sync::mpsc::channel::<LeaseBatch>(2);
        let (asker, want) = (job.clone(), self.spec.lease);
        let asking = tasks.spawn(async move {
            let mut reader = asker.reader(epoch, 0, 0).patience(Duration::from_secs(60));
            loop {
                match reader.next(want).await? {
                    Next::Batch(batch) => {
                        if to.send(batch).await.is_err() {
                            return Ok::<_, ClientError>(());
                        }
                    }
                    Next::Full => {}
                    Next::Last | Next::Done => return Ok(()),
                }
            }
        });
        let step = Duration::from_secs_f64(1.0 / (self.spec.rate * self.clock.speed));
        let mut acking: Option<JoinHandle<()>> = None;
        while let Some((batch, waited)) = next(&mut from, &mut reading.due).await {
            let now = Instant::now();
            reading.first.get_or_insert(now - self.clock.at(self.spec.start));
            if self.counts(epoch, now) {
                reading.waited += waited;
            }
            for sample in &batch.samples {
                reading.due = self.after_pause(reading.due + step);
                if leaves.is_some_and(|end| reading.due >= end) {
                    asking.abort();
                    if let Some(last) = acking {
                        last.await.expect("the last ack");
                    }
                    return true;
                }
                if self.counts(epoch, reading.due) {
                    self.counted.fetch_add(sample.bytes.len() as u64, Relaxed);
                }
                if self.orders.is_some() {
                    reading.orders.push_str(&format!("{} ", sample.sample));
                }
            }
            sleep_until(reading.due).await;
            if let Some(before) = acking.take() {
                before.await.expect("an ack");
            }
            acking = Some(tasks.spawn(acknowledge(job.clone(), epoch, batch.token)));
        }
        if let Some(last) = acking {
            last.await.expect("the last ack");
        }
        asking.await.expect("the epoch's leases").expect("a lease");
        false
    }

    fn counts(&self, epoch: u64, at: Instant) -> bool {
        match self.span {
            Span::Time { warm, end } => (warm..end).contains(&at),
            Span::Epochs { first, .. } => epoch >= first,
        }
    }

    /// Moves the end of a step past a pause.
    fn after_pause(&self, due: Instant) -> Instant {
        let within = |p: &&(f64, f64)| (self.clock.at(p.0)..self.clock.at(p.1)).contains(&due);
        self.spec.pauses.iter().find(within).map_or(due, |p| self.clock.at(p.1))
    }
}

/// Returns the next batch and how long the due step waited for it. Moves `due` by that time.
pub async fn next(from: &mut Receiver<LeaseBatch>, due: &mut Instant) -> Option<(LeaseBatch, Duration)> {
    if let Ok(ready) = from.try_recv() {
        return Some((ready, Duration::ZERO));
    }
    let batch = from.recv().await?;
    let late = Instant::now().saturating_duration_since(*due);
    *due += late;
    Some((batch, late))
}

/// Acknowledges a batch, while the next step computes.
pub async fn acknowledge(job: JobHandle, epoch: u64, token: AckToken) {
    job.ack(epoch, 0, &[token.ack(BatchTimes::default())]).await.expect("an ack");
    job.held().forget(epoch, 0, token.lease);
}

struct Reading {
    due: Instant,
    waited: Duration,
    first: Option<Duration>,
    orders: String,
}
