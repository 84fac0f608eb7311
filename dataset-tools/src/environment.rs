//! The credentials of the environment: how a store is reached without a settings file, and what a user's own
//! server is given.
//!
//! 1. A value of a secret goes only into [`Secrets`], and into no message.
//! 2. Pure but for the files that the environment names: variables come through [`Variables`].
//! 3. Every variable of [`VARIABLES`] that changes how the command reads is handed over, so that the server
//!    reads in the same way. `fletch-origin` takes no other variable for a store without an `[[origin]]`.

use crate::failure::{Exit, Failure};
use fletch_api::credentials::{GiveCredentials, OriginOptions, Secrets};
use fletch_origin::{AwsProfile, ConfiguredBy, Credentials, OriginConfig, OriginError, OriginUri};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

pub use fletch_origin::Variables;

/// The longest file with credentials, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// The variables that say how a store is reached, by the scheme of its URI.
///
/// A test sets each of them, and compares what the command uses with what the server gets.
pub const VARIABLES: [(&str, &[&str]); 3] = [
    (
        "s3",
        &[
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "AWS_CREDENTIAL_EXPIRATION",
            "AWS_SESSION_EXPIRATION",
            "AWS_PROFILE",
            "AWS_DEFAULT_PROFILE",
            "AWS_CONFIG_FILE",
            "AWS_SHARED_CREDENTIALS_FILE",
            "AWS_REGION",
            "AWS_DEFAULT_REGION",
            "AWS_ENDPOINT_URL",
            "AWS_ENDPOINT_URL_S3",
            "AWS_ENDPOINT",
            "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
            "AWS_NO_SIGN_REQUEST",
            "AWS_SKIP_SIGNATURE",
            "AWS_REQUEST_PAYER",
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
            "AWS_CA_BUNDLE",
            "SSL_CERT_FILE",
        ],
    ),
    (
        "az",
        &[
            "AZURE_STORAGE_ACCOUNT",
            "AZURE_STORAGE_ACCOUNT_NAME",
            "AZURE_STORAGE_ACCOUNT_KEY",
            "AZURE_STORAGE_ACCESS_KEY",
            "AZURE_STORAGE_KEY",
            "AZURE_STORAGE_SAS_TOKEN",
            "AZURE_STORAGE_SAS_KEY",
            "AZURE_STORAGE_TOKEN",
            "AZURE_CLIENT_ID",
            "AZURE_CLIENT_SECRET",
            "AZURE_TENANT_ID",
            "AZURE_AUTHORITY_ID",
            "AZURE_AUTHORITY_HOST",
            "AZURE_FEDERATED_TOKEN_FILE",
            "AZURE_STORAGE_ENDPOINT",
            "AZURE_ENDPOINT",
            "AZURE_SKIP_SIGNATURE",
            "SSL_CERT_FILE",
        ],
    ),
    (
        "gs",
        &[
            "GOOGLE_APPLICATION_CREDENTIALS",
            "GOOGLE_SERVICE_ACCOUNT",
            "GOOGLE_SERVICE_ACCOUNT_PATH",
            "GOOGLE_SERVICE_ACCOUNT_KEY",
            "GOOGLE_ENDPOINT_URL",
            "GOOGLE_BASE_URL",
            "GOOGLE_SKIP_SIGNATURE",
            "SSL_CERT_FILE",
        ],
    ),
];
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
pub const SECRET_VARIABLES: [&str; 14] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
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
            "AWS_DEFAULT_PROFILE",
            "AWS_CONFIG_FILE",
            "AWS_SHARED_CREDENTIALS_FILE",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_ENDPOINT_URL",
            "AWS_ENDPOINT_URL_S3",
            "AWS_ENDPOINT",
            "AWS_REGION",
            "AWS_DEFAULT_REGION",
            "AWS_NO_SIGN_REQUEST",
            "AWS_SKIP_SIGNATURE",
        ],
        "az" => &[
            "AZURE_STORAGE_ACCOUNT",
            "AZURE_STORAGE_ACCOUNT_NAME",
            "AZURE_STORAGE_KEY",
            "AZURE_CLIENT_ID",
            "AZURE_SKIP_SIGNATURE",
        ],
        "gs" => &[
            "GOOGLE_APPLICATION_CREDENTIALS",
            "GOOGLE_SERVICE_ACCOUNT",
            "GOOGLE_SERVICE_ACCOUNT_PATH",
            "GOOGLE_SERVICE_ACCOUNT_KEY",
            "GOOGLE_ENDPOINT_URL",
            "GOOGLE_BASE_URL",
            "GOOGLE_SKIP_SIGNATURE",
        ],
        _ => return true,
    };
    let home = |path: &str| var("HOME").is_some_and(|home| Path::new(&home).join(path).is_file());
    let file = match scheme {
        "s3" => home(".aws/credentials") || home(".aws/config"),
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
             store), or AWS_PROFILE, or AWS_NO_SIGN_REQUEST=true for a public bucket; fletch looked at these \
             variables, ~/.aws/credentials and ~/.aws/config"
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
///
/// # Errors
/// A file of AWS's tools cannot be read. The message names it.
pub fn config_of(uri: &OriginUri, var: Variables<'_>) -> Result<Option<OriginConfig>, Failure> {
    let Some(prefix) = origin_of(uri) else { return Ok(None) };
    let Some((scheme, host)) = parts(&prefix).filter(|(scheme, _)| knows(scheme, var)) else {
        return Ok(None);
    };
    let first = |names: &[&str]| names.iter().find_map(|name| var(name));
    let is_set = |names: &[&str]| first(names).is_some_and(|value| is_yes(&value));
    let mut config = OriginConfig {
        prefix: prefix.clone(),
        configured_by: ConfiguredBy::Environment,
        ..OriginConfig::default()
    };
    match scheme {
        "s3" => {
            let profile = AwsProfile::load(var).map_err(of_origin)?;
            let ignores = is_set(&["AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"]) || profile.ignores_endpoints();
            let endpoints = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];
            let endpoint = first(&endpoints).or_else(|| profile.endpoint());
            config.endpoint = endpoint.filter(|_| !ignores);
            config.region = first(&["AWS_REGION", "AWS_DEFAULT_REGION"]).or_else(|| profile.region());
            config.virtual_hosted = match first(&["AWS_VIRTUAL_HOSTED_STYLE_REQUEST"]) {
                Some(value) => Some(is_yes(&value)),
                None => profile.virtual_hosted(),
            };
            let payer = first(&["AWS_REQUEST_PAYER"]);
            config.request_payer =
                payer.is_some_and(|value| value.eq_ignore_ascii_case("requester") || is_yes(&value));
            config.ca_file = first(&["AWS_CA_BUNDLE"]).map(PathBuf::from).or_else(|| profile.ca_bundle());
            let is_unsigned = is_set(&["AWS_NO_SIGN_REQUEST", "AWS_SKIP_SIGNATURE"]);
            config.credentials = Some(if is_unsigned { Credentials::Anonymous } else { Credentials::Chain });
        }
        "az" => {
            config.account = first(&["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"]);
            config.endpoint = first(&["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"]);
            let is_unsigned = is_set(&["AZURE_SKIP_SIGNATURE"]);
            config.credentials = Some(if is_unsigned { Credentials::Anonymous } else { Credentials::Env });
        }
        "gs" => {
            config.endpoint = first(&["GOOGLE_ENDPOINT_URL", "GOOGLE_BASE_URL"]);
            let is_unsigned = is_set(&["GOOGLE_SKIP_SIGNATURE"]);
            config.credentials = Some(if is_unsigned { Credentials::Anonymous } else { Credentials::Chain });
        }
        "http" => {
            let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
            let is_near = matches!(name, "localhost" | "[::1]") || name.starts_with("127.");
            // Other plain http:// sends data unencrypted over a network: that needs an [[origin]].
            if !is_near {
                return Ok(None);
            }
            config.allow_http = true;
        }
        _ => {}
    }
    // The system's store of this process: the server may have been started with another one.
    let system = var("SSL_CERT_FILE").map(PathBuf::from).filter(|file| file.is_file());
    config.ca_file = config.ca_file.or(system);
    config.allow_http |= config.endpoint.as_deref().is_some_and(|e| e.starts_with("http://"));
    Ok(Some(config))
}

/// Says at which store a bucket or container is now, and what says so: `AWS_ENDPOINT_URL now names STORE`.
#[must_use]
pub fn now_names(config: &OriginConfig, uri: &OriginUri, var: Variables<'_>, store: &str) -> String {
    if config.configured_by == ConfiguredBy::Settings {
        return format!("its [[origin]] in --config now names {store}");
    }
    let text = uri.to_string();
    type Names = &'static [&'static str];
    let (endpoints, account): (Names, Names) = match parts(&text).map_or("", |(scheme, _)| scheme) {
        "s3" => (&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"], &[]),
        "az" => (
            &["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"],
            &["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"],
        ),
        _ => (&["GOOGLE_ENDPOINT_URL", "GOOGLE_BASE_URL"], &[]),
    };
    let set = |names: Names| names.iter().copied().find(|name| var(name).is_some());
    match (config.endpoint.is_some(), set(endpoints), set(account)) {
        (true, Some(name), _) | (false, _, Some(name)) => format!("{name} now names {store}"),
        (true, None, _) => format!("the profile of AWS now names {store}"),
        (false, _, None) => format!("no endpoint is named now, which means {store}"),
    }
}

fn of_origin(error: OriginError) -> Failure {
    match error {
        OriginError::Denied { .. } => Failure::new(error.to_string()).exit(Exit::Denied),
        error => Failure::new(error.to_string()),
    }
}

/// Returns what a user's own server is given for the store of a URI; `None` for a directory.
///
/// May run the program of a profile's `credential_process`, or ask a service of logins. For these it must be
/// called within a runtime, but not by one of its tasks.
///
/// # Errors
/// A file with credentials or authorities cannot be read, or a login failed. The message names it.
pub fn to_give(
    config: &OriginConfig,
    uri: &OriginUri,
    var: Variables<'_>,
) -> Result<Option<GiveCredentials>, Failure> {
    let Some(origin) = origin_of(uri) else { return Ok(None) };
    let scheme = parts(&origin).map_or("", |(scheme, _)| scheme);
    // Every key of an origin is handed over, or named here with the reason why it is not.
    let OriginConfig {
        prefix: _,
        endpoint,
        region,
        virtual_hosted,
        request_payer,
        ca_file,
        ca_certificates,
        account,
        credentials,
        // The server is one user's own, and has no domains.
        domains: _,
        allow_http,
        allow_link_local,
        proxy,
        // What this process may send at once, and in a second. The server has limits of its own.
        concurrency: _,
        requests_per_second: _,
        bytes_per_second: _,
        configured_by: _,
    } = config;
    let mut secrets = BTreeMap::new();
    let (mut source, mut expires_ns) = (None, None);
    match credentials {
        Some(Credentials::Anonymous) => source = Some("anonymous"),
        Some(Credentials::File(path)) if scheme == "gs" => {
            secrets.insert("google_service_account_key".to_owned(), read(path)?);
        }
        Some(Credentials::File(path)) => {
            secrets = fletch_origin::keys_of_file(path, "default").map_err(of_origin)?;
        }
        None | Some(Credentials::Env | Credentials::Chain) => {
            match scheme {
                "s3" => {
                    if let Some(keys) = fletch_origin::aws_keys(config, var).map_err(of_origin)? {
                        secrets = keys.secrets;
                        let since = keys.expires.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
                        expires_ns = since.and_then(|since| u64::try_from(since.as_nanos()).ok());
                    }
                }
                "az" => secrets = azure(var),
                "gs" => secrets = google(var)?,
                _ => {}
            }
            let of_machine = match scheme {
                "http" | "https" => "anonymous",
                "gs" => "chain",
                _ => "env",
            };
            source = secrets.is_empty().then_some(of_machine);
        }
    }
    let of_file = ca_file.as_deref().map(fletch_origin::read_authorities).transpose().map_err(of_origin)?;
    let options = OriginOptions {
        endpoint: endpoint.clone(),
        region: region.clone(),
        virtual_hosted: *virtual_hosted,
        request_payer: *request_payer,
        ca_certificates: of_file.or_else(|| ca_certificates.clone()),
        account: account.clone(),
        credentials: source.map(str::to_owned),
        allow_http: *allow_http,
        allow_link_local: *allow_link_local,
        proxy: proxy.clone(),
    };
    Ok(Some(GiveCredentials { origin, options, secrets: Secrets(secrets), expires_ns }))
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

#[cfg(test)]
mod tests;
