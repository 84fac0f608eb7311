//! `bench-pack [--files 4000] [--bytes 110000] [--large-mib 2048] [--rounds 5] [--json FILE]`
//!
//! Times cold reads of a pack from the emulator, with 25 ms to the first byte and with none. 16 streams read
//! all files through a fresh mount of a fresh server; 16 streams of direct GETs read the same chunks; both in
//! turn. The same for one large file, of which each stream takes the next 64 MiB. Last, making the pack
//! against copying the tree.

use fletch_benches::{Daemon, Table, arg, bin, is_mounted, keep, until, usage, walk, write_tree};
use fletch_testkit::{Backing, EmulatorConfig, Latency, OriginEmulator};
use rand::seq::SliceRandom;
use rand::{RngCore, SeedableRng};
use std::io::{Read, Seek, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

const STREAMS: usize = 16;

fn run(c: &mut Command) {
    assert!(c.status().expect("run").success(), "{c:?}");
}

/// Measures `STREAMS` threads that each take the next item until none is left, in MB/s.
fn streams<T: Sync>(items: &[T], read: impl Fn(&T) -> u64 + Sync) -> f64 {
    let next = AtomicUsize::new(0);
    let begin = Instant::now();
    let total: u64 = std::thread::scope(|s| {
        let all: Vec<_> = (0..STREAMS)
            .map(|_| {
                s.spawn(|| {
                    let mut sum = 0;
                    while let Some(item) = items.get(next.fetch_add(1, Relaxed)) {
                        sum += read(item);
                    }
                    sum
                })
            })
            .collect();
        all.into_iter().map(|t| t.join().expect("reader")).sum()
    });
    total as f64 / 1e6 / begin.elapsed().as_secs_f64()
}

/// Bytes of a large file that a stream reads at a time.
const RUN_BYTES: u64 = 64 << 20;

/// Makes one GET, of a range if given, over a new connection. Returns the length of the body.
fn get(addr: &str, path: &str, range: Option<(u64, u64)>) -> u64 {
    let mut s = TcpStream::connect(addr).expect("connect");
    let range =
        range.map_or(String::new(), |(from, len)| format!("Range: bytes={from}-{}\r\n", from + len - 1));
    write!(s, "GET {path} HTTP/1.1\r\nHost: localhost\r\n{range}Connection: close\r\n\r\n").expect("request");
    let mut all = vec![0; 1 << 20];
    let mut head = Vec::new();
    let mut body = 0;
    loop {
        let n = s.read(&mut all).expect("answer");
        if n == 0 {
            break;
        }
        if body > 0 {
            body += n as u64;
            continue;
        }
        head.extend_from_slice(&all[..n]);
        if let Some(end) = head.windows(4).position(|w| w == b"\r\n\r\n") {
            assert!(head.starts_with(b"HTTP/1.1 20"), "{path}");
            body = (head.len() - end - 4) as u64;
        }
    }
    body
}

/// Starts a fresh server and a fresh mount of the pack `packed`.
fn mounted(at: &dyn Fn(&str) -> PathBuf, origin: &OriginEmulator, set: &str) -> (Daemon, Daemon) {
    let (state, mnt, ready) = (at("server"), at("mnt"), at("ready"));
    std::fs::remove_dir_all(&state).ok();
    std::fs::remove_file(&ready).ok();
    std::fs::create_dir_all(&mnt).expect("mkdir");
    let server = Daemon::start(
        Command::new(bin("fletch-server"))
            .args(["--listen", "127.0.0.1:0", "--memory", "1GiB", "--cache-size", "0", "--config"])
            .arg(at("fletch.toml"))
            .arg("--socket")
            .arg(at("s.sock"))
            .arg("--state-dir")
            .arg(&state)
            .arg("--cache-dir")
            .arg(state.join("cache"))
            .arg("--ready-file")
            .arg(&ready),
        None,
    );
    until("the server", || std::fs::read_to_string(&ready).is_ok_and(|s| s.starts_with("http")));
    let url = std::fs::read_to_string(&ready).expect("ready").trim().to_owned();
    let (data, packs) = (format!("{}/{set}", origin.uri()), format!("{}/packs-{set}", origin.uri()));
    run(Command::new(bin("fletch"))
        .args(["register", "packed", &data, "--tables", &packs, "--quiet", "--server", &url])
        .stdout(std::process::Stdio::null()));
    let mount = Daemon::start(
        Command::new(bin("fletch-mount"))
            .arg("packed")
            .arg(&mnt)
            .arg("--server")
            .arg(format!("unix:{}", at("s.sock").display()))
            .args(["--job", "bench"]),
        None,
    );
    until("the mount", || is_mounted(&mnt));
    (server, mount)
}

/// Reads a part of a file through the mount and returns its length in bytes.
fn read_run(path: &Path, (from, len): (u64, u64)) -> u64 {
    let mut file = std::fs::File::open(path).expect("open");
    file.seek(std::io::SeekFrom::Start(from)).expect("seek");
    std::io::copy(&mut file.take(len), &mut std::io::sink()).expect("read")
}

fn main() {
    usage(include_str!("pack.rs"));
    let (files, size): (usize, usize) = (arg("files", 4_000), arg("bytes", 110_000));
    let large = arg::<u64>("large-mib", 2048) << 20;
    let rounds: u64 = arg("rounds", 5);
    let scratch = tempfile::TempDir::with_prefix("fletch-bench-").expect("scratch");
    let at = |p: &str| scratch.path().join(p);
    let (data, packs) = (at("bucket/set"), at("bucket/packs-set"));
    write_tree(&data, std::process::id().into(), files, size);
    let bytes = (files * size) as f64;
    let mut table = Table::default();
    for round in 0..rounds {
        for dir in [&packs, &at("copy")] {
            std::fs::remove_dir_all(dir).ok();
        }
        let begin = Instant::now();
        run(Command::new(bin("fletch"))
            .args(["pack", "--quiet", "--no-tag", "--to"])
            .args([&packs, &data])
            .arg("--state-dir")
            .arg(at(&format!("st-{round}")))
            .stdout(std::process::Stdio::null()));
        table.add("making a pack, warm, MB/s", "fletch", bytes / 1e6 / begin.elapsed().as_secs_f64());
        let begin = Instant::now();
        run(Command::new("cp").arg("-r").args([&data, &at("copy")]));
        run(&mut Command::new("sync"));
        table.add("making a pack, warm, MB/s", "cp -r, sync", bytes / 1e6 / begin.elapsed().as_secs_f64());
    }
    write_large(&at("bucket/one"), std::process::id(), large);
    run(Command::new(bin("fletch"))
        .args(["pack", "--quiet", "--to"])
        .args([&packs, &data])
        .arg("--state-dir")
        .arg(at("st"))
        .stdout(std::process::Stdio::null()));
    let names = walk(&packs.join("fletch/chunks"));
    let runs: Vec<(u64, u64)> = (0..large.div_ceil(RUN_BYTES))
        .map(|i| (i * RUN_BYTES, RUN_BYTES.min(large - i * RUN_BYTES)))
        .collect();
    let latency = Latency { median: Duration::from_millis(25), p99: Duration::from_millis(80) };
    for (delay, first_byte) in [("25 ms", Some(latency)), ("no delay", None)] {
        let config = EmulatorConfig { first_byte, ..EmulatorConfig::default() };
        let origin = OriginEmulator::start(config, Backing::Directory(at("bucket")));
        let text = format!(
            "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\n\
             credentials = \"anonymous\"\nregion = \"local\"\n",
            origin.uri(),
            origin.endpoint()
        );
        std::fs::write(at("fletch.toml"), text).expect("config");
        // A long file stays where it is, and its layout pins it as it was read: through this origin.
        run(Command::new(bin("fletch"))
            .args(["pack", "--quiet", &format!("{}/one", origin.uri()), "--config"])
            .arg(at("fletch.toml"))
            .args(["--to", &format!("{}/packs-one", origin.uri()), "--state-dir"])
            .arg(at("st-one"))
            .stdout(std::process::Stdio::null()));
        let addr = origin.address().to_string();
        for round in 0..rounds {
            let row = format!("{files} files, cold, {delay}, {STREAMS} streams");
            let direct = streams(&names, |chunk| {
                get(&addr, &format!("/bucket/packs-set/fletch/chunks/{}", chunk.display()), None)
            });
            table.add(&format!("{row}, MB/s"), "direct GETs of chunks", direct);
            let daemons = mounted(&at, &origin, "set");
            let mut order = walk(&at("mnt"));
            order.shuffle(&mut rand_chacha::ChaCha8Rng::seed_from_u64(round));
            let before = cpu(&daemons);
            let read = |p: &PathBuf| std::fs::read(at("mnt").join(p)).expect("file").len() as u64;
            table.add(&format!("{row}, MB/s"), "fletch", streams(&order, read));
            table.add(&format!("{row}, CPU s/GB"), "fletch", (cpu(&daemons) - before) / (bytes / 1e9));
            drop(daemons);

            let row = format!("one file, cold, {delay}, {STREAMS} streams");
            let direct = streams(&runs, |r| get(&addr, "/bucket/one/0.bin", Some(*r)));
            table.add(&format!("{row}, MB/s"), "direct GETs of ranges", direct);
            let daemons = mounted(&at, &origin, "one");
            let before = cpu(&daemons);
            let figure = streams(&runs, |r| read_run(&at("mnt/0.bin"), *r));
            table.add(&format!("{row}, MB/s"), "fletch", figure);
            table.add(&format!("{row}, CPU s/GB"), "fletch", (cpu(&daemons) - before) / (large as f64 / 1e9));
        }
    }
    table.print("fletch", "MB/s or CPU s of server and mount per GB");
    keep(&table);
}

/// Returns the CPU seconds of server and mount so far.
fn cpu((server, mount): &(Daemon, Daemon)) -> f64 {
    server.cpu() + mount.cpu()
}

/// Writes one file of `bytes` random bytes into a new directory.
fn write_large(dir: &Path, seed: u32, bytes: u64) {
    std::fs::create_dir_all(dir).expect("mkdir");
    let mut file = std::fs::File::create(dir.join("0.bin")).expect("file");
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(u64::from(seed) << 32);
    let mut piece = vec![0; 4 << 20];
    for _ in 0..bytes / piece.len() as u64 {
        rng.fill_bytes(&mut piece);
        file.write_all(&piece).expect("write");
    }
}
