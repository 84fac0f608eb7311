//! A dataset stays readable through mounts while a dataset with the same root lies in a dead bucket.
//!
//! `make accept-neighbour` measures it: 400 files a mount, the first read within a second, native pace
//! afterwards. Without `FLETCH_NEIGHBOUR_FILES` the test reads few files, and its bounds are wide.

use fletch_testkit::{Backing, EmulatorConfig, Fault, OriginEmulator};
use fletch_tests::{
    bins::{command, run},
    fixture::{Mounted, Site},
    require::{Need, have},
};
use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// The files of a dataset, when they are few.
const FILES: usize = 48;
const FILE_BYTES: usize = 40_000;

fn name(i: usize) -> String {
    format!("d{}/f{i:04}", i % 7)
}

fn content(i: usize) -> Vec<u8> {
    let mut bytes = vec![0; FILE_BYTES];
    blake3::Hasher::new().update(&i.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Which dataset was opened first, and how the bucket fails.
struct Case {
    far_first: bool,
    refuses: bool,
}

/// The time of the first read, and of all others.
struct Pace {
    first: Duration,
    others: Duration,
}

fn read(mount: &Mounted, files: impl Iterator<Item = usize>) -> Pace {
    let mut times = files.map(|i| {
        let begun = Instant::now();
        let bytes = fs::read(mount.dir.join(name(i))).unwrap_or_else(|e| panic!("{}: {e}", name(i)));
        assert!(bytes == content(i), "{}: other bytes", name(i));
        begun.elapsed()
    });
    Pace { first: times.next().expect("a file"), others: times.sum() }
}

fn open(site: &Site, dataset: &str) {
    let _ = site.json(&format!("/v1/datasets/{dataset}/versions/latest"));
}

/// Runs a case. Returns the pace through the healthy dataset, through the dead one, and without a fault.
fn run_case(tree: &Path, copy: &Path, files: usize, case: &Case) -> [Pace; 3] {
    let backing = Backing::Directory(copy.to_owned());
    let bucket = OriginEmulator::start(EmulatorConfig::default(), backing);
    let (uri, scratch) = (bucket.uri(), TempDir::with_prefix("fletch-neighbour-").expect("scratch"));
    let config = scratch.path().join("fletch.toml");
    let table = format!(
        "[[origin]]\nprefix = \"{uri}\"\nendpoint = \"{}\"\nregion = \"us-east-1\"\nallow_http = \
            true\ncredentials = \"anonymous\"\n",
        bucket.endpoint()
    );
    fs::write(&config, table).expect("settings");
    let config = config.display().to_string();
    let mut index = command("fletch");
    index.args(["index", &uri, "--to", &uri, "--config", &config, "--state-dir"]).arg(scratch.path());
    run(&mut index);
    let site = Site::start(&["--config", &config]);
    let _ = site.publish("near", tree);
    site.register("far", &uri, &uri);
    let mut order = ["far", "near"];
    if !case.far_first {
        order.reverse();
    }
    order.iter().for_each(|dataset| open(&site, dataset));
    let [far, near] = ["far", "near"].map(|dataset| site.mount(dataset, dataset, &[]));
    // Three cold sets of files: healthy, through the healthy dataset, through the dead one.
    let healthy = read(&near, (0..files).step_by(3));
    let _gone = if case.refuses {
        drop(bucket);
        None
    } else {
        bucket.set_fault("", Fault::Stall, None);
        Some(bucket)
    };
    let through_near = read(&near, (1..files).step_by(3));
    let through_far = read(&far, (2..files).step_by(3));
    let (log, line) = (site.log(), "an origin does not answer");
    let told: Vec<&str> = log.lines().filter(|l| l.contains(line)).collect();
    assert!(!told.is_empty() && told.iter().all(|l| l.contains(&uri)), "the log names the bucket: {log}");
    assert!(told.len() <= 2, "once for a change, not for each chunk: {told:?}");
    assert_eq!(site.metric("fletch_origin_breakers_open"), 1.0);
    [through_near, through_far, healthy]
}

#[test]
fn a_dead_neighbour_costs_one_patience_and_no_error() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let wanted = std::env::var("FLETCH_NEIGHBOUR_FILES").ok().and_then(|n| n.parse::<usize>().ok());
    let files = 3 * wanted.unwrap_or(FILES / 3);
    let (tree, copy) = (TempDir::new().expect("tree"), TempDir::new().expect("copy"));
    for dir in [tree.path(), copy.path()] {
        for i in 0..files {
            let at = dir.join(name(i));
            fs::create_dir_all(at.parent().expect("parent")).expect("mkdir");
            fs::write(at, content(i)).expect("write");
        }
    }
    let first_max = Duration::from_secs(if wanted.is_some() { 1 } else { 10 });
    let mut cases = vec![Case { far_first: true, refuses: false }];
    if wanted.is_some() {
        cases.push(Case { far_first: false, refuses: false });
        cases.push(Case { far_first: true, refuses: true });
        cases.push(Case { far_first: false, refuses: true });
    }
    for case in cases {
        let Case { far_first, refuses } = case;
        // The tables go into the bucket, and each case begins without them.
        fs::remove_dir_all(copy.path().join("fletch")).ok();
        let [near, far, healthy] = run_case(tree.path(), copy.path(), files, &case);
        println!(
            "opened first: {}; the bucket {}: {} files each; healthy {:.0?} + {:.0?}; named near {:.0?} + \
             {:.0?}; named far {:.0?} + {:.0?}",
            if far_first { "far" } else { "near" },
            if refuses { "refuses" } else { "hangs" },
            files / 3,
            healthy.first,
            healthy.others,
            near.first,
            near.others,
            far.first,
            far.others,
        );
        for pace in [&near, &far] {
            assert!(pace.first <= first_max, "the first read took {:?}", pace.first);
        }
        // A reader of the healthy dataset notices nothing. The other one pays a patience, at most thrice.
        let native = healthy.others.max(Duration::from_millis(500));
        assert!(near.others <= 3 * native, "{:?}, healthy {:?}", near.others, healthy.others);
        assert!(far.others <= 3 * native + 2 * first_max, "{:?}, healthy {:?}", far.others, healthy.others);
    }
}
