//! Golden files of the epoch formats. Regenerate on purpose with `FLETCH_GOLDEN_WRITE=1`, and
//! only when a format's major version changes.

use fletch_core::{
    Hash, LayoutId, Root,
    delivery::{
        Event, Ledger, Loss, Request,
        certificate::{Shuffle, chance},
        consumption_log::{self, ConsumptionLog, ConsumptionRecord},
        ledger::{self, Header},
        receipt::{Delivery, LtHash, Receipt},
    },
    order::{Bucketed, Buckets, Strict, SweepPolicy, sweep::SweepParams},
    plan::{Bits, OrderKey, Permutation, Plan, PlanUnits, Tail, UnitMap, World},
    residency::{CacheAction, Residency},
};
use serde_json::{Value, json};
use std::{path::Path, sync::Arc};

fn golden(name: &str, got: &Value) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/epochs").join(name);
    let text = format!("{got:#}\n");
    if std::env::var_os("FLETCH_GOLDEN_WRITE").is_some() {
        std::fs::create_dir_all(path.parent().expect("a directory")).expect("golden directory");
        std::fs::write(&path, &text).expect("golden file");
    }
    let want = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert_eq!(text, want, "{name} has changed: formats outlive code");
}

const SIZES: [u64; 10] = [1, 2, 3, 10, 100, 1023, 1024, 10_007, 1_281_167, 1 << 40];

fn key() -> OrderKey {
    OrderKey::new(Root(Hash::of(b"root")), Hash::of(b"plan"), 7, 3)
}

#[test]
fn permutation() {
    let mut draws = key().draws("order", 0);
    let words: Vec<String> = (0..4).map(|_| format!("{:016x}", draws.word())).collect();
    let some = |n: u64| {
        let p = Permutation::new(&key(), "order", 0, n);
        let at: Vec<u64> = (0..n.min(32)).map(|i| p.at(i)).collect();
        json!({ "n": n, "first": at })
    };
    golden(
        "permutation.json",
        &json!({
            "root": Hash::of(b"root"), "plan": Hash::of(b"plan"), "seed": 7, "epoch": 3,
            "key": Hash(key().0), "label": "order", "number": 0, "words": words,
            "permutations": (SIZES.map(some)),
        }),
    );
}

#[test]
fn plans() {
    let weights = [0.0, 1.0, 2.5, 0.1, 3.0, 0.0, 7.25];
    let weighted = Plan::weighted(7, &weights, 20, &key()).expect("weights");
    let copies: Vec<u32> = (0..7).map(|s| weighted.copies_of(s)).collect();
    let all = Plan::all(1000).expect("plan");
    golden(
        "plan.json",
        &json!({
            "all 1000": all.hash(),
            "subset 1, 5, 9 of 10": Plan::subset(10, [1, 5, 9]).expect("plan").hash(),
            "all 1000, 3 copies 100 apart": all.echoed(3, 100).expect("plan").hash(),
            "weighted": {
                "weights": weights, "draws": 20, "key": Hash(key().0), "copies": copies,
                "hash": weighted.hash(),
            },
        }),
    );
}

#[test]
fn strict() {
    let order = |plan: Plan, batch, ranks, tail| {
        let o = Strict::new(plan, World { batch, ranks, tail }, key());
        let entries: Vec<u32> = (0..o.len()).map(|p| o.entry(p)).collect();
        let items: Vec<(u32, u32)> = entries.iter().map(|&e| o.item(e)).map(|i| (i.sample, i.copy)).collect();
        json!({
            "batch": batch, "ranks": ranks, "tail": tail, "steps": o.steps(), "entries": entries,
            "items": items, "dropped": o.dropped().collect::<Vec<_>>(),
        })
    };
    let all = |n| Plan::all(n).expect("plan");
    let unit_of: Vec<u32> = (0..40).map(|s| s * 7 % 10).collect();
    let plan_units = PlanUnits::new(&all(40), &UnitMap::new(&unit_of, vec![1; 10]).expect("unit_map"))
        .expect("plan_units");
    let world = World { batch: 1, ranks: 1, tail: Tail::Keep };
    let by_units = Strict::by_units(all(40), world, key(), plan_units, 12);
    let by_units: Vec<u32> = (0..40).map(|p| by_units.entry(p)).collect();
    let mut state = Bits::zeros(21);
    for bit in [0, 3, 8, 20] {
        state.set(bit);
    }
    golden(
        "strict.json",
        &json!({
            "all 21, drop": order(all(21), 4, 2, Tail::Drop),
            "all 21, pad": order(all(21), 4, 2, Tail::Pad),
            "all 21, keep": order(all(21), 4, 1, Tail::Keep),
            "all 21, 2 copies 7 apart": order(all(21).echoed(2, 7).expect("plan"), 1, 1, Tail::Keep),
            "40 samples, sample s in unit 7s mod 10, blocks of 12": by_units,
            "bits 0, 3, 8, 20 of 21": hex::encode(state.to_bytes()),
        }),
    );
}

#[test]
fn bucketed() {
    let of: Vec<u32> = (0..23).map(|s| [2, 0, 5, 2, 5][s % 5]).collect();
    let buckets = Buckets::new(of.clone()).expect("few");
    let plan = Plan::all(23).expect("plan");
    let order = |batch, ranks, tail| {
        let world = World { batch, ranks, tail };
        let o = Bucketed::new(plan.clone(), world, &key(), buckets.clone()).expect("fits");
        let steps: Vec<Value> = (0..o.steps())
            .map(|s| {
                let entries: Vec<u32> = (0..o.size(s)).map(|q| o.entry(s, q)).collect();
                let items: Vec<(u32, u32)> =
                    entries.iter().map(|&e| o.item(e)).map(|i| (i.sample, i.copy)).collect();
                json!({ "bucket": o.bucket(s), "entries": entries, "items": items })
            })
            .collect();
        json!({ "batch": batch, "ranks": ranks, "tail": tail, "steps": steps })
    };
    let by_length = Buckets::by_length([0, 9, 10, 99, 100, 101], &[10, 100]).expect("ascending");
    golden(
        "bucketed.json",
        &json!({
            "key": Hash(key().0), "buckets": of, "plan": plan.hash(), "hash": buckets.hash(plan.hash()),
            "by length 10, 100": (0..6).map(|s| by_length.of(s)).collect::<Vec<_>>(),
            "drop": order(4, 2, Tail::Drop), "pad": order(4, 2, Tail::Pad), "keep": order(4, 1, Tail::Keep),
        }),
    );
}

#[test]
fn trace() {
    let unit_map = Arc::new(UnitMap::new(&[0, 1, 2, 0, 1, 2], vec![1000, 2000, 300]).expect("unit_map"));
    let mut policy = SweepPolicy::recorded(unit_map.clone(), 3000, &key(), SweepParams::default());
    let begin = hex::encode(policy.take_trace());
    let (mut calls, mut actions) = (Vec::new(), Vec::new());
    let all = policy.join(PlanUnits::new(&Plan::all(6).expect("plan"), &unit_map).expect("plan_units"));
    let some =
        policy.join(PlanUnits::new(&Plan::subset(6, [0, 4]).expect("plan"), &unit_map).expect("plan_units"));
    calls.push(hex::encode(policy.take_trace()));
    let mut left = Bits::ones(6);
    left.clear(1);
    policy.begin(all, left);
    policy.begin(some, Bits::ones(2));
    calls.push(hex::encode(policy.take_trace()));
    let mut picks = Vec::new();
    for subscriber in [all, some, some, some] {
        actions.clear();
        let pick = policy.next(subscriber, &mut actions);
        let actions: Vec<(&str, u32)> = actions
            .iter()
            .map(|a| match *a {
                CacheAction::Load(u) => ("load", u),
                CacheAction::Evict(u) => ("evict", u),
            })
            .collect();
        let pick = pick.map(|p| (p.slot, p.unit, p.read_from, p.pass));
        picks.push(json!({ "seat": subscriber.0, "pick": pick, "acts": actions }));
        calls.push(hex::encode(policy.take_trace()));
    }
    policy.give_back(some, 0);
    policy.lost(2);
    policy.set_capacity(0, &mut Vec::new());
    let mut units = Bits::zeros(3);
    units.set(2);
    policy.reconcile(&Residency::new(9, units.clone()), 77);
    policy.adopt(&Residency::new(9, units), &mut actions);
    policy.advance(&mut actions);
    policy.leave(all);
    let rest = hex::encode(policy.take_trace());
    let whole: Vec<u8> = hex::decode(format!("{begin}{}{rest}", calls.concat())).expect("hex");
    let played = SweepPolicy::play(&whole).expect("plays");
    assert_eq!((played.calls, played.picks), (15, 3));
    golden(
        "trace.json",
        &json!({
            "key": Hash(key().0), "knobs": SweepParams::default().values(), "begin": begin, "calls": calls,
            "picks": picks, "rest": rest,
        }),
    );
}

#[test]
fn ledger_bytes() {
    let header = Header {
        job: "train".into(),
        epoch: 3,
        root: Root(Hash::of(b"root")),
        layout: LayoutId(Hash::of(b"layout")),
        plan: Hash::of(b"plan"),
        order: "substitute".into(),
        seed: 7,
        world: World { batch: 8, ranks: 2, tail: Tail::Drop },
    };
    let request = Request { rank: 1, worker: 0, sequence: 300 };
    let events = [
        Event::Load { units: vec![5, 4, 1000] },
        Event::Grant { lease: 1, request, entries: vec![70_000, 3, 4, 2_000_000_000] },
        Event::Ack { lease: 1, upto: 2 },
        Event::Expire { lease: 1 },
        Event::Commit { commit: 1 },
        Event::Rollback { commit: 1 },
        Event::World { world: World { batch: 8, ranks: 4, tail: Tail::Pad } },
        Event::End { delivered: 16, redelivered: 2 },
        Event::Reclaim(Loss { term: 3, last_lease: 1 << 51, unknown: vec![0, 2] }),
    ];
    let mut file = ledger::begin(&header);
    let begin = hex::encode(&file);
    let records: Vec<String> = events
        .iter()
        .map(|e| {
            let at = file.len();
            e.append(&mut file);
            hex::encode(&file[at..])
        })
        .collect();
    assert_eq!(Ledger::read(&file).expect("a ledger").events, events);
    golden("ledger.json", &json!({ "begin": begin, "records": records }));

    // What users keep beside their models: 21 entries, of which some are done.
    let mut done = Bits::zeros(21);
    for bit in [0, 3, 8, 20] {
        done.set(bit);
    }
    let state = ledger::state(&header, &done);
    let read = Ledger::read(&state).expect("a ledger");
    assert_eq!(read.events, [Event::Resume { byte: 0, bits: vec![0b1001, 1, 0b1_0000] }]);
    golden("state.json", &json!({ "bits": [0, 3, 8, 20], "state": hex::encode(state) }));
}

#[test]
fn receipts() {
    let root = Root(Hash::of(b"root"));
    let mut value = LtHash::default();
    let mut digests = Vec::new();
    let mut lines = vec![consumption_log::head(root, 3)];
    for (ordinal, copy) in [(0, 0), (0, 1), (1 << 40, 0)] {
        let delivery = Delivery { ordinal, content: Hash::of(b"bytes"), copy };
        value.add(root, &delivery);
        digests.push(value.digest());
        lines.push(ConsumptionRecord { delivery, at: (copy == 1).then_some((7, 2)) }.to_string());
    }
    lines.push(consumption_log::sum(3, &value));
    assert_eq!(ConsumptionLog::parse(&(lines.join("\n") + "\n")).expect("notes").sums, [(3, value.clone())]);
    golden("notes.json", &json!({ "lines": lines }));
    let lanes: Vec<u16> =
        value.to_bytes()[..32].chunks_exact(2).map(|x| u16::from_le_bytes([x[0], x[1]])).collect();
    let receipt = Receipt {
        format: "fletch.receipt".into(),
        major: 1,
        minor: 0,
        root,
        plan: Hash::of(b"plan"),
        seed: 7,
        epoch: 3,
        delivered: 3,
        redelivered: 1,
        dropped: vec![5],
        padded: 2,
        value,
        key_id: None,
        signature: None,
    };
    let signed = Receipt { key_id: Some("k".into()), signature: Some("00".into()), ..receipt.clone() };
    golden(
        "receipt.json",
        &json!({
            "root": root, "content": Hash::of(b"bytes"), "digests": digests, "lanes": lanes,
            "receipt": receipt, "signed": signed,
        }),
    );
}

#[test]
fn certificates() {
    let units = [0, 0, 1, 2, 1, 0, 3, 3, 3, 1, 2, 0, 2, 1, 0, 3];
    let (mut one, mut other) = (Shuffle::default(), Shuffle::default());
    units.iter().for_each(|&u| one.see(u));
    units[..5].iter().for_each(|&u| other.see(u));
    let alone = one.certificate(chance([6, 5, 4, 4]));
    one.merge(&other);
    let both = one.certificate(chance([6, 5, 4, 4]));
    golden(
        "certificate.json",
        &json!({
            "entries": [6, 5, 4, 4], "units": units, "alone": alone, "other": units[..5], "both": both,
        }),
    );
}
