//! The whole path of a byte: index, serve, mount, read. The costs are measured from outside.

use fletch_core::Hash;
use fletch_testkit::fuse_trace::FuseTrace;
use fletch_tests::bins::{Running, command, run};
use fletch_tests::fixture::{Site, files, index};
use fletch_tests::require::{Need, have};
use fletch_tests::watch::{bytes_read, bytes_read_until_exit};
use rand::seq::SliceRandom;
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// Writes unique incompressible files of these sizes below `dir`, 100 in each directory. Returns their bytes.
fn tree(dir: &Path, seed: u64, sizes: impl IntoIterator<Item = usize>) -> u64 {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut total = 0;
    for (i, n) in sizes.into_iter().enumerate() {
        let d = dir.join(format!("class-{:03}", i / 100));
        fs::create_dir_all(&d).expect("mkdir");
        let mut b = vec![0; n];
        rng.fill_bytes(&mut b);
        fs::write(d.join(format!("{i:06}.bin")), b).expect("write");
        total += n as u64;
    }
    total
}

/// Reads every file in one read, in this order.
fn read_all(dir: &Path, order: &[PathBuf]) -> u64 {
    order
        .iter()
        .map(|p| fs::read(dir.join(p)).unwrap_or_else(|e| panic!("{}: {e}", p.display())).len() as u64)
        .sum()
}

#[test]
fn index_reads_every_byte_once() {
    let data = TempDir::with_prefix("fletch-once-").expect("tree");
    let total =
        tree(data.path(), 1, (0..3000).map(|i| if i % 500 == 0 { 9_000_000 } else { 2000 + i % 7000 }));
    let to = TempDir::with_prefix("fletch-once-").expect("tables");
    let mut c = command("fletch");
    c.arg("index")
        .arg(data.path())
        .arg("--to")
        .arg(to.path())
        .arg("--state-dir")
        .arg(to.path().join("state"));
    let mut child = Running::spawn("index", c.stdout(Stdio::null()).stderr(Stdio::null()));
    let read = bytes_read_until_exit(child.pid());
    assert!(child.wait(Duration::from_secs(5)).success());
    // Beside the data: libraries, the tables it has just written, /proc.
    assert!(read >= total, "read {read} of {total}");
    assert!(read <= total + 4_000_000, "read {read} of {total}: some bytes more than once");
}

#[test]
fn eight_cold_mounts_cost_the_origin_one_read() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = TempDir::with_prefix("fletch-eight-").expect("tree");
    let total =
        tree(data.path(), 2, (0..600).map(|i| if i % 150 == 0 { 9_000_000 } else { 20_000 + i * 150 }));
    // Without a cache on disk all that the server reads is the origin: the kernel's count can be believed.
    let mut site = Site::start(&["--memory", "512MiB", "--cache-size", "0"]);
    let _ = site.publish("eight", data.path());
    let mounts: Vec<_> =
        (0..8).map(|j| site.mount("eight", &format!("job-{j}"), &["--memory", "64MiB"])).collect();
    let all = files(data.path());
    let pid = site.server().pid();
    let before = bytes_read(pid);
    std::thread::scope(|s| {
        for (j, m) in mounts.iter().enumerate() {
            let mut order = all.clone();
            s.spawn(move || {
                order.shuffle(&mut ChaCha8Rng::seed_from_u64(j as u64));
                assert_eq!(read_all(&m.dir, &order), total);
            });
        }
    });
    let counted = site.metric("fletch_chunk_fetched_bytes_total");
    let outside = (bytes_read(pid) - before) as f64;
    assert!(counted <= 1.02 * total as f64, "origin bytes {counted} of {total}");
    assert!(outside <= 1.02 * total as f64 + 2e6, "the server read {outside} bytes of files for {total}");
    let sent: f64 =
        site.metrics().iter().filter(|(k, _)| k.starts_with("fletch_bytes_total{")).map(|(_, v)| v).sum();
    assert!((sent - 8.0 * total as f64).abs() < 0.5, "delivered {sent}, readers got {}", 8 * total);
    for m in mounts {
        m.stop();
    }
}

/// Sends a GET over a new connection. Returns the head of the response and the body.
fn get(addr: &str, path: &str) -> (String, Vec<u8>) {
    let mut s = TcpStream::connect(addr).expect("connect");
    write!(s, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").expect("request");
    let mut all = Vec::new();
    s.read_to_end(&mut all).expect("response");
    let at = all.windows(4).position(|w| w == b"\r\n\r\n").expect("head");
    let status = String::from_utf8_lossy(&all[..at]).lines().next().unwrap_or("").to_owned();
    (status, all[at + 4..].to_vec())
}

#[test]
fn sixty_four_readers_of_a_cold_chunk_cost_one_read_though_the_first_is_killed() {
    let data = TempDir::with_prefix("fletch-herd-").expect("tree");
    let mut chunk = vec![0; 4 << 20];
    ChaCha8Rng::seed_from_u64(3).fill_bytes(&mut chunk);
    fs::write(data.path().join("one.bin"), &chunk).expect("write");
    fs::write(data.path().join("small"), "small").expect("write");
    let site = Site::start(&[]);
    let root = site.publish("herd", data.path());
    let addr = site.url.trim_start_matches("http://").trim_end_matches('/').to_owned();
    let path = format!("/v1/versions/{root}/chunks/{}", Hash::of(&chunk));
    // What the version's tables cost is paid once, for another chunk.
    assert_eq!(get(&addr, &format!("/v1/versions/{root}/files/small")).1, b"small");
    let before = site.metric("fletch_origin_requests_total");
    // The first reader asks, takes a little of the body at most, and dies.
    let mut leader = TcpStream::connect(&addr).expect("connect");
    write!(leader, "GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("request");
    std::thread::scope(|s| {
        let readers: Vec<_> = (0..63).map(|_| s.spawn(|| get(&addr, &path))).collect();
        leader.read_exact(&mut [0; 64]).expect("some of it");
        drop(leader);
        for r in readers {
            let (status, body) = r.join().expect("reader");
            assert_eq!(status, "HTTP/1.1 200 OK");
            assert_eq!(Hash::of(&body), Hash::of(&chunk));
        }
    });
    assert_eq!(site.metric("fletch_origin_requests_total") - before, 1.0);
    assert_eq!(site.metric("fletch_chunk_fetched_bytes_total") as u64, (4 << 20) + 5);
}

#[test]
fn find_over_a_hundred_thousand_files_asks_the_origin_nothing() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = TempDir::with_prefix("fletch-find-").expect("tree");
    for d in 0..100 {
        let dir = data.path().join(format!("n{d:04}"));
        fs::create_dir(&dir).expect("mkdir");
        for f in 0..1000 {
            fs::write(dir.join(format!("{f:05}.txt")), format!("{d} {f}")).expect("write");
        }
    }
    let site = Site::start(&[]);
    let _ = site.publish("many", data.path());
    let m = site.mount("many", "find", &[]);
    let names = |d: &Path| {
        let out = run(Command::new("find").arg(d).args(["-printf", "%P %y %s\\n"]));
        let mut v: Vec<String> = String::from_utf8_lossy(&out.stdout).lines().map(str::to_owned).collect();
        // A directory's own size is the file system's business.
        v.iter_mut().filter(|l| l.contains(" d ")).for_each(|l| l.truncate(l.find(" d ").expect("kind")));
        v.sort();
        v
    };
    let ours = names(&m.dir);
    assert_eq!(ours.len(), 100_101);
    assert_eq!(ours, names(data.path()));
    assert_eq!(site.metric("fletch_chunk_fetched_bytes_total") as u64, 0);
    m.stop();
}

#[test]
fn the_daemon_is_asked_as_little_as_promised() {
    if !have(&[Need::Fuse, Need::Trace]) {
        return;
    }
    let data = TempDir::with_prefix("fletch-count-").expect("tree");
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let sizes: Vec<usize> = (0..1500).map(|_| rng.random_range(1..400_000)).collect();
    let total = tree(data.path(), 5, sizes.iter().copied());
    let blocks: u64 = sizes.iter().map(|n| n.div_ceil(128 << 10) as u64).sum();
    let site = Site::start(&["--memory", "1GiB"]);
    let _ = site.publish("count", data.path());
    let m = site.mount("count", "count", &[]);
    let trace = FuseTrace::start(&m.dir);
    let count = |of: &std::collections::BTreeMap<String, u64>, op: &str| of.get(op).copied().unwrap_or(0);

    // First epoch: a walk as a loader does it, then every file whole, in random order.
    let mut order = files(&m.dir);
    assert_eq!(order.len(), sizes.len());
    order.shuffle(&mut rng);
    assert_eq!(read_all(&m.dir, &order), total);
    let first = trace.take();
    assert!(count(&first, "FUSE_OPEN") <= 1, "{first:?}");
    assert!(count(&first, "FUSE_OPENDIR") <= 1, "{first:?}");
    assert!(count(&first, "FUSE_READ") <= blocks + trace.dropped(), "{blocks} started blocks, {first:?}");
    assert!(count(&first, "FUSE_RELEASE") + count(&first, "FUSE_FLUSH") <= 1, "{first:?}");

    // Second epoch: another order, and another walk; the kernel answers all of it.
    order.shuffle(&mut rng);
    assert_eq!(read_all(&m.dir, &order), total);
    let mut again = files(&m.dir);
    again.sort();
    order.sort();
    assert_eq!(again, order);
    let second = trace.take_again();
    let sum: u64 = second
        .iter()
        .filter(|(op, _)| *op != "FUSE_FORGET" && *op != "FUSE_BATCH_FORGET")
        .map(|(_, n)| n)
        .sum();
    assert_eq!(sum, 0, "{second:?}");
    drop(trace);
    m.stop();
}

#[test]
fn small_block_readers_cost_one_read_per_started_block_too() {
    if !have(&[Need::Fuse, Need::Trace]) {
        return;
    }
    let data = TempDir::with_prefix("fletch-tar-").expect("tree");
    let sizes: Vec<usize> = (0..400).map(|i| 1000 + i * 330).collect();
    let total = tree(data.path(), 6, sizes.iter().copied());
    let blocks: u64 = sizes.iter().map(|n| n.div_ceil(128 << 10) as u64).sum();
    let site = Site::start(&[]);
    let _ = site.publish("tar", data.path());
    let m = site.mount("tar", "tar", &[]);
    let trace = FuseTrace::start(&m.dir);
    let out = run(Command::new("sh").arg("-c").arg("tar -cf - . | wc -c").current_dir(&m.dir));
    let printed: u64 = String::from_utf8_lossy(&out.stdout).trim().parse().expect("a number");
    assert!(printed >= total);
    let reads = trace.take().get("FUSE_READ").copied().unwrap_or(0);
    assert!(reads <= blocks + trace.dropped(), "{reads} READs for {blocks} started blocks of 128 KiB");
    drop(trace);
    m.stop();
}

#[test]
fn every_byte_is_the_original_s_by_any_way_of_reading() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let data = TempDir::with_prefix("fletch-ways-").expect("tree");
    let sizes = [0, 1, 4095, 4096, 4097, 131_071, 131_073, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, 13_000_001];
    let _ = tree(data.path(), 7, sizes);
    let site = Site::start(&[]);
    let _ = site.publish("ways", data.path());
    // A daemon with little memory, so that large files do not fit.
    let m = site.mount("ways", "ways", &["--memory", "32MiB"]);
    let mut rng = ChaCha8Rng::seed_from_u64(8);
    for p in files(data.path()) {
        let want = fs::read(data.path().join(&p)).expect("original");
        let f = fs::File::open(m.dir.join(&p)).expect("open");
        for _ in 0..40 {
            let at = rng.random_range(0..=want.len() as u64 + 10);
            let n = rng.random_range(0..300_000usize);
            let mut got = vec![0; n];
            let mut filled = 0;
            while filled < n {
                match f.read_at(&mut got[filled..], at + filled as u64).expect("pread") {
                    0 => break,
                    k => filled += k,
                }
            }
            let from = usize::try_from(at).expect("small").min(want.len());
            assert_eq!(got[..filled], want[from..(from + n).min(want.len())], "{} at {at}", p.display());
        }
        assert_eq!(fs::read(m.dir.join(&p)).expect("whole"), want, "{}", p.display());
    }
    m.stop();
}

#[test]
fn the_same_tree_has_the_same_root_wherever_it_is() {
    let (a, b) =
        (TempDir::with_prefix("fletch-a-").expect("a"), TempDir::with_prefix("fletch-b-").expect("b"));
    for d in [&a, &b] {
        let _ = tree(d.path(), 9, [10, 200_000, 5_000_000]);
    }
    let to = TempDir::with_prefix("fletch-to-").expect("to");
    let roots: Vec<String> = [&a, &b]
        .iter()
        .enumerate()
        .map(|(i, d)| index(d.path(), &to.path().join(i.to_string()), &[]))
        .collect();
    assert_eq!(roots[0], roots[1]);
    assert_eq!(roots[0].len(), 64);
}
