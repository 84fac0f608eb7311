use super::*;
use crate::{
    Hash, Root,
    order::sweep::{PARAM_MAX, PickQueue},
    plan::{Bits, Plan, PlanUnits},
    residency::{CacheAction, Residency},
};
use proptest::prelude::*;

fn key() -> OrderKey {
    OrderKey::new(Root(Hash::of(b"root")), Hash::of(b"plan"), 5, 0)
}

fn unit_map(units: u32, size: u32) -> Arc<UnitMap> {
    let unit_of: Vec<u32> = (0..units * size).map(|s| s * 7 % units).collect();
    Arc::new(UnitMap::new(&unit_of, (0..units).map(|u| 1000 + u64::from(u)).collect()).expect("unit_map"))
}

/// Runs a sweep with all kinds of calls. Returns its trace and how many samples it handed out.
fn run(ops: &[(u8, u32)], cuts: bool) -> (Vec<u8>, u64) {
    let unit_map = unit_map(40, 5);
    let mut policy = SweepPolicy::recorded(unit_map.clone(), 12_000, &key(), SweepParams::default());
    let plans = [Plan::all(200).expect("plan"), Plan::subset(200, (0..200).step_by(3)).expect("plan")];
    let mut subscribers = Vec::new();
    let mut trace = Vec::new();
    let (mut actions, mut picks) = (Vec::new(), 0);
    let mut out = Vec::new();
    for &(op, x) in ops {
        let at = x as usize % subscribers.len().max(1);
        match op {
            0 if subscribers.len() < 3 => {
                let plan_units = PlanUnits::new(&plans[x as usize % 2], &unit_map).expect("plan_units");
                let slots = u64::from(plan_units.slots());
                let subscriber = policy.join(plan_units);
                policy.begin(subscriber, Bits::ones(slots));
                subscribers.push((subscriber, PickQueue::default()));
            }
            1 if !subscribers.is_empty() => {
                let (subscriber, mut queue) = subscribers.remove(at);
                queue.give_back(&mut policy, subscriber);
                out.retain(|o: &(super::super::SubscriberId, u32)| o.0 != subscriber);
                policy.leave(subscriber);
            }
            2 => policy.lost(x % 40),
            3 => policy.set_capacity(u64::from(x % 40) * 1000, &mut actions),
            4 if !out.is_empty() => {
                let (subscriber, slot) = out.swap_remove(x as usize % out.len());
                policy.give_back(subscriber, slot);
            }
            5 => {
                let mut units = Bits::ones(40);
                units.clear(u64::from(x % 40));
                policy.reconcile(&Residency::new(7, units), policy.progress().swept_bytes);
            }
            6 => drop(policy.advance(&mut actions)),
            8 if !subscribers.is_empty() => subscribers[at].1.probe(u64::from(x % 50)),
            7 if cuts => trace.extend(policy.take_trace()),
            _ if !subscribers.is_empty() => {
                let (subscriber, queue) = &mut subscribers[at];
                for _ in 0..x % 30 {
                    queue.fill(&mut policy, *subscriber, 4, &mut actions, |_| picks += 1);
                    let Some(p) = queue.next(&policy, 2, |p| p.unit % 2 == 0) else { break };
                    out.push((*subscriber, p.slot));
                }
            }
            _ => {}
        }
    }
    trace.extend(policy.take_trace());
    (trace, picks)
}

proptest! {
    /// I1: a trace plays with the same results, and a trace that is cut short plays up to the cut.
    #[test]
    fn what_was_recorded_plays(ops in proptest::collection::vec((0u8..14, any::<u32>()), 1..60), cuts: bool) {
        let (trace, picks) = run(&ops, cuts);
        let played = SweepPolicy::play(&trace).expect("plays");
        prop_assert_eq!(played.picks, picks);
        prop_assert!(!played.cut);
        // The trace ends where its last whole record ends.
        if played.calls > 0 {
            let torn = SweepPolicy::play(&trace[..trace.len() - 1]);
            prop_assert!(torn.is_ok_and(|t| t.calls < played.calls));
        }
    }
}

fn some() -> Vec<u8> {
    run(&[(0, 0), (0, 0), (9, 29), (9, 28), (2, 3), (9, 29)], false).0
}

/// The records of a trace, with the payload of each changed by `change`.
fn changed(trace: &[u8], change: impl Fn(u8, &mut Vec<u8>)) -> Vec<u8> {
    let mut out = record::file_header().to_vec();
    for r in record::read(trace).expect("a log").0 {
        let mut p = r.payload.to_vec();
        change(r.kind, &mut p);
        record::append(&mut out, r.kind, &p);
    }
    out
}

#[test]
fn a_trace_of_other_decisions_is_noticed() {
    let trace = some();
    let calls = SweepPolicy::play(&trace).expect("plays").calls;
    assert!(calls > 60, "{calls}");
    // Another key decides otherwise.
    let other = changed(&trace, |kind, p| {
        if kind == HEADER {
            p[5] ^= 1
        }
    });
    assert!(matches!(SweepPolicy::play(&other), Err(BadTrace::Differs { .. })));
    // So does another constant: the window, the first of them.
    let other = changed(&trace, |kind, p| {
        if kind == HEADER {
            let at = p.len() - 21 * 8;
            p[at..at + 8].copy_from_slice(&0.9f64.to_le_bytes());
        }
    });
    assert!(matches!(SweepPolicy::play(&other), Err(BadTrace::Differs { .. })));
}

#[test]
fn what_is_no_trace() {
    let trace = some();
    let play = |t: &[u8]| SweepPolicy::play(t).err();
    assert_eq!(play(&record::file_header()), Some(BadTrace::Header));
    let newer = changed(&trace, |kind, p| {
        if kind == HEADER {
            p[0] = 5
        }
    });
    assert_eq!(play(&newer), Some(BadTrace::Major(5)));
    let short = changed(&trace, |kind, p| {
        if kind == LENGTHS {
            p.clear()
        }
    });
    assert_eq!(play(&short), Some(BadTrace::Header));
    let long = changed(&trace, |kind, p| {
        if kind == LENGTHS {
            *p = Vec::new();
            put_all(p, &[u64::MAX; 40]);
        }
    });
    assert_eq!(play(&long), Some(BadTrace::Layout(BadUnitMap::TooLong)));
    // The 21 constants are the last numbers of the header.
    for value in [f64::NAN, f64::INFINITY, -0.1, PARAM_MAX * 2.0] {
        let wild = changed(&trace, |kind, p| {
            if kind == HEADER {
                let at = p.len() - 8;
                p[at..].copy_from_slice(&value.to_le_bytes());
            }
        });
        assert_eq!(play(&wild), Some(BadTrace::Header), "{value}");
    }
    // The first call joins. A sample cannot be asked for by a job that has not joined.
    let foreign = changed(&trace, |kind, p| {
        if kind == CALLS {
            *p = vec![5, 9]
        }
    });
    assert_eq!(play(&foreign), Some(BadTrace::Call(1)));
    assert!(matches!(play(b"surely no trace at all"), Some(BadTrace::Log(_))));
}

proptest! {
    /// Damage that a checksum does not see gives an error or other results, never a panic.
    #[test]
    fn garbage_never_panics(at: usize, x: u8) {
        let bad = changed(&some(), |kind, p| {
            if kind == CALLS {
                let n = p.len();
                p[at % n] = x
            }
        });
        drop(SweepPolicy::play(&bad));
    }
}

/// The sweep's position stops at `u64::MAX` bytes. Samples that come due after it must be handed out all the
/// same; once they were not, and a pick loaded unit after unit for ever.
#[test]
fn a_sweep_goes_on_at_its_last_position() {
    let long = 1u64 << 62;
    let bytes: Vec<u64> = [long; 3].into_iter().chain([1; 8]).collect();
    let unit_of: Vec<u32> = (0..66).map(|s| s % 11).collect();
    let unit_map = Arc::new(UnitMap::new(&unit_of, bytes).expect("unit_map"));
    let mut policy = SweepPolicy::new(unit_map.clone(), long + long / 2, &key(), SweepParams::default());
    let plan = Plan::all(66).expect("plan");
    let subscribers = [0; 2].map(|_| policy.join(PlanUnits::new(&plan, &unit_map).expect("plan_units")));
    let mut actions = Vec::new();
    for _ in 0..6 {
        subscribers.iter().for_each(|&subscriber| policy.begin(subscriber, Bits::ones(66)));
        for subscriber in subscribers.iter().cycle().take(132) {
            assert!(policy.next(*subscriber, &mut actions).is_some());
        }
        assert!(subscribers.iter().all(|&subscriber| policy.left(subscriber) == 0));
    }
    let loads = actions.iter().filter(|a| matches!(a, CacheAction::Load(u) if *u < 3)).count();
    assert!(loads > 4 && actions.len() < 1000, "{loads} loads of the long ones, {} actions", actions.len());
}

fn length() -> impl Strategy<Value = u64> {
    (any::<u64>(), 0u32..64).prop_map(|(x, short)| x >> short)
}

proptest! {
    /// Lengths that a sum or an `f64` cannot hold are rejected, or swept within the capacity like others.
    #[test]
    fn lengths_may_be_any(
        bytes in proptest::collection::vec(length(), 1..12),
        capacities in [length(), length()],
        all: bool,
    ) {
        let all: u64 = if all { u64::MAX } else { 0 };
        let capacities = capacities.map(|c| c | all);
        let n = u32::try_from(bytes.len()).expect("few");
        let sum: u128 = bytes.iter().map(|&b| u128::from(b)).sum();
        let unit_of: Vec<u32> = (0..n * 6).map(|s| s % n).collect();
        let unit_map = match UnitMap::new(&unit_of, bytes) {
            Ok(unit_map) => Arc::new(unit_map),
            Err(e) => {
                prop_assert!(e == BadUnitMap::TooLong && sum > u128::from(u64::MAX));
                return Ok(());
            }
        };
        let mut policy =
            SweepPolicy::recorded(unit_map.clone(), capacities[0], &key(), SweepParams::default());
        let plan = Plan::all(u64::from(n) * 6).expect("plan");
        let subscribers = [0; 2].map(|_| policy.join(PlanUnits::new(&plan, &unit_map).expect("plan_units")));
        let mut actions = Vec::new();
        for epoch in 0..4 {
            if epoch == 2 {
                policy.set_capacity(capacities[1], &mut actions);
            }
            subscribers.iter().for_each(|&subscriber| policy.begin(subscriber, Bits::ones(u64::from(n) * 6)));
            let mut draw_all = |p: &mut SweepPolicy| {
                subscribers.iter().filter(|&&s| p.next(s, &mut actions).is_some()).count()
            };
            while draw_all(&mut policy) > 0 {
                let s = policy.progress();
                let sum = |a: u64, b: u64| u128::from(a) + u128::from(b);
                let most = u128::from(capacities[epoch / 2]);
                prop_assert_eq!(sum(s.window_bytes_max, s.reserve_bytes_max), most);
                prop_assert!(sum(s.window_bytes, s.reserve_bytes) <= most);
            }
        }
        prop_assert!(SweepPolicy::play(&policy.take_trace()).is_ok());
    }
}

/// A capacity that grows when it is rounded to `f64`.
#[test]
fn a_window_is_no_longer_than_the_cache() {
    let unit_map = Arc::new(UnitMap::new(&[0, 1, 2, 3], vec![1 << 53; 4]).expect("unit_map"));
    for capacity in [(1 << 53) + 3, u64::MAX] {
        let s = SweepPolicy::new(unit_map.clone(), capacity, &key(), SweepParams::default()).progress();
        assert!(s.window_bytes_max <= capacity && s.reserve_bytes_max == capacity - s.window_bytes_max);
    }
}

/// I2.
#[test]
fn a_trace_log_that_is_not_taken_is_cut() {
    let unit_map = unit_map(4, 2);
    let mut policy = SweepPolicy::recorded(unit_map.clone(), 3000, &key(), SweepParams::default());
    let subscriber =
        policy.join(PlanUnits::new(&Plan::all(8).expect("plan"), &unit_map).expect("plan_units"));
    let mut trace_log = TraceLog::new(Vec::new());
    let call = Call::Next { subscriber };
    let result = CallResult {
        actions: vec![crate::residency::CacheAction::Load(0); 9 << 20],
        ..CallResult::default()
    };
    trace_log.append(&unit_map, &call, &result);
    assert!(trace_log.take().len() < 100, "a call that is too long ends the trace_log");
    trace_log.append(&unit_map, &call, &CallResult::default());
    assert!(trace_log.take().is_empty());
    let mut trace = policy.take_trace();
    let whole = SweepPolicy::play(&trace).expect("plays").cut;
    record::append(&mut trace, CUT, &[]);
    assert_eq!((whole, SweepPolicy::play(&trace).expect("plays").cut), (false, true));
}

#[test]
fn a_recording_that_is_ended_says_so_and_the_sweep_goes_on() {
    let unit_map = unit_map(4, 2);
    let mut policy = SweepPolicy::recorded(unit_map.clone(), 3000, &key(), SweepParams::default());
    let subscriber =
        policy.join(PlanUnits::new(&Plan::all(8).expect("plan"), &unit_map).expect("plan_units"));
    policy.begin(subscriber, Bits::ones(8));
    let mut trace = policy.take_trace();
    trace.extend(policy.cut_trace());
    assert!(policy.next(subscriber, &mut Vec::new()).is_some());
    assert!(policy.take_trace().is_empty() && policy.cut_trace().is_empty());
    let played = SweepPolicy::play(&trace).expect("plays");
    assert_eq!((played.calls, played.picks, played.cut), (2, 0, true));
}
