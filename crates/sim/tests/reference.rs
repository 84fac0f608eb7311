//! The simulator agrees with the figures it was built from (an independent program, written
//! before it): backend per delivered and bound of the thirteen main rows and of the odd cases,
//! 800 units of 32 samples, whole epochs.

use fletch_core::order::substitute::Knobs;
use fletch_sim::{ArmKind, Case, cases, simulate};

/// How far a figure may lie from the reference's.
const WITHIN: f64 = 0.01;

fn check(cases: Vec<Case>, figures: &[(&str, f64, f64)]) {
    assert_eq!(cases.len(), figures.len());
    let mut wrong = Vec::new();
    for (case, &(name, backend, bound)) in cases.iter().zip(figures) {
        assert_eq!(case.name, name);
        let o = simulate(case, ArmKind::Fletch, Knobs::default());
        println!("{}", fletch_sim::table::line(&o));
        if (o.ratio - backend).abs() > WITHIN || (o.bound - bound).abs() > WITHIN / 2.0 {
            wrong.push(format!(
                "{name} {}: {:.3} for {backend}, bound {:.3} for {bound}",
                case.cache, o.ratio, o.bound
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn main_rows() {
    check(
        cases::rows(800, 32, 1),
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
