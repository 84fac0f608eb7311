//! Credentials that a user hands to that user's own server, for the time that it runs.

use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt};
use utoipa::ToSchema;

/// The most origins for which a server holds credentials.
pub const ORIGINS_MAX: usize = 64;
/// The most bytes of the body of `PUT /v1/origins/credentials`.
///
/// 1 MiB of certificate authorities with their line ends escaped, and the rest.
pub const BODY_BYTES_MAX: usize = (1 << 20) + (128 << 10);

/// Body of `PUT /v1/origins/credentials`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GiveCredentials {
    /// The URI of the bucket, the container or the server: `s3://bucket`, `az://container`, `gs://bucket`,
    /// `https://host`.
    pub origin: String,
    /// How the server reaches the origin: the keys of an `[[origin]]` table.
    #[serde(default)]
    pub options: OriginOptions,
    /// The credentials. Empty: `options.credentials` says where the server finds them.
    #[serde(default)]
    pub secrets: Secrets,
    /// The time when the credentials expire, in nanoseconds since 1970. `null`: not known.
    #[serde(default)]
    pub expires_ns: Option<u64>,
}

/// The keys of an `[[origin]]` table that come with credentials.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OriginOptions {
    /// The base URL of a server that speaks the scheme's protocol.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The region of an S3 bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// Whether requests to S3 name the bucket in the host. `null`: in the path at an endpoint, in the host at
    /// AWS itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_hosted: Option<bool>,
    /// Whether the server pays for requests to an S3 bucket whose owner does not.
    pub request_payer: bool,
    /// Certificate authorities that the origin may have besides those of the system: PEM text, at most 1 MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_certificates: Option<String>,
    /// The storage account at Azure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub account: Option<String>,
    /// The source of the credentials if `secrets` is empty: `env`, `chain` or `anonymous`.
    ///
    /// `env` and `chain` are the environment and the identity of the server's process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credentials: Option<String>,
    /// Whether the endpoint or the origin may be plain `http://`.
    pub allow_http: bool,
    /// Whether the server may have a link-local address.
    pub allow_link_local: bool,
    /// The URL of the HTTP proxy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy: Option<String>,
}

/// Credentials by key: the lower-case name of the environment variable, or the key of a credentials file.
///
/// S3: `aws_access_key_id`, `aws_secret_access_key`, `aws_session_token`. Azure: `azure_storage_account_key`,
/// `azure_storage_sas_token` and the others. GCS: `google_service_account_key`, the JSON of a service
/// account.
/// Plain servers: `token`, or `user` and `password`. No `Debug` output shows a value.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct Secrets(pub BTreeMap<String, String>);

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secrets({} redacted)", self.0.len())
    }
}

/// Credentials that a server holds, without any secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GivenCredentials {
    /// The origin.
    pub origin: String,
    /// Whose credentials they are, as far as that is no secret: a shortened key id, an account, or a source.
    pub identity: String,
    /// The time when the server got them, in nanoseconds since 1970.
    pub given_ns: u64,
    /// The time when they expire, in nanoseconds since 1970. `null`: not known.
    pub expires_ns: Option<u64>,
}

/// The credentials that a server holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CredentialsList {
    /// One item for each origin, in the order of the URIs.
    pub credentials: Vec<GivenCredentials>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_debug_output_shows_a_secret() {
        let text = r#"{"origin": "s3://b", "options": {"region": "eu"}, "secrets": {"token": "hunter2"}}"#;
        let given: GiveCredentials = serde_json::from_str(text).expect("readable");
        assert_eq!((given.secrets.0["token"].as_str(), given.expires_ns), ("hunter2", None));
        assert!(!format!("{given:?}").contains("hunter2"), "{given:?}");
        assert!(serde_json::from_str::<GiveCredentials>(r#"{"origin": "s3://b", "secret": {}}"#).is_err());
    }
}
