//! What a server says of programs that read a mount and know nothing of Fletch.

use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use fletch_tests::bins::{command, run, stdout};
use fletch_tests::fixture::Site;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use serde_json::Value;
use std::fs;
use std::time::{Duration, Instant};

const FILES: u64 = 30;
const FILE_BYTES: usize = 64 << 10;
/// What one stream of the origin carries in a second: a file takes about 100 ms.
const STREAM_BYTES_PER_S: u64 = 640 << 10;
/// What the program computes after each file.
const THINK: Duration = Duration::from_millis(60);
/// A mount announces itself every 10 s.
const ANNOUNCED: Duration = Duration::from_secs(15);

fn bytes(seed: u64) -> Vec<u8> {
    let mut out = vec![0; FILE_BYTES];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

/// A cold pass with pauses has a bound. The same files once more come from the kernel's page cache.
#[test]
fn a_mount_has_a_bound_while_it_reads_and_no_gain_when_the_kernel_serves_it() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let slow = EmulatorConfig { stream_bytes_per_s: Some(STREAM_BYTES_PER_S), ..EmulatorConfig::default() };
    let origin = OriginEmulator::start(slow, Backing::empty());
    let name = |i: u64| format!("d{}/f{i:04}", i % 3);
    (0..FILES).for_each(|i| origin.insert(&format!("set/{}", name(i)), bytes(i)));
    let scratch = tempfile::tempdir().expect("scratch");
    let config = scratch.path().join("fletch.toml").display().to_string();
    let text = format!(
        "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nregion = \"x\"\nallow_http = true\n\
         credentials = \"anonymous\"\n",
        origin.uri(),
        origin.endpoint()
    );
    fs::write(&config, text).expect("config");
    let site = Site::start(&["--config", &config]);
    let (uri, tables) = (format!("{}/set", origin.uri()), format!("{}/tables", origin.uri()));
    let mut index = command("fletch");
    index.args(["index", &uri, "--to", &tables, "--config", &config, "--state-dir"]);
    run(index.arg(site.place("index-state")));
    site.register("set", &uri, &tables);
    let mount = site.mount("set", "plain", &[]);
    let benefit = || site.json("/v1/mounts")["mounts"][0]["benefit"].clone();
    until("it is announced", ANNOUNCED, || {
        site.json("/v1/mounts")["mounts"][0]["reads"]["reads"].as_u64() == Some(0)
    });
    assert_eq!(benefit(), Value::Null, "once tells nothing");

    let read = |think: Duration| {
        let begun = Instant::now();
        for i in 0..FILES {
            assert!(fs::read(mount.dir.join(name(i))).expect("a file") == bytes(i));
            std::thread::sleep(think);
        }
        begun.elapsed()
    };
    let took = read(THINK);
    let is = |state: &str| benefit()["state"].as_str() == Some(state);
    until("it is seen to read", ANNOUNCED, || is("reading"));
    let seen = benefit();
    let number = |field: &str| seen[field].as_u64().expect("bytes a second") as f64;
    let (rate, most) = (number("rate"), number("most_rate"));
    let all = (FILES * FILE_BYTES as u64) as f64;
    eprintln!("{took:?}: {rate} and at most {most} bytes a second");
    // Files have one READ each. So all pauses but the last are think time, and so is what the kernel takes.
    let pauses = (THINK * u32::try_from(FILES - 1).expect("few")).as_secs_f64();
    assert!((all / took.as_secs_f64()..=all / pauses).contains(&most), "{most}, {took:?}");
    assert!(rate < 0.8 * most && rate >= all / took.as_secs_f64(), "it waits: {seen}");
    let status = || {
        let mut status = command("fletch");
        stdout(&run(status.args(["status", "--server", &site.url])))
    };
    assert!(status().contains("/s  at most "), "{}", status());

    let (requests, again) = (origin.counts().get, read(Duration::ZERO));
    assert!(again < took / 4, "the pages are cached: {again:?}");
    until("the kernel is seen to serve it", ANNOUNCED, || is("kernel"));
    assert_eq!(benefit(), serde_json::json!({"state": "kernel"}));
    assert!(status().contains("  no gain: page cache  "), "{}", status());
    assert_eq!(origin.counts().get, requests);
    mount.stop();
}
