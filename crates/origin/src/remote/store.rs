//! Makes the `object_store` client of an origin, from its `[[origin]]` table and its current credentials.
//!
//! Each client of a store is built twice. The first build has the HTTP client for credentials, and only its
//! provider of credentials is kept. The second build has that provider, and the HTTP client for data. So no
//! request for data can go through the client that may connect to metadata services.
//!
//! An anonymous client gets empty credentials: without any, `object_store` asks a metadata service for some
//! calls even if it signs nothing.

use crate::address::AddressRule;
use crate::aws_profile::provider::{LoginCredentials, LoginProvider};
use crate::credentials::{self, Profile, Source};
use crate::stats::Counters;
use crate::transport::credentials_client::{CredentialsConnector, Named};
use crate::transport::{ClientSettings, Connector};
use crate::uri::Scheme;
use crate::{ConfiguredBy, OriginConfig, OriginError};
use http::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, AwsCredential};
use object_store::azure::{AzureConfigKey, AzureCredential, MicrosoftAzure, MicrosoftAzureBuilder};
use object_store::gcp::{GcpCredential, GoogleCloudStorage, GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::{HttpBuilder, HttpStore};
use object_store::list::PaginatedListStore;
use object_store::multipart::MultipartStore;
use object_store::{ClientOptions, ObjectStore, RetryConfig, StaticCredentialProvider};
use std::sync::Arc;
use std::time::Duration;

/// The `object_store` client of one bucket, container or server.
pub(super) enum Store {
    S3(AmazonS3),
    Azure(MicrosoftAzure),
    Gcs(GoogleCloudStorage),
    Plain(HttpStore),
}

/// The inputs to a [`Store`].
pub(super) struct Recipe<'a> {
    pub config: &'a OriginConfig,
    pub scheme: Scheme,
    pub host: &'a str,
    pub source: &'a Source,
    pub connect_timeout: Duration,
    pub counters: &'a Arc<Counters>,
}

impl Store {
    /// Makes the client.
    ///
    /// # Errors
    /// `Invalid`, without the text of `object_store` where it could repeat a secret.
    pub fn make(recipe: &Recipe<'_>) -> Result<Store, OriginError> {
        match recipe.scheme {
            Scheme::S3 => recipe.s3().map(Store::S3),
            Scheme::Azure => recipe.azure().map(Store::Azure),
            Scheme::Gcs => recipe.gcs().map(Store::Gcs),
            Scheme::Http | Scheme::Https => recipe.plain().map(Store::Plain),
        }
    }

    pub fn objects(&self) -> &dyn ObjectStore {
        match self {
            Store::S3(s) => s,
            Store::Azure(s) => s,
            Store::Gcs(s) => s,
            Store::Plain(s) => s,
        }
    }

    /// Returns the interface for writes in parts. `None` for a plain server, which is read-only.
    pub fn uploads(&self) -> Option<&dyn MultipartStore> {
        match self {
            Store::S3(s) => Some(s),
            Store::Azure(s) => Some(s),
            Store::Gcs(s) => Some(s),
            Store::Plain(_) => None,
        }
    }

    /// Returns the interface for listings. `None` for a plain server, which has none.
    pub fn pages(&self) -> Option<&dyn PaginatedListStore> {
        match self {
            Store::S3(s) => Some(s),
            Store::Azure(s) => Some(s),
            Store::Gcs(s) => Some(s),
            Store::Plain(_) => None,
        }
    }
}

impl Recipe<'_> {
    fn what(&self) -> String {
        match self.source {
            Source::Given(_) => format!("the credentials of {}", self.config.prefix),
            _ => self.config.what(),
        }
    }

    fn failed(&self, error: &object_store::Error) -> OriginError {
        // The text of a parser may repeat the file's content. The text of a builder names keys only.
        let why = match self.source {
            Source::File { path, .. } => {
                format!("the credentials in {} are not valid for this origin", path.display())
            }
            Source::Given(_) => "the credentials are not valid for this origin".to_owned(),
            _ => error.to_string(),
        };
        OriginError::invalid(self.what(), why)
    }

    fn options(&self) -> ClientOptions {
        ClientOptions::new()
            .with_allow_http(self.config.allow_http)
            .with_http1_only()
            .with_connect_timeout(self.connect_timeout)
            // This crate sets the deadlines: one for a call, and one for each wait in it.
            .with_timeout_disabled()
    }

    /// Turns the library's retries off: `retry` decides on retries.
    fn no_retry() -> RetryConfig {
        RetryConfig { max_retries: 0, retry_timeout: Duration::ZERO, ..RetryConfig::default() }
    }

    fn settings(&self) -> Result<ClientSettings, OriginError> {
        Ok(ClientSettings { connect_timeout: self.connect_timeout, ..self.config.client_settings()? })
    }

    fn connector(&self, plain: Option<HeaderMap>) -> Result<Connector, OriginError> {
        Ok(Connector {
            counters: Arc::clone(self.counters),
            settings: self.settings()?,
            rule: AddressRule { allow_link_local: self.config.allow_link_local },
            plain,
        })
    }

    fn credentials_connector(&self) -> Result<CredentialsConnector, OriginError> {
        Ok(CredentialsConnector(self.settings()?))
    }

    fn endpoint(&self) -> Option<&str> {
        self.config.endpoint.as_deref().map(|e| e.trim_end_matches('/'))
    }

    fn lacks(&self, what: &str) -> OriginError {
        match self.source {
            Source::File { path, .. } => {
                OriginError::invalid(path.display(), format!("the credentials file has no {what}"))
            }
            _ => OriginError::invalid(self.what(), format!("the credentials have no {what}")),
        }
    }

    /// Returns the keys and values of the source. `None` if it has none.
    fn profile(&self) -> Result<Option<Arc<Profile>>, OriginError> {
        match self.source {
            Source::Env { .. } | Source::Anonymous | Source::Login(_) => Ok(None),
            Source::Unusable(error) => Err(error.clone()),
            Source::File { path, profile } => Profile::load(path, profile).map(|p| Some(Arc::new(p))),
            Source::Given(given) => Ok(Some(Arc::clone(given))),
        }
    }

    fn looked_at(&self) -> Option<String> {
        match self.source {
            Source::Env { looked_at } => looked_at.clone(),
            _ => None,
        }
    }

    /// Returns the error of a kind of source that a scheme does not have.
    fn has_no_login(&self) -> OriginError {
        match self.source {
            Source::Unusable(error) => error.clone(),
            _ => OriginError::invalid(self.what(), "this kind of store has no profiles of AWS"),
        }
    }

    fn s3(&self) -> Result<AmazonS3, OriginError> {
        let builder = match self.source {
            Source::Env { .. } => s3_of_environment(self.config.configured_by),
            Source::Unusable(error) => return Err(error.clone()),
            Source::Login(_) => AmazonS3Builder::new(),
            Source::Anonymous => AmazonS3Builder::new().with_skip_signature(true),
            Source::File { .. } | Source::Given(_) => {
                let found = self.profile()?;
                let value = |key: &str| found.as_ref().and_then(|found| found.value(&[key]));
                let (Some(id), Some(secret)) = (value("aws_access_key_id"), value("aws_secret_access_key"))
                else {
                    let mut what = "aws_access_key_id and aws_secret_access_key".to_owned();
                    if let Source::File { profile, .. } = self.source {
                        what += &format!(" under [{profile}]");
                    }
                    return Err(self.lacks(&what));
                };
                let builder = AmazonS3Builder::new().with_access_key_id(id).with_secret_access_key(secret);
                match value("aws_session_token") {
                    Some(token) => builder.with_token(token),
                    None => builder,
                }
            }
        };
        let mut builder = builder
            .with_bucket_name(self.host)
            .with_client_options(self.options())
            .with_disable_bulk_delete(true)
            .with_retry(Self::no_retry());
        let of_environment = |key| builder.get_config_value(&key);
        let endpoint = self.endpoint().map(str::to_owned).or_else(|| {
            of_environment(AmazonS3ConfigKey::S3Endpoint)
                .or_else(|| of_environment(AmazonS3ConfigKey::Endpoint))
        });
        // `from_env` of the library has `false` where the environment says nothing.
        let hosted = of_environment(AmazonS3ConfigKey::VirtualHostedStyleRequest);
        let hosted = self.config.virtual_hosted.or((hosted.as_deref() == Some("true")).then_some(true));
        let virtual_hosted = hosted.unwrap_or(endpoint.is_none() && is_host_label(self.host));
        builder = builder.with_virtual_hosted_style_request(virtual_hosted);
        if let Some(endpoint) = endpoint {
            let endpoint = if virtual_hosted { with_bucket(&endpoint, self.host) } else { endpoint };
            // This key comes before `Endpoint`, which the environment may have set.
            builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
        }
        if self.config.request_payer {
            builder = builder.with_request_payer(true);
        }
        if let Some(region) = &self.config.region {
            builder = builder.with_region(region);
        }
        let builder = match self.source {
            Source::Anonymous => {
                let none = AwsCredential { key_id: String::new(), secret_key: String::new(), token: None };
                builder.with_credentials(Arc::new(StaticCredentialProvider::new(none)))
            }
            Source::Login(login) => {
                let provider = LoginProvider::shared(login, &self.config.client_settings()?);
                builder.with_credentials(Arc::new(LoginCredentials(provider)))
            }
            _ => {
                let first = builder.clone().with_http_connector(self.credentials_connector()?).build();
                let credentials = Arc::clone(first.map_err(|e| self.failed(&e))?.credentials());
                builder.with_credentials(Arc::new(Named::new(credentials, self.looked_at())))
            }
        };
        builder.with_http_connector(self.connector(None)?).build().map_err(|e| self.failed(&e))
    }

    fn azure(&self) -> Result<MicrosoftAzure, OriginError> {
        let mut builder = match self.source {
            Source::Env { .. } => azure_of_environment(self.config.configured_by),
            Source::Login(_) | Source::Unusable(_) => return Err(self.has_no_login()),
            Source::Anonymous => MicrosoftAzureBuilder::new().with_skip_signature(true),
            Source::File { .. } | Source::Given(_) => {
                let mut builder = MicrosoftAzureBuilder::new();
                let mut any = false;
                let found = self.profile()?;
                for (key, value) in found.iter().flat_map(|found| found.iter()) {
                    // Credentials only: the configuration says where the store is.
                    if let Some(known) = azure_key(key) {
                        any |= known != AzureConfigKey::AccountName;
                        builder = builder.with_config(known, value);
                    }
                }
                if !any {
                    return Err(
                        self.lacks("azure_storage_account_key, azure_storage_sas_token or other credentials")
                    );
                }
                builder
            }
        };
        builder = builder
            .with_container_name(self.host)
            // Off, because the emulator mode takes its address from a variable.
            .with_use_emulator(false)
            .with_client_options(self.options())
            .with_retry(Self::no_retry());
        if let Some(account) = &self.config.account {
            builder = builder.with_account(account);
        }
        if let Some(endpoint) = self.endpoint() {
            builder = builder.with_endpoint(endpoint.to_owned());
        }
        let builder = match self.source {
            Source::Anonymous => {
                let none = AzureCredential::BearerToken(String::new());
                builder.with_credentials(Arc::new(StaticCredentialProvider::new(none)))
            }
            _ => {
                let first = builder.clone().with_http_connector(self.credentials_connector()?).build();
                let credentials = Arc::clone(first.map_err(|e| self.failed(&e))?.credentials());
                builder.with_credentials(Arc::new(Named::new(credentials, self.looked_at())))
            }
        };
        builder.with_http_connector(self.connector(None)?).build().map_err(|e| self.failed(&e))
    }

    fn gcs(&self) -> Result<GoogleCloudStorage, OriginError> {
        let builder = match self.source {
            Source::Env { .. } => gcs_of_environment(self.config.configured_by),
            Source::Login(_) | Source::Unusable(_) => return Err(self.has_no_login()),
            Source::Anonymous => GoogleCloudStorageBuilder::new().with_skip_signature(true),
            Source::File { path, .. } => {
                // Read here, to tell a file that cannot be read from one that is not valid.
                GoogleCloudStorageBuilder::new().with_service_account_key(credentials::text(path)?)
            }
            Source::Given(given) => {
                let Some(key) = given.value(&["google_service_account_key"]) else {
                    return Err(self.lacks("google_service_account_key"));
                };
                GoogleCloudStorageBuilder::new().with_service_account_key(key)
            }
        };
        let mut builder = builder
            .with_bucket_name(self.host)
            .with_client_options(self.options())
            .with_retry(Self::no_retry());
        if let Some(endpoint) = self.endpoint() {
            builder = builder.with_base_url(endpoint);
        }
        let builder = match self.source {
            Source::Anonymous => {
                let none = GcpCredential { bearer: String::new() };
                builder.with_credentials(Arc::new(StaticCredentialProvider::new(none)))
            }
            _ => {
                let first = builder.clone().with_http_connector(self.credentials_connector()?).build();
                let credentials = Arc::clone(first.map_err(|e| self.failed(&e))?.credentials());
                builder.with_credentials(Arc::new(Named::new(credentials, self.looked_at())))
            }
        };
        builder.with_http_connector(self.connector(None)?).build().map_err(|e| self.failed(&e))
    }

    fn plain(&self) -> Result<HttpStore, OriginError> {
        let authorization = match self.source {
            Source::Env { .. } | Source::Anonymous => None,
            Source::Login(_) | Source::Unusable(_) => return Err(self.has_no_login()),
            Source::File { .. } | Source::Given(_) => {
                let found = self.profile()?;
                let value = |key: &str| found.as_ref().and_then(|found| found.value(&[key]));
                let text = match (value("token"), value("user"), value("password")) {
                    (Some(token), _, _) => format!("Bearer {token}"),
                    (None, Some(user), Some(password)) => basic(user, password),
                    _ => return Err(self.lacks("token, or user and password")),
                };
                let mut value = HeaderValue::from_str(&text)
                    .map_err(|_| self.lacks("value that an HTTP header can carry"))?;
                value.set_sensitive(true);
                Some((AUTHORIZATION, value))
            }
        };
        let connector = self.connector(Some(authorization.into_iter().collect()))?;
        HttpBuilder::new()
            .with_url(format!("{}://{}", self.scheme.as_str(), self.host))
            .with_client_options(self.options())
            .with_retry(Self::no_retry())
            .with_http_connector(connector)
            .build()
            .map_err(|e| self.failed(&e))
    }
}

/// Returns the client of S3 with the variables that count for this origin.
///
/// For an origin without a table of the settings, its configuration says where the store is and how it is
/// asked, because the server that reads it later has another environment. Only credentials, and what only
/// writes need, come from variables here.
fn s3_of_environment(by: ConfiguredBy) -> AmazonS3Builder {
    use AmazonS3ConfigKey as K;
    let counts = |key: &K| match key {
        K::AccessKeyId
        | K::SecretAccessKey
        | K::Token
        | K::ImdsV1Fallback
        | K::MetadataEndpoint
        | K::ContainerCredentialsRelativeUri
        | K::ContainerCredentialsFullUri
        | K::ContainerAuthorizationTokenFile
        | K::WebIdentityTokenFile
        | K::RoleArn
        | K::RoleSessionName
        | K::StsEndpoint => true,
        // A key of the user's own would be needed for reads, too.
        K::Encryption(_) => by == ConfiguredBy::Environment && !key.as_ref().contains("customer_key"),
        K::Checksum | K::ConditionalPut | K::DisableTagging | K::UnsignedPayload => {
            by == ConfiguredBy::Environment
        }
        _ => false,
    };
    if by == ConfiguredBy::Settings {
        return AmazonS3Builder::from_env();
    }
    of_variables("AWS_").fold(AmazonS3Builder::new(), |builder, (name, value)| match name.parse::<K>() {
        Ok(key) if counts(&key) => builder.with_config(key, value),
        _ => builder,
    })
}

/// Returns the variables with a prefix that have a value, by their names in lower case.
fn of_variables(prefix: &str) -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(move |(name, value)| {
        let (name, value) = (name.into_string().ok()?, value.into_string().ok()?);
        let counts = name.starts_with(prefix) && !value.is_empty();
        counts.then(|| (name.to_ascii_lowercase(), value))
    })
}

/// Returns whether a bucket can be the first label of a host. One with a dot would fit no certificate.
fn is_host_label(bucket: &str) -> bool {
    let is_end = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let bytes = bucket.as_bytes();
    matches!((bytes.first(), bytes.last()), (Some(&first), Some(&last)) if is_end(first) && is_end(last))
        && bytes.len() <= 63
        && bytes.iter().all(|c| is_end(*c) || *c == b'-')
}

/// Returns an endpoint whose host begins with the bucket.
fn with_bucket(endpoint: &str, bucket: &str) -> String {
    match endpoint.split_once("://") {
        Some((_, host)) if host.starts_with(&format!("{bucket}.")) => endpoint.to_owned(),
        Some((scheme, host)) => format!("{scheme}://{bucket}.{host}"),
        None => endpoint.to_owned(),
    }
}

/// Returns Azure's client with the variables that its crate knows, and those of Azure's own command line.
///
/// Without a table of the settings, the configuration says where the store is, and no variable makes the
/// process run a program.
fn azure_of_environment(by: ConfiguredBy) -> MicrosoftAzureBuilder {
    let value = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
    let any = |names: &[&str]| names.iter().any(|name| value(name).is_some());
    let of_machine = |key: &AzureConfigKey| {
        use AzureConfigKey as K;
        matches!(key, K::MsiEndpoint | K::ObjectId | K::MsiResourceId)
    };
    let builder = match by {
        ConfiguredBy::Settings => MicrosoftAzureBuilder::from_env(),
        ConfiguredBy::Environment | ConfiguredBy::Given => {
            of_variables("AZURE_").fold(MicrosoftAzureBuilder::new(), |builder, (name, value)| {
                match name.parse() {
                    Ok(key) if azure_key(&name).is_some() || of_machine(&key) => {
                        builder.with_config(key, value)
                    }
                    _ => builder,
                }
            })
        }
    };
    let builder = match value("AZURE_STORAGE_ACCOUNT") {
        Some(account) if !any(&["AZURE_STORAGE_ACCOUNT_NAME"]) => builder.with_account(account),
        _ => builder,
    };
    match value("AZURE_STORAGE_KEY") {
        Some(key) if !any(&["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY"]) => {
            builder.with_access_key(key)
        }
        _ => builder,
    }
}

/// Returns the client of Google Cloud Storage with the variables that count for this origin.
fn gcs_of_environment(by: ConfiguredBy) -> GoogleCloudStorageBuilder {
    use GoogleConfigKey as K;
    let counts =
        |key: &K| matches!(key, K::ServiceAccount | K::ServiceAccountKey | K::ApplicationCredentials);
    match by {
        ConfiguredBy::Settings => GoogleCloudStorageBuilder::from_env(),
        ConfiguredBy::Environment | ConfiguredBy::Given => of_variables("GOOGLE_").fold(
            GoogleCloudStorageBuilder::new(),
            |builder, (name, value)| match name.parse::<K>() {
                Ok(key) if counts(&key) => builder.with_config(key, value),
                _ => builder,
            },
        ),
    }
}

/// Returns the setting of Azure's client that a key of credentials stands for. `None` if it is none.
pub(crate) fn azure_key(key: &str) -> Option<AzureConfigKey> {
    let known = key.parse().ok()?;
    let is_credential = matches!(
        known,
        AzureConfigKey::AccountName
            | AzureConfigKey::AccessKey
            | AzureConfigKey::SasKey
            | AzureConfigKey::Token
            | AzureConfigKey::ClientId
            | AzureConfigKey::ClientSecret
            | AzureConfigKey::AuthorityId
            | AzureConfigKey::AuthorityHost
            | AzureConfigKey::FederatedTokenFile
    );
    is_credential.then_some(known)
}

/// Returns the value of a Basic authorization header (RFC 7617).
fn basic(user: &str, password: &str) -> String {
    use base64::Engine as _;
    format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}")))
}
