//! Traces of sweeps, which `fletch simulate` plays.

use super::{golden_json, unhex};
use crate::{plant, repair};
use fletch_core::{
    Hash, Root,
    order::{
        SweepPolicy,
        sweep::{SweepParams, trace::BadTrace},
    },
    plan::{
        Plan,
        bits::Bits,
        key::OrderKey,
        unit_map::{PlanUnits, UnitMap},
    },
};
use std::sync::Arc;

pub fn seeds() -> Vec<Vec<u8>> {
    let golden = golden_json("epochs/trace.json");
    let mut whole = unhex(&golden["begin"]);
    golden["records"].as_array().into_iter().flatten().for_each(|r| whole.extend(unhex(r)));
    vec![whole, recorded()]
}

/// Returns the trace of a short sweep with two subscribers.
fn recorded() -> Vec<u8> {
    let unit_of: Vec<u32> = (0..24).map(|s| s % 6).collect();
    let units = Arc::new(UnitMap::new(&unit_of, vec![1000; 6]).expect("six units"));
    let key = OrderKey::new(Root(Hash::of(b"root")), Hash::of(b"plan"), 1, 0);
    let mut sweep = SweepPolicy::recorded(Arc::clone(&units), 3000, &key, SweepParams::default());
    let plan = Plan::all(24).expect("a plan");
    let joined = [0; 2].map(|_| sweep.join(PlanUnits::new(&plan, &units).expect("units of the plan")));
    let mut actions = Vec::new();
    joined.iter().for_each(|&s| sweep.begin(s, Bits::ones(24)));
    for round in 0..20 {
        let subscriber = joined[round % 2];
        let pick = sweep.next(subscriber, &mut actions);
        if pick.is_none() {
            sweep.advance(&mut actions);
        }
    }
    sweep.lost(2);
    sweep.set_capacity(2000, &mut actions);
    sweep.leave(joined[0]);
    sweep.take_trace()
}

/// Plays the trace twice: both end in the same way.
pub fn run(input: &[u8]) -> bool {
    let file = repair::log(input);
    let summary = || SweepPolicy::play(&file).map(|p| (p.calls, p.picks, p.cut));
    let played = summary();
    assert_eq!(played, summary(), "a trace plays differently the second time");
    plant::bug(matches!(played, Err(BadTrace::Differs { call, .. }) if call > 4));
    played.is_ok()
}
