use super::*;
use crate::{
    Hash, LayoutId, Root,
    delivery::{
        Request,
        lease::{Leases, Room},
        ledger::{self, Header},
    },
    order::sweep::{SweepParams, SweepPolicy},
    plan::{
        Plan, Tail,
        key::OrderKey,
        unit_map::{PlanUnits, UnitMap},
    },
};
use proptest::prelude::*;
use std::{collections::VecDeque, sync::Arc};

const N: u64 = 60;

fn world(ranks: u32) -> World {
    World { batch: ranks * 2, ranks, tail: Tail::Pad }
}

fn header() -> Header {
    Header {
        job: "j".into(),
        epoch: 0,
        root: Root(Hash::of(b"r")),
        layout: LayoutId(Hash::of(b"l")),
        plan: Hash::of(b"p"),
        order: "substitute".into(),
        seed: 1,
        world: world(2),
    }
}

/// An operation on an epoch.
#[derive(Debug, Clone)]
enum Op {
    Ask { rank: u32, n: u32 },
    Ack { which: usize, part: u32 },
    Expire,
    World(u32),
    Commit,
    Rollback,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0u32..4, 1u32..6).prop_map(|(rank, n)| Op::Ask { rank, n }),
        6 => (any::<usize>(), 1u32..6).prop_map(|(which, part)| Op::Ack { which, part }),
        1 => Just(Op::Expire),
        1 => (1u32..4).prop_map(Op::World),
        1 => Just(Op::Commit),
        1 => Just(Op::Rollback),
    ]
}

/// Returns the ledger of an epoch whose order is a multiplication: as good as any other order.
fn epoch(ops: Vec<Op>, stride: u32) -> Ledger {
    let mut leases = Leases::new(Bits::ones(N), world(2)).expect("world");
    let mut events = Vec::new();
    let (mut now, mut sequence, mut commits) = (0, 0, 0);
    let done = (0..4000u32).map(|i| match i % 2 {
        0 => Op::Ask { rank: i / 2 % 3, n: 4 },
        _ => Op::Ack { which: 0, part: 9 },
    });
    for op in ops.into_iter().chain(done) {
        if leases.finished() {
            break;
        }
        let granted = events.iter().filter_map(|e| match e {
            Event::Grant { lease, .. } => Some(*lease),
            _ => None,
        });
        let live: Vec<u64> = granted.filter(|&l| leases.lease(l).is_some()).collect();
        match op {
            Op::Ask { rank, n } => {
                sequence += 1;
                let request = Request { rank: rank % leases.world().ranks, worker: rank, sequence };
                if let Room::Grant(room) = leases.room(request, n, 20).expect("a rank") {
                    let free = leases.free();
                    let from = sequence * u64::from(stride) % N;
                    let entries: Vec<u32> = (from..N)
                        .chain(0..from)
                        .filter(|&e| free.get(e))
                        .take(room as usize)
                        .map(|e| e as u32)
                        .collect();
                    events.push(leases.grant(request, entries, room, now + 10).expect("free"));
                }
            }
            Op::Ack { which, part } if !live.is_empty() => {
                let l = leases.lease(live[which % live.len()]).expect("live").clone();
                let upto = (l.acked + part).min(l.entries.len() as u32);
                events.extend(leases.ack(l.request.rank, l.id, upto).expect("live"));
            }
            Op::Expire => {
                now += 11;
                events.extend(leases.expire(now).0);
            }
            Op::World(ranks) => events.push(leases.change_world(world(ranks)).expect("world").0),
            Op::Commit => {
                commits += 1;
                events.push(leases.commit(commits));
            }
            Op::Rollback if commits > 0 => {
                if let Ok((event, _)) = leases.rollback(commits) {
                    events.push(event);
                }
            }
            _ => {}
        }
    }
    assert!(leases.finished(), "the epoch ends");
    Ledger { header: header(), events, len: 0 }
}

/// Delivers a replay with other requests: one worker a rank, other sizes, leases that expire. Returns its
/// ledger.
fn again(mut replay: Replay, sizes: &[u32]) -> Ledger {
    let first = replay.world().expect("a stretch");
    let mut leases = Leases::new(Bits::ones(N), first).expect("world");
    let mut events = Vec::new();
    let (mut sequence, mut now, mut lost) = (0, 0, 0);
    while let Some(world) = replay.world() {
        let mut idle = 0;
        while idle < world.ranks {
            let rank = sequence as u32 % world.ranks;
            let n = sizes[sequence as usize % sizes.len()];
            sequence += 1;
            let (entries, from) = replay.next(rank, n, |e| leases.free().get(u64::from(e)));
            if entries.is_empty() {
                idle += 1;
                continue;
            }
            idle = 0;
            let request = Request { rank, worker: 0, sequence };
            let event = leases.grant(request, entries.clone(), 0, now + 10).expect("free");
            let Event::Grant { lease, .. } = event else { panic!("a grant") };
            events.push(event);
            // Sometimes the consumer dies when it has acknowledged half.
            let dies = sequence % 5 == 0 && lost < 9;
            let upto = if dies { n.div_ceil(2).min(entries.len() as u32) } else { entries.len() as u32 };
            events.extend(leases.ack(rank, lease, upto).expect("live"));
            if dies {
                lost += 1;
                now += 11;
                events.extend(leases.expire(now).0);
                replay.rewind(rank, from);
            }
        }
        if let Some(world) = replay.advance() {
            events.push(leases.change_world(world).expect("world").0);
        }
    }
    assert_eq!(leases.acked().count(), N);
    Ledger { header: Header { order: "replay".into(), world: first, ..header() }, events, len: 0 }
}

proptest! {
    /// Each rank gets exactly its order again, whatever happened in the first run and in the second. The
    /// replay of a replay is the same.
    #[test]
    fn each_rank_gets_its_order_again(
        ops in proptest::collection::vec(op(), 0..80),
        stride in 1u32..60,
        sizes in proptest::collection::vec(1u32..7, 1..5),
    ) {
        let ledger = epoch(ops, stride);
        let replay = Replay::new(&ledger).expect("a ledger");
        prop_assert_eq!(replay.not_delivered(&Bits::ones(N)).count(), 0);
        match replay.by_rank() {
            Some(ranks) => {
                for (rank, all) in ranks.iter().enumerate() {
                    let expected: Vec<u32> =
                        replay.stretches().iter().flat_map(|l| l.ranks[rank].clone()).collect();
                    prop_assert_eq!(all, &expected);
                }
            }
            None => prop_assert!(replay.stretches().windows(2).any(|l| l[0].world.ranks != l[1].world.ranks)),
        }
        let twice = again(replay.clone(), &sizes);
        let same = Replay::new(&twice).expect("a ledger");
        let no_pads = |r: &Replay| -> Vec<Vec<Vec<u32>>> {
            let plan_entries = |l: &Stretch| {
                l.ranks.iter().map(|r| r.iter().copied().filter(|&e| u64::from(e) < N).collect()).collect()
            };
            r.stretches()
                .iter()
                .map(plan_entries)
                .filter(|l: &Vec<Vec<u32>>| !l.concat().is_empty())
                .collect()
        };
        prop_assert_eq!(no_pads(&same), no_pads(&replay));
    }
}

/// The order that a sweep chose comes again from the bytes of the ledger alone. In the first run, ranks had
/// unequal speed, another job shared the sweep, and a lease expired.
#[test]
fn the_order_of_a_sweep_is_replayed() {
    let unit_of: Vec<u32> = (0..N as u32).map(|s| s / 5).collect();
    let unit_map = Arc::new(UnitMap::new(&unit_of, vec![5_000; 12]).expect("unit_map"));
    let key = OrderKey::new(Root(Hash::of(b"r")), Hash::of(b"p"), 1, 0);
    let mut policy =
        SweepPolicy::new(Arc::clone(&unit_map), unit_map.total_bytes() / 4, &key, SweepParams::default());
    let plan = Plan::all(N).expect("plan");
    let [ours, other] = [(); 2].map(|()| {
        let plan_units = PlanUnits::new(&plan, &unit_map).expect("the same version");
        let slots = u64::from(plan_units.slots());
        let subscriber = policy.join(plan_units);
        policy.begin(subscriber, Bits::ones(slots));
        subscriber
    });
    let mut leases = Leases::new(Bits::ones(N), world(2)).expect("world");
    let mut file = ledger::begin(&header());
    let (mut actions, mut back, mut now) = (Vec::new(), VecDeque::new(), 0);
    let mut expected = vec![Vec::new(); 2];
    for sequence in 1.. {
        if leases.finished() {
            break;
        }
        let rank = u32::from(sequence % 3 == 0);
        let request = Request { rank, worker: 0, sequence };
        let Room::Grant(room) = leases.room(request, 4, 20).expect("a rank") else { continue };
        let mut entries = Vec::new();
        while entries.len() < room as usize {
            let mut swept = |policy: &mut SweepPolicy| {
                policy.next(ours, &mut actions).map(|p| policy.plan_units(ours).entry(p.slot))
            };
            let Some(entry) = back.pop_front().or_else(|| swept(&mut policy)) else { break };
            entries.push(entry);
        }
        policy.next(other, &mut actions).expect("it has more to do");
        let event = leases.grant(request, entries.clone(), room, now + 10).expect("free");
        event.append(&mut file);
        if sequence == 5 {
            now += 11;
            let (events, free) = leases.expire(now);
            events.iter().for_each(|e| e.append(&mut file));
            back.extend(free);
        } else {
            let n = u32::try_from(entries.len()).expect("few");
            leases.ack(rank, leases.last_id(), n).expect("live").expect("new").append(&mut file);
            expected[rank as usize].extend(entries);
        }
    }
    let replay = Replay::new(&Ledger::read(&file).expect("a ledger")).expect("an order");
    assert_eq!(replay.stretches().iter().map(|l| l.ranks.clone()).collect::<Vec<_>>(), [expected.clone()]);
    let twice = Replay::new(&again(replay, &[3, 1, 5])).expect("an order");
    assert_eq!(twice.stretches()[0].ranks, expected);
    let sorted: Vec<u32> = (0..N as u32).collect();
    assert_ne!(expected.concat(), sorted, "it is an order of its own");
}

#[test]
fn a_ledger_that_contradicts_itself() {
    let request = Request { rank: 0, worker: 0, sequence: 1 };
    let grant = |lease, entries| Event::Grant { lease, request, entries };
    let new =
        |events| Replay::new(&Ledger { header: header(), events, len: 0 }).map(|r| r.stretches().to_vec());
    let ack = |lease, upto| Event::Ack { lease, upto };
    let why = |at, why| Err(BadLedger::Contradiction { at, why });
    assert_eq!(new(vec![ack(7, 1)]), why(1, LeaseError::Gone(7)));
    let beyond = LeaseError::Beyond { lease: 1, entries: 1, upto: 2 };
    assert_eq!(new(vec![grant(1, vec![4]), ack(1, 2)]), why(2, beyond));
    let twice = vec![grant(1, vec![4]), ack(1, 1), grant(2, vec![4]), ack(2, 1)];
    assert_eq!(new(twice), why(4, LeaseError::Entry(4)));
    assert_eq!(new(vec![Event::Rollback { commit: 3 }]), why(1, LeaseError::Commit(3)));
    let far = Request { rank: 2, ..request };
    let event = Event::Grant { lease: 1, request: far, entries: vec![] };
    assert_eq!(new(vec![event]), why(1, LeaseError::Rank { rank: 2, ranks: 2 }));
    // A ledger that ended early has a shorter order.
    let short =
        Replay::new(&Ledger { header: header(), events: vec![grant(1, vec![4, 5]), ack(1, 1)], len: 0 })
            .expect("a ledger");
    assert_eq!(short.stretches()[0].ranks, [vec![4], vec![]]);
    assert_eq!(short.not_delivered(&Bits::ones(8)).count(), 7);
}

/// A record of a world is short, and its ranks are many. A ledger with too many worlds is rejected before
/// they are built.
#[test]
fn a_ledger_with_too_many_worlds_is_rejected() {
    let events = |worlds: u32, world: World| -> Vec<Event> {
        let each = |i: u32| {
            let request = Request { rank: 0, worker: 0, sequence: 1 };
            let lease = u64::from(i) + 1;
            [
                Event::World { world },
                Event::Grant { lease, request, entries: vec![i] },
                Event::Ack { lease, upto: 1 },
            ]
        };
        (0..worlds).flat_map(each).collect()
    };
    let new = |events| Replay::new(&Ledger { header: header(), events, len: 0 }).map(|r| r.stretches().len());
    let wide = World { batch: 1 << 16, ranks: 1 << 16, tail: Tail::Pad };
    assert_eq!(new(events(16, wide)), Ok(16));
    assert!(matches!(new(events(17, wide)), Err(BadLedger::TooManyWorlds { .. })));
    let idle = vec![Event::World { world: wide }; 100];
    assert_eq!(new(idle), Ok(0), "worlds in which nothing was consumed have no entries");
    assert_eq!(new(events(1024, world(2))), Ok(1024));
    assert!(matches!(new(events(1025, world(2))), Err(BadLedger::TooManyWorlds { .. })));
}

/// The cost of a replay is bounded by the epoch's entries, not by the number of records.
#[test]
fn records_without_effect_cost_nothing() {
    let request = Request { rank: 0, worker: 0, sequence: 1 };
    let grant = |lease, entries| Event::Grant { lease, request, entries };
    let ack = |lease, upto| Event::Ack { lease, upto };
    let all = |events| Ledger { header: header(), events, len: 0 };
    // An ack of fewer entries than before takes nothing back, and adds no entry twice.
    let mut events = vec![grant(1, vec![4, 5, 6])];
    (0..50).for_each(|_| events.extend([ack(1, 2), ack(1, 0)]));
    assert_eq!(Replay::new(&all(events)).expect("an order").stretches()[0].ranks[0], [4, 5]);
    // Worlds whose pads are too many.
    let worlds = |n: usize, tail| vec![Event::World { world: World { batch: 1 << 20, ranks: 1, tail } }; n];
    let count = |events| Replay::new(&all(events)).map(|r| r.stretches().len());
    assert_eq!(count(worlds(8, Tail::Pad)), Ok(0));
    assert!(matches!(count(worlds(9, Tail::Pad)), Err(BadLedger::TooManyWorlds { .. })));
    assert_eq!(count(worlds(9, Tail::Keep)), Ok(0));
    // Commits without a rollback to them cost nothing.
    let commit = |commit| Event::Commit { commit };
    let back = |commit| Event::Rollback { commit };
    let events = [vec![commit(7); 90], vec![commit(8), commit(7), back(7), back(7), commit(9)]].concat();
    assert_eq!(commits_rolled_back_to(&events), BTreeSet::from([91]));
}

#[test]
fn a_ledger_is_checked_against_its_leases() {
    let request = Request { rank: 0, worker: 0, sequence: 1 };
    let grant = |lease, entries| Event::Grant { lease, request, entries };
    let ack = |lease, upto| Event::Ack { lease, upto };
    let checked = |events| {
        let mut leases = Leases::new(Bits::ones(N), world(2)).expect("world");
        Replay::checked(&Ledger { header: header(), events, len: 0 }, &mut leases)
            .map(|r| r.stretches().iter().map(|l| l.ranks[0].clone()).collect::<Vec<_>>())
    };
    let why = |at, why| Err(BadLedger::Contradiction { at, why });
    assert_eq!(checked(vec![grant(1, vec![60])]), why(1, LeaseError::Entry(60)), "no such entry");
    assert_eq!(checked(vec![grant(1, vec![4]), grant(2, vec![4])]), why(2, LeaseError::Entry(4)));
    // Commits without a rollback to them are skipped, and events keep their numbers.
    let commit = |commit| Event::Commit { commit };
    let events = vec![grant(1, vec![4]), ack(1, 1), commit(1), commit(2), grant(2, vec![5]), ack(2, 1)];
    assert_eq!(checked(events.clone()), Ok(vec![vec![4, 5]]));
    let back =
        |to| [events.clone(), vec![Event::Rollback { commit: to }, grant(3, vec![5, 6]), ack(3, 2)]].concat();
    assert_eq!(checked(back(1)), Ok(vec![vec![4], vec![5, 6]]));
    assert_eq!(checked(back(3)), why(7, LeaseError::Commit(3)));
}
