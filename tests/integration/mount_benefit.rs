//! What a server says of programs that read a mount and know nothing of Fletch.

use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use fletch_tests::bins::{Running, command, run, stdout};
use fletch_tests::fixture::Site;
use fletch_tests::require::{Need, have};
use fletch_tests::watch::until;
use nix::sys::signal::Signal;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

const FILES: u64 = 30;
const FILE_BYTES: usize = 64 << 10;
/// What one stream of the origin carries in a second: a file takes about 100 ms.
const STREAM_BYTES_PER_S: u64 = 640 << 10;
/// What the program computes after each file.
const THINK: Duration = Duration::from_millis(60);
/// A mount announces itself every 10 s.
const ANNOUNCED: Duration = Duration::from_secs(15);
/// Within this, all pages of a few files stay in the page cache for the 10 s between two announcements.
const KEPT: Duration = Duration::from_secs(150);

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
    let all_sets = AllSets::mount(&site);
    let set = all_sets.0.join("set");
    let row = |dir: &Path| {
        let all = site.json("/v1/mounts");
        let rows = all["mounts"].as_array().expect("mounts");
        rows.iter().find(|row| row["dir"].as_str() == dir.to_str()).cloned().unwrap_or_default()
    };
    for dir in [&*mount.dir, &*set] {
        until("it is announced", ANNOUNCED, || row(dir)["reads"]["reads"].as_u64() == Some(0));
        assert_eq!(row(dir)["benefit"], Value::Null, "once tells nothing");
    }

    let read = |dir: &Path, think: Duration| {
        let begun = Instant::now();
        for i in 0..FILES {
            assert!(fs::read(dir.join(name(i))).expect("a file") == bytes(i));
            std::thread::sleep(think);
        }
        begun.elapsed()
    };
    let took = read(&mount.dir, THINK);
    // This one does nothing but read.
    read(&set, Duration::ZERO);
    let is = |dir: &Path, state: &str| row(dir)["benefit"]["state"].as_str() == Some(state);
    let are = |state: &str| is(&mount.dir, state) && is(&set, state);
    until("both are seen to read", 2 * ANNOUNCED, || are("reading"));
    let seen = row(&mount.dir)["benefit"].clone();
    let number = |field: &str| seen[field].as_u64().expect("bytes a second") as f64;
    let (rate, most) = (number("rate"), number("most_rate"));
    let all = (FILES * FILE_BYTES as u64) as f64;
    eprintln!("{took:?}: {rate} and at most {most} bytes a second; {}", row(&set)["benefit"]);
    // Files have one READ each. So all pauses but the last are think time, and so is what the kernel takes.
    let pauses = (THINK * u32::try_from(FILES - 1).expect("few")).as_secs_f64();
    assert!((all / took.as_secs_f64()..=all / pauses).contains(&most), "{most}, {took:?}");
    assert!(rate < 0.8 * most && rate > 0.8 * all / took.as_secs_f64(), "it waits: {seen}");
    assert!(row(&set)["benefit"]["most_rate"].as_f64().is_none_or(|set| set > 2.0 * most), "it never thinks");
    let status = || {
        let mut status = command("fletch");
        stdout(&run(status.args(["status", "--server", &site.url])))
    };
    assert!(status().contains("/s  at most "), "{}", status());

    // The server looks for new versions meanwhile, but reads no file.
    let gets = || {
        let of_files = |(key, n): (String, u64)| key.contains("set/d").then_some(n);
        origin.counts().gets.into_iter().filter_map(of_files).sum::<u64>()
    };
    let requests = gets();
    assert!(requests >= FILES, "{:?}", origin.counts());
    // Machines drop cached pages when they like. So each mount is seen by itself, while none is lost.
    for dir in [&*mount.dir, &*set] {
        until("the kernel is seen to serve it", KEPT, || {
            let again = read(dir, Duration::ZERO);
            assert!(again < took / 2, "the pages are cached: {again:?}");
            is(dir, "kernel")
        });
        let now = status();
        let line = now.lines().find(|line| line.contains(&dir.display().to_string())).expect("a line");
        assert!(line.contains("  no gain: page cache  "), "{now}");
    }
    assert_eq!(gets(), requests);
    mount.stop();
}

/// A process that mounts all datasets of a server. Dropping it ends the process and unmounts.
struct AllSets(PathBuf, Running);

impl AllSets {
    fn mount(site: &Site) -> Self {
        let (dir, ready) = (site.place("all").join("datasets"), site.place("ready-files").join("all"));
        let mut c = command("fletch-mount");
        c.arg("--datasets").arg(&dir).args(["--server", &site.url]).arg("--ready-file").arg(&ready);
        c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut process = Running::spawn("fletch-mount", &mut c);
        until("all datasets are mounted", Duration::from_secs(20), || {
            assert!(process.alive(), "it ended");
            ready.exists()
        });
        AllSets(dir, process)
    }
}

impl Drop for AllSets {
    fn drop(&mut self) {
        self.1.signal(Signal::SIGTERM);
        self.1.wait(Duration::from_secs(26));
    }
}
