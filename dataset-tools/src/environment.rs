//! The credentials of the environment: how a store is reached without a settings file, and what a user's own
//! server is given.
//!
//! 1. A value of a secret goes only into [`Secrets`], and into no message.
//! 2. Pure but for the files that the environment names: variables come through [`Variables`].

use crate::failure::Failure;
use fletch_api::credentials::{GiveCredentials, OriginOptions, Secrets};
use fletch_origin::{Credentials, OriginConfig, OriginUri};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The longest file with credentials, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// The variables of Azure that hold or name credentials, by the names that a server takes.
const AZURE: [&str; 12] = [
    "azure_storage_account_name",
    "azure_storage_account_key",
    "azure_storage_access_key",
    "azure_storage_sas_token",
    "azure_storage_sas_key",
    "azure_storage_token",
    "azure_client_id",
    "azure_client_secret",
    "azure_tenant_id",
    "azure_authority_id",
    "azure_authority_host",
    "azure_federated_token_file",
];
/// The variables with secrets, which no background process inherits.
pub const SECRET_VARIABLES: [&str; 13] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_TOKEN",
    "AZURE_CLIENT_SECRET",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "AZURE_STORAGE_CONNECTION_STRING",
];

/// Reads a variable of the environment.
pub type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Reads a variable of this process. An empty one counts as absent.
#[must_use]
pub fn of_process(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn parts(uri: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = uri.split_once("://")?;
    Some((scheme, rest.split('/').next().unwrap_or(rest)))
}

/// Returns the URI of the bucket, container or server of a URI; `None` for a directory.
#[must_use]
pub fn origin_of(uri: &OriginUri) -> Option<String> {
    if uri.as_local().is_some() {
        return None;
    }
    let text = uri.to_string();
    parts(&text).map(|(scheme, host)| format!("{scheme}://{host}"))
}

/// Variables and files that show that the environment has something to say of a cloud.
fn knows(scheme: &str, var: Variables<'_>) -> bool {
    let signs: &[&str] = match scheme {
        "s3" => &[
            "AWS_ACCESS_KEY_ID",
            "AWS_PROFILE",
            "AWS_SHARED_CREDENTIALS_FILE",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_ENDPOINT_URL",
            "AWS_ENDPOINT_URL_S3",
            "AWS_REGION",
            "AWS_DEFAULT_REGION",
            "AWS_NO_SIGN_REQUEST",
            "AWS_SKIP_SIGNATURE",
        ],
        "az" => {
            &["AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_KEY", "AZURE_CLIENT_ID"]
        }
        "gs" => &[
            "GOOGLE_APPLICATION_CREDENTIALS",
            "GOOGLE_SERVICE_ACCOUNT",
            "GOOGLE_SERVICE_ACCOUNT_PATH",
            "GOOGLE_SERVICE_ACCOUNT_KEY",
            "GOOGLE_ENDPOINT_URL",
        ],
        _ => return true,
    };
    let home = |path: &str| var("HOME").is_some_and(|home| Path::new(&home).join(path).is_file());
    let file = match scheme {
        "s3" => home(".aws/credentials"),
        "gs" => home(".config/gcloud/application_default_credentials.json"),
        _ => false,
    };
    file || signs.iter().any(|name| var(name).is_some())
}

/// Returns what to set so that a store can be reached.
#[must_use]
pub fn what_to_set(uri: &OriginUri) -> &'static str {
    match parts(&uri.to_string()).map(|(scheme, _)| scheme) {
        Some("s3") => {
            "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION (and AWS_ENDPOINT_URL for another \
             store), or AWS_NO_SIGN_REQUEST=true for a public bucket"
        }
        Some("az") => "set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY",
        Some("gs") => "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account",
        _ => "use https://, or name the server in an [[origin]] with allow_http = true (--config FILE)",
    }
}

fn is_yes(value: &str) -> bool {
    matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes")
}

/// Returns how the environment says that the store of a URI is reached; `None` for a directory.
#[must_use]
pub fn config_of(uri: &OriginUri, var: Variables<'_>) -> Option<OriginConfig> {
    let prefix = origin_of(uri)?;
    let (scheme, host) = parts(&prefix)?;
    let first = |names: &[&str]| names.iter().find_map(|name| var(name));
    if !knows(scheme, var) {
        return None;
    }
    let mut config = OriginConfig { prefix: prefix.clone(), ..OriginConfig::default() };
    match scheme {
        "s3" => {
            config.endpoint = first(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]);
            config.region = first(&["AWS_REGION", "AWS_DEFAULT_REGION"]);
            let is_unsigned = first(&["AWS_NO_SIGN_REQUEST", "AWS_SKIP_SIGNATURE"]);
            let is_unsigned = is_unsigned.is_some_and(|value| is_yes(&value));
            config.credentials = Some(if is_unsigned { Credentials::Anonymous } else { Credentials::Chain });
        }
        "az" => {
            config.account = first(&["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"]);
            config.endpoint = first(&["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"]);
            config.credentials = Some(Credentials::Env);
        }
        "gs" => {
            config.endpoint = first(&["GOOGLE_ENDPOINT_URL"]);
            config.credentials = Some(Credentials::Chain);
        }
        "http" => {
            let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
            let is_near = matches!(name, "localhost" | "[::1]") || name.starts_with("127.");
            // Other plain http:// sends data unencrypted over a network: that needs an [[origin]].
            if !is_near {
                return None;
            }
            config.allow_http = true;
        }
        _ => {}
    }
    config.allow_http |= config.endpoint.as_deref().is_some_and(|e| e.starts_with("http://"));
    Some(config)
}

/// Returns what a user's own server is given for the store of a URI; `None` for a directory.
///
/// # Errors
/// A file with credentials cannot be read. The message names it.
pub fn to_give(
    config: &OriginConfig,
    uri: &OriginUri,
    var: Variables<'_>,
) -> Result<Option<GiveCredentials>, Failure> {
    let Some(origin) = origin_of(uri) else { return Ok(None) };
    let scheme = parts(&origin).map_or("", |(scheme, _)| scheme);
    let mut secrets = BTreeMap::new();
    let mut source = None;
    match &config.credentials {
        Some(Credentials::Anonymous) => source = Some("anonymous"),
        Some(Credentials::File(path)) if scheme == "gs" => {
            secrets.insert("google_service_account_key".to_owned(), read(path)?);
        }
        Some(Credentials::File(path)) => secrets = profile(path, "default")?,
        None | Some(Credentials::Env | Credentials::Chain) => {
            secrets = match scheme {
                "s3" => aws(var)?,
                "az" => azure(var),
                "gs" => google(var)?,
                _ => BTreeMap::new(),
            };
            let of_machine = match scheme {
                "http" | "https" => "anonymous",
                "gs" => "chain",
                _ => "env",
            };
            source = secrets.is_empty().then_some(of_machine);
        }
    }
    let expires = ["AWS_CREDENTIAL_EXPIRATION", "AWS_SESSION_EXPIRATION"].iter().find_map(|name| var(name));
    let is_of_session = scheme == "s3" && secrets.contains_key("aws_session_token");
    let expires_ns = expires.filter(|_| is_of_session).and_then(|at| fletch_tables::documents::unix_ns(&at));
    let options = OriginOptions {
        endpoint: config.endpoint.clone(),
        region: config.region.clone(),
        account: config.account.clone(),
        credentials: source.map(str::to_owned),
        allow_http: config.allow_http,
        allow_link_local: config.allow_link_local,
        proxy: config.proxy.clone(),
    };
    Ok(Some(GiveCredentials { origin, options, secrets: Secrets(secrets), expires_ns }))
}

fn aws(var: Variables<'_>) -> Result<BTreeMap<String, String>, Failure> {
    let keys = ["aws_access_key_id", "aws_secret_access_key", "aws_session_token"];
    if var("AWS_ACCESS_KEY_ID").is_some() {
        let found = keys.iter().filter_map(|key| Some(((*key).to_owned(), var(&key.to_ascii_uppercase())?)));
        return Ok(found.collect());
    }
    let shared = var("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from);
    let shared = shared.or_else(|| Some(PathBuf::from(var("HOME")?).join(".aws/credentials")));
    let Some(shared) = shared.filter(|path| path.is_file()) else { return Ok(BTreeMap::new()) };
    let name = var("AWS_PROFILE").unwrap_or_else(|| "default".to_owned());
    let mut found = profile(&shared, &name)?;
    found.retain(|key, _| keys.contains(&key.as_str()));
    Ok(found)
}

fn azure(var: Variables<'_>) -> BTreeMap<String, String> {
    let mut found: BTreeMap<String, String> =
        AZURE.iter().filter_map(|key| Some(((*key).to_owned(), var(&key.to_ascii_uppercase())?))).collect();
    if let Some(key) = var("AZURE_STORAGE_KEY") {
        found.entry("azure_storage_account_key".to_owned()).or_insert(key);
    }
    // A name alone is no credential.
    if found.keys().all(|key| key == "azure_storage_account_name") {
        found.clear();
    }
    found
}

fn google(var: Variables<'_>) -> Result<BTreeMap<String, String>, Failure> {
    let file = ["GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"];
    let text = match (var("GOOGLE_SERVICE_ACCOUNT_KEY"), file.iter().find_map(|name| var(name))) {
        (Some(key), _) => key,
        (None, Some(path)) => read(Path::new(&path))?,
        (None, None) => return Ok(BTreeMap::new()),
    };
    let document: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    // Other kinds of files are read by the server itself, from the place that the variable names.
    let is_service = document["type"] == "service_account" || document["private_key"].is_string();
    Ok(if is_service {
        BTreeMap::from([("google_service_account_key".into(), text)])
    } else {
        BTreeMap::new()
    })
}

fn read(path: &Path) -> Result<String, Failure> {
    let cannot =
        |e: &std::io::Error| Failure::io(format_args!("cannot read credentials {}", path.display()), e);
    let length = std::fs::metadata(path).map_err(|e| cannot(&e))?.len();
    if length > FILE_BYTES_MAX {
        return Err(Failure::new(format!("{} is too long for credentials: {length} bytes", path.display())));
    }
    std::fs::read_to_string(path).map_err(|e| cannot(&e))
}

/// Reads the `key = value` lines of one profile. Lines before any profile belong to `default`.
fn profile(path: &Path, wanted: &str) -> Result<BTreeMap<String, String>, Failure> {
    let text = read(path)?;
    let mut found = BTreeMap::new();
    let mut name = "default".to_owned();
    for line in text.lines().map(str::trim) {
        if let Some(inner) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            name = inner.trim().strip_prefix("profile ").unwrap_or(inner.trim()).trim().to_owned();
        } else if name == wanted
            && !line.starts_with(['#', ';'])
            && let Some((key, value)) = line.split_once('=')
            && !value.trim().is_empty()
        {
            found.insert(key.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(uri: &str, vars: &[(&str, &str)]) -> GiveCredentials {
        let uri = OriginUri::parse(uri).expect("uri");
        let var =
            |name: &str| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        let config = config_of(&uri, &var).expect("a store");
        to_give(&config, &uri, &var).expect("readable").expect("a store")
    }

    #[test]
    fn variables_become_what_the_own_server_gets() {
        let g = given(
            "s3://photos/set",
            &[
                ("AWS_ACCESS_KEY_ID", "id"),
                ("AWS_SECRET_ACCESS_KEY", "secret"),
                ("AWS_SESSION_TOKEN", "session"),
                ("AWS_CREDENTIAL_EXPIRATION", "1970-01-01T00:00:07Z"),
                ("AWS_ENDPOINT_URL", "http://127.0.0.1:9000"),
                ("AWS_REGION", "eu"),
            ],
        );
        assert_eq!((g.origin.as_str(), g.secrets.0.len(), g.options.credentials), ("s3://photos", 3, None));
        assert_eq!(
            (g.options.endpoint.as_deref(), g.options.allow_http),
            (Some("http://127.0.0.1:9000"), true)
        );
        assert_eq!((g.options.region.as_deref(), g.expires_ns), (Some("eu"), Some(7_000_000_000)));
        let g = given("az://container/set", &[("AZURE_STORAGE_ACCOUNT", "a"), ("AZURE_STORAGE_KEY", "k")]);
        assert_eq!(g.options.account.as_deref(), Some("a"));
        assert_eq!(g.secrets.0["azure_storage_account_key"], "k");
        let g = given("s3://bucket", &[("AWS_NO_SIGN_REQUEST", "true")]);
        assert_eq!(g.options.credentials.as_deref(), Some("anonymous"));
        let g = given("https://host/data", &[]);
        assert_eq!(
            (g.origin.as_str(), g.options.credentials.as_deref()),
            ("https://host", Some("anonymous"))
        );
        let g = given("http://127.0.0.1:80/data", &[]);
        assert!(g.options.allow_http);
        let far = OriginUri::parse("http://far/data").expect("uri");
        assert_eq!(config_of(&far, &|_| None), None, "unencrypted, over a network");
    }

    #[test]
    fn a_profile_of_the_shared_file_is_handed_over() {
        let dir = tempfile::tempdir().expect("tempdir");
        let file = dir.path().join("credentials");
        let text = "[default]\naws_access_key_id = a\naws_secret_access_key = b\n\
                    [work]\naws_access_key_id = c\naws_secret_access_key = d\nother = e\n";
        std::fs::write(&file, text).expect("write");
        let path = file.display().to_string();
        let g = given("s3://bucket", &[("AWS_SHARED_CREDENTIALS_FILE", &path), ("AWS_PROFILE", "work")]);
        assert_eq!((g.secrets.0["aws_access_key_id"].as_str(), g.secrets.0.len()), ("c", 2));
        let g = given("s3://bucket", &[("AWS_SHARED_CREDENTIALS_FILE", "/none")]);
        let unknown = OriginUri::parse("s3://bucket").expect("uri");
        assert_eq!(config_of(&unknown, &|_| None), None, "nothing is known of that cloud");
        assert_eq!(g.options.credentials.as_deref(), Some("env"), "the identity of the machine");
        let key = dir.path().join("key.json");
        std::fs::write(&key, r#"{"type": "service_account"}"#).expect("write");
        let g = given("gs://bucket", &[("GOOGLE_APPLICATION_CREDENTIALS", &key.display().to_string())]);
        assert!(g.secrets.0.contains_key("google_service_account_key"));
    }
}
