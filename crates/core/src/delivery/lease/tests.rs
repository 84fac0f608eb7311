use super::*;
use crate::{
    Hash, LayoutId, Root,
    delivery::ledger::{self, Ledger},
    order::{
        SweepPolicy,
        sweep::{SubscriberId, SweepParams},
    },
    plan::{BATCH_MAX, OrderKey, Plan, PlanUnits, RANKS_MAX, UnitMap},
};
use proptest::prelude::*;
use std::sync::Arc;

const TTL: u64 = 100;

fn key(seed: u64) -> OrderKey {
    OrderKey::new(Root(Hash::of(b"root")), Hash::of(b"plan"), seed, 0)
}

/// An epoch as a server runs it: the sweep chooses entries, leases account for them, and only the ledger
/// survives a restart. Consumers record what they consumed.
struct Epoch {
    unit_map: Arc<UnitMap>,
    plan: Plan,
    planned: Bits,
    first: World,
    policy: SweepPolicy,
    subscriber: SubscriberId,
    leases: Leases,
    file: Vec<u8>,
    now: u64,
    sequence: BTreeMap<(u32, u32), u64>,
    /// The latest lease of each request, in this world.
    asked: BTreeMap<Request, u64>,
    /// How often each entry was consumed and acknowledged; and at each commit.
    consumed: Vec<u32>,
    saved: Vec<(u64, Vec<u32>)>,
    /// Acknowledged per rank since the world changed, pads included.
    per_rank: Vec<u64>,
}

impl Epoch {
    fn new(n: u32, per_unit: u32, world: World, seed: u64) -> Self {
        let unit_of: Vec<u32> = (0..n).map(|s| s / per_unit).collect();
        let unit_map =
            Arc::new(UnitMap::new(&unit_of, vec![1000; n.div_ceil(per_unit) as usize]).expect("unit_map"));
        let plan = Plan::all(u64::from(n)).expect("plan");
        let mut planned = Bits::ones(u64::from(n));
        // The fitted plan leaves out what does not fill a step.
        for e in world.delivered(plan.entries()).min(plan.entries())..plan.entries() {
            planned.clear(e);
        }
        let header = ledger::Header {
            job: "j".into(),
            epoch: 0,
            root: Root(Hash::of(b"r")),
            layout: LayoutId(Hash::of(b"l")),
            plan: plan.hash(),
            order: "substitute".into(),
            seed,
            world,
        };
        let mut policy = SweepPolicy::new(
            unit_map.clone(),
            unit_map.total_bytes() / 3,
            &key(seed),
            SweepParams::default(),
        );
        let subscriber = policy.join(PlanUnits::new(&plan, &unit_map).expect("one version"));
        policy.begin(subscriber, planned.clone());
        Epoch {
            leases: Leases::new(planned.clone(), world).expect("world"),
            per_rank: vec![0; world.ranks as usize],
            consumed: vec![0; n as usize],
            saved: Vec::new(),
            file: ledger::begin(&header),
            first: world,
            now: 0,
            sequence: BTreeMap::new(),
            asked: BTreeMap::new(),
            unit_map,
            plan,
            planned,
            policy,
            subscriber,
        }
    }

    fn back(&mut self, entries: Vec<u32>) {
        entries.into_iter().for_each(|e| self.policy.give_back(self.subscriber, e));
    }

    /// Asks for a lease: with the next number, or again with the number that was used `back` requests ago.
    fn ask(&mut self, rank: u32, worker: u32, want: u32, back: Option<u64>) -> Option<u64> {
        let sequence = self.sequence.entry((rank, worker)).or_default();
        *sequence += u64::from(back.is_none());
        let request = Request { rank, worker, sequence: sequence.saturating_sub(back.unwrap_or(0)) };
        let before = self.asked.get(&request).copied();
        let room = match self.leases.room(request, want, 24) {
            Err(LeaseError::Stale { got, last }) => {
                assert!(got < last && back.is_some(), "a fresh sequence is never stale");
                assert!(
                    before.is_none_or(|l| !self.leases.live.contains_key(&l)),
                    "I4: a live lease of the latest requests"
                );
                return None;
            }
            room => room.expect("a known rank"),
        };
        match room {
            Room::Again(lease) => {
                assert!(back.is_some() && before == Some(lease), "I4");
                Some(lease)
            }
            Room::Done | Room::Full => None,
            Room::Grant(n) => {
                let of = &self.leases.ranks[rank as usize];
                let whole = of.share.min(u64::from(want));
                assert!(u64::from(n) == whole || of.held == 0, "I3: a short batch, of {n}");
                let mut actions = Vec::new();
                let picks: Vec<u32> = std::iter::from_fn(|| self.policy.next(self.subscriber, &mut actions))
                    .take(n as usize)
                    .map(|p| p.slot)
                    .collect();
                let event = self.leases.grant(request, picks, n, self.now + TTL).expect("I1");
                let Event::Grant { lease, entries, .. } = &event else { panic!("a grant") };
                assert_eq!(entries.len(), n as usize, "I2: a rank that has a share gets it");
                event.append(&mut self.file);
                self.asked.insert(request, *lease);
                Some(*lease)
            }
        }
    }

    fn ack(&mut self, lease: u64, part: u32) {
        let Some(l) = self.leases.lease(lease).cloned() else {
            assert_eq!(self.leases.ack(0, lease, 0), Err(LeaseError::Gone(lease)));
            return;
        };
        let upto = (l.entries.len() as u32 * part.min(4)).div_ceil(4).max(l.acked);
        if let Some(event) = self.leases.ack(l.request.rank, lease, upto).expect("its own lease") {
            for &e in &l.entries[l.acked as usize..upto as usize] {
                if let Some(c) = self.consumed.get_mut(e as usize) {
                    *c += 1;
                }
            }
            self.per_rank[l.request.rank as usize] += u64::from(upto - l.acked);
            event.append(&mut self.file);
        }
    }

    fn expire(&mut self) {
        let (events, back) = self.leases.expire(self.now);
        events.iter().for_each(|e| e.append(&mut self.file));
        self.back(back);
    }

    /// The owner of a lease drops it. Its entries come again at once.
    fn release(&mut self, lease: u64) {
        let Some(l) = self.leases.lease(lease).cloned() else {
            assert_eq!(self.leases.release(0, lease), Ok(None), "a lease that is gone needs no release");
            return;
        };
        let (owner, rank) = (l.request.rank, l.request.rank + 1);
        assert_eq!(self.leases.release(rank, lease), Err(LeaseError::Foreign { lease, owner, rank }));
        let (event, back) = self.leases.release(owner, lease).expect("its own").expect("it lives");
        assert_eq!(event, Event::Expire { lease }, "a ledger that earlier builds read");
        assert!(l.entries[l.acked as usize..].iter().all(|&e| self.leases.is_free(e)), "I1");
        assert_eq!(self.leases.ack(owner, lease, 1), Err(LeaseError::Gone(lease)), "I4");
        event.append(&mut self.file);
        self.back(back);
    }

    /// kill -9, with the last append torn at some byte. The server never answered for that append.
    fn restart(&mut self, torn: &[u8]) {
        self.file.extend_from_slice(torn);
        let l = Ledger::read(&self.file).expect("torn is not damaged");
        self.file.truncate(l.len);
        let mut leases = Leases::new(self.planned.clone(), self.first).expect("world");
        l.replay(&mut leases, self.now + TTL).expect("no contradiction");
        assert_eq!(
            (leases.acked(), leases.free(), &leases.live),
            (self.leases.acked(), self.leases.free(), &self.leases.live),
            "the same state"
        );
        assert_eq!(leases.redelivered(), self.leases.redelivered());
        self.leases = leases;
        self.policy = SweepPolicy::new(
            self.unit_map.clone(),
            self.unit_map.total_bytes() / 3,
            &key(self.now),
            SweepParams::default(),
        );
        self.subscriber = self.policy.join(PlanUnits::new(&self.plan, &self.unit_map).expect("one version"));
        self.policy.begin(self.subscriber, self.leases.free().clone());
    }

    fn world(&mut self, world: World) {
        let (event, back) = self.leases.change_world(world).expect("world");
        event.append(&mut self.file);
        self.back(back);
        self.sequence.clear();
        self.asked.clear();
        self.per_rank = vec![0; world.ranks as usize];
    }

    fn finish(&mut self) {
        let mut rounds = 0;
        while !self.leases.finished() {
            rounds += 1;
            assert!(rounds < 100_000, "I2: a rank waits for ever");
            for rank in 0..self.leases.world().ranks {
                if let Some(lease) = self.ask(rank, 9, 1 + rank, None) {
                    self.ack(lease, 4);
                }
            }
            self.now += 1;
            self.expire();
        }
    }
}

#[derive(Debug, Clone)]
enum Op {
    Ask { rank: u32, worker: u32, want: u32, back: Option<u64> },
    Ack { which: usize, part: u32 },
    Tick(u64),
    Renew { rank: u32, worker: u32 },
    Release { which: usize },
    Restart(Vec<u8>),
    World { ranks: u32, per: u32 },
    Commit,
    Rollback(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0u32..4, 0u32..2, 1u32..12, proptest::option::of(0u64..SEQUENCES_MAX as u64))
            .prop_map(|(rank, worker, want, back)| Op::Ask { rank, worker, want, back }),
        8 => (any::<usize>(), 1u32..5).prop_map(|(which, part)| Op::Ack { which, part }),
        3 => (1u64..150).prop_map(Op::Tick),
        1 => (0u32..4, 0u32..2).prop_map(|(rank, worker)| Op::Renew { rank, worker }),
        2 => any::<usize>().prop_map(|which| Op::Release { which }),
        1 => proptest::collection::vec(any::<u8>(), 0..20).prop_map(Op::Restart),
        1 => (1u32..5, 1u32..5).prop_map(|(ranks, per)| Op::World { ranks, per }),
        1 => Just(Op::Commit),
        1 => any::<usize>().prop_map(Op::Rollback),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// I1–I4, and the promise I2 of `docs/ARCHITECTURE.md`: under any interleaving of leases, acks, expiries,
    /// releases, repeated requests, restarts, changes of world, commits and rollbacks, each planned entry is
    /// acknowledged exactly once, and all ranks end with the same number of steps.
    #[test]
    fn exactly_once_under_any_interleaving(
        n in 1u32..150,
        per_unit in 1u32..6,
        ranks in 1u32..4,
        per in 1u32..5,
        drop: bool,
        seed: u64,
        ops in proptest::collection::vec(op(), 0..120),
    ) {
        let tail = if drop { Tail::Drop } else { Tail::Pad };
        let mut e = Epoch::new(n, per_unit, World { batch: ranks * per, ranks, tail }, seed);
        let mut seen: Vec<u64> = Vec::new();
        for op in ops {
            match op {
                Op::Ask { rank, worker, want, back } => {
                    let rank = rank % e.leases.world().ranks;
                    let back = back.filter(|_| e.sequence.contains_key(&(rank, worker)));
                    seen.extend(e.ask(rank, worker, want, back));
                }
                Op::Ack { which, part } => {
                    if !seen.is_empty() {
                        let lease = seen[which % seen.len()];
                        e.ack(lease, part);
                    }
                }
                Op::Tick(ms) => {
                    e.now += ms;
                    e.expire();
                }
                Op::Renew { rank, worker } => e.leases.renew(rank, worker, e.now + TTL),
                Op::Release { which } => {
                    if !seen.is_empty() {
                        e.release(seen[which % seen.len()]);
                    }
                }
                Op::Restart(torn) => {
                    // A torn append is the beginning of a record.
                    let mut whole = Vec::new();
                    Event::Load { units: vec![1, 2, 3] }.append(&mut whole);
                    whole.truncate(torn.len().min(whole.len() - 1));
                    e.leases.renew(0, 0, 0);
                    let expiry: Vec<u64> = e.leases.live.values().map(|l| l.expires_ms).collect();
                    for (l, _) in e.leases.live.values_mut().zip(expiry) {
                        l.expires_ms = e.now + TTL;
                    }
                    e.restart(&whole);
                }
                Op::World { ranks, per } => e.world(World { batch: ranks * per, ranks, tail }),
                Op::Commit => {
                    let id = e.file.len() as u64;
                    e.leases.commit(id).append(&mut e.file);
                    e.saved.push((id, e.consumed.clone()));
                    if e.saved.len() > COMMITS_MAX {
                        e.saved.remove(0);
                    }
                }
                Op::Rollback(k) => {
                    if !e.saved.is_empty() {
                        let at = k % e.saved.len();
                        let (id, then) = e.saved[at].clone();
                        let (event, back) = e.leases.rollback(id).expect("a recent commit");
                        event.append(&mut e.file);
                        e.back(back);
                        e.consumed = then;
                        e.saved.truncate(at + 1);
                        e.sequence.clear();
                        e.asked.clear();
                        let ranks = e.leases.world().ranks as usize;
                        e.per_rank = vec![0; ranks];
                    }
                }
            }
            let live: u64 = e
                .leases
                .live
                .values()
                .map(|l| l.entries[l.acked as usize..].iter().filter(|&&x| x < n).count() as u64)
                .sum();
            prop_assert_eq!(
                e.leases.free().count() + live + e.leases.acked().count(),
                e.planned.count(),
                "I1"
            );
            prop_assert_eq!(e.policy.left(e.subscriber), e.leases.free().count());
        }
        e.finish();
        let left_out: Vec<u64> = e.leases.left_out().collect();
        prop_assert!(left_out.is_empty() || (drop && left_out.len() < e.leases.world().ranks as usize));
        for (i, &c) in e.consumed.iter().enumerate() {
            let due = e.planned.get(i as u64) && !left_out.contains(&(i as u64));
            prop_assert_eq!(c, u32::from(due), "entry {}", i);
        }
        let per = u64::from(e.leases.world().batch / e.leases.world().ranks);
        let steps: Vec<u64> = e.per_rank.iter().map(|x| x.div_ceil(per)).collect();
        prop_assert!(steps.iter().all(|&s| s == steps[0]), "I3: steps {:?}", steps);
        // The ledger alone gives the same result.
        let l = Ledger::read(&e.file).expect("whole");
        let mut again = Leases::new(e.planned.clone(), e.first).expect("world");
        l.replay(&mut again, 0).expect("no contradiction");
        prop_assert!(again.finished());
        prop_assert_eq!(again.acked(), e.leases.acked());
    }
}

#[test]
fn replay_reproduces_the_order() {
    let mut e = Epoch::new(100, 4, World { batch: 4, ranks: 2, tail: Tail::Drop }, 7);
    let mut got = [Vec::new(), Vec::new()];
    while !e.leases.finished() {
        for rank in 0..2u32 {
            if let Some(lease) = e.ask(rank, 0, 3, None) {
                got[rank as usize].extend(e.leases.lease(lease).expect("live").entries.clone());
                e.ack(lease, 4);
            }
        }
    }
    let l = Ledger::read(&e.file).expect("whole");
    for rank in 0..2 {
        assert_eq!(l.order_of(rank).collect::<Vec<_>>(), got[rank as usize]);
    }
}

/// A rank at its bound waits for room for a whole batch: with a short batch it would have more steps than
/// others.
#[test]
fn a_lease_is_whole_or_the_last() {
    let mut leases =
        Leases::new(Bits::ones(20), World { batch: 7, ranks: 1, tail: Tail::Keep }).expect("world");
    let ask = |sequence| Request { rank: 0, worker: 0, sequence };
    let Event::Grant { lease, .. } = leases.grant(ask(1), (0..7).collect(), 7, TTL).expect("granted") else {
        panic!("a grant")
    };
    assert_eq!(leases.room(ask(2), 7, 13), Ok(Room::Full), "six more are not seven");
    assert_eq!(leases.room(ask(2), 7, 14), Ok(Room::Grant(7)));
    assert_eq!(leases.room(ask(2), 6, 13), Ok(Room::Grant(6)));
    leases.ack(0, lease, 7).expect("acknowledged");
    assert_eq!(leases.room(ask(2), 7, 5), Ok(Room::Grant(5)), "as much as it may ever hold");
    leases.grant(ask(2), (7..14).collect(), 7, TTL).expect("granted");
    assert_eq!(leases.room(ask(3), 7, 13), Ok(Room::Grant(6)), "the rest of its share");
}

/// Lease numbers of a ledger that was replaced, or cut short by a crash, do not come again in the new one.
#[test]
fn numbers_of_leases_may_begin_late() {
    let mut leases =
        Leases::new(Bits::ones(4), World { batch: 1, ranks: 1, tail: Tail::Keep }).expect("world");
    leases.number_after(500);
    let mut grant =
        |sequence, entry| match leases.grant(Request { rank: 0, worker: 0, sequence }, vec![entry], 1, TTL) {
            Ok(Event::Grant { lease, .. }) => {
                leases.number_after(900);
                lease
            }
            other => panic!("{other:?}"),
        };
    assert_eq!((grant(1, 0), grant(2, 1)), (501, 901));
    leases.number_after(3);
    assert_eq!(leases.last_id(), 901, "numbers only rise");
}

/// I4: a worker with several requests under way may send any of them again.
#[test]
fn a_request_is_sent_again_while_later_ones_have_leases() {
    let world = World { batch: 2, ranks: 1, tail: Tail::Keep };
    let mut leases = Leases::new(Bits::ones(100), world).expect("world");
    let ask = |sequence| Request { rank: 0, worker: 3, sequence };
    let grant = |leases: &mut Leases, sequence: u64| {
        let entries: Vec<u32> = (0..100).filter(|&e| leases.is_free(e)).take(2).collect();
        match leases.grant(ask(sequence), entries, 2, TTL).expect("granted") {
            Event::Grant { lease, .. } => lease,
            other => panic!("{other:?}"),
        }
    };
    let ids: Vec<u64> = (11..=18).map(|sequence| grant(&mut leases, sequence)).collect();
    for (sequence, &id) in (11..).zip(&ids) {
        assert_eq!(leases.room(ask(sequence), 2, 64), Ok(Room::Again(id)), "sequence {sequence}");
    }
    let stale = |got| Err(LeaseError::Stale { got, last: 18 });
    assert_eq!(leases.room(ask(10), 2, 64), stale(10), "it got no lease");
    // One is acknowledged in part and expires, another is acknowledged in full.
    leases.ack(0, ids[2], 1).expect("acknowledged");
    leases.ack(0, ids[4], 2).expect("acknowledged");
    leases.renew(0, 3, 2 * TTL);
    leases.live.get_mut(&ids[2]).expect("live").expires_ms = TTL;
    leases.expire(TTL);
    assert_eq!(leases.room(ask(15), 2, 64), stale(15), "its worker has gone on");
    assert_eq!(leases.room(ask(13), 2, 64), Ok(Room::Grant(2)), "the same number gets a new lease");
    let again = grant(&mut leases, 13);
    assert!(again > ids[7]);
    assert_eq!(leases.room(ask(13), 2, 64), Ok(Room::Again(again)));
    assert_eq!(leases.redelivered(), 1);
    // A successor has higher numbers. What its predecessor sent arrives too late.
    for sequence in 1_000..1_000 + SEQUENCES_MAX as u64 {
        grant(&mut leases, sequence);
    }
    let late = Err(LeaseError::Stale { got: 18, last: 1_007 });
    assert_eq!(leases.room(ask(18), 2, 64), late);
    assert_eq!(leases.latest.len(), 1);
}

#[test]
fn a_rejected_call_changes_nothing() {
    let mut e = Epoch::new(40, 4, World { batch: 4, ranks: 2, tail: Tail::Drop }, 7);
    let lease = e.ask(0, 0, 4, None).expect("granted");
    let before = e.leases.clone();
    assert_eq!(e.leases.ack(1, lease, 1), Err(LeaseError::Foreign { lease, owner: 0, rank: 1 }));
    assert_eq!(e.leases.ack(0, lease, 9), Err(LeaseError::Beyond { lease, entries: 4, upto: 9 }));
    assert_eq!(e.leases.ack(0, 99, 1), Err(LeaseError::Gone(99)));
    let old = Request { rank: 0, worker: 0, sequence: 0 };
    assert_eq!(e.leases.room(old, 1, 9), Err(LeaseError::Stale { got: 0, last: 1 }));
    let far = Request { rank: 2, worker: 0, sequence: 0 };
    assert_eq!(e.leases.room(far, 1, 9), Err(LeaseError::Rank { rank: 2, ranks: 2 }));
    assert_eq!(e.leases.rollback(5), Err(LeaseError::Commit(5)));
    let held = e.leases.lease(lease).expect("live").entries[0];
    let twice = Event::Grant { lease: 2, request: old, entries: vec![held] };
    assert_eq!(e.leases.apply(&twice, 0), Err(LeaseError::Entry(held)));
    assert!(e.leases.change_world(World { batch: 3, ranks: 2, tail: Tail::Drop }).is_err());
    assert_eq!(format!("{before:?}"), format!("{:?}", e.leases));
    // An expired lease cannot be acknowledged, and its entries are free for other requests.
    e.now = TTL;
    e.expire();
    assert_eq!(e.leases.ack(0, lease, 1), Err(LeaseError::Gone(lease)));
    e.finish();
    assert_eq!(e.leases.redelivered(), 4);
}

/// A world that is too large is rejected, and nothing changes: no request makes the server count to 2^32.
#[test]
fn a_world_has_bounds() {
    let wide = |ranks, batch, tail| World { batch, ranks, tail };
    for world in [
        wide(1, u32::MAX, Tail::Pad),
        wide(u32::MAX, u32::MAX, Tail::Drop),
        wide(1, BATCH_MAX + 1, Tail::Keep),
        wide(RANKS_MAX + 1, RANKS_MAX + 1, Tail::Pad),
    ] {
        assert!(matches!(Leases::new(Bits::ones(9), world), Err(PlanError::World { .. })), "{world:?}");
        let mut l = Leases::new(Bits::ones(9), wide(1, 2, Tail::Keep)).expect("world");
        let request = Request { rank: 0, worker: 0, sequence: 1 };
        l.grant(request, vec![3], 1, TTL).expect("free");
        assert!(matches!(l.change_world(world), Err(PlanError::World { .. })), "{world:?}");
        assert!(l.apply(&Event::World { world }, 0).is_err());
        assert_eq!(
            (l.live().count(), l.left(0), l.world()),
            (1, 8, wide(1, 2, Tail::Keep)),
            "nothing changed"
        );
    }
    // The largest possible world.
    let most = wide(RANKS_MAX, BATCH_MAX, Tail::Pad);
    let l = Leases::new(Bits::ones(9), most).expect("possible");
    assert_eq!((l.pads(), l.left(RANKS_MAX - 1)), (BATCH_MAX - 9, u64::from(BATCH_MAX / RANKS_MAX)));
    // Numbers of pads are limited, however many worlds and rollbacks have used some.
    assert!(check_pads(1 << 31, PAD - BATCH_MAX, most).is_ok());
    assert!(check_pads(1 << 31, PAD - BATCH_MAX + 1, most).is_err());
    assert!(check_pads((1 << 32) - 1, 0, most).is_err());
}

/// A pad that is granted again counts as redelivered, as any entry does.
#[test]
fn pads_that_come_again_are_counted() {
    let world = World { batch: 4, ranks: 1, tail: Tail::Pad };
    let mut leases = Leases::new(Bits::ones(3), world).expect("world");
    for sequence in 1..=3 {
        let request = Request { rank: 0, worker: 0, sequence };
        leases.grant(request, vec![0, 1, 2], 4, TTL).expect("free");
        assert_eq!(leases.redelivered(), 4 * (sequence - 1));
        if sequence < 3 {
            leases.expire(TTL);
        }
    }
}

/// A released lease ends once. Its entries come again at once, also to the same request, and its
/// acknowledged entries do not. A restart agrees.
#[test]
fn a_released_lease_ends_as_if_it_had_expired() {
    let mut e = Epoch::new(20, 4, World { batch: 8, ranks: 2, tail: Tail::Drop }, 3);
    let first = e.ask(0, 0, 4, None).expect("a lease");
    let (held, entries) = (e.leases.held(0), e.leases.lease(first).expect("live").entries.clone());
    e.ack(first, 2);
    let left = e.leases.left(0);
    e.release(first);
    e.release(first);
    assert_eq!((held, e.leases.held(0), e.leases.left(0)), (4, 0, left + 2));
    assert!(e.leases.acked().get(u64::from(entries[0])) && e.leases.is_free(entries[3]));
    e.restart(&[]);
    // The same request again.
    let again = e.leases.room(Request { rank: 0, worker: 0, sequence: 1 }, 4, 24).expect("a known rank");
    assert_eq!(again, Room::Grant(4), "a lease that ended is granted anew");
    let second = e.ask(0, 0, 4, Some(0)).expect("a lease");
    assert!(second > first);
    e.ack(second, 4);
    e.finish();
    assert_eq!(
        e.consumed,
        vec![1; 20].into_iter().enumerate().map(|(i, c)| c * u32::from(i < 16)).collect::<Vec<_>>()
    );
}
