//! Credentials that a user hands to the running process. They are kept in memory only.
//!
//! Every error names the key that is wrong, and never a value.

use crate::credentials::Profile;
use crate::remote::azure_key;
use crate::uri::Scheme;
use crate::{ConfiguredBy, Credentials, OriginConfig, OriginError, OriginUri, authorities};
use object_store::azure::AzureConfigKey;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

/// The characters of a key id that are shown at each end.
const SHOWN: usize = 4;

/// Credentials of one bucket, container or server, with the way there.
///
/// No `Debug` output shows a secret.
#[derive(Debug, Clone)]
pub struct Given {
    pub(crate) uri: OriginUri,
    pub(crate) config: OriginConfig,
    /// `None`: `config.credentials` says where the process finds them.
    pub(crate) secrets: Option<Arc<Profile>>,
    pub(crate) expires: Option<SystemTime>,
    identity: String,
}

/// Why credentials were not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GiveError {
    /// The settings name the origin, so that its `[[origin]]` table decides.
    #[error("the settings have an [[origin]] with the prefix {0}, which says how to reach it")]
    Configured(OriginUri),
    /// The credentials are for a bucket of the same name at another store.
    #[error(
        "{uri} is at {held} for this process, and the credentials are for {named}; there it is {uri}~{named}"
    )]
    OtherStore {
        /// The bucket or container.
        uri: String,
        /// The store of the credentials that the process holds.
        held: String,
        /// The store of the credentials that were not taken.
        named: String,
    },
    /// The process holds credentials of as many origins as it may.
    #[error("credentials of {0} other origins are held, the most that are kept in memory")]
    TooMany(usize),
    /// A client with these credentials cannot be made.
    #[error(transparent)]
    Invalid(#[from] OriginError),
}

impl Given {
    /// Checks what was handed over. `config.prefix` is the bucket, the container or the server.
    ///
    /// `config.credentials` is the source of the credentials if `secrets` is empty.
    ///
    /// # Errors
    /// [`OriginError::Invalid`], which names the wrong key: `origin`, `options.…` or `secrets.…`.
    pub fn new(
        mut config: OriginConfig,
        secrets: BTreeMap<String, String>,
        expires: Option<SystemTime>,
    ) -> Result<Self, OriginError> {
        config.configured_by = ConfiguredBy::Given;
        let uri = OriginUri::parse(&config.prefix)
            .map_err(|e| OriginError::invalid("origin", format!("is not the URI of an origin: {e}")))?;
        let (Some(scheme), Some(top)) = (uri.scheme(), uri.top()) else {
            return Err(OriginError::invalid("origin", format!("{uri} is a directory, which needs none")));
        };
        if top != uri {
            let why = format!("{uri} names a place below {top}; credentials are for all of {top}");
            return Err(OriginError::invalid("origin", why));
        }
        if let Err(e) = config.check() {
            let why = match e {
                OriginError::Invalid { why, .. } => why,
                other => other.to_string(),
            };
            return Err(OriginError::invalid("options", why));
        }
        if config.ca_file.is_some() {
            let why = "hand over the certificates themselves, as ca_certificates";
            return Err(OriginError::invalid("options.ca_file", why));
        }
        if let Some(pem) = &config.ca_certificates {
            authorities::check(pem).map_err(|why| OriginError::invalid("options.ca_certificates", why))?;
        }
        if matches!(config.credentials, Some(Credentials::File(_))) {
            return Err(OriginError::invalid("options.credentials", "write env, chain or anonymous"));
        }
        if !secrets.is_empty() && config.credentials.is_some() {
            let why = "names a source, but `secrets` holds the credentials; leave one of the two out";
            return Err(OriginError::invalid("options.credentials", why));
        }
        if !secrets.is_empty() {
            check_secrets(scheme, &secrets)?;
        }
        let has_account = config.account.is_some()
            || secrets.keys().any(|key| azure_key(key) == Some(AzureConfigKey::AccountName));
        if scheme == Scheme::Azure && !secrets.is_empty() && !has_account {
            return Err(OriginError::invalid("options.account", "is missing; name the storage account"));
        }
        let identity = identity(scheme, &config, &secrets);
        let secrets = (!secrets.is_empty()).then(|| Arc::new(Profile::of(secrets)));
        Ok(Given { uri: top, config, secrets, expires, identity })
    }

    /// Returns how the origin is reached.
    #[must_use]
    pub fn config(&self) -> &OriginConfig {
        &self.config
    }

    /// Returns the URI of the bucket, the container or the server.
    #[must_use]
    pub fn uri(&self) -> &OriginUri {
        &self.uri
    }

    /// Returns whose credentials they are, as far as that is no secret.
    #[must_use]
    pub fn identity(&self) -> &str {
        &self.identity
    }
}

/// Returns the keys of a scheme's secrets, for errors.
fn keys_of(scheme: Scheme) -> &'static str {
    match scheme {
        Scheme::S3 => "aws_access_key_id, aws_secret_access_key and aws_session_token",
        Scheme::Azure => {
            "azure_storage_account_name, azure_storage_account_key, azure_storage_sas_token, \
             azure_storage_token, azure_client_id, azure_client_secret and azure_tenant_id"
        }
        Scheme::Gcs => "google_service_account_key",
        Scheme::Http | Scheme::Https => "token, or user and password",
    }
}

fn is_known(scheme: Scheme, key: &str) -> bool {
    match scheme {
        Scheme::S3 => ["aws_access_key_id", "aws_secret_access_key", "aws_session_token"].contains(&key),
        Scheme::Azure => azure_key(key).is_some(),
        Scheme::Gcs => key == "google_service_account_key",
        Scheme::Http | Scheme::Https => ["token", "user", "password"].contains(&key),
    }
}

fn check_secrets(scheme: Scheme, secrets: &BTreeMap<String, String>) -> Result<(), OriginError> {
    let wrong = |key: &str, why: String| Err(OriginError::invalid(format!("secrets.{key}"), why));
    for (key, value) in secrets {
        if !is_known(scheme, key) {
            let key: String = key.chars().take(100).flat_map(char::escape_debug).collect();
            let why = format!("{}:// takes no such key; it takes {}", scheme.as_str(), keys_of(scheme));
            return wrong(&key, why);
        }
        if value.trim().is_empty() {
            return wrong(key, "is empty".to_owned());
        }
        if scheme != Scheme::Gcs && value.contains(char::is_control) {
            return wrong(key, "has a line break or another control character".to_owned());
        }
    }
    let needed: &[&str] = match scheme {
        Scheme::S3 => &["aws_access_key_id", "aws_secret_access_key"],
        Scheme::Http | Scheme::Https if !secrets.contains_key("token") => &["user", "password"],
        Scheme::Http | Scheme::Https | Scheme::Azure | Scheme::Gcs => &[],
    };
    match needed.iter().find(|key| !secrets.contains_key(**key)) {
        Some(key) => wrong(key, "is missing".to_owned()),
        None => Ok(()),
    }
}

/// Returns a key id without its middle, or only its beginning if it is short.
fn shortened(id: &str) -> String {
    let chars: Vec<char> = id.chars().collect();
    let text = |part: &[char]| part.iter().collect::<String>();
    if chars.len() >= 3 * SHOWN {
        format!("{}…{}", text(&chars[..SHOWN]), text(&chars[chars.len() - SHOWN..]))
    } else {
        format!("{}…", text(&chars[..chars.len().min(SHOWN / 2)]))
    }
}

fn identity(scheme: Scheme, config: &OriginConfig, secrets: &BTreeMap<String, String>) -> String {
    let account = || {
        let named = secrets.iter().find(|(key, _)| azure_key(key) == Some(AzureConfigKey::AccountName));
        config.account.clone().or_else(|| named.map(|(_, name)| name.clone()))
    };
    if secrets.is_empty() {
        let source = match config.credentials {
            Some(Credentials::Anonymous) => "anonymous",
            Some(Credentials::Chain) => "chain",
            _ => "env",
        };
        return source.to_owned();
    }
    let found = match scheme {
        Scheme::S3 => secrets.get("aws_access_key_id").map(|id| shortened(id)),
        Scheme::Azure => account(),
        Scheme::Gcs => secrets.get("google_service_account_key").and_then(|key| email(key)),
        Scheme::Http | Scheme::Https => {
            secrets.get("user").filter(|_| !secrets.contains_key("token")).cloned()
        }
    };
    found.unwrap_or_else(|| "token".to_owned())
}

/// Returns the address of a service account, which is no secret.
fn email(key: &str) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Account {
        client_email: String,
    }
    serde_json::from_str::<Account>(key).ok().map(|account| account.client_email)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(prefix: &str, secrets: &[(&str, &str)]) -> Result<Given, OriginError> {
        let config = OriginConfig { prefix: prefix.to_owned(), ..OriginConfig::default() };
        let secrets = secrets.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Given::new(config, secrets, None)
    }

    #[test]
    fn errors_name_the_wrong_key_and_no_value() {
        let id = ("aws_access_key_id", "AKIAIOSFODNN7EXAMPLE");
        let secret = ("aws_secret_access_key", "hunter2");
        for (prefix, secrets, key) in [
            ("s3://bkt/sets", vec![id, secret], "origin: s3://bkt/sets names a place below s3://bkt"),
            ("/data", vec![], "origin: file:///data is a directory"),
            ("ftp://b", vec![], "origin: is not the URI"),
            ("http://h", vec![("token", "hunter2")], "options: http:// sends data unencrypted"),
            (
                "s3://bkt",
                vec![id, secret, ("aws_acces_key", "hunter2")],
                "secrets.aws_acces_key: s3:// takes no",
            ),
            ("s3://bkt", vec![id], "secrets.aws_secret_access_key: is missing"),
            ("s3://bkt", vec![id, ("aws_secret_access_key", " ")], "secrets.aws_secret_access_key: is empty"),
            (
                "s3://bkt",
                vec![id, ("aws_secret_access_key", "hunter2\n")],
                "secrets.aws_secret_access_key: has a",
            ),
            ("az://bkt", vec![("azure_storage_account_key", "hunter2")], "options.account: is missing"),
            ("https://h", vec![("user", "u")], "secrets.password: is missing"),
            ("gs://bkt", vec![("token", "hunter2")], "secrets.token: gs:// takes no"),
        ] {
            let error = of(prefix, &secrets).expect_err(key).to_string();
            assert!(error.starts_with(key) && !error.contains("hunter2"), "{key}: {error}");
        }
        let config = OriginConfig {
            prefix: "s3://bkt".to_owned(),
            credentials: Some(Credentials::Chain),
            ..OriginConfig::default()
        };
        let secrets = [id, secret].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        let error = Given::new(config, secrets, None).expect_err("both").to_string();
        assert!(error.starts_with("options.credentials: "), "{error}");
    }

    #[test]
    fn an_identity_is_no_secret() {
        let keys = [("aws_access_key_id", "AKIAIOSFODNN7EXAMPLE"), ("aws_secret_access_key", "hunter2")];
        let given = of("s3://bkt", &keys).expect("right");
        assert_eq!((given.identity(), given.uri().to_string().as_str()), ("AKIA…MPLE", "s3://bkt"));
        assert!(!format!("{given:?}").contains("hunter2"));
        let name = |prefix, secrets: &[_]| of(prefix, secrets).expect(prefix).identity().to_owned();
        assert_eq!(name("https://h", &[("token", "hunter2")]), "token");
        assert_eq!(name("https://h", &[("user", "ann"), ("password", "hunter2")]), "ann");
        assert_eq!(name("s3://bkt", &[]), "env");
        let account = [("azure_storage_account_name", "acc"), ("azure_storage_sas_token", "hunter2")];
        assert_eq!(name("az://bkt", &account), "acc");
        let json = r#"{"client_email": "me@p.iam", "private_key": "hunter2"}"#;
        assert_eq!(name("gs://bkt", &[("google_service_account_key", json)]), "me@p.iam");
        assert_eq!(shortened("short"), "sh…");
    }
}
