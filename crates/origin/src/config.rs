//! The `[[origin]]` table of the configuration, and the limits that all origins share.

use crate::address::AddressRule;
use crate::transport::ClientSettings;
use crate::uri::Scheme;
use crate::{OriginError, OriginUri, authorities};
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// The longest time to connect, if nothing else says so.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The known keys of `[[origin]]`, for `fletch_settings::load`.
pub const KEYS: &[&str] = &[
    "origin.*.prefix",
    "origin.*.endpoint",
    "origin.*.region",
    "origin.*.account",
    "origin.*.virtual_hosted",
    "origin.*.request_payer",
    "origin.*.ca_file",
    "origin.*.credentials",
    "origin.*.credentials.file",
    "origin.*.allow_http",
    "origin.*.allow_link_local",
    "origin.*.proxy",
    "origin.*.concurrency",
    "origin.*.requests_per_second",
    "origin.*.bytes_per_second",
    "origin.*.domains",
];

/// One `[[origin]]` table: how to reach everything under `prefix`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OriginConfig {
    /// The URI prefix that the table applies to, such as `s3://bucket/sets`, `https://host/data` or `/data`.
    ///
    /// The table with the longest matching prefix wins.
    pub prefix: String,
    /// The base URL of a server that speaks the scheme's protocol. The default is the cloud's own server.
    ///
    /// For Azure, the URL ends with the account name if the server expects the account in the path.
    pub endpoint: Option<String>,
    /// The region of the bucket. S3 only.
    pub region: Option<String>,
    /// The storage account. Azure only.
    ///
    /// The default is `AZURE_STORAGE_ACCOUNT_NAME` or the account in the credentials file.
    pub account: Option<String>,
    /// Whether requests name the bucket in the host (`bucket.host`), not in the path. S3 only.
    ///
    /// The default is the path at an `endpoint`, and the host at AWS itself for names without a dot.
    pub virtual_hosted: Option<bool>,
    /// Whether this process pays for requests to a bucket whose owner does not (requester pays). S3 only.
    #[serde(default)]
    pub request_payer: bool,
    /// A PEM file with authorities that servers may have, besides those of the system.
    pub ca_file: Option<PathBuf>,
    /// Such authorities as PEM text. Handed over by a user; not a key of the settings.
    #[serde(skip)]
    pub ca_certificates: Option<String>,
    /// The source of the credentials. The default is `env`.
    pub credentials: Option<Credentials>,
    /// The domains of the server that may use this origin; `*` stands for every domain.
    ///
    /// Empty means every domain of a server without tokens. A server with tokens requires domains.
    #[serde(default)]
    pub domains: Vec<String>,
    /// Whether the endpoint or the prefix may be plain `http://`.
    #[serde(default)]
    pub allow_http: bool,
    /// Whether the server may have a link-local address, or that of a cloud's metadata service.
    #[serde(default)]
    pub allow_link_local: bool,
    /// The URL of the HTTP proxy to use. The default is none: variables such as `HTTPS_PROXY` are ignored.
    ///
    /// The proxy resolves the names of servers, so it must reject the addresses that Fletch would reject.
    pub proxy: Option<String>,
    /// The most calls in flight below this prefix. The default is the limit of the process.
    pub concurrency: Option<u32>,
    /// The most requests a second from this process. The default is no limit.
    pub requests_per_second: Option<u32>,
    /// The most bytes a second for this process (`"200MiB"`, or a number). The default is no limit.
    #[serde(default, deserialize_with = "bytes")]
    pub bytes_per_second: Option<u64>,
    /// Who wrote this table. Chooses the words of errors.
    #[serde(skip)]
    pub configured_by: ConfiguredBy,
}

/// Who says how an origin is reached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ConfiguredBy {
    /// An `[[origin]]` table of the settings.
    #[default]
    Settings,
    /// The environment variables and files of the command that a user runs.
    Environment,
    /// A user, who handed it to the running server.
    Given,
}

/// The limits of an `[[origin]]` table on what is sent at once and in a second. `None` is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct OriginPace {
    /// The most calls in flight.
    pub concurrency: Option<usize>,
    /// The most requests a second.
    pub requests_per_s: Option<u32>,
    /// The most bytes a second.
    pub bytes_per_s: Option<u64>,
}

impl OriginConfig {
    /// Returns the limits on what is sent.
    pub(crate) fn pace(&self) -> OriginPace {
        OriginPace {
            concurrency: self.concurrency.map(|n| n as usize),
            requests_per_s: self.requests_per_second,
            bytes_per_s: self.bytes_per_second,
        }
    }

    /// Validates the table and returns its prefix.
    pub(crate) fn check(&self) -> Result<OriginUri, OriginError> {
        let prefix = OriginUri::parse(&self.prefix)?;
        let what = self.what();
        if [self.concurrency, self.requests_per_second].contains(&Some(0)) || self.bytes_per_second == Some(0)
        {
            return Err(OriginError::invalid(
                what,
                "concurrency, requests_per_second and bytes_per_second must be at least 1",
            ));
        }
        let Some(scheme) = prefix.scheme() else {
            let unknown = self.keys_of_a_server();
            if !unknown.is_empty() {
                let why = format!("a local directory takes no {}; remove these keys", unknown.join(", "));
                return Err(OriginError::invalid(what, why));
            }
            return Ok(prefix);
        };
        let unknown =
            |key: &str| Err(OriginError::invalid(&what, format!("{}:// takes no {key}", scheme.as_str())));
        if self.account.is_some() && scheme != Scheme::Azure {
            return unknown("account");
        }
        let of_s3 = [
            ("region", self.region.is_some()),
            ("virtual_hosted", self.virtual_hosted.is_some()),
            ("request_payer", self.request_payer),
        ];
        if let Some((key, _)) = of_s3.into_iter().find(|(_, is_set)| *is_set && scheme != Scheme::S3) {
            return unknown(key);
        }
        if self.endpoint.is_some() && scheme.is_plain() {
            return unknown("endpoint: the prefix already names the server");
        }
        if scheme == Scheme::Http && !self.allow_http {
            return Err(OriginError::invalid(
                what,
                "http:// sends data unencrypted; set allow_http = true or use https://",
            ));
        }
        let rule = AddressRule { allow_link_local: self.allow_link_local };
        if scheme.is_plain() {
            let url = url::Url::parse(&prefix.to_string())
                .map_err(|e| OriginError::invalid(&what, format!("prefix: {e}")))?;
            rule.check_host(&url).map_err(|e| OriginError::invalid(&what, e))?;
        }
        if let Some(proxy) = &self.proxy {
            check_proxy(&what, proxy)?;
        }
        if let Some(endpoint) = &self.endpoint {
            let url = url::Url::parse(endpoint)
                .map_err(|e| OriginError::invalid(&what, format!("endpoint: {e}")))?;
            rule.check_host(&url).map_err(|e| OriginError::invalid(&what, e))?;
            if !url.username().is_empty() || url.password().is_some() {
                return Err(OriginError::invalid(
                    what,
                    "the endpoint must not contain a user or password; use credentials",
                ));
            }
            if url.query().is_some() || url.fragment().is_some() {
                return Err(OriginError::invalid(
                    what,
                    "the endpoint must not contain a query or a fragment",
                ));
            }
            match url.scheme() {
                "https" => {}
                "http" if self.allow_http => {}
                "http" => {
                    return Err(OriginError::invalid(
                        what,
                        "an http:// endpoint sends data unencrypted; set allow_http = true or use https://",
                    ));
                }
                _ => {
                    return Err(OriginError::invalid(
                        what,
                        "the endpoint must be an http:// or https:// URL",
                    ));
                }
            }
            if self.virtual_hosted == Some(true) && url.domain().is_none() {
                let why =
                    "virtual_hosted needs an endpoint with a name: no bucket can stand before an address";
                return Err(OriginError::invalid(what, why));
            }
        }
        if let Some(named) = prefix.store() {
            let is_at = self.store_of(&prefix);
            if is_at.as_deref() != Some(named) {
                let is_at = is_at.unwrap_or_else(|| "a store without a name".to_owned());
                let why = format!(
                    "the prefix names the store {named}, and its endpoint, region and account name {is_at}"
                );
                return Err(OriginError::invalid(what, why));
            }
        }
        Ok(prefix)
    }
}

impl OriginConfig {
    /// Returns the name of this table in errors.
    pub(crate) fn what(&self) -> String {
        let prefix =
            OriginUri::parse(&self.prefix).map_or_else(|_| self.prefix.clone(), |uri| uri.to_string());
        match self.configured_by {
            ConfiguredBy::Settings => format!("[[origin]] {prefix}"),
            ConfiguredBy::Environment => format!("{prefix}, as the environment describes it"),
            ConfiguredBy::Given => format!("what was handed over for {prefix}"),
        }
    }

    /// Returns what to check after the store rejected the credentials.
    pub(crate) fn what_to_check(&self, scheme: Scheme) -> &'static str {
        match (self.configured_by, scheme) {
            (ConfiguredBy::Settings, _) => "check the credentials of its [[origin]]",
            (ConfiguredBy::Given, _) => {
                "the credentials were handed over by `fletch mount`: run it again with others, which replace \
                 them at once"
            }
            (ConfiguredBy::Environment, Scheme::S3) => {
                "check the credentials of this terminal (AWS_PROFILE, AWS_ACCESS_KEY_ID; \
                 AWS_NO_SIGN_REQUEST=true for a public bucket)"
            }
            (ConfiguredBy::Environment, Scheme::Azure) => {
                "check the credentials of this terminal (AZURE_STORAGE_ACCOUNT, AZURE_STORAGE_KEY)"
            }
            (ConfiguredBy::Environment, Scheme::Gcs) => {
                "check the credentials of this terminal (GOOGLE_APPLICATION_CREDENTIALS)"
            }
            (ConfiguredBy::Environment, Scheme::Http | Scheme::Https) => {
                "a server with passwords needs a settings file (--config FILE)"
            }
        }
    }

    /// Returns what all clients of this origin have in common.
    ///
    /// # Errors
    /// The authorities cannot be read.
    pub(crate) fn client_settings(&self) -> Result<ClientSettings, OriginError> {
        Ok(ClientSettings {
            connect_timeout: CONNECT_TIMEOUT,
            allow_http: self.allow_http,
            proxy: self.proxy.clone(),
            authorities: authorities::of(self)?,
        })
    }

    /// Returns the keys of this table that only a store or a server uses.
    fn keys_of_a_server(&self) -> Vec<&'static str> {
        let keys = [
            ("endpoint", self.endpoint.is_some()),
            ("region", self.region.is_some()),
            ("account", self.account.is_some()),
            ("virtual_hosted", self.virtual_hosted.is_some()),
            ("request_payer", self.request_payer),
            ("ca_file", self.ca_file.is_some()),
            ("credentials", !matches!(self.credentials, None | Some(Credentials::Anonymous))),
            ("allow_http", self.allow_http),
            ("allow_link_local", self.allow_link_local),
            ("proxy", self.proxy.is_some()),
            ("concurrency", self.concurrency.is_some()),
            ("requests_per_second", self.requests_per_second.is_some()),
            ("bytes_per_second", self.bytes_per_second.is_some()),
        ];
        keys.into_iter().filter(|(_, is_set)| *is_set).map(|(key, _)| key).collect()
    }
}

/// Checks the URL of a proxy. The text of a URL with a password appears in no error.
fn check_proxy(what: &str, proxy: &str) -> Result<(), OriginError> {
    let bad = |why: &str| Err(OriginError::invalid(what, format!("proxy: {why}")));
    let Ok(url) = url::Url::parse(proxy) else {
        return bad("not a URL; write, for example, http://proxy.example:3128");
    };
    if !url.username().is_empty() || url.password().is_some() {
        return bad("the URL must not contain a user or password");
    }
    if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
        return bad("write an http:// or https:// URL with a host");
    }
    if url.query().is_some() || url.fragment().is_some() || !matches!(url.path(), "" | "/") {
        return bad("the URL must not contain a path, a query or a fragment");
    }
    Ok(())
}

/// Parses a number of bytes, or a text with a unit.
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

/// The source of credentials. Never holds the credentials themselves.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Credentials {
    /// The environment (`AWS_*`, `AZURE_*`, `GOOGLE_*`) and the identity of the machine.
    ///
    /// The identity is a web or workload identity, or an instance role. Requests to a plain server carry no
    /// credentials.
    Env,
    /// A file, read again when it changes.
    ///
    /// The format for S3 is that of `~/.aws/credentials`, for GCS the JSON of a service account. For Azure
    /// the file has lines `azure_storage_… = …`. For a plain server it has a line `token`, or lines `user`
    /// and `password`.
    File(PathBuf),
    /// The environment variables, else the shared file of the cloud's own tools, else the machine's identity.
    Chain,
    /// No credentials: requests are not signed.
    Anonymous,
}

impl fmt::Debug for Credentials {
    /// Shows the kind of source, without the path of a file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Credentials::Env => "Env",
            Credentials::File(_) => "File(redacted)",
            Credentials::Chain => "Chain",
            Credentials::Anonymous => "Anonymous",
        })
    }
}

/// Limits that all origins of a process share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OriginLimits {
    /// The most calls in flight. Remote and local calls are counted separately.
    pub requests_max: usize,
    /// The most calls in flight to one backend while it alone is used. `None`: as many as to all.
    ///
    /// `concurrency` of an `[[origin]]` takes its place. See [`SharedPermits`](crate::SharedPermits).
    pub requests_per_origin: Option<usize>,
    /// The longest time for a call, including the wait for a permit and all retries.
    pub io_timeout: Duration,
    /// The most bytes that one read may return.
    pub get_bytes_max: u64,
    /// The most attempts of one call, including the first.
    pub attempts_max: u32,
}

impl OriginLimits {
    /// Returns the most calls in flight to one backend.
    pub(crate) fn requests_per_origin(&self) -> usize {
        self.requests_per_origin.map_or(self.requests_max, |n| n.clamp(1, self.requests_max))
    }
}

impl Default for OriginLimits {
    fn default() -> Self {
        OriginLimits {
            requests_max: 64,
            requests_per_origin: None,
            io_timeout: Duration::from_secs(30),
            get_bytes_max: 256 << 20,
            attempts_max: 8,
        }
    }
}
