//! Ledgers and states of epochs: a server reads them after a crash, and from clients (`PUT …/state`, replay).

use super::{golden_json, unhex};
use crate::{plant, repair};
use fletch_core::{
    delivery::{
        Event, Leases, Ledger, Request,
        ledger::{begin, state},
    },
    plan::{Tail, World, bits::Bits},
};

/// The entries of the epoch on which an input is replayed.
const ENTRIES: u64 = 100;

pub fn seeds() -> Vec<Vec<u8>> {
    let golden = golden_json("epochs/ledger.json");
    let mut whole = unhex(&golden["begin"]);
    golden["records"].as_array().into_iter().flatten().for_each(|r| whole.extend(unhex(r)));
    let header = Ledger::read(&whole).map(|l| l.header);
    let mut out = vec![whole, unhex(&golden_json("epochs/state.json")["state"])];
    if let Ok(mut header) = header {
        header.world = World { batch: 4, ranks: 2, tail: Tail::Pad };
        let mut acked = Bits::zeros(ENTRIES);
        [1, 2, 63].into_iter().for_each(|i| assert!(acked.set(i)));
        out.push(state(&header, &acked));
        let mut played = begin(&header);
        let request = |rank, sequence| Request { rank, worker: 0, sequence };
        for event in [
            Event::Grant { lease: 1, request: request(0, 0), entries: (0..8).collect() },
            Event::Grant { lease: 2, request: request(1, 0), entries: (50..58).collect() },
            Event::Ack { lease: 1, upto: 4 },
            Event::Commit { commit: 5 },
            Event::Ack { lease: 2, upto: 8 },
            Event::Expire { lease: 1 },
            Event::Rollback { commit: 5 },
            Event::World { world: World { batch: 6, ranks: 3, tail: Tail::Drop } },
            Event::Grant { lease: 3, request: request(2, 1), entries: vec![4, 5] },
        ] {
            event.append(&mut played);
        }
        out.push(played);
    }
    out
}

/// What was read is written and read again. A replay is refused or leaves leases that hold together.
pub fn run(input: &[u8]) -> bool {
    let file = repair::log(input);
    let Ok(ledger) = Ledger::read(&file) else { return false };
    let mut again = begin(&ledger.header);
    ledger.events.iter().for_each(|e| e.append(&mut again));
    let read = Ledger::read(&again).expect("a ledger that was written");
    assert_eq!((&read.header, &read.events), (&ledger.header, &ledger.events));
    let Ok(mut leases) = Leases::new(Bits::ones(ENTRIES), ledger.header.world) else { return true };
    let replayed = ledger.replay(&mut leases, 0);
    if replayed.is_ok() {
        let acked = leases.acked();
        assert!(acked.count() <= ENTRIES && acked.len() >= ENTRIES.min(acked.len()));
        assert!((0..ENTRIES).all(|e| !(acked.get(e) && leases.free().get(e))), "an entry is acked and free");
        let (_, back) = leases.expire(u64::MAX);
        assert!(leases.live().next().is_none() && back.len() as u64 <= ENTRIES + u64::from(leases.pads()));
    }
    let kinds = |wanted: fn(&Event) -> bool| ledger.events.iter().filter(|e| wanted(e)).count();
    plant::bug(kinds(|e| matches!(e, Event::Rollback { .. })) == 2 && ledger.header.world.ranks == 2);
    true
}
