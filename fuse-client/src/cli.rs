//! The settings of a mount, from flags, environment variables and the settings file. They share one schema: a
//! flag wins over a variable, a variable over the file, and the file over the default.

use crate::node::settings::{CacheFile, CacheFlags, CacheSettings};
use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use fletch_client::{Endpoint, TokenSource};
use fletch_core::{DatasetName, JobName, Root, TagName};
use fletch_origin::OriginConfig;
use fletch_settings::{ByteSize, Span};
use globset::{Glob, GlobMatcher};
use serde::Deserialize;
use std::{net::SocketAddr, path::PathBuf, str::FromStr, time::Duration};

/// The keys of the settings file.
pub const KEYS: &[&str] = &[
    "server",
    "job",
    "token_file",
    "allow_other",
    "memory.max",
    "memory.tables",
    "io.timeout",
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
  fletch-mount --datasets /mnt/datasets --server http://cache.example:7380 --allow-other

";

const AFTER: &str = "\
Options are variables, too: --io-timeout is FLETCH_IO_TIMEOUT (not --daemon, --report, --datasets).
Exit codes: 0 ok, 1 failed, 2 usage, 4 server unreachable, 5 denied. A dead mount at DIR is replaced.";

/// The examples come before the options, of which there are many.
const TEMPLATE: &str = "{about-with-newline}\n{before-help}{usage-heading} {usage}\n\n{all-args}{after-help}";

/// How the program is called.
const USAGE: &str = "fletch-mount [OPTIONS] DATASET DIR
       fletch-mount [OPTIONS] --datasets DIR";

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
    #[arg(required_unless_present = "datasets", conflicts_with = "datasets")]
    pub dataset: Option<String>,
    /// Directory to mount at, which must exist
    #[arg(required_unless_present = "datasets", conflicts_with = "datasets")]
    pub dir: Option<PathBuf>,
    /// Server: http://host:port or unix:PATH
    #[arg(long, env = "FLETCH_SERVER", value_name = "URL", hide_env = true)]
    pub server: Option<Endpoint>,
    /// File with the bearer token (FLETCH_TOKEN gives the token itself)
    #[arg(long, env = "FLETCH_TOKEN_FILE", value_name = "FILE", hide_env = true)]
    pub token_file: Option<PathBuf>,
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
    /// Run in the background; return when the mount is usable
    #[arg(long)]
    pub daemon: bool,
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
    /// The flags of the node store.
    #[command(flatten)]
    pub cache: CacheFlags,
    /// Memory for chunks, idle and in use [default: 256MiB, over unix: 64MiB]
    #[arg(long, env = "FLETCH_MEMORY", value_name = "SIZE", hide_env = true, help_heading = TUNING)]
    pub memory: Option<ByteSize>,
    /// Memory for the tables of the version [default: 64MiB]
    #[arg(long, env = "FLETCH_TABLES_MEMORY", value_name = "SIZE", hide_env = true, help_heading = TUNING)]
    pub tables_memory: Option<ByteSize>,
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
    allow_other: Option<bool>,
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

/// The version to mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The dataset.
    pub dataset: DatasetName,
    /// The tag or root, as text.
    pub version: String,
}

impl FromStr for Target {
    type Err = anyhow::Error;

    fn from_str(s: &str) -> Result<Self> {
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
    /// The other settings.
    pub process: ProcessSettings,
}

/// The settings of a process that mounts all datasets.
#[derive(Debug, Clone)]
pub struct DatasetsSettings {
    /// The directory with a link for each dataset, absolute.
    pub dir: PathBuf,
    /// The server.
    pub server: Endpoint,
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
    /// The other settings.
    pub process: ProcessSettings,
}

/// The settings that all mounts of a process share.
#[derive(Debug, Clone)]
pub struct ProcessSettings {
    /// The server; `None` only with `--tables`.
    pub server: Option<Endpoint>,
    /// The job to read for.
    pub job: JobName,
    /// The token.
    pub token: Option<TokenSource>,
    /// Whether other users may read.
    pub allow_other: bool,
    /// The memory for chunks, in bytes.
    pub memory_bytes: u64,
    /// The memory for tables, in bytes.
    pub tables_bytes: u64,
    /// The node store, if the process takes part in one.
    pub cache: Option<CacheSettings>,
    /// The number of threads that receive requests of the kernel.
    pub threads: usize,
    /// The time within which every read ends.
    pub io_timeout: Duration,
    /// Whether to push pages.
    pub push: bool,
    /// The format of log lines.
    pub log_format: LogFormat,
    /// The address of the metrics page.
    pub metrics: Option<SocketAddr>,
}

/// The least memory that a mount works with: two of the largest chunks.
const MEMORY_BYTES_MIN: u64 = 32 << 20;
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
        Ok(DatasetsSettings {
            dir,
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
                "no server: give --server http://host:port or --server unix:PATH (or set FLETCH_SERVER); \
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
        // Absolute: a daemon has another working directory.
        let token_file = self.token_file.or(file.token_file).map(absolute).transpose()?;
        let token = TokenSource::of(std::env::var("FLETCH_TOKEN").ok(), token_file)?;
        let cache = self.cache.into_settings(file.cache, server.as_ref(), from.as_deref(), token.as_ref())?;
        let cache = cache.map(|c| CacheSettings { records: in_state_dir("caches"), ..c });
        let memory_default =
            if server.as_ref().is_some_and(Endpoint::is_unix) { 64 << 20 } else { 256 << 20 };
        let memory_bytes = self.memory.or(file.memory.max).map_or(memory_default, |b| b.0);
        if memory_bytes < MEMORY_BYTES_MIN {
            bail!(
                "--memory {} is too small: give at least {}",
                ByteSize(memory_bytes),
                ByteSize(MEMORY_BYTES_MIN)
            );
        }
        let tables_bytes = self.tables_memory.or(file.memory.tables).map_or(64 << 20, |b| b.0);
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let threads = self.threads.or(file.fuse.threads).unwrap_or(cores.clamp(2, 4));
        if !(1..=16).contains(&threads) {
            bail!("--threads {threads} is out of range: give 1 to 16");
        }
        let io_timeout = self.io_timeout.or(file.io.timeout).map_or(Duration::from_secs(30), |s| s.0);
        if io_timeout < Duration::from_millis(100) || io_timeout > Duration::from_secs(3600) {
            bail!("--io-timeout {} is out of range: give 100ms to 1h", Span(io_timeout));
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
            allow_other: self.allow_other.or(file.allow_other).unwrap_or(false),
            memory_bytes,
            tables_bytes,
            cache,
            threads,
            io_timeout,
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
mod tests {
    use super::*;

    fn into_settings(args: &[&str]) -> Result<Settings> {
        match Cli::try_parse_from([&["fletch-mount"], args].concat())?.into_action()? {
            Action::Mount(settings) => Ok(*settings),
            Action::Datasets(_) => panic!("one mount was asked for"),
        }
    }

    fn all_datasets(args: &[&str]) -> Result<DatasetsSettings> {
        let given = [&["fletch-mount", "--datasets", "d", "--server", "http://h:1"], args].concat();
        match Cli::try_parse_from(given)?.into_action()? {
            Action::Datasets(settings) => Ok(*settings),
            Action::Mount(_) => panic!("all datasets were asked for"),
        }
    }

    #[test]
    fn all_datasets_have_settings_of_their_own() {
        let s = all_datasets(&[]).expect("usable");
        assert!(s.dir.is_absolute() && s.tags.is_none() && s.ready_file.is_none());
        assert_eq!((s.mounts_max, s.keep, s.interval), (256, KEEP, INTERVAL.0));
        let s = all_datasets(&["--tags", "v*", "--keep", "1h", "--metrics-listen", "0.0.0.0:9400"]);
        let s = s.expect("usable");
        assert!(s.tags.is_some_and(|t| t.is_match("v2") && !t.is_match("latest")));
        assert_eq!(s.keep, Duration::from_secs(3600));
        assert!(s.process.metrics.is_some_and(|a| !a.ip().is_loopback()));
        let cases: &[(&[&str], &str)] = &[
            (&["--origin-fallback"], "--origin-fallback applies to one mount"),
            (&["--report", "r"], "--report"),
            (&["--mounts-max", "0"], "1 to 4096"),
            (&["--interval", "1ms"], "1s to 1h"),
            (&["photos", "m"], "cannot be used with"),
            (&["--tags", "["], "--tags"),
        ];
        for (args, says) in cases {
            let e = all_datasets(args).expect_err("refused");
            assert!(format!("{e:#}").contains(says), "{args:?}: {e:#}");
        }
    }

    #[test]
    fn the_command_is_well_formed_and_has_its_defaults() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
        let s = into_settings(&["photos@v1", "m", "--server", "http://127.0.0.1:7380"]).expect("usable");
        assert_eq!(
            s.target,
            Target { dataset: DatasetName::new("photos").expect("name"), version: "v1".into() }
        );
        assert_eq!((s.process.memory_bytes, s.process.tables_bytes), (256 << 20, 64 << 20));
        assert!(s.process.push && !s.process.allow_other && s.dir.is_absolute());
        assert!((2..=4).contains(&s.process.threads));
        let s = into_settings(&["photos", "m", "--server", "unix:/x"]).expect("usable");
        assert_eq!((s.target.version.as_str(), s.process.memory_bytes), ("latest", 64 << 20));
        assert!(s.process.job.as_str().starts_with("mount-"));
    }

    #[test]
    fn help_begins_with_examples_and_gives_each_option_a_line() {
        use clap::CommandFactory;
        let asked = Cli::command().term_width(110).try_get_matches_from(["fletch-mount", "--help"]);
        let help = asked.expect_err("the help is no mount").to_string();
        let at = |text: &str| help.find(text).unwrap_or_else(|| panic!("{text:?} is not in\n{help}"));
        assert!(at("Examples:") < at("Usage:") && at("Usage:") < at("Options:"), "{help}");
        let options = Cli::command().get_arguments().count();
        let lines = help.lines().count();
        // The examples, the usage, the headings with a blank line before each, and the end take the rest.
        assert!(lines <= options + 28, "{lines} lines for {options} options\n{help}");
        assert!(help.lines().all(|l| l.chars().count() <= 110), "{help}");
    }

    #[test]
    fn tables_allow_a_mount_without_a_server() {
        let s = into_settings(&["d", "m", "--tables", "/"]).expect("usable");
        let without = s.fallback.expect("goes on without");
        assert!(s.process.server.is_none() && without.uri.is_none() && without.tables.is_some());
        assert!(into_settings(&["d", "m", "--server", "unix:/x"]).expect("usable").fallback.is_none());
        let s = into_settings(&["d", "m", "--server", "unix:/x", "--origin-fallback"]).expect("usable");
        assert!(s.fallback.is_some_and(|w| w.tables.is_none()));
    }

    #[test]
    fn usage_errors_say_what_to_give() {
        let cases: &[(&[&str], &str)] = &[
            (&["d", "m"], "--server"),
            (&["a/b", "m", "--server", "unix:/x"], "dataset name"),
            (&["d@..", "m", "--server", "unix:/x"], "tag name"),
            (&["d", "m", "--server", "localhost"], "http://host:port"),
            (&["d", "m", "--server", "unix:/x", "--tables", "/t"], "--origin-fallback"),
            (&["d", "m", "--tables", "ftp://x/y"], "ftp"),
            (&["d", "m", "--server", "unix:/x", "--memory", "1MiB"], "at least"),
            (&["d", "m", "--server", "unix:/x", "--threads", "99"], "1 to 16"),
            (&["d", "m", "--server", "unix:/x", "--metrics", "0.0.0.0:9"], "loopback"),
            (&["d", "m", "--server", "unix:/x", "--io-timeout", "1ms"], "100ms"),
            (&["d", "m", "--server", "unix:/x", "--keep", "1h"], "--datasets DIR"),
        ];
        for (args, says) in cases {
            let e = into_settings(args).expect_err("refused");
            assert!(format!("{e:#}").contains(says), "{args:?}: {e:#}");
        }
    }

    #[test]
    fn flags_win_over_the_file() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("mount.toml");
        let text = "server = \"unix:/file\"\n[memory]\nmax = \"64MiB\"\n\
                    [io]\ntimeout = \"2s\"\n[fuse]\npush = \"off\"\n";
        std::fs::write(&path, text).expect("write");
        let path = path.to_str().expect("utf-8");
        let s = into_settings(&["d", "m", "--config", path]).expect("usable");
        let server = |s: &Settings| s.process.server.as_ref().map(ToString::to_string).unwrap_or_default();
        assert_eq!((server(&s).as_str(), s.process.memory_bytes), ("unix:/file", 64 << 20));
        assert_eq!((s.process.io_timeout, s.process.push), (Duration::from_secs(2), false));
        let s = into_settings(&["d", "m", "--config", path, "--server", "unix:/flag", "--push", "on"])
            .expect("usable");
        assert_eq!((server(&s).as_str(), s.process.push), ("unix:/flag", true));
        std::fs::write(path, "memory.mx = \"1GiB\"\n").expect("write");
        let e = into_settings(&["d", "m", "--config", path]).expect_err("unknown key");
        assert!(format!("{e:#}").contains("memory.max"), "{e:#}");
    }
}
