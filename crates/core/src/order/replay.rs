//! Replay: the order that a ledger recorded, delivered again. Each rank gets the entries that it
//! acknowledged, in the order in which they were granted, whatever order chose them and whatever is cached
//! now.
//!
//! A *stretch* of a ledger lasts until its next change of world or rollback. The replay delivers one stretch
//! after another. When all ranks have acknowledged a stretch, the server changes the world of its leases to
//! that of the next ([`Replay::advance`]).
//!
//! I1. An entry that is acknowledged at the end of the ledger is delivered once: to the same rank, and at the
//!     same position among that rank's entries.
//! I2. A grant that was never acknowledged, or was rolled back, is not delivered at its position.
//! I3. The next entries of a rank depend only on which of its entries are free.

use super::rank_cursors::RankCursors;
use crate::{
    delivery::{
        event::Event,
        lease::{LeaseError, Leases},
        ledger::{BadLedger, Ledger},
    },
    plan::{Tail, World, bits::Bits},
};
use std::collections::{BTreeMap, BTreeSet};

/// The most changes of world and rollbacks of a ledger. Each costs as much as a world may have ranks and
/// pads, however short its record is.
const WORLD_CHANGES_MAX: u64 = 1024;
/// The most ranks of all stretches together.
const RANKS_IN_ALL_MAX: u64 = 1 << 20;
/// The most pads of all worlds together, if each world lacked a whole batch.
const PADS_IN_ALL_MAX: u64 = 1 << 23;

/// The entries that were acknowledged in one stretch of a ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stretch {
    /// The stretch's world.
    pub world: World,
    /// The acknowledged entries of each rank, in order.
    pub ranks: Vec<Vec<u32>>,
}

/// The order that a ledger recorded.
#[derive(Debug, Clone)]
pub struct Replay {
    stretches: Vec<Stretch>,
    /// The stretch that is delivered now.
    at: usize,
    cursors: RankCursors,
}

/// One acknowledged entry, with its stretch, its lease, and its position in the lease.
#[derive(Debug, Clone, Copy)]
struct Acknowledged {
    stretch: usize,
    rank: u32,
    lease: u64,
    place: usize,
    entry: u32,
}

/// Checks the number of a ledger's changes of world and rollbacks, and of their pads: a record of a few bytes
/// can make a batch of pads.
fn check_worlds(ledger: &Ledger) -> Result<(), BadLedger> {
    let (mut world, mut changes, mut pads) = (ledger.header.world, 0, 0);
    for event in &ledger.events {
        match event {
            Event::World { world: next } => world = *next,
            Event::Rollback { .. } => {}
            _ => continue,
        }
        changes += 1;
        pads += if world.tail == Tail::Pad { u64::from(world.batch) } else { 0 };
        let over =
            [(changes, WORLD_CHANGES_MAX), (pads, PADS_IN_ALL_MAX)].into_iter().find(|(n, most)| n > most);
        if let Some((count, most)) = over {
            return Err(BadLedger::TooManyWorlds { count, most });
        }
    }
    Ok(())
}

/// Returns which events are commits to which a later rollback returns. Other commits change nothing, and each
/// would cost a copy of the acknowledged entries.
fn commits_rolled_back_to(events: &[Event]) -> BTreeSet<usize> {
    let (mut wanted, mut out) = (BTreeSet::new(), BTreeSet::new());
    for (at, event) in events.iter().enumerate().rev() {
        match event {
            Event::Rollback { commit } => {
                wanted.insert(*commit);
            }
            Event::Commit { commit } if wanted.remove(commit) => {
                out.insert(at);
            }
            _ => {}
        }
    }
    out
}

impl Replay {
    /// Returns the order of an untrusted ledger, after applying every event to `leases`.
    ///
    /// `leases` are those of the ledger's epoch when it began. Memory and time depend on the number of
    /// entries, whatever else the ledger contains.
    ///
    /// # Errors
    /// Those of [`Replay::new`], and [`BadLedger::Contradiction`] where an event names what the epoch does
    /// not have.
    pub fn checked(ledger: &Ledger, leases: &mut Leases) -> Result<Self, BadLedger> {
        check_worlds(ledger)?;
        let kept = commits_rolled_back_to(&ledger.events);
        for (at, event) in ledger.events.iter().enumerate() {
            if !matches!(event, Event::Commit { .. }) || kept.contains(&at) {
                ledger.apply(at, leases, 0)?;
            }
        }
        Replay::new(ledger)
    }

    /// Returns the order of a ledger, whether its epoch ended or not.
    ///
    /// # Errors
    /// [`BadLedger::Contradiction`] where it acknowledges an entry that it did not grant, or an entry twice;
    /// [`BadLedger::TooManyWorlds`].
    pub fn new(ledger: &Ledger) -> Result<Self, BadLedger> {
        check_worlds(ledger)?;
        let kept = commits_rolled_back_to(&ledger.events);
        let mut worlds = vec![ledger.header.world];
        let mut live: BTreeMap<u64, (u32, Vec<u32>, usize)> = BTreeMap::new();
        let mut acknowledged: Vec<Acknowledged> = Vec::new();
        let mut commits: BTreeMap<u64, usize> = BTreeMap::new();
        for (at, event) in (1..).zip(&ledger.events) {
            let bad = |why| BadLedger::Contradiction { at, why };
            match event {
                Event::Grant { lease, request, entries } => {
                    let ranks = worlds[worlds.len() - 1].ranks;
                    if request.rank >= ranks {
                        return Err(bad(LeaseError::Rank { rank: request.rank, ranks }));
                    }
                    live.insert(*lease, (request.rank, entries.clone(), 0));
                }
                Event::Ack { lease, upto } => {
                    let Some((rank, entries, acked)) = live.get_mut(lease) else {
                        return Err(bad(LeaseError::Gone(*lease)));
                    };
                    let (upto, all) = (*upto as usize, entries.len());
                    if upto > all {
                        let entries = u32::try_from(all).unwrap_or(u32::MAX);
                        let upto = u32::try_from(upto).unwrap_or(u32::MAX);
                        return Err(bad(LeaseError::Beyond { lease: *lease, entries, upto }));
                    }
                    let from = (*acked).min(upto);
                    let stretch = worlds.len() - 1;
                    acknowledged.extend((from..upto).map(|place| Acknowledged {
                        stretch,
                        rank: *rank,
                        lease: *lease,
                        place,
                        entry: entries[place],
                    }));
                    *acked = (*acked).max(upto);
                }
                Event::Expire { lease } => drop(live.remove(lease)),
                Event::Commit { commit } if kept.contains(&(at - 1)) => {
                    commits.insert(*commit, acknowledged.len());
                }
                Event::Rollback { commit } => {
                    let then = commits.get(commit).ok_or_else(|| bad(LeaseError::Commit(*commit)))?;
                    acknowledged.truncate(*then);
                    commits.retain(|_, n| *n <= acknowledged.len());
                    live.clear();
                    worlds.push(worlds[worlds.len() - 1]);
                }
                Event::World { world } => {
                    let (ranks, batch) = (world.ranks, world.batch);
                    world.check().map_err(|_| bad(LeaseError::World { ranks, batch }))?;
                    live.clear();
                    worlds.push(*world);
                }
                _ => {}
            }
        }
        acknowledged.sort_unstable_by_key(|a| (a.stretch, a.lease, a.place));
        // A stretch that was rolled back completely has no entries, and is left out.
        let (mut stretches, mut ranks): (Vec<Stretch>, u64) = (Vec::new(), 0);
        for of in acknowledged.chunk_by(|a, b| a.stretch == b.stretch) {
            let world = worlds[of[0].stretch];
            ranks += u64::from(world.ranks);
            if ranks > RANKS_IN_ALL_MAX {
                return Err(BadLedger::TooManyWorlds { count: ranks, most: RANKS_IN_ALL_MAX });
            }
            let mut stretch = Stretch { world, ranks: vec![Vec::new(); world.ranks as usize] };
            of.iter().for_each(|a| stretch.ranks[a.rank as usize].push(a.entry));
            stretches.push(stretch);
        }
        let mut all: Vec<u32> = acknowledged.iter().map(|a| a.entry).collect();
        all.sort_unstable();
        if let Some(twice) = all.windows(2).find(|w| w[0] == w[1]) {
            return Err(BadLedger::Contradiction {
                at: ledger.events.len(),
                why: LeaseError::Entry(twice[0]),
            });
        }
        let cursors = RankCursors::new(stretches.first().map_or(0, |s| s.world.ranks));
        Ok(Replay { stretches, at: 0, cursors })
    }

    /// Returns the stretches that have entries, in order.
    #[must_use]
    pub fn stretches(&self) -> &[Stretch] {
        &self.stretches
    }

    /// Returns the entries of each rank through all stretches, for an epoch that delivers them in one world.
    ///
    /// Returns `None` when stretches have different numbers of ranks, or when no stretch has entries.
    #[must_use]
    pub fn by_rank(&self) -> Option<Vec<Vec<u32>>> {
        let mut ranks = self.stretches.first()?.ranks.clone();
        for stretch in &self.stretches[1..] {
            if stretch.ranks.len() != ranks.len() {
                return None;
            }
            ranks.iter_mut().zip(&stretch.ranks).for_each(|(all, more)| all.extend(more));
        }
        Some(ranks)
    }

    /// Returns the planned entries that this order does not deliver: the ledger ended early, or began with a
    /// state.
    #[must_use]
    pub fn not_delivered(&self, planned: &Bits) -> Bits {
        let mut rest = planned.clone();
        for &e in self.stretches.iter().flat_map(|s| s.ranks.iter().flatten()) {
            rest.clear(u64::from(e));
        }
        rest
    }

    /// Returns the world of the stretch that is delivered now; `None` after the last one.
    #[must_use]
    pub fn world(&self) -> Option<World> {
        self.stretches.get(self.at).map(|s| s.world)
    }

    /// Returns a rank's next `n` entries that are `free`, and the position of the first of them.
    pub fn next(&mut self, rank: u32, n: u32, free: impl Fn(u32) -> bool) -> (Vec<u32>, u64) {
        let list = self.stretches.get(self.at).and_then(|s| s.ranks.get(rank as usize));
        let entry = |j: u64| list.and_then(|l| l.get(usize::try_from(j).ok()?)).copied();
        self.cursors.next(rank, n, entry, free)
    }

    /// Moves a rank back to position `from`, because a lease from there on expired. 0 if the position is
    /// unknown.
    pub fn rewind(&mut self, rank: u32, from: u64) {
        self.cursors.rewind(rank, from);
    }

    /// Begins the next stretch, after all ranks acknowledged the present one. Returns its world, which the
    /// server's leases then change to.
    pub fn advance(&mut self) -> Option<World> {
        self.at = (self.at + 1).min(self.stretches.len());
        let world = self.world();
        self.cursors = RankCursors::new(world.map_or(0, |f| f.ranks));
        world
    }
}

#[cfg(test)]
mod tests;
