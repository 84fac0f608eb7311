//! Units are brought to where they stay, and looked for there.

use super::{Sweep, pending_reads};
use crate::versions::{ChunkFetch, Located};
use fletch_core::Verified;
use fletch_store::{Fetch, Warmed, disk::Health};
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

/// So long, and so often, a unit that the disk refused is offered again.
const SETTLED_WITHIN: Duration = Duration::from_secs(2);
const SETTLE_EVERY: Duration = Duration::from_millis(20);
/// After so long something else leaves for it, and again after as long: what was dropped may have been on its way to the disk,
/// or be owed.
const GIVE_WAY_EVERY: Duration = Duration::from_millis(250);
/// So long after a unit last gave way the sweep plans with all of its share again.
const REGAINED_AFTER: Duration = Duration::from_secs(60);
/// Units that are looked for at a time.
const LOOKED_FOR: usize = 16_384;

impl Sweep {
    /// The unit's chunks, brought to where they stay; themselves where that is memory.
    pub(super) async fn bring(self: &Arc<Self>, unit: u32) -> Result<Option<Vec<Verified>>, String> {
        let store = &self.context.store;
        let mut held = store.disk().is_none().then(Vec::new);
        for c in self.samples.chunks(unit) {
            let rows = self.source.version.chunk_rows(c.part as usize).await.map_err(|e| e.to_string())?;
            let row = rows.get(c.row as usize).ok_or("its row is gone")?;
            let located = Located::at(&self.source, c.part as usize, row.clone());
            // Each serves one attempt: asked again it takes what it brought for wrong bytes.
            let fetch = || ChunkFetch::fetch(&self.context.versions, &self.keeping, c.hash, &located);
            match &mut held {
                Some(held) => {
                    let (key, number) = (self.key(c.hash), self.keeping.number());
                    let hit = store.read(key, c.len, number, fetch()).await.map_err(|e| e.to_string())?;
                    held.push(hit.chunk);
                }
                None => self.keep(unit, c.hash, c.len, fetch).await?,
            }
        }
        Ok(held)
    }

    /// A chunk of a unit comes to the disk. While that refuses it, it is offered again, at last in place of others.
    async fn keep(
        self: &Arc<Self>,
        unit: u32,
        hash: fletch_core::Hash,
        len: u32,
        fetch: impl Fn() -> Fetch,
    ) -> Result<(), String> {
        let (key, number) = (self.key(hash), self.keeping.number());
        let began = Instant::now();
        let mut made_room = began;
        loop {
            let warmed = self.context.store.warm(&key, len, number, fetch()).await;
            if warmed.map_err(|e| e.to_string())? != Warmed::Refused {
                return Ok(());
            }
            let waits = self.settle();
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

    /// Drops once more what was dropped a moment ago; whether there was any.
    fn settle(&self) -> bool {
        let mut inner = self.lock();
        self.drop_again(&mut inner, pending_reads::WITHIN_FULL);
        !inner.dropped.is_empty()
    }

    /// The disk keeps less than the sweep's share, so that something else leaves for a unit; whether it did.
    fn give_way(self: &Arc<Self>, unit: u32) -> bool {
        // A disk that keeps nothing at all is no reason to drop what is there.
        let on = |t: &fletch_store::disk::DiskEngine| t.health() == Health::On;
        if !self.context.store.disk().and_then(|d| d.engine()).is_some_and(|t| on(&t)) {
            return false;
        }
        let mut inner = self.lock();
        let inner = &mut *inner;
        if !inner.policy.give_way(unit, inner.capacity, &mut inner.actions) {
            return false;
        }
        inner.gave_way = Some(Instant::now());
        self.context.counts.gave_way.fetch_add(1, Relaxed);
        self.obey(inner, u64::MAX);
        true
    }

    /// Looks for units that should be on the disk, some at a time. What was refused when its turn to be written came, or was
    /// found to be damaged, is not there; unless the sweep hears of it, each of its samples is read alone.
    pub(super) fn look(self: &Arc<Self>) {
        let Some(disk) = self.context.store.disk() else { return };
        let Some(tier) = disk.engine() else { return };
        // Of a disk that is off nothing can be said.
        if tier.health() != Health::On {
            return;
        }
        let expected: Vec<(u32, u32)> = {
            let mut inner = self.lock();
            let units = inner.here.len();
            let some = (0..LOOKED_FOR.min(units)).map(|i| (inner.looked + i) % units);
            let here = some.filter(|&u| inner.here[u] == super::HERE);
            let found = here.map(|u| (u32::try_from(u).unwrap_or(u32::MAX), inner.load[u])).collect();
            inner.looked = (inner.looked + LOOKED_FOR) % units.max(1);
            found
        };
        let stays = |unit: u32| {
            let mut chunks = self.samples.chunks(unit).iter();
            chunks.all(|c| disk.has_or_queued(&self.key(c.hash), c.len))
        };
        let gone: Vec<_> = expected.into_iter().filter(|&(unit, _)| !stays(unit)).collect();
        let counts = tier.stats().counts;
        let refused = counts.refused_full + counts.refused_share;
        let mut inner = self.lock();
        let inner = &mut *inner;
        let full = std::mem::replace(&mut inner.refused, refused) != refused;
        for (unit, load) in gone {
            let u = unit as usize;
            if inner.here[u] != super::HERE || inner.load[u] != load || !inner.policy.holds(unit) {
                continue;
            }
            inner.here[u] = super::AWAY;
            self.context.counts.failed.fetch_add(1, Relaxed);
            if full && inner.policy.give_way(unit, inner.capacity, &mut inner.actions) {
                inner.gave_way = Some(Instant::now());
                self.context.counts.gave_way.fetch_add(1, Relaxed);
            }
            inner.policy.lost(unit);
        }
        self.obey(inner, u64::MAX);
    }

    /// The share as it is now, and all of it again some time after it was found to be less.
    pub(super) fn resize(self: &Arc<Self>, inner: &mut super::Inner, capacity: u64) {
        let regained = inner.gave_way.is_some_and(|at| at.elapsed() >= REGAINED_AFTER);
        if capacity == inner.capacity && !regained {
            return;
        }
        (inner.capacity, inner.gave_way) = (capacity, None);
        inner.policy.set_capacity(capacity, &mut inner.actions);
        self.obey(inner, u64::MAX);
    }
}
