//! Leases: which entries each rank was granted, and which are acknowledged.
//!
//! A state machine without a clock. Every change is an [`Event`]. The server calls a method that makes an
//! event and applies it here ([`Leases::grant`], [`Leases::ack`], …), writes the event to the ledger, and
//! only then sends bytes. After a restart it applies the same events again.
//!
//! I1. An entry is in exactly one state: free, in one live lease, or acknowledged. Only a rollback makes an
//!     acknowledged entry free again.
//! I2. The shares of all ranks together are exactly the free entries. So no rank waits for ever, and no rank
//!     gets more than its share, however fast it is.
//! I3. In every world, all ranks have the same number of steps. The tail rule decides about the entries that
//!     do not fill a step, and they are counted.
//! I4. A request is idempotent by (rank, worker, sequence), as long as it is among the worker's latest
//!     [`SEQUENCES_MAX`] requests that got a lease. An ack of an expired lease is rejected, because its
//!     entries may be leased to another rank by now.

use super::event::{Event, Request};
use crate::plan::{PAD, PlanError, Tail, World, bits::Bits};
use std::collections::{BTreeMap, BTreeSet};

mod apply;
mod error;
mod sequences;

pub use error::LeaseError;
pub use sequences::SEQUENCES_MAX;
use sequences::{Known, Sequences};

/// Entries granted to a worker, in the order of delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The lease's number. Numbers of an epoch rise: each is above the one before it, and above every
    /// argument of [`Leases::number_after`].
    pub id: u64,
    /// The request that it answers.
    pub request: Request,
    /// The granted entries. Numbers from the plan's length on are pads.
    pub entries: Vec<u32>,
    /// How many entries, from the first, are acknowledged.
    pub acked: u32,
    /// When the lease expires unless it is renewed, in milliseconds of the caller's clock.
    pub expires_ms: u64,
}

/// What may be granted to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// The request was answered before: the same lease again.
    Again(u64),
    /// This number of entries.
    Grant(u32),
    /// None now: the rank holds as many entries as it may, and must acknowledge some first.
    Full,
    /// None any more: the rank has been granted its share of the epoch.
    Done,
}

/// How many commits an epoch keeps. It cannot be rolled back to an older commit.
pub const COMMITS_MAX: usize = 4;

#[derive(Debug, Clone, Default)]
struct Rank {
    /// Entries that the rank may still be granted in this world.
    share: u64,
    /// Entries that it holds in live leases and has not acknowledged.
    held: u64,
}

/// The leases of one epoch.
#[derive(Debug, Clone)]
pub struct Leases {
    world: World,
    /// Entries that this epoch delivers. All bitmaps are over the plan's entries.
    planned: Bits,
    acked: Bits,
    /// Entries that were granted at least once.
    issued: Bits,
    /// Entries in no lease and not acknowledged.
    free: Bits,
    /// Pads that may be granted.
    pads: BTreeSet<u32>,
    /// Pads that were granted and became free again.
    pads_back: BTreeSet<u32>,
    pads_made: u32,
    ranks: Vec<Rank>,
    live: BTreeMap<u64, Lease>,
    /// Of each (rank, worker): its latest requests that got a lease.
    latest: BTreeMap<(u32, u32), Sequences>,
    last_id: u64,
    redelivered: u64,
    commits: Vec<(u64, Bits)>,
}

/// No lease has a higher number. Numbers are times in microseconds, which are far below.
pub(super) const LEASE_NUMBER_MAX: u64 = 1 << 62;

impl Leases {
    /// Returns the leases of an epoch that delivers the entries of `planned` to the ranks of `world`.
    /// `planned` is a bitmap over the plan's entries, without those that the tail rule drops.
    ///
    /// # Errors
    /// Those of [`Leases::resumed`].
    pub fn new(planned: Bits, world: World) -> Result<Self, PlanError> {
        let none = Bits::zeros(planned.len());
        Leases::resumed(planned, none, world)
    }

    /// Returns the leases of an epoch of which `acked` was acknowledged before. A saved state needs no more.
    ///
    /// # Errors
    /// Those of [`World::check`], and [`PlanError::World`] where pads would have no numbers.
    pub fn resumed(planned: Bits, acked: Bits, world: World) -> Result<Self, PlanError> {
        check_pads(planned.len(), 0, world)?;
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
        leases.divide(world);
        Ok(leases)
    }

    /// I2, I3: divides the free entries among the ranks of a world. Only called while no lease is live.
    fn divide(&mut self, world: World) {
        self.world = world;
        let (rest, r) = (self.free.count(), u64::from(world.ranks));
        let (batch, per_step) = (u64::from(world.batch), u64::from(world.batch) / r);
        let (each, odd) = (rest / r, rest % r);
        let (short, long) = match world.tail {
            // Every rank gets whole steps; pads fill the last one.
            Tail::Pad => (rest.div_ceil(batch) * per_step, rest.div_ceil(batch) * per_step),
            // Where shares differ by one entry, steps are equal unless the smaller share is whole steps.
            Tail::Drop if each.is_multiple_of(per_step) => (each, each),
            Tail::Drop | Tail::Keep => (each, each + 1),
        };
        self.ranks = (0..r).map(|i| Rank { share: if i < odd { long } else { short }, held: 0 }).collect();
        let shares: u64 = self.ranks.iter().map(|x| x.share).sum();
        self.make_pads(usize::try_from(shares.saturating_sub(rest)).unwrap_or(usize::MAX));
    }

    /// Sets each rank's share, for an order that assigns each entry to a rank (I2).
    ///
    /// Such orders are [`crate::order::bucketed`] and [`crate::order::replay`]; other orders have equal
    /// shares. Removes all free pads: such an order makes its own. The caller calls this after everything
    /// that divides the free entries anew: the start, a resumed state, a change of world, a rollback.
    pub fn share_as(&mut self, shares: &[u64]) {
        for (rank, &share) in self.ranks.iter_mut().zip(shares) {
            rank.share = share;
        }
        self.make_pads(0);
    }

    /// Makes `n` pads free. Pads that an earlier world left undelivered come first, so that a change of world
    /// alone changes no pad.
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

    /// Gives all leases from here on numbers above `last`, and above those of earlier leases.
    ///
    /// So the lease numbers of an epoch that a state replaced mean nothing in this one, and neither does the
    /// number of a grant that a crash took out of the ledger: a client may have seen it.
    pub fn number_after(&mut self, last: u64) {
        self.last_id = self.last_id.max(last);
    }

    /// Returns how much may be granted to a request for `want` entries.
    ///
    /// A rank may hold at most `held_max` unacknowledged entries. The request gets all that it wants, or the
    /// rest of the rank's share. It gets less only when the rank holds nothing and `held_max` is less.
    /// Batches in the middle of an epoch are whole, or ranks would have unequal numbers of them (I3).
    ///
    /// # Errors
    /// [`LeaseError::Rank`], [`LeaseError::Stale`].
    pub fn room(&self, request: Request, want: u32, held_max: u32) -> Result<Room, LeaseError> {
        let ranks = self.world.ranks;
        let rank =
            self.ranks.get(request.rank as usize).ok_or(LeaseError::Rank { rank: request.rank, ranks })?;
        if let Some(sequences) = self.latest.get(&(request.rank, request.worker)) {
            match sequences.known(request.sequence) {
                Known::Granted { lease, .. } if self.live.contains_key(&lease) => {
                    return Ok(Room::Again(lease));
                }
                // An older request whose lease was acknowledged in full: the worker has gone on.
                Known::Granted { last, .. } if request.sequence < last => {
                    return Err(LeaseError::Stale { got: request.sequence, last });
                }
                Known::TooOld { last } => return Err(LeaseError::Stale { got: request.sequence, last }),
                Known::Granted { .. } | Known::Ended | Known::New => {}
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
        // `room` is at most `want`, which is a u32.
        Ok(u32::try_from(room.min(due)).map_or(Room::Full, Room::Grant))
    }

    /// Grants `entries` to a request, and returns the event. If no other entry is free, pads fill the grant
    /// up to `room` entries.
    ///
    /// The event is applied already. The caller makes it durable before it sends a byte.
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

    /// Acknowledges the first `upto` entries of a lease, and returns the event. Returns `None` when they were
    /// acknowledged before.
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

    /// Renews all leases of a worker, whose stream is alive: they expire at `expires_ms` or later.
    pub fn renew(&mut self, rank: u32, worker: u32, expires_ms: u64) {
        for l in self.live.values_mut().filter(|l| l.request.rank == rank && l.request.worker == worker) {
            l.expires_ms = l.expires_ms.max(expires_ms);
        }
    }

    /// Renews one lease: it expires at `expires_ms` or later. Returns `false` when the rank has no such
    /// lease.
    pub fn renew_one(&mut self, rank: u32, lease: u64, expires_ms: u64) -> bool {
        match self.live.get_mut(&lease).filter(|l| l.request.rank == rank) {
            Some(l) => {
                l.expires_ms = l.expires_ms.max(expires_ms);
                true
            }
            None => false,
        }
    }

    /// Ends all leases that have expired at `now_ms`. Returns their events and the entries that are free
    /// again, which the order hands out anew.
    pub fn expire(&mut self, now_ms: u64) -> (Vec<Event>, Vec<u32>) {
        self.expire_where(|lease| lease.expires_ms <= now_ms)
    }

    /// Ends all leases of a rank, as if they had expired.
    pub fn expire_rank(&mut self, rank: u32) -> (Vec<Event>, Vec<u32>) {
        self.expire_where(|lease| lease.request.rank == rank)
    }

    fn expire_where(&mut self, is_due: impl Fn(&Lease) -> bool) -> (Vec<Event>, Vec<u32>) {
        let due: Vec<u64> = self.live.values().filter(|l| is_due(l)).map(|l| l.id).collect();
        let mut back = Vec::new();
        let events = due
            .into_iter()
            .map(|lease| {
                back.extend(self.end_lease(lease));
                Event::Expire { lease }
            })
            .collect();
        (events, back)
    }

    /// Ends a lease that its rank will not consume further, as if it had expired. Returns the event and the
    /// entries that are free again; `None` if no such lease is live.
    ///
    /// # Errors
    /// [`LeaseError::Foreign`].
    pub fn release(&mut self, rank: u32, lease: u64) -> Result<Option<(Event, Vec<u32>)>, LeaseError> {
        let Some(l) = self.live.get(&lease) else { return Ok(None) };
        if l.request.rank != rank {
            return Err(LeaseError::Foreign { lease, owner: l.request.rank, rank });
        }
        Ok(Some((Event::Expire { lease }, self.end_lease(lease))))
    }

    /// Changes the world at a step boundary: ends all live leases and divides what is not acknowledged anew.
    /// Returns the event and the entries that are free again.
    ///
    /// # Errors
    /// Those of [`Leases::resumed`]. Nothing changes then.
    pub fn change_world(&mut self, world: World) -> Result<(Event, Vec<u32>), PlanError> {
        check_pads(self.planned.len(), self.pads_made, world)?;
        let back = self.end_all();
        self.divide(world);
        self.latest.clear();
        Ok((Event::World { world }, back))
    }

    /// Commits what is acknowledged now, under the number of the caller's checkpoint.
    pub fn commit(&mut self, commit: u64) -> Event {
        self.commits.retain(|c| c.0 != commit);
        self.commits.push((commit, self.acked.clone()));
        if self.commits.len() > COMMITS_MAX {
            self.commits.remove(0);
        }
        Event::Commit { commit }
    }

    /// Rolls the epoch back to a commit: what was acknowledged after it is to be delivered again. Ends all
    /// live leases. Returns the event and the entries that are free again.
    ///
    /// # Errors
    /// [`LeaseError::Commit`]; [`LeaseError::World`] where pads would have no numbers. Nothing changes then.
    pub fn rollback(&mut self, commit: u64) -> Result<(Event, Vec<u32>), LeaseError> {
        let at = self.commits.iter().position(|c| c.0 == commit).ok_or(LeaseError::Commit(commit))?;
        let (ranks, batch) = (self.world.ranks, self.world.batch);
        check_pads(self.planned.len(), self.pads_made, self.world)
            .map_err(|_| LeaseError::World { ranks, batch })?;
        let then = self.commits[at].1.clone();
        self.commits.truncate(at + 1);
        let mut back = self.end_all();
        for e in self.acked.without(&then) {
            self.free.set(e);
            back.push(u32::try_from(e).unwrap_or(u32::MAX));
        }
        self.acked = then;
        self.divide(self.world);
        self.latest.clear();
        Ok((Event::Rollback { commit }, back))
    }

    fn end_all(&mut self) -> Vec<u32> {
        let live: Vec<u64> = self.live.keys().copied().collect();
        live.into_iter().flat_map(|l| self.end_lease(l)).collect()
    }

    /// Ends a lease and returns the plan's entries that are free again. Its pads become free too.
    fn end_lease(&mut self, lease: u64) -> Vec<u32> {
        let Some(l) = self.live.remove(&lease) else { return Vec::new() };
        if let Some(sequences) = self.latest.get_mut(&(l.request.rank, l.request.worker)) {
            sequences.ended(l.request.sequence, lease);
        }
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

    /// Returns whether an entry or a pad may be granted.
    #[must_use]
    pub fn is_free(&self, entry: u32) -> bool {
        if u64::from(entry) < self.planned.len() {
            self.free.get(u64::from(entry))
        } else {
            self.pads.contains(&entry)
        }
    }

    /// Returns the pads that may be granted, ascending.
    pub fn pads_free(&self) -> impl Iterator<Item = u32> + '_ {
        self.pads.iter().copied()
    }

    /// Returns how many entries a rank may still be granted; 0 for a rank that does not exist.
    #[must_use]
    pub fn left(&self, rank: u32) -> u64 {
        self.ranks.get(rank as usize).map_or(0, |r| r.share)
    }

    /// Returns how many entries a rank holds and has not acknowledged.
    #[must_use]
    pub fn held(&self, rank: u32) -> u64 {
        self.ranks.get(rank as usize).map_or(0, |r| r.held)
    }

    /// Returns the live leases, by number.
    pub fn live(&self) -> impl Iterator<Item = &Lease> {
        self.live.values()
    }

    /// Returns the number of the latest lease; 0 when there was none.
    #[must_use]
    pub fn last_id(&self) -> u64 {
        self.last_id
    }

    /// Returns the plan's entries that this epoch delivers.
    #[must_use]
    pub fn planned(&self) -> &Bits {
        &self.planned
    }

    /// Returns a live lease.
    #[must_use]
    pub fn lease(&self, id: u64) -> Option<&Lease> {
        self.live.get(&id)
    }

    /// Returns when the next lease expires, in milliseconds of the caller's clock.
    #[must_use]
    pub fn next_expiry_ms(&self) -> Option<u64> {
        self.live.values().map(|l| l.expires_ms).min()
    }

    /// Returns the acknowledged entries of the plan: the state from which an epoch can be resumed.
    #[must_use]
    pub fn acked(&self) -> &Bits {
        &self.acked
    }

    /// Returns the entries in no lease and not acknowledged: those that the order may still hand out.
    #[must_use]
    pub fn free(&self) -> &Bits {
        &self.free
    }

    /// Returns whether every rank has been granted its share and has acknowledged it.
    #[must_use]
    pub fn finished(&self) -> bool {
        self.live.is_empty() && self.ranks.iter().all(|r| r.share == 0)
    }

    /// Returns the planned entries that a finished epoch did not deliver. After a change of world with `drop`
    /// these can be fewer entries than ranks; otherwise there are none.
    pub fn left_out(&self) -> impl Iterator<Item = u64> + '_ {
        self.free.iter_in(0, self.free.len())
    }

    /// Returns the commits to which the epoch can be rolled back, the latest last.
    pub fn commits(&self) -> impl DoubleEndedIterator<Item = u64> + '_ {
        self.commits.iter().map(|c| c.0)
    }

    /// Returns the entries that were acknowledged at a commit, if the epoch can be rolled back to it.
    #[must_use]
    pub fn committed(&self, commit: u64) -> Option<&Bits> {
        self.commits.iter().find(|c| c.0 == commit).map(|c| &c.1)
    }

    /// Returns whether the epoch stands exactly at a commit: the same entries acknowledged, and no lease
    /// live.
    #[must_use]
    pub fn is_at(&self, commit: u64) -> bool {
        self.live.is_empty() && self.committed(commit) == Some(&self.acked)
    }

    /// Returns how many entries were granted again, because a lease expired or was released, or the epoch was
    /// rolled back.
    #[must_use]
    pub fn redelivered(&self) -> u64 {
        self.redelivered
    }

    /// Returns how many entries each rank has still to acknowledge, by rank: its share of those that are not
    /// granted yet, and what it holds.
    pub fn left_by_rank(&self) -> impl Iterator<Item = u64> + '_ {
        self.ranks.iter().map(|rank| rank.share + rank.held)
    }

    /// Returns how many pads were made, in all worlds together. Pads of a world that ended early may never
    /// have been granted.
    #[must_use]
    pub fn pads(&self) -> u32 {
        self.pads_made
    }

    /// Returns the present world.
    #[must_use]
    pub fn world(&self) -> World {
        self.world
    }
}

/// Checks that a world is possible, and that after `made` pads another batch of pads has free numbers.
fn check_pads(entries: u64, made: u32, world: World) -> Result<(), PlanError> {
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
