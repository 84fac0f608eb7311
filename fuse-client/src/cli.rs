//! The settings of a mount, from flags, environment variables and the settings file. They share one schema: a
//! flag wins over a variable, a variable over the file, and the file over the default.

use crate::datasets::node_label::{ACCOUNT_DIR, NodeLabelSettings};
use crate::keeper::HoldSettings;
use crate::kernel_timeout;
use crate::node::settings::{CacheFile, CacheFlags, CacheSettings};
use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use fletch_client::{Servers, TlsOptions, TokenSource};
use fletch_core::JobName;
use fletch_origin::OriginConfig;
use fletch_settings::{ByteSize, Span};
use globset::Glob;
use serde::Deserialize;
use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

mod settings;

pub use settings::{
    Action, DatasetsSettings, FallbackSettings, ProcessSettings, Settings, TablesDisk, Target,
};

/// How long a keeper of other processes waits for the next one.
const HOLD_FOR: Duration = Duration::from_secs(24 * 3600);

/// The keys of the settings file.
pub const KEYS: &[&str] = &[
    "server",
    "job",
    "token_file",
    "ca_file",
    "cert_file",
    "key_file",
    "allow_other",
    "survive",
    "memory.max",
    "memory.tables",
    "io.timeout",
    "io.map_timeout",
    "fuse.threads",
    "fuse.push",
    "metrics.listen",
    "log.format",
    "origin_fallback",
    "tables",
    "uri",
    "cache.dir",
    "cache.size",
    "cache.free_floor",
    "datasets.tags",
    "datasets.keep",
    "datasets.mounts_max",
    "datasets.interval",
];

const EXAMPLES: &str = "\
Examples:
  fletch-mount photos /mnt/photos --server http://cache.example:7380
  fletch-mount photos@v2 /mnt/photos --server http://cache.example:7380 --cache-size 200GiB --daemon
  fletch-mount photos /mnt/photos --tables s3://bucket/photos --config fletch.toml
  fletch-mount --datasets /mnt/datasets --server http://a.example:7380,http://b.example:7380 --allow-other

";

const AFTER: &str = "\
Options are variables, too: --io-timeout is FLETCH_IO_TIMEOUT (not --daemon, --report, --datasets, --hold).
Exit codes: 0 ok, 1 failed, 2 usage, 4 server unreachable, 5 denied. A dead mount at DIR is replaced.";

/// The examples come before the options, of which there are many.
const TEMPLATE: &str = "{about-with-newline}\n{before-help}{usage-heading} {usage}\n\n{all-args}{after-help}";

/// The flags in place of DATASET and DIR.
const NO_MOUNT: [&str; 3] = ["datasets", "hold", "status"];

/// How the program is called.
const USAGE: &str = "fletch-mount [OPTIONS] DATASET DIR
       fletch-mount [OPTIONS] --datasets DIR
       fletch-mount --hold SOCKET --hold-below DIR";

/// Shows a version of a dataset, or all datasets of a server, as read-only directories.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "fletch-mount",
    version,
    max_term_width = 110,
    help_template = TEMPLATE,
    override_usage = USAGE,
    before_help = EXAMPLES,
    after_help = AFTER
)]
pub struct Cli {
    /// NAME, NAME@TAG or NAME@ROOT (a tag is resolved once, when the mount starts)
    #[arg(required_unless_present_any = NO_MOUNT, conflicts_with_all = NO_MOUNT)]
    pub dataset: Option<String>,
    /// Directory to mount at, which must exist
    #[arg(required_unless_present_any = NO_MOUNT, conflicts_with_all = NO_MOUNT)]
    pub dir: Option<PathBuf>,
    /// Server: http(s)://host:port or unix:PATH; of a cluster several: URL,URL
    #[arg(long, env = "FLETCH_SERVER", value_name = "URL", hide_env = true)]
    pub server: Option<Servers>,
    /// File with the bearer token (FLETCH_TOKEN gives the token itself)
    #[arg(long, env = "FLETCH_TOKEN_FILE", value_name = "FILE", hide_env = true)]
    pub token_file: Option<PathBuf>,
    /// CAs of an https:// server, in PEM form [default: the system's]
    #[arg(long, env = "FLETCH_CA_FILE", value_name = "FILE", hide_env = true)]
    pub ca_file: Option<PathBuf>,
    /// Certificate of this client, if the server requires one
    #[arg(long, env = "FLETCH_CERT_FILE", value_name = "FILE", hide_env = true)]
    pub cert_file: Option<PathBuf>,
    /// Key of that certificate
    #[arg(long, env = "FLETCH_KEY_FILE", value_name = "FILE", hide_env = true)]
    pub key_file: Option<PathBuf>,
    /// Job that the server accounts the bytes to [default: an id of this mount]
    #[arg(long, env = "FLETCH_JOB", value_name = "NAME", hide_env = true)]
    pub job: Option<JobName>,
    /// Let other users read the mount
    #[arg(long, env = "FLETCH_ALLOW_OTHER", value_name = "BOOL", num_args = 0..=1,
        default_missing_value = "true", hide_env = true)]
    pub allow_other: Option<bool>,
    /// Time within which every read ends, 100ms to 1h [default: 30s]
    #[arg(long, env = "FLETCH_IO_TIMEOUT", value_name = "TIME", hide_env = true)]
    pub io_timeout: Option<Span>,
    /// Time that a mapped page waits for a server that is away [default: 10m]
    #[arg(long, env = "FLETCH_MAP_TIMEOUT", value_name = "TIME", hide_env = true)]
    pub map_timeout: Option<Span>,
    /// Run in the background; return when the mount is usable
    #[arg(long)]
    pub daemon: bool,
    /// Let readers wait when the process dies [default: true]
    #[arg(long, env = "FLETCH_SURVIVE", value_name = "BOOL", num_args = 0..=1,
        default_missing_value = "true", hide_env = true, hide_possible_values = true)]
    pub survive: Option<bool>,
    /// Leave the mounts to the keeper at this socket (see --hold)
    #[arg(long, env = "FLETCH_KEEPER", value_name = "SOCKET", hide_env = true)]
    pub keeper: Option<PathBuf>,
    /// Hold the mounts of processes with --keeper SOCKET
    #[arg(long, value_name = "SOCKET", requires = "hold_below", conflicts_with_all = ["datasets", "daemon"])]
    pub hold: Option<PathBuf>,
    /// The directory below which those processes may mount
    #[arg(long, value_name = "DIR", requires = "hold")]
    pub hold_below: Option<PathBuf>,
    /// Time that mounts wait for the next process [default: 24h]
    #[arg(long, value_name = "TIME", requires = "hold")]
    pub hold_for: Option<Span>,
    /// Say which processes hold and serve the mount at DIR
    #[arg(long, value_name = "DIR", conflicts_with_all = ["datasets", "hold", "daemon"])]
    pub status: Option<PathBuf>,
    /// Say so as JSON
    #[arg(long, requires = "status")]
    pub json: bool,
    /// Stay in the foreground (the default)
    #[arg(long, conflicts_with = "daemon", hide = true)]
    pub foreground: bool,
    /// Settings file (TOML)
    #[arg(long, env = "FLETCH_CONFIG", value_name = "FILE", hide_env = true)]
    pub config: Option<PathBuf>,
    /// State and logs [default: /var/lib/fletch, or ~/.local/state/fletch]
    #[arg(long, env = "FLETCH_STATE_DIR", value_name = "DIR", hide_env = true)]
    pub state_dir: Option<PathBuf>,
    /// Read the origin while the server is gone; a store needs [[origin]]
    #[arg(long, env = "FLETCH_ORIGIN_FALLBACK", value_name = "BOOL", num_args = 0..=1,
        default_missing_value = "true", hide_env = true, hide_possible_values = true, help_heading = WITHOUT)]
    pub origin_fallback: Option<bool>,
    /// Tables of the version, to mount without a server
    #[arg(long, env = "FLETCH_TABLES", value_name = "URI", hide_env = true, help_heading = WITHOUT)]
    pub tables: Option<String>,
    /// Objects, if they are neither where the server says nor beside --tables
    #[arg(long, env = "FLETCH_URI", value_name = "URI", hide_env = true, help_heading = WITHOUT)]
    pub uri: Option<String>,
    /// Mount every dataset that the token may read, at DIR/NAME (as root)
    #[arg(long, value_name = "DIR", help_heading = DATASETS)]
    pub datasets: Option<PathBuf>,
    /// Mount the tags that match, too, at DIR/NAME@TAG
    #[arg(long, env = "FLETCH_TAGS", value_name = "GLOB", hide_env = true, help_heading = DATASETS)]
    pub tags: Option<Glob>,
    /// Time for which a version stays mounted when no tag names it [default: 24h]
    #[arg(long, env = "FLETCH_KEEP", value_name = "TIME", hide_env = true, help_heading = DATASETS)]
    pub keep: Option<Span>,
    /// The most versions mounted at once, 1 to 4096 [default: 256]
    #[arg(long, env = "FLETCH_MOUNTS_MAX", value_name = "N", hide_env = true, help_heading = DATASETS)]
    pub mounts_max: Option<usize>,
    /// Time between two looks at the server's datasets, 1s to 1h [default: 5s]
    #[arg(long, env = "FLETCH_INTERVAL", value_name = "TIME", hide_env = true, help_heading = DATASETS)]
    pub interval: Option<Span>,
    /// File that exists while the datasets are mounted
    #[arg(long, value_name = "FILE", help_heading = DATASETS)]
    pub ready_file: Option<PathBuf>,
    /// In a pod: label this node fletch/mounts=ready while they are mounted
    #[arg(long, value_name = "NODE", requires = "datasets", help_heading = DATASETS)]
    pub label_node: Option<String>,
    /// Files that exist while the node is ready [default: --ready-file]
    #[arg(long, value_name = "FILE,FILE", requires = "label_node", value_delimiter = ',',
        help_heading = DATASETS)]
    pub label_when: Vec<PathBuf>,
    /// Directory of the service account, if it is not where Kubernetes has it
    #[arg(long, value_name = "DIR", requires = "label_node", default_value = ACCOUNT_DIR, hide = true)]
    pub label_account: PathBuf,
    /// The flags of the node store.
    #[command(flatten)]
    pub cache: CacheFlags,
    /// Memory for chunks, idle and in use [default: 256MiB, over unix: 64MiB]
    #[arg(long, env = "FLETCH_MEMORY", value_name = "SIZE", hide_env = true, help_heading = TUNING)]
    pub memory: Option<ByteSize>,
    /// Memory for tables [default: 16MiB, or 64MiB with --tables-disk 0]
    #[arg(long, env = "FLETCH_TABLES_MEMORY", value_name = "SIZE", hide_env = true, help_heading = TUNING)]
    pub tables_memory: Option<ByteSize>,
    /// Disk for tables, in --cache-dir; 0: memory only [default: 4GiB]
    #[arg(long, env = "FLETCH_TABLES_DISK", value_name = "SIZE", hide_env = true, help_heading = TUNING)]
    pub tables_disk: Option<ByteSize>,
    /// Number of FUSE threads, 1 to 16 [default: 2 to 4, by cores]
    #[arg(long, env = "FLETCH_THREADS", value_name = "N", hide_env = true, help_heading = TUNING)]
    pub threads: Option<usize>,
    /// Put small files into the page cache at their first read [default: on]
    #[arg(long, env = "FLETCH_PUSH", value_name = "on|off", hide_env = true, hide_possible_values = true,
        help_heading = TUNING)]
    pub push: Option<Switch>,
    /// Format of log lines [default: text]
    #[arg(long, env = "FLETCH_LOG_FORMAT", value_name = "text|json", hide_env = true,
        hide_possible_values = true, help_heading = WATCHING)]
    pub log_format: Option<LogFormat>,
    /// Log file of --daemon [default: fletch-mount.log in the state directory]
    #[arg(long, env = "FLETCH_LOG_FILE", value_name = "FILE", hide_env = true, help_heading = WATCHING)]
    pub log_file: Option<PathBuf>,
    /// Serve Prometheus metrics at this loopback address
    #[arg(long, env = "FLETCH_METRICS", value_name = "IP:PORT", hide_env = true, help_heading = WATCHING)]
    pub metrics: Option<SocketAddr>,
    /// Serve Prometheus metrics at any address, without a token
    #[arg(long, env = "FLETCH_METRICS_LISTEN", value_name = "IP:PORT", hide_env = true,
        conflicts_with = "metrics", help_heading = WATCHING)]
    pub metrics_listen: Option<SocketAddr>,
    /// Program that starts the server again if it is gone: `PROGRAM up` (`fletch mount` gives it)
    #[arg(long, value_name = "PROGRAM", hide = true, conflicts_with = "datasets")]
    pub restart_with: Option<PathBuf>,
    /// Write the counters to this file, as JSON, when the mount ends
    #[arg(long, value_name = "FILE", help_heading = WATCHING)]
    pub report: Option<PathBuf>,
}

const WITHOUT: &str = "Without the server";
const DATASETS: &str = "All datasets of a server";
const TUNING: &str = "Memory and threads";
const WATCHING: &str = "Logs and numbers";

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// Enabled.
    On,
    /// Disabled.
    Off,
}

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Plain text.
    Text,
    /// One JSON object for each line.
    Json,
}

#[derive(Debug, Default, Deserialize)]
struct File {
    server: Option<String>,
    origin_fallback: Option<bool>,
    tables: Option<String>,
    uri: Option<String>,
    #[serde(default)]
    origin: Vec<OriginConfig>,
    job: Option<JobName>,
    token_file: Option<PathBuf>,
    ca_file: Option<PathBuf>,
    cert_file: Option<PathBuf>,
    key_file: Option<PathBuf>,
    allow_other: Option<bool>,
    survive: Option<bool>,
    #[serde(default)]
    memory: MemoryFile,
    #[serde(default)]
    cache: CacheFile,
    #[serde(default)]
    datasets: DatasetsFile,
    #[serde(default)]
    io: IoFile,
    #[serde(default)]
    fuse: FuseFile,
    #[serde(default)]
    metrics: MetricsFile,
    #[serde(default)]
    log: LogFile,
}

#[derive(Debug, Default, Deserialize)]
struct MemoryFile {
    max: Option<ByteSize>,
    tables: Option<ByteSize>,
}

#[derive(Debug, Default, Deserialize)]
struct DatasetsFile {
    tags: Option<String>,
    keep: Option<Span>,
    mounts_max: Option<usize>,
    interval: Option<Span>,
}

#[derive(Debug, Default, Deserialize)]
struct IoFile {
    timeout: Option<Span>,
    map_timeout: Option<Span>,
}

#[derive(Debug, Default, Deserialize)]
struct FuseFile {
    threads: Option<usize>,
    push: Option<Switch>,
}

#[derive(Debug, Default, Deserialize)]
struct MetricsFile {
    listen: Option<SocketAddr>,
}

#[derive(Debug, Default, Deserialize)]
struct LogFile {
    format: Option<LogFormat>,
}

/// The least memory that a mount works with: two of the largest chunks.
const MEMORY_BYTES_MIN: u64 = 32 << 20;
/// The default of `--tables-disk`: the tables of about 25 million files.
const TABLES_DISK: u64 = 4 << 30;
/// `--map-timeout` by default, and at most.
const MAP_TIMEOUT: Duration = Duration::from_secs(600);
const MAP_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);
/// The default of `--keep`.
const KEEP: Duration = Duration::from_secs(24 * 3600);
/// The default and the largest value of `--mounts-max`.
const MOUNTS_MAX: (usize, usize) = (256, 4096);
/// The default, the smallest and the largest value of `--interval`.
const INTERVAL: (Duration, Duration, Duration) =
    (Duration::from_secs(5), Duration::from_secs(1), Duration::from_secs(3600));

/// The flags of `--datasets`, with the table of the settings file.
struct DatasetsFlags {
    tags: Option<Glob>,
    keep: Option<Span>,
    mounts_max: Option<usize>,
    interval: Option<Span>,
    ready_file: Option<PathBuf>,
    /// The node to label, and the files that exist while it is ready.
    label: Option<(String, Vec<PathBuf>)>,
    label_account: PathBuf,
    file: DatasetsFile,
}

impl DatasetsFlags {
    /// Returns the settings for all datasets below `dir`.
    fn into_settings(self, dir: PathBuf, process: ProcessSettings) -> Result<DatasetsSettings> {
        let file = self.file;
        let glob = |text: String| Glob::new(&text).with_context(|| format!("datasets.tags {text:?}"));
        let tags = self.tags.map(Ok).or(file.tags.map(glob)).transpose()?;
        let mounts_max = self.mounts_max.or(file.mounts_max).unwrap_or(MOUNTS_MAX.0);
        if !(1..=MOUNTS_MAX.1).contains(&mounts_max) {
            bail!("--mounts-max {mounts_max} is out of range: give 1 to {}", MOUNTS_MAX.1);
        }
        let interval = self.interval.or(file.interval).map_or(INTERVAL.0, |s| s.0);
        if !(INTERVAL.1..=INTERVAL.2).contains(&interval) {
            bail!("--interval {} is out of range: give 1s to 1h", Span(interval));
        }
        let node_label = match self.label {
            None => None,
            Some((node, when)) => {
                let when = if when.is_empty() { self.ready_file.iter().cloned().collect() } else { when };
                if when.is_empty() {
                    bail!("--label-node says when the datasets are mounted: give --ready-file FILE, too");
                }
                Some(NodeLabelSettings { node, when, account: self.label_account })
            }
        };
        Ok(DatasetsSettings {
            dir,
            node_label,
            server: process.server.clone().context("--datasets needs a server: give --server URL")?,
            tags: tags.map(|glob| glob.compile_matcher()),
            keep: self.keep.or(file.keep).map_or(KEEP, |s| s.0),
            mounts_max,
            interval,
            ready_file: self.ready_file,
            process,
        })
    }

    /// Refuses flags that have no meaning for one mount.
    fn refuse(&self) -> Result<()> {
        let given = [
            ("--tags", self.tags.is_some()),
            ("--keep", self.keep.is_some()),
            ("--mounts-max", self.mounts_max.is_some()),
            ("--interval", self.interval.is_some()),
            ("--ready-file", self.ready_file.is_some()),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => bail!("{flag} applies to all datasets of a server: add --datasets DIR"),
            None => Ok(()),
        }
    }
}

impl Cli {
    /// Returns the settings of a keeper, if this process is to be one and nothing else.
    ///
    /// # Errors
    /// A usage error.
    pub fn hold_settings(&self) -> Result<Option<HoldSettings>> {
        let (Some(socket), Some(below)) = (&self.hold, &self.hold_below) else { return Ok(None) };
        let below = below.canonicalize().with_context(|| format!("--hold-below {}", below.display()))?;
        if below.parent().is_none() {
            bail!("--hold-below / would let processes mount anywhere: give a directory for mounts");
        }
        let socket = std::path::absolute(socket).with_context(|| format!("--hold {}", socket.display()))?;
        let keep = self.hold_for.map_or(HOLD_FOR, |span| span.0);
        Ok(Some(HoldSettings { socket, below, keep }))
    }

    /// Returns what to do. Reads the settings file and the token.
    ///
    /// # Errors
    /// A usage error: which setting is wrong, and what to give instead.
    pub fn into_action(self) -> Result<Action> {
        let file: File = match &self.config {
            Some(path) => fletch_settings::load(path, &[KEYS, fletch_origin::KEYS].concat())?,
            None => File::default(),
        };
        let absolute = |p: PathBuf| std::path::absolute(&p).with_context(|| format!("path {}", p.display()));
        let plain = |text: Option<String>| {
            // A relative path counts from the working directory.
            text.map(|t| fletch_origin::OriginUri::from_arg(&t).map(|u| u.to_string())).transpose()
        };
        let (tables, uri) = (plain(self.tables.or(file.tables))?, plain(self.uri.or(file.uri))?);
        let one_mount_only = [
            ("--tables", tables.is_some()),
            ("--uri", uri.is_some()),
            ("--origin-fallback", self.origin_fallback.or(file.origin_fallback) == Some(true)),
            ("--report", self.report.is_some()),
        ];
        if let (Some(_), Some((flag, _))) = (&self.datasets, one_mount_only.iter().find(|(_, given)| *given))
        {
            bail!("{flag} applies to one mount and cannot be combined with --datasets");
        }
        let server = match (self.server, file.server) {
            (Some(s), _) => Some(s),
            (None, Some(s)) => Some(s.parse()?),
            (None, None) if tables.is_some() => None,
            (None, None) => bail!(
                "no server: give --server http(s)://host:port or unix:PATH (or set FLETCH_SERVER); \
                 --tables URI mounts without one"
            ),
        };
        let from = tables.clone();
        let fallback = self.origin_fallback.or(file.origin_fallback).unwrap_or(server.is_none());
        if !fallback && (tables.is_some() || uri.is_some()) {
            bail!("--tables and --uri apply only while the server is gone: add --origin-fallback");
        }
        let in_state_dir = |name| self.state_dir.clone().or_else(default_state_dir).map(|d| d.join(name));
        let fallback = fallback.then(|| FallbackSettings {
            uri,
            tables,
            origins: file.origin,
            remembered_dir: in_state_dir("known"),
        });
        // Absolute: it is read again later.
        let token_file = self.token_file.or(file.token_file).map(absolute).transpose()?;
        let token = TokenSource::of(std::env::var("FLETCH_TOKEN").ok(), token_file)?;
        let tls = TlsOptions {
            ca_file: self.ca_file.or(file.ca_file),
            cert_file: self.cert_file.or(file.cert_file),
            key_file: self.key_file.or(file.key_file),
        };
        let tls = tls.absolute().context("the files of TLS")?;
        let tables_disk = self.tables_disk.or(file.cache.tables).map_or(TABLES_DISK, |b| b.0);
        let tables_dir = self.cache.dir(&file.cache)?.filter(|_| tables_disk > 0);
        let tables_disk = tables_dir.map(|dir| TablesDisk {
            dir: dir.join(format!("tables-{}", nix::unistd::geteuid())),
            bytes: tables_disk,
        });
        let cache = self.cache.into_settings(file.cache, server.as_ref(), from.as_deref(), token.as_ref())?;
        let cache = cache.map(|c| CacheSettings { records: in_state_dir("caches"), ..c });
        let memory_default = if server.as_ref().is_some_and(Servers::is_unix) { 64 << 20 } else { 256 << 20 };
        let memory_bytes = self.memory.or(file.memory.max).map_or(memory_default, |b| b.0);
        if memory_bytes < MEMORY_BYTES_MIN {
            bail!(
                "--memory {} is too small: give at least {}",
                ByteSize(memory_bytes),
                ByteSize(MEMORY_BYTES_MIN)
            );
        }
        let tables_bytes = self.tables_memory.or(file.memory.tables).map(|b| b.0);
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let threads = self.threads.or(file.fuse.threads).unwrap_or(cores.clamp(2, 4));
        if !(1..=16).contains(&threads) {
            bail!("--threads {threads} is out of range: give 1 to 16");
        }
        let io_timeout = self.io_timeout.or(file.io.timeout).map_or(Duration::from_secs(30), |s| s.0);
        if io_timeout < Duration::from_millis(100) || io_timeout > Duration::from_secs(3600) {
            bail!("--io-timeout {} is out of range: give 100ms to 1h", Span(io_timeout));
        }
        kernel_timeout::check(Path::new(kernel_timeout::SETTINGS), io_timeout)?;
        let map_timeout = self.map_timeout.or(file.io.map_timeout).map_or(MAP_TIMEOUT, |s| s.0);
        if map_timeout > MAP_TIMEOUT_MAX {
            bail!("--map-timeout {} is out of range: give at most 24h", Span(map_timeout));
        }
        if let Some(addr) = self.metrics
            && !addr.ip().is_loopback()
        {
            bail!(
                "--metrics {addr} is no loopback address: the page needs no token, so give 127.0.0.1:PORT, \
                 or give --metrics-listen {addr} if every host that reaches it may read it"
            );
        }
        let process = ProcessSettings {
            server,
            job: self.job.or(file.job).map_or_else(default_job, Ok)?,
            token,
            tls,
            allow_other: self.allow_other.or(file.allow_other).unwrap_or(false),
            memory_bytes,
            tables_bytes,
            tables_disk,
            cache,
            threads,
            io_timeout,
            map_timeout,
            survive: self.survive.or(file.survive),
            keeper: self.keeper.map(absolute).transpose()?,
            push: self.push.or(file.fuse.push).unwrap_or(Switch::On) == Switch::On,
            log_format: self.log_format.or(file.log.format).unwrap_or(LogFormat::Text),
            metrics: self.metrics.or(self.metrics_listen).or(file.metrics.listen),
        };
        let flags = DatasetsFlags {
            tags: self.tags,
            keep: self.keep,
            mounts_max: self.mounts_max,
            interval: self.interval,
            ready_file: self.ready_file.map(absolute).transpose()?,
            label: self.label_node.map(|node| (node, self.label_when)),
            label_account: self.label_account,
            file: file.datasets,
        };
        match (self.datasets, self.dataset, self.dir) {
            (Some(dir), ..) => Ok(Action::Datasets(Box::new(flags.into_settings(absolute(dir)?, process)?))),
            (None, Some(dataset), Some(dir)) => {
                flags.refuse()?;
                Ok(Action::Mount(Box::new(Settings {
                    target: dataset.parse()?,
                    dir: absolute(dir)?,
                    fallback,
                    report: self.report.map(absolute).transpose()?,
                    restart: self.restart_with,
                    process,
                })))
            }
            (None, ..) => bail!("give DATASET and DIR, or --datasets DIR"),
        }
    }
}

/// Returns the default state directory of this user.
#[must_use]
pub fn default_state_dir() -> Option<PathBuf> {
    fletch_settings::state_dir(nix::unistd::geteuid().is_root())
}

/// Returns the default job name: host and process id, which tell mounts apart in the server's accounts.
fn default_job() -> Result<JobName> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "host".into());
    let host: String =
        host.trim().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(64).collect();
    Ok(JobName::new(&format!("mount-{host}-{}", std::process::id()))?)
}

#[cfg(test)]
mod tests;
