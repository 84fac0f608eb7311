//! Replay: the order that a ledger tells, again. Each rank gets what it acknowledged then, in the order
//! in which it was granted, whatever chose it then and whatever is cached now.
//!
//! A *leg* is the time between two changes of world or rollbacks. Legs follow each other: the shell
//! changes the world of its leases when a leg is acknowledged ([`Replay::advance`]).
//!
//! I1. An entry whose acknowledgement stood at the end of the ledger is delivered once, to the rank and
//!     at the place among that rank's entries where it was consumed then.
//! I2. What was granted and never acknowledged, or rolled back, is not delivered at that place.
//! I3. What a rank draws depends only on which of its entries are free.

use super::rank_cursors::RankCursors;
use crate::{
    delivery::{
        lease::{LeaseError, Leases},
        ledger::{BadLedger, Event, Ledger},
    },
    plan::{Tail, World, bits::Bits},
};
use std::collections::{BTreeMap, BTreeSet};

/// Changes of world and rollbacks of a ledger that is replayed: each costs as much as a world may have ranks and pads,
/// however short its record is.
const LEGS_MAX: u64 = 1024;
/// Ranks of all legs together.
const LEG_RANKS_MAX: u64 = 1 << 20;
/// Pads of all worlds together, if each were short of a whole batch.
const LEG_PADS_MAX: u64 = 1 << 23;

/// What happened in one world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leg {
    /// The world.
    pub world: World,
    /// Of each rank: what it consumed, in order.
    pub ranks: Vec<Vec<u32>>,
}

/// The order of a ledger.
#[derive(Debug, Clone)]
pub struct Replay {
    legs: Vec<Leg>,
    at: usize,
    cursors: RankCursors,
}

/// One acknowledged entry: its leg, then lease and place in it (the order of service), and when.
#[derive(Debug, Clone, Copy)]
struct Acknowledged {
    leg: usize,
    rank: u32,
    lease: u64,
    place: usize,
    entry: u32,
}

/// Whether the changes of a ledger's worlds can be followed: a record of a few bytes may make a batch of pads.
fn followed(ledger: &Ledger) -> Result<(), BadLedger> {
    let (mut world, mut changes, mut pads) = (ledger.header.world, 0, 0);
    for event in &ledger.events {
        match event {
            Event::World { world: next } => world = *next,
            Event::Rollback { .. } => {}
            _ => continue,
        }
        changes += 1;
        pads += if world.tail == Tail::Pad { u64::from(world.batch) } else { 0 };
        let over = [(changes, LEGS_MAX), (pads, LEG_PADS_MAX)].into_iter().find(|(n, most)| n > most);
        if let Some((ranks, most)) = over {
            return Err(BadLedger::Legs { ranks, most });
        }
    }
    Ok(())
}

/// Which events are commits that a later rollback goes back to. The others tell nothing, and each would cost a copy of what
/// was acknowledged by then.
fn returned_to(events: &[Event]) -> BTreeSet<usize> {
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
    /// The order that a ledger tells somebody who believes nothing of it: `leases`, those of its epoch as it began, bear
    /// out every event. Memory and time are those of its entries, whatever else it is made of.
    ///
    /// # Errors
    /// As [`Replay::new`], and [`BadLedger::Contradiction`] where it names what the epoch has not.
    pub fn borne_out(ledger: &Ledger, leases: &mut Leases) -> Result<Self, BadLedger> {
        followed(ledger)?;
        let kept = returned_to(&ledger.events);
        for (at, event) in ledger.events.iter().enumerate() {
            if !matches!(event, Event::Commit { .. }) || kept.contains(&at) {
                ledger.apply(at, leases, 0)?;
            }
        }
        Replay::new(ledger)
    }

    /// The order that a ledger tells, finished or not.
    ///
    /// # Errors
    /// [`BadLedger::Contradiction`] where it acknowledges what it did not grant, or the same entry twice; [`BadLedger::Legs`].
    pub fn new(ledger: &Ledger) -> Result<Self, BadLedger> {
        followed(ledger)?;
        let kept = returned_to(&ledger.events);
        let mut fits = vec![ledger.header.world];
        let mut live: BTreeMap<u64, (u32, Vec<u32>, usize)> = BTreeMap::new();
        let mut told: Vec<Acknowledged> = Vec::new();
        let mut commits: BTreeMap<u64, usize> = BTreeMap::new();
        for (at, event) in (1..).zip(&ledger.events) {
            let bad = |why| BadLedger::Contradiction { at, why };
            match event {
                Event::Grant { lease, request, entries } => {
                    let ranks = fits[fits.len() - 1].ranks;
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
                    let leg = fits.len() - 1;
                    told.extend((from..upto).map(|place| Acknowledged {
                        leg,
                        rank: *rank,
                        lease: *lease,
                        place,
                        entry: entries[place],
                    }));
                    *acked = (*acked).max(upto);
                }
                Event::Expire { lease } => drop(live.remove(lease)),
                Event::Commit { commit } if kept.contains(&(at - 1)) => {
                    commits.insert(*commit, told.len());
                }
                Event::Rollback { commit } => {
                    let then = commits.get(commit).ok_or_else(|| bad(LeaseError::Commit(*commit)))?;
                    told.truncate(*then);
                    commits.retain(|_, n| *n <= told.len());
                    live.clear();
                    fits.push(fits[fits.len() - 1]);
                }
                Event::World { world } => {
                    let (ranks, batch) = (world.ranks, world.batch);
                    world.check().map_err(|_| bad(LeaseError::World { ranks, batch }))?;
                    live.clear();
                    fits.push(*world);
                }
                _ => {}
            }
        }
        told.sort_unstable_by_key(|t| (t.leg, t.lease, t.place));
        // A leg whose work was all rolled back has nothing to tell.
        let (mut legs, mut ranks): (Vec<Leg>, u64) = (Vec::new(), 0);
        for of in told.chunk_by(|a, b| a.leg == b.leg) {
            let world = fits[of[0].leg];
            ranks += u64::from(world.ranks);
            if ranks > LEG_RANKS_MAX {
                return Err(BadLedger::Legs { ranks, most: LEG_RANKS_MAX });
            }
            let mut leg = Leg { world, ranks: vec![Vec::new(); world.ranks as usize] };
            of.iter().for_each(|t| leg.ranks[t.rank as usize].push(t.entry));
            legs.push(leg);
        }
        let mut all: Vec<u32> = told.iter().map(|t| t.entry).collect();
        all.sort_unstable();
        if let Some(twice) = all.windows(2).find(|w| w[0] == w[1]) {
            return Err(BadLedger::Contradiction {
                at: ledger.events.len(),
                why: LeaseError::Entry(twice[0]),
            });
        }
        let cursors = RankCursors::new(legs.first().map_or(0, |l| l.world.ranks));
        Ok(Replay { legs, at: 0, cursors })
    }

    /// What it tells, leg by leg.
    #[must_use]
    pub fn legs(&self) -> &[Leg] {
        &self.legs
    }

    /// What each rank is told, through all legs; `None` where legs have different numbers of ranks, or there is
    /// none. To deliver it in one world is to deliver each rank its order.
    #[must_use]
    pub fn by_rank(&self) -> Option<Vec<Vec<u32>>> {
        let mut ranks = self.legs.first()?.ranks.clone();
        for leg in &self.legs[1..] {
            if leg.ranks.len() != ranks.len() {
                return None;
            }
            ranks.iter_mut().zip(&leg.ranks).for_each(|(all, more)| all.extend(more));
        }
        Some(ranks)
    }

    /// What of an epoch it does not tell: the ledger ended early, or did not begin at the beginning.
    #[must_use]
    pub fn untold(&self, planned: &Bits) -> Bits {
        let mut rest = planned.clone();
        for &e in self.legs.iter().flat_map(|l| l.ranks.iter().flatten()) {
            rest.clear(u64::from(e));
        }
        rest
    }

    /// The world of the leg that is delivered now; `None` when all are.
    #[must_use]
    pub fn world(&self) -> Option<World> {
        self.legs.get(self.at).map(|l| l.world)
    }

    /// What a rank is granted next: the next `n` of its entries that are `free`, and where they begin.
    pub fn next(&mut self, rank: u32, n: u32, free: impl Fn(u32) -> bool) -> (Vec<u32>, u64) {
        let list = self.legs.get(self.at).and_then(|l| l.ranks.get(rank as usize));
        let turn = |j: u64| list.and_then(|l| l.get(usize::try_from(j).ok()?)).copied();
        self.cursors.next(rank, n, turn, free)
    }

    /// A lease of a rank expired that was drawn from `from` on (0 when that is not known).
    pub fn rewind(&mut self, rank: u32, from: u64) {
        self.cursors.rewind(rank, from);
    }

    /// The leg is acknowledged by all: the world of the next, which the shell gives its leases.
    pub fn advance(&mut self) -> Option<World> {
        self.at = (self.at + 1).min(self.legs.len());
        let world = self.world();
        self.cursors = RankCursors::new(world.map_or(0, |f| f.ranks));
        world
    }
}

#[cfg(test)]
mod tests;
