use super::*;
use crate::delivery::Request;
use crate::plan::{BATCH_MAX, RANKS_MAX, Tail};
use proptest::prelude::*;

fn header() -> Header {
    Header {
        job: "train".into(),
        epoch: 3,
        root: Root(Hash::of(b"r")),
        layout: LayoutId(Hash::of(b"l")),
        plan: Hash::of(b"p"),
        order: "substitute".into(),
        seed: u64::MAX,
        world: World { batch: 64, ranks: 4, tail: Tail::Pad },
    }
}

fn event() -> impl Strategy<Value = Event> {
    let list = || proptest::collection::vec(any::<u32>(), 0..20);
    let world = (any::<u32>(), any::<u32>(), 0usize..3).prop_map(|(batch, ranks, t)| World {
        batch,
        ranks,
        tail: [Tail::Keep, Tail::Drop, Tail::Pad][t],
    });
    prop_oneof![
        list().prop_map(|units| Event::Load { units }),
        (any::<u64>(), any::<u32>(), any::<u32>(), any::<u64>(), list()).prop_map(
            |(lease, rank, worker, sequence, entries)| {
                Event::Grant { lease, request: Request { rank, worker, sequence }, entries }
            }
        ),
        (any::<u64>(), any::<u32>()).prop_map(|(lease, upto)| Event::Ack { lease, upto }),
        any::<u64>().prop_map(|lease| Event::Expire { lease }),
        any::<u64>().prop_map(|commit| Event::Commit { commit }),
        any::<u64>().prop_map(|commit| Event::Rollback { commit }),
        world.prop_map(|world| Event::World { world }),
        (any::<u64>(), proptest::collection::vec(any::<u8>(), 0..20))
            .prop_map(|(byte, bits)| Event::Resume { byte, bits }),
        (any::<u64>(), any::<u64>())
            .prop_map(|(delivered, redelivered)| Event::End { delivered, redelivered }),
    ]
}

proptest! {
    /// Events that were written are read, unknown kinds are skipped, and a torn tail loses whole events.
    #[test]
    fn ledgers_round_trip_and_tear(events in proptest::collection::vec(event(), 0..12), cut: usize) {
        let mut file = begin(&header());
        let first = file.len();
        for (i, e) in events.iter().enumerate() {
            e.append(&mut file);
            if i % 3 == 0 {
                record::append(&mut file, 250, b"from a newer build");
            }
        }
        let whole = Ledger::read(&file).expect("whole");
        prop_assert_eq!(&whole.header, &header());
        prop_assert_eq!(&whole.events, &events);
        prop_assert_eq!(whole.len, file.len());
        let cut = first + cut % (file.len() - first + 1);
        let torn = Ledger::read(&file[..cut]).expect("torn is not damaged");
        prop_assert!(torn.len <= cut);
        prop_assert_eq!(&torn.events[..], &events[..torn.events.len()]);
    }

    #[test]
    fn garbage_is_an_error_never_a_panic(kind: u8, payload in proptest::collection::vec(any::<u8>(), 0..40)) {
        let mut file = begin(&header());
        record::append(&mut file, kind, &payload);
        match Ledger::read(&file) {
            Ok(l) => prop_assert!(l.events.len() <= 1),
            Err(e) => prop_assert_eq!(e, BadLedger::Record(1)),
        }
    }
}

#[test]
fn numbers_have_one_encoding() {
    for x in [0, 1, 127, 128, 300, u64::from(u32::MAX), u64::MAX] {
        let mut b = Vec::new();
        put(&mut b, x);
        assert_eq!(get(&mut &b[..]), Some(x));
        b.pop();
        assert_eq!(get(&mut &b[..]), None);
    }
    assert_eq!(get(&mut &[0x80, 0][..]), None, "a needless byte");
    assert_eq!(get(&mut &[0xff; 10][..]), None, "more than 64 bits");
}

#[test]
fn a_file_that_is_not_a_ledger_is_rejected() {
    assert_eq!(Ledger::read(&record::file_header()), Err(BadLedger::Header));
    let mut newer = record::file_header().to_vec();
    record::append(&mut newer, HEADER, &[2]);
    assert_eq!(Ledger::read(&newer), Err(BadLedger::Major(2)));
    assert!(matches!(Ledger::read(b"GIF89a, surely no ledger"), Err(BadLedger::Log(_))));
}

/// A header with an impossible world is rejected when it is read, before anything counts its ranks or steps.
#[test]
fn a_header_with_an_impossible_world_is_rejected() {
    for (ranks, batch, tail) in [
        (1, u32::MAX, Tail::Pad),
        (u32::MAX, u32::MAX, Tail::Drop),
        (0, 0, Tail::Drop),
        (1, BATCH_MAX + 1, Tail::Keep),
        (RANKS_MAX + 1, RANKS_MAX + 1, Tail::Drop),
    ] {
        let file = begin(&Header { world: World { batch, ranks, tail }, ..header() });
        assert!(matches!(Ledger::read(&file), Err(BadLedger::World(_))), "{ranks} ranks, {batch}, {tail:?}");
    }
    let most = World { batch: BATCH_MAX, ranks: RANKS_MAX, tail: Tail::Pad };
    assert_eq!(Ledger::read(&begin(&Header { world: most, ..header() })).map(|l| l.header.world), Ok(most));
}

/// A state in many small pieces costs no more than in a few large ones, and their number is bounded.
#[test]
fn a_state_in_many_small_pieces() {
    let world = World { batch: RANKS_MAX, ranks: RANKS_MAX, tail: Tail::Drop };
    let n = 4 * u64::from(RANKS_MAX);
    let crumbs = |count: usize| {
        let mut file = begin(&Header { world, ..header() });
        for byte in 0..count as u64 {
            Event::Resume { byte, bits: vec![1] }.append(&mut file);
        }
        Ledger::read(&file)
    };
    assert_eq!(crumbs(RESUMES_MAX + 1), Err(BadLedger::Record(RESUMES_MAX + 1)));
    let read = crumbs(RESUMES_MAX).expect("as many as may be");
    let mut leases = Leases::new(Bits::ones(n), world).expect("world");
    read.replay(&mut leases, 0).expect("replayed");
    // Three whole steps are left, and not a fourth.
    assert_eq!(leases.acked().count(), RESUMES_MAX as u64);
    assert!((0..RANKS_MAX).all(|r| leases.left(r) == 3), "what is left is shared");
    // The same as from one piece.
    let mut whole = Leases::resumed(Bits::ones(n), leases.acked().clone(), world).expect("world");
    assert_eq!(whole.left(0), leases.left(0));
    let request = Request { rank: 0, worker: 0, sequence: 1 };
    assert_eq!(whole.grant(request, vec![1], 1, 9), leases.grant(request, vec![1], 1, 9));
}

/// An epoch resumes from a state, in one piece or several. An entry outside the plan is rejected.
#[test]
fn a_state_is_a_ledger() {
    let n = 8 * RESUME_BYTES_MAX as u64 + 77;
    let mut acked = Bits::zeros(n);
    for e in [0, 5, 8 * RESUME_BYTES_MAX as u64 - 1, 8 * RESUME_BYTES_MAX as u64, n - 1] {
        acked.set(e);
    }
    let read = Ledger::read(&state(&header(), &acked)).expect("a ledger");
    assert_eq!((read.header.clone(), read.events.len()), (header(), 2));
    let world = World { batch: 4, ranks: 2, tail: Tail::Drop };
    let mut leases = Leases::new(Bits::ones(n), world).expect("world");
    read.replay(&mut leases, 0).expect("replayed");
    assert_eq!(leases.acked(), &acked);
    assert_eq!((leases.free().count(), leases.redelivered()), (n - 5, 0));
    assert_eq!(leases.left(0) + leases.left(1), n - 5);
    let mut other = Leases::new(Bits::ones(n - 1), world).expect("world");
    assert!(read.replay(&mut other, 0).is_err(), "another plan");
    assert_eq!(Ledger::read(&state(&header(), &Bits::zeros(9))).expect("a ledger").events, []);
    let request = Request { rank: 0, worker: 0, sequence: 1 };
    leases.grant(request, vec![1], 1, 9).expect("free");
    let late = Event::Resume { byte: 0, bits: vec![4] };
    assert_eq!(leases.apply(&late, 0), Err(LeaseError::Busy(1)));
}
