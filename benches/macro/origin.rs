//! `bench-origin --dir DIR [--first-byte-ms 25] [--first-byte-p99-ms 120]
//!               [--stream-mb-per-s 80] [--mb-per-s 400]`
//!
//! The origin emulator as a program, for tables that are not written in Rust. It is an S3-style server of one
//! bucket, `bucket`, whose objects are the files below DIR. It prints its endpoint. For each line on its
//! input it prints its counters as one line of JSON, and it ends when its input ends. A limit of 0 means no
//! limit.

use fletch_benches::{arg, usage};
use fletch_testkit::{Backing, EmulatorConfig, Latency, OriginEmulator};
use std::{
    io::{BufRead, Write, stdin, stdout},
    time::Duration,
};

fn main() -> std::io::Result<()> {
    usage(include_str!("origin.rs"));
    let dir: String = arg("dir", String::new());
    assert!(std::path::Path::new(&dir).is_dir(), "--dir {dir}: there is no such directory");
    let milliseconds = |name, default| Duration::from_secs_f64(arg(name, default) / 1e3);
    let latency = Latency {
        median: milliseconds("first-byte-ms", 25.0),
        p99: milliseconds("first-byte-p99-ms", 120.0),
    };
    let limit = |name, default| Some((arg(name, default) * 1e6) as u64).filter(|&n| n > 0);
    let config = EmulatorConfig {
        first_byte: Some(latency).filter(|l| !l.median.is_zero()),
        stream_bytes_per_s: limit("stream-mb-per-s", 80.0),
        total_bytes_per_s: limit("mb-per-s", 400.0),
        ..EmulatorConfig::default()
    };
    let origin = OriginEmulator::start(config, Backing::Directory(dir.into()));
    let mut out = stdout().lock();
    writeln!(out, "{}", origin.endpoint())?;
    out.flush()?;
    for line in stdin().lock().lines() {
        line?;
        let c = origin.counts();
        let counts = serde_json::json!({
            "get": c.get, "head": c.head, "list": c.list, "put": c.put, "refused": c.refused,
            "bytes": c.bytes_sent,
        });
        writeln!(out, "{counts}")?;
        out.flush()?;
    }
    Ok(())
}
