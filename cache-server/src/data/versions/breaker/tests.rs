//! Tests of the circuit breaker: each transition, and properties over any sequence of events.

use super::*;
use proptest::prelude::*;

const MS: fn(u64) -> Duration = Duration::from_millis;

fn opened(now: Instant) -> Breaker {
    let mut breaker = Breaker::default();
    assert_eq!(breaker.report(Outcome::Silent, now), Some(Change::Tripped(COOLDOWN_MIN)));
    breaker
}

#[test]
fn one_silence_opens_and_short_failures_need_three_in_a_row() {
    let now = Instant::now();
    assert_eq!(opened(now).state(), BreakerState::Open);
    for outcome in [Outcome::Failed, Outcome::Overtaken(MS(60))] {
        let mut breaker = Breaker::default();
        for _ in 0..5 {
            assert_eq!(breaker.report(outcome, now), None);
            assert_eq!(breaker.report(outcome, now), None);
            // One answer forgives both: a damaged file is no dead home.
            assert_eq!(breaker.report(Outcome::Answered, now), None);
        }
        assert_eq!((breaker.report(outcome, now), breaker.report(outcome, now)), (None, None));
        assert_eq!(breaker.report(outcome, now), Some(Change::Tripped(COOLDOWN_MIN)));
    }
    let mut breaker = Breaker::default();
    assert!(breaker.report(Outcome::Overtaken(OVERTAKEN_MIN), now).is_some(), "a long silence");
}

#[test]
fn an_open_breaker_admits_one_probe_after_its_cooldown() {
    let now = Instant::now();
    let mut breaker = opened(now);
    assert_eq!(breaker.admit(now + COOLDOWN_MIN - MS(1)), Admission::Leave);
    assert_eq!(breaker.admit(now + COOLDOWN_MIN), Admission::Probe);
    assert_eq!(breaker.state(), BreakerState::HalfOpen);
    assert_eq!(breaker.admit(now + COOLDOWN_MIN + MS(1)), Admission::Leave, "one probe at a time");
    // A lost probe does not keep the breaker half-open for ever.
    assert_eq!(breaker.admit(now + COOLDOWN_MIN + PROBE_MAX), Admission::Probe);
    let back = now + COOLDOWN_MIN + PROBE_MAX + MS(5);
    assert_eq!(breaker.report(Outcome::Answered, back), Some(Change::Closed(back - now)));
    assert_eq!(breaker.admit(back), Admission::Ask);
}

#[test]
fn cooldowns_double_up_to_their_bound_and_are_forgotten_after_a_quiet_time() {
    let mut now = Instant::now();
    let mut breaker = opened(now);
    let mut waits = Vec::new();
    for _ in 0..7 {
        let cooldown = breaker.cooldown;
        waits.push(cooldown.as_secs());
        now += cooldown;
        assert_eq!(breaker.admit(now), Admission::Probe);
        assert_eq!(breaker.report(Outcome::Failed, now), None, "the log has the opening once");
    }
    assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30]);
    now += COOLDOWN_MAX;
    assert_eq!(breaker.admit(now), Admission::Probe);
    assert!(breaker.report(Outcome::Answered, now).is_some());
    let mut flaps = breaker.clone();
    assert_eq!(flaps.report(Outcome::Silent, now + MS(1)), Some(Change::Tripped(COOLDOWN_MAX)));
    assert_eq!(breaker.report(Outcome::Silent, now + COOLDOWN_MAX), Some(Change::Tripped(COOLDOWN_MIN)));
}

#[test]
fn late_outcomes_of_older_calls_do_not_prolong_the_cooldown() {
    let now = Instant::now();
    let mut breaker = opened(now);
    for ms in 1..900 {
        assert_eq!(breaker.report(Outcome::Failed, now + MS(ms)), None);
    }
    assert_eq!(breaker.admit(now + COOLDOWN_MIN), Admission::Probe);
}

fn outcomes() -> impl Strategy<Value = Outcome> {
    prop_oneof![
        Just(Outcome::Answered),
        Just(Outcome::Failed),
        (0u64..1000).prop_map(|ms| Outcome::Overtaken(MS(ms))),
        Just(Outcome::Silent),
    ]
}

proptest! {
    #[test]
    fn any_sequence_keeps_the_invariants(
        steps in prop::collection::vec((0u64..40_000, prop::option::of(outcomes())), 1..200),
    ) {
        let (mut breaker, mut now) = (Breaker::default(), Instant::now());
        let (mut probe_since, mut is_open) = (None::<Instant>, false);
        for (ms, outcome) in steps {
            now += MS(ms);
            match outcome {
                None => match breaker.admit(now) {
                    Admission::Ask => prop_assert_eq!(breaker.state(), BreakerState::Closed),
                    Admission::Leave => prop_assert_ne!(breaker.state(), BreakerState::Closed),
                    Admission::Probe => {
                        // Invariant 2.
                        prop_assert!(probe_since.is_none_or(|at| now - at >= PROBE_MAX));
                        probe_since = Some(now);
                    }
                },
                Some(outcome) => {
                    match breaker.report(outcome, now) {
                        Some(Change::Tripped(cooldown)) => {
                            prop_assert!(!is_open);
                            prop_assert!((COOLDOWN_MIN..=COOLDOWN_MAX).contains(&cooldown));
                            is_open = true;
                        }
                        Some(Change::Closed(_)) => {
                            prop_assert!(is_open);
                            is_open = false;
                        }
                        None => {}
                    }
                    if breaker.state() != BreakerState::HalfOpen {
                        probe_since = None;
                    }
                    if outcome == Outcome::Answered {
                        // Invariant 1.
                        prop_assert_eq!(breaker.state(), BreakerState::Closed);
                    }
                }
            }
            prop_assert_eq!(is_open, breaker.state() != BreakerState::Closed);
            // Invariant 3: whatever happened, a probe is admitted after the longest cooldown.
            let mut later = breaker.clone();
            if later.state() != BreakerState::Closed {
                prop_assert_eq!(later.admit(now + COOLDOWN_MAX.max(PROBE_MAX)), Admission::Probe);
            }
        }
    }
}
