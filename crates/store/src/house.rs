//! Housekeeping of a disk tier: opened, probed, reaped, scrubbed, divided and closed here, for whoever owns
//! a store.
//!
//! Every step blocks, so it runs on a blocking thread, one at a time; a disk that hangs holds
//! that thread and nothing else. Whatever fails, reads pass the tier by, and it is tried again.

use crate::{
    Disk, DiskState,
    disk::{DiskConfig, DiskError, Recovery},
};
use futures::future::{BoxFuture, FutureExt, pending};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};
use tokio::{
    task::spawn_blocking,
    time::{MissedTickBehavior, interval, timeout},
};
use tokio_util::sync::CancellationToken;

/// How often the disk is probed and space given back.
const EVERY: Duration = Duration::from_secs(1);
/// A tier that could not be opened is tried no more often.
const OPEN_EVERY: Duration = Duration::from_secs(3);
/// How long a start waits for the tier; longer, and its owner begins without it.
pub const OPEN_WITHIN: Duration = Duration::from_secs(60);
/// Bytes that are copied at once to compact slabs, as often as half of a turn's time allows.
const REAP_BYTES: u64 = 64 << 20;
/// Bytes that are read and hashed per turn to find silent damage: 1 TB in about a day and a half.
const SCRUB_BYTES: u64 = 8 << 20;
/// No chunk is scrubbed more often.
const SCRUB_EVERY: Duration = Duration::from_secs(86_400);
/// How long a stop waits for what was admitted to be written, and then for the tier to be closed.
const CLOSE_WITHIN: Duration = Duration::from_millis(400);

/// Who owns a tier, and what only they know of it.
pub trait Household: Send + Sync + 'static {
    /// The tier as it is to be opened now. Blocks.
    ///
    /// # Errors
    /// Why there can be none now, for people.
    fn config(&self) -> Result<DiskConfig, String>;

    /// A tier was opened.
    fn opened(&self) {}

    /// Divides the tier among datasets, if that changed. Called each turn. Blocks.
    fn divide(&self, _disk: &Disk) {}

    /// Resolves when the next turn should not wait for its time.
    fn hurry(&self) -> BoxFuture<'_, ()> {
        pending().boxed()
    }

    /// Whether housekeeping goes on after a turn. Blocks.
    fn stays(&self, _disk: &Disk) -> bool {
        true
    }
}

/// Opens the tier before the first read, so that what it has is not asked of an origin. Longer than
/// [`OPEN_WITHIN`] nobody waits for it.
///
/// # Errors
/// Only when another process uses the directory: everything else may pass.
pub async fn open_first(house: Arc<dyn Household>, disk: Arc<Disk>) -> Result<(), DiskError> {
    let opening = spawn_blocking(move || open(&*house, &disk));
    match timeout(OPEN_WITHIN, opening).await {
        Ok(Ok(Err(e @ DiskError::Locked { .. }))) => Err(e),
        Ok(Ok(_)) => Ok(()),
        Ok(Err(e)) => {
            tracing::error!(error = %e, "opening the disk tier was lost");
            Ok(())
        }
        Err(_) => {
            tracing::warn!("the disk tier takes long to open; going on without it until it is");
            Ok(())
        }
    }
}

/// Opens the tier; `None` when it cannot even be tried now. Blocks.
///
/// # Errors
/// As [`Disk::open`]; logged when it is news, but for [`DiskError::Locked`], which the caller knows to judge.
pub fn open(house: &dyn Household, disk: &Disk) -> Result<Option<Recovery>, DiskError> {
    let before = disk.state();
    let config = match house.config() {
        Ok(config) => config,
        Err(why) => {
            if before != DiskState::Absent(why.clone()) {
                tracing::warn!(%why, "no cache on disk for now, reads pass it by");
            }
            disk.cannot_open(why);
            return Ok(None);
        }
    };
    let (dir, limit_bytes, policy) = (config.dir.clone(), config.size_max, config.policy);
    match disk.open(config, SystemTime::now()) {
        Ok(found) => {
            let dir = dir.display();
            let Recovery { records, slabs, walked, dropped, removed, rebuilt, took, .. } = found;
            tracing::info!(%dir, limit_bytes, %policy, chunks = records, slabs, walked, dropped, removed, rebuilt, ?took, "the cache on disk is open");
            house.opened();
            Ok(Some(found))
        }
        Err(e @ DiskError::Locked { .. }) => Err(e),
        Err(e) => {
            if disk.state() != before {
                tracing::warn!(error = %e, "no cache on disk for now, reads pass it by");
            }
            Err(e)
        }
    }
}

/// Looks after the tier until `stop`, or the household goes.
pub async fn look_after(house: Arc<dyn Household>, disk: Arc<Disk>, stop: CancellationToken) {
    let mut every = interval(EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut tried = Instant::now();
    let scrubbing = Arc::new(Mutex::new(Scrubbing { next: Instant::now(), begun: None, some: false }));
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            _ = every.tick() => {}
            () = house.hurry() => {}
        }
        let may_open = tried.elapsed() >= OPEN_EVERY;
        if may_open {
            tried = Instant::now();
        }
        let (of, on) = (Arc::clone(&house), Arc::clone(&disk));
        let scrubbing = Arc::clone(&scrubbing);
        let stopping = stop.clone();
        let mut turn = spawn_blocking(move || {
            one_turn(&*of, &on, may_open, &stopping);
            scrub(&on, &mut scrubbing.lock().unwrap_or_else(PoisonError::into_inner));
            of.stays(&on)
        });
        tokio::select! {
            done = &mut turn => match done {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => tracing::error!(error = %e, "a turn of the disk tier's housekeeping was lost"),
            },
            // A disk that hangs must not hold the stop.
            () = stop.cancelled() => break,
        }
    }
}

fn one_turn(house: &dyn Household, disk: &Disk, may_open: bool, stop: &CancellationToken) {
    if matches!(disk.state(), DiskState::Absent(_)) && may_open {
        let before = disk.state();
        // Why not is in the log, but for a lock that somebody else has, and in the state.
        if let Err(e @ DiskError::Locked { .. }) = open(house, disk)
            && disk.state() != before
        {
            tracing::warn!(error = %e, "no cache on disk for now, reads pass it by");
        }
    }
    house.divide(disk);
    disk.probe(SystemTime::now());
    // What is wrong shows in the tier's health, which logs itself.
    // Newcomers get between the rounds.
    let began = Instant::now();
    while began.elapsed() < EVERY / 2 && !stop.is_cancelled() {
        match disk.reap(REAP_BYTES) {
            Ok(done) if done.copied >= REAP_BYTES => {}
            Ok(_) => break,
            Err(e) => {
                tracing::debug!(error = %e, "no space was given back");
                break;
            }
        }
    }
}

/// When scrubbing goes on, and when the pass that is under way began.
struct Scrubbing {
    next: Instant,
    begun: Option<Instant>,
    /// Whether that pass found something to read.
    some: bool,
}

fn scrub(disk: &Disk, s: &mut Scrubbing) {
    if Instant::now() < s.next {
        return;
    }
    let begun = *s.begun.get_or_insert_with(Instant::now);
    match disk.scrub(SCRUB_BYTES) {
        Ok(done) => {
            if done.bad > 0 {
                let bad = done.bad;
                tracing::warn!(bad, "scrubbing found damaged chunks; they are fetched again when wanted");
            }
            s.some |= done.records > 0;
            if done.wrapped {
                s.next = if s.some { begun + SCRUB_EVERY } else { begun };
                (s.begun, s.some) = (None, false);
            }
        }
        Err(e) => tracing::debug!(error = %e, "not scrubbed"),
    }
}

/// Writes what was admitted and closes the tier. Bounded: what is not done costs the next start a walk
/// of one slab, or a chunk its place.
pub async fn close(disk: Arc<Disk>) {
    disk.flushed(CLOSE_WITHIN).await;
    match timeout(CLOSE_WITHIN, spawn_blocking(move || disk.close())).await {
        Ok(Ok(Ok(()))) => tracing::info!("the cache on disk is closed"),
        Ok(Ok(Err(e))) => tracing::warn!(error = %e, "the cache on disk was not closed well"),
        Ok(Err(e)) => tracing::error!(error = %e, "closing the cache on disk was lost"),
        Err(_) => tracing::warn!("the cache on disk takes long to close and is left as it is"),
    }
}
