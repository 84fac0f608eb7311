//! What all these tests need: an origin, and servers that have its dataset.

use fletch_core::Hash;
use fletch_core::cluster::{Member, Placement};
use fletch_testkit::{Backing, EmulatorConfig, Latency, OriginEmulator};
use fletch_tests::bins::{command, run, stdout};
use fletch_tests::cluster::{ClusterServer, EtcdCluster};
use fletch_tests::readers::Data;
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// How soon all servers have seen a change that etcd knows.
pub const NEWS: Duration = Duration::from_secs(2);
/// Bytes of a file, which is a chunk.
pub const FILE: u64 = 256 << 10;

/// An origin with a dataset of small files, each a chunk of its own, and its tables.
pub struct Origin {
    pub data: Data,
    pub emulator: OriginEmulator,
    pub config: String,
    pub tables: String,
    pub root: String,
    pub scratch: TempDir,
}

impl Origin {
    pub fn start(seed: u64, files: u64, first_byte: Option<Duration>) -> Self {
        let data = Data::new(seed, files, FILE);
        let latency = |median| Latency { median, p99: median * 2 };
        let config = EmulatorConfig { first_byte: first_byte.map(latency), ..EmulatorConfig::default() };
        let emulator = OriginEmulator::start(config, Backing::Directory(data.dir.clone()));
        let scratch = TempDir::with_prefix("fletch-reads-").expect("scratch");
        let at = |name: &str| scratch.path().join(name).display().to_string();
        let settings = format!(
            "[[origin]]\nprefix = \"{}\"\nendpoint = \"{}\"\nregion = \"x\"\nallow_http = true\n\
             credentials = \"anonymous\"\ndomains = [\"*\"]\n",
            emulator.uri(),
            emulator.endpoint()
        );
        fs::write(at("fletch.toml"), settings).expect("settings");
        let (config, tables) = (at("fletch.toml"), at("tables"));
        fs::create_dir(&tables).expect("tables");
        let mut index = command("fletch");
        index.args(["index", &emulator.uri(), "--config", &config, "--to", &tables]);
        let root = stdout(&run(index.args(["--state-dir", &at("state")])));
        let origin = Origin { data, emulator, config, tables, root, scratch };
        origin.emulator.reset_counts();
        origin
    }

    pub fn server(&self, id: &str, etcd: &EtcdCluster, more: &[&str]) -> ClusterServer {
        self.server_as(id, etcd, more, None)
    }

    /// Starts a server, which has the dataset. `token`: the file of a token, if the server needs one.
    pub fn server_as(
        &self,
        id: &str,
        etcd: &EtcdCluster,
        more: &[&str],
        token: Option<&Path>,
    ) -> ClusterServer {
        let config = format!("--config={}", self.config);
        let words: Vec<&str> =
            [&config, "--cache-free-floor=0"].into_iter().chain(more.iter().copied()).collect();
        let mut server = ClusterServer::new(id, etcd, &words);
        server.start();
        server.register("set", &self.emulator.uri(), &self.tables, token);
        server
    }

    /// Returns the reads of objects since the last call: how many, and of how many different objects.
    pub fn reads(&self) -> (u64, u64) {
        let counts = self.emulator.counts();
        self.emulator.reset_counts();
        (counts.get, counts.gets.len() as u64)
    }

    /// Returns the files, `times` times, in a random order.
    pub fn shuffled(&self, seed: u64, times: usize) -> Vec<(String, Hash)> {
        let mut files: Vec<_> = (0..times).flat_map(|_| self.data.files.iter().cloned()).collect();
        files.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
        files
    }

    /// Returns the placement of the chunks by the view of a server.
    pub fn placement(&self, server: &ClusterServer) -> Placement {
        let view = server.view();
        let members = view["members"].as_array().expect("members").iter();
        Placement::new(members.map(|m| Member {
            id: m["id"].as_str().expect("id").to_owned(),
            weight: m["weight"].as_f64().expect("weight"),
        }))
    }
}

/// Returns the status and the body of a GET.
pub fn get(url: &str, token: &Path, headers: &[&str]) -> (String, Vec<u8>) {
    let mut c = Command::new("curl");
    c.args(["-sS", "--max-time", "10", "-w", "%{stderr}%{http_code}"]);
    let bearer = format!("Authorization: Bearer {}", fs::read_to_string(token).expect("token").trim());
    c.args(["-H", &bearer]);
    for header in headers {
        c.args(["-H", header]);
    }
    let out = c.arg(url).output().expect("curl runs");
    (String::from_utf8_lossy(&out.stderr).into_owned(), out.stdout)
}
