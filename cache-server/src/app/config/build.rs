//! Builds the configuration from the texts of all settings, and collects every fault.

use super::{
    CacheConfig, Config, ConfigError, EffectiveSetting, LocalDir, S3Config, SettingSource, ShortCircuit,
    local_dir::check_domains,
};
use crate::{
    admin::dashboard::PrometheusUrl,
    app::{
        limits::{CACHE_MIN, Limits},
        telemetry::{LogFileConfig, LogFormat},
        tls::TlsFiles,
    },
    tenancy::auth::{AllowedHosts, SocketAdmins},
};
use fletch_origin::{OriginConfig, OriginUri};
use fletch_settings::{Amount, ByteSize, Span};
use fletch_store::disk::Policy;
use std::{collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf, str::FromStr};

/// The least bytes of a log file.
const LOG_BYTES_MIN: u64 = 4 << 10;

/// Parses the settings and collects their faults.
pub(super) struct ConfigBuilder<'a> {
    pub values: BTreeMap<&'static str, &'a EffectiveSetting>,
    pub faults: Vec<String>,
}

impl ConfigBuilder<'_> {
    pub(super) fn fault(&mut self, key: &str, why: impl fmt::Display) {
        let source = self.values.get(key).map_or(&SettingSource::Default, |e| &e.source);
        self.faults.push(format!("{key} ({source}): {why}"));
    }

    pub(super) fn text(&self, key: &str) -> &str {
        self.values.get(key).map_or("", |e| e.value.as_str())
    }

    /// Returns the value of a key. After a fault it returns the placeholder, which is never used.
    pub(super) fn get<T: FromStr<Err: fmt::Display>>(&mut self, key: &str, placeholder: T) -> T {
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

    pub(super) fn span(&mut self, key: &str) -> std::time::Duration {
        self.get(key, Span(std::time::Duration::ZERO)).0
    }

    fn directory(&mut self, key: &str) -> PathBuf {
        let path = PathBuf::from(self.text(key));
        if path.as_os_str().is_empty() {
            self.fault(key, "its default needs a home directory, and there is none; give a directory");
        }
        std::path::absolute(&path).unwrap_or(path)
    }

    fn decision_interval(&mut self) -> std::time::Duration {
        let interval = self.span("cache.decision_interval");
        if !(1..=3600).contains(&interval.as_secs()) {
            self.fault("cache.decision_interval", "must be within 1s and 1h");
        }
        interval
    }

    fn limits(&mut self) -> Limits {
        let memory_bytes = self.bytes("memory.max");
        let origin_requests: usize = self.get("limits.origin_requests", 0);
        let per_origin = self.get("limits.origin_requests_per_origin", Amount::Bytes(0));
        let all = u64::try_from(origin_requests).unwrap_or(u64::MAX);
        let per_origin = match per_origin {
            Amount::Bytes(n) => n,
            // A few requests have no smaller part than one.
            part @ Amount::Percent(p) => part.of(all).max(u64::from(p > 0)),
        };
        Limits {
            memory_bytes,
            prefetch_bytes: self.get("memory.prefetch", Amount::Bytes(0)).of(memory_bytes),
            tables_bytes: self.bytes("tables.memory"),
            tables_disk_bytes: self.bytes("tables.disk"),
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
            origin_requests,
            origin_requests_per_origin: usize::try_from(per_origin).unwrap_or(usize::MAX),
            root_lookups: self.get("limits.root_lookups", 0),
            tenant_jobs: self.get("limits.tenant_jobs", 0),
            tenant_declared_jobs: self.get("limits.tenant_declared_jobs", 0),
            tenant_state_bytes: self.bytes("limits.tenant_state_bytes"),
            job_bytes: self.bytes("limits.job_bytes"),
        }
    }

    pub(super) fn has_tokens(&self) -> bool {
        !self.text("auth.tokens").is_empty()
    }

    fn listen(&mut self) -> Option<SocketAddr> {
        if self.text("listen") == "none" {
            if self.text("socket") == "none" {
                self.fault(
                    "listen",
                    "with `--socket none` the server has no door; give an address or a socket",
                );
            }
            return None;
        }
        self.address("listen", "127.0.0.1:7380, or `none` for the unix socket only")
    }

    /// Returns the address of a TCP listener. `example` completes the text of a fault.
    fn address(&mut self, key: &str, example: &str) -> Option<SocketAddr> {
        let text = self.text(key).replacen("localhost:", "127.0.0.1:", 1);
        match text.parse::<SocketAddr>() {
            Ok(addr) if addr.ip().is_loopback() || self.has_tokens() => Some(addr),
            Ok(addr) => {
                let why = format!(
                    "{addr} is not a loopback address, and without a tokens file only this machine may \
                     connect; write 127.0.0.1:{}, or name a tokens file with --auth-tokens",
                    addr.port()
                );
                self.fault(key, why);
                None
            }
            Err(_) => {
                let why = format!("{text:?} is not an address; write IP:PORT, such as {example}");
                self.fault(key, why);
                None
            }
        }
    }

    /// Returns the settings of the S3 door. `None` if it is off.
    fn s3(&mut self) -> Option<S3Config> {
        let bucket = self.text("s3.bucket").to_owned();
        if !is_bucket(&bucket) {
            let why = format!(
                "{bucket:?} is no name that every S3 client takes; write 3 to 63 lower-case letters, digits \
                 and hyphens, with a letter or digit at both ends"
            );
            self.fault("s3.bucket", why);
        }
        let key_file = self.optional_path("s3.key_file");
        if self.text("s3.listen") == "none" {
            return None;
        }
        let listen = self.address("s3.listen", "127.0.0.1:7381, or `none` for no S3 door")?;
        if self.has_tokens() && key_file.is_none() {
            self.fault(
                "s3.listen",
                "with a tokens file, the S3 door derives the credentials of its clients from a key; make one \
                 with `(umask 077; head -c 32 /dev/urandom > s3.key)`, and name it with --s3-key-file",
            );
        }
        Some(S3Config { listen, bucket, key_file: key_file.filter(|_| self.has_tokens()) })
    }

    /// Returns the files of TLS. `None` if there is no certificate.
    fn tls(&mut self) -> Option<TlsFiles> {
        let [cert, key, client_ca] =
            ["tls.cert_file", "tls.key_file", "tls.client_ca_file"].map(|key| self.optional_path(key));
        match (cert, key) {
            (Some(cert), Some(key)) => return Some(TlsFiles { cert, key, client_ca }),
            (Some(_), None) => {
                self.fault("tls.cert_file", "needs the key of the certificate: set tls.key_file")
            }
            (None, Some(_)) => self.fault("tls.key_file", "needs the certificate: set tls.cert_file"),
            (None, None) if client_ca.is_some() => self.fault(
                "tls.client_ca_file",
                "needs TLS: set tls.cert_file and tls.key_file, the certificate of the server",
            ),
            (None, None) => {}
        }
        None
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

    fn idle(&mut self) -> Option<std::time::Duration> {
        if self.text("idle") == "off" {
            return None;
        }
        let idle = self.get("idle", Span(std::time::Duration::MAX)).0;
        if idle < std::time::Duration::from_secs(1) {
            self.fault("idle", "must be at least 1s, or `off`");
        }
        Some(idle)
    }

    fn log_file(&mut self) -> Option<LogFileConfig> {
        let bytes_max = self.bytes("log.file_bytes_max");
        if bytes_max < LOG_BYTES_MIN {
            self.fault("log.file_bytes_max", "must be at least 4KiB");
        }
        self.optional_path("log.file").map(|path| LogFileConfig { path, bytes_max })
    }

    fn slow_read(&mut self) -> std::time::Duration {
        let from = self.span("log.slow_read");
        if from < std::time::Duration::from_millis(1) {
            self.fault("log.slow_read", "must be at least 1ms");
        }
        from
    }

    /// Returns the path of a setting that may be empty.
    pub(super) fn optional_path(&mut self, key: &str) -> Option<PathBuf> {
        let text = self.text(key);
        (!text.is_empty()).then(|| std::path::absolute(text).unwrap_or_else(|_| PathBuf::from(text)))
    }

    fn local_dirs(&mut self) -> Vec<LocalDir> {
        let text = self.text("local.dirs").to_owned();
        let mut dirs = Vec::new();
        for item in text.split(':').filter(|d| !d.is_empty()) {
            match LocalDir::read(item) {
                Ok(dir) if dir.domains.is_empty() && self.has_tokens() => {
                    let named = dir.named.display();
                    let why = format!(
                        "with a tokens file, {named} must name the domains that may read it; for every \
                         domain write {:?}, for two {:?}",
                        format!("{named}=*"),
                        format!("{named}=team-a,team-b")
                    );
                    self.fault("local.dirs", why);
                }
                Ok(dir) => dirs.push(dir),
                Err(why) => self.fault("local.dirs", why),
            }
        }
        dirs
    }

    /// Returns the place for version tables. The server must be able to read it through an `[[origin]]`.
    fn publish_uri(&mut self, origins: &[OriginConfig]) -> Option<OriginUri> {
        let text = self.text("publish.uri").to_owned();
        if text.is_empty() {
            return None;
        }
        let uri = match OriginUri::parse(&text) {
            Ok(uri) if text.contains("://") || text.starts_with('/') => uri,
            Ok(_) => {
                self.fault(
                    "publish.uri",
                    format!("{text:?} is a relative path; give an absolute path or a URI"),
                );
                return None;
            }
            Err(e) => {
                self.fault("publish.uri", e);
                return None;
            }
        };
        let covers = |o: &OriginConfig| OriginUri::parse(&o.prefix).is_ok_and(|prefix| prefix.contains(&uri));
        if uri.as_local().is_none() && !origins.iter().any(covers) {
            let why = format!("{uri} is below no [[origin]] of the settings; add one with a prefix of it");
            self.fault("publish.uri", why);
        }
        Some(uri)
    }

    /// Returns where the Prometheus takes queries. `None` if the setting is empty.
    fn prometheus(&mut self) -> Option<PrometheusUrl> {
        let key = "dashboard.prometheus_url";
        if self.text(key).is_empty() {
            return None;
        }
        match self.text(key).parse() {
            Ok(url) => Some(url),
            Err(why) => {
                self.fault(key, why);
                None
            }
        }
    }

    /// Checks that each origin names its domains where domains differ.
    fn check_origins(&mut self, origins: &[OriginConfig]) {
        for origin in origins {
            let prefix = &origin.prefix;
            if origin.domains.is_empty() && self.has_tokens() {
                self.faults.push(format!(
                    "[[origin]] {prefix}: with a tokens file, an origin must name the domains that may read \
                     it; below `prefix = {prefix:?}` add the line `domains = [\"*\"]` for every domain, or \
                     name them as in `domains = [\"team-a\"]`"
                ));
            } else if let Err(why) = check_domains(&origin.domains) {
                self.faults.push(format!("[[origin]] {prefix}: domains: {why}"));
            }
        }
    }

    pub fn build(
        mut self,
        origins: Vec<OriginConfig>,
        ready_file: Option<PathBuf>,
        effective: Vec<EffectiveSetting>,
    ) -> Result<Config, ConfigError> {
        self.check_origins(&origins);
        let listen = self.listen();
        let config = Config {
            cluster: self.cluster(listen),
            listen,
            socket: self.socket(),
            cache: CacheConfig {
                dir: self.directory("cache.dir"),
                size: self.get("cache.size", Amount::Bytes(0)),
                free_floor: self.get("cache.free_floor", Amount::Bytes(0)),
                policy: self.get("cache.policy", Policy::Fletch),
                decision_interval: self.decision_interval(),
                short_circuit: self.get("cache.short_circuit", ShortCircuit::Auto),
            },
            state_dir: self.directory("state.dir"),
            limits: self.limits(),
            auth_tokens: self.optional_path("auth.tokens"),
            tls: self.tls(),
            s3: self.s3(),
            hosts: self.get("auth.hosts", AllowedHosts::default()),
            socket_admins: self.get("auth.socket_admins", SocketAdmins::default()),
            log_format: self.get("log.format", LogFormat::Text),
            log_file: self.log_file(),
            slow_read: self.slow_read(),
            idle: self.idle(),
            trace_dir: self.optional_path("trace.dir"),
            local_dirs: self.local_dirs(),
            publish_uri: self.publish_uri(&origins),
            prometheus: self.prometheus(),
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
            let of_cluster = config.cluster.etcd.as_ref().and_then(|_| config.limits.cluster_fault());
            for (key, why) in config.limits.faults().into_iter().chain(of_cluster) {
                self.fault(key, why);
            }
        }
        if self.faults.is_empty() { Ok(config) } else { Err(ConfigError::Faults(self.faults)) }
    }
}

/// Returns whether clients take this name for a bucket. Some take dots for a host's, so it has none.
fn is_bucket(name: &str) -> bool {
    let is_edge = |c: Option<u8>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    let bytes = name.as_bytes();
    (3..=63).contains(&bytes.len())
        && bytes.iter().all(|&c| c == b'-' || is_edge(Some(c)))
        && is_edge(bytes.first().copied())
        && is_edge(bytes.last().copied())
}
