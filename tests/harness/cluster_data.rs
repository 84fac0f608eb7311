//! A dataset with its tables, and servers of a cluster that know it under the name [`NAME`].

use crate::bins::{bin, command, run, stdout};
use crate::cluster::{ClusterServer, EtcdCluster, agreed};
use crate::readers::Data;
use crate::watch::until;
use fletch_api::{OrderKind, PlanSpec, StartJob, Visitation, WorldSpec};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// The name of the dataset.
pub const NAME: &str = "set";
/// How soon all servers have seen a change that etcd knows.
const NEWS: Duration = Duration::from_secs(3);
/// The length of each file, in bytes.
const FILE_BYTES: u64 = 3_000;

/// Returns the declaration of a job that reads the dataset.
///
/// # Panics
/// If the name is none of a job.
#[must_use]
pub fn declaration(name: &str, order: OrderKind, world: WorldSpec) -> StartJob {
    StartJob {
        name: name.parse().expect("name"),
        dataset: Some(NAME.parse().expect("name")),
        version: None,
        root: None,
        layout: None,
        seed: Some(11),
        order,
        buckets: None,
        replay: None,
        plan: PlanSpec::default(),
        world,
        visitation: Visitation::ExactlyOnce,
    }
}

/// A dataset with its tables.
#[derive(Debug)]
pub struct ClusterData {
    /// The files.
    pub data: Data,
    /// The root of its version.
    pub root: String,
    /// The directory of the tables.
    pub tables: PathBuf,
    /// A directory for more.
    pub scratch: TempDir,
}

impl ClusterData {
    /// Makes a dataset of so many files, and indexes it.
    ///
    /// # Panics
    /// If it cannot be made.
    #[must_use]
    pub fn new(seed: u64, files: u64) -> Self {
        let scratch = TempDir::with_prefix("fletch-cluster-").expect("scratch");
        let data = Data::within(&scratch.path().join("data"), seed, files, FILE_BYTES);
        let tables = scratch.path().join("tables");
        fs::create_dir(&tables).expect("tables");
        let mut c = command("fletch");
        c.arg("index").arg(&data.dir).arg("--to").arg(&tables);
        c.arg("--state-dir").arg(scratch.path().join("state"));
        let root = stdout(&run(&mut c));
        ClusterData { data, root, tables, scratch }
    }

    /// Registers the dataset at a server.
    pub fn register(&self, server: &ClusterServer, token: Option<&Path>) {
        let (uri, tables) = (self.data.dir.display().to_string(), self.tables.display().to_string());
        server.register(NAME, &uri, &tables, token);
    }

    /// Starts servers `a`, `b` … that know the dataset. With a token, it does not wait until all know it.
    ///
    /// # Panics
    /// If they do not start, or do not agree.
    #[must_use]
    pub fn servers<const N: usize>(
        &self,
        etcd: &EtcdCluster,
        more: &[&str],
        token: Option<&Path>,
    ) -> [ClusterServer; N] {
        self.servers_of(&[&bin("fletch-server")], etcd, more, token)
    }

    /// As [`Self::servers`], of several builds of the server, in turn.
    ///
    /// # Panics
    /// If they do not start, or do not agree.
    #[must_use]
    pub fn servers_of<const N: usize>(
        &self,
        programs: &[&Path],
        etcd: &EtcdCluster,
        more: &[&str],
        token: Option<&Path>,
    ) -> [ClusterServer; N] {
        let words = [&["--cache-free-floor=0"], more].concat();
        let ids = ["a", "b", "c"];
        let servers: [ClusterServer; N] = std::array::from_fn(|i| {
            let mut server = ClusterServer::new(ids[i], etcd, &words);
            server.set_program(programs[i % programs.len()]);
            server.start();
            server
        });
        if token.is_none() {
            let all: Vec<String> = ids[..N].iter().map(|id| format!("{id}:up")).collect();
            agreed(&servers.each_ref(), &all.join(" "), NEWS);
        }
        self.register(&servers[0], token);
        let know = |s: &ClusterServer| s.text("/v1/datasets").contains(&format!("\"{NAME}\""));
        until("all know the dataset", NEWS, || token.is_some() || servers.iter().all(know));
        servers
    }
}
