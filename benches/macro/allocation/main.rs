//! `bench-allocation [--cases contest,scan,verdicts,predictions] [--chunks 800] [--link-mib-per-s 10]
//!                   [--passes 10] [--rounds 1] [--interval 2s] [--arms fletch,equal,lru] [--json FILE]
//!                   [--compute 0.8,1.5,3] [--tiers origin,disk,queue]`
//!
//! What the server says of running jobs, and how it divides the disk among them. Jobs with emulated
//! accelerators (absolute deadlines) read packed datasets, each over a link of its own, on a real server.
//!
//! - `contest`: two jobs, and a disk with room for half of one dataset (`contest.rs`);
//! - `scan`: three jobs on one dataset, one on another, and a scan of a large third one (`scan.rs`);
//! - `verdicts`: a bottleneck that moves without notice (`verdicts.rs`);
//! - `predictions`: the rate that is predicted for another part in the cache, and the rate then
//!   (`predictions.rs`).
//!
//! `--chunks`, `--passes`, `--rounds` and `--arms` are those of `contest`; `--compute` is that of
//! `predictions`, and `--tiers` of `verdicts`: whose bottlenecks are played. Ends with status 1 where a case
//! misses its targets.

mod contest;
mod predictions;
mod rig;
mod scan;
mod throttle;
mod training;
mod verdicts;

use fletch_benches::{arg, usage};

/// Prints a figure beside its least value. Returns whether it is missed.
fn judge(what: &str, figure: f64, least: f64) -> bool {
    // An arm that was not played has no figure.
    let missed = figure < least;
    if !figure.is_nan() {
        println!("{what}: {figure:.3}, at least {least}: {}", if missed { "MISSED" } else { "met" });
    }
    missed
}

fn main() {
    usage(include_str!("main.rs"));
    let cases: String = arg("cases", "contest,scan,verdicts,predictions".to_owned());
    let tiers: String = arg("tiers", "origin,disk,queue".to_owned());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("runtime");
    let mut missed = false;
    for case in cases.split(',') {
        println!("\n## {case}\n");
        missed |= match case {
            "contest" => contest::run(&runtime),
            "scan" => runtime.block_on(scan::run()),
            "verdicts" => runtime.block_on(verdicts::run(&tiers)),
            "predictions" => runtime.block_on(predictions::run()),
            _ => {
                eprintln!("--cases: there is no case {case}; see --help");
                std::process::exit(2);
            }
        };
    }
    if missed {
        std::process::exit(1);
    }
}
