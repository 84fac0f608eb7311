//! What this process consumed as a rank of a job, so that the job goes on when its server is lost with its
//! disks (`docs/EPOCHS.md`, "A lost server").
//!
//! ```text
//! JobHandle::join ─▶ RankRecords ◀─ hold (a batch is handed out) ◀─ ack (before it is sent)
//!                         └─ keep_alive, once the job waits for a lost server: POST …/reclaim
//! ```
//! Holds entries and numbers, and sends no request. A process that did not join keeps nothing: then another
//! one acknowledges for the rank, or the server is alone and its ledger is all there is.
//!
//! I1. A record has all that was acknowledged, whether or not the server answered, and every lease whose
//!     batch was handed out.
//! I2. After a report, a batch of an earlier term is void, unless the report has its lease: it is not handed
//!     out, because the server delivers its samples again.

use super::lease::GrantRecord;
use crate::ClientError;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use fletch_api::{Ack, Reclaim, Reclaimed, ReclaimedEpoch, UnknownRanks, reclaim::UNKNOWN_MAX};
use fletch_core::{
    delivery::reclaim::{HeldGrant, RankRecord},
    plan::Bits,
};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};

/// The epochs of a rank that are kept: the latest one, and the one before it, which other ranks may be in.
const EPOCHS_KEPT: usize = 2;
/// The most pads of an epoch, beyond one for each entry of its plan.
const PADS_MORE: u64 = 1 << 24;

/// One epoch of a rank.
#[derive(Debug)]
struct EpochRecord {
    /// Where the rank began, without what it acknowledged. `None`: the epoch had not begun.
    began: Option<RankRecord>,
    /// The job returned to a state or changed its world since then, so that this record says nothing.
    is_stale: bool,
    /// Under `at-most-once` whatever was handed out counts as consumed, also of a lease that ended.
    acks_ahead: bool,
    /// What the rank acknowledged since then, pads included.
    acked: Bits,
    /// Numbers of entries and pads are below it, whatever a server says.
    most: u64,
    held: BTreeMap<u64, Held>,
}

#[derive(Debug)]
struct Held {
    grant: HeldGrant,
    /// How many of its entries the server confirmed.
    confirmed: u32,
}

impl EpochRecord {
    fn set_acked(&mut self, entries: &[u32]) {
        for e in entries.iter().map(|&e| u64::from(e)) {
            if e >= self.acked.len() && e < self.most {
                // The first pad. Bucketed epochs may have many.
                let before = std::mem::replace(&mut self.acked, Bits::zeros(self.most));
                before.iter_in(0, before.len()).for_each(|e| {
                    self.acked.set(e);
                });
            }
            if e < self.acked.len() {
                self.acked.set(e);
            }
        }
    }

    /// Ends a lease. What the server confirmed of it stays acknowledged.
    fn end(&mut self, lease: u64) {
        if let Some(held) = self.held.remove(&lease) {
            let entries = &held.grant.entries;
            let confirmed = if self.acks_ahead { entries.len() } else { held.confirmed as usize };
            self.set_acked(entries.get(..confirmed).unwrap_or_default());
        }
    }

    fn report(&self, rank: u32) -> String {
        let Some(began) = &self.began else { return String::new() };
        let number = |e: u64| u32::try_from(e).unwrap_or(u32::MAX);
        let record = RankRecord {
            acked: self.acked.iter_in(0, self.acked.len()).map(number).collect(),
            held: self.held.values().map(|held| held.grant.clone()).collect(),
            ..began.clone()
        };
        STANDARD.encode(record.to_bytes(rank))
    }
}

/// What a record needs to know of its job.
#[derive(Debug, Clone, Copy)]
pub(super) struct JoinedJob {
    /// The entries of its plan.
    pub entries: u64,
    /// Whether its visitation is `at-most-once`.
    pub acks_ahead: bool,
    /// The term of the server that answered.
    pub term: u64,
}

/// A rank without a record.
#[derive(Debug)]
struct Unserved {
    /// The epoch that it wants.
    epoch: u64,
    /// Whether a server was told that it had nothing.
    is_reported: bool,
}

#[derive(Debug, Default)]
struct Records {
    /// By rank, by epoch.
    ranks: BTreeMap<u32, BTreeMap<u64, EpochRecord>>,
    /// The highest term of a lease that was held.
    term: u64,
    /// Batches of lower terms are void, unless their lease is held.
    void_below: u64,
    /// The ranks as which this process wants to read, and for which no server has answered yet.
    unserved: BTreeMap<u32, Unserved>,
    /// What servers told of ranks for which nobody knew what they had consumed: the latest [`UNKNOWN_MAX`].
    unknown: BTreeSet<UnknownRanks>,
}

impl Records {
    fn of(&mut self, epoch: u64, rank: u32) -> Option<&mut EpochRecord> {
        self.ranks.get_mut(&rank)?.get_mut(&epoch)
    }
}

/// The records of a process. Clones of a [`JobHandle`](super::JobHandle) share them, and they outlive it.
#[derive(Debug, Default)]
pub struct RankRecords(Mutex<Records>);

impl RankRecords {
    /// Notes that this process asks for the record of a rank. If the server is lost before it answers, the
    /// process has had nothing as this rank.
    pub(super) fn joining(&self, epoch: u64, rank: u32) {
        let mut records = self.0.lock();
        if !records.ranks.contains_key(&rank) {
            records.unserved.insert(rank, Unserved { epoch, is_reported: false });
        }
    }

    /// Notes that this process reads as the rank without a record, or not at all.
    pub(super) fn joins_not(&self, rank: u32) {
        self.0.lock().unserved.remove(&rank);
    }

    /// Notes where this process begins as a rank. `record`: that of the server; `None` if the epoch has not
    /// begun.
    ///
    /// # Errors
    /// [`ClientError::Config`]: the record cannot be read.
    pub(super) fn joined(
        &self,
        (epoch, rank): (u64, u32),
        record: Option<&[u8]>,
        JoinedJob { entries, acks_ahead, term }: JoinedJob,
    ) -> Result<(), ClientError> {
        let bad = |e| ClientError::Config(format!("the server's record of rank {rank} cannot be read: {e}"));
        let mut began = record.map(|bytes| RankRecord::read(bytes, rank)).transpose().map_err(bad)?;
        let acked = began.as_mut().map(|record| std::mem::take(&mut record.acked)).unwrap_or_default();
        let mut records = self.0.lock();
        let before = records.ranks.get_mut(&rank).and_then(|of_rank| of_rank.remove(&epoch));
        let held = before.map(|before| before.held).unwrap_or_default();
        let most = entries.saturating_mul(2).saturating_add(PADS_MORE);
        let none = Bits::zeros(entries);
        let mut new = EpochRecord { began, is_stale: false, acks_ahead, acked: none, most, held };
        new.set_acked(&acked);
        if records.unserved.remove(&rank).is_some_and(|of| of.is_reported) {
            // A worker may have a batch of the lost server, which the report did not have.
            records.void_below = records.void_below.max(term);
        }
        let of_rank = records.ranks.entry(rank).or_default();
        of_rank.insert(epoch, new);
        while of_rank.len() > EPOCHS_KEPT {
            of_rank.pop_first();
        }
        Ok(())
    }

    /// Returns whether [`JobHandle::hold`](super::JobHandle::hold) has to send a request first.
    #[must_use]
    pub fn needs_request(&self, epoch: u64, rank: u32, grant: &GrantRecord) -> bool {
        grant.term > 0 && self.lacks_begin(epoch, rank)
    }

    /// Returns whether this process joined as this rank, and does not know yet where the epoch began.
    pub(super) fn lacks_begin(&self, epoch: u64, rank: u32) -> bool {
        let mut records = self.0.lock();
        if !records.ranks.contains_key(&rank) {
            return false;
        }
        match records.of(epoch, rank) {
            Some(of) => of.began.is_none() || of.is_stale,
            None => true,
        }
    }

    /// Notes that a batch is handed out. Returns whether it counts: `false` if its lease is void.
    pub(super) fn hold(&self, (epoch, rank, lease): (u64, u32, u64), grant: &GrantRecord) -> bool {
        let mut records = self.0.lock();
        if !records.ranks.contains_key(&rank) {
            return true;
        }
        if grant.term == 0 {
            // A server of an earlier release granted it, and gives no record. So nothing may be reported.
            if let Some(of) = records.of(epoch, rank) {
                of.is_stale = true;
            }
            return true;
        }
        let void_below = records.void_below;
        records.term = records.term.max(grant.term);
        let Some(of) = records.of(epoch, rank) else { return true };
        if of.held.contains_key(&lease) {
            return true;
        }
        if grant.term < void_below {
            return false;
        }
        let grant =
            HeldGrant { lease, request: grant.request(rank), entries: grant.entries.clone(), acked: 0 };
        of.held.insert(lease, Held { grant, confirmed: 0 });
        true
    }

    /// Notes acks that are about to be sent: their samples were consumed.
    pub(super) fn acking(&self, epoch: u64, rank: u32, acks: &[Ack]) {
        let mut records = self.0.lock();
        let Some(of) = records.of(epoch, rank) else { return };
        for ack in acks {
            if let Some(held) = of.held.get_mut(&ack.lease) {
                let most = u32::try_from(held.grant.entries.len()).unwrap_or(u32::MAX);
                held.grant.acked = held.grant.acked.max(ack.upto.min(most));
            }
        }
    }

    /// Notes that the server confirmed acks.
    pub(super) fn acked(&self, epoch: u64, rank: u32, acks: &[Ack]) {
        let mut records = self.0.lock();
        let Some(of) = records.of(epoch, rank) else { return };
        for ack in acks {
            let Some(held) = of.held.get_mut(&ack.lease) else { continue };
            held.confirmed = held.confirmed.max(held.grant.acked);
            if held.confirmed as usize == held.grant.entries.len() {
                of.end(ack.lease);
            }
        }
    }

    /// Notes that a lease is gone, or is released: the server delivers again what it did not confirm.
    pub fn ended(&self, epoch: u64, rank: u32, lease: u64) {
        if let Some(of) = self.0.lock().of(epoch, rank) {
            of.end(lease);
        }
    }

    /// Notes that the job returns to a state or changes its world: all records are stale until this process
    /// joins again, and are not reported.
    pub(super) fn set_stale(&self) {
        for of_rank in self.0.lock().ranks.values_mut() {
            while of_rank.len() > 1 {
                of_rank.pop_first();
            }
            of_rank.values_mut().for_each(|of| of.is_stale = true);
        }
    }

    /// Forgets a rank that this process gave up.
    pub(super) fn left(&self, rank: u32) {
        let mut records = self.0.lock();
        records.ranks.remove(&rank);
        records.unserved.remove(&rank);
    }

    /// Returns the ranks as which this process joined, each with its latest epoch.
    pub(super) fn ranks(&self) -> Vec<(u32, u64)> {
        let records = self.0.lock();
        let latest = records.ranks.iter().filter_map(|(rank, of)| Some((*rank, *of.last_key_value()?.0)));
        latest.collect()
    }

    /// Returns whether this process joined as a rank, or wants to.
    pub(super) fn is_in_use(&self) -> bool {
        let records = self.0.lock();
        !records.ranks.is_empty() || !records.unserved.is_empty()
    }

    /// Returns what this process says of its ranks. From now on, batches of the terms so far are void unless
    /// their leases are in it.
    pub(super) fn report(&self) -> Vec<Reclaim> {
        let mut records = self.0.lock();
        records.void_below = records.void_below.max(records.term + 1);
        let epoch =
            |rank: u32, (&epoch, of): (&u64, &EpochRecord)| ReclaimedEpoch { epoch, record: of.report(rank) };
        let of_rank = |(&rank, of): (&u32, &BTreeMap<u64, EpochRecord>)| Reclaim {
            rank,
            epochs: of.iter().map(|one| epoch(rank, one)).collect(),
            ..Reclaim::default()
        };
        let told = records.ranks.iter().filter(|(_, of)| of.values().all(|of| !of.is_stale));
        let mut reports: Vec<Reclaim> = told.map(of_rank).collect();
        for (&rank, of) in &mut records.unserved {
            of.is_reported = true;
            let epochs = vec![ReclaimedEpoch { epoch: of.epoch, record: String::new() }];
            reports.push(Reclaim { rank, epochs, unserved: true, ..Reclaim::default() });
        }
        for report in &mut reports {
            report.unknown = records.unknown.iter().cloned().collect();
        }
        reports
    }

    /// Ends a report: the job is served by this term.
    pub(super) fn reclaimed(&self, rank: u32, term: u64, answer: Reclaimed) {
        let Reclaimed { leases, unknown, .. } = answer;
        let mut records = self.0.lock();
        records.void_below = term;
        records.term = records.term.max(term);
        records.unknown.extend(unknown);
        while records.unknown.len() > UNKNOWN_MAX {
            records.unknown.pop_first();
        }
        for of in records.ranks.get_mut(&rank).into_iter().flat_map(BTreeMap::values_mut) {
            let is_void = |lease: &u64, held: &Held| {
                !leases.contains(lease) && (held.grant.acked as usize) < held.grant.entries.len()
            };
            let void: Vec<u64> =
                of.held.iter().filter(|(l, held)| is_void(l, held)).map(|(l, _)| *l).collect();
            for lease in void {
                // What was acknowledged of it counts.
                if let Some(held) = of.held.get_mut(&lease) {
                    held.confirmed = held.grant.acked;
                }
                of.end(lease);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_core::{
        Hash, LayoutId, Root,
        delivery::ledger::{self, Header},
        plan::{Tail, World},
    };

    fn state() -> Vec<u8> {
        let (h, world) = (Hash::of(b"x"), World { batch: 4, ranks: 2, tail: Tail::Drop });
        let (job, order) = ("j".to_owned(), "strict".to_owned());
        let header =
            Header { job, epoch: 3, root: Root(h), layout: LayoutId(h), plan: h, order, seed: 1, world };
        ledger::begin(&header)
    }

    fn grant(term: u64, entries: &[u32]) -> GrantRecord {
        GrantRecord { term, worker: 1, sequence: 9, entries: entries.to_vec() }
    }

    fn ack(lease: u64, upto: u32) -> Ack {
        Ack { lease, upto, batches: Vec::new() }
    }

    const BIG: u64 = 1 << 50;
    const OF_JOB: JoinedJob = JoinedJob { entries: 100, acks_ahead: false, term: 1 };

    fn answer(leases: &[u64]) -> Reclaimed {
        Reclaimed { leases: leases.to_vec(), ..Reclaimed::default() }
    }

    fn reported(records: &RankRecords) -> RankRecord {
        let reports = records.report();
        let bytes = STANDARD.decode(&reports[0].epochs[0].record).expect("base64");
        RankRecord::read(&bytes, 1).expect("a record")
    }

    #[test]
    fn a_process_that_did_not_join_keeps_nothing() {
        let records = RankRecords::default();
        assert!(records.hold((3, 1, BIG), &grant(1, &[1])));
        assert!(records.ranks().is_empty() && records.report().is_empty());
        assert!(!records.lacks_begin(3, 1));
    }

    #[test]
    fn a_report_has_what_was_acknowledged_and_what_is_held() {
        let records = RankRecords::default();
        records.joined((3, 1), None, OF_JOB).expect("not begun");
        assert!(records.lacks_begin(3, 1), "the first batch asks again");
        assert_eq!(records.report()[0].epochs[0].record, "");
        records.joined((3, 1), Some(&state()), OF_JOB).expect("a record");
        for (lease, entries) in [(BIG, [1, 2]), (BIG + 1, [3, 4]), (BIG + 2, [5, 6]), (BIG + 3, [7, 8])] {
            assert!(records.hold((3, 1, lease), &grant(2, &entries)));
        }
        records.acking(3, 1, &[ack(BIG, 2), ack(BIG + 1, 2)]);
        records.acked(3, 1, &[ack(BIG, 2)]);
        records.acking(3, 1, &[ack(BIG + 3, 1)]);
        records.acked(3, 1, &[ack(BIG + 3, 1)]);
        records.ended(3, 1, BIG + 3);
        let record = reported(&records);
        assert_eq!(record.acked, [1, 2, 7], "confirmed, also of a lease that ended");
        let held: Vec<(u64, u32)> = record.held.iter().map(|held| (held.lease, held.acked)).collect();
        assert_eq!(held, [(BIG + 1, 2), (BIG + 2, 0)], "an ack without an answer counts as consumed");
        assert_eq!((record.held[0].request.worker, record.held[0].request.sequence), (1, 9));
        records.set_stale();
        assert!(
            records.lacks_begin(3, 1) && records.report().is_empty(),
            "it says nothing that may be wrong"
        );
        records.left(1);
        assert!(records.ranks().is_empty());
    }

    #[test]
    fn after_a_report_batches_of_earlier_terms_are_void() {
        let records = RankRecords::default();
        records.joined((3, 1), Some(&state()), OF_JOB).expect("a record");
        assert!(records.hold((3, 1, BIG), &grant(2, &[1, 2])));
        assert_eq!(reported(&records).held.len(), 1);
        assert!(!records.hold((3, 1, BIG + 1), &grant(2, &[3])), "it came after the report");
        assert!(records.hold((3, 1, BIG), &grant(2, &[1, 2])), "it is in the report");
        assert!(records.hold((3, 1, BIG + 9), &grant(3, &[3])), "another server granted it");
        records.reclaimed(1, 3, answer(&[BIG + 9]));
        assert!(!records.hold((3, 1, BIG), &grant(2, &[1, 2])), "the report lost it to another rank");
        // The server came back by itself: what it grants counts.
        drop(records.report());
        assert!(!records.hold((3, 1, BIG + 10), &grant(3, &[4])));
        records.reclaimed(1, 3, answer(&[]));
        assert!(records.hold((3, 1, BIG + 10), &grant(3, &[4])));
    }

    #[test]
    fn a_rank_that_no_server_served_says_that_it_had_nothing() {
        let records = RankRecords::default();
        records.joining(3, 1);
        assert!(records.is_in_use() && records.ranks().is_empty());
        let reports = records.report();
        let wanted = [ReclaimedEpoch { epoch: 3, record: String::new() }];
        assert!(reports.len() == 1 && reports[0].unserved && reports[0].epochs == wanted);
        // Its worker got a batch of the lost server meanwhile.
        records.joined((3, 1), Some(&state()), JoinedJob { term: 2, ..OF_JOB }).expect("a record");
        assert!(!records.hold((3, 1, BIG), &grant(1, &[1, 2])));
        assert!(records.hold((3, 1, BIG + 1), &grant(2, &[1, 2])));
        let told = UnknownRanks { epoch: 3, term: 2, ranks: vec![1] };
        records.reclaimed(1, 2, Reclaimed { unknown: vec![told.clone()], ..answer(&[BIG + 1]) });
        records.joining(3, 1);
        let reports = records.report();
        assert!(!reports[0].unserved && reports.len() == 1, "it has a record now");
        assert_eq!(reports[0].unknown, [told], "and tells the next server of the loss");
        let alone = RankRecords::default();
        alone.joining(3, 1);
        alone.joins_not(1);
        assert!(!alone.is_in_use() && alone.report().is_empty());
    }

    #[test]
    fn what_a_server_of_an_earlier_release_granted_is_no_part_of_a_report() {
        let records = RankRecords::default();
        records.joined((3, 1), None, OF_JOB).expect("not begun");
        assert!(records.hold((3, 1, BIG), &grant(0, &[1, 2])) && records.report().is_empty());
        assert!(!records.needs_request(3, 1, &grant(0, &[3])), "that server has no record to give");
        // It was upgraded.
        assert!(records.needs_request(3, 1, &grant(1, &[3])));
        records.joined((3, 1), Some(&state()), OF_JOB).expect("a record");
        assert!(records.hold((3, 1, BIG + 1), &grant(1, &[3])));
        assert_eq!(reported(&records).held.len(), 1);
    }

    #[test]
    fn under_at_most_once_a_lease_that_ended_was_consumed() {
        let records = RankRecords::default();
        let of_job = JoinedJob { acks_ahead: true, ..OF_JOB };
        records.joined((3, 1), Some(&state()), of_job).expect("a record");
        for (lease, entries) in [(BIG, [1, 2]), (BIG + 1, [3, 4])] {
            assert!(records.hold((3, 1, lease), &grant(2, &entries)));
        }
        records.ended(3, 1, BIG);
        let record = reported(&records);
        assert_eq!((record.acked, record.held.len()), (vec![1, 2], 1));
    }

    #[test]
    fn the_latest_epochs_are_kept() {
        let records = RankRecords::default();
        for epoch in 3..6 {
            records.joined((epoch, 1), None, OF_JOB).expect("not begun");
        }
        assert_eq!(records.ranks(), [(1, 5)]);
        let epochs: Vec<u64> = records.report()[0].epochs.iter().map(|of| of.epoch).collect();
        assert_eq!(epochs, [4, 5]);
    }
}
