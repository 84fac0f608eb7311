//! Flags, environment and settings file: one schema, flag over environment over file over default.

use crate::node::settings::{CacheFile, CacheFlags, CacheSettings};
use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use fletch_client::{Endpoint, TokenSource};
use fletch_core::{DatasetName, JobName, Root, TagName};
use fletch_origin::OriginConfig;
use fletch_settings::{ByteSize, Span};
use serde::Deserialize;
use std::{net::SocketAddr, path::PathBuf, str::FromStr, time::Duration};

/// Names of the settings file.
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
];

const EXAMPLES: &str = "\
Examples:
  fletch-mount photos /mnt/photos --server http://cache.example:7380
  fletch-mount photos@v2 /mnt/photos --server http://cache.example:7380 --cache-size 200GiB --daemon
      (the first such mount of a node owns its cache on disk, and serves the others through a socket)
  fletch-mount photos /mnt/photos --tables s3://bucket/photos --config fletch.toml";

/// Shows one version of a dataset as a read-only directory.
///
/// Exit codes: 0 ok, 1 failed, 2 usage, 4 server unreachable, 5 denied.
#[derive(Debug, Clone, Parser)]
#[command(name = "fletch-mount", version, max_term_width = 100, after_help = EXAMPLES)]
pub struct Cli {
    /// Which dataset: NAME, NAME@TAG or NAME@ROOT (a tag is resolved once, now)
    pub dataset: String,
    /// Where to mount it: an existing directory
    pub dir: PathBuf,
    /// Where the server is: http://host:port or unix:PATH
    #[arg(long, env = "FLETCH_SERVER")]
    pub server: Option<Endpoint>,
    /// While the server is gone, read from the origin itself; stores need [[origin]] in --config
    #[arg(long, env = "FLETCH_ORIGIN_FALLBACK", num_args = 0..=1, default_missing_value = "true")]
    pub origin_fallback: Option<bool>,
    /// Take the version's tables from here: a mount without a server, or one that begins while it
    /// is gone (with --origin-fallback it begins with what the server said last, too)
    #[arg(long, env = "FLETCH_TABLES", value_name = "URI")]
    pub tables: Option<String>,
    /// Where the objects are, if not where the server says, or not with --tables
    #[arg(long, env = "FLETCH_URI", value_name = "URI")]
    pub uri: Option<String>,
    /// Where what the server said last is kept, and the log of --daemon [default: /var/lib/fletch as
    /// root, else ~/.local/state/fletch]
    #[arg(long, env = "FLETCH_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// For which job the bytes are read [default: an id of this mount]
    #[arg(long, env = "FLETCH_JOB")]
    pub job: Option<JobName>,
    /// A file with the bearer token, read again when it is refused (or put the token itself into FLETCH_TOKEN)
    #[arg(long, env = "FLETCH_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
    /// Let other users read, too
    #[arg(long, env = "FLETCH_ALLOW_OTHER", num_args = 0..=1, default_missing_value = "true")]
    pub allow_other: Option<bool>,
    /// Go to the background; return when the mount is usable
    #[arg(long)]
    pub daemon: bool,
    /// Stay in the foreground (the default)
    #[arg(long, conflicts_with = "daemon")]
    pub foreground: bool,
    /// Memory for chunks: cached, on their way and being read [default: 256MiB, 64MiB over unix:]
    #[arg(long, env = "FLETCH_MEMORY")]
    pub memory: Option<ByteSize>,
    /// Memory for the tree's tables [default: 64MiB]
    #[arg(long, env = "FLETCH_TABLES_MEMORY")]
    pub tables_memory: Option<ByteSize>,
    /// What of it is kept on this node.
    #[command(flatten)]
    pub cache: CacheFlags,
    /// FUSE threads, each with its own descriptor, 1 to 16 [default: 2 to 4, by cores]
    #[arg(long, env = "FLETCH_THREADS")]
    pub threads: Option<usize>,
    /// Every read ends within this time [default: 30s]
    #[arg(long, env = "FLETCH_IO_TIMEOUT")]
    pub io_timeout: Option<Span>,
    /// Put the rest of a small file into the page cache when its first block is read [default: on]
    #[arg(long, env = "FLETCH_PUSH")]
    pub push: Option<Switch>,
    /// A settings file (TOML)
    #[arg(long, env = "FLETCH_CONFIG")]
    pub config: Option<PathBuf>,
    /// How to log [default: text]
    #[arg(long, env = "FLETCH_LOG_FORMAT")]
    pub log_format: Option<LogFormat>,
    /// Where to log with --daemon [default: fletch-mount.log in the state directory]
    #[arg(long, env = "FLETCH_LOG_FILE")]
    pub log_file: Option<PathBuf>,
    /// Serve Prometheus metrics here (a loopback address)
    #[arg(long, env = "FLETCH_METRICS")]
    pub metrics: Option<SocketAddr>,
    /// Write what was counted here, as JSON, when the mount ends
    #[arg(long)]
    pub report: Option<PathBuf>,
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// Do it.
    On,
    /// Leave it.
    Off,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
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

/// What to mount: a dataset and which version of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The dataset.
    pub dataset: DatasetName,
    /// A tag or a root, as text.
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

/// How to go on without a server.
#[derive(Debug, Clone, Default)]
pub struct FallbackSettings {
    /// Where the objects are, if it was given.
    pub uri: Option<String>,
    /// Where the tables are, if it was given.
    pub tables: Option<String>,
    /// How origins are reached.
    pub origins: Vec<OriginConfig>,
    /// Where what a server said last is kept.
    pub known_versions_dir: Option<PathBuf>,
}

/// Everything decided, nothing checked against the world yet.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What to mount.
    pub target: Target,
    /// Where, absolute.
    pub dir: PathBuf,
    /// The server; none only when tables were given.
    pub server: Option<Endpoint>,
    /// How to go on without it; none means to wait for it.
    pub fallback: Option<FallbackSettings>,
    /// For which job.
    pub job: JobName,
    /// The token, if any.
    pub token: Option<TokenSource>,
    /// Whether other users may read.
    pub allow_other: bool,
    /// Bytes for chunks.
    pub memory_bytes: u64,
    /// Bytes for tables.
    pub tables_bytes: u64,
    /// The store on this node's disk, if there is to be one.
    pub cache: Option<CacheSettings>,
    /// FUSE threads.
    pub threads: usize,
    /// Every read ends within this.
    pub io_timeout: Duration,
    /// Whether to push pages.
    pub push: bool,
    /// How to log.
    pub log_format: LogFormat,
    /// Where metrics are served.
    pub metrics: Option<SocketAddr>,
    /// Where the report goes, absolute.
    pub report: Option<PathBuf>,
}

/// The least memory a mount can work with: two of the largest chunks and some slack.
const MEMORY_BYTES_MIN: u64 = 32 << 20;

impl Cli {
    /// Decides every setting; reads the settings file and the token.
    ///
    /// # Errors
    /// What is wrong with them, all of it usage.
    pub fn into_settings(self) -> Result<Settings> {
        let file: File = match &self.config {
            Some(path) => fletch_settings::load(path, &[KEYS, fletch_origin::KEYS].concat())?,
            None => File::default(),
        };
        let absolute = |p: PathBuf| std::path::absolute(&p).with_context(|| format!("path {}", p.display()));
        let plain = |text: Option<String>| {
            // As a person types it, from where they are.
            text.map(|t| fletch_origin::OriginUri::from_arg(&t).map(|u| u.to_string())).transpose()
        };
        let (tables, uri) = (plain(self.tables.or(file.tables))?, plain(self.uri.or(file.uri))?);
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
            bail!("--tables and --uri say how to go on without the server: give --origin-fallback, too");
        }
        let known_versions_dir =
            || self.state_dir.clone().or_else(default_state_dir).map(|d| d.join("known"));
        let fallback = fallback.then(|| FallbackSettings {
            uri,
            tables,
            origins: file.origin,
            known_versions_dir: known_versions_dir(),
        });
        // Absolute: a daemon has another working directory.
        let token_file = self.token_file.or(file.token_file).map(absolute).transpose()?;
        let token = TokenSource::of(std::env::var("FLETCH_TOKEN").ok(), token_file)?;
        let cache = self.cache.into_settings(file.cache, server.as_ref(), from.as_deref(), token.as_ref())?;
        let memory_default =
            if server.as_ref().is_some_and(Endpoint::is_unix) { 64 << 20 } else { 256 << 20 };
        let memory_bytes = self.memory.or(file.memory.max).map_or(memory_default, |b| b.0);
        if memory_bytes < MEMORY_BYTES_MIN {
            bail!(
                "--memory {} is too little: at least {}",
                ByteSize(memory_bytes),
                ByteSize(MEMORY_BYTES_MIN)
            );
        }
        let tables_bytes = self.tables_memory.or(file.memory.tables).map_or(64 << 20, |b| b.0);
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let threads = self.threads.or(file.fuse.threads).unwrap_or(cores.clamp(2, 4));
        if !(1..=16).contains(&threads) {
            bail!("--threads {threads}: 1 to 16");
        }
        let io_timeout = self.io_timeout.or(file.io.timeout).map_or(Duration::from_secs(30), |s| s.0);
        if io_timeout < Duration::from_millis(100) || io_timeout > Duration::from_secs(3600) {
            bail!("--io-timeout {}: 100ms to 1h", Span(io_timeout));
        }
        let metrics = self.metrics.or(file.metrics.listen);
        if let Some(addr) = metrics
            && !addr.ip().is_loopback()
        {
            bail!("--metrics {addr}: only a loopback address, the page asks for no token");
        }
        Ok(Settings {
            target: self.dataset.parse()?,
            dir: absolute(self.dir)?,
            server,
            fallback,
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
            metrics,
            report: self.report.map(absolute).transpose()?,
        })
    }
}

/// Where this account's mounts keep what outlives them.
#[must_use]
pub fn default_state_dir() -> Option<PathBuf> {
    fletch_settings::state_dir(nix::unistd::geteuid().is_root())
}

/// The mount's own id: unique enough to tell mounts apart in the server's accounts.
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
        Cli::try_parse_from([&["fletch-mount"], args].concat())?.into_settings()
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
        assert_eq!((s.memory_bytes, s.tables_bytes), (256 << 20, 64 << 20));
        assert!(s.push && !s.allow_other && s.dir.is_absolute());
        assert!((2..=4).contains(&s.threads));
        let s = into_settings(&["photos", "m", "--server", "unix:/x"]).expect("usable");
        assert_eq!((s.target.version.as_str(), s.memory_bytes), ("latest", 64 << 20));
        assert!(s.job.as_str().starts_with("mount-"));
    }

    #[test]
    fn a_mount_without_a_server_is_asked_for_by_its_tables() {
        let s = into_settings(&["d", "m", "--tables", "/"]).expect("usable");
        let without = s.fallback.expect("goes on without");
        assert!(s.server.is_none() && without.uri.is_none() && without.tables.is_some());
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
        let text = "server = \"unix:/file\"\n[memory]\nmax = \"64MiB\"\n[io]\ntimeout = \"2s\"\n[fuse]\npush = \"off\"\n";
        std::fs::write(&path, text).expect("write");
        let path = path.to_str().expect("utf-8");
        let s = into_settings(&["d", "m", "--config", path]).expect("usable");
        let server = |s: &Settings| s.server.as_ref().map(ToString::to_string).unwrap_or_default();
        assert_eq!((server(&s).as_str(), s.memory_bytes), ("unix:/file", 64 << 20));
        assert_eq!((s.io_timeout, s.push), (Duration::from_secs(2), false));
        let s = into_settings(&["d", "m", "--config", path, "--server", "unix:/flag", "--push", "on"])
            .expect("usable");
        assert_eq!((server(&s).as_str(), s.push), ("unix:/flag", true));
        std::fs::write(path, "memory.mx = \"1GiB\"\n").expect("write");
        let e = into_settings(&["d", "m", "--config", path]).expect_err("unknown key");
        assert!(format!("{e:#}").contains("memory.max"), "{e:#}");
    }
}
