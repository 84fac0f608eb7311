//! `bench-epochs [--cell NAME] [--epochs 3] [--warm 1] [--mb-per-s 600] [--arms fletch,pin,lru,direct]
//!               [--samples 25600] [--sample-bytes 131072 | --data DIR] [--chunk-size 4MiB]
//!               [--cache-size BYTES] [--origin-mb-per-s 400] [--orders DIR]
//!               [--strict-mb-per-s 100] [--json FILE]`
//!
//! Plays cells of the sweep on a real server. Jobs with emulated steps (absolute deadlines) lease whole
//! epochs over a unix socket, verify and acknowledge them. The origin is the emulator, which counts bytes: 25
//! ms to the first byte, 80 MB/s a stream, and 400 MB/s in all unless `--origin-mb-per-s N` or the cell says
//! otherwise. Beside each figure stand the bound, and `fletch simulate` on the same case, with and without
//! leases and picks decided ahead.
//!
//! The cache size counts `memory.max` and `cache.size`. The arms `lru` and `pin` are values of
//! `cache.policy`, read in the strict order; `direct` is a server without a disk and with the least memory.
//! Cells of strict epochs ([`strict`]) come first. A lone job is measured over whole epochs, several jobs
//! between two instants.
//!
//! `--data` takes a tree instead of making one, `--cache-size` a disk size instead of the cell's. `--orders`
//! writes the sample numbers of each job's whole epochs, an epoch a line.

mod cells;
mod consumer;
mod rig;
mod strict;

use cells::{Cell, Dataset};
use fletch_benches::{arg, usage};
use fletch_core::order::sweep::SweepParams;
use fletch_sim::{ArmKind, simulate};
use rig::{Bench, Measured};
use std::path::PathBuf;

const HEAD: &str = "| cell | arm | backend / delivered | simulated | without leases | bound | × bound \
    | worst stall | first batch | time / ideal | server CPU s/GB | delivered GB |
|---|---|---|---|---|---|---|---|---|---|---|---|";

/// Returns a cell's line of the table, and its raw figures.
fn line(bench: &Bench, cell: &Cell, arm: ArmKind, m: &Measured) -> (String, serde_json::Value) {
    let simulated = simulate(&cell.case, arm, SweepParams::default());
    let mut bare = cell.case.clone();
    (bare.ahead, bare.overtake) = (0, 0);
    bare.jobs.iter_mut().for_each(|j| (j.lease, j.leased) = (0, None));
    let without = simulate(&bare, arm, SweepParams::default());
    let or_dash = |x: Option<f64>, unit| x.map_or("–".to_owned(), |x| format!("{x:.2}{unit}"));
    let text = format!(
        "| {} | {} | **{:.3}** | {:.3} | {:.3} | {:.3} | {:.3} | {:.1} % | {} | {} | {:.2} | {:.1} |",
        cell.case.name,
        format!("{arm:?}").to_lowercase(),
        m.ratio,
        simulated.ratio,
        without.ratio,
        simulated.bound,
        m.ratio / simulated.bound,
        m.stalled() * 100.0,
        or_dash(m.first(cell), " s"),
        or_dash(m.times_ideal(cell), ""),
        m.cpu,
        m.delivered as f64 / 1e9
    );
    let waited: Vec<f64> = m.fared.iter().map(|f| f.waited.as_secs_f64() / m.seconds).collect();
    let raw = serde_json::json!({
        "cell": cell.case.name, "cache": cell.case.cache, "packed": cell.packed, "arm": arm,
        "backend_per_delivered": m.ratio, "simulated": simulated.ratio,
        "simulated_without_leases": without.ratio, "bound": simulated.bound, "stalled": waited,
        "first_batch_s": m.first(cell), "times_ideal": m.times_ideal(cell),
        "server_cpu_s_per_gb": m.cpu, "delivered_bytes": m.delivered, "dataset_bytes": bench.bytes(),
    });
    (text, raw)
}

fn main() {
    usage(include_str!("main.rs"));
    let (orders, data): (String, String) = (arg("orders", String::new()), arg("data", String::new()));
    let only: String = arg("cell", String::new());
    let mut bench = Bench {
        scratch: tempfile::TempDir::with_prefix("fletch-bench-").expect("scratch"),
        samples: arg("samples", 25_600),
        sample_bytes: arg("sample-bytes", 128 << 10),
        chunk_size: arg("chunk-size", "4MiB".to_owned()),
        cache_size: Some(arg("cache-size", 0)).filter(|&n| n > 0),
        pace: arg("mb-per-s", 600.0) * 1e6,
        origin_bytes_per_s: arg("origin-mb-per-s", 400.0) * 1e6,
        orders: (!orders.is_empty()).then(|| {
            std::fs::create_dir_all(&orders).expect("a directory for the orders");
            PathBuf::from(orders)
        }),
        packs: !only.contains("indexed"),
        epochs: (arg("warm", 1), arg("epochs", 3)),
    };
    let arms: String = arg("arms", "fletch".to_owned());
    bench.make(&data);
    let pack = bench.pack_units();
    let samples = usize::try_from(bench.samples).expect("samples");
    let dataset = Dataset {
        samples,
        sample_bytes: bench.sample_bytes,
        pack: &pack,
        warm: bench.epochs.0 as f64,
        epochs: bench.epochs.1 as f64,
    };
    println!("{samples} samples of {} bytes; {} chunks in the pack\n", bench.sample_bytes, pack.len());
    let mut raw = strict::rows(&bench, &only, arg("strict-mb-per-s", 100.0) * 1e6);
    println!("{HEAD}");
    for cell in dataset.cells().iter().filter(|c| c.case.name.contains(&only)) {
        for arm in arms.split(',') {
            let arm = match arm {
                "fletch" => ArmKind::Fletch,
                "pin" => ArmKind::Pin,
                "lru" => ArmKind::Lru,
                "direct" => ArmKind::Direct,
                other => panic!("--arms {other}: no such arm; give fletch, pin, lru or direct"),
            };
            let (text, figures) = line(&bench, cell, arm, &bench.measure(cell, arm));
            println!("{text}");
            raw.push(figures);
        }
    }
    let json: String = arg("json", String::new());
    if !json.is_empty() {
        let text = serde_json::to_string_pretty(&raw).expect("json");
        std::fs::write(&json, text).unwrap_or_else(|e| panic!("{json}: {e}"));
    }
}
