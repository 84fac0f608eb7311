//! What the command line and the settings file ask for.

use super::LogFormat;
use crate::datasets::node_label::NodeLabelSettings;
use crate::keeper::MountSetName;
use crate::node::{directory::StoreDirectory, settings::CacheSettings};
use anyhow::Result;
use fletch_client::{Servers, TlsOptions, TokenSource};
use fletch_core::{DatasetName, JobName, Root, TagName};
use fletch_origin::OriginConfig;
use fletch_tables::{LocalTables, PartCache};
use globset::GlobMatcher;
use std::{io, net::SocketAddr, path::PathBuf, str::FromStr, time::Duration};

/// The version to mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub dataset: DatasetName,
    /// The tag or root, as text.
    pub version: String,
}

impl FromStr for Target {
    type Err = anyhow::Error;

    fn from_str(s: &str) -> Result<Self> {
        // A dataset's name has neither `/` nor `@`. Directories and URIs are for `fletch mount`.
        if s.contains('/') {
            anyhow::bail!(
                "{s:?} is no dataset name (NAME[@TAG|@ROOT]); run `fletch mount {s} DIR` for a path"
            );
        }
        let (name, version) = s.rsplit_once('@').unwrap_or((s, "latest"));
        if version.parse::<Root>().is_err() {
            TagName::new(version)?;
        }
        Ok(Target { dataset: DatasetName::new(name)?, version: version.to_owned() })
    }
}

/// How the mount reads the origin while the server is gone.
#[derive(Debug, Clone, Default)]
pub struct FallbackSettings {
    /// The URI of the objects, from `--uri`.
    pub uri: Option<String>,
    /// The URI of the tables, from `--tables`.
    pub tables: Option<String>,
    /// The `[[origin]]` tables.
    pub origins: Vec<OriginConfig>,
    /// The directory with the last answers of servers.
    pub remembered_dir: Option<PathBuf>,
}

/// What the program does. Each value is valid by itself; nothing was opened or connected yet.
#[derive(Debug, Clone)]
pub enum Action {
    /// Mount one version.
    Mount(Box<Settings>),
    /// Mount all datasets that the token may read.
    Datasets(Box<DatasetsSettings>),
}

impl Action {
    /// Returns the settings that all mounts of the process share.
    #[must_use]
    pub fn process(&self) -> &ProcessSettings {
        match self {
            Action::Mount(s) => &s.process,
            Action::Datasets(s) => &s.process,
        }
    }
}

/// The settings of a process with one mount.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The version to mount.
    pub target: Target,
    /// The directory to mount at, absolute.
    pub dir: PathBuf,
    /// How to read the origin while the server is gone; `None` means to wait for the server.
    pub fallback: Option<FallbackSettings>,
    /// The path of the report, absolute.
    pub report: Option<PathBuf>,
    /// The program that starts the user's own server again (`PROGRAM up`), if this is that server's mount.
    pub restart: Option<PathBuf>,
    /// The other settings.
    pub process: ProcessSettings,
}

impl Settings {
    /// Returns the name of this process's mounts at its keeper.
    #[must_use]
    pub fn mount_set(&self, dir: PathBuf) -> MountSetName {
        self.process.mount_set(dir, false)
    }
}

impl DatasetsSettings {
    /// Returns the name of this process's mounts at its keeper.
    #[must_use]
    pub fn mount_set(&self) -> MountSetName {
        self.process.mount_set(self.dir.clone(), true)
    }
}

/// The settings of a process that mounts all datasets.
#[derive(Debug, Clone)]
pub struct DatasetsSettings {
    /// The directory with a link for each dataset, absolute.
    pub dir: PathBuf,
    pub server: Servers,
    /// The tags that are mounted in addition to `latest`.
    pub tags: Option<GlobMatcher>,
    /// How long a version stays mounted when no link leads to it.
    pub keep: Duration,
    /// The most versions mounted at once.
    pub mounts_max: usize,
    /// The time between the starts of two passes over the server's datasets.
    pub interval: Duration,
    /// The path of the file that exists while the datasets are mounted, absolute.
    pub ready_file: Option<PathBuf>,
    /// How to label the node in Kubernetes, if it is to be.
    pub node_label: Option<NodeLabelSettings>,
    /// The other settings.
    pub process: ProcessSettings,
}

/// The memory for tables beside a disk for them.
const TABLES_BYTES: u64 = 16 << 20;
/// The memory for tables without one.
const TABLES_BYTES_ALONE: u64 = 64 << 20;

/// The disk for tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TablesDisk {
    /// The directory, absolute. The mounts of a user share it.
    pub dir: PathBuf,
    /// The most bytes in it.
    pub bytes: u64,
}

impl ProcessSettings {
    fn mount_set(&self, dir: PathBuf, has_links: bool) -> MountSetName {
        let (socket, io_timeout) = (self.keeper.clone(), self.io_timeout);
        MountSetName { socket, dir, io_timeout, has_links }
    }

    /// Returns the cache of parts of tables. Blocking. Without a directory that can be used it has memory
    /// only.
    #[must_use]
    pub fn part_cache(&self) -> PartCache {
        let local = self.tables_disk.as_ref().and_then(|disk| {
            // A node store knows whether the file system of its directory is mounted.
            let store = self.cache.as_ref().map(|cache| (StoreDirectory::new(&cache.dir, cache.name), cache));
            let place = store.and_then(|(dir, cache)| Some(dir.mount_memory(cache.records.as_deref()?)));
            let check = move || match &place {
                Some(place) => place.check().map_err(io::Error::other),
                None => Ok(()),
            };
            let opened = LocalTables::open(&disk.dir, disk.bytes, Box::new(check));
            opened.map_err(|error| tracing::warn!(%error, "tables are kept in memory only")).ok()
        });
        let default = if local.is_some() { TABLES_BYTES } else { TABLES_BYTES_ALONE };
        PartCache::new(self.tables_bytes.unwrap_or(default)).with_local(local)
    }
}

/// The settings that all mounts of a process share.
#[derive(Debug, Clone)]
pub struct ProcessSettings {
    /// The servers; `None` only with `--tables`.
    pub server: Option<Servers>,
    /// The job to read for.
    pub job: JobName,
    pub token: Option<TokenSource>,
    /// The certificates for an `https://` server.
    pub tls: TlsOptions,
    /// Whether other users may read.
    pub allow_other: bool,
    /// The memory for chunks, in bytes.
    pub memory_bytes: u64,
    /// The memory for tables, in bytes, if the settings say so.
    pub tables_bytes: Option<u64>,
    /// The disk for tables; `None` if they are in memory only.
    pub tables_disk: Option<TablesDisk>,
    /// The node store, if the process takes part in one.
    pub cache: Option<CacheSettings>,
    /// The number of threads that receive requests of the kernel.
    pub threads: usize,
    /// The time within which every read ends.
    pub io_timeout: Duration,
    /// The time that a READ for a page of a mapped file waits for a server that is away.
    pub map_timeout: Duration,
    /// Whether a keeper holds the mounts ([`crate::keeper`]). `None`: if the kernel can hand requests over.
    pub survive: Option<bool>,
    /// The socket of the keeper that holds the mounts of many processes, absolute.
    pub keeper: Option<PathBuf>,
    /// Whether to push pages.
    pub push: bool,
    /// The format of log lines.
    pub log_format: LogFormat,
    /// The address of the metrics page.
    pub metrics: Option<SocketAddr>,
}
