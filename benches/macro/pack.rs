//! `bench-pack [--files 4000] [--bytes 110000] [--rounds 5] [--json FILE]`
//!
//! Cold reads of a pack: 16 streams that read all files through a fresh mount of a fresh server, and 16
//! streams of direct GETs of the same chunks, in turn, from the emulator with 25 ms to the first
//! byte and with none. And making the pack, beside copying the tree.

use fletch_benches::{Daemon, Table, arg, bin, is_mounted, keep, until, walk, write_tree};
use fletch_testkit::{Backing, EmulatorConfig, Latency, OriginEmulator};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

const STREAMS: usize = 16;

fn run(c: &mut Command) {
    assert!(c.status().expect("run").success(), "{c:?}");
}

/// MB/s of `STREAMS` threads that each take the next item until none is left.
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

/// One GET over a connection of its own; the length of the body.
fn get(addr: &str, path: &str) -> u64 {
    let mut s = TcpStream::connect(addr).expect("connect");
    write!(s, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").expect("request");
    let mut all = Vec::new();
    s.read_to_end(&mut all).expect("answer");
    let head = all.windows(4).position(|w| w == b"\r\n\r\n").expect("head");
    assert!(all.starts_with(b"HTTP/1.1 200"), "{path}");
    (all.len() - head - 4) as u64
}

fn main() {
    let (files, size): (usize, usize) = (arg("files", 4_000), arg("bytes", 110_000));
    let rounds: u64 = arg("rounds", 5);
    let scratch = tempfile::TempDir::with_prefix("fletch-bench-").expect("scratch");
    let at = |p: &str| scratch.path().join(p);
    let (data, packs) = (at("bucket/set"), at("bucket/packs"));
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
    run(Command::new(bin("fletch"))
        .args(["pack", "--quiet", "--to"])
        .args([&packs, &data])
        .arg("--state-dir")
        .arg(at("st"))
        .stdout(std::process::Stdio::null()));
    let names = walk(&packs.join("fletch/chunks"));
    let latency = Latency { median: Duration::from_millis(25), p99: Duration::from_millis(80) };
    let mut cpu = Vec::new();
    for (row, first_byte) in [("25 ms", Some(latency)), ("no delay", None)] {
        let config = EmulatorConfig { first_byte, ..EmulatorConfig::default() };
        let origin = OriginEmulator::start(config, Backing::Directory(at("bucket")));
        let toml = at("fletch.toml");
        let text = format!(
            "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\ncredentials = \"anonymous\"\nregion = \"local\"\n",
            origin.uri(),
            origin.endpoint()
        );
        std::fs::write(&toml, text).expect("config");
        let row = format!("cold, {row}, {STREAMS} streams, MB/s");
        for round in 0..rounds {
            let addr = origin.address().to_string();
            let direct = streams(&names, |chunk| {
                get(&addr, &format!("/bucket/packs/fletch/chunks/{}", chunk.display()))
            });
            table.add(&row, "direct GETs of chunks", direct);
            let (state, mnt, ready) = (at("server"), at("mnt"), at("ready"));
            std::fs::remove_dir_all(&state).ok();
            std::fs::remove_file(&ready).ok();
            std::fs::create_dir_all(&mnt).expect("mkdir");
            let server = Daemon::start(
                Command::new(bin("fletch-server"))
                    .args(["--listen", "127.0.0.1:0", "--memory", "1GiB", "--cache-size", "0", "--config"])
                    .arg(&toml)
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
            let (set, to) = (format!("{}/set", origin.uri()), format!("{}/packs", origin.uri()));
            run(Command::new(bin("fletch"))
                .args(["register", "packed", &set, "--tables", &to, "--quiet", "--server", &url])
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
            let mut order = walk(&mnt);
            order.shuffle(&mut rand_chacha::ChaCha8Rng::seed_from_u64(round));
            let read = |p: &PathBuf| std::fs::read(mnt.join(p)).expect("file").len() as u64;
            table.add(&row, "fletch", streams(&order, read));
            cpu.push((server.cpu() + mount.cpu()) / (bytes / 1e9));
            drop(mount);
            drop(server);
        }
    }
    table.print("fletch", "MB/s");
    println!("CPU s per GB, server and mount: {}", fletch_benches::span(&cpu));
    keep(&table);
}
