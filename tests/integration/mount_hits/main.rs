//! A mount over the unix socket of its server: its threads ask for hits by themselves, and nothing that hangs
//! holds them.

mod slabs;

use fletch_testkit::{Backing, EmulatorConfig, Fault, OriginEmulator};
use fletch_tests::{
    bins::{command, run},
    calls::Calls,
    cgroup::Memory,
    fixture::{Mounted, Site},
    require::{Need, have},
    watch::until,
};
use nix::sys::{signal::Signal, statvfs::statvfs};
use serde_json::Value;
use std::{
    fs,
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

const FILES: usize = 96;
/// The first of them are read before the origin hangs.
const HERE: usize = 32;
const FILE_BYTES: usize = 60_000;
/// How long a read waits for an origin that hangs.
const IO_TIMEOUT: Duration = Duration::from_secs(8);
/// The bound of a request that needs no bytes: 0.1 s, and what a busy machine adds.
const SOON: Duration = Duration::from_millis(1500);

fn name(i: usize) -> String {
    format!("d{}/f{i:04}", i % 5)
}

fn content(i: usize) -> Vec<u8> {
    let mut bytes = vec![0; FILE_BYTES];
    blake3::Hasher::new().update(&i.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Starts a server of a bucket, which listens on its socket. Returns it with the directory of its settings.
fn serve(bucket: &OriginEmulator) -> (Site, TempDir) {
    (0..FILES).for_each(|i| bucket.insert(&format!("set/{}", name(i)), content(i)));
    let scratch = tempfile::tempdir().expect("scratch");
    let config = scratch.path().join("fletch.toml");
    let table = format!(
        "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nregion = \"x\"\nallow_http = true\n\
         credentials = \"anonymous\"\n",
        bucket.uri(),
        bucket.endpoint()
    );
    fs::write(&config, table).expect("settings");
    let config = config.display().to_string();
    let timeout = format!("--io-timeout={}s", IO_TIMEOUT.as_secs());
    let site = Site::start(&["--config", &config, &timeout]);
    let (uri, tables) = (format!("{}/set", bucket.uri()), format!("{}/tables", bucket.uri()));
    let mut index = command("fletch");
    index.args(["index", &uri, "--to", &tables, "--config", &config, "--state-dir"]);
    run(index.arg(site.place("index-state")));
    site.register("set", &uri, &tables);
    (site, scratch)
}

fn mount(site: &Site, job: &str) -> Mounted {
    let socket = format!("unix:{}", site.socket().display());
    site.mount_from(&socket, "set", job, &["--threads", "2", "--io-timeout", "8s"])
}

fn read(mount: &Mounted, i: usize) {
    let bytes = fs::read(mount.dir.join(name(i))).unwrap_or_else(|e| panic!("{}: {e}", name(i)));
    assert!(bytes == content(i), "{}: other bytes", name(i));
}

/// Hits of mounts that the server answered with bytes.
fn hits(site: &Site) -> u64 {
    let of = |(series, n): (&String, &f64)| {
        (series.contains("\"/v1/hits\"") && series.contains("\"200\"")).then_some(*n as u64)
    };
    let metrics = site.metrics();
    metrics.iter().filter(|(s, _)| s.starts_with("fletch_requests_total")).filter_map(of).sum()
}

#[test]
fn an_origin_that_hangs_holds_neither_hits_nor_names() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let bucket = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    let (site, _settings) = serve(&bucket);
    let first = mount(&site, "first");
    (0..HERE).for_each(|i| read(&first, i));
    first.stop();
    let second = mount(&site, "second");
    // All names are known to the kernel, and no byte.
    (0..FILES).for_each(|i| assert!(fs::metadata(second.dir.join(name(i))).is_ok()));
    bucket.set_fault("set/", Fault::Stall, None);
    let (before, done) = (hits(&site), AtomicBool::new(false));
    let (here, names, served) = thread::scope(|scope| {
        for i in HERE..FILES {
            let (second, done) = (&second, &done);
            scope.spawn(move || {
                let outcome = fs::read(second.dir.join(name(i)));
                assert!(outcome.is_err() || done.load(SeqCst), "{}: the origin hangs", name(i));
            });
        }
        thread::sleep(Duration::from_millis(500));
        let (mut here, mut names) = (Duration::ZERO, Duration::ZERO);
        for i in 0..HERE {
            let begun = Instant::now();
            read(&second, i);
            here = here.max(begun.elapsed());
            let begun = Instant::now();
            statvfs(&second.dir).expect("totals");
            let absent = fs::metadata(second.dir.join(format!("absent-{i}")));
            assert_eq!(absent.expect_err("absent").kind(), std::io::ErrorKind::NotFound);
            names = names.max(begun.elapsed());
        }
        // What the others wait for is a hit as soon as the origin answers.
        let served = hits(&site) - before;
        bucket.clear_faults();
        done.store(true, SeqCst);
        (here, names, served)
    });
    eprintln!("beside {} readers of a dead origin: reads {here:?}, names {names:?}", FILES - HERE);
    assert!(here < SOON && names < SOON, "{here:?} {names:?}");
    // A thread asks less often after many answers without bytes, and the others went by HTTP.
    assert!((1..=HERE as u64).contains(&served), "{served} were answers of hit connections");
    second.stop();
}

#[test]
fn a_server_that_stops_or_dies_costs_a_tenth_of_a_second_and_no_wrong_byte() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let bucket = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    let (mut site, _settings) = serve(&bucket);
    let first = mount(&site, "first");
    (0..FILES).for_each(|i| read(&first, i));
    first.stop();
    let second = mount(&site, "second");
    (0..FILES).for_each(|i| assert!(fs::metadata(second.dir.join(name(i))).is_ok()));
    read(&second, 0);
    assert!(hits(&site) > 0);
    site.server().signal(Signal::SIGSTOP);
    let names = thread::scope(|scope| {
        let waiting = scope.spawn(|| read(&second, 1));
        thread::sleep(Duration::from_millis(300));
        let begun = Instant::now();
        statvfs(&second.dir).expect("totals");
        let names = begun.elapsed();
        thread::sleep(Duration::from_secs(1));
        site.server().signal(Signal::SIGCONT);
        waiting.join().expect("it is read when the server goes on");
        names
    });
    assert!(names < SOON, "{names:?}");
    // It is asked again by HTTP at once, and over hit connections after a rest.
    (2..10).for_each(|i| read(&second, i));
    site.kill();
    site.restart();
    (10..FILES).for_each(|i| read(&second, i));
    second.stop();
}

/// Reads files of 110 KB once, and returns the system calls of server and mount for each.
fn calls_per_file(site: &Site, files: &[PathBuf], job: &str) -> f64 {
    let mounted = mount(site, job);
    let at = |path: &PathBuf| mounted.dir.join(path);
    // The kernel knows all names, and connections are open.
    files.iter().for_each(|path| assert!(fs::metadata(at(path)).is_ok()));
    let (first, rest) = files.split_at(16);
    first.iter().for_each(|path| drop(fs::read(at(path)).expect("read")));
    let calls = Calls::count(&[site.pid(), mounted.pid()], site.place("calls").join(job));
    rest.iter().for_each(|path| assert_eq!(fs::read(at(path)).expect("read").len(), 110_000));
    let counted = calls.stop();
    let per_file = |n: u64| n as f64 / rest.len() as f64;
    for (name, n) in counted.iter().filter(|(_, n)| per_file(**n) > 0.1) {
        eprintln!("{job}: {name} {:.2}", per_file(*n));
    }
    per_file(counted.values().sum())
}

#[test]
fn a_file_costs_few_system_calls() {
    if !have(&[Need::Fuse, Need::Strace]) {
        return;
    }
    let site = Site::start(&["--memory=512MiB", "--cache-size=0"]);
    let tree = tempfile::tempdir().expect("a directory");
    let files: Vec<PathBuf> = (0..416).map(|i| PathBuf::from(format!("f{i:03}"))).collect();
    for (i, path) in files.iter().enumerate() {
        fs::write(tree.path().join(path), content(i).repeat(2).split_at(110_000).0).expect("write");
    }
    assert_eq!(site.publish("set", tree.path()).len(), 64, "a root");
    let cold = calls_per_file(&site, &files, "origin");
    let warm = calls_per_file(&site, &files, "memory");
    eprintln!("system calls per file: {cold:.1} from a local origin, {warm:.1} from memory");
    assert!(cold <= 20.0 && warm <= 12.0, "{cold:.1} and {warm:.1}");
}

#[test]
fn i6_windows_count_for_the_mount_and_end_with_it() {
    if !have(&[Need::Fuse, Need::Cgroup]) {
        return;
    }
    let of_server = Memory::new(1 << 30).expect("a cgroup");
    let of_mount = Memory::new(1 << 30).expect("a cgroup");
    let wrapper = of_server.wrapper();
    let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
    let site = Site::start_by(&wrapper, &["--memory=512MiB"]);
    let tree = tempfile::tempdir().expect("a directory");
    (0..200).for_each(|i| fs::write(tree.path().join(format!("f{i:03}")), content(i)).expect("write"));
    assert_eq!(site.publish("set", tree.path()).len(), 64, "a root");
    let mut mounted = mount(&site, "windows");
    let before = of_server.shared();
    of_mount.add(mounted.pid());
    for i in 0..200 {
        assert!(fs::read(mounted.dir.join(format!("f{i:03}"))).expect("read") == content(i), "{i}");
    }
    assert!(hits(&site) >= 100, "{} hits", hits(&site));
    let (server, mount) = (of_server.shared().saturating_sub(before), of_mount.shared());
    assert!(server < 64 << 10 && mount >= 1 << 20, "{server} bytes of the server, {mount} of the mount");
    let mapped = || {
        let maps = fs::read_to_string(format!("/proc/{}/maps", site.pid())).expect("the server runs");
        maps.matches("memfd:fletch-window").count()
    };
    assert!(mapped() > 0);
    mounted.daemon().signal(Signal::SIGKILL);
    until("the server lets go of the windows", Duration::from_secs(10), || mapped() == 0);
}

/// Reads short files in their order. Returns what the mount reports at its end.
fn read_in_order(site: &Site, count: usize, order: impl Iterator<Item = usize>, more: &[&str]) -> Value {
    let report = site.place("report").join("report.json");
    let socket = format!("unix:{}", site.socket().display());
    let words = [&["--report", report.to_str().expect("a path")], more].concat();
    let mounted = site.mount_from(&socket, "short", "ordered", &words);
    let path = |i| mounted.dir.join(format!("f{i:05}"));
    // The kernel knows all inodes.
    (0..count).for_each(|i| assert!(fs::metadata(path(i)).is_ok()));
    for i in order {
        assert!(fs::read(path(i)).expect("read") == short(i), "{i}: other bytes");
        // A reader that does something with each file, so that pushes come before it on a busy machine too.
        thread::sleep(Duration::from_micros(500));
    }
    mounted.stop();
    serde_json::from_slice(&fs::read(report).expect("a report")).expect("JSON")
}

/// The content of short file `i`. Some are empty, some too long to be pushed.
fn short(i: usize) -> Vec<u8> {
    let more = if i.is_multiple_of(50) { 30_000 } else { 0 };
    let len = if i.is_multiple_of(97) { 0 } else { 1 + i * 13 % 9000 + more };
    content(i)[..len].to_vec()
}

#[test]
fn short_files_that_are_read_in_their_order_are_pushed_ahead() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let site = Site::start(&["--memory=512MiB"]);
    let tree = tempfile::tempdir().expect("a directory");
    let count = 3000;
    (0..count).for_each(|i| fs::write(tree.path().join(format!("f{i:05}")), short(i)).expect("write"));
    assert_eq!(site.publish("short", tree.path()).len(), 64, "a root");
    let of = |report: &Value, key: &str| report[key].as_u64().expect("a number");
    let total: usize = (0..count).map(|i| short(i).len()).sum();
    let ordered = read_in_order(&site, count, 0..count, &[]);
    let (pushed, replied) = (of(&ordered, "pushed_bytes"), of(&ordered, "read_bytes"));
    println!("{pushed} of {total} bytes were pushed");
    assert!(pushed > total as u64 / 2, "{pushed} of {total} bytes were pushed");
    assert!(replied < total as u64 / 2, "{replied} of {total} bytes were replies");
    let backwards = read_in_order(&site, count, (0..count).rev(), &[]);
    assert_eq!((of(&backwards, "pushed_bytes"), of(&backwards, "read_bytes")), (0, total as u64));
    let off = read_in_order(&site, count, 0..count, &["--push", "off"]);
    assert_eq!((of(&off, "pushed_bytes"), of(&off, "read_bytes")), (0, total as u64));
}
