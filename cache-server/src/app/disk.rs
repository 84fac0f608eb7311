//! Housekeeping of the disk tier: opened, probed, reaped, scrubbed, shared out and closed here.
//!
//! Every step blocks, so it runs on a blocking thread, one at a time; a disk that hangs holds
//! that thread and nothing else. Whatever fails, reads pass the tier by, and it is tried again.

use crate::{
    server::Server,
    shares::{Split, bounded},
};
use fletch_settings::ByteSize;
use fletch_store::{
    Disk, DiskState,
    disk::{DiskError, Recovery},
};
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
/// How long a start waits for the tier; longer, and the server begins without it.
const OPEN_WITHIN: Duration = Duration::from_secs(60);
/// Bytes that are copied per turn to compact slabs.
const REAP_BYTES: u64 = 64 << 20;
/// Bytes that are read and hashed per turn to find silent damage: 1 TB in about a day and a half.
const SCRUB_BYTES: u64 = 8 << 20;
/// No chunk is scrubbed more often.
const SCRUB_EVERY: Duration = Duration::from_secs(86_400);
/// How long a stop waits for what was admitted to be written, and then for the tier to be closed.
const CLOSE_WITHIN: Duration = Duration::from_millis(400);

/// Opens the tier before the first request, so that what it has is not asked of an origin.
///
/// # Errors
/// Only when another process uses the directory: everything else may pass.
pub(super) async fn open_first(server: &Arc<Server>) -> Result<(), DiskError> {
    let Some(disk) = server.store.disk().map(Arc::clone) else {
        tracing::info!("no cache on disk: cache.size is 0");
        return Ok(());
    };
    let opener = Arc::clone(server);
    let opening = spawn_blocking(move || open(&opener, &disk));
    match timeout(OPEN_WITHIN, opening).await {
        Ok(Ok(Err(e @ DiskError::Locked { .. }))) => Err(e),
        Ok(Ok(_)) => Ok(()),
        Ok(Err(e)) => {
            tracing::error!(error = %e, "opening the disk tier was lost");
            Ok(())
        }
        Err(_) => {
            tracing::warn!("the disk tier takes long to open; serving without it until it is");
            Ok(())
        }
    }
}

fn open(server: &Server, disk: &Disk) -> Result<Option<Recovery>, DiskError> {
    let dir = server.cache.dir.display();
    let before = disk.state();
    let config = match server.disk_config() {
        Ok(config) => config,
        Err(why) => {
            if before != DiskState::Absent(why.clone()) {
                tracing::warn!(%dir, %why, "no cache on disk for now, reads pass it by");
            }
            disk.cannot_open(why);
            return Ok(None);
        }
    };
    let (limit, policy) = (ByteSize(config.size_max), config.policy);
    match disk.open(config, SystemTime::now()) {
        Ok(found) => {
            let Recovery { records, slabs, walked, dropped, rebuilt, took, .. } = found;
            tracing::info!(%dir, %limit, %policy, chunks = records, slabs, walked, dropped, rebuilt, ?took, "the cache on disk is open");
            // The shares of a tier that was not there yet.
            server.shares.repeat();
            Ok(Some(found))
        }
        Err(e) => {
            if disk.state() != before {
                tracing::warn!(error = %e, "no cache on disk for now, reads pass it by");
            }
            Err(e)
        }
    }
}

/// Looks after the tier until `stop`.
pub(super) async fn look_after(server: Arc<Server>, disk: Arc<Disk>, stop: CancellationToken) {
    let mut every = interval(EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut tried = Instant::now();
    let scrubbing = Arc::new(Mutex::new(Scrubbing { next: Instant::now(), begun: None, some: false }));
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            _ = every.tick() => {}
            () = server.shares.appeared() => {}
        }
        let may_open = tried.elapsed() >= OPEN_EVERY;
        if may_open {
            tried = Instant::now();
        }
        let split = server.shares.changed(server.now_ns());
        let (of, on) = (Arc::clone(&server), Arc::clone(&disk));
        let scrubbing = Arc::clone(&scrubbing);
        let mut turn = spawn_blocking(move || {
            one_turn(&of, &on, may_open, split);
            scrub(&on, &mut scrubbing.lock().unwrap_or_else(PoisonError::into_inner));
        });
        tokio::select! {
            done = &mut turn => if let Err(e) = done {
                tracing::error!(error = %e, "a turn of the disk tier's housekeeping was lost");
            },
            // A disk that hangs must not hold the stop.
            () = stop.cancelled() => break,
        }
    }
}

fn one_turn(server: &Server, disk: &Disk, may_open: bool, split: Option<Split>) {
    if matches!(disk.state(), DiskState::Absent(_)) && may_open {
        // Why not is in the log and in the state.
        drop(open(server, disk));
    }
    if let Some(split) = split {
        let bounds: Vec<_> = server.resident_bounds().into_iter().map(|(_, bound)| bound).collect();
        let split = bounded(split, &bounds);
        match disk.share(&split) {
            Some(0) => tracing::info!(datasets = split.len(), "the disk is divided anew"),
            Some(chunks) => {
                tracing::info!(
                    datasets = split.len(),
                    chunks,
                    "the disk is divided anew, chunks had to leave"
                );
            }
            None => server.shares.repeat(),
        }
    }
    disk.probe(SystemTime::now());
    // What is wrong shows in the tier's health, which logs itself.
    if let Err(e) = disk.reap(REAP_BYTES) {
        tracing::debug!(error = %e, "no space was given back");
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
pub(super) async fn close(disk: Arc<Disk>) {
    disk.flushed(CLOSE_WITHIN).await;
    match timeout(CLOSE_WITHIN, spawn_blocking(move || disk.close())).await {
        Ok(Ok(Ok(()))) => tracing::info!("the cache on disk is closed"),
        Ok(Ok(Err(e))) => tracing::warn!(error = %e, "the cache on disk was not closed well"),
        Ok(Err(e)) => tracing::error!(error = %e, "closing the cache on disk was lost"),
        Err(_) => tracing::warn!("the cache on disk takes long to close and is left as it is"),
    }
}
