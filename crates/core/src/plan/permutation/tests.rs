use super::*;
use crate::{Hash, Root};
use proptest::prelude::*;

fn key(seed: u64) -> OrderKey {
    OrderKey::new(Root(Hash::of(b"root")), Hash::of(b"plan"), seed, 1)
}

/// Asserts that χ² per degree of freedom is within `z` standard deviations of 1.
fn chi2(counts: &[u64], z: f64) {
    let n: u64 = counts.iter().sum();
    let want = n as f64 / counts.len() as f64;
    let x: f64 = counts.iter().map(|&c| (c as f64 - want).powi(2) / want).sum();
    let dof = (counts.len() - 1) as f64;
    let off = (x - dof) / (2.0 * dof).sqrt();
    assert!(off.abs() < z, "χ² {x:.1} at {dof} degrees of freedom: {off:.2} deviations");
}

proptest! {
    #[test]
    fn bijective_with_inverse(seed: u64, n in 1u64..3000) {
        let p = Permutation::new(&key(seed), "order", 0, n);
        let mut seen = vec![false; n as usize];
        for i in 0..n {
            let v = p.at(i);
            prop_assert!(!std::mem::replace(&mut seen[v as usize], true));
            prop_assert_eq!(p.position(v), i);
        }
    }

    #[test]
    fn inverse_on_large_domains(seed: u64, n in 1u64..(1 << 62), at: u64) {
        let p = Permutation::new(&key(seed), "order", 0, n);
        let i = at % n;
        prop_assert!(p.at(i) < n);
        prop_assert_eq!(p.position(p.at(i)), i);
    }
}

#[test]
fn every_permutation_of_few_is_equally_likely() {
    for (n, all) in [(3u64, 6u64), (4, 24), (5, 120), (6, 720)] {
        let mut counts = vec![0u64; all as usize];
        for seed in 0..all * 200 {
            let p = Permutation::new(&key(seed), "order", 0, n);
            let mut left: Vec<u64> = (0..n).collect();
            let mut rank = 0;
            for i in 0..n {
                let at = left.iter().position(|&x| x == p.at(i)).expect("a permutation");
                rank = rank * left.len() + at;
                left.remove(at);
            }
            counts[rank] += 1;
        }
        chi2(&counts, 4.5);
    }
}

#[test]
fn positions_neighbours_and_distances_are_uniform() {
    let n = 10_007u64;
    let (mut cells, mut steps, mut serial) = (vec![0u64; 40 * 40], vec![0u64; 50], Vec::new());
    for seed in 0..20 {
        let p = Permutation::new(&key(seed), "order", seed, n);
        let v: Vec<u64> = (0..n).map(|i| p.at(i)).collect();
        for (i, &x) in v.iter().enumerate() {
            cells[(i * 40 / n as usize) * 40 + (x * 40 / n) as usize] += 1;
        }
        for w in v.windows(2) {
            steps[(((w[1] + n - w[0]) % n) * 50 / n) as usize] += 1;
        }
        let mean = (n - 1) as f64 / 2.0;
        let var = ((n * n - 1) as f64) / 12.0;
        let c: f64 = v.windows(2).map(|w| (w[0] as f64 - mean) * (w[1] as f64 - mean)).sum::<f64>();
        serial.push(c / var / (n - 1) as f64);
    }
    // Positions of a permutation are slightly *too* even for χ², so only excess matters.
    chi2(&cells, 4.5);
    chi2(&steps, 4.5);
    let s = serial.iter().sum::<f64>() / serial.len() as f64;
    assert!(s.abs() < 4.5 / (20.0 * n as f64).sqrt(), "serial correlation {s}");
}

#[test]
fn fixed_points_are_as_rare_as_they_should_be() {
    let fixed: u64 = (0..2000)
        .map(|seed| {
            let p = Permutation::new(&key(seed), "order", 0, 1000);
            (0..1000).filter(|&i| p.at(i) == i).count() as u64
        })
        .sum();
    // Poisson with mean 1 each: 2000 ± 4.5·√2000.
    assert!(fixed.abs_diff(2000) < 202, "{fixed}");
}
