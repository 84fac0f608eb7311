//! The settings. One table has the key, flag, environment variable and default of every setting.
//!
//! A flag overrides the environment, the environment overrides the file, and the file overrides the default.
//! Reading the settings is pure, except for the settings file: tests pass arguments and an [`Environment`].
//! All faults are reported at once, each with its fix.

mod build;
mod cluster;
mod defaults;
mod local_dir;
mod setting;
mod shared;
mod show;
mod table;

use crate::{
    admin::dashboard::PrometheusUrl,
    app::{
        limits::Limits,
        telemetry::{LogFileConfig, LogFormat},
        tls::TlsFiles,
    },
    cluster::ClusterConfig,
    tenancy::auth::{AllowedHosts, NewToken, SocketAdmins},
};
use build::ConfigBuilder;
use clap::{Arg, ArgAction, ArgMatches, Command, parser::ValueSource};
use fletch_origin::{OriginConfig, OriginUri};
use fletch_settings::{Amount, ByteSize, Span};
use fletch_store::disk::Policy;
pub use local_dir::{LocalDir, lists};
use serde::Deserialize;
use setting::{Form, Setting};
pub use shared::short_hash;
use std::{
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};
use table::SETTINGS;

/// The values of the process on which defaults depend.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// Whether the process runs as root.
    pub root: bool,
    /// `HOME`.
    pub home: Option<PathBuf>,
    /// `XDG_CACHE_HOME`.
    pub cache_home: Option<PathBuf>,
    /// `XDG_STATE_HOME`.
    pub state_home: Option<PathBuf>,
    /// `XDG_RUNTIME_DIR`.
    pub runtime_dir: Option<PathBuf>,
    /// The cgroup's memory limit in bytes.
    pub memory_limit: Option<u64>,
    /// The name of the host.
    pub host: Option<String>,
}

impl Environment {
    /// Returns the environment of this process.
    #[must_use]
    pub fn own() -> Self {
        let dir = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
        Environment {
            root: nix::unistd::geteuid().is_root(),
            home: dir("HOME"),
            cache_home: dir("XDG_CACHE_HOME"),
            state_home: dir("XDG_STATE_HOME"),
            runtime_dir: dir("XDG_RUNTIME_DIR"),
            memory_limit: fletch_host::cgroup::own_memory_limit(),
            host: nix::unistd::gethostname().ok().map(|h| h.to_string_lossy().into_owned()),
        }
    }
}

/// The source of a setting's value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingSource {
    /// A flag.
    Flag(&'static str),
    /// An environment variable.
    Env(String),
    /// The settings file.
    File(PathBuf),
    /// The default.
    Default,
}

impl fmt::Display for SettingSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SettingSource::Flag(name) => write!(f, "flag --{name}"),
            SettingSource::Env(name) => write!(f, "environment {name}"),
            SettingSource::File(path) => write!(f, "file {}", path.display()),
            SettingSource::Default => f.write_str("default"),
        }
    }
}

/// A setting in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EffectiveSetting {
    /// The key in the settings file.
    pub key: &'static str,
    /// The value, as the flag would have it.
    pub value: String,
    form: Form,
    /// The source of the value.
    pub source: SettingSource,
}

/// The settings of the disk tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheConfig {
    /// The directory.
    pub dir: PathBuf,
    /// The bytes that it may occupy, or a part of what the file system has to spare. 0: no disk tier.
    pub size: Amount,
    /// The bytes that stay free on the file system, or a part of all of it.
    pub free_floor: Amount,
    /// The policy that decides which chunks stay.
    pub policy: Policy,
    /// The time between two decisions about the shares of datasets.
    pub decision_interval: Duration,
    /// Which clients of this machine read the disk themselves.
    pub short_circuit: ShortCircuit,
}

/// Which clients of this machine read the disk of the server themselves. Only root and the user of the server
/// ever may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShortCircuit {
    /// Those of a server without tokens, whose callers may all read everything.
    Auto,
    /// Those of a server with tokens, too.
    Always,
    /// None.
    Never,
}

impl FromStr for ShortCircuit {
    type Err = String;
    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "auto" => Ok(ShortCircuit::Auto),
            "always" => Ok(ShortCircuit::Always),
            "never" => Ok(ShortCircuit::Never),
            _ => Err(format!("{word:?} is unknown; write auto, always or never")),
        }
    }
}

/// The settings of the S3 door.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct S3Config {
    /// The address. Loopback only, unless a tokens file is configured.
    pub listen: SocketAddr,
    /// The name of its one bucket.
    pub bucket: String,
    /// The file with the key from which credentials are derived. Not used without a tokens file.
    pub key_file: Option<PathBuf>,
}

/// The configuration of a server.
#[derive(Debug, Clone)]
pub struct Config {
    /// The TCP address, or `None` if it is switched off. Loopback only, unless a tokens file is configured.
    pub listen: Option<SocketAddr>,
    /// The unix socket, or `None` if it is switched off.
    pub socket: Option<PathBuf>,
    /// The disk tier. Its content may vanish at any moment.
    pub cache: CacheConfig,
    /// The state directory. Its content must not vanish.
    pub state_dir: PathBuf,
    /// The limits.
    pub limits: Limits,
    /// The tokens file. Without one, every process of this machine may connect.
    pub auth_tokens: Option<PathBuf>,
    /// The files of TLS. `None`: the TCP listener speaks plain HTTP.
    pub tls: Option<TlsFiles>,
    /// The S3 door, or `None` if it is off.
    pub s3: Option<S3Config>,
    /// The hosts, besides loopback, by which requests may name a server without a tokens file.
    pub hosts: AllowedHosts,
    /// The admins of the unix socket of a server without a tokens file.
    pub socket_admins: SocketAdmins,
    /// The format of log lines.
    pub log_format: LogFormat,
    /// The file for log lines, or `None` for stderr.
    pub log_file: Option<LogFileConfig>,
    /// From which duration on a read gets a log line.
    pub slow_read: Duration,
    /// After how long a server that nobody uses ends. `None`: never.
    pub idle: Option<Duration>,
    /// The directory for traces of sweeps, or `None` if they are not recorded.
    pub trace_dir: Option<PathBuf>,
    /// The directories under which `file://` datasets may be registered. Empty: any, or none with tokens.
    pub local_dirs: Vec<LocalDir>,
    /// Where clients write version tables when they name no place. `None`: below the state directory.
    pub publish_uri: Option<OriginUri>,
    /// The Prometheus that the admin page asks for long histories, or `None`.
    pub prometheus: Option<PrometheusUrl>,
    /// The server's part of its cluster.
    pub cluster: ClusterConfig,
    /// The configured origins.
    pub origins: Vec<OriginConfig>,
    /// The file to which the server writes its URL when it is ready.
    pub ready_file: Option<PathBuf>,
    /// All settings in force.
    pub effective: Vec<EffectiveSetting>,
}

/// The action that the command line asks for.
#[derive(Debug)]
pub enum Action {
    /// Run the server.
    Serve(Box<Config>),
    /// Check the settings.
    Check(Box<Config>),
    /// Print the settings in force.
    Show(Box<Config>),
    /// Make a token.
    NewToken(NewToken),
}

/// Why the settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Help, version, or a command line that cannot be parsed.
    #[error(transparent)]
    Usage(#[from] clap::Error),
    /// Faults, one on each line.
    #[error("{}", .0.join("\n"))]
    Faults(Vec<String>),
}

/// The settings file. A value with a unit is a text or a number.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct File {
    listen: Option<String>,
    socket: Option<String>,
    idle: Option<String>,
    cache: FileCache,
    state: Dir,
    auth: Auth,
    tls: Tls,
    s3: FileS3,
    memory: Memory,
    tables: Tables,
    io: Io,
    log: Log,
    trace: Trace,
    local: Local,
    publish: Publish,
    dashboard: Dashboard,
    cluster: FileCluster,
    limits: FileLimits,
    origin: Vec<OriginConfig>,
}

macro_rules! section {
    ($name:ident { $($field:ident: $ty:ty),* }) => {
        #[derive(Debug, Default, Deserialize)]
        #[serde(default)]
        struct $name { $($field: Option<$ty>),* }
    };
}
section!(Dir { dir: String });
section!(Auth { tokens: String, hosts: Vec<String>, socket_admins: Vec<String> });
section!(Tls { cert_file: String, key_file: String, client_ca_file: String });
section!(FileS3 { listen: String, bucket: String, key_file: String });
section!(FileCache {
    dir: String,
    size: Amount,
    free_floor: Amount,
    policy: String,
    decision_interval: Span,
    short_circuit: String
});
section!(Memory { max: ByteSize, prefetch: Amount });
section!(Tables { memory: ByteSize, disk: ByteSize });
section!(Io { timeout: Span });
section!(Log { format: String, file: String, file_bytes_max: ByteSize, slow_read: Span });
section!(Trace { dir: String, bytes: ByteSize });
section!(Local { dirs: Vec<String> });
section!(Publish { uri: String });
section!(Dashboard { prometheus_url: String });
section!(FileCluster {
    coordinator: String,
    name: String,
    id: String,
    endpoints: Vec<String>,
    advertise_url: String,
    peer_url: String,
    zone: String,
    weight: NumberOrWord,
    member_ttl: Span,
    forget_after: Span,
    stale_max: String,
    user: String,
    password_file: String,
    ca_file: String,
    cert_file: String,
    key_file: String,
    peer_token_file: String,
    insecure_peers: bool,
    peer_ca_file: String,
    peer_cert_file: String,
    peer_key_file: String
});
section!(FileLimits {
    connections: u64,
    socket_connections: u64,
    connections_per_caller: u64,
    requests: u64,
    header_bytes: ByteSize,
    body_bytes: ByteSize,
    batch_bytes: ByteSize,
    head_timeout: Span,
    idle_timeout: Span,
    send_timeout: Span,
    grace: Span,
    jobs: u64,
    job_ttl: Span,
    lease_ttl: Span,
    ledger_bytes: ByteSize,
    versions: u64,
    datasets: u64,
    origin_requests: u64,
    origin_requests_per_origin: Amount,
    root_lookups: u64,
    tenant_jobs: u64,
    tenant_declared_jobs: u64,
    tenant_state_bytes: ByteSize,
    job_bytes: ByteSize
});

/// A number, or a word in its place.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum NumberOrWord {
    Number(u64),
    Word(String),
}

impl fmt::Display for NumberOrWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NumberOrWord::Number(n) => n.fmt(f),
            NumberOrWord::Word(word) => word.fmt(f),
        }
    }
}

/// Returns the command, with a flag and an environment variable for every setting.
#[must_use]
pub fn command() -> Command {
    let settings = SETTINGS.iter().map(|s| {
        Arg::new(s.key)
            .long(s.flag)
            .env(s.env())
            .value_name(s.value)
            .help(s.help)
            .hide_env_values(true)
            .global(true)
    });
    let only = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help).global(true)
    };
    Command::new("fletch-server")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Serves dataset versions by content hash from memory, disk and their origins")
        .args(settings)
        .arg(only("config", "FILE", "Settings file (TOML)").env("FLETCH_CONFIG"))
        .arg(
            only("ready-file", "FILE", "File to which the server writes its URL when it takes requests")
                .env("FLETCH_READY_FILE"),
        )
        .arg(
            Arg::new("config-check")
                .long("config-check")
                .action(ArgAction::SetTrue)
                .help("Check the settings, print them and exit"),
        )
        .subcommand(crate::tenancy::auth::command())
        .subcommand(
            Command::new("config").about("Shows the settings").subcommand_required(true).subcommand(
                Command::new("show")
                    .about("Prints every setting and its source, in the form of a settings file")
                    .arg(
                        Arg::new("effective")
                            .long("effective")
                            .action(ArgAction::SetTrue)
                            .help("Print the settings in force, which `show` does anyway"),
                    ),
            ),
        )
}

/// Reads the command line, the `FLETCH_…` environment variables and the settings file.
///
/// # Errors
/// [`ConfigError`] with every fault.
pub fn read<I, T>(args: I, environment: &Environment) -> Result<Action, ConfigError>
where
    I: IntoIterator<Item = T>,
    T: Into<std::ffi::OsString> + Clone,
{
    let top = command().try_get_matches_from(args)?;
    if let Some(("token", m)) = top.subcommand() {
        return Ok(Action::NewToken(NewToken::read(m)));
    }
    let deepest =
        std::iter::successors(Some(&top), |m| m.subcommand().map(|(_, m)| m)).last().unwrap_or(&top);
    let config = Box::new(assemble(deepest, environment)?);
    Ok(if top.subcommand().is_some() {
        Action::Show(config)
    } else if top.get_flag("config-check") {
        Action::Check(config)
    } else {
        Action::Serve(config)
    })
}

fn assemble(matches: &ArgMatches, environment: &Environment) -> Result<Config, ConfigError> {
    let path = |name: &str| matches.get_one::<String>(name).map(PathBuf::from);
    let (file, file_path) = match path("config") {
        None => (File::default(), PathBuf::new()),
        Some(path) => {
            let keys: Vec<&str> =
                SETTINGS.iter().map(|s| s.key).chain(fletch_origin::KEYS.iter().copied()).collect();
            let file = fletch_settings::load(&path, &keys)
                .map_err(|e| ConfigError::Faults(e.to_string().lines().map(str::to_owned).collect()))?;
            (file, path)
        }
    };
    let effective: Vec<EffectiveSetting> =
        SETTINGS.iter().map(|s| resolve(s, matches, &file, &file_path, environment)).collect();
    let ready_file = path("ready-file");
    ConfigBuilder { values: effective.iter().map(|e| (e.key, e)).collect(), faults: Vec::new() }.build(
        file.origin,
        ready_file,
        effective.clone(),
    )
}

fn resolve(
    s: &Setting,
    matches: &ArgMatches,
    file: &File,
    file_path: &Path,
    environment: &Environment,
) -> EffectiveSetting {
    let given = matches.get_one::<String>(s.key).cloned();
    let (value, source) = match (given, matches.value_source(s.key)) {
        (Some(v), Some(ValueSource::EnvVariable)) => (v, SettingSource::Env(s.env())),
        (Some(v), _) => (v, SettingSource::Flag(s.flag)),
        (None, _) => match (s.in_file)(file) {
            Some(v) => (v, SettingSource::File(file_path.to_owned())),
            None => ((s.default)(environment), SettingSource::Default),
        },
    };
    EffectiveSetting { key: s.key, value, form: s.form(), source }
}

#[cfg(test)]
mod tests;
