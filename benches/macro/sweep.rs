//! `bench-sweep [--seed 1] [--json FILE]`
//!
//! Simulates the sweep in virtual time: jobs × cache × arrangement × speeds, each with no cache, LRU, pin and
//! Fletch, beside the bound. The figures are the same on every machine. One case is 800 units of 32 samples,
//! with two epochs of the slowest job to warm up and four that count.

use fletch_benches::{arg, usage};
use fletch_core::order::sweep::SweepParams;
use fletch_sim::{ArmKind, Outcome, cases::grid_case, simulate};

const JOBS: [usize; 4] = [1, 2, 4, 8];
const CACHES: [f64; 4] = [0.05, 0.1, 0.2, 0.5];
const HOW: [&str; 2] = ["aligned", "staggered"];
const SPEEDS: [&str; 3] = ["equal", "5%", "mixed"];
const ARMS: [ArmKind; 4] = [ArmKind::Direct, ArmKind::Lru, ArmKind::Pin, ArmKind::Fletch];

/// One simulated cell, with its outcome for each arm.
struct Cell {
    jobs: usize,
    how: &'static str,
    speeds: &'static str,
    cache: f64,
    arms: Vec<Outcome>,
}

impl Cell {
    fn ratio(&self, arm: ArmKind) -> f64 {
        self.arms.iter().find(|o| o.arm == arm).map_or(f64::NAN, |o| o.ratio)
    }

    fn json(&self, o: &Outcome) -> serde_json::Value {
        let round = |x: f64| (x * 1e4).round() / 1e4;
        let near: Vec<f64> = o.near.iter().map(|&x| round(x)).collect();
        serde_json::json!({
            "jobs": self.jobs, "start": self.how, "speeds": self.speeds, "cache": self.cache, "arm": o.arm,
            "backend_per_delivered": round(o.ratio), "bound": round(self.bound()),
            "by_range": round(o.ranged), "near": near, "delivered": o.delivered,
        })
    }

    fn bound(&self) -> f64 {
        self.arms.iter().find(|o| o.arm == ArmKind::Fletch).map_or(f64::NAN, |o| o.bound)
    }
}

fn main() {
    usage(include_str!("sweep.rs"));
    let seed: u64 = arg("seed", 1);
    let json: String = arg("json", String::new());
    let mut cells = Vec::new();
    for jobs in JOBS {
        for how in HOW {
            for speeds in SPEEDS {
                // Stagger and speeds mean nothing for a lone job.
                if jobs == 1 && (how, speeds) != (HOW[0], SPEEDS[0]) {
                    continue;
                }
                for cache in CACHES {
                    let case = grid_case(cache, jobs, how, speeds, seed);
                    let arms = ARMS.iter().map(|&arm| simulate(&case, arm, SweepParams::default())).collect();
                    cells.push(Cell { jobs, how, speeds, cache, arms });
                }
            }
        }
    }
    println!("| jobs | start | speeds | cache | bound | direct | LRU | pin | Fletch | × bound |");
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for c in &cells {
        let [direct, lru, pin, fletch] = ARMS.map(|a| c.ratio(a));
        println!(
            "| {} | {} | {} | {:.0} % | {:.3} | {direct:.3} | {lru:.3} | {pin:.3} | **{fletch:.3}** \
             | {:.3} |",
            c.jobs,
            c.how,
            c.speeds,
            c.cache * 100.0,
            c.bound(),
            fletch / c.bound(),
        );
    }
    let times: Vec<f64> = cells.iter().map(|c| c.ratio(ArmKind::Fletch) / c.bound()).collect();
    let worst = times.iter().copied().fold(0.0, f64::max);
    println!("\n× bound: mean {:.3}, worst {worst:.3}", times.iter().sum::<f64>() / times.len() as f64);
    if !json.is_empty() {
        let rows: Vec<String> =
            cells.iter().flat_map(|c| c.arms.iter().map(|o| c.json(o).to_string())).collect();
        std::fs::write(&json, format!("[\n{}\n]\n", rows.join(",\n")))
            .unwrap_or_else(|e| panic!("{json}: {e}"));
    }
}
