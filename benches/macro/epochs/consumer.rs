//! A job with emulated steps.

use super::LEASE;
use fletch_client::epochs::{JobHandle, LeaseBatch, Next};
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

/// One job: leases ahead of its steps, consumes by absolute deadlines, acknowledges.
pub struct Consumer {
    pub job: JobHandle,
    pub step: Duration,
    pub start: Instant,
    pub warm: Instant,
    pub end: Instant,
    pub counted: Arc<AtomicU64>,
    pub orders: Option<PathBuf>,
}

impl Consumer {
    /// How long it waited for samples inside the measured time.
    pub async fn consume(self) -> Duration {
        sleep_until(self.start).await;
        let (mut due, mut waited) = (self.start, Duration::ZERO);
        let (tasks, mut orders) = (TaskTracker::new(), String::new());
        for epoch in 0.. {
            let (to, mut from) = tokio::sync::mpsc::channel::<LeaseBatch>(2);
            let job = self.job.clone();
            let asking = tasks.spawn(async move {
                let mut reader = job.reader(epoch, 0, 0).patient(Duration::from_secs(60));
                loop {
                    match reader.next(LEASE).await.expect("a lease") {
                        Next::Batch(batch) => {
                            if to.send(batch).await.is_err() {
                                return;
                            }
                        }
                        Next::Full => {}
                        Next::Last | Next::Done => return,
                    }
                }
            });
            while let Some(batch) = from.recv().await {
                let now = Instant::now();
                if now > due {
                    // It waited: later steps are as long as before.
                    if now > self.warm && now < self.end {
                        waited += now - due;
                    }
                    due = now;
                }
                for sample in &batch.samples {
                    due += self.step;
                    if due >= self.end {
                        asking.abort();
                        self.keep(&orders);
                        return waited;
                    }
                    if due >= self.warm {
                        self.counted.fetch_add(sample.bytes.len() as u64, Relaxed);
                    }
                    if self.orders.is_some() {
                        orders.push_str(&format!("{} ", sample.sample));
                    }
                }
                sleep_until(due).await;
                let acks = [batch.token.ack(fletch_api::BatchTimes::default())];
                self.job.ack(epoch, 0, &acks).await.expect("an ack");
                self.job.held().drop_lease(epoch, 0, batch.token.lease);
            }
            asking.await.expect("the epoch's leases");
            orders.push('\n');
        }
        waited
    }

    fn keep(&self, orders: &str) {
        if let Some(path) = &self.orders {
            // The last line is of an epoch that was cut.
            let whole = orders.rfind('\n').map_or("", |at| &orders[..=at]);
            std::fs::write(path, whole).expect("orders");
        }
    }
}
