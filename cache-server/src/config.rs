//! Settings: one table says every setting's key, flag, environment variable and default, so that
//! the three ways of giving one are one schema. Precedence: flag, environment, file, default.
//!
//! Reading and checking are pure but for the one file: tests pass arguments and an
//! [`Environment`]. Every fault is reported at once, each with its fix.

mod table;

use crate::{limits::Limits, telemetry::LogFormat};
use clap::{Arg, ArgAction, ArgMatches, Command, parser::ValueSource};
use fletch_origin::{OriginConfig, OriginUri};
use fletch_settings::{ByteSize, Span};
use serde::Deserialize;
use std::{
    collections::BTreeMap,
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    str::FromStr,
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
pub enum Origin {
    /// A flag.
    Flag(&'static str),
    /// An environment variable.
    Env(String),
    /// The settings file.
    File(PathBuf),
    /// Nobody said anything.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Flag(name) => write!(f, "flag --{name}"),
            Origin::Env(name) => write!(f, "environment {name}"),
            Origin::File(path) => write!(f, "file {}", path.display()),
            Origin::Default => f.write_str("default"),
        }
    }
}

/// One setting as it is in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Effective {
    /// Its key in the file.
    pub key: &'static str,
    /// Its value, as it would be written.
    pub value: String,
    /// Where it came from.
    pub origin: Origin,
}

/// Everything the server is told.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where to listen for TCP; loopback only, as no authentication is configured.
    pub listen: SocketAddr,
    /// Where to listen for local processes; `None` when switched off.
    pub socket: Option<PathBuf>,
    /// What may vanish.
    pub cache_dir: PathBuf,
    /// What must not.
    pub state_dir: PathBuf,
    /// Bounds.
    pub limits: Limits,
    /// How log lines look.
    pub log_format: LogFormat,
    /// Directories under which `file://` datasets may be registered; any when empty.
    pub local_dirs: Vec<OriginUri>,
    /// How to reach remote origins.
    pub origins: Vec<OriginConfig>,
    /// Where to write the server's URL once it is ready.
    pub ready_file: Option<PathBuf>,
    /// Every setting as it is in force.
    pub effective: Vec<Effective>,
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Task {
    /// To serve.
    Serve(Box<Config>),
    /// Only to check the settings.
    Check(Box<Config>),
    /// To show the settings in force.
    Show(Box<Config>),
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
    cache: Dir,
    state: Dir,
    memory: Memory,
    tables: Tables,
    io: Io,
    log: Log,
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
section!(Memory { max: ByteSize });
section!(Tables { memory: ByteSize });
section!(Io { timeout: Span });
section!(Log { format: String });
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
pub fn read<I, T>(args: I, environment: &Environment) -> Result<Task, ConfigError>
where
    I: IntoIterator<Item = T>,
    T: Into<std::ffi::OsString> + Clone,
{
    let top = command().try_get_matches_from(args)?;
    let deepest =
        std::iter::successors(Some(&top), |m| m.subcommand().map(|(_, m)| m)).last().unwrap_or(&top);
    let config = Box::new(assemble(deepest, environment)?);
    Ok(if top.subcommand().is_some() {
        Task::Show(config)
    } else if top.get_flag("config-check") {
        Task::Check(config)
    } else {
        Task::Serve(config)
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
    let effective: Vec<Effective> =
        SETTINGS.iter().map(|s| resolve(s, matches, &file, &file_path, environment)).collect();
    let ready_file = path("ready-file");
    Builder { values: effective.iter().map(|e| (e.key, e)).collect(), faults: Vec::new() }.build(
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
) -> Effective {
    let given = matches.get_one::<String>(s.key).cloned();
    let (value, origin) = match (given, matches.value_source(s.key)) {
        (Some(v), Some(ValueSource::EnvVariable)) => (v, Origin::Env(s.env())),
        (Some(v), _) => (v, Origin::Flag(s.flag)),
        (None, _) => match (s.in_file)(file) {
            Some(v) => (v, Origin::File(file_path.to_owned())),
            None => ((s.default)(environment), Origin::Default),
        },
    };
    Effective { key: s.key, value, origin }
}

/// Turns texts into values and collects every fault.
struct Builder<'a> {
    values: BTreeMap<&'static str, &'a Effective>,
    faults: Vec<String>,
}

impl Builder<'_> {
    fn fault(&mut self, key: &str, why: impl fmt::Display) {
        let origin = self.values.get(key).map_or(&Origin::Default, |e| &e.origin);
        self.faults.push(format!("{key} ({origin}): {why}"));
    }

    fn text(&self, key: &str) -> &str {
        self.values.get(key).map_or("", |e| e.value.as_str())
    }

    /// The value of a key, or a fault and a placeholder that nobody will see.
    fn get<T: FromStr<Err: fmt::Display>>(&mut self, key: &str, placeholder: T) -> T {
        match self.text(key).parse() {
            Ok(v) => v,
            Err(e) => {
                self.fault(key, e);
                placeholder
            }
        }
    }

    fn bytes(&mut self, key: &str) -> u64 {
        self.get(key, ByteSize(0)).0
    }

    fn span(&mut self, key: &str) -> std::time::Duration {
        self.get(key, Span(std::time::Duration::ZERO)).0
    }

    fn directory(&mut self, key: &str) -> PathBuf {
        let path = PathBuf::from(self.text(key));
        if path.as_os_str().is_empty() {
            self.fault(key, "there is no home directory to derive it from; give a directory");
        }
        std::path::absolute(&path).unwrap_or(path)
    }

    fn limits(&mut self) -> Limits {
        Limits {
            memory_bytes: self.bytes("memory.max"),
            tables_bytes: self.bytes("tables.memory"),
            io_timeout: self.span("io.timeout"),
            connections: self.get("limits.connections", 0),
            requests: self.get("limits.requests", 0),
            header_bytes: self.bytes("limits.header_bytes"),
            body_bytes: self.bytes("limits.body_bytes"),
            batch_bytes: self.bytes("limits.batch_bytes"),
            idle_timeout: self.span("limits.idle_timeout"),
            send_timeout: self.span("limits.send_timeout"),
            grace: self.span("limits.grace"),
            jobs: self.get("limits.jobs", 0),
            job_ttl: self.span("limits.job_ttl"),
            versions: self.get("limits.versions", 0),
            datasets: self.get("limits.datasets", 0),
            origin_requests: self.get("limits.origin_requests", 0),
        }
    }

    fn listen(&mut self) -> SocketAddr {
        let placeholder = SocketAddr::from(([127, 0, 0, 1], 0));
        let text = self.text("listen").replacen("localhost:", "127.0.0.1:", 1);
        match text.parse::<SocketAddr>() {
            Ok(addr) if addr.ip().is_loopback() => addr,
            Ok(addr) => {
                let why = format!(
                    "{addr} is not a loopback address, and without authentication only this machine may ask; write 127.0.0.1:{}",
                    addr.port()
                );
                self.fault("listen", why);
                placeholder
            }
            Err(_) => {
                self.fault(
                    "listen",
                    format!("{text:?} is no address; write IP:PORT, such as 127.0.0.1:7380"),
                );
                placeholder
            }
        }
    }

    fn socket(&mut self) -> Option<PathBuf> {
        let text = self.text("socket").to_owned();
        if text == "none" {
            return None;
        }
        let path = std::path::absolute(&text).unwrap_or_else(|_| PathBuf::from(&text));
        if path.as_os_str().len() > 104 {
            self.fault(
                "socket",
                "the path is longer than the 104 bytes a socket may have; write a shorter one",
            );
        }
        Some(path)
    }

    fn local_dirs(&mut self) -> Vec<OriginUri> {
        let text = self.text("local.dirs").to_owned();
        let mut dirs = Vec::new();
        for dir in text.split(':').filter(|d| !d.is_empty()) {
            match std::fs::canonicalize(dir) {
                Ok(real) => match OriginUri::local(&real) {
                    Ok(uri) => dirs.push(uri),
                    Err(e) => self.fault("local.dirs", e),
                },
                Err(e) => {
                    self.fault("local.dirs", format!("{dir}: {e}; create it or remove it from the list"))
                }
            }
        }
        dirs
    }

    fn build(
        mut self,
        origins: Vec<OriginConfig>,
        ready_file: Option<PathBuf>,
        effective: Vec<Effective>,
    ) -> Result<Config, ConfigError> {
        let config = Config {
            listen: self.listen(),
            socket: self.socket(),
            cache_dir: self.directory("cache.dir"),
            state_dir: self.directory("state.dir"),
            limits: self.limits(),
            log_format: self.get("log.format", LogFormat::Text),
            local_dirs: self.local_dirs(),
            origins,
            ready_file,
            effective,
        };
        if config.state_dir == config.cache_dir {
            self.fault("state.dir", "is the cache directory, which may vanish; give a directory of its own");
        }
        if self.faults.is_empty() {
            for (key, why) in config.limits.faults() {
                self.fault(key, why);
            }
        }
        if self.faults.is_empty() { Ok(config) } else { Err(ConfigError::Faults(self.faults)) }
    }
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
