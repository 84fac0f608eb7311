//! Fetching of a sweep's units to where they are kept, and checks that they are still there.

use super::{Sweep, pending_reads};
use crate::data::{
    chunk_reads::{Asker, ChunkRead},
    versions::LocatedChunk,
};
use fletch_bounds::Waits;
use fletch_store::{Pinned, Warmed, disk::Health};
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

/// How long, and how often, the sweep offers the disk a unit that it refused.
const SETTLED_WITHIN: Duration = Duration::from_secs(2);
const SETTLE_EVERY: Duration = Duration::from_millis(20);
/// Pause before another unit is displaced for a refused one.
///
/// An evicted unit may still be on its way to the disk, or have pending reads.
const GIVE_WAY_EVERY: Duration = Duration::from_millis(250);
/// How long after the last displacement the sweep plans with its whole share again.
const REGAINED_AFTER: Duration = Duration::from_secs(60);
/// Most units that one check looks for.
const LOOKED_FOR: usize = 16_384;

impl Sweep {
    /// Fetches a unit's chunks to where they are kept; returns their pins where that is memory.
    pub(super) async fn fetch_unit(self: &Arc<Self>, unit: u32) -> Result<Option<Vec<Pinned>>, String> {
        let store = &self.context.store;
        let mut held = store.disk().is_none().then(Vec::new);
        let costs = self.costs_of(unit);
        if let Some(waits) = Waits::current() {
            waits.record_for_job(&costs);
        }
        for c in self.samples.chunks(unit) {
            let row = self.source.version.chunk_row(c.part as usize, c.row as usize).await;
            let row = row.map_err(|e| e.to_string())?.ok_or("its row is gone")?;
            let located = LocatedChunk::from_row(&self.source, c.part as usize, row);
            let read = ChunkRead {
                asker: Asker::Client,
                // A sweep may serve several tenants. It takes the permits of the one that registered the
                // dataset.
                tenant: &self.source.registered.tenant,
                costs: &costs,
                sources: &self.kept_sources,
                hash: c.hash,
                located: &located,
                dataset: self.kept_sources.dataset_id(),
                part: None,
                run: None,
            };
            match &mut held {
                Some(held) => {
                    let hit = self.context.reads.read(&read).await.map_err(|e| e.to_string())?;
                    held.push(store.pin(self.key(c.hash), hit.chunk));
                }
                None => self.keep_on_disk(unit, &read).await?,
            }
        }
        Ok(held)
    }

    /// Fetches a chunk to the disk. While the disk refuses it, offers it again, at last in place of other
    /// units.
    async fn keep_on_disk(self: &Arc<Self>, unit: u32, read: &ChunkRead<'_>) -> Result<(), String> {
        let began = Instant::now();
        let mut made_room = began;
        loop {
            let warmed = self.context.reads.keep_here(read).await.map_err(|e| e.to_string())?;
            if warmed != Warmed::Refused {
                return Ok(());
            }
            let waits = self.evict_again();
            if began.elapsed() >= SETTLED_WITHIN {
                return Err("the disk does not keep it".to_owned());
            }
            if !waits || made_room.elapsed() >= GIVE_WAY_EVERY {
                if !self.give_way(unit) {
                    return Err("the disk does not keep it".to_owned());
                }
                made_room = Instant::now();
            }
            tokio::time::sleep(SETTLE_EVERY).await;
        }
    }

    /// Evicts recently evicted units once more; returns whether there were any.
    fn evict_again(&self) -> bool {
        let mut inner = self.lock();
        self.evict_overdue(&mut inner, pending_reads::WITHIN_FULL);
        !inner.evicted.is_empty()
    }

    /// Displaces another unit because the disk keeps less than the sweep's share; returns whether one was
    /// displaced.
    fn give_way(self: &Arc<Self>, unit: u32) -> bool {
        // A disk that keeps nothing at all is no reason to evict what it holds.
        let on = |t: &fletch_store::disk::DiskEngine| t.health() == Health::On;
        if !self.context.store.disk().and_then(|d| d.engine()).is_some_and(|t| on(&t)) {
            return false;
        }
        let mut inner = self.lock();
        let inner = &mut *inner;
        if !inner.policy.give_way(unit, inner.capacity, &mut inner.actions) {
            return false;
        }
        inner.displaced_at = Some(Instant::now());
        self.context.counts.displaced.fetch_add(1, Relaxed);
        self.apply_actions(inner, u64::MAX);
        true
    }

    /// Checks the next few units that the disk should hold.
    ///
    /// The disk may have refused a chunk when its append came up, or found it damaged. Without this check
    /// each sample of such a unit would be read directly.
    pub(super) fn check_resident(self: &Arc<Self>) {
        let Some(disk) = self.context.store.disk() else { return };
        let Some(tier) = disk.engine() else { return };
        // A disk that is off says nothing about what it holds.
        if tier.health() != Health::On {
            return;
        }
        let expected: Vec<(u32, u32)> = {
            let mut inner = self.lock();
            let units = inner.residence.len();
            let some = (0..LOOKED_FOR.min(units)).map(|i| (inner.next_checked + i) % units);
            let here = some.filter(|&u| inner.residence[u] == super::RESIDENT);
            let found = here.map(|u| (u32::try_from(u).unwrap_or(u32::MAX), inner.fetches[u])).collect();
            inner.next_checked = (inner.next_checked + LOOKED_FOR) % units.max(1);
            found
        };
        let stays = |unit: u32| {
            let mut chunks = self.samples.chunks(unit).iter();
            let stays = chunks.all(|c| disk.has_or_queued(&self.key(c.hash), c.len));
            if stays {
                self.use_chunks(unit);
            }
            stays
        };
        let gone: Vec<_> = expected.into_iter().filter(|&(unit, _)| !stays(unit)).collect();
        let counts = tier.stats().counts;
        let refused = counts.refused_full + counts.refused_share;
        let mut inner = self.lock();
        let inner = &mut *inner;
        let full = std::mem::replace(&mut inner.refused, refused) != refused;
        for (unit, load) in gone {
            let u = unit as usize;
            if inner.residence[u] != super::RESIDENT || inner.fetches[u] != load || !inner.policy.holds(unit)
            {
                continue;
            }
            inner.residence[u] = super::ABSENT;
            self.context.counts.failed.fetch_add(1, Relaxed);
            if full && inner.policy.give_way(unit, inner.capacity, &mut inner.actions) {
                inner.displaced_at = Some(Instant::now());
                self.context.counts.displaced.fetch_add(1, Relaxed);
            }
            inner.policy.lost(unit);
        }
        self.apply_actions(inner, u64::MAX);
    }

    /// Applies a changed share, and the whole share again some time after the disk kept less.
    pub(super) fn resize(self: &Arc<Self>, inner: &mut super::Inner, capacity: u64) {
        let regained = inner.displaced_at.is_some_and(|at| at.elapsed() >= REGAINED_AFTER);
        if capacity == inner.capacity && !regained {
            return;
        }
        let grows = capacity > inner.capacity;
        (inner.capacity, inner.displaced_at) = (capacity, None);
        inner.policy.set_capacity(capacity, &mut inner.actions);
        if grows {
            // What plain readers cached fills the reserve without a fetch.
            let now = inner.policy.progress();
            self.adopt_resident(inner, now.reserve_bytes_max.saturating_sub(now.reserve_bytes));
        }
        self.apply_actions(inner, u64::MAX);
    }
}
