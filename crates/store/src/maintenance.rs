//! Maintenance of a disk tier for its owner, a server or a mount.
//!
//! Maintenance opens, probes, divides, reaps, scrubs and closes the tier.
//!
//! Every step blocks, so it runs on a blocking thread, one step at a time. A disk that hangs holds that
//! thread and nothing else. Reads skip a tier that fails, and maintenance tries it again.

use crate::{
    disk::{DiskConfig, DiskError, Recovery},
    disk_tier::{DiskState, DiskTier},
};
use futures::future::{BoxFuture, FutureExt, pending};
use parking_lot::Mutex;
use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};
use tokio::{
    task::spawn_blocking,
    time::{MissedTickBehavior, interval, timeout},
};
use tokio_util::sync::CancellationToken;

/// Time between two rounds of maintenance.
const ROUND_EVERY: Duration = Duration::from_secs(1);
/// Shortest time between two attempts to open a tier.
const OPEN_EVERY: Duration = Duration::from_secs(3);
/// Longest time that a start waits for the tier. After that the owner starts without it.
pub const OPEN_WITHIN: Duration = Duration::from_secs(60);
/// Bytes that one `reap` copies to compact slabs. A round repeats it for at most half of its time.
const REAP_BYTES: u64 = 64 << 20;
/// Bytes that a round reads and hashes to find silent damage: 1 TB in about a day and a half.
const SCRUB_BYTES: u64 = 8 << 20;
/// Shortest time between two scrubs of one chunk.
const SCRUB_EVERY: Duration = Duration::from_secs(86_400);
/// Longest time that a stop waits for queued appends, and then for the tier to close.
const CLOSE_WITHIN: Duration = Duration::from_millis(400);

/// The owner of a disk tier, and what only the owner knows about it.
pub trait DiskOwner: Send + Sync + 'static {
    /// Returns the settings to open the tier with now. Blocks.
    ///
    /// # Errors
    /// Why the tier cannot be opened now, as text for an operator.
    fn config(&self) -> Result<DiskConfig, String>;

    /// Called after the tier was opened.
    fn on_open(&self) {}

    /// Divides the tier among datasets, if their shares changed. Called in each round. Blocks.
    fn divide(&self, _disk: &DiskTier) {}

    /// Resolves when the tier should be divided before the next round.
    fn wake(&self) -> BoxFuture<'_, ()> {
        pending().boxed()
    }

    /// Whether maintenance goes on after a round. Blocks.
    fn still_owns(&self, _disk: &DiskTier) -> bool {
        true
    }
}

/// Opens the tier before the first read, so that reads find its chunks instead of asking an origin.
///
/// Waits at most [`OPEN_WITHIN`].
///
/// # Errors
/// [`DiskError::Locked`] when another process uses the directory. Every other error may pass, so it is only
/// logged.
pub async fn open_first(owner: Arc<dyn DiskOwner>, disk: Arc<DiskTier>) -> Result<(), DiskError> {
    let opening = spawn_blocking(move || open(&*owner, &disk));
    match timeout(OPEN_WITHIN, opening).await {
        Ok(Ok(Err(e @ DiskError::Locked { .. }))) => Err(e),
        Ok(Ok(_)) => Ok(()),
        Ok(Err(e)) => {
            tracing::error!(error = %e, "the task that opens the disk tier failed");
            Ok(())
        }
        Err(_) => {
            tracing::warn!("the disk tier takes long to open; reads skip it until it is open");
            Ok(())
        }
    }
}

/// Opens the tier; `None` when the owner has no settings for it now. Blocks.
///
/// # Errors
/// As [`DiskTier::open`]. Logs an error that is new, except [`DiskError::Locked`], which the caller judges.
pub fn open(owner: &dyn DiskOwner, disk: &DiskTier) -> Result<Option<Recovery>, DiskError> {
    let before = disk.state();
    let config = match owner.config() {
        Ok(config) => config,
        Err(why) => {
            if before != DiskState::Absent(why.clone()) {
                tracing::warn!(%why, "the disk tier cannot be opened; reads skip it until it can");
            }
            disk.set_absent_reason(why);
            return Ok(None);
        }
    };
    let (dir, limit_bytes, policy) = (config.dir.clone(), config.size_max, config.policy);
    match disk.open(config, SystemTime::now()) {
        Ok(found) => {
            let dir = dir.display();
            let Recovery { records: chunks, slabs, walked, dropped, removed, rebuilt, took, .. } = found;
            tracing::info!(
                %dir, limit_bytes, %policy, chunks, slabs, walked, dropped, removed, rebuilt, ?took,
                "the disk tier is open"
            );
            owner.on_open();
            Ok(Some(found))
        }
        Err(e @ DiskError::Locked { .. }) => Err(e),
        Err(e) => {
            if disk.state() != before {
                tracing::warn!(error = %e, "the disk tier cannot be opened; reads skip it until it can");
            }
            Err(e)
        }
    }
}

/// Maintains the tier until `stop`, or until its owner no longer owns it.
pub async fn run(owner: Arc<dyn DiskOwner>, disk: Arc<DiskTier>, stop: CancellationToken) {
    let mut every = interval(ROUND_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut tried = Instant::now();
    let schedule = Arc::new(Mutex::new(ScrubSchedule { next: Instant::now(), begun: None, any: false }));
    loop {
        let is_early = tokio::select! {
            () = stop.cancelled() => break,
            _ = every.tick() => false,
            () = owner.wake() => true,
        };
        let may_open = !is_early && tried.elapsed() >= OPEN_EVERY;
        if may_open {
            tried = Instant::now();
        }
        let (owner, disk) = (Arc::clone(&owner), Arc::clone(&disk));
        let schedule = Arc::clone(&schedule);
        let stopping = stop.clone();
        let mut round = spawn_blocking(move || {
            if is_early {
                owner.divide(&disk);
            } else {
                run_round(&*owner, &disk, may_open, &stopping);
                scrub(&disk, &mut schedule.lock());
            }
            owner.still_owns(&disk)
        });
        tokio::select! {
            done = &mut round => match done {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => tracing::error!(error = %e, "a round of disk maintenance failed"),
            },
            // A disk that hangs must not hold the stop.
            () = stop.cancelled() => break,
        }
    }
}

fn run_round(owner: &dyn DiskOwner, disk: &DiskTier, may_open: bool, stop: &CancellationToken) {
    if matches!(disk.state(), DiskState::Absent(_)) && may_open {
        let before = disk.state();
        // `open` logs every other error.
        if let Err(e @ DiskError::Locked { .. }) = open(owner, disk)
            && disk.state() != before
        {
            tracing::warn!(error = %e, "the disk tier cannot be opened; reads skip it until it can");
        }
    }
    owner.divide(disk);
    disk.probe(SystemTime::now());
    // The tier logs its own failures. Appends get between two calls of `reap`.
    let began = Instant::now();
    while began.elapsed() < ROUND_EVERY / 2 && !stop.is_cancelled() {
        match disk.reap(REAP_BYTES) {
            Ok(done) if done.copied >= REAP_BYTES => {}
            Ok(_) => break,
            Err(e) => {
                tracing::debug!(error = %e, "reaping the disk tier failed; the next round tries again");
                break;
            }
        }
    }
}

/// When scrubbing goes on, and when the current pass over all chunks began.
struct ScrubSchedule {
    next: Instant,
    begun: Option<Instant>,
    /// Whether the current pass found a chunk to read.
    any: bool,
}

fn scrub(disk: &DiskTier, s: &mut ScrubSchedule) {
    if Instant::now() < s.next {
        return;
    }
    let begun = *s.begun.get_or_insert_with(Instant::now);
    match disk.scrub(SCRUB_BYTES) {
        Ok(done) => {
            if done.bad > 0 {
                let bad = done.bad;
                tracing::warn!(bad, "scrubbing found damaged chunks; they are fetched again when read");
            }
            s.any |= done.records > 0;
            if done.wrapped {
                s.next = if s.any { begun + SCRUB_EVERY } else { begun };
                (s.begun, s.any) = (None, false);
            }
        }
        Err(e) => tracing::debug!(error = %e, "scrubbing the disk tier failed; the next round tries again"),
    }
}

/// Writes queued chunks and closes the tier, within a bounded time.
///
/// Work that is left undone costs the next start a walk of one slab, or loses a chunk.
pub async fn close(disk: Arc<DiskTier>) {
    disk.wait_flushed(CLOSE_WITHIN).await;
    match timeout(CLOSE_WITHIN, spawn_blocking(move || disk.close())).await {
        Ok(Ok(Ok(()))) => tracing::info!("the disk tier is closed"),
        Ok(Ok(Err(e))) => {
            tracing::warn!(error = %e, "closing the disk tier failed; the next start walks a slab")
        }
        Ok(Err(e)) => tracing::error!(error = %e, "the task that closes the disk tier failed"),
        Err(_) => tracing::warn!("the disk tier takes too long to close; the next start walks a slab"),
    }
}
