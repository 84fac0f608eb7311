use super::*;
use crate::delivery::lease::{LeaseError, Room};
use crate::plan::{BATCH_MAX, Tail};
use crate::{Hash, LayoutId, Root};
use proptest::prelude::*;

const TTL: u64 = 100;

fn header(world: World) -> Header {
    let h = Hash::of(b"x");
    let (job, order) = ("j".to_owned(), "substitute".to_owned());
    Header { job, epoch: 3, root: Root(h), layout: LayoutId(h), plan: h, order, seed: 1, world }
}

/// The process of a rank, as a loader runs it.
#[derive(Debug, Clone)]
struct Process {
    record: RankRecord,
    /// What it consumed and still believes to be its own, each with its lease.
    consumed: Vec<(u64, u32)>,
    sequence: u64,
}

/// A server that has the epoch. Only `file` survives its restart.
#[derive(Clone)]
struct Primary {
    leases: Leases,
    file: Vec<u8>,
    now: u64,
    /// The leases that were acknowledged in full: their acks may arrive again.
    settled: BTreeSet<u64>,
}

impl Primary {
    fn opened(file: Vec<u8>, planned: &Bits, now: u64) -> Self {
        let read = Ledger::read(&file).expect("a ledger");
        let mut leases = Leases::new(planned.clone(), read.header.world).expect("a world");
        read.replay(&mut leases, now + TTL).expect("no contradiction");
        leases.number_after(LEASES_FROM + now);
        let granted = read.events.iter().filter_map(|event| match event {
            Event::Grant { lease, .. } => Some(*lease),
            _ => None,
        });
        let settled = granted.filter(|&lease| leases.lease(lease).is_none()).collect();
        Primary { leases, file, now, settled }
    }

    fn log(&mut self, event: &Event) {
        event.append(&mut self.file);
    }

    fn expire(&mut self) {
        let (events, _) = self.leases.expire(self.now);
        events.iter().for_each(|event| self.log(event));
    }

    /// Grants some entries to a rank: the free ones from `from` on.
    fn grant(&mut self, process: &mut Process, rank: u32, want: u32, from: u64) -> Option<HeldGrant> {
        process.sequence += 1;
        let request = Request { rank, worker: 0, sequence: process.sequence };
        let room = match self.leases.room(request, want, u32::MAX).expect("a rank of the world") {
            Room::Grant(room) => room,
            Room::Done | Room::Full => return None,
            Room::Again(_) => panic!("a new number"),
        };
        let free = self.leases.free();
        let all = free.iter_in(from % free.len(), free.len()).chain(free.iter_in(0, from % free.len()));
        let chosen: Vec<u32> = all.take(room as usize).map(|e| u32::try_from(e).expect("small")).collect();
        let event = self.leases.grant(request, chosen, room, self.now + TTL).expect("free entries");
        self.log(&event);
        let Event::Grant { lease, request, entries } = event else { panic!("a grant") };
        Some(HeldGrant { lease, request, entries, acked: 0 })
    }

    /// Applies an ack of a lease. The answer may get lost.
    fn ack(&mut self, rank: u32, lease: u64, upto: u32) -> Result<(), LeaseError> {
        if self.settled.contains(&lease) {
            return Ok(());
        }
        if let Some(event) = self.leases.ack(rank, lease, upto)? {
            self.log(&event);
        }
        if self.leases.lease(lease).is_none() {
            self.settled.insert(lease);
        }
        Ok(())
    }
}

/// One epoch, its ranks, and the servers that have it one after the other.
struct Epoch {
    planned: Bits,
    world: World,
    primary: Primary,
    ranks: BTreeMap<u32, Process>,
    /// What was consumed by processes that died, and was acknowledged.
    dead: Vec<u32>,
}

impl Epoch {
    fn new(n: u64, world: World, resumed: u64) -> Self {
        let mut planned = Bits::ones(n);
        for e in world.delivered(n).min(n)..n {
            planned.clear(e);
        }
        let mut before = Bits::zeros(n);
        for e in planned.iter_in(0, resumed.min(n)) {
            before.set(e);
        }
        let file = ledger::state(&header(world), &before);
        let primary = Primary::opened(file, &planned, 1);
        let mut epoch = Epoch { planned, world, primary, ranks: BTreeMap::new(), dead: Vec::new() };
        epoch.dead = before.iter_in(0, n).map(|e| u32::try_from(e).expect("small")).collect();
        for rank in 0..world.ranks {
            epoch.join(rank);
        }
        epoch
    }

    /// A new process begins as a rank.
    fn join(&mut self, rank: u32) {
        let read = Ledger::read(&self.primary.file).expect("a ledger");
        let record = RankRecord::begin(&read, self.planned.clone(), rank).expect("no contradiction");
        let bytes = record.to_bytes(rank);
        let again = RankRecord::read(&bytes, rank).expect("a record");
        assert_eq!(again.to_bytes(rank), bytes);
        let sequence = self.ranks.get(&rank).map_or(0, |old| old.sequence + 1000);
        if let Some(old) = self.ranks.insert(rank, Process { record: again, consumed: Vec::new(), sequence })
        {
            let acked: BTreeSet<u32> = record.acked.iter().copied().collect();
            self.dead.extend(old.consumed.iter().map(|c| c.1).filter(|e| acked.contains(e)));
        }
        // The leases of its predecessor end.
        let (events, _) = self.primary.leases.expire_rank(rank);
        events.iter().for_each(|event| self.primary.log(event));
    }

    /// A rank gets a lease, hands it out if `hands_out`, and consumes and acknowledges a part of it.
    fn step(&mut self, rank: u32, want: u32, from: u64, hands_out: bool, part: u32, is_answered: bool) {
        let process = self.ranks.get_mut(&rank).expect("a rank");
        let Some(grant) = self.primary.grant(process, rank, want, from) else { return };
        if !hands_out {
            return;
        }
        let lease = grant.lease;
        process.record.held.push(grant);
        self.ack(rank, lease, part, is_answered);
    }

    /// Acknowledges a part of a held lease. An ack whose answer gets lost is of the whole lease, as loaders
    /// send it.
    fn ack(&mut self, rank: u32, lease: u64, part: u32, is_answered: bool) {
        let process = self.ranks.get_mut(&rank).expect("a rank");
        let Some(at) = process.record.held.iter().position(|held| held.lease == lease) else { return };
        let held = &mut process.record.held[at];
        let whole = u32::try_from(held.entries.len()).expect("small");
        let upto = if is_answered { part.min(whole).max(held.acked) } else { whole };
        if upto == 0 {
            return;
        }
        let newly = &held.entries[held.acked as usize..upto as usize];
        process.consumed.extend(newly.iter().map(|&e| (lease, e)));
        let before = std::mem::replace(&mut held.acked, upto);
        let acked = self.primary.ack(rank, lease, upto);
        if !is_answered && acked.is_ok() || acked.is_ok() && upto < whole {
            return;
        }
        let held = process.record.held.remove(at);
        // Refused: what the process consumed since the ack before does not count, and is delivered again.
        let counts = if acked.is_ok() { whole } else { before };
        let (counts, refused) = held.entries.split_at(counts as usize);
        process.record.acked.extend(counts);
        process.consumed.retain(|(of, e)| *of != lease || !refused.contains(e));
    }

    /// The primary is lost with its ledger, and another one restores the epoch.
    fn lose(&mut self) {
        let reports: BTreeMap<u32, RankRecord> = self
            .ranks
            .iter()
            .map(|(&rank, process)| {
                let bytes = process.record.to_bytes(rank);
                (rank, RankRecord::read(&bytes, rank).expect("a record"))
            })
            .collect();
        let loss = loss(reports.values(), 2, self.primary.now, Vec::new());
        let restored =
            restore(&reports, self.planned.clone(), &[loss]).expect("they agree").expect("records");
        let now = self.primary.now + 1;
        self.primary = Primary::opened(restored.to_bytes(), &self.planned, now);
        for process in self.ranks.values_mut() {
            // What was acknowledged of a void lease counts.
            let is_void = |held: &HeldGrant| restored.voided.contains(&held.lease);
            let (void, kept) = std::mem::take(&mut process.record.held).into_iter().partition(is_void);
            process.record.held = kept;
            for held in void {
                process.record.acked.extend(&held.entries[..held.acked as usize]);
            }
        }
        self.check();
    }

    /// What a living process consumed is acknowledged or in its own lease, and the shares fit.
    fn check(&self) {
        let leases = &self.primary.leases;
        for (rank, process) in &self.ranks {
            for &(_, e) in &process.consumed {
                assert!(!leases.is_free(e), "rank {rank} consumed {e}, and it is free");
            }
            for held in &process.record.held {
                let is_acked = held.acked as usize == held.entries.len();
                let live = leases.lease(held.lease).map(|l| (&l.entries, l.acked));
                assert!(is_acked || live == Some((&held.entries, held.acked)), "rank {rank}: {held:?}");
            }
        }
    }

    /// Consumes all that is left, and checks that every entry was consumed once.
    fn finish(mut self) {
        for round in 0..300 {
            if self.primary.leases.finished() {
                break;
            }
            assert!(round < 299, "it does not end");
            self.primary.now += TTL + 1;
            self.primary.expire();
            for rank in 0..self.world.ranks {
                let held: Vec<u64> = self.ranks[&rank].record.held.iter().map(|held| held.lease).collect();
                held.into_iter().for_each(|lease| self.ack(rank, lease, u32::MAX, true));
                self.step(rank, 3, 0, true, u32::MAX, true);
            }
        }
        let mut count: BTreeMap<u32, u32> = BTreeMap::new();
        let living = self.ranks.values().flat_map(|process| &process.consumed).map(|c| c.1);
        living.chain(self.dead.iter().copied()).for_each(|e| *count.entry(e).or_default() += 1);
        let left_out: BTreeSet<u64> = self.primary.leases.left_out().collect();
        for e in self.planned.iter_in(0, self.planned.len()).filter(|e| !left_out.contains(e)) {
            let e = u32::try_from(e).expect("small");
            assert_eq!(count.get(&e), Some(&1), "entry {e}");
        }
        assert!(left_out.len() < self.world.ranks as usize, "{left_out:?}");
        assert!(count.values().all(|&n| n == 1), "pads, too: {count:?}");
    }
}

fn world(ranks: u32, batch: u32, tail: Tail) -> World {
    World { ranks, batch: batch * ranks, tail }
}

#[derive(Debug, Clone)]
enum Step {
    Lease { rank: u32, want: u32, from: u64, hands_out: bool, part: u32, is_answered: bool },
    Ack { rank: u32, at: usize, part: u32, is_answered: bool },
    Pass(u64),
    Replace(u32),
    Lose,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let rank = || 0u32..3;
    let lease = (rank(), 1u32..5, any::<u64>(), any::<bool>(), 0u32..6, any::<bool>()).prop_map(
        |(rank, want, from, hands_out, part, is_answered)| Step::Lease {
            rank,
            want,
            from,
            hands_out,
            part,
            is_answered,
        },
    );
    let ack = (rank(), 0usize..4, 0u32..6, any::<bool>())
        .prop_map(|(rank, at, part, is_answered)| Step::Ack { rank, at, part, is_answered });
    let rare = prop_oneof![
        (1..2 * TTL).prop_map(Step::Pass),
        rank().prop_map(Step::Replace),
        Just(Step::Lose),
        Just(Step::Lose)
    ];
    proptest::collection::vec(prop_oneof![4 => lease, 3 => ack, 2 => rare], 0..60)
}

proptest! {
    /// The law of a lost server: every entry is consumed once by the living, whatever was under way.
    #[test]
    fn each_entry_is_consumed_once_however_often_the_ledger_is_lost(
        n in 1u64..40,
        ranks in 1u32..4,
        batch in 1u32..4,
        pads: bool,
        resumed in 0u64..10,
        steps in steps(),
    ) {
        let world = world(ranks, batch, if pads { Tail::Pad } else { Tail::Drop });
        let mut epoch = Epoch::new(n, world, resumed);
        for step in steps {
            match step {
                Step::Lease { rank, want, from, hands_out, part, is_answered } => {
                    epoch.step(rank % ranks, want, from, hands_out, part, is_answered);
                }
                Step::Ack { rank, at, part, is_answered } => {
                    let held = &epoch.ranks[&(rank % ranks)].record.held;
                    if let Some(lease) = held.get(at).map(|held| held.lease) {
                        epoch.ack(rank % ranks, lease, part, is_answered);
                    }
                }
                Step::Pass(time) => {
                    epoch.primary.now += time;
                    epoch.primary.expire();
                }
                // A process that did not get the answer of an ack does not know whether it counted.
                Step::Replace(rank) => epoch.join(rank % ranks),
                Step::Lose => epoch.lose(),
            }
        }
        epoch.finish();
    }

    #[test]
    fn no_bytes_are_a_record_that_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), rank: u32) {
        drop(RankRecord::read(&bytes, rank));
    }
}

/// Two ranks that are not equally far keep their shares, so that they make the same number of steps.
#[test]
fn unequal_progress_leaves_unequal_shares() {
    let mut epoch = Epoch::new(24, world(2, 2, Tail::Drop), 0);
    for from in 0..4 {
        epoch.step(0, 2, from, true, u32::MAX, true);
    }
    epoch.step(1, 2, 0, true, u32::MAX, true);
    let before: Vec<u64> = epoch.primary.leases.left_by_rank().collect();
    assert_eq!(before, [4, 10]);
    epoch.lose();
    assert_eq!(epoch.primary.leases.left_by_rank().collect::<Vec<_>>(), before);
    epoch.finish();
}

/// A rank whose lease expired and a rank that got its entries both acknowledged them, and the first one got
/// no answer. The entries count once, and the other rank's share grows.
#[test]
fn what_two_ranks_acknowledged_counts_once() {
    let world = world(2, 1, Tail::Drop);
    let entry = |lease, rank, entries: &[u32]| HeldGrant {
        lease,
        request: Request { rank, worker: 0, sequence: 1 },
        entries: entries.to_vec(),
        acked: 0,
    };
    let new = |acked: &[u32], held| RankRecord {
        header: header(world),
        began: Vec::new(),
        acked: acked.to_vec(),
        held,
    };
    let base = LEASES_FROM;
    let records = BTreeMap::from([
        (0, new(&[0, 1], vec![entry(base + 9, 0, &[4, 5])])),
        (1, new(&[1, 2], vec![entry(base + 8, 1, &[5, 6]), entry(base + 7, 1, &[0, 7])])),
    ]);
    let restored = restore(&records, Bits::ones(8), &[]).expect("they agree").expect("records");
    assert_eq!(restored.doubled, 1);
    assert_eq!(restored.voided, [base + 7, base + 9], "0 is acknowledged, and 5 is in an earlier lease");
    let primary = Primary::opened(restored.to_bytes(), &Bits::ones(8), 1);
    assert_eq!(primary.leases.left_by_rank().collect::<Vec<_>>(), [2, 3]);
}

/// The clock of the lost server was fast. New leases have numbers that none of its leases had.
#[test]
fn a_restored_ledger_tells_of_its_losses() {
    let world = world(2, 1, Tail::Drop);
    let lease = LEASES_FROM + 5_000_000;
    let request = Request { rank: 0, worker: 0, sequence: 1 };
    let held = vec![HeldGrant { lease, request, entries: vec![0], acked: 0 }];
    let record = RankRecord { header: header(world), began: vec![], acked: vec![1], held };
    let records = BTreeMap::from([(0, record)]);
    let first = Loss { term: 2, last_lease: 0, unknown: vec![0] };
    let second = loss(records.values(), 3, LEASES_FROM + 9, vec![1]);
    let losses = [first, second.clone()];
    let restored = restore(&records, Bits::ones(8), &losses).expect("they agree").expect("records");
    let read = Ledger::read(&restored.to_bytes()).expect("a ledger");
    let told: Vec<&Event> = read.events.iter().filter(|e| matches!(e, Event::Reclaim(_))).collect();
    assert_eq!(told, losses.map(Event::Reclaim).iter().collect::<Vec<_>>());
    let primary = Primary::opened(restored.to_bytes(), &Bits::ones(8), 9);
    assert_eq!(primary.leases.last_id(), lease + LEASES_APART);
    // A number at the end of all numbers leaves room for leases.
    let mut leases = primary.leases;
    let bad = Loss { last_lease: u64::MAX, ..second };
    leases.apply(&Event::Reclaim(bad), 0).expect("applied");
    assert_eq!(leases.last_id(), LEASE_NUMBER_MAX);
}

#[test]
fn records_that_contradict_each_other_restore_nothing() {
    let (two, three) = (world(2, 1, Tail::Drop), world(3, 1, Tail::Drop));
    let new = |world| RankRecord { header: header(world), began: vec![], acked: vec![], held: vec![] };
    let records = BTreeMap::from([(0, new(two)), (1, new(three))]);
    assert_eq!(restore(&records, Bits::ones(8), &[]), Err(BadRecord::Begin(0, 1)));
    let records = BTreeMap::from([(2, new(two))]);
    assert_eq!(restore(&records, Bits::ones(8), &[]), Err(BadRecord::Rank { rank: 2, ranks: 2 }));
    assert_eq!(restore(&BTreeMap::new(), Bits::ones(8), &[]), Ok(None));
    // A rank that consumed more than its share leaves the rest to all.
    let more = RankRecord { acked: vec![0, 1, 2, 3, 4], ..new(two) };
    let over = BTreeMap::from([(0, more), (1, new(two))]);
    let restored = restore(&over, Bits::ones(8), &[]).expect("they agree").expect("records");
    let primary = Primary::opened(restored.to_bytes(), &Bits::ones(8), 1);
    assert_eq!(primary.leases.left_by_rank().sum::<u64>(), primary.leases.free().count() - 1);
    // The world of a record is checked before its ranks are counted.
    let impossible = World { ranks: RANKS_MAX + 1, batch: BATCH_MAX, tail: Tail::Drop };
    let bytes = new(impossible).to_bytes(0);
    assert!(matches!(RankRecord::read(&bytes, 0), Err(BadRecord::Ledger(BadLedger::World(_)))));
}

#[test]
fn a_record_has_the_events_of_its_rank_only() {
    let record = RankRecord {
        header: header(world(2, 2, Tail::Drop)),
        began: vec![
            Event::Resume { byte: 0, bits: vec![1] },
            Event::World { world: world(3, 2, Tail::Drop) },
        ],
        acked: vec![5, 3],
        held: Vec::new(),
    };
    let bytes = record.to_bytes(1);
    let read = RankRecord::read(&bytes, 1).expect("a record");
    assert_eq!((read.acked.as_slice(), read.world().ranks), ([3, 5].as_slice(), 3));
    assert!(matches!(RankRecord::read(&bytes, 0), Err(BadRecord::Foreign { .. })));
    let with = |event: Event| {
        let mut bytes = bytes.clone();
        event.append(&mut bytes);
        RankRecord::read(&bytes, 1)
    };
    let request = Request { rank: 1, worker: 0, sequence: 1 };
    let lease = LEASES_FROM + 1;
    with(Event::Grant { lease, request, entries: vec![9] }).expect("a held lease");
    for foreign in [
        Event::Grant { lease: 7, request, entries: vec![9] },
        Event::Grant { lease, request: Request { rank: 2, ..request }, entries: vec![9] },
        Event::Grant { lease, request: Request { worker: RECLAIMED, ..request }, entries: vec![9] },
        Event::Ack { lease, upto: 1 },
        Event::Ack { lease: 2, upto: 1 },
        Event::Expire { lease },
        Event::Commit { commit: 1 },
        Event::World { world: world(2, 2, Tail::Drop) },
        Event::Resume { byte: 0, bits: vec![1] },
        Event::End { delivered: 1, redelivered: 0 },
    ] {
        assert!(with(foreign.clone()).is_err(), "{foreign:?}");
    }
    // A long record has several lists, each with its ack.
    let many = RankRecord { acked: (0..200_000).collect(), ..record };
    let bytes = many.to_bytes(1);
    assert_eq!(RankRecord::read(&bytes, 1).expect("a record").acked.len(), 200_000);
    assert_eq!(Ledger::read(&bytes).expect("a ledger").events.len(), 2 + 2 * 4);
    let mut torn = bytes.clone();
    torn.pop();
    RankRecord::read(&torn, 1).expect_err("it is torn");
}
