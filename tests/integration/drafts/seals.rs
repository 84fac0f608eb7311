//! The server lists datasets, and seals drafts.

use crate::{Bucket, bytes, content};
use fletch_testkit::{EmulatorConfig, Latency};
use fletch_tests::bins::run;
use fletch_tests::require::{Need, have};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn objects_that_changed_block_a_seal_and_nothing_is_left_out() {
    let mut bucket = Bucket::new(content());
    bucket.is_right("c0/f03");
    bucket.emulator.insert("set/c0/f00", bytes(55, 10));
    let object = format!("{}/bucket/set/c2/f02", bucket.emulator.endpoint());
    run(Command::new("curl").args(["-sS", "--fail", "-X", "DELETE", &object]));
    let refused = bucket.fletch(&["seal", "set"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(1), "{refused:?}");
    for word in ["blocked: 2 objects changed", "c0/f00", "c2/f02", "fletch refresh set"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    assert!(bucket.site.json("/v1/datasets/set/versions/latest")["draft"] == true);
    assert_eq!(bucket.site.json("/v1/datasets/set/seal")["state"], "blocked");
    let is_told = |bucket: &Bucket| {
        let problems = bucket.site.json("/v1/dashboard")["problems"].to_string();
        (problems.contains("FletchRefreshFailed"), bucket.site.metric("fletch_refresh_failed").to_string())
    };
    assert_eq!(is_told(&bucket), (true, "1".to_owned()));
    // The refresh heals it. What the first seal read is not read again.
    bucket.all.insert("c0/f00".into(), bytes(55, 10));
    bucket.all.remove("c2/f02");
    bucket.ok(&["refresh", "set", "--allow-loss", "10%"]);
    assert_eq!(is_told(&bucket), (false, "0".to_owned()), "another version has taken its place");
    let sealing = bucket.seal();
    assert_eq!(
        (&sealing["state"], &sealing["root"]),
        (&json!("done"), &json!(bucket.indexed())),
        "{sealing}"
    );
}

#[test]
fn a_seal_goes_on_after_a_kill_and_reads_nothing_twice() {
    let all: BTreeMap<String, Vec<u8>> = (0..400).map(|i| (format!("f{i:03}"), bytes(i, 20_000))).collect();
    let latency = Latency { median: Duration::from_millis(40), p99: Duration::from_millis(50) };
    let bucket = Bucket::at(EmulatorConfig { first_byte: Some(latency), ..EmulatorConfig::default() }, all);
    let ask = |method: &str| {
        let url = format!("{}/v1/datasets/set/seal", bucket.site.url);
        run(Command::new("curl").args(["-sS", "--fail", "-X", method, "--json", "{}", &url])).stdout
    };
    let begun: Value = serde_json::from_slice(&ask("POST")).expect("JSON");
    assert_eq!(begun["state"], "running", "{begun}");
    let again: Value = serde_json::from_slice(&ask("POST")).expect("JSON");
    assert_eq!(again["started_ns"], begun["started_ns"], "there is one seal of a dataset at a time");
    std::thread::sleep(Duration::from_millis(1_200));
    let mut site = bucket.site;
    site.kill();
    let before = bucket.emulator.counts().get;
    assert!(before > 50, "{before}");
    site.restart();
    let bucket = Bucket { site, ..bucket };
    let sealing = bucket.seal();
    assert_eq!(sealing["root"], bucket.indexed());
    let read = sealing["bytes_read"].as_u64().expect("a number") / 20_000;
    // The journal of the first one had what was read up to its last second.
    assert!(read < 400, "{read} of 400 files were read again, after {before}");
}

/// A URI alone is enough: the server lists, and whoever reads makes the version.
#[test]
fn a_dataset_that_is_put_by_its_uri_is_listed_by_the_server() {
    let bucket = Bucket::new(content());
    let put = |name: &str, uri: &str| -> (u32, Value) {
        let url = format!("{}/v1/datasets/{name}", bucket.site.url);
        let body = json!({ "uri": uri }).to_string();
        let out = Command::new("curl")
            .args(["-sS", "-X", "PUT", "--json", &body, "-w", "%{stderr}%{http_code}", &url])
            .output()
            .expect("curl runs");
        let status = String::from_utf8_lossy(&out.stderr).trim().parse().expect("a status");
        (status, serde_json::from_slice(&out.stdout).expect("JSON"))
    };
    // Nothing is asked of a place that no setting allows.
    let (status, problem) = put("foreign", "s3://elsewhere/set");
    assert_eq!((status, &problem["code"]), (403, &json!("uri_not_allowed")), "{problem}");
    bucket.emulator.reset_counts();
    let (status, listing) = put("new", &bucket.uri());
    assert_eq!((status, &listing["dataset"]), (202, &json!("new")), "{listing}");
    let until = Instant::now() + Duration::from_secs(20);
    while bucket.site.json("/v1/datasets/new/listing")["state"] == "running" {
        assert!(Instant::now() < until, "{}", bucket.site.json("/v1/datasets/new/listing"));
        std::thread::sleep(Duration::from_millis(50));
    }
    let listed = bucket.site.json("/v1/datasets/new/listing");
    assert_eq!((&listed["state"], &listed["names"]), (&json!("done"), &json!(15)), "{listed}");
    assert_eq!(bucket.emulator.counts().bytes_sent, 0, "nothing was read");
    // The draft is the one that the command makes of the same bucket.
    assert_eq!(listed["root"], bucket.root);
    let (status, dataset) = put("new", &bucket.uri());
    assert_eq!((status, &dataset["name"]), (200, &json!("new")), "{dataset}");
    let (status, problem) = put("new", &format!("{}/other", bucket.emulator.uri()));
    assert_eq!((status, &problem["code"]), (409, &json!("conflict")), "{problem}");
    // A prefix without objects has no version, and says why.
    put("empty", &format!("{}/nothing", bucket.emulator.uri()));
    let until = Instant::now() + Duration::from_secs(20);
    let failed = loop {
        let failed = bucket.site.json("/v1/datasets/empty/listing");
        if failed["state"] != "running" {
            break failed;
        }
        assert!(Instant::now() < until, "{failed}");
        std::thread::sleep(Duration::from_millis(50));
    };
    let detail = failed["error"]["detail"].as_str().expect("a reason");
    assert!(failed["state"] == "failed" && detail.contains("nothing"), "{failed}");
    let sealed: Value = serde_json::from_str(&bucket.ok(&["seal", "new", "--json"])).expect("JSON");
    assert_eq!(sealed["root"], bucket.indexed());
}

/// A full disk below the state directory loses what was learned meanwhile, and nothing else.
#[test]
fn a_full_state_disk_costs_reading_again() {
    if !have(&[Need::Root]) {
        return;
    }
    let bucket = Bucket::new(content());
    let mut site = bucket.site;
    site.end();
    let state = site.state_dir();
    let kept = state.with_extension("kept");
    fs::rename(&state, &kept).expect("rename");
    fs::create_dir(&state).expect("mkdir");
    let options = Some("size=8m,mode=700");
    mount(Some("tmpfs"), &state, Some("tmpfs"), MsFlags::empty(), options).expect("tmpfs");
    run(Command::new("cp").arg("-a").arg(kept.join(".")).arg(&state));
    site.restart();
    let filler = state.join("somebody-elses");
    let filled = Command::new("dd").arg("if=/dev/zero").arg(format!("of={}", filler.display())).output();
    assert!(!filled.expect("dd").status.success(), "dd did not fill it");
    let bucket = Bucket { site, ..bucket };
    let all = bucket.all.clone();
    all.keys().for_each(|path| bucket.is_right(path));
    let refused = bucket.fletch(&["seal", "set"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("No space left"), "{said}");
    fs::remove_file(&filler).expect("remove");
    std::thread::sleep(Duration::from_millis(1_500));
    let mut site = bucket.site;
    site.kill();
    site.restart();
    let bucket = Bucket { site, ..bucket };
    all.keys().for_each(|path| bucket.is_right(path));
    let sealing = bucket.seal();
    assert_eq!(sealing["root"], bucket.indexed(), "{sealing}");
    let mut site = bucket.site;
    site.end();
    umount2(&state, MntFlags::MNT_DETACH).expect("unmounted");
    drop(Bucket { site, ..bucket });
}

/// Two names of one place have the same tables. Each seal finds the version, whoever makes it.
#[test]
fn two_datasets_of_one_place_are_sealed_at_once() {
    let latency = Latency { median: Duration::from_millis(20), p99: Duration::from_millis(30) };
    let config = EmulatorConfig { first_byte: Some(latency), ..EmulatorConfig::default() };
    let bucket = Bucket::at(config, content());
    let tables = bucket.tables().display().to_string();
    bucket.site.register("again", &bucket.uri(), &tables);
    for name in ["set", "again"] {
        let url = format!("{}/v1/datasets/{name}/seal", bucket.site.url);
        run(Command::new("curl").args(["-sS", "--fail", "--json", "{}", &url]));
    }
    let ended = |name: &str| {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let now = bucket.site.json(&format!("/v1/datasets/{name}/seal"));
            if now["state"] != "running" {
                return now;
            }
            assert!(Instant::now() < until, "{now}");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    let (one, two) = (ended("set"), ended("again"));
    let root = json!(bucket.indexed());
    assert!(one["root"] == root && two["root"] == root, "{one} {two}");
}
