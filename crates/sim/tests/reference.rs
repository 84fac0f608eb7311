//! The simulator agrees with the reference, an independent program that was written before it: origin bytes
//! per delivered byte, and bound, of the thirteen main rows, of the odd cases, and of every tenth case of the
//! grid. 800 units of 32 samples, whole epochs.

use fletch_core::order::sweep::SweepParams;
use fletch_sim::{ArmKind, Case, cases, simulate};

/// Largest distance of a figure from the reference's.
const WITHIN: f64 = 0.01;

/// Compares means over `seeds` seeds with figures: origin bytes per delivered byte, and bound.
fn check(cases: Vec<Case>, seeds: u64, figures: &[(&str, f64, f64)]) {
    assert_eq!(cases.len(), figures.len());
    let mut wrong = Vec::new();
    for (mut case, &(name, backend, bound)) in cases.into_iter().zip(figures) {
        assert_eq!(case.name, name);
        let (mut ratio, mut least) = (0.0, 0.0);
        for seed in 0..seeds {
            case.seed += seed;
            let o = simulate(&case, ArmKind::Fletch, SweepParams::default());
            println!("{}", fletch_sim::table::line(&o));
            (ratio, least) = (ratio + o.ratio / seeds as f64, least + o.bound / seeds as f64);
        }
        if (ratio - backend).abs() > WITHIN || (least - bound).abs() > WITHIN / 2.0 {
            wrong.push(format!(
                "{name} {}: {ratio:.3} for {backend}, bound {least:.3} for {bound}",
                case.cache
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn main_rows() {
    check(
        cases::rows(800, 32, 1),
        1,
        &[
            ("1 lone", 0.950, 0.950),
            ("1 lone", 0.800, 0.800),
            ("4 equal aligned", 0.242, 0.237),
            ("4 equal staggered", 0.243, 0.237),
            ("4 equal staggered", 0.233, 0.225),
            ("4 equal staggered", 0.208, 0.200),
            ("8 equal staggered", 0.123, 0.119),
            ("1/1.02/.98/1.05 staggered", 0.255, 0.246),
            ("1/1/1/2 staggered", 0.376, 0.360),
            ("1/1.3/2/4", 0.475, 0.458),
            ("1/1.3/2/4", 0.400, 0.386),
            ("8 at .97-1.1 staggered", 0.112, 0.109),
            ("1/4", 0.743, 0.720),
        ],
    );
}

/// Compares means of a few seeds with the reference's means of eight seeds, and of 48 for the job that runs
/// in bursts. A single seed is up to .035 from that (ADR 10; benches/log/sweep-policy.md).
#[test]
fn odd_cases() {
    check(
        cases::extras(),
        5,
        &[
            ("4, one pauses 7% twice", 0.237, 0.226),
            ("4, one pauses .8 and .5", 0.253, 0.238),
            ("1/1/2, leader pauses", 0.483, 0.423),
            ("late joins at 3.37, 4.77", 0.282, 0.272),
            ("leaves at 3.37, 4.77", 0.345, 0.335),
            ("2 x 60% of samples", 0.773, 0.504),
            ("2 x 60% of units", 0.671, 0.511),
            ("60% samples, 60% units, all", 0.478, 0.256),
            ("sizes 8..128", 0.234, 0.225),
            ("sizes 8..128, 5% speeds", 0.242, 0.233),
            ("2 + a strict reader", 0.541, 0.267),
            ("1 + two strict readers", 0.800, 0.267),
            ("units of 8, 1/1.3/2/4", 0.452, 0.434),
            ("units of 128, 1/1.3/2/4", 0.456, 0.434),
            ("single samples, 4 staggered", 0.234, 0.225),
            ("1/1/4, the 4 runs 10%", 0.498, 0.375),
        ],
    );
}

/// One cache size after the other. The rest of the grid was compared by hand (ADR 10;
/// benches/log/sweep-policy.md).
#[test]
fn every_tenth_of_the_grid() {
    check(
        cases::grid(1).into_iter().step_by(10).collect(),
        1,
        &[
            ("1 aligned equal", 0.950, 0.950),
            ("2 staggered mixed", 0.553, 0.537),
            ("3 aligned equal", 0.322, 0.317),
            ("3 pause 5%", 0.380, 0.328),
            ("4 staggered mixed", 0.470, 0.458),
            ("8 aligned equal", 0.121, 0.119),
            ("8 pause 5%", 0.163, 0.125),
            ("16 staggered mixed", 0.142, 0.114),
            ("1 aligned equal", 0.900, 0.900),
            ("2 staggered mixed", 0.531, 0.509),
            ("3 aligned equal", 0.308, 0.300),
            ("3 pause 5%", 0.359, 0.306),
            ("4 staggered mixed", 0.449, 0.434),
            ("8 aligned equal", 0.116, 0.113),
            ("8 pause 5%", 0.145, 0.117),
            ("16 staggered mixed", 0.123, 0.108),
            ("1 aligned equal", 0.800, 0.800),
            ("2 staggered mixed", 0.469, 0.452),
            ("3 aligned equal", 0.274, 0.267),
            ("3 pause 5%", 0.321, 0.263),
            ("4 staggered mixed", 0.398, 0.386),
            ("8 aligned equal", 0.103, 0.100),
            ("8 pause 5%", 0.128, 0.101),
            ("16 staggered mixed", 0.101, 0.096),
            ("1 aligned equal", 0.500, 0.500),
            ("2 staggered mixed", 0.291, 0.283),
            ("3 aligned equal", 0.171, 0.167),
            ("3 pause 5%", 0.201, 0.143),
            ("4 staggered mixed", 0.248, 0.241),
            ("8 aligned equal", 0.064, 0.062),
            ("8 pause 5%", 0.079, 0.061),
            ("16 staggered mixed", 0.065, 0.060),
        ],
    );
}
