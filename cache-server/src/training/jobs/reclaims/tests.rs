use super::*;
use fletch_api::ReclaimedEpoch;

const TTL: Duration = Duration::from_millis(300);

fn record() -> Record {
    let text = serde_json::json!({
        "domain": "d", "tenant": "t", "dataset": "set",
        "root": "11".repeat(32), "layout": "22".repeat(32),
        "ask": {"name": "j", "dataset": "set", "world": {"ranks": 2, "batch": 2, "tail": "drop"}},
    });
    serde_json::from_value(text).expect("a record")
}

/// A report of a process that knows of an epoch that had not begun, or that was never served.
fn report(rank: u32, process: &str, unserved: bool) -> Reclaim {
    let (id, host) = (process.repeat(32), "h".to_owned());
    let loader = Loader { id, host, pid: 1, since_ms: 1, take_over: false, leave: false };
    let epochs = vec![ReclaimedEpoch { epoch: 4, record: String::new() }];
    Reclaim { rank, loader: Some(loader), epochs, unserved, ..Reclaim::default() }
}

#[test]
fn a_record_goes_before_a_process_that_was_never_served() {
    let (reclaims, record) = (Reclaims::new(TTL), record());
    let note = |ask: Reclaim| reclaims.report("id", &record, &ask);
    assert_eq!(note(report(0, "a", false)).expect("noted"), [1]);
    assert_eq!(note(report(1, "b", true)).expect("noted"), [1], "another process may have a record");
    assert!(reclaims.complete("id").is_none());
    // Two processes of one rank: the one with a record has it, and keeps it.
    assert!(matches!(note(report(1, "c", true)), Err(JobError::RankInUse { .. })));
    assert!(note(report(1, "d", false)).expect("noted").is_empty());
    assert!(matches!(note(report(1, "b", true)), Err(JobError::RankInUse { .. })));
    let all = reclaims.complete("id").expect("no rank is missing");
    assert!(all.unknown.is_empty() && all.epochs.is_empty());
}

#[test]
fn after_a_leases_time_a_process_that_was_never_served_has_its_rank() {
    let (reclaims, record) = (Reclaims::new(TTL), record());
    for rank in 0..2 {
        reclaims.report("id", &record, &report(rank, "a", true)).expect("noted");
    }
    assert_eq!(reclaims.waits_for("id"), [0, 1]);
    std::thread::sleep(TTL + Duration::from_millis(20));
    let all = reclaims.complete("id").expect("no rank is missing");
    assert_eq!(all.unknown, [0, 1]);
    // Nobody knows anything of the epoch: it begins anew, and says so.
    assert_eq!(all.epochs, [(4, BTreeMap::new())]);
    let losses = all.losses(4, &BTreeMap::new(), 7);
    assert_eq!((losses.len(), losses[0].term, &losses[0].unknown[..]), (1, 7, &[0, 1][..]));
}

#[test]
fn earlier_losses_are_told_again() {
    let (reclaims, record) = (Reclaims::new(TTL), record());
    let told = UnknownRanks { epoch: 4, term: 2, ranks: vec![1] };
    for rank in 0..2 {
        let ask = Reclaim { unknown: vec![told.clone()], ..report(rank, "a", false) };
        reclaims.report("id", &record, &ask).expect("noted");
    }
    let all = reclaims.complete("id").expect("no rank is missing");
    let losses = all.losses(4, &BTreeMap::new(), 3);
    let terms: Vec<_> = losses.iter().map(|loss| (loss.term, loss.unknown.clone())).collect();
    assert_eq!(terms, [(2, vec![1]), (3, vec![])], "once, though both ranks tell it");
    let many = Reclaim { unknown: vec![told; UNKNOWN_MAX + 1], ..report(0, "a", false) };
    assert!(matches!(reclaims.report("id", &record, &many), Err(JobError::BadRecord(_))));
}
