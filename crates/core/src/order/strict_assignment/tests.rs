use super::*;
use crate::{
    Hash, Root,
    delivery::{Request, Room},
    plan::{Bits, OrderKey, Plan, Tail, World},
};
use proptest::prelude::*;

fn strict(n: u64, world: World) -> Strict {
    let plan = Plan::all(n).expect("plan");
    let key = OrderKey::new(Root(Hash::of(b"r")), plan.hash(), 7, 0);
    Strict::new(plan, world, key)
}

fn planned(s: &Strict) -> Bits {
    let mut bits = Bits::ones(s.plan().entries());
    s.dropped().for_each(|e| {
        bits.clear(u64::from(e));
    });
    bits
}

fn draw(
    t: &mut StrictAssignment,
    s: &Strict,
    l: &mut Leases,
    rank: u32,
    sequence: u64,
    want: u32,
    at: u64,
) -> Option<u64> {
    let request = Request { rank, worker: 0, sequence };
    let Ok(Room::Grant(n)) = l.room(request, want, 1 << 20) else { return None };
    let (entries, from) = t.next(s, l, rank, n);
    assert_eq!(entries.len(), n as usize, "a rank's share is there to be drawn");
    l.grant(request, entries, n, at).expect("free entries");
    let id = l.last_id();
    t.granted(id, rank, from);
    Some(id)
}

fn tails() -> impl Strategy<Value = Tail> {
    prop_oneof![Just(Tail::Drop), Just(Tail::Pad)]
}

proptest! {
    #[test]
    fn undisturbed_it_is_the_strict_order(n in 1u64..300, per in 1u32..5, ranks in 1u32..5, tail in tails()) {
        let world = World { batch: per * ranks, ranks, tail };
        let s = strict(n, world);
        let mut l = Leases::new(planned(&s), world).expect("world");
        let mut t = StrictAssignment::begin(&s, &l);
        for rank in 0..ranks {
            let mut got = Vec::new();
            let mut sequence = 0;
            loop {
                sequence += 1;
                let Some(id) = draw(&mut t, &s, &mut l, rank, sequence, per, 9) else { break };
                got.extend(l.lease(id).expect("live").entries.clone());
                l.ack(rank, id, per).expect("ack");
            }
            let want: Vec<u32> =
                (0..s.steps()).flat_map(|step| s.positions(step, rank)).map(|p| s.entry(p)).collect();
            prop_assert_eq!(got, want);
        }
        prop_assert!(l.finished());
    }

    /// A change of world at a step boundary continues the same order. Expired leases and restarts do not
    /// change it.
    #[test]
    fn worlds_deaths_and_restarts_keep_the_order(
        n in 8u64..200,
        steps in 0u64..6,
        kills in proptest::collection::vec(0u32..8, 0..12),
        tail in tails(),
    ) {
        let (a, b) = (World { batch: 4, ranks: 2, tail }, World { batch: 4, ranks: 4, tail });
        let s = strict(n, a);
        let mut l = Leases::new(planned(&s), a).expect("world");
        let mut t = StrictAssignment::begin(&s, &l);
        let steps = steps.min(s.steps());
        for step in 0..steps {
            for rank in 0..2 {
                let id = draw(&mut t, &s, &mut l, rank, step + 1, 2, 9).expect("a step");
                l.ack(rank, id, 2).expect("ack");
            }
        }
        l.change_world(b).expect("world");
        let mut t = StrictAssignment::begin(&s, &l);
        let began = l.clone();
        let mut got = vec![Vec::new(); 4];
        let mut kills = kills.into_iter().chain(std::iter::repeat(8));
        let mut sequence = 0;
        while !l.finished() {
            sequence += 1;
            for rank in 0..4u32 {
                let Some(id) = draw(&mut t, &s, &mut l, rank, sequence, 1, sequence) else { continue };
                match kills.next() {
                    Some(0) => {
                        // The consumer died.
                        let (events, _) = l.expire(sequence);
                        prop_assert_eq!(events.len(), 1);
                        t.expired(id, rank);
                    }
                    Some(1) => {
                        // The server restarted, and then the lease expired.
                        t = StrictAssignment::begin(&s, &began);
                        l.expire(sequence);
                        t.expired(id, rank);
                    }
                    _ => {
                        got[rank as usize].extend(l.lease(id).expect("live").entries.clone());
                        l.ack(rank, id, 1).expect("ack");
                        t.settled(id);
                    }
                }
            }
        }
        let whole = strict(n, a);
        for (rank, got) in (0u32..).zip(got) {
            let want: Vec<u32> = (steps * 4..whole.len())
                .filter(|&p| crate::order::strict::step_position(p - steps * 4, 4, 4).rank == rank)
                .map(|p| whole.entry(p))
                .collect();
            prop_assert_eq!(got, want);
        }
    }

    /// A world that begins within a step delivers the rest once, in steps as equal as possible.
    #[test]
    fn ragged_worlds_share_everything(
        n in 1u64..120,
        acked in proptest::collection::vec(any::<u32>(), 0..60),
        ranks in 1u32..5,
        per in 1u32..4,
        tail in tails(),
    ) {
        let world = World { batch: per * ranks, ranks, tail };
        let s = strict(n, World { batch: 1, ranks: 1, tail: Tail::Keep });
        let mut before = Bits::zeros(n);
        acked.iter().for_each(|a| {
            before.set(u64::from(*a) % n);
        });
        let mut l = Leases::resumed(Bits::ones(n), before.clone(), world).expect("world");
        let mut t = StrictAssignment::begin(&s, &l);
        let mut seen = before;
        let mut sequence = 0;
        while !l.finished() {
            sequence += 1;
            for rank in 0..ranks {
                let Some(id) = draw(&mut t, &s, &mut l, rank, sequence, per, 9) else { continue };
                for e in l.lease(id).expect("live").entries.clone() {
                    prop_assert!(u64::from(e) >= n || seen.set(u64::from(e)), "entry {} twice", e);
                }
                l.ack(rank, id, u32::try_from(l.lease(id).expect("live").entries.len()).expect("few"))
                    .expect("ack");
            }
        }
        let left = l.left_out().count() as u64;
        prop_assert!(left < u64::from(ranks));
        prop_assert_eq!(seen.count() + left, n);
    }
}
