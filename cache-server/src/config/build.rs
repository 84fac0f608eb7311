//! Builds the configuration from the texts of all settings, and collects every fault.

use super::{CacheConfig, Config, ConfigError, EffectiveSetting, SettingSource};
use crate::{
    limits::{CACHE_MIN, Limits},
    telemetry::LogFormat,
};
use fletch_origin::{OriginConfig, OriginUri};
use fletch_settings::{Amount, ByteSize, Span};
use fletch_store::disk::Policy;
use std::{collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf, str::FromStr};

/// Parses the settings and collects their faults.
pub(super) struct ConfigBuilder<'a> {
    pub values: BTreeMap<&'static str, &'a EffectiveSetting>,
    pub faults: Vec<String>,
}

impl ConfigBuilder<'_> {
    fn fault(&mut self, key: &str, why: impl fmt::Display) {
        let source = self.values.get(key).map_or(&SettingSource::Default, |e| &e.source);
        self.faults.push(format!("{key} ({source}): {why}"));
    }

    fn text(&self, key: &str) -> &str {
        self.values.get(key).map_or("", |e| e.value.as_str())
    }

    /// Returns the value of a key. After a fault it returns the placeholder, which is never used.
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
            self.fault(key, "its default needs a home directory, and there is none; give a directory");
        }
        std::path::absolute(&path).unwrap_or(path)
    }

    fn limits(&mut self) -> Limits {
        let memory_bytes = self.bytes("memory.max");
        Limits {
            memory_bytes,
            prefetch_bytes: self.get("memory.prefetch", Amount::Bytes(0)).of(memory_bytes),
            tables_bytes: self.bytes("tables.memory"),
            io_timeout: self.span("io.timeout"),
            connections: self.get("limits.connections", 0),
            socket_connections: self.get("limits.socket_connections", 0),
            connections_per_caller: self.get("limits.connections_per_caller", 0),
            requests: self.get("limits.requests", 0),
            header_bytes: self.bytes("limits.header_bytes"),
            body_bytes: self.bytes("limits.body_bytes"),
            batch_bytes: self.bytes("limits.batch_bytes"),
            head_timeout: self.span("limits.head_timeout"),
            idle_timeout: self.span("limits.idle_timeout"),
            send_timeout: self.span("limits.send_timeout"),
            grace: self.span("limits.grace"),
            jobs: self.get("limits.jobs", 0),
            job_ttl: self.span("limits.job_ttl"),
            lease_ttl: self.span("limits.lease_ttl"),
            ledger_bytes: self.bytes("limits.ledger_bytes"),
            trace_bytes: self.bytes("trace.bytes"),
            versions: self.get("limits.versions", 0),
            datasets: self.get("limits.datasets", 0),
            origin_requests: self.get("limits.origin_requests", 0),
        }
    }

    fn listen(&mut self) -> SocketAddr {
        let placeholder = SocketAddr::from(([127, 0, 0, 1], 0));
        let text = self.text("listen").replacen("localhost:", "127.0.0.1:", 1);
        match text.parse::<SocketAddr>() {
            Ok(addr) if addr.ip().is_loopback() || !self.text("auth.tokens").is_empty() => addr,
            Ok(addr) => {
                let why = format!(
                    "{addr} is not a loopback address, and without a tokens file only this machine may \
                     connect; write 127.0.0.1:{}, or name a tokens file with --auth-tokens",
                    addr.port()
                );
                self.fault("listen", why);
                placeholder
            }
            Err(_) => {
                self.fault(
                    "listen",
                    format!("{text:?} is not an address; write IP:PORT, such as 127.0.0.1:7380"),
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
                "the path is longer than 104 bytes, the limit of a socket's path; give a shorter one",
            );
        }
        Some(path)
    }

    /// Returns the path of a setting that may be empty.
    fn optional_path(&mut self, key: &str) -> Option<PathBuf> {
        let text = self.text(key);
        (!text.is_empty()).then(|| std::path::absolute(text).unwrap_or_else(|_| PathBuf::from(text)))
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
                Err(e) => self.fault(
                    "local.dirs",
                    format!("cannot use {dir}: {e}; create it, or remove it from the list"),
                ),
            }
        }
        dirs
    }

    pub fn build(
        mut self,
        origins: Vec<OriginConfig>,
        ready_file: Option<PathBuf>,
        effective: Vec<EffectiveSetting>,
    ) -> Result<Config, ConfigError> {
        let config = Config {
            listen: self.listen(),
            socket: self.socket(),
            cache: CacheConfig {
                dir: self.directory("cache.dir"),
                size: self.get("cache.size", Amount::Bytes(0)),
                free_floor: self.get("cache.free_floor", Amount::Bytes(0)),
                policy: self.get("cache.policy", Policy::Fletch),
            },
            state_dir: self.directory("state.dir"),
            limits: self.limits(),
            auth_tokens: self.optional_path("auth.tokens"),
            log_format: self.get("log.format", LogFormat::Text),
            trace_dir: self.optional_path("trace.dir"),
            local_dirs: self.local_dirs(),
            origins,
            ready_file,
            effective,
        };
        if let Amount::Bytes(1..CACHE_MIN) = config.cache.size {
            self.fault("cache.size", "is too small; give at least 16MiB, or 0 for no disk tier");
        }
        if config.state_dir == config.cache.dir {
            self.fault(
                "state.dir",
                "is the cache directory, whose content may vanish; give a directory of its own",
            );
        }
        if self.faults.is_empty() {
            for (key, why) in config.limits.faults() {
                self.fault(key, why);
            }
        }
        if self.faults.is_empty() { Ok(config) } else { Err(ConfigError::Faults(self.faults)) }
    }
}
