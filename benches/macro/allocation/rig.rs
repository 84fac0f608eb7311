//! The datasets, their links, and the server.

use super::throttle::Throttle;
use fletch_benches::{Daemon, bin, sow_tree, until};
use fletch_client::{Client, ClientConfig};
use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator};
use std::{
    path::PathBuf,
    process::{Command, Stdio},
};
use tempfile::TempDir;

/// The bytes of a sample and of a chunk.
pub const SAMPLE: usize = 8 << 10;
pub const CHUNK: usize = 256 << 10;
/// Samples of a step: the bytes of a chunk.
pub const BATCH: u32 = 32;
/// The smallest memory that a server accepts.
const MEMORY: &str = "--memory=64MiB";

/// Packed datasets `d0`, `d1`, …, each in a bucket of its own.
pub struct Rig {
    scratch: TempDir,
    datasets: usize,
}

/// A server, which ends when this is dropped.
pub struct Served {
    _daemon: Daemon,
    pub url: String,
}

fn run(c: &mut Command) {
    assert!(c.stdout(Stdio::null()).status().expect("run").success(), "{c:?}");
}

/// Returns a rate in bytes a second.
pub fn mib_per_s(mib: f64) -> f64 {
    mib * f64::from(1 << 20)
}

impl Rig {
    /// Makes and packs a dataset for each number of chunks.
    pub fn new(chunks: &[usize]) -> Self {
        let scratch = TempDir::with_prefix("fletch-bench-").expect("scratch");
        let rig = Rig { scratch, datasets: chunks.len() };
        for (i, chunks) in chunks.iter().enumerate() {
            sow_tree(&rig.at(&format!("bucket-{i}/set")), chunks * CHUNK / SAMPLE, SAMPLE);
        }
        for origin in rig.origins(&vec![None; chunks.len()]) {
            run(Command::new(bin("fletch"))
                .args(["pack", "--quiet", &format!("{}/set", origin.uri()), "--config"])
                .arg(rig.at("fletch.toml"))
                .args(["--to", &format!("{}/pack", origin.uri()), "--chunk-size", "256KiB", "--state-dir"])
                .arg(rig.at("st")));
        }
        rig
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Starts the origin of each dataset with its limit in bytes a second, and writes the settings by which
    /// they are reached.
    pub fn origins(&self, limits: &[Option<f64>]) -> Vec<OriginEmulator> {
        assert_eq!(limits.len(), self.datasets);
        let start = |(i, limit): (usize, &Option<f64>)| {
            let config = EmulatorConfig {
                bucket: format!("bucket-{i}"),
                total_bytes_per_s: limit.map(|l| l as u64),
                ..EmulatorConfig::default()
            };
            OriginEmulator::start(config, Backing::Synthetic(self.at(&format!("bucket-{i}")), i as u64))
        };
        let origins: Vec<_> = limits.iter().enumerate().map(start).collect();
        let text: String = origins
            .iter()
            .map(|origin| {
                format!(
                    "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nallow_http = true\n\
                     credentials = \"anonymous\"\nregion = \"local\"\n",
                    origin.uri(),
                    origin.endpoint()
                )
            })
            .collect();
        std::fs::write(self.at("fletch.toml"), text).expect("settings");
        origins
    }

    /// Starts a fresh server with a disk of `disk` bytes and all datasets.
    pub fn serve(&self, origins: &[OriginEmulator], disk: u64, more: &[&str]) -> Served {
        self.serve_by(Command::new(bin("fletch-server")), origins, disk, more)
    }

    /// As [`Rig::serve`], in the cgroups of a throttle.
    pub fn serve_throttled(&self, by: &Throttle, origins: &[OriginEmulator], disk: u64) -> Served {
        self.serve_by(by.command(&bin("fletch-server")), origins, disk, &[])
    }

    fn serve_by(&self, mut command: Command, origins: &[OriginEmulator], disk: u64, more: &[&str]) -> Served {
        let state = self.at("server");
        std::fs::remove_dir_all(&state).ok();
        std::fs::create_dir_all(&state).expect("mkdir");
        let ready = state.join("ready");
        let path = |flag: &str, name: &str| format!("--{flag}={}", state.join(name).display());
        let daemon = Daemon::start(
            command
                .args(["--listen=127.0.0.1:0", "--cache-free-floor=0", MEMORY])
                .arg(format!("--config={}", self.at("fletch.toml").display()))
                .args([path("socket", "s.sock"), path("state-dir", "state"), path("cache-dir", "cache")])
                .arg(path("ready-file", "ready"))
                .arg(format!("--cache-size={disk}"))
                .args(more),
            Some(&self.at("server.log")),
        );
        until("the server", || std::fs::read_to_string(&ready).is_ok_and(|s| s.starts_with("http")));
        let url = std::fs::read_to_string(&ready).expect("ready").trim().to_owned();
        for (i, origin) in origins.iter().enumerate() {
            let (name, data, tables) =
                (format!("d{i}"), format!("{}/set", origin.uri()), format!("{}/pack", origin.uri()));
            run(Command::new(bin("fletch"))
                .args(["register", &name, &data, "--tables", &tables, "--quiet", "--server", &url]));
        }
        Served { _daemon: daemon, url }
    }
}

impl Served {
    pub fn client(&self) -> Client {
        let config = ClientConfig::new(self.url.parse().expect("endpoint"), "loader");
        Client::new(ClientConfig { job: "allocation".parse().ok(), ..config }).expect("client")
    }
}
