use super::*;
use crate::{
    LayoutId,
    delivery::{Request, ledger::Header, receipt},
    plan::{Tail, World},
};
use proptest::prelude::*;

const SAMPLES: u64 = 12;

fn root() -> Root {
    Root(Hash::of(b"r"))
}

fn content(sample: u64) -> Hash {
    Hash::of(&sample.to_le_bytes())
}

/// Sample s has ordinal 2 s.
fn contents() -> BTreeMap<u64, Hash> {
    (0..SAMPLES).map(|s| (2 * s, content(s))).collect()
}

fn record(sample: u64, at: Option<(u64, u32)>) -> ConsumptionRecord {
    ConsumptionRecord { delivery: Delivery { ordinal: 2 * sample, content: content(sample), copy: 0 }, at }
}

fn receipt() -> Receipt {
    let mut value = LtHash::default();
    (0..SAMPLES).for_each(|s| value.add(root(), &record(s, None).delivery));
    Receipt {
        format: "fletch.receipt".into(),
        major: receipt::FORMAT_MAJOR,
        minor: 0,
        root: root(),
        plan: Hash::of(b"p"),
        seed: 0,
        epoch: 3,
        delivered: SAMPLES,
        redelivered: 0,
        dropped: vec![],
        padded: 0,
        value,
        key_id: None,
        signature: None,
    }
}

/// Two ranks' logs: sample s is position s/2 mod 3 of lease 1 + s mod 2 + 2·(s/6).
fn place(s: u64) -> (u64, u32) {
    (1 + s % 2 + 2 * (s / 6), u32::try_from(s / 2 % 3).expect("few"))
}

fn files(samples: &[u64], leases: bool) -> Vec<String> {
    let mut out = vec![head(root(), 3) + "\n"; 2];
    for &s in samples {
        out[(s % 2) as usize] += &format!("{}\n", record(s, leases.then(|| place(s))));
    }
    out
}

fn parsed(files: &[String]) -> Vec<ConsumptionLog> {
    files.iter().map(|f| ConsumptionLog::parse(f).expect("a log")).collect()
}

fn ledger(events: Vec<Event>) -> Ledger {
    let h = Hash::of(b"x");
    let header = Header {
        job: "j".into(),
        epoch: 3,
        root: root(),
        layout: LayoutId(h),
        plan: h,
        order: "strict".into(),
        seed: 0,
        world: World { batch: 6, ranks: 2, tail: Tail::Drop },
    };
    Ledger { header, events, len: 0 }
}

fn grant(lease: u64, samples: impl Iterator<Item = u64>) -> Event {
    let rank = u32::try_from((lease + 1) % 2).expect("few");
    let entries = samples.map(|s| u32::try_from(s).expect("few")).collect();
    Event::Grant { lease, request: Request { rank, worker: 0, sequence: lease }, entries }
}

fn granted() -> Vec<Event> {
    (1..5)
        .flat_map(|lease| {
            [grant(lease, (0..SAMPLES).filter(|&s| place(s).0 == lease)), Event::Ack { lease, upto: 3 }]
        })
        .collect()
}

#[test]
fn an_honest_file_agrees_and_a_dropped_doubled_or_altered_sample_is_named() {
    let all: Vec<u64> = (0..SAMPLES).collect();
    let ledger = ledger(granted());
    let none = BTreeSet::new();
    for with in [None, Some(&ledger)] {
        let leases = with.is_some();
        let differs = |files: &[String]| {
            let check = Check::new(&parsed(files), with);
            assert!(!check.agrees(&receipt()));
            check.discrepancies(&contents(), Some(&none))
        };
        let honest = files(&all, leases);
        let check = Check::new(&parsed(&honest), with);
        assert!(check.agrees(&receipt()));
        assert_eq!((check.deliveries(), check.left_out()), (SAMPLES, 0));
        assert_eq!(check.discrepancies(&contents(), Some(&none)), []);

        let without: Vec<u64> = all.iter().copied().filter(|s| *s != 7).collect();
        let missing = if leases {
            Discrepancy::Unrecorded { entry: 7, rank: 1, lease: 4, place: 0 }
        } else {
            Discrepancy::Missing { ordinal: 14 }
        };
        assert_eq!(differs(&files(&without, leases)), [missing]);

        let mut twice = files(&all, leases);
        twice[0] += &format!("{}\n", record(7, leases.then(|| place(7))));
        let (first, again) = (LogPosition { file: 0, line: 8 }, LogPosition { file: 1, line: 5 });
        assert_eq!(differs(&twice), [Discrepancy::Doubled { ordinal: 14, copy: 0, first, again }]);

        let mut altered = files(&all, leases);
        altered[1] = altered[1].replace(&content(7).to_string(), &content(99).to_string());
        let at = LogPosition { file: 1, line: 5 };
        let (is, should) = (content(99), Some(content(7)));
        assert_eq!(differs(&altered), [Discrepancy::Altered { ordinal: 14, at, is, should }]);
    }
    // One sample instead of another: the check names both.
    let mut other = files(&all, false);
    other[1] = other[1].replace(&record(7, None).to_string(), &record(5, None).to_string());
    let check = Check::new(&parsed(&other), None);
    assert!(!check.agrees(&receipt()) && check.deliveries() == SAMPLES);
    let found = check.discrepancies(&contents(), Some(&none));
    assert!(matches!(
        found[..],
        [Discrepancy::Doubled { ordinal: 10, .. }, Discrepancy::Missing { ordinal: 14 }]
    ));
    // A sample that the tail rule dropped is not missing.
    let without: Vec<u64> = all.iter().copied().filter(|s| *s != 7).collect();
    let check = Check::new(&parsed(&files(&without, false)), None);
    assert_eq!(check.discrepancies(&contents(), Some(&[7].into())), []);
}

/// I2: a consumer that died before its ack recorded a sample that another consumed later. So did a consumer
/// whose epoch was rolled back.
#[test]
fn an_unacknowledged_record_does_not_count() {
    let all: Vec<u64> = (0..SAMPLES).collect();
    let mut logs = files(&all, true);
    let mut events = granted();
    events.insert(2, grant(9, [6, 8].into_iter()));
    events.insert(3, Event::Ack { lease: 9, upto: 1 });
    events.insert(4, Event::Expire { lease: 9 });
    logs[1] += &format!("{}\n", record(8, Some((9, 1))));
    let check = Check::new(&parsed(&logs), Some(&ledger(events.clone())));
    assert!(check.agrees(&receipt()) && check.left_out() == 1);
    assert!(!Check::new(&parsed(&logs), None).agrees(&receipt()), "without the ledger it stands twice");
    // The same with entries that were acknowledged and rolled back.
    events.insert(0, Event::Commit { commit: 1 });
    events.insert(1, grant(8, [1, 3].into_iter()));
    events.insert(2, Event::Ack { lease: 8, upto: 2 });
    events.insert(3, Event::Rollback { commit: 1 });
    logs[0] += &format!("{}\n{}\n", record(1, Some((8, 0))), record(3, Some((8, 1))));
    let check = Check::new(&parsed(&logs), Some(&ledger(events)));
    assert!(check.agrees(&receipt()) && check.left_out() == 3);
}

/// How many entries of each lease are acknowledged at the end of a ledger.
fn acked(ledger: &Ledger) -> Vec<(u64, u32)> {
    lease_records(ledger).expect("no resume").iter().map(|(&lease, t)| (lease, t.acked)).collect()
}

/// The same, computed with a copy of everything at each commit.
fn acked_by_copies(events: &[Event]) -> Vec<(u64, u32)> {
    let mut acked: BTreeMap<u64, u32> = BTreeMap::new();
    let mut commits: BTreeMap<u64, BTreeMap<u64, u32>> = BTreeMap::new();
    for event in events {
        match event {
            Event::Grant { lease, .. } => drop(acked.insert(*lease, 0)),
            Event::Ack { lease, upto } => {
                acked.entry(*lease).and_modify(|a| *a = *upto.max(a));
            }
            Event::Commit { commit } => drop(commits.insert(*commit, acked.clone())),
            Event::Rollback { commit } => {
                acked.iter_mut().for_each(|(id, a)| *a = commits[commit].get(id).copied().unwrap_or(0));
            }
            _ => {}
        }
    }
    acked.into_iter().collect()
}

proptest! {
    /// I2: any sequence of grants, acks, commits (some under a number used before) and rollbacks.
    #[test]
    fn commits_are_what_was_acknowledged_then(
        ops in proptest::collection::vec((0u8..8, any::<u32>()), 1..120),
    ) {
        let (mut events, mut leases, mut commits) = (Vec::new(), 0, Vec::new());
        for (op, x) in ops {
            let among = |n: u64| u64::from(x) % n.max(1);
            match op {
                0..2 => {
                    leases += 1;
                    events.push(grant(leases, 0..6));
                }
                2..5 if leases > 0 => {
                    let upto = x.rotate_left(16) % 7;
                    events.push(Event::Ack { lease: 1 + among(leases), upto });
                }
                5..7 => {
                    let commit = among(9);
                    commits.retain(|&c| c != commit);
                    commits.push(commit);
                    events.push(Event::Commit { commit });
                }
                _ if !commits.is_empty() => {
                    let at = usize::try_from(among(commits.len() as u64)).expect("few");
                    commits.truncate(at + 1);
                    events.push(Event::Rollback { commit: commits[at] });
                }
                _ => {}
            }
        }
        let copied = acked_by_copies(&events);
        prop_assert_eq!(acked(&ledger(events)), copied);
    }
}

/// With a copy of everything at each commit this would take many minutes, and fail as a test that hangs.
#[test]
fn a_long_ledger_is_quick() {
    let mut events = Vec::new();
    for lease in 1..=400_000 {
        let commit = Event::Commit { commit: lease % 4 };
        events.extend([grant(lease, 0..1), commit.clone(), Event::Ack { lease, upto: 1 }, commit]);
        if lease % 1000 == 0 {
            events.push(Event::Rollback { commit: (lease - 1) % 4 });
        }
    }
    let acked = acked(&ledger(events));
    let lost: Vec<u64> = acked.iter().filter(|a| a.1 == 0).map(|a| a.0).collect();
    assert_eq!((acked.len(), lost), (400_000, (1..=400).map(|k| 1000 * k).collect()));
}

#[test]
fn sums_of_ranks_agree_and_what_they_hide_is_not_guessed() {
    let sum_of = |samples: &[u64]| {
        let mut value = LtHash::default();
        samples.iter().for_each(|&s| value.add(root(), &record(s, None).delivery));
        format!("{}\n# a rank\n{}\n", head(root(), 3), sum(samples.len() as u64, &value))
    };
    let (a, b): (Vec<u64>, Vec<u64>) = (0..SAMPLES).partition(|s| s % 3 == 0);
    let honest = parsed(&[sum_of(&a), sum_of(&b)]);
    assert!(Check::new(&honest, None).agrees(&receipt()));
    let twice = Check::new(&[honest[0].clone(), honest[0].clone(), honest[1].clone()], None);
    assert!(!twice.agrees(&receipt()));
    assert_eq!(twice.discrepancies(&contents(), Some(&BTreeSet::new())), []);
    assert!(!Check::new(&honest[1..], None).agrees(&receipt()));
}

#[test]
fn a_bad_line_is_rejected_with_its_number() {
    let head = head(root(), 3);
    let line = |text: &str| ConsumptionLog::parse(text).map_err(|e| e.line);
    assert_eq!(line(""), Err(1));
    assert_eq!(line(&head), Err(1), "a head that a crash tore");
    assert_eq!(line("fletch.notes 2 x 3\n"), Err(1));
    assert_eq!(line(&format!("{head} 7\n")), Err(1));
    let hash = content(1);
    for bad in
        ["1 0", "1 0 zz", "-1 0", &format!("1 0 {hash} 4"), &format!("1 0 {hash} 4 5 6"), "sum 1 00", ""]
    {
        assert_eq!(line(&format!("{head}\n# fine\n{bad}\n")), Err(3), "{bad}");
    }
    let torn = ConsumptionLog::parse(&format!("{head}\n1 0 {hash}\n2 0 {}", &hash.to_string()[..20]))
        .expect("a log");
    assert_eq!(
        torn.records,
        [(2, ConsumptionRecord { delivery: Delivery { ordinal: 1, content: hash, copy: 0 }, at: None })]
    );
}

proptest! {
    #[test]
    fn what_is_written_is_read(
        ordinal: u64,
        copy: u32,
        at in proptest::option::of(any::<(u64, u32)>()),
        epoch: u64,
    ) {
        let record =
            ConsumptionRecord { delivery: Delivery { ordinal, content: content(ordinal), copy }, at };
        let read = ConsumptionLog::parse(&format!("{}\n{record}\n", head(root(), epoch))).expect("a log");
        prop_assert_eq!((read.root, read.epoch), (root(), epoch));
        prop_assert_eq!(read.records, [(2, record)]);
    }

    #[test]
    fn no_text_makes_it_panic(text: String) {
        let _ = ConsumptionLog::parse(&format!("{}\n{text}\n", head(root(), 0)));
    }
}
