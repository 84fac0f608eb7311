//! Applying events to leases: those that [`Leases`] just made, and those read from a ledger.

use super::{LEASE_NUMBER_MAX, Lease, LeaseError, Leases};
use crate::delivery::event::Event;

impl Leases {
    /// Applies an event. A lease that it grants expires at `expires_ms`. Returns the entries that are free
    /// again.
    ///
    /// # Errors
    /// Any [`LeaseError`]: the ledger contradicts itself, or belongs to another plan.
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
                        // A rejected event changes nothing: undo its first entries.
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
                let of = self.latest.entry((request.rank, request.worker)).or_default();
                of.granted(request.sequence, *lease);
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
            Event::Expire { lease } => return Ok(self.end_lease(*lease)),
            Event::World { world } => {
                let bad = |_| LeaseError::World { ranks: world.ranks, batch: world.batch };
                return Ok(self.change_world(*world).map_err(bad)?.1);
            }
            Event::Commit { commit } => drop(self.commit(*commit)),
            Event::Rollback { commit } => return Ok(self.rollback(*commit)?.1),
            Event::Resume { byte, bits } => {
                self.resume(*byte, bits)?;
                self.divide_resumed();
            }
            Event::Reclaim(loss) => self.number_after(loss.last_lease.min(LEASE_NUMBER_MAX)),
            Event::Load { .. } | Event::End { .. } => {}
        }
        Ok(Vec::new())
    }

    /// Marks entries as acknowledged before this ledger began: those of a piece of a bitmap, from byte `byte`
    /// on.
    ///
    /// After the last piece the caller calls [`Leases::divide_resumed`], once: a state may have many small
    /// pieces.
    pub(in crate::delivery) fn resume(&mut self, byte: u64, bits: &[u8]) -> Result<(), LeaseError> {
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

    /// Divides the entries that [`Leases::resume`] left free among the ranks.
    pub(in crate::delivery) fn divide_resumed(&mut self) {
        self.divide(self.world);
    }
}
