//! Promises for any observation, and the edges.

use crate::benefit::{BatchObservation, NotMeasured, Served, Window, estimate};
use proptest::prelude::*;

fn window<'a>(batches: &'a [BatchObservation], served: &'a [Served], decodes_in_loop: bool) -> Window<'a> {
    Window {
        batches,
        link: served,
        disk: served,
        since: 0.0,
        first_byte: 0.01,
        samples: 32.0,
        decodes_in_loop,
    }
}

fn batch(step: u64, ended: f64) -> BatchObservation {
    BatchObservation {
        step,
        rank: 0,
        lane: 0,
        ended,
        waited: 0.0,
        received: None,
        prepared: 0.0,
        stepped: 0.1,
        device: None,
        origin: 0.0,
        disk: 0.0,
        queue: 0.0,
        hit_part: 1.0,
    }
}

#[test]
fn few_steps_and_a_clock_that_stands_are_said() {
    assert_eq!(estimate(&window(&[], &[], false)).err(), Some(NotMeasured::FewSteps { steps: 0 }));
    let one = [batch(7, 1.0)];
    let said = estimate(&window(&one, &[], false)).expect_err("one step").to_string();
    assert_eq!(said, "not measured yet: 1 of 8 steps");
    let stands: Vec<BatchObservation> = (0..20).map(|step| batch(step, 5.0)).collect();
    assert_eq!(estimate(&window(&stands, &[], false)).err(), Some(NotMeasured::NoTime));
}

#[test]
fn a_job_that_never_waits_and_fetches_nothing_is_measured() {
    let steps: Vec<BatchObservation> = (0..64).map(|step| batch(step, 1.0 + step as f64 * 0.1)).collect();
    let e = estimate(&window(&steps, &[], false)).expect("steps");
    assert!(e.is_sure && (e.most_rate - 320.0).abs() < 1.0, "{e:?}");
    assert_eq!((e.origin_rate, e.disk_rate), (None, None));
    assert!((e.rate_at(0.5) - e.most_rate).abs() < 1.0, "nothing is known to be slower: {e:?}");
}

fn seconds() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), 1e-6..1e4]
}

fn observations() -> impl Strategy<Value = Vec<BatchObservation>> {
    let one = (
        (0u64..40, 0u32..3, 0u32..5, 0.0..1e6f64),
        (seconds(), seconds(), seconds(), proptest::option::of(seconds())),
        (seconds(), seconds(), seconds(), 0.0..=1.0f64),
        proptest::option::of(seconds()),
    );
    let made =
        one.prop_map(|((step, rank, lane, ended), (waited, prepared, stepped, device), rest, received)| {
            let (origin, disk, queue, hit_part) = rest;
            BatchObservation {
                step,
                rank,
                lane,
                ended,
                waited,
                received,
                prepared,
                stepped,
                device,
                origin,
                disk,
                queue,
                hit_part,
            }
        });
    proptest::collection::vec(made, 0..200)
}

proptest! {
    /// I2, whatever a client says.
    #[test]
    fn numbers_are_finite_and_parts_add_up_to_one(
        batches in observations(),
        served in proptest::collection::vec((0.0..1e6f64, seconds(), 0.0..1e4f64), 0..60),
        in_loop: bool,
    ) {
        let served: Vec<Served> = served
            .into_iter()
            .map(|(start, took, samples)| Served { start, end: start + took, samples })
            .collect();
        if let Ok(e) = estimate(&window(&batches, &served, in_loop)) {
            let p = e.parts;
            for number in [e.rate, e.most_rate, e.overlap, e.latency, p.compute, p.preparation, p.fetch] {
                prop_assert!(number.is_finite() && number >= 0.0, "{:?}", e);
            }
            prop_assert!((p.compute + p.preparation + p.fetch - 1.0).abs() < 1e-6, "{:?}", e);
            let mut before = e.rate;
            for cached in [0.2, 0.5, 0.8, 1.0] {
                let rate = e.rate_with_more(cached);
                let is_disk = e.disk_rate.is_some_and(|disk| disk / cached <= rate * (1.0 + 1e-9));
                prop_assert!(rate >= before * (1.0 - 1e-9) || is_disk, "{} of {:?}", cached, e);
                before = rate;
            }
            for cached in [0.0, 0.5, 1.0] {
                prop_assert!(e.rate_at(cached) >= 0.0 && e.rate_at(cached).is_finite(), "{:?}", e);
            }
        }
    }
}
