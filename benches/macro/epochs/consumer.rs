//! One job: leases ahead of its steps, consumes by absolute deadlines, acknowledges.

use fletch_api::{BatchTimes, StartJob};
use fletch_client::{
    Client, ClientError,
    epochs::{JobHandle, LeaseBatch, Next},
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
use tokio::time::{Instant, sleep_until};
use tokio_util::task::TaskTracker;

/// When the cell's seconds are on this machine's clock.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    /// Its second 0.
    pub begin: Instant,
    /// Its seconds in one of ours.
    pub speed: f64,
}

impl Clock {
    /// That second of the cell.
    #[must_use]
    pub fn at(&self, t: f64) -> Instant {
        self.begin + Duration::from_secs_f64(t / self.speed)
    }
}

/// A job of a cell.
pub struct Consumer {
    pub client: Client,
    pub what: StartJob,
    pub spec: JobSpec,
    pub clock: Clock,
    pub lease: u32,
    /// What is counted happens between these.
    pub warm: Instant,
    pub end: Instant,
    pub counted: Arc<AtomicU64>,
    /// Where its orders are written.
    pub orders: Option<PathBuf>,
}

/// How a job fared.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fared {
    /// How long it waited for samples inside the measured time.
    pub waited: Duration,
    /// How long its very first batch took.
    pub first: Duration,
}

impl Consumer {
    /// Reads epoch after epoch until its end.
    pub async fn consume(self) -> Fared {
        let start = self.clock.at(self.spec.start);
        sleep_until(start).await;
        let job = self.client.declare(&self.what).await.expect("a job");
        let tasks = TaskTracker::new();
        let beating = job.clone();
        let beat = tasks.spawn(async move { beating.keep_alive().await });
        let leaves = self.spec.end.map_or(self.end, |t| self.clock.at(t).min(self.end));
        let mut reading = Reading { due: start, waited: Duration::ZERO, first: None, orders: String::new() };
        for epoch in 0.. {
            if self.epoch(&job, epoch, leaves, &tasks, &mut reading).await {
                break;
            }
            reading.orders.push('\n');
        }
        beat.abort();
        if leaves < self.end {
            self.client.delete_job(job.info().id.as_str()).await.expect("a job that leaves");
        }
        if let Some(path) = &self.orders {
            // The last line is of an epoch that was cut.
            let whole = reading.orders.rfind('\n').map_or("", |at| &reading.orders[..=at]);
            std::fs::write(path, whole).expect("orders");
        }
        Fared { waited: reading.waited, first: reading.first.unwrap_or_default() }
    }

    /// One epoch; whether the job has to leave.
    async fn epoch(
        &self,
        job: &JobHandle,
        epoch: u64,
        leaves: Instant,
        tasks: &TaskTracker,
        reading: &mut Reading,
    ) -> bool {
        let (to, mut from) = tokio::sync::mpsc::channel::<LeaseBatch>(2);
        let (asker, want) = (job.clone(), self.lease);
        let asking = tasks.spawn(async move {
            let mut reader = asker.reader(epoch, 0, 0).patient(Duration::from_secs(60));
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
        while let Some(batch) = from.recv().await {
            let now = Instant::now();
            reading.first.get_or_insert(now - self.clock.at(self.spec.start));
            if now > reading.due {
                // It waited: later steps are as long as before.
                if now > self.warm && now < self.end {
                    reading.waited += now - reading.due;
                }
                reading.due = now;
            }
            for sample in &batch.samples {
                reading.due = self.after_pause(reading.due + step);
                if reading.due >= leaves {
                    asking.abort();
                    return true;
                }
                if reading.due >= self.warm {
                    self.counted.fetch_add(sample.bytes.len() as u64, Relaxed);
                }
                if self.orders.is_some() {
                    reading.orders.push_str(&format!("{} ", sample.sample));
                }
            }
            sleep_until(reading.due).await;
            let acks = [batch.token.ack(BatchTimes::default())];
            job.ack(epoch, 0, &acks).await.expect("an ack");
            job.held().drop_lease(epoch, 0, batch.token.lease);
        }
        asking.await.expect("the epoch's leases").expect("a lease");
        false
    }

    /// A step that would end in a pause ends after it.
    fn after_pause(&self, due: Instant) -> Instant {
        let within = |p: &&(f64, f64)| (self.clock.at(p.0)..self.clock.at(p.1)).contains(&due);
        self.spec.pauses.iter().find(within).map_or(due, |p| self.clock.at(p.1))
    }
}

struct Reading {
    due: Instant,
    waited: Duration,
    first: Option<Duration>,
    orders: String,
}
