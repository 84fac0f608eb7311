//! `bench-mount [--files 20000] [--bytes 110000] [--rounds 5] [--before DIR] [--json FILE]`
//!
//! Times Fletch's mount, a bare in-memory daemon of the same mode, and the native file system, in turn, round
//! by round: cold walk, first and second epoch, one and two threads. Cold means a fresh mount and a fresh
//! server with caches of their own: the originals are in the page cache, and all else is empty. With
//! `--before`, the server and the mount of an earlier build in that directory take their turn, too, and begin
//! every second round.

use fletch_benches::{Daemon, Table, arg, bin, epoch, is_mounted, keep, until, usage, walk, write_tree};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

fn measure(table: &mut Table, arm: &str, threads: usize, top: &Path, round: u64) {
    let begin = Instant::now();
    let mut order = walk(top);
    table.add(
        &format!("cold walk, {threads} thread(s), names/s"),
        arm,
        order.len() as f64 / begin.elapsed().as_secs_f64(),
    );
    for e in 1..=2 {
        order.shuffle(&mut rand_chacha::ChaCha8Rng::seed_from_u64(round * 10 + e));
        table.add(&format!("epoch {e}, {threads} thread(s), files/s"), arm, epoch(top, &order, threads));
    }
}

fn main() {
    usage(include_str!("mount.rs"));
    let (files, bytes): (usize, usize) = (arg("files", 20_000), arg("bytes", 110_000));
    let rounds: u64 = arg("rounds", 5);
    let before: String = arg("before", String::new());
    let own = bin("fletch").parent().expect("a directory").to_owned();
    let builds = [("fletch", own), ("before", PathBuf::from(before))];
    let builds: Vec<_> = builds.into_iter().filter(|(_, dir)| !dir.as_os_str().is_empty()).collect();
    let scratch = tempfile::TempDir::with_prefix("fletch-bench-").expect("scratch");
    let at = |p: &str| scratch.path().join(p);
    let data = at("data");
    write_tree(&data, std::process::id().into(), files, bytes);
    let _ = epoch(&data, &walk(&data), 2);
    let run = |c: &mut Command| assert!(c.status().expect("run").success(), "{c:?}");
    run(Command::new(bin("fletch"))
        .arg("index")
        .arg(&data)
        .arg("--to")
        .arg(at("tables"))
        .arg("--quiet")
        .arg("--state-dir")
        .arg(at("st")));
    let mut table = Table::default();
    let mut cpu = Vec::new();
    for round in 0..rounds {
        for threads in [1, 2] {
            let dir = at(&format!("bare-{round}-{threads}"));
            std::fs::create_dir(&dir).expect("mkdir");
            let d = Daemon::start(
                Command::new(bin("bare-mount")).arg(&dir).arg(files.to_string()).arg(bytes.to_string()),
                None,
            );
            until("bare mount", || is_mounted(&dir));
            measure(&mut table, "bare daemon", threads, &dir, round);
            // Unmounting ends the daemon; a signal would leave a dead mount behind.
            run(Command::new("umount").arg(&dir));
            drop(d);

            let mut turns: Vec<_> = builds.iter().collect();
            if round % 2 == 1 {
                turns.reverse();
            }
            for (build, programs) in turns {
                let work = at(&format!("{build}-{round}-{threads}"));
                let dir = work.join("mnt");
                std::fs::create_dir_all(&dir).expect("mkdir");
                let ready = work.join("ready");
                let server = Daemon::start(
                    Command::new(programs.join("fletch-server"))
                        .args(["--listen", "127.0.0.1:0", "--memory", "512MiB"])
                        .arg("--socket")
                        .arg(work.join("s"))
                        .arg("--cache-dir")
                        .arg(work.join("c"))
                        .arg("--state-dir")
                        .arg(work.join("d"))
                        .arg("--ready-file")
                        .arg(&ready),
                    Some(&work.join("server.log")),
                );
                until("server", || std::fs::read_to_string(&ready).is_ok_and(|s| s.contains("http")));
                let url = std::fs::read_to_string(&ready).expect("url").trim().to_owned();
                run(Command::new(bin("fletch"))
                    .args(["register", "d"])
                    .arg(&data)
                    .arg("--tables")
                    .arg(at("tables"))
                    .args(["--server", &url]));
                let socket = format!("unix:{}", work.join("s").display());
                let mount = Daemon::start(
                    Command::new(programs.join("fletch-mount"))
                        .arg("d")
                        .arg(&dir)
                        .args(["--server", &socket, "--job", "bench"])
                        .env("FLETCH_CACHE_DIR", work.join("cache")),
                    Some(&work.join("mount.log")),
                );
                until("fletch mount", || is_mounted(&dir));
                measure(&mut table, build, threads, &dir, round);
                let gb = 2.0 * files as f64 * bytes as f64 / 1e9;
                if *build == "fletch" {
                    cpu.push((server.cpu() / gb, mount.cpu() / gb));
                }
                drop(mount);
                drop(server);
            }

            measure(&mut table, "native", threads, &data, round);
        }
    }
    println!("{files} files of {bytes} bytes, {rounds} rounds; server over its unix socket");
    table.print("fletch", "per second");
    let mid = |f: &dyn Fn(&(f64, f64)) -> f64| fletch_benches::span(&cpu.iter().map(f).collect::<Vec<_>>());
    println!("CPU s per GB read (both epochs): server {}, mount {}", mid(&|c| c.0), mid(&|c| c.1));
    keep(&table);
}
