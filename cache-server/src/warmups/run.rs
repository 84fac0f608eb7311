//! The work of a warm-up: every chunk of the layout is looked at, what is missing is brought, and at
//! the end everything is counted once more.
//!
//! ```text
//! queued ─► running: rows in the layout's order, a few at once, fewer while somebody reads
//!        ─► what waits is written ─► counted anew ─► done | partial | failed
//!        ─► protected until the lease ends
//! cancelled, or the server stops: what was brought stays
//! ```

use super::{Leases, One, Order, Warmups, unix_ns};
use crate::versions::{ChunkFetch, Located, VersionError};
use fletch_api::{Amount, Code, WarmupState};
use fletch_core::StoreKey;
use fletch_store::{ChunkCheck, ReadError, Warmed};
use fletch_tables::ChunkRow;
use futures::{StreamExt as _, stream::FuturesUnordered};
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// Chunks that fail in a row before it is given up: the origin is away, or the tables are wrong.
const FAILURES_MAX: u32 = 16;
/// How often a chunk is tried for which there was no memory: readers had it.
const TRIES_MAX: u32 = 20;
/// Between two of those.
const AGAIN_AFTER: Duration = Duration::from_millis(500);
/// How long a dataset that nobody read lately, or not in this layout, waits for its share of the disk.
const SHARE_WITHIN: Duration = Duration::from_secs(2);
/// How long what was admitted may take to be written, at the end.
const WRITTEN_WITHIN: Duration = Duration::from_secs(60);

/// How one chunk went.
enum Went {
    Warmed(Warmed),
    Checked(ChunkCheck),
    Failed(ReadError),
}

/// Why the work ended early.
enum Early {
    Cancelled,
    Failed,
}

impl Warmups {
    /// From queued to over, and until its lease ends.
    pub(super) async fn work(self: Arc<Self>, one: Arc<One>, order: Order) {
        let turn = tokio::select! {
            turn = Arc::clone(&self.turns).acquire_owned() => turn.ok(),
            () = one.cancel.cancelled() => None,
        };
        let Some(turn) = turn else { return one.enter(WarmupState::Cancelled) };
        one.enter(WarmupState::Running);
        let mut leases = Leases::new(&self, &one.domain);
        let ended = tokio::select! {
            ended = self.all_of(&one, &order, &mut leases) => ended,
            () = one.cancel.cancelled() => Err(Early::Cancelled),
        };
        drop(turn);
        let state = match ended {
            Err(Early::Cancelled) => WarmupState::Cancelled,
            Err(Early::Failed) => WarmupState::Failed,
            Ok(()) if one.failed.get().chunks > 0 => WarmupState::Failed,
            Ok(()) if one.missing.get().chunks > 0 => WarmupState::Partial,
            Ok(()) => WarmupState::Done,
        };
        let lease = order.lease;
        drop(order);
        let protects = state != WarmupState::Cancelled && !leases.hashes.is_empty() && !lease.is_zero();
        if protects {
            let ns = u64::try_from(lease.as_nanos()).unwrap_or(u64::MAX);
            one.lock().leased_until_ns = Some(unix_ns().saturating_add(ns));
        }
        one.enter(state);
        let missing = one.missing.get().chunks;
        tracing::info!(id = %one.id, dataset = %one.dataset, state = state.as_str(), missing, "a warm-up ended");
        if protects {
            tokio::select! {
                () = sleep_until(Instant::now() + lease) => {}
                () = one.cancel.cancelled() => {}
            }
        }
        drop(leases);
        one.lock().leased_until_ns = None;
    }

    async fn all_of(&self, one: &Arc<One>, order: &Order, leases: &mut Leases) -> Result<(), Early> {
        if !one.check {
            self.share(order).await;
        }
        self.pass(one, order, leases).await?;
        if let Some(disk) = self.context.store.disk().filter(|_| !one.check) {
            disk.wait_flushed(WRITTEN_WITHIN).await;
        }
        if !one.check {
            one.missing.set(self.count(one, order, leases).await?);
        }
        if one.refused.get().chunks > 0 {
            let what = "the cache does not keep all of it: the dataset's share, or the disk, is full, or there is no disk";
            one.blame(
                Code::Overloaded,
                what.to_owned(),
                "give the cache more room (cache.size), or wait until other datasets are idle",
            );
        }
        Ok(())
    }

    /// A dataset that nobody read lately has no share yet: it gets one by being noted as read.
    async fn share(&self, order: &Order) {
        let Some(disk) = self.context.store.disk() else { return };
        let shared = async {
            while !disk.has_share(order.sources.number(), order.source.footprint_max()) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        // With less, or without one, a part is brought, and that is what is said.
        drop(timeout(SHARE_WITHIN, shared).await);
    }

    async fn rows(&self, one: &One, order: &Order, part: usize) -> Result<Arc<Vec<ChunkRow>>, Early> {
        let source = &order.source;
        let rows = source.version.chunk_rows(part).await;
        rows.map_err(|e| {
            let e = VersionError::from(e);
            one.blame(e.code(), e.to_string(), e.hint());
            Early::Failed
        })
    }

    fn parts(order: &Order) -> usize {
        order.source.version.manifest().parts.len()
    }

    /// Looks at every chunk, and brings it if that is the order.
    async fn pass(&self, one: &Arc<One>, order: &Order, leases: &mut Leases) -> Result<(), Early> {
        let mut failures = 0;
        let mut under_way = FuturesUnordered::new();
        for part in 0..Self::parts(order) {
            let rows = self.rows(one, order, part).await?;
            for row in 0..rows.len() {
                // Readers go first: while there are any, a quarter of the turns has to do.
                let most = || {
                    let all = self.context.parallel.max(1);
                    if self.context.readers() { all.div_ceil(4) } else { all }
                };
                while under_way.len() >= most() {
                    if let Some((row, went)) = under_way.next().await {
                        self.settle(one, leases, &row, went, &mut failures)?;
                    }
                }
                if !order.sources.stand() {
                    one.blame(
                        Code::NotFound,
                        "the dataset was unregistered".to_owned(),
                        "register it again, then warm it up again",
                    );
                    return Err(Early::Failed);
                }
                under_way.push(self.one_chunk(one, order, part, rows[row].clone()));
            }
        }
        while let Some((row, went)) = under_way.next().await {
            self.settle(one, leases, &row, went, &mut failures)?;
        }
        Ok(())
    }

    async fn one_chunk(&self, one: &Arc<One>, order: &Order, part: usize, row: ChunkRow) -> (ChunkRow, Went) {
        let sources = &order.sources;
        let key = StoreKey { domain: one.domain.clone(), hash: row.chunk };
        if one.check {
            let found = self.context.store.check_chunk(&key, row.len).await;
            return (row, Went::Checked(found));
        }
        let located = Located::at(&order.source, part, row.clone());
        let mut tries = 0;
        loop {
            let fetch = ChunkFetch::fetch(&self.context.versions, sources, row.chunk, &located);
            match self.context.store.warm(&key, row.len, sources.number(), fetch).await {
                Ok(warmed) => return (row, Went::Warmed(warmed)),
                Err(ReadError::Overloaded { .. }) if tries < TRIES_MAX => {
                    tries += 1;
                    sleep(AGAIN_AFTER).await;
                }
                Err(e) => return (row, Went::Failed(e)),
            }
        }
    }

    fn settle(
        &self,
        one: &One,
        leases: &mut Leases,
        row: &ChunkRow,
        went: Went,
        failures: &mut u32,
    ) -> Result<(), Early> {
        let bytes = u64::from(row.len);
        let [brought, refused, failed] = &self.totals;
        one.looked_at.add(bytes);
        match went {
            Went::Failed(e) => {
                one.failed.add(bytes);
                failed.add(bytes);
                tracing::warn!(id = %one.id, chunk = %row.chunk, error = %e, "a chunk cannot be brought");
                let (code, hint) = told(&e);
                one.blame(code, e.to_string(), hint);
                *failures += 1;
                return if *failures >= FAILURES_MAX { Err(Early::Failed) } else { Ok(()) };
            }
            Went::Warmed(Warmed::Already) => one.present.add(bytes),
            Went::Warmed(Warmed::Fetched) => {
                one.brought.add(bytes);
                brought.add(bytes);
            }
            Went::Warmed(Warmed::Refused) => {
                one.refused.add(bytes);
                refused.add(bytes);
            }
            Went::Checked(ChunkCheck::Whole) => one.present.add(bytes),
            Went::Checked(ChunkCheck::Missing | ChunkCheck::Unread) => one.missing.add(bytes),
            Went::Checked(ChunkCheck::Damaged) => {
                one.damaged.add(bytes);
                one.missing.add(bytes);
            }
        }
        *failures = 0;
        // Protected as soon as it is there: what comes later must not push it out.
        if !one.check {
            leases.take(row.chunk);
        }
        Ok(())
    }

    /// What is not where it stays now, chunk by chunk.
    async fn count(&self, one: &One, order: &Order, leases: &mut Leases) -> Result<Amount, Early> {
        let leased: std::collections::HashSet<_> = leases.hashes.iter().copied().collect();
        let mut missing = Amount::default();
        for part in 0..Self::parts(order) {
            let rows = self.rows(one, order, part).await?;
            for row in rows.iter() {
                let key = StoreKey { domain: one.domain.clone(), hash: row.chunk };
                if !self.context.store.is_kept(&key, row.len) {
                    missing.chunks += 1;
                    missing.bytes += u64::from(row.len);
                } else if !leased.contains(&row.chunk) {
                    leases.take(row.chunk);
                }
            }
        }
        Ok(missing)
    }
}

fn told(e: &ReadError) -> (Code, &'static str) {
    match e {
        ReadError::Fetch(f) => match f.source.downcast_ref::<VersionError>() {
            Some(v) => (v.code(), v.hint()),
            None => (Code::Internal, "see the server's log"),
        },
        ReadError::Corrupt(_) => (Code::OriginCorrupt, "the storage returned wrong bytes: check it"),
        ReadError::Overloaded { .. } => (Code::Overloaded, "give the server more --memory"),
        ReadError::Deadline(_) => (Code::OriginUnavailable, "check that the origin can be reached"),
        ReadError::Lost => (Code::Internal, "see the server's log"),
    }
}
