//! Reclaim: an epoch whose ledger is lost is restored from what the processes of its ranks know.
//!
//! ```text
//! rank 0: record ─┐
//! rank 1: record ─┼─▶ restore ─▶ header and events of a new ledger ─▶ Leases, as after a restart
//! rank 2: record ─┘
//! ```
//! A rank's record is a ledger that has the events of this rank only: where the present world began, what the
//! rank acknowledged since then, and the leases that its process still holds. The process that acknowledges
//! keeps it. The idea is the grace period of NFSv4 servers (RFC 7530, section 9.6.2).
//!
//! I1. What a record has as acknowledged or held is not granted to anybody else. All other entries that the
//!     epoch delivers are free, also those of leases that no process reports.
//! I2. Each rank has as many entries left as before: its share of the world, less its own entries. A lease
//!     beyond that had expired, and is void.
//! I3. The records of all ranks begin at the same place, or nothing is restored.
//! I4. An entry that two records have goes to the lower rank. The other rank's share grows by it.
//! I5. The new ledger says for which ranks nobody knew what they had consumed.

use super::event::{Event, Loss, Request};
use super::lease::{LEASE_NUMBER_MAX, Leases};
use super::ledger::{self, BadLedger, Header, Ledger};
use crate::Kind;
use crate::plan::{RANKS_MAX, World, bits::Bits};
use crate::varint::LIST_MAX;
use std::collections::{BTreeMap, BTreeSet};

/// The worker of a grant that stands for all that a rank acknowledged before its epoch was restored. Its
/// entries ascend: their order is lost.
pub const RECLAIMED: u32 = u32::MAX;

/// The numbers below are those of grants that stand for what was acknowledged. Numbers of leases are times in
/// microseconds since 1970, which are far above.
const LEASES_FROM: u64 = 1 << 44;
/// How far the numbers of new leases are from the highest one that is known: 71 minutes. By so much the clock
/// of the lost server may have been fast.
const LEASES_APART: u64 = 1 << 32;

/// A lease that a process holds: its samples were handed out, and not all of them are acknowledged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldGrant {
    /// The lease's number.
    pub lease: u64,
    /// The request that it answered.
    pub request: Request,
    /// Its entries, in the order of delivery.
    pub entries: Vec<u32>,
    /// How many of them, from the first, the process has acknowledged, whether or not it got an answer.
    pub acked: u32,
}

/// What a rank's process knows of an epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankRecord {
    /// The header of the epoch's ledger.
    pub header: Header,
    /// What the ledger had when the present world began: `resume` records, and a world that is not the
    /// header's.
    pub began: Vec<Event>,
    /// The entries that the rank acknowledged since then, pads included. Ascending in a record that was read.
    pub acked: Vec<u32>,
    /// The leases that the process holds.
    pub held: Vec<HeldGrant>,
}

/// Why records cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadRecord {
    /// The record is no ledger.
    #[error(transparent)]
    Ledger(#[from] BadLedger),
    /// The record has something that no record of a rank has.
    #[error("record {at} is not one of a rank's record: {what}")]
    Foreign {
        /// The number of the record.
        at: usize,
        /// What it has.
        what: &'static str,
    },
    /// The records of two ranks contradict each other.
    #[error("the records of ranks {0} and {1} begin at different places")]
    Begin(u32, u32),
    /// A rank is not one of the world.
    #[error("there is a record of rank {rank}, and the epoch has {ranks} ranks")]
    Rank {
        /// The rank.
        rank: u32,
        /// The ranks of the epoch's world.
        ranks: u32,
    },
}

impl BadRecord {
    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> Kind {
        Kind::Invalid
    }
}

/// An epoch that was restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restored {
    /// The header of its new ledger.
    pub header: Header,
    /// The events of its new ledger.
    pub events: Vec<Event>,
    /// How many entries two ranks had acknowledged.
    pub doubled: u64,
    /// The leases that were reported, and that an earlier rank's record voids.
    pub voided: Vec<u64>,
}

/// Returns the loss of which a restored epoch tells. `now`: the time in microseconds since 1970.
#[must_use]
pub fn loss<'a>(
    records: impl IntoIterator<Item = &'a RankRecord>,
    term: u64,
    now: u64,
    unknown: Vec<u32>,
) -> Loss {
    let reported = records.into_iter().flat_map(|record| &record.held).map(|held| held.lease);
    let last_lease = reported.max().unwrap_or(0).max(now).saturating_add(LEASES_APART);
    Loss { term, last_lease: last_lease.min(LEASE_NUMBER_MAX), unknown }
}

impl RankRecord {
    /// Returns the record of a rank's process that begins to read now: what others acknowledged as this rank
    /// before. `planned`: the entries that the epoch delivers.
    ///
    /// # Errors
    /// Those of [`Ledger::replay`].
    pub fn begin(ledger: &Ledger, planned: Bits, rank: u32) -> Result<Self, BadLedger> {
        let mut leases = Leases::new(planned, ledger.header.world)?;
        let (mut acked, mut base, mut world) = (Vec::new(), leases.acked().clone(), ledger.header.world);
        for (at, event) in ledger.events.iter().enumerate() {
            if let Event::Ack { lease, upto } = event
                && let Some(held) = leases.lease(*lease)
                && held.request.rank == rank
            {
                let newly = held.entries.get(held.acked as usize..*upto as usize);
                acked.extend_from_slice(newly.unwrap_or_default());
            }
            ledger.apply(at, &mut leases, 0)?;
            if let Event::World { .. } | Event::Resume { .. } | Event::Rollback { .. } = event {
                acked.clear();
                (base, world) = (leases.acked().clone(), leases.world());
            }
        }
        let mut began: Vec<Event> = ledger::resume(&base).collect();
        if world != ledger.header.world {
            began.push(Event::World { world });
        }
        Ok(RankRecord { header: ledger.header.clone(), began, acked, held: Vec::new() })
    }

    /// Returns the world of the record.
    #[must_use]
    pub fn world(&self) -> World {
        match self.began.last() {
            Some(Event::World { world }) => *world,
            _ => self.header.world,
        }
    }

    /// Returns the record's bytes: a ledger.
    #[must_use]
    pub fn to_bytes(&self, rank: u32) -> Vec<u8> {
        let mut out = ledger::begin(&self.header);
        self.began.iter().for_each(|event| event.append(&mut out));
        let mut acked = self.acked.clone();
        acked.sort_unstable();
        acked.dedup();
        acked_events(rank, &acked).iter().for_each(|event| event.append(&mut out));
        for held in &self.held {
            held.events().iter().for_each(|event| event.append(&mut out));
        }
        out
    }

    /// Reads the bytes of a rank's record.
    ///
    /// # Errors
    /// [`BadRecord::Ledger`], [`BadRecord::Foreign`].
    pub fn read(bytes: &[u8], rank: u32) -> Result<Self, BadRecord> {
        let Ledger { header, events, len } = Ledger::read(bytes)?;
        if len != bytes.len() {
            return Err(BadRecord::Foreign { at: events.len() + 1, what: "it ends in the middle" });
        }
        let mut record = RankRecord { header, began: Vec::new(), acked: Vec::new(), held: Vec::new() };
        // The lists of acknowledged entries, until their acks.
        let (mut lists, mut open) = (0, None);
        for (i, event) in events.into_iter().enumerate() {
            let foreign = |what| Err(BadRecord::Foreign { at: i + 1, what });
            let has_begun = lists > 0 || !record.held.is_empty();
            if open.is_some() && !matches!(event, Event::Ack { .. }) {
                return foreign("a list of entries that are not all acknowledged");
            }
            match event {
                Event::Resume { .. } if !has_begun && record.world() == record.header.world => {
                    record.began.push(event);
                }
                Event::World { world } if !has_begun && record.world() == record.header.world => {
                    world.check().map_err(BadLedger::World)?;
                    record.began.push(event);
                }
                Event::Resume { .. } | Event::World { .. } => return foreign("it begins twice"),
                Event::Grant { request, .. } if request.rank != rank => return foreign("another rank"),
                Event::Grant { lease, request, entries } if request.worker == RECLAIMED => {
                    if !record.held.is_empty()
                        || lease != number(rank, lists)
                        || request.sequence != lists + 1
                    {
                        return foreign("a list of acknowledged entries in the wrong place");
                    }
                    lists += 1;
                    open = Some((lease, entries.len()));
                    record.acked.extend(entries);
                }
                Event::Grant { lease, .. } if !(LEASES_FROM..=LEASE_NUMBER_MAX).contains(&lease) => {
                    return foreign("a number that no lease has");
                }
                Event::Grant { lease, request, entries } => {
                    record.held.push(HeldGrant { lease, request, entries, acked: 0 });
                }
                Event::Ack { lease, upto } if open == Some((lease, upto as usize)) => open = None,
                Event::Ack { .. } if open.is_some() => {
                    return foreign("a list of entries that are not all acknowledged");
                }
                Event::Ack { lease, upto } => match record.held.iter_mut().find(|held| held.lease == lease) {
                    Some(held) if upto as usize <= held.entries.len() => held.acked = upto,
                    _ => return foreign("an ack of no lease"),
                },
                _ => return foreign("an event of all ranks"),
            }
        }
        if open.is_some() {
            return Err(BadRecord::Foreign { at: lists as usize, what: "a list without its ack" });
        }
        Ok(record)
    }
}

impl HeldGrant {
    fn events(&self) -> Vec<Event> {
        let HeldGrant { lease, request, entries, acked } = self.clone();
        let mut events = vec![Event::Grant { lease, request, entries }];
        if acked > 0 {
            events.push(Event::Ack { lease, upto: acked });
        }
        events
    }
}

/// Returns the number of the grant that stands for a list of what a rank acknowledged.
fn number(rank: u32, list: u64) -> u64 {
    1 + u64::from(rank) + list * u64::from(RANKS_MAX)
}

/// Returns the events that stand for all that a rank acknowledged.
fn acked_events(rank: u32, entries: &[u32]) -> Vec<Event> {
    let mut events = Vec::new();
    for (list, entries) in (0..).zip(entries.chunks(LIST_MAX)) {
        let lease = number(rank, list);
        let request = Request { rank, worker: RECLAIMED, sequence: list + 1 };
        let upto = u32::try_from(entries.len()).unwrap_or(u32::MAX);
        events.push(Event::Grant { lease, request, entries: entries.to_vec() });
        events.push(Event::Ack { lease, upto });
    }
    events
}

/// Restores an epoch from the records of its ranks. A rank without a record has had nothing of the epoch.
/// `planned`: the entries that the epoch delivers. `losses`: all of them so far, the latest one last.
///
/// Returns `None` without a record: then the epoch has not begun. The caller applies the events to the leases
/// of the epoch before it relies on them: a record may name entries that the epoch does not deliver.
///
/// # Errors
/// [`BadRecord::Begin`], [`BadRecord::Rank`], and where the epoch cannot have begun so.
pub fn restore(
    records: &BTreeMap<u32, RankRecord>,
    planned: Bits,
    losses: &[Loss],
) -> Result<Option<Restored>, BadRecord> {
    let Some((&first, begin)) = records.first_key_value() else { return Ok(None) };
    let ranks = begin.world().ranks;
    for (&rank, record) in records {
        if (&record.header, &record.began) != (&begin.header, &begin.began) {
            return Err(BadRecord::Begin(first, rank));
        }
        if rank >= ranks {
            return Err(BadRecord::Rank { rank, ranks });
        }
    }
    let began = Ledger { header: begin.header.clone(), events: begin.began.clone(), len: 0 };
    let mut leases = Leases::new(planned, begin.header.world).map_err(BadLedger::World)?;
    began.replay(&mut leases, 0)?;
    let (mut taken, mut doubled) = (BTreeSet::new(), 0);
    let mut own: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let mut held: Vec<(u32, &HeldGrant, Vec<u32>)> = Vec::new();
    // All that was acknowledged comes first, so that no lease takes it.
    for (&rank, record) in records {
        let mut take = |entries: &[u32]| {
            let new: Vec<u32> = entries.iter().copied().filter(|&e| taken.insert(e)).collect();
            doubled += (entries.len() - new.len()) as u64;
            new
        };
        own.insert(rank, take(&record.acked));
        held.extend(record.held.iter().map(|grant| {
            let acked = take(grant.entries.get(..grant.acked as usize).unwrap_or_default());
            (rank, grant, acked)
        }));
    }
    let mut share: BTreeMap<u32, u64> = (0..ranks).map(|rank| (rank, leases.left(rank))).collect();
    let mut is_over = false;
    let mut use_share = |rank: u32, entries: usize| {
        let left = share.entry(rank).or_default();
        let fits = entries as u64 <= *left;
        *left = left.saturating_sub(entries as u64);
        fits
    };
    for (&rank, entries) in &own {
        is_over |= !use_share(rank, entries.len());
    }
    for (rank, _, acked) in &held {
        is_over |= !use_share(*rank, acked.len());
    }
    held.sort_by_key(|(_, grant, _)| grant.lease);
    let (mut kept, mut voided) = (BTreeMap::new(), Vec::new());
    for (rank, grant, acked) in held {
        let rest = grant.entries.get(grant.acked as usize..).unwrap_or_default();
        let is_whole = acked.len() == grant.acked as usize && !kept.contains_key(&grant.lease);
        let is_free = is_whole && !is_over && rest.iter().all(|e| !taken.contains(e));
        // A lease that had expired: its rank got other entries for it.
        if is_free && use_share(rank, rest.len()) {
            taken.extend(rest.iter().copied());
            kept.insert(grant.lease, grant);
        } else {
            own.entry(rank).or_default().extend(acked);
            voided.push(grant.lease);
        }
    }
    let mut events = begin.began.clone();
    for (rank, mut entries) in own {
        entries.sort_unstable();
        events.extend(acked_events(rank, &entries));
    }
    events.extend(kept.values().flat_map(|grant| grant.events()));
    if is_over {
        // A rank consumed more than its share: an ack was refused, and it did not hear of that. The others
        // share what is left.
        events.push(Event::World { world: begin.world() });
    }
    events.extend(losses.iter().cloned().map(Event::Reclaim));
    Ok(Some(Restored { header: begin.header.clone(), events, doubled, voided }))
}

impl Restored {
    /// Returns the bytes of the new ledger.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = ledger::begin(&self.header);
        self.events.iter().for_each(|event| event.append(&mut out));
        out
    }
}

#[cfg(test)]
mod tests;
