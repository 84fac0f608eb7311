//! Runs a warm-up: fetches or checks every chunk of the layout, and counts the missing ones at the end.
//!
//! ```text
//! queued ─► running: chunks in the layout's order, several at once, fewer while there are readers
//!        ─► flush the queue of appends ─► count missing chunks ─► done | partial | failed
//!        ─► chunks stay pinned until the pin's time is over
//! cancelled, or the server stops: the fetched chunks stay
//! ```

use super::{Pins, WarmupRecord, WarmupRequest, Warmups, unix_ns};
use crate::cluster::{PeerOrder, PinOrder};
use crate::data::chunk_reads::{Asker, ChunkRead, Kept, OwnersSilent, PeersOverloaded};
use crate::data::versions::{LocatedChunk, VersionError};
use crate::tenancy::accounting::WARMUP;
use crate::tenancy::tenants::NoOriginPermit;
use fletch_api::{Amount, Code, WarmupState, routes};
use fletch_settings::ByteSize;
use fletch_store::{ChunkCheck, DiskState, ReadError, Warmed};
use fletch_tables::ChunkRow;
use futures::{StreamExt as _, stream::FuturesUnordered};
use reqwest::Method;
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// A warm-up fails after this many failed chunks in a row: the origin is down, or the tables are wrong.
const FAILURES_MAX: u32 = 16;
/// How often a chunk is tried again that found no memory, because readers had it.
const TRIES_MAX: u32 = 20;
/// The time between two such tries.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// How long a warm-up waits until its dataset has a share of the disk.
const SHARE_TIMEOUT: Duration = Duration::from_secs(2);
/// The shortest time for which other servers protect the chunks of a running warm-up after each of them.
const HOLD_MIN: Duration = Duration::from_secs(600);
/// How long the other servers may take for an order.
const ORDER_WITHIN: Duration = Duration::from_secs(5);
/// How long a warm-up waits at the end until queued chunks are written.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(60);

/// The outcome of one chunk.
enum ChunkOutcome {
    Warmed(Warmed),
    /// Another server of the cluster owns the chunk.
    Elsewhere(Warmed),
    Checked(ChunkCheck),
    Failed(ReadError),
}

/// Why a warm-up ended early.
enum EndedEarly {
    Cancelled,
    Failed,
}

impl Warmups {
    /// Runs a warm-up from queued to finished, and until its pins end.
    pub(super) async fn run(self: Arc<Self>, record: Arc<WarmupRecord>, request: WarmupRequest) {
        let permit = tokio::select! {
            permit = Arc::clone(&self.permits).acquire_owned() => permit.ok(),
            () = record.cancel.cancelled() => None,
        };
        let Some(permit) = permit else { return record.enter(WarmupState::Cancelled) };
        record.enter(WarmupState::Running);
        let mut pins = Pins::new(&self, &record.domain);
        let ended = tokio::select! {
            ended = self.process(&record, &request, &mut pins) => ended,
            () = record.cancel.cancelled() => Err(EndedEarly::Cancelled),
        };
        drop(permit);
        let state = match ended {
            Err(EndedEarly::Cancelled) => WarmupState::Cancelled,
            Err(EndedEarly::Failed) => WarmupState::Failed,
            Ok(()) if record.failed.get().chunks > 0 => WarmupState::Failed,
            Ok(()) if record.missing.get().chunks > 0 => WarmupState::Partial,
            Ok(()) => WarmupState::Done,
        };
        let pin = request.pin;
        drop(request);
        let has_pins = !pins.hashes.is_empty() || record.pinned_elsewhere.load(Relaxed);
        let pins_stay = state != WarmupState::Cancelled && has_pins && !pin.is_zero();
        if pins_stay {
            let ns = u64::try_from(pin.as_nanos()).unwrap_or(u64::MAX);
            record.lock().pinned_until_ns = Some(unix_ns().saturating_add(ns));
        }
        record.enter(state);
        let missing = record.missing.get().chunks;
        tracing::info!(
            id = %record.id, dataset = %record.dataset, state = state.as_str(), missing,
            "a warm-up ended"
        );
        self.hold_elsewhere(&record, if pins_stay { pin } else { Duration::ZERO }).await;
        if pins_stay {
            tokio::select! {
                () = sleep_until(Instant::now() + pin) => {}
                () = record.cancel.cancelled() => self.hold_elsewhere(&record, Duration::ZERO).await,
            }
        }
        drop(pins);
        record.lock().pinned_until_ns = None;
    }

    /// Tells the other servers how long they are to protect the warm-up's chunks from now on.
    async fn hold_elsewhere(&self, record: &WarmupRecord, hold: Duration) {
        if record.pinned_elsewhere.load(Relaxed) {
            let path = format!("{}?hold_s={}", routes::peer_warmup(&record.id), hold.as_secs());
            let order = PeerOrder { method: Method::PUT, path, domain: record.domain.clone(), body: None };
            // Whoever does not answer ends the protection by itself.
            self.context.cluster.order_all(&order, ORDER_WITHIN).await;
        }
    }

    async fn process(
        &self,
        record: &Arc<WarmupRecord>,
        request: &WarmupRequest,
        pins: &mut Pins,
    ) -> Result<(), EndedEarly> {
        if !record.check {
            self.wait_for_share(request).await;
        }
        self.process_chunks(record, request, pins).await?;
        if let Some(disk) = self.context.store.disk().filter(|_| !record.check) {
            disk.wait_flushed(FLUSH_TIMEOUT).await;
        }
        if !record.check {
            record.missing.set(self.count_missing(record, request, pins).await?);
        }
        if record.refused.get().chunks > 0 {
            let (code, detail, hint) = self.why_refused(request);
            record.set_error(code, detail, hint);
        }
        Ok(())
    }

    /// Returns why the disk does not keep all chunks.
    fn why_refused(&self, request: &WarmupRequest) -> (Code, String, &'static str) {
        let disk = self.context.store.disk();
        let dataset = request.sources.dataset_id();
        let needs = ByteSize(self.context.shares.part().of(request.source.footprint()));
        if let Some(DiskState::Absent(why)) = disk.map(|d| d.state()) {
            let hint = "make the cache directory usable, then start the warm-up again";
            return (Code::Overloaded, format!("the disk tier is absent: {why}"), hint);
        }
        if let Some(share) = disk.and_then(|d| self.context.shares.share_by_quota(d, dataset)) {
            let detail = format!(
                "the tenant's quota `resident` leaves {} of the disk to this dataset, and its chunks need \
                 {needs}",
                ByteSize(share)
            );
            let hint = "unregister datasets of this tenant that are not needed, or ask the administrator \
                for a larger quota";
            return (Code::QuotaExceeded, detail, hint);
        }
        let share = disk.and_then(|d| d.share_of(dataset));
        let has = share
            .map_or_else(String::new, |s| format!(", of which the dataset has a share of {}", ByteSize(s)));
        let detail = format!("the chunks need {needs}, which is more than fits on the disk{has}");
        (Code::Overloaded, detail, "raise cache.size, or wait until other datasets are idle")
    }

    /// Waits until the dataset has a share of the disk, which it gets because the warm-up counts as a read.
    async fn wait_for_share(&self, request: &WarmupRequest) {
        let Some(disk) = self.context.store.disk() else { return };
        let needs = self.context.shares.part().of(request.source.footprint());
        let shared = async {
            while !disk.has_share(request.sources.dataset_id(), needs) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        // Without a full share the warm-up fetches a part, and reports that.
        drop(timeout(SHARE_TIMEOUT, shared).await);
    }

    async fn rows(
        &self,
        record: &WarmupRecord,
        request: &WarmupRequest,
        part: usize,
    ) -> Result<Arc<Vec<ChunkRow>>, EndedEarly> {
        let source = &request.source;
        let rows = source.version.chunk_rows(part).await;
        rows.map_err(|e| {
            let e = VersionError::from(e);
            record.set_error(e.code(), e.to_string(), e.hint());
            EndedEarly::Failed
        })
    }

    fn parts(request: &WarmupRequest) -> usize {
        request.source.version.manifest().parts.len()
    }

    /// Fetches or checks every chunk.
    async fn process_chunks(
        &self,
        record: &Arc<WarmupRecord>,
        request: &WarmupRequest,
        pins: &mut Pins,
    ) -> Result<(), EndedEarly> {
        let mut failures = 0;
        let mut running = FuturesUnordered::new();
        for part in 0..Self::parts(request) {
            let rows = self.rows(record, request, part).await?;
            for row in 0..rows.len() {
                // Readers go first: while there are any, a warm-up uses a quarter of its parallelism.
                let most = || {
                    let all = self.context.parallel.max(1);
                    if self.context.has_readers() { all.div_ceil(4) } else { all }
                };
                while running.len() >= most() {
                    if let Some((row, outcome)) = running.next().await {
                        self.record_outcome(record, pins, &row, outcome, &mut failures)?;
                    }
                }
                if !request.sources.is_registered() {
                    record.set_error(
                        Code::NotFound,
                        "the dataset was unregistered".to_owned(),
                        "register it again, then start the warm-up again",
                    );
                    return Err(EndedEarly::Failed);
                }
                running.push(self.process_chunk(record, request, part, rows[row].clone()));
            }
        }
        while let Some((row, outcome)) = running.next().await {
            self.record_outcome(record, pins, &row, outcome, &mut failures)?;
        }
        Ok(())
    }

    async fn process_chunk(
        &self,
        record: &Arc<WarmupRecord>,
        request: &WarmupRequest,
        part: usize,
        row: ChunkRow,
    ) -> (ChunkRow, ChunkOutcome) {
        let sources = &request.sources;
        let located = LocatedChunk::from_row(&request.source, part, row.clone());
        let of = (&record.domain, &request.tenant);
        let costs = self.context.accounts.costs.of_server(of, sources.dataset(), WARMUP);
        let read = ChunkRead {
            asker: Asker::Client,
            tenant: &request.tenant,
            costs: &costs,
            sources,
            hash: row.chunk,
            located: &located,
            dataset: sources.dataset_id(),
            part: None,
            run: None,
        };
        if record.check {
            let found = self.context.reads.check(&read).await;
            return (row, ChunkOutcome::Checked(found));
        }
        let pin = PinOrder { warmup: record.id.clone(), hold: request.pin.max(HOLD_MIN) };
        let mut tries = 0;
        loop {
            let warmed = self.context.reads.keep(&read, Some(&pin)).await;
            match warmed {
                Ok(Kept::Here(warmed)) => return (row, ChunkOutcome::Warmed(warmed)),
                Ok(Kept::Elsewhere(warmed)) => return (row, ChunkOutcome::Elsewhere(warmed)),
                Err(e) if is_overloaded(&e) && tries < TRIES_MAX => {
                    tries += 1;
                    sleep(RETRY_INTERVAL).await;
                }
                Err(e) => return (row, ChunkOutcome::Failed(e)),
            }
        }
    }

    fn record_outcome(
        &self,
        record: &WarmupRecord,
        pins: &mut Pins,
        row: &ChunkRow,
        outcome: ChunkOutcome,
        failures: &mut u32,
    ) -> Result<(), EndedEarly> {
        let bytes = u64::from(row.len);
        let [fetched, refused, failed] = &self.totals;
        record.looked_at.add(bytes);
        let is_here = !matches!(outcome, ChunkOutcome::Elsewhere(_));
        match outcome {
            ChunkOutcome::Failed(e) => {
                record.failed.add(bytes);
                failed.add(bytes);
                tracing::warn!(
                    id = %record.id, chunk = %row.chunk, error = %e,
                    "cannot fetch a chunk of a warm-up"
                );
                let (code, hint) = problem_of(&e);
                record.set_error(code, e.to_string(), hint);
                *failures += 1;
                return if *failures >= FAILURES_MAX { Err(EndedEarly::Failed) } else { Ok(()) };
            }
            ChunkOutcome::Warmed(warmed) | ChunkOutcome::Elsewhere(warmed) => match warmed {
                Warmed::Already => record.present.add(bytes),
                Warmed::Fetched => {
                    record.fetched.add(bytes);
                    fetched.add(bytes);
                }
                Warmed::Refused => {
                    if !is_here {
                        record.refused_elsewhere.add(bytes);
                    }
                    record.refused.add(bytes);
                    refused.add(bytes);
                }
            },
            ChunkOutcome::Checked(ChunkCheck::Whole) => record.present.add(bytes),
            ChunkOutcome::Checked(ChunkCheck::Missing | ChunkCheck::Unread) => record.missing.add(bytes),
            ChunkOutcome::Checked(ChunkCheck::Damaged) => {
                record.damaged.add(bytes);
                record.missing.add(bytes);
            }
        }
        *failures = 0;
        // Pin the chunk at once, so that later chunks cannot evict it. Another server does that by itself.
        if !record.check && is_here {
            pins.pin(row.chunk);
        } else if !record.check {
            record.pinned_elsewhere.store(true, Relaxed);
        }
        Ok(())
    }

    /// Counts the chunks of this server that are not on its disk, and pins those that are.
    async fn count_missing(
        &self,
        record: &WarmupRecord,
        request: &WarmupRequest,
        pins: &mut Pins,
    ) -> Result<Amount, EndedEarly> {
        let pinned: std::collections::HashSet<_> = pins.hashes.iter().copied().collect();
        let mut missing = record.refused_elsewhere.get();
        for part in 0..Self::parts(request) {
            let rows = self.rows(record, request, part).await?;
            for row in rows.iter() {
                let key = self.context.reads.key(&record.domain, row.chunk);
                if self.context.reads.is_elsewhere(Asker::Client, &request.sources, row.chunk) {
                    continue;
                }
                if !self.context.store.is_kept(&key, row.len) {
                    missing.chunks += 1;
                    missing.bytes += u64::from(row.len);
                } else if !pinned.contains(&row.chunk) {
                    pins.pin(row.chunk);
                }
            }
        }
        Ok(missing)
    }
}

fn is_overloaded(e: &ReadError) -> bool {
    match e {
        ReadError::Overloaded { .. } => true,
        ReadError::Fetch(f) => f.source.is::<NoOriginPermit>() || f.source.is::<PeersOverloaded>(),
        _ => false,
    }
}

fn problem_of(e: &ReadError) -> (Code, &'static str) {
    match e {
        ReadError::Fetch(f) => match f.source.downcast_ref::<VersionError>() {
            Some(v) => (v.code(), v.hint()),
            None if f.source.is::<OwnersSilent>() => {
                (Code::NotReady, "look at `fletch cluster status`, then start the warm-up again")
            }
            None => f
                .source
                .downcast_ref::<NoOriginPermit>()
                .map_or((Code::Internal, "see the server's log"), |e| (Code::Overloaded, e.hint())),
        },
        ReadError::Corrupt(_) => (Code::OriginCorrupt, "the storage returned wrong bytes: check the storage"),
        ReadError::Overloaded { .. } => (Code::Overloaded, "give the server more --memory"),
        ReadError::Deadline(_) => (Code::OriginUnavailable, "check that the origin can be reached"),
        ReadError::Lost => (Code::Internal, "see the server's log"),
    }
}
