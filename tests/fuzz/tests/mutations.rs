//! Every target over its seeds and some thousand changed seeds, without libFuzzer.
//!
//! A test is a process of its own (nextest), because a target's bounds count the whole process.

use fletch_fuzz::{TARGETS, check, mutate::Mutator, plant, target};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

/// Returns the most inputs of a target, and the time that it may use: `FLETCH_FUZZ_SECONDS`, else one second.
fn effort() -> (u32, Duration) {
    let text = std::env::var("FLETCH_FUZZ_SECONDS").unwrap_or_default();
    text.parse().map_or((4000, Duration::from_secs(1)), |s| (u32::MAX, Duration::from_secs(s)))
}

/// Runs the seeds, which are sound, and then changed seeds.
fn run(name: &str) {
    let target = target(name).expect("a target");
    let seeds = (target.seeds)();
    assert!(!seeds.is_empty());
    // The first use makes what a target needs, outside its bounds.
    for s in &seeds {
        (target.run)(s);
    }
    let sound = seeds.iter().filter(|s| check(target, s)).count();
    assert!(sound > 0, "{name}: no seed is accepted, so nothing behind the first check is tested");
    let (mut mutator, began) = (Mutator::new(1, seeds), Instant::now());
    let (mut inputs, mut accepted) = (0, 0);
    let (inputs_max, at_most) = effort();
    while inputs < inputs_max && began.elapsed() < at_most {
        let input = mutator.input();
        let outcome = catch_unwind(AssertUnwindSafe(|| check(target, &input)));
        match outcome {
            Ok(yes) => accepted += u32::from(yes),
            Err(_) => {
                let file = std::env::temp_dir().join(format!("fletch-fuzz-{name}"));
                std::fs::write(&file, &input).expect("a file for the input");
                panic!("{name}: input {inputs} is in {}", file.display());
            }
        }
        inputs += 1;
    }
    println!("{name}: {inputs} inputs, {accepted} accepted");
}

/// Looks for the planted bug of a target. Returns after how many inputs it was found.
fn find(name: &str, at_most: Duration) -> Option<u32> {
    let target = target(name).expect("a target");
    let seeds = (target.seeds)();
    for s in &seeds {
        (target.run)(s);
    }
    plant::arm();
    for s in &seeds {
        (target.run)(s);
    }
    let (mut mutator, began, mut inputs) = (Mutator::new(1, seeds), Instant::now(), 0);
    while began.elapsed() < at_most {
        let input = mutator.input();
        if let Err(why) = catch_unwind(AssertUnwindSafe(|| (target.run)(&input))) {
            let why = why.downcast_ref::<&str>().map_or_else(
                || why.downcast_ref::<String>().cloned().unwrap_or_default(),
                |s| (*s).to_owned(),
            );
            assert!(why.contains(plant::WORDS), "{name}: another panic: {why}");
            return Some(inputs);
        }
        inputs += 1;
    }
    None
}

macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            run(stringify!($name));
        })*

        #[test]
        fn every_target_is_tested() {
            let tested = [$(stringify!($name)),*];
            assert_eq!(TARGETS.iter().map(|t| t.name).collect::<Vec<_>>(), tested);
        }
    };
}

targets!(
    log,
    ledger,
    trace,
    registrations,
    record,
    consumption,
    documents,
    tables,
    selection,
    tar,
    slab,
    frames,
    bodies,
    ranges,
    names,
    settings,
    tokens,
    requests,
    s3,
    hits,
    origin,
    journal,
    case,
);

/// `make accept-fuzz` finds the planted bug of each target. These are found without coverage, too.
#[test]
fn planted_bugs_are_found() {
    let names = std::env::var("FLETCH_FUZZ_TARGETS").unwrap_or_else(|_| "frames log".to_owned());
    for name in names.split(' ') {
        let found = find(name, effort().1.max(Duration::from_secs(5)));
        println!("{name}: {found:?}");
        assert!(found.is_some(), "{name}: the planted bug was not found");
    }
}
