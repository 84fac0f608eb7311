//! I6: whatever one caller does, probes are answered, memory stays bounded, and no other tenant is refused.
//!
//! The short form runs in `make test`; `make accept-attacks` runs the full one, with 10,000 idle connections.

use fletch_tests::attacks::{
    Attack, Batches, Descriptors, EndlessBodies, Fortress, Idle, InventedJobs, LongBodies, Report,
    SlowBodies, SlowHeads, SlowReaders, Target, besiege,
};
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// `memory.max`, `tables.memory`, and what OPERATIONS grants besides.
const RSS_MAX: u64 = (64 + 16 + 32) * MIB;

fn full() -> bool {
    std::env::var_os("FLETCH_ATTACKS").is_some_and(|form| form == "full")
}

/// Returns the number for the short form or for the full one.
fn many(short: usize, of_full: usize) -> usize {
    if full() { of_full } else { short }
}

fn time() -> Duration {
    Duration::from_secs(if full() { 20 } else { 3 })
}

fn check(report: &Report) {
    println!("{report}");
    assert!(report.probe_faults.is_empty(), "{report}\n{:#?}", report.probe_faults);
    assert!(report.refusals.is_empty(), "{report}\n{:#?}", report.refusals);
    assert!(report.livez.iter().all(|took| *took < Duration::from_secs(1)), "{report}");
    assert!(report.rss[1] <= RSS_MAX, "{report}");
}

/// The attacks on connections, heads, bodies and replies.
fn attacks(target: &Target) -> Vec<(Target, Box<dyn Attack>)> {
    let of = |attack: Box<dyn Attack>| (target.clone(), attack);
    vec![
        of(Box::new(Idle::new(many(600, 10_000), false))),
        of(Box::new(Idle::new(many(200, 2_000), true))),
        of(Box::new(SlowHeads::new(many(200, 1_000), 20 << 10))),
        of(Box::new(SlowBodies::new(many(50, 200), 4 << 20, 1 << 20))),
        of(Box::new(EndlessBodies::new(many(8, 50)))),
        of(Box::new(Batches::attack(many(8, 50)))),
        of(Box::new(LongBodies::attack(many(4, 20)))),
        of(Box::new(InventedJobs::attack(many(16, 100)))),
        of(Box::new(SlowReaders::new(many(50, 200)))),
        of(Box::new(Descriptors::new(many(16, 100)))),
    ]
}

#[test]
fn i6_a_stranger_shuts_nobody_out() {
    let of = Fortress::start(&["--limits-connections", if full() { "4096" } else { "256" }]);
    check(&besiege(&of, attacks(&of.as_stranger()), time()));
}

#[test]
fn i6_a_tenant_shuts_nobody_else_out() {
    let of = Fortress::start(&["--limits-connections", if full() { "4096" } else { "256" }]);
    check(&besiege(&of, attacks(&of.as_tenant()), time()));
}

#[test]
fn i6_descriptors_that_take_long_to_close_shut_nobody_out() {
    let of = Fortress::start(&[]);
    for target in [of.as_stranger(), of.as_tenant()] {
        let attack: Box<dyn Attack> = Box::new(Descriptors::new(many(16, 100)));
        check(&besiege(&of, vec![(target, attack)], time()));
    }
}
