//! One `[[origin]]` table, and the limits that hold for all of them.

use crate::uri::Scheme;
use crate::{OriginError, OriginUri};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// The known keys of `[[origin]]`, for `fletch_settings::load`.
pub const KEYS: &[&str] = &[
    "origin.*.prefix",
    "origin.*.endpoint",
    "origin.*.region",
    "origin.*.account",
    "origin.*.credentials",
    "origin.*.credentials.file",
    "origin.*.allow_http",
    "origin.*.concurrency",
    "origin.*.requests_per_second",
    "origin.*.bytes_per_second",
    "origin.*.domains",
];

/// One `[[origin]]` table: how to reach everything under `prefix`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct OriginConfig {
    /// The URI under which it holds (`s3://bucket/sets`, `az://container`, `https://host/data`,
    /// `/data`). The longest prefix wins.
    pub prefix: String,
    /// Base URL of a server that speaks the scheme's protocol; none means the cloud's own. For
    /// Azure with the account in its path where the server wants that.
    pub endpoint: Option<String>,
    /// The region of the bucket (S3).
    pub region: Option<String>,
    /// The storage account (Azure); none means `AZURE_STORAGE_ACCOUNT_NAME`, or what the
    /// credentials file says.
    pub account: Option<String>,
    /// Where the credentials come from; none means `env`.
    pub credentials: Option<Credentials>,
    /// For which domains of a server it is; for all when empty.
    #[serde(default)]
    pub domains: Vec<String>,
    /// Whether `endpoint`, or the prefix itself, may be plain `http://`.
    #[serde(default)]
    pub allow_http: bool,
    /// Calls under way at once below this prefix; none means the process's limit.
    pub concurrency: Option<u32>,
    /// Most requests a second, together, of this process; none means as many as are answered.
    pub requests_per_second: Option<u32>,
    /// Most bytes a second, together, of this process (`"200MiB"`, or a number).
    #[serde(default, deserialize_with = "bytes")]
    pub bytes_per_second: Option<u64>,
}

impl OriginConfig {
    /// The prefix, if the table can be.
    pub(crate) fn check(&self) -> Result<OriginUri, OriginError> {
        let prefix = OriginUri::parse(&self.prefix)?;
        let what = format!("[[origin]] {prefix}");
        if [self.concurrency, self.requests_per_second].contains(&Some(0)) || self.bytes_per_second == Some(0)
        {
            return Err(OriginError::invalid(what, "concurrency and rates are at least 1"));
        }
        let Some(scheme) = prefix.scheme() else {
            let plain = self.endpoint.is_none()
                && self.region.is_none()
                && self.account.is_none()
                && matches!(self.credentials, None | Some(Credentials::Anonymous));
            if !plain {
                return Err(OriginError::invalid(
                    what,
                    "a directory has no endpoint, region, account or credentials",
                ));
            }
            return Ok(prefix);
        };
        let cannot =
            |key: &str| Err(OriginError::invalid(&what, format!("{}:// has no {key}", scheme.as_str())));
        if self.account.is_some() && scheme != Scheme::Azure {
            return cannot("account");
        }
        if self.region.is_some() && scheme != Scheme::S3 {
            return cannot("region");
        }
        if self.endpoint.is_some() && scheme.is_plain() {
            return cannot("endpoint: the prefix names the server");
        }
        if scheme == Scheme::Http && !self.allow_http {
            return Err(OriginError::invalid(
                what,
                "http:// sends data in the clear; set allow_http = true or use https://",
            ));
        }
        if let Some(endpoint) = &self.endpoint {
            let url = url::Url::parse(endpoint)
                .map_err(|e| OriginError::invalid(&what, format!("endpoint: {e}")))?;
            if !url.username().is_empty() || url.password().is_some() {
                return Err(OriginError::invalid(
                    what,
                    "endpoint holds no user or password; use credentials",
                ));
            }
            if url.query().is_some() || url.fragment().is_some() {
                return Err(OriginError::invalid(what, "endpoint has no query and no fragment"));
            }
            match url.scheme() {
                "https" => {}
                "http" if self.allow_http => {}
                "http" => {
                    return Err(OriginError::invalid(
                        what,
                        "endpoint is http://, which sends data in the clear; set allow_http = true or use https://",
                    ));
                }
                _ => return Err(OriginError::invalid(what, "endpoint is an http:// or https:// URL")),
            }
        }
        Ok(prefix)
    }
}

/// A number of bytes, or a text with a unit.
fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        Number(u64),
        Text(String),
    }
    match Either::deserialize(from)? {
        Either::Number(n) => Ok(Some(n)),
        Either::Text(text) => match text.parse::<bytesize::ByteSize>() {
            Ok(size) => Ok(Some(size.as_u64())),
            Err(_) => Err(serde::de::Error::custom(format!(
                "{text:?} is not a size; write a number with a unit, such as 200MiB"
            ))),
        },
    }
}

/// Where credentials come from. Never the credentials themselves.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Credentials {
    /// The environment and what the cloud provides there (`AWS_*`, `AZURE_*`, `GOOGLE_*`, web or
    /// workload identity, instance role). A plain server has none.
    Env,
    /// A file, read again when it changes: for S3 in the format of `~/.aws/credentials`, for Azure
    /// `azure_storage_… = …` lines, for GCS a service account's JSON, for a plain server `token`
    /// or `user` and `password` lines.
    File(PathBuf),
    /// Variables, else the shared file of the cloud's own tools, else what the machine provides.
    Chain,
    /// None: requests are not signed.
    Anonymous,
}

impl fmt::Debug for Credentials {
    /// Says which source, and not even its path.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Credentials::Env => "Env",
            Credentials::File(_) => "File(redacted)",
            Credentials::Chain => "Chain",
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
