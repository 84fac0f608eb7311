//! Credentials of the S3 door, derived from the caller's token.

use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// The shortest life of credentials, in seconds.
pub const TTL_MIN_S: u64 = 60;
/// The longest life of credentials, in seconds: 90 days.
pub const TTL_MAX_S: u64 = 90 * 24 * 3600;
/// The life of credentials whose request names none, in seconds: 12 hours.
pub const TTL_DEFAULT_S: u64 = 12 * 3600;

/// Body of `POST /v1/s3/credentials`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GetS3Credentials {
    /// The life of the credentials in seconds, 60 to 7,776,000 (90 days). `null`: 12 hours.
    pub ttl_s: Option<u64>,
}

/// Credentials for the S3 door. They may read what the token may read.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct S3Credentials {
    /// The access key id, which is no secret.
    pub access_key_id: String,
    /// The secret access key.
    pub secret_access_key: String,
    /// When the credentials end, in nanoseconds since 1970. `null`: the server has no tokens and checks no
    /// signature.
    pub expires_ns: Option<u64>,
    /// Where the S3 door is.
    pub door: S3Door,
}

/// Where the S3 door of a server is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct S3Door {
    /// The address on which the server listens, IP:PORT. An unspecified IP (`0.0.0.0`) is each of its own.
    pub listen: String,
    /// Whether the port speaks TLS.
    pub tls: bool,
    /// The name of the one bucket.
    pub bucket: String,
}

impl S3Door {
    /// Returns the door's URL for a client that reaches the server at `host`; `None`: by its unix socket.
    #[must_use]
    pub fn url(&self, host: Option<&str>) -> String {
        let scheme = if self.tls { "https" } else { "http" };
        let port = self.listen.rsplit(':').next().unwrap_or_default();
        match host {
            Some(host) => format!("{scheme}://{host}:{port}"),
            None => {
                let own = self.listen.replacen("0.0.0.0:", "127.0.0.1:", 1).replacen("[::]:", "[::1]:", 1);
                format!("{scheme}://{own}")
            }
        }
    }
}

impl fmt::Debug for S3Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Credentials").field("access_key_id", &self.access_key_id).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_door_has_the_host_by_which_its_server_is_reached() {
        let door = |listen: &str, tls| S3Door { listen: listen.to_owned(), tls, bucket: "fletch".to_owned() };
        assert_eq!(door("0.0.0.0:7381", true).url(Some("cache.example")), "https://cache.example:7381");
        assert_eq!(door("[::]:7381", false).url(Some("[::1]")), "http://[::1]:7381");
        assert_eq!(door("0.0.0.0:7381", false).url(None), "http://127.0.0.1:7381");
        assert_eq!(door("10.0.0.5:1", false).url(None), "http://10.0.0.5:1");
    }
}
