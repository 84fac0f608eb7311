//! `fletch simulate` from outside.

use super::common::{Fixture, keys};
use std::fs;

/// A small case, as docs/SIMULATE.md writes them.
const CASE: &str = r#"
name = "two jobs"
units = { count = 60, samples = 8 }
cache = 0.25
warm = 480.0
end = 2400.0
origin = { bandwidth = 1.5, latency = 2.0 }
leased = 16
ahead = 8

[[jobs]]
rate = 1.0

[[jobs]]
rate = 1.0
start = 240.0
pauses = [[700.0, 760.0]]
"#;

#[test]
fn a_case_in_a_file_gives_one_document() {
    let w = Fixture::new();
    fs::write(w.path("case.toml"), CASE).expect("write");
    let v = w.json(&["simulate", "--case", "case.toml", "--arm", "fletch", "--arm", "direct"]);
    assert_eq!(keys(&v), ["format", "major", "minor", "outcomes", "summary"]);
    assert_eq!((v["format"].as_str(), v["major"].as_u64()), (Some("fletch.simulation"), Some(1)));
    let outcomes = v["outcomes"].as_array().expect("a list");
    assert_eq!(outcomes.len(), 2);
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/SIMULATE.md");
    let page = fs::read_to_string(page).expect("SIMULATE.md");
    for key in keys(&outcomes[0]) {
        assert!(page.contains(key), "SIMULATE.md does not name {key}");
    }
    let ratio = |i: usize| outcomes[i]["ratio"].as_f64().expect("a number");
    assert_eq!(ratio(1), 1.0);
    assert!(ratio(0) < 0.6, "{}", ratio(0));
    assert_eq!(v["summary"]["runs"], 2);
    // The same case again, as JSON and as a table, is the same.
    let again = w.run(&["simulate", "--case", "case.toml", "--progress", "plain"]).ok().stdout;
    assert_eq!(again.lines().count(), 2);
    assert!(again.lines().nth(1).expect("a row").contains(&format!("{:.3}", ratio(0))), "{again}");
}

#[test]
fn a_case_that_cannot_be_simulated_is_rejected_before_any_run() {
    let w = Fixture::new();
    fs::write(w.path("odd.toml"), CASE.replace("cache", "cash")).expect("write");
    w.run(&["simulate", "--case", "odd.toml"]).code(1).says("cash").says("docs/SIMULATE.md");
    fs::write(w.path("bad.toml"), CASE.replace("0.25", "1.25")).expect("write");
    let ran = w.run(&["simulate", "--case", "bad.toml", "--json"]).code(1).says("not between 0 and 1");
    assert_eq!(ran.json()["error"]["code"], "failed");
    w.run(&["simulate", "--case", "nowhere.toml"]).code(1).says("nowhere.toml");
    w.run(&["simulate", "--set", "windw=1"]).code(2).says("no such constant").says("window=0.07");
    w.run(&["simulate", "--set", "window=nan"]).code(2).says("between 0 and");
    w.run(&["simulate", "--latency", "1"]).code(2).says("--bandwidth");
    w.run(&["simulate", "rows", "--case", "bad.toml"]).code(2);
}

#[test]
fn a_recorded_trace_replays_to_the_same_result() {
    let w = Fixture::new();
    fs::write(w.path("case.toml"), CASE).expect("write");
    let v = w.json(&["simulate", "--case", "case.toml", "--record", "sweep.trace"]);
    let same = w.json(&["simulate", "--play", "sweep.trace"]);
    assert_eq!(keys(&same), ["calls", "cut", "picks"]);
    let n = |v: &serde_json::Value| v.as_u64().expect("a number");
    assert!(n(&same["picks"]) >= n(&v["outcomes"][0]["delivered"]) && same["cut"] == false);
    assert!(w.run(&["simulate", "--play", "sweep.trace"]).ok().stdout.contains("all results are the same"));
    // Half of it, torn in a record, is still a trace; another file is none.
    let trace = fs::read(w.path("sweep.trace")).expect("read");
    fs::write(w.path("half.trace"), &trace[..trace.len() - 9]).expect("write");
    w.run(&["simulate", "--play", "half.trace"]).ok();
    w.run(&["simulate", "--play", "case.toml"]).code(1).says("case.toml");
    w.run(&["simulate", "rows", "--record", "x.trace"]).code(2).says("one case");
}
