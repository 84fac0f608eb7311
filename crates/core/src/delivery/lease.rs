//! Leases: which rank was given which entries, and what was acknowledged (DESIGN §7).
//!
//! A state machine without a clock. Everything that changes it is an [`Event`]: the shell makes
//! one ([`Leases::grant`], [`Leases::ack`], …), which applies it here, writes it to the ledger,
//! and only then lets bytes leave; after a restart the same events are applied again.
//!
//! I1. An entry is at any time in exactly one place: not granted, in one live lease, or
//!     acknowledged; and an acknowledged entry stays so (but for a rollback).
//! I2. What ranks may still be granted is exactly what is not granted: nobody waits for ever,
//!     and no rank gets more than its share, whoever is faster.
//! I3. Every rank has the same number of steps, in every world; what does not divide follows
//!     the tail rule and is counted.
//! I4. A request is idempotent by (rank, worker, sequence); an ack of a lease that expired is
//!     refused, because its entries may be someone else's by now.

use super::ledger::Event;
use crate::plan::{PAD, PlanError, Tail, World, bits::Bits};
use std::collections::{BTreeMap, BTreeSet};

mod error;
mod view;

pub use error::LeaseError;

/// What a rank asks with; asking again with the same gets the same lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Request {
    /// The consumer.
    pub rank: u32,
    /// Which of its workers.
    pub worker: u32,
    /// Counts up per worker.
    pub sequence: u64,
}

/// Entries granted to a worker, in the order of service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Its number. Numbers of an epoch rise, from 1 or what [`Leases::number_after`] said.
    pub id: u64,
    /// Who asked.
    pub request: Request,
    /// What was granted. Numbers from the plan's length on are pads.
    pub entries: Vec<u32>,
    /// How many of them, from the first, are acknowledged.
    pub acked: u32,
    /// When it expires unless renewed, in the shell's milliseconds.
    pub expires_ms: u64,
}

/// What may be granted to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// The same request again: the same lease.
    Again(u64),
    /// So many entries.
    Grant(u32),
    /// None now: the rank holds as much as it may; ack first.
    Full,
    /// None any more: the rank has its share of the epoch.
    Done,
}

/// How many commits are remembered; older ones cannot be rolled back to.
pub const COMMITS_MAX: usize = 4;

#[derive(Debug, Clone, Default)]
struct Rank {
    /// Entries it may still be granted in this world.
    share: u64,
    /// Entries in its live leases.
    held: u64,
}

/// The leases of one epoch.
#[derive(Debug, Clone)]
pub struct Leases {
    world: World,
    /// Over the plan's entries: to be delivered in this epoch, acknowledged, ever granted.
    planned: Bits,
    acked: Bits,
    issued: Bits,
    /// In no lease and not acknowledged.
    free: Bits,
    pads: BTreeSet<u32>,
    /// Pads that were granted and came back.
    pads_back: BTreeSet<u32>,
    pads_made: u32,
    ranks: Vec<Rank>,
    live: BTreeMap<u64, Lease>,
    /// Of each (rank, worker): its latest sequence and the lease it got.
    latest: BTreeMap<(u32, u32), (u64, u64)>,
    last_id: u64,
    redelivered: u64,
    commits: Vec<(u64, Bits)>,
}

impl Leases {
    /// An epoch that delivers the entries of `planned` (a bitmap over the plan's entries
    /// without those dropped) to the ranks of `fit`.
    ///
    /// # Errors
    /// Those of [`Leases::resumed`].
    pub fn new(planned: Bits, world: World) -> Result<Self, PlanError> {
        let none = Bits::zeros(planned.len());
        Leases::resumed(planned, none, world)
    }

    /// An epoch of which `acked` was delivered before: all that a saved state need contain.
    ///
    /// # Errors
    /// Those of [`Fit::check`], and [`PlanError::Fit`] where pads would have no numbers.
    pub fn resumed(planned: Bits, acked: Bits, world: World) -> Result<Self, PlanError> {
        numbered(planned.len(), 0, world)?;
        let mut free = planned.clone();
        for e in acked.iter_in(0, acked.len()) {
            free.clear(e);
        }
        let mut leases = Leases {
            world,
            issued: acked.clone(),
            planned,
            acked,
            free,
            pads: BTreeSet::new(),
            pads_back: BTreeSet::new(),
            pads_made: 0,
            ranks: Vec::new(),
            live: BTreeMap::new(),
            latest: BTreeMap::new(),
            last_id: 0,
            redelivered: 0,
            commits: Vec::new(),
        };
        leases.share_out(world);
        Ok(leases)
    }

    /// I2, I3: shares what is free. Only called while nothing is leased.
    fn share_out(&mut self, world: World) {
        self.world = world;
        let (rest, r) = (self.free.count(), u64::from(world.ranks));
        let (batch, per_step) = (u64::from(world.batch), u64::from(world.batch) / r);
        let (each, odd) = (rest / r, rest % r);
        let (short, long) = match world.tail {
            // Whole steps.
            Tail::Pad => (rest.div_ceil(batch) * per_step, rest.div_ceil(batch) * per_step),
            // Unequal shares are equal steps unless the smaller ones are whole steps.
            Tail::Drop if each.is_multiple_of(per_step) => (each, each),
            Tail::Drop | Tail::Keep => (each, each + 1),
        };
        self.ranks = (0..r).map(|i| Rank { share: if i < odd { long } else { short }, held: 0 }).collect();
        let shares: u64 = self.ranks.iter().map(|x| x.share).sum();
        self.make_pads(usize::try_from(shares.saturating_sub(rest)).unwrap_or(usize::MAX));
    }

    /// I2 for an order that says whose each entry is ([`super::bucketed`], [`super::replay`]): what each rank may still be
    /// granted, in place of equal shares, and no pads but the order's own. To be called after whatever shares
    /// anew: the beginning, a resumed state, a change of world, a rollback.
    pub fn share_as(&mut self, shares: &[u64]) {
        for (rank, &share) in self.ranks.iter_mut().zip(shares) {
            rank.share = share;
        }
        self.make_pads(0);
    }

    /// `n` pads to be granted: those that were not delivered by an earlier world first, so that a
    /// change of world alone changes no pad.
    fn make_pads(&mut self, n: usize) {
        let first = u32::try_from(self.planned.len()).unwrap_or(u32::MAX);
        while self.pads.len() > n
            && let Some(last) = self.pads.pop_last()
        {
            if last + 1 == first + self.pads_made {
                self.pads_made -= 1;
            }
        }
        while self.pads.len() < n {
            self.pads.insert(first + self.pads_made);
            self.pads_made += 1;
        }
    }

    /// Leases from here on have numbers above `last`, so that those of an epoch that was replaced by a state
    /// mean nothing in it. Without effect once there were leases: their numbers are in the ledger.
    pub fn number_after(&mut self, last: u64) {
        if self.last_id == 0 {
            self.last_id = last;
        }
    }

    /// What may be granted to a request that wants `want` entries, when a rank may hold at most
    /// `held_max` unacknowledged ones. It gets all that it wants, or what is left of the rank's share; less only where
    /// a rank that holds nothing may not hold as much: batches in the middle of an epoch are whole, or ranks would have
    /// unequal numbers of them (I3).
    ///
    /// # Errors
    /// [`LeaseError::Rank`], [`LeaseError::Stale`].
    pub fn room(&self, request: Request, want: u32, held_max: u32) -> Result<Room, LeaseError> {
        let ranks = self.world.ranks;
        let rank =
            self.ranks.get(request.rank as usize).ok_or(LeaseError::Rank { rank: request.rank, ranks })?;
        if let Some(&(last, lease)) = self.latest.get(&(request.rank, request.worker)) {
            if request.sequence < last {
                return Err(LeaseError::Stale { got: request.sequence, last });
            }
            if request.sequence == last && self.live.contains_key(&lease) {
                return Ok(Room::Again(lease));
            }
        }
        if rank.share == 0 {
            return Ok(Room::Done);
        }
        let due = rank.share.min(u64::from(want));
        let room = u64::from(held_max).saturating_sub(rank.held);
        if room < due && (rank.held > 0 || room == 0) {
            return Ok(Room::Full);
        }
        // No more than `want`.
        Ok(u32::try_from(room.min(due)).map_or(Room::Full, Room::Grant))
    }

    /// The event of granting `entries` to a request; when the plan has no more, pads fill up
    /// `room`. It is applied already; the shell makes it durable before a byte leaves.
    ///
    /// # Errors
    /// [`LeaseError::Entry`] and those of [`Leases::room`].
    pub fn grant(
        &mut self,
        request: Request,
        mut entries: Vec<u32>,
        room: u32,
        expires_ms: u64,
    ) -> Result<Event, LeaseError> {
        let short = (room as usize).saturating_sub(entries.len());
        if self.free.count() == entries.len() as u64 {
            entries.extend(self.pads.iter().take(short));
        }
        let event = Event::Grant { lease: self.last_id + 1, request, entries };
        self.apply(&event, expires_ms)?;
        Ok(event)
    }

    /// The event of acknowledging the first `upto` entries of a lease; `None` when that was
    /// known.
    ///
    /// # Errors
    /// [`LeaseError::Gone`], [`LeaseError::Foreign`], [`LeaseError::Beyond`].
    pub fn ack(&mut self, rank: u32, lease: u64, upto: u32) -> Result<Option<Event>, LeaseError> {
        let l = self.live.get(&lease).ok_or(LeaseError::Gone(lease))?;
        if l.request.rank != rank {
            return Err(LeaseError::Foreign { lease, owner: l.request.rank, rank });
        }
        let entries = u32::try_from(l.entries.len()).unwrap_or(u32::MAX);
        if upto > entries {
            return Err(LeaseError::Beyond { lease, entries, upto });
        }
        if upto <= l.acked {
            return Ok(None);
        }
        let event = Event::Ack { lease, upto };
        self.apply(&event, 0)?;
        Ok(Some(event))
    }

    /// The stream of a worker is alive: its leases expire later.
    pub fn renew(&mut self, rank: u32, worker: u32, expires_ms: u64) {
        for l in self.live.values_mut().filter(|l| l.request.rank == rank && l.request.worker == worker) {
            l.expires_ms = l.expires_ms.max(expires_ms);
        }
    }

    /// One lease is still held: it expires later. `false` when there is no such lease of that rank.
    pub fn renew_one(&mut self, rank: u32, lease: u64, expires_ms: u64) -> bool {
        match self.live.get_mut(&lease).filter(|l| l.request.rank == rank) {
            Some(l) => {
                l.expires_ms = l.expires_ms.max(expires_ms);
                true
            }
            None => false,
        }
    }

    /// The events of all leases that have expired at `now_ms`, and the entries that are free
    /// again by them (the order gives them out anew).
    pub fn expire(&mut self, now_ms: u64) -> (Vec<Event>, Vec<u32>) {
        let due: Vec<u64> = self.live.values().filter(|l| l.expires_ms <= now_ms).map(|l| l.id).collect();
        let mut back = Vec::new();
        let events = due
            .into_iter()
            .map(|lease| {
                back.extend(self.drop_lease(lease));
                Event::Expire { lease }
            })
            .collect();
        (events, back)
    }

    /// Changes the world at a step boundary: live leases are void, and what is not acknowledged
    /// is shared anew. Gives the event and the entries that are free again.
    ///
    /// # Errors
    /// Those of [`Leases::resumed`]; then nothing has changed.
    pub fn change_world(&mut self, world: World) -> Result<(Event, Vec<u32>), PlanError> {
        numbered(self.planned.len(), self.pads_made, world)?;
        let back = self.void_all();
        self.share_out(world);
        self.latest.clear();
        Ok((Event::World { world }, back))
    }

    /// A checkpoint of the model: what is acknowledged now is committed.
    pub fn commit(&mut self, commit: u64) -> Event {
        self.commits.retain(|c| c.0 != commit);
        self.commits.push((commit, self.acked.clone()));
        if self.commits.len() > COMMITS_MAX {
            self.commits.remove(0);
        }
        Event::Commit { commit }
    }

    /// The model went back to a checkpoint: what was acknowledged since is to be delivered
    /// again. Gives the event and the entries that are free again.
    ///
    /// # Errors
    /// [`LeaseError::Commit`]; [`LeaseError::World`] where pads would have no numbers. Nothing has changed.
    pub fn rollback(&mut self, commit: u64) -> Result<(Event, Vec<u32>), LeaseError> {
        let at = self.commits.iter().position(|c| c.0 == commit).ok_or(LeaseError::Commit(commit))?;
        let (ranks, batch) = (self.world.ranks, self.world.batch);
        numbered(self.planned.len(), self.pads_made, self.world)
            .map_err(|_| LeaseError::World { ranks, batch })?;
        let then = self.commits[at].1.clone();
        self.commits.truncate(at + 1);
        let mut back = self.void_all();
        for e in self.acked.without(&then) {
            self.free.set(e);
            back.push(u32::try_from(e).unwrap_or(u32::MAX));
        }
        self.acked = then;
        self.share_out(self.world);
        self.latest.clear();
        Ok((Event::Rollback { commit }, back))
    }

    fn void_all(&mut self) -> Vec<u32> {
        let live: Vec<u64> = self.live.keys().copied().collect();
        live.into_iter().flat_map(|l| self.drop_lease(l)).collect()
    }

    fn drop_lease(&mut self, lease: u64) -> Vec<u32> {
        let Some(l) = self.live.remove(&lease) else { return Vec::new() };
        let rest = &l.entries[l.acked as usize..];
        if let Some(rank) = self.ranks.get_mut(l.request.rank as usize) {
            rank.share += rest.len() as u64;
            rank.held -= rest.len() as u64;
        }
        let mut back = Vec::new();
        for &e in rest {
            if u64::from(e) < self.planned.len() {
                self.free.set(u64::from(e));
                back.push(e);
            } else {
                self.pads.insert(e);
                self.pads_back.insert(e);
            }
        }
        back
    }

    /// Applies an event: one just made, or one read from a ledger. Leases of a grant expire at
    /// `expires_ms`. Gives the entries that are free again by it.
    ///
    /// # Errors
    /// Any [`LeaseError`]: then the ledger contradicts itself, or is of another plan.
    pub fn apply(&mut self, event: &Event, expires_ms: u64) -> Result<Vec<u32>, LeaseError> {
        match event {
            Event::Grant { lease, request, entries } => {
                let ranks = self.world.ranks;
                if request.rank >= ranks {
                    return Err(LeaseError::Rank { rank: request.rank, ranks });
                }
                for (i, &e) in entries.iter().enumerate() {
                    let taken = if u64::from(e) < self.planned.len() {
                        self.free.clear(u64::from(e))
                    } else {
                        self.pads.remove(&e)
                    };
                    if !taken {
                        // Nothing has changed by a bad event.
                        for &e in &entries[..i] {
                            if u64::from(e) < self.planned.len() {
                                self.free.set(u64::from(e));
                            } else {
                                self.pads.insert(e);
                            }
                        }
                        return Err(LeaseError::Entry(e));
                    }
                }
                for &e in entries {
                    let again = if u64::from(e) < self.planned.len() {
                        !self.issued.set(u64::from(e))
                    } else {
                        self.pads_back.remove(&e)
                    };
                    self.redelivered += u64::from(again);
                }
                let rank = &mut self.ranks[request.rank as usize];
                rank.share = rank.share.saturating_sub(entries.len() as u64);
                rank.held += entries.len() as u64;
                self.last_id = *lease;
                self.latest.insert((request.rank, request.worker), (request.sequence, *lease));
                let granted =
                    Lease { id: *lease, request: *request, entries: entries.clone(), acked: 0, expires_ms };
                self.live.insert(*lease, granted);
            }
            Event::Ack { lease, upto } => {
                let l = self.live.get_mut(lease).ok_or(LeaseError::Gone(*lease))?;
                let entries = u32::try_from(l.entries.len()).unwrap_or(u32::MAX);
                if *upto > entries {
                    return Err(LeaseError::Beyond { lease: *lease, entries, upto: *upto });
                }
                let from = l.acked.min(*upto);
                for &e in l.entries[from as usize..*upto as usize]
                    .iter()
                    .filter(|&&e| u64::from(e) < self.planned.len())
                {
                    self.acked.set(u64::from(e));
                }
                self.ranks[l.request.rank as usize].held -= u64::from(*upto - from);
                l.acked = l.acked.max(*upto);
                if l.acked == entries {
                    self.live.remove(lease);
                }
            }
            Event::Expire { lease } if !self.live.contains_key(lease) => {
                return Err(LeaseError::Gone(*lease));
            }
            Event::Expire { lease } => return Ok(self.drop_lease(*lease)),
            Event::World { world } => {
                let bad = |_| LeaseError::World { ranks: world.ranks, batch: world.batch };
                return Ok(self.change_world(*world).map_err(bad)?.1);
            }
            Event::Commit { commit } => drop(self.commit(*commit)),
            Event::Rollback { commit } => return Ok(self.rollback(*commit)?.1),
            Event::Resume { byte, bits } => {
                self.resume(*byte, bits)?;
                self.share_resumed();
            }
            Event::Load { .. } | Event::End { .. } => {}
        }
        Ok(Vec::new())
    }

    /// What was acknowledged elsewhere: a piece of a bitmap, from byte `byte` on. After the last piece
    /// comes [`Leases::share_resumed`], once: a state may be of many small pieces.
    pub(super) fn resume(&mut self, byte: u64, bits: &[u8]) -> Result<(), LeaseError> {
        if let Some(&lease) = self.live.keys().next() {
            return Err(LeaseError::Busy(lease));
        }
        let set = |(i, b): (usize, u8)| {
            let first = byte.saturating_add(i as u64).saturating_mul(8);
            (0..8).filter(move |k| b >> k & 1 == 1).map(move |k| first.saturating_add(k))
        };
        let entries = || bits.iter().copied().enumerate().flat_map(set);
        if let Some(bad) = entries().find(|&e| !self.planned.get(e)) {
            return Err(LeaseError::Entry(u32::try_from(bad).unwrap_or(u32::MAX)));
        }
        for e in entries() {
            self.free.clear(e);
            self.acked.set(e);
            self.issued.set(e);
        }
        Ok(())
    }

    /// Shares what [`Leases::resume`] left.
    pub(super) fn share_resumed(&mut self) {
        self.share_out(self.world);
    }
}

/// Whether a world is possible, and another batch of pads after `made` ones have numbers and are copies of their own.
fn numbered(entries: u64, made: u32, world: World) -> Result<(), PlanError> {
    world.check()?;
    let pads = u64::from(made) + u64::from(world.batch);
    if pads > u64::from(PAD) || entries + pads > 1 << 32 {
        let why = "its pads would have no numbers: entries and pads are at most 2^32 together";
        return Err(PlanError::World { batch: world.batch, ranks: world.ranks, why });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
