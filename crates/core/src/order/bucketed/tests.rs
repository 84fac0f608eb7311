use super::*;
use crate::{
    Root,
    delivery::{Leases, Request, Room},
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn key(seed: u64) -> OrderKey {
    OrderKey::new(Root(Hash::of(b"root")), Hash::of(b"plan"), seed, 3)
}

fn cut(of: &[u32], batch: u32, ranks: u32, tail: Tail, seed: u64) -> Bucketed {
    let plan = Plan::all(of.len() as u64).expect("plan");
    Bucketed::new(plan, World { batch, ranks, tail }, &key(seed), Buckets::new(of.to_vec()).expect("few"))
        .expect("fits")
}

fn tails() -> impl Strategy<Value = Tail> {
    prop_oneof![Just(Tail::Drop), Just(Tail::Pad)]
}

proptest! {
    /// I1 to I4: no step mixes buckets, the steps are exactly the plan, and they are the same for all numbers
    /// of ranks.
    #[test]
    fn no_step_is_mixed(
        of in proptest::collection::vec(0u32..7, 1..200),
        per in 1u32..4,
        tail in tails(),
        seed: u64,
    ) {
        let batch = per * 6;
        let mut first: Option<Vec<BTreeSet<u32>>> = None;
        for ranks in [1, 2, 3, 6] {
            let o = cut(&of, batch, 1, tail, seed).with_ranks(ranks).expect("divides");
            let mut seen = BTreeSet::new();
            let mut sets = Vec::new();
            for s in 0..o.steps() {
                prop_assert_eq!(o.size(s), u64::from(batch));
                let mut set = BTreeSet::new();
                for rank in 0..ranks {
                    for j in 0..u64::from(batch / ranks) {
                        let e = o.entry_of_rank(rank, s * u64::from(batch / ranks) + j).expect("an entry");
                        prop_assert_eq!(of[o.item(e).sample as usize], o.bucket(s), "mixed step {}", s);
                        prop_assert!(seen.insert(e), "twice");
                        set.insert(e);
                    }
                }
                sets.push(set);
            }
            prop_assert_eq!(o.entry_of_rank(0, o.steps() * u64::from(batch / ranks)), None);
            let planned: BTreeSet<u32> = o.planned().iter_in(0, o.entries()).map(|e| e as u32).collect();
            prop_assert_eq!(&seen, &planned);
            let items: BTreeSet<Item> = seen.iter().map(|&e| o.item(e)).collect();
            prop_assert_eq!(items.len(), seen.len(), "each item once");
            // `drop` leaves out less than a step of each bucket; `pad` leaves out nothing.
            let mut lacks: BTreeMap<u32, u32> = BTreeMap::new();
            for s in (0..of.len() as u32).filter(|s| !seen.contains(s)) {
                *lacks.entry(of[s as usize]).or_default() += 1;
            }
            prop_assert!(lacks.values().all(|&n| tail == Tail::Drop && n < batch));
            match &first {
                None => first = Some(sets),
                Some(f) => prop_assert_eq!(f, &sets),
            }
        }
    }

    /// With `keep`, only the last step of a bucket may be short.
    #[test]
    fn keep_delivers_everything(
        of in proptest::collection::vec(0u32..5, 1..100),
        batch in 1u32..9,
        seed: u64,
    ) {
        let o = cut(&of, batch, 1, Tail::Keep, seed);
        let got: Vec<u32> = (0..).map_while(|j| o.entry_of_rank(0, j)).collect();
        let mut sorted = got.clone();
        sorted.sort_unstable();
        prop_assert_eq!(sorted, (0..of.len() as u32).collect::<Vec<_>>());
        let short = (0..o.steps()).filter(|&s| o.size(s) < u64::from(batch)).count();
        prop_assert!(short <= 5);
        let mut at = 0;
        for s in 0..o.steps() {
            let n = o.size(s) as usize;
            prop_assert!(got[at..at + n].iter().all(|&e| of[e as usize] == o.bucket(s)));
            at += n;
        }
    }

    /// Every planned entry is acknowledged once, by the rank that it is assigned to.
    ///
    /// Leases expire, ranks have unequal speed, and the server restarts.
    #[test]
    fn leases_deliver_it(
        of in proptest::collection::vec(0u32..4, 1..90),
        per in 1u32..4,
        ranks in 1u32..4,
        tail in tails(),
        seed: u64,
        ops in proptest::collection::vec((0u32..4, 0u8..8, 1u32..7), 1..80),
    ) {
        let o = cut(&of, per * ranks, ranks, tail, seed);
        let world = World { batch: per * ranks, ranks, tail };
        let mut leases = Leases::new(o.planned(), world).expect("world");
        prop_assert_eq!(leases.pads(), 0, "leases add no pads of their own");
        let (mut cursors, mut events, mut live) = (RankCursors::new(ranks), Vec::new(), BTreeMap::new());
        let mut got: BTreeMap<u32, u32> = BTreeMap::new();
        let mut sequence = 0;
        let mut now = 0;
        let many = std::iter::repeat_n((0, 0, 0), 4000);
        for (i, (rank, what, n)) in ops.into_iter().chain(many).enumerate() {
            if leases.finished() {
                break;
            }
            // After the operations, all ranks ask and acknowledge, one after another.
            let (rank, what, n) = if n > 0 {
                (rank % ranks, what, n)
            } else {
                (i as u32 % ranks, (i as u32 / ranks % 2) as u8 * 4, 3)
            };
            match what {
                0..4 => {
                    sequence += 1;
                    let request = Request { rank, worker: 0, sequence };
                    if let Room::Grant(room) = leases.room(request, n, 12).expect("a rank") {
                        let (entries, from) =
                            o.next(&mut cursors, rank, room, |e| leases.free().get(u64::from(e)));
                        prop_assert!(!entries.is_empty(), "a rank that has a share gets some of it");
                        let buckets: BTreeSet<u32> =
                            entries.iter().map(|&e| of[o.item(e).sample as usize]).collect();
                        prop_assert!(buckets.len() == 1 && entries.len() <= room as usize, "a mixed lease");
                        let event = leases.grant(request, entries, room, now + 20).expect("free");
                        if let crate::delivery::Event::Grant { lease, entries, .. } = &event {
                            live.insert(*lease, (rank, entries.clone(), from));
                        }
                        events.push(event);
                    }
                }
                4 | 5 => {
                    let of_rank = live.iter().find(|l| l.1.0 == rank).map(|l| (*l.0, l.1.1.clone()));
                    if let Some((lease, entries)) = of_rank {
                        for &e in &entries {
                            prop_assert!(got.insert(e, rank).is_none(), "twice");
                        }
                        events.extend(leases.ack(rank, lease, entries.len() as u32).expect("live"));
                        live.remove(&lease);
                    }
                }
                6 => {
                    now += u64::from(n) * 5;
                    let (gone, _) = leases.expire(now);
                    for e in &gone {
                        if let crate::delivery::Event::Expire { lease } = e
                            && let Some((rank, _, from)) = live.remove(lease)
                        {
                            cursors.rewind(rank, from);
                        }
                    }
                    events.extend(gone);
                }
                _ => {
                    // The process dies; only the ledger survives.
                    let mut again = Leases::new(o.planned(), world).expect("world");
                    for e in &events {
                        again.apply(e, now + 20).expect("no contradiction");
                    }
                    // A rank's share is its free entries.
                    let shares = o.shares(|e| again.is_free(e));
                    prop_assert_eq!(&shares, &(0..ranks).map(|r| again.left(r)).collect::<Vec<_>>());
                    (leases, cursors) = (again, RankCursors::new(ranks));
                    for l in live.values_mut() {
                        l.2 = 0;
                    }
                }
            }
        }
        prop_assert!(leases.finished(), "a rank waits for ever");
        prop_assert_eq!(got.len() as u64, o.planned().count());
        for rank in 0..ranks {
            for e in (0..).map_while(|j| o.entry_of_rank(rank, j)) {
                prop_assert_eq!(got[&e], rank);
            }
        }
        prop_assert!(o.at_boundary(|e| !got.contains_key(&e)));
    }
}

#[test]
fn buckets_by_length() {
    let b = Buckets::by_length([0, 9, 10, 11, 99, 100, 5000], &[10, 100]).expect("ascending");
    assert_eq!((0..7).map(|s| b.of(s)).collect::<Vec<_>>(), [0, 0, 1, 1, 1, 2, 2]);
    assert_eq!(Buckets::by_length([1], &[5, 5]), Err(BadBuckets::Bounds));
    assert_eq!(Buckets::new(vec![BUCKETS_MAX]), Err(BadBuckets::TooMany(BUCKETS_MAX)));
    assert_ne!(b.hash(Hash::of(b"a")), b.hash(Hash::of(b"b")));
    assert_ne!(b.hash(Hash::of(b"a")), Buckets::by_length([0; 7], &[]).expect("one").hash(Hash::of(b"a")));
}

#[test]
fn impossible_buckets_are_rejected() {
    let buckets = || Buckets::new(vec![0, 1, 0, 1]).expect("few");
    let world = World { batch: 2, ranks: 2, tail: Tail::Pad };
    let make = |plan, world| Bucketed::new(plan, world, &key(1), buckets()).err();
    let four = || Plan::all(4).expect("plan");
    assert_eq!(
        make(Plan::all(5).expect("plan"), world),
        Some(BadBuckets::Samples { buckets: 4, samples: 5 })
    );
    assert_eq!(make(four().echoed(2, 1).expect("echo"), world), Some(BadBuckets::Echo));
    assert!(matches!(make(four(), World { batch: 3, ..world }), Some(BadBuckets::World(_))));
    // A plan of one bucket's samples has only the steps of that bucket.
    let plan = Plan::subset(4, [1, 3]).expect("plan");
    let o = Bucketed::new(plan, world, &key(1), buckets()).expect("fits");
    assert_eq!((o.steps(), o.bucket(0), o.entries()), (1, 1, 2));
}

#[test]
fn half_a_step_is_no_boundary() {
    let o = cut(&[0, 0, 0, 0, 1, 1, 1, 1], 4, 2, Tail::Drop, 5);
    let first = o.entry(0, 0);
    assert!(o.at_boundary(|_| true));
    assert!(!o.at_boundary(|e| e != first));
}

/// From a state in which one rank is ahead, each rank continues with its own entries. None waits for ever.
#[test]
fn a_state_may_have_one_rank_ahead() {
    let world = World { batch: 4, ranks: 2, tail: Tail::Drop };
    let o = cut(&[0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0], 4, 2, Tail::Drop, 5);
    let mut acked = Bits::zeros(o.entries());
    for j in 0..4 {
        acked.set(u64::from(o.entry_of_rank(0, j).expect("an entry")));
    }
    let mut leases = Leases::resumed(o.planned(), acked, world).expect("world");
    leases.share_as(&o.shares(|e| leases.is_free(e)));
    assert_eq!((leases.left(0), leases.left(1)), (o.steps() * 2 - 4, o.steps() * 2));
    let mut cursors = RankCursors::new(2);
    let mut got = [Vec::new(), Vec::new()];
    for sequence in 0..99 {
        let request = Request { rank: sequence as u32 % 2, worker: 0, sequence };
        let Room::Grant(n) = leases.room(request, 9, 99).expect("a rank") else { continue };
        let (entries, _) = o.next(&mut cursors, request.rank, n, |e| leases.is_free(e));
        assert_eq!(entries.len(), 2, "one step's share");
        got[request.rank as usize].extend_from_slice(&entries);
        leases.grant(request, entries, n, 9).expect("free");
        leases.ack(request.rank, leases.last_id(), 2).expect("live");
    }
    assert!(leases.finished());
    assert_eq!(got[0], (4..).map_while(|j| o.entry_of_rank(0, j)).collect::<Vec<_>>());
    assert_eq!(got[1], (0..).map_while(|j| o.entry_of_rank(1, j)).collect::<Vec<_>>());
}
