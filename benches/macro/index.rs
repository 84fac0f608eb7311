//! `bench-index [--files 30000] [--bytes 20000] [--large-mib 1024] [--rounds 5] [--json FILE]`
//!
//! Times `fletch index` of a warm local tree against `b3sum` (on PATH): many small files against
//! `find -print0 | xargs -0 -P2 -n 64 b3sum`, large files against `b3sum` alone.

use fletch_benches::{Table, arg, bin, epoch, keep, usage, walk, write_tree};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

fn timed(c: &mut Command) -> f64 {
    let begin = Instant::now();
    let s = c.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap_or_else(|e| panic!("{c:?}: {e}"));
    assert!(s.success(), "{c:?}: {s}");
    begin.elapsed().as_secs_f64()
}

fn main() {
    usage(include_str!("index.rs"));
    let rounds: usize = arg("rounds", 5);
    let scratch = tempfile::TempDir::with_prefix("fletch-bench-").expect("scratch");
    let at = |p: &str| scratch.path().join(p);
    let seed = u64::from(std::process::id());
    let (files, bytes): (usize, usize) = (arg("files", 30_000), arg("bytes", 20_000));
    let large: usize = arg("large-mib", 1024);
    write_tree(&at("small"), seed, files, bytes);
    write_tree(&at("large"), seed + 1, 4, (large << 20) / 4);
    for d in ["small", "large"] {
        let _ = epoch(&at(d), &walk(&at(d)), 2);
    }
    let mut table = Table::default();
    for round in 0..rounds {
        let index = |tree: &Path, n: &str| {
            timed(
                Command::new(bin("fletch"))
                    .arg("index")
                    .arg(tree)
                    .arg("--to")
                    .arg(at(&format!("to-{n}-{round}")))
                    .arg("--state-dir")
                    .arg(at(&format!("st-{n}-{round}"))),
            )
        };
        let (small, big) = (at("small"), at("large"));
        let row = format!("{files} files of {bytes} bytes, GB/s");
        let gb = files as f64 * bytes as f64 / 1e9;
        table.add(&row, "fletch index", gb / index(&small, "small"));
        let find = format!("find {} -type f -print0 | xargs -0 -P2 -n 64 b3sum", small.display());
        table.add(&row, "b3sum", gb / timed(Command::new("sh").args(["-c", &find])));
        let row = format!("4 files, {large} MiB in all, GB/s");
        let gb = (large << 20) as f64 / 1e9;
        table.add(&row, "fletch index", gb / index(&big, "large"));
        let find = format!("find {} -type f -print0 | xargs -0 b3sum", big.display());
        table.add(&row, "b3sum", gb / timed(Command::new("sh").args(["-c", &find])));
    }
    table.print("fletch index", "GB/s");
    keep(&table);
}
