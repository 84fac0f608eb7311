//! Settings: one table says every setting's key, flag, environment variable and default, so that
//! the three ways of giving one are one schema. Precedence: flag, environment, file, default.
//!
//! Reading and checking are pure but for the one file: tests pass arguments and an
//! [`Environment`]. Every fault is reported at once, each with its fix.

mod build;
mod table;

use crate::{auth::NewToken, limits::Limits, telemetry::LogFormat};
use build::ConfigBuilder;
use clap::{Arg, ArgAction, ArgMatches, Command, parser::ValueSource};
use fletch_origin::{OriginConfig, OriginUri};
use fletch_settings::{Amount, ByteSize, Span};
use fletch_store::disk::Policy;
use serde::Deserialize;
use std::{
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
};
use table::{SETTINGS, Setting};

/// What defaults depend on.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// Whether the process is root's.
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
}

impl Environment {
    /// The one this process runs in.
    #[must_use]
    pub fn own() -> Self {
        let dir = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
        Environment {
            root: nix::unistd::geteuid().is_root(),
            home: dir("HOME"),
            cache_home: dir("XDG_CACHE_HOME"),
            state_home: dir("XDG_STATE_HOME"),
            runtime_dir: dir("XDG_RUNTIME_DIR"),
            memory_limit: crate::cgroup::own_memory_limit(),
        }
    }
}

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingSource {
    /// A flag.
    Flag(&'static str),
    /// An environment variable.
    Env(String),
    /// The settings file.
    File(PathBuf),
    /// Nobody said anything.
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

/// One setting as it is in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EffectiveSetting {
    /// Its key in the file.
    pub key: &'static str,
    /// Its value, as it would be written.
    pub value: String,
    /// Where it came from.
    pub origin: SettingSource,
}

/// The disk tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheConfig {
    /// Its directory.
    pub dir: PathBuf,
    /// What it may occupy, or a part of what the file system has to spare; 0 for none.
    pub size: Amount,
    /// What stays free on the file system, or a part of all of it.
    pub free_floor: Amount,
    /// What decides residency.
    pub policy: Policy,
}

/// Everything the server is told.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where to listen for TCP; loopback only, unless tokens are configured.
    pub listen: SocketAddr,
    /// Where to listen for local processes; `None` when switched off.
    pub socket: Option<PathBuf>,
    /// What may vanish.
    pub cache: CacheConfig,
    /// What must not.
    pub state_dir: PathBuf,
    /// Bounds.
    pub limits: Limits,
    /// The file that says who may ask; everybody on this machine without one.
    pub auth_tokens: Option<PathBuf>,
    /// How log lines look.
    pub log_format: LogFormat,
    /// Where sweeps are recorded; `None` when they are not.
    pub trace_dir: Option<PathBuf>,
    /// Directories under which `file://` datasets may be registered; any when empty.
    pub local_dirs: Vec<OriginUri>,
    /// How to reach remote origins.
    pub origins: Vec<OriginConfig>,
    /// Where to write the server's URL once it is ready.
    pub ready_file: Option<PathBuf>,
    /// Every setting as it is in force.
    pub effective: Vec<EffectiveSetting>,
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Action {
    /// To serve.
    Serve(Box<Config>),
    /// Only to check the settings.
    Check(Box<Config>),
    /// To show the settings in force.
    Show(Box<Config>),
    /// To make a token.
    NewToken(NewToken),
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Help, version, or a command line that cannot be read.
    #[error(transparent)]
    Usage(#[from] clap::Error),
    /// Faults, one line each.
    #[error("{}", .0.join("\n"))]
    Faults(Vec<String>),
}

/// The settings file. Values with units are texts or numbers.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct File {
    listen: Option<String>,
    socket: Option<String>,
    cache: FileCache,
    state: Dir,
    auth: Auth,
    memory: Memory,
    tables: Tables,
    io: Io,
    log: Log,
    trace: Trace,
    local: Local,
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
section!(Auth { tokens: String });
section!(FileCache { dir: String, size: Amount, free_floor: Amount, policy: String });
section!(Memory { max: ByteSize, prefetch: Amount });
section!(Tables { memory: ByteSize });
section!(Io { timeout: Span });
section!(Log { format: String });
section!(Trace { dir: String, bytes: ByteSize });
section!(Local { dirs: Vec<String> });
section!(FileLimits {
    connections: u64,
    requests: u64,
    header_bytes: ByteSize,
    body_bytes: ByteSize,
    batch_bytes: ByteSize,
    idle_timeout: Span,
    send_timeout: Span,
    grace: Span,
    jobs: u64,
    job_ttl: Span,
    lease_ttl: Span,
    ledger_bytes: ByteSize,
    versions: u64,
    datasets: u64,
    origin_requests: u64
});

/// The command, with a flag and a variable for every setting.
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
        .about("Serves datasets by content hash from memory and their origins")
        .args(settings)
        .arg(only("config", "FILE", "Settings file (TOML)").env("FLETCH_CONFIG"))
        .arg(
            only("ready-file", "FILE", "Write the URL here once requests are served")
                .env("FLETCH_READY_FILE"),
        )
        .arg(
            Arg::new("config-check")
                .long("config-check")
                .action(ArgAction::SetTrue)
                .help("Check the settings, print them and exit"),
        )
        .subcommand(crate::auth::command())
        .subcommand(
            Command::new("config").about("About the settings").subcommand_required(true).subcommand(
                Command::new("show").about("Print every setting, its value and where it came from").arg(
                    Arg::new("effective")
                        .long("effective")
                        .action(ArgAction::SetTrue)
                        .help("The settings in force (what `show` prints in any case)"),
                ),
            ),
        )
}

/// Reads the command line, the environment's `FLETCH_…` variables and the settings file.
///
/// # Errors
/// [`ConfigError`] with every fault found.
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
    let (value, origin) = match (given, matches.value_source(s.key)) {
        (Some(v), Some(ValueSource::EnvVariable)) => (v, SettingSource::Env(s.env())),
        (Some(v), _) => (v, SettingSource::Flag(s.flag)),
        (None, _) => match (s.in_file)(file) {
            Some(v) => (v, SettingSource::File(file_path.to_owned())),
            None => ((s.default)(environment), SettingSource::Default),
        },
    };
    EffectiveSetting { key: s.key, value, origin }
}

impl Config {
    /// The settings in force, one a line: `key = value  # where it came from`.
    #[must_use]
    pub fn show(&self) -> String {
        let wide = self.effective.iter().map(|e| e.key.len() + e.value.len()).max().unwrap_or(0).min(60);
        let mut out = String::new();
        for e in &self.effective {
            let pad = wide.saturating_sub(e.key.len() + e.value.len());
            out.push_str(&format!("{} = {:?}{}  # {}\n", e.key, e.value, " ".repeat(pad), e.origin));
        }
        for o in &self.origins {
            out.push_str(&format!("[[origin]] {o:?}\n"));
        }
        out
    }
}

#[cfg(test)]
mod tests;
