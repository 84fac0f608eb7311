//! One `[[origin]]` table, and the limits that hold for all of them.

use serde::Deserialize;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// The known keys of `[[origin]]`, for `fletch_settings::load`.
pub const KEYS: &[&str] = &[
    "origin.*.prefix",
    "origin.*.endpoint",
    "origin.*.region",
    "origin.*.credentials",
    "origin.*.credentials.file",
    "origin.*.allow_http",
];

/// One `[[origin]]` table: how to reach everything under `prefix`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct OriginConfig {
    /// The URI under which it holds (`s3://bucket/sets`, `/data`). The longest prefix wins.
    pub prefix: String,
    /// Base URL of an S3-compatible server; none means the cloud's own.
    pub endpoint: Option<String>,
    /// The region of the bucket.
    pub region: Option<String>,
    /// Where the credentials come from; none means `env`.
    pub credentials: Option<Credentials>,
    /// Whether `endpoint` may be plain `http://`.
    #[serde(default)]
    pub allow_http: bool,
}

/// Where credentials come from. Never the credentials themselves.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Credentials {
    /// The environment and what the cloud provides there (`AWS_*`, web identity, instance role).
    Env,
    /// The `[default]` profile of a file in the format of `~/.aws/credentials`.
    File(PathBuf),
    /// None: requests are not signed.
    Anonymous,
}

impl fmt::Debug for Credentials {
    /// Says which source, and not even its path.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Credentials::Env => "Env",
            Credentials::File(_) => "File(redacted)",
            Credentials::Anonymous => "Anonymous",
        })
    }
}

/// Bounds on what all origins of a process may use together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OriginLimits {
    /// Calls under way at once, remote and local counted apart.
    pub requests_max: usize,
    /// The longest any call takes, waiting for its turn and retries included.
    pub io_timeout: Duration,
    /// The longest answer that is held in memory, in bytes.
    pub get_bytes_max: u64,
    /// Attempts of one call, the first included.
    pub attempts_max: u32,
}

impl Default for OriginLimits {
    fn default() -> Self {
        OriginLimits {
            requests_max: 64,
            io_timeout: Duration::from_secs(30),
            get_bytes_max: 256 << 20,
            attempts_max: 8,
        }
    }
}
