//! A listing of a million keys: bounded memory, and hardly more requests than pages.
//!
//! The objects are empty, so `fletch index` lists them and reads none.

use crate::bucket::Bucket;
use crate::form::full;
use fletch_testkit::{Backing, EmulatorConfig, KeyOrder, Manners};
use fletch_tests::bins::Running;
use std::fs::File;
use std::time::{Duration, Instant};

/// The most resident memory of a run, in bytes.
const MEMORY_MAX: u64 = 200 << 20;

/// The requests that show whether folders are listed side by side: their names, and a page of 16 of them.
const SPLIT_REQUESTS_MAX: u64 = 20;

/// Returns the peak resident memory of a process; 0 if it has just ended.
fn peak_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()).and_then(|n| n.parse::<u64>().ok());
    kilobytes.unwrap_or(0) << 10
}

fn is_listed_within_bounds(order: KeyOrder) {
    let keys: u64 = if full() { 1_000_000 } else { 20_000 };
    let manners = Manners { order, ..Manners::default() };
    let config = EmulatorConfig { manners, ..EmulatorConfig::default() };
    let bucket = Bucket::over(config, Backing::Generated { keys, bytes: 0 });
    let tables = bucket.user.text("tables");
    let mut command = bucket.user.command(&["index", "s3://bucket/set", "--tables", &tables]);
    let output = || File::create(bucket.user.path("output")).expect("a file");
    command.stdout(output()).stderr(File::create(bucket.user.path("errors")).expect("a file"));
    let begun = Instant::now();
    let mut run = Running::spawn("fletch index", &mut command);
    let mut peak = 0;
    while run.alive() {
        peak = peak.max(peak_bytes(run.pid()));
        std::thread::sleep(Duration::from_millis(5));
    }
    let status = run.wait(Duration::from_secs(1));
    let errors = std::fs::read_to_string(bucket.user.path("errors")).unwrap_or_default();
    assert!(status.success(), "{status}: {errors}");
    let (counts, pages) = (bucket.origin.counts(), keys / 1000);
    println!(
        "{keys} keys, {order:?}: {:.1} s, {} MiB, {} requests for {pages} pages",
        begun.elapsed().as_secs_f64(),
        peak >> 20,
        counts.requests()
    );
    assert!(peak > 0 && peak <= MEMORY_MAX, "{peak} bytes of memory, at most {MEMORY_MAX}");
    assert!(counts.requests() <= pages + pages / 20 + SPLIT_REQUESTS_MAX, "{counts:?}");
    let said = bucket.user.say(&["show", &tables, "--json"]).ok();
    let shown: serde_json::Value = serde_json::from_str(&said.stdout).expect("JSON");
    assert_eq!(shown["entries"].as_u64(), Some(keys), "{shown}");
}

#[test]
fn a_long_listing_takes_bounded_memory() {
    is_listed_within_bounds(KeyOrder::Bytes);
}

#[test]
fn a_long_listing_without_order_takes_bounded_memory() {
    is_listed_within_bounds(KeyOrder::Shuffled);
}
