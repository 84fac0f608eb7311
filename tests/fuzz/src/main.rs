//! Runs one target under libFuzzer (`tests/fuzz/run.sh`).
//!
//! `FLETCH_FUZZ_TARGET` names the target. `FLETCH_FUZZ_SEEDS` names the directory to which its seeds go.
//! `FLETCH_FUZZ_PLANT=1` arms its planted bug.
#![no_main]

use fletch_fuzz::{Target, check, mutate::Mutator, plant, target};
use std::{path::PathBuf, sync::LazyLock};

static TARGET: LazyLock<&'static Target> = LazyLock::new(|| {
    let name = std::env::var("FLETCH_FUZZ_TARGET").unwrap_or_default();
    target(&name).unwrap_or_else(|| panic!("FLETCH_FUZZ_TARGET={name:?} is no target"))
});

fn begin() {
    // The decoders of Parquet panic on damaged files, and the product contains these panics. Only a panic
    // that reaches this file is a find, so the hook must not abort.
    std::panic::set_hook(Box::new(|info| {
        if !info.location().is_some_and(|at| at.file().contains("/parquet-")) {
            eprintln!("{info}");
        }
    }));
    if std::env::var_os("FLETCH_FUZZ_PLANT").is_some() {
        plant::arm();
    }
    let seeds = std::env::var_os("FLETCH_FUZZ_SEEDS").map(PathBuf::from);
    for (i, seed) in (TARGET.seeds)().iter().enumerate() {
        // The first use makes what a target needs, outside its bounds.
        (TARGET.run)(seed);
        if let Some(dir) = &seeds {
            std::fs::write(dir.join(format!("seed-{i:02}")), seed).expect("a seed");
        }
    }
}

static SEEDS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| (TARGET.seeds)());

/// One input in this many is changed by our own mutator, which knows decimal numbers and where parsers turn.
const OWN_CHANGES: u32 = 4;
/// One input in this many is a changed seed. A corpus that grows by thousands of rejected inputs would crowd
/// out the few that a parser accepts.
const SEED_CHANGES: u32 = 8;

libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    if seed % OWN_CHANGES != 0 {
        return libfuzzer_sys::fuzzer_mutate(data, size, max_size);
    }
    let from = if seed % SEED_CHANGES == 0 { SEEDS.clone() } else { vec![data[..size].to_vec()] };
    let changed = Mutator::new(seed.into(), from).input();
    let len = changed.len().min(max_size);
    data[..len].copy_from_slice(&changed[..len]);
    len
});

libfuzzer_sys::fuzz_target!(init: begin(), |input: &[u8]| -> libfuzzer_sys::Corpus {
    check(&TARGET, input);
    libfuzzer_sys::Corpus::Keep
});
