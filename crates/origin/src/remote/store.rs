//! The clients of `object_store`, one kind for each scheme, made from an `[[origin]]` table and the
//! credentials as they are now.

use crate::credentials::{self, Profile, Source};
use crate::stats::Counters;
use crate::uri::Scheme;
use crate::wire::Connector;
use crate::{OriginConfig, OriginError};
use http::header::{AUTHORIZATION, HeaderValue};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::azure::{AzureConfigKey, MicrosoftAzure, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorage, GoogleCloudStorageBuilder};
use object_store::http::{HttpBuilder, HttpStore};
use object_store::list::PaginatedListStore;
use object_store::multipart::MultipartStore;
use object_store::{ClientOptions, ObjectStore, RetryConfig};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// One bucket, container or server.
pub(super) enum Store {
    S3(AmazonS3),
    Azure(MicrosoftAzure),
    Gcs(GoogleCloudStorage),
    Plain(HttpStore),
}

/// What a store is made of.
pub(super) struct Recipe<'a> {
    pub config: &'a OriginConfig,
    pub scheme: Scheme,
    pub host: &'a str,
    pub source: &'a Source,
    pub connect_timeout: Duration,
    pub counters: &'a Arc<Counters>,
}

impl Store {
    /// # Errors
    /// `Invalid`, without the library's words where these could repeat a secret.
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

    /// None for a plain server, which cannot be written to.
    pub fn uploads(&self) -> Option<&dyn MultipartStore> {
        match self {
            Store::S3(s) => Some(s),
            Store::Azure(s) => Some(s),
            Store::Gcs(s) => Some(s),
            Store::Plain(_) => None,
        }
    }

    /// None for a plain server, which has no listing.
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
        format!("[[origin]] {}", self.config.prefix)
    }

    fn failed(&self, error: &object_store::Error) -> OriginError {
        // A file's content can be in the words of a parser; a builder's words name keys only.
        let why = match self.source {
            Source::File { path, .. } => {
                format!("no client can be made with the credentials in {}", path.display())
            }
            _ => error.to_string(),
        };
        OriginError::invalid(self.what(), why)
    }

    fn options(&self) -> ClientOptions {
        ClientOptions::new()
            .with_allow_http(self.config.allow_http)
            .with_http1_only()
            .with_connect_timeout(self.connect_timeout)
            // Deadlines are ours: one for a call, and one for each wait inside it.
            .with_timeout_disabled()
    }

    /// Retries happen in one place, and that is not the library.
    fn no_retry() -> RetryConfig {
        RetryConfig { max_retries: 0, retry_timeout: Duration::ZERO, ..RetryConfig::default() }
    }

    fn connector(&self) -> Connector {
        Connector { counters: Arc::clone(self.counters), plain: None }
    }

    fn endpoint(&self) -> Option<&str> {
        self.config.endpoint.as_deref().map(|e| e.trim_end_matches('/'))
    }

    fn lacks(&self, path: &Path, what: &str) -> OriginError {
        OriginError::invalid(path.display(), format!("has no {what}"))
    }

    fn s3(&self) -> Result<AmazonS3, OriginError> {
        let builder = match self.source {
            Source::Env => AmazonS3Builder::from_env(),
            Source::Anonymous => AmazonS3Builder::new().with_skip_signature(true),
            Source::File { path, profile } => {
                let found = Profile::load(path, profile)?;
                let (Some(id), Some(secret)) =
                    (found.value(&["aws_access_key_id"]), found.value(&["aws_secret_access_key"]))
                else {
                    let what = format!("aws_access_key_id and aws_secret_access_key under [{profile}]");
                    return Err(self.lacks(path, &what));
                };
                let builder = AmazonS3Builder::new().with_access_key_id(id).with_secret_access_key(secret);
                match found.value(&["aws_session_token"]) {
                    Some(token) => builder.with_token(token),
                    None => builder,
                }
            }
        };
        let mut builder = builder
            .with_bucket_name(self.host)
            .with_client_options(self.options())
            .with_disable_bulk_delete(true)
            .with_retry(Self::no_retry())
            .with_http_connector(self.connector());
        if let Some(endpoint) = self.endpoint() {
            builder = builder.with_endpoint(endpoint);
        }
        if let Some(region) = &self.config.region {
            builder = builder.with_region(region);
        }
        builder.build().map_err(|e| self.failed(&e))
    }

    fn azure(&self) -> Result<MicrosoftAzure, OriginError> {
        let mut builder = match self.source {
            Source::Env => MicrosoftAzureBuilder::from_env(),
            Source::Anonymous => MicrosoftAzureBuilder::new().with_skip_signature(true),
            Source::File { path, profile } => {
                let mut builder = MicrosoftAzureBuilder::new();
                let mut any = false;
                for (key, value) in Profile::load(path, profile)?.iter() {
                    // Credentials only: where the store is, the configuration says.
                    if let Ok(
                        known @ (AzureConfigKey::AccountName
                        | AzureConfigKey::AccessKey
                        | AzureConfigKey::SasKey
                        | AzureConfigKey::Token
                        | AzureConfigKey::ClientId
                        | AzureConfigKey::ClientSecret
                        | AzureConfigKey::AuthorityId
                        | AzureConfigKey::AuthorityHost
                        | AzureConfigKey::FederatedTokenFile),
                    ) = key.parse()
                    {
                        any |= known != AzureConfigKey::AccountName;
                        builder = builder.with_config(known, value);
                    }
                }
                if !any {
                    return Err(self.lacks(
                        path,
                        "azure_storage_account_key, azure_storage_sas_token or other credentials",
                    ));
                }
                builder
            }
        };
        builder = builder
            .with_container_name(self.host)
            // The emulator mode takes its address from a variable; a configured endpoint wins.
            .with_use_emulator(false)
            .with_client_options(self.options())
            .with_retry(Self::no_retry())
            .with_http_connector(self.connector());
        if let Some(account) = &self.config.account {
            builder = builder.with_account(account);
        }
        if let Some(endpoint) = self.endpoint() {
            builder = builder.with_endpoint(endpoint.to_owned());
        }
        builder.build().map_err(|e| self.failed(&e))
    }

    fn gcs(&self) -> Result<GoogleCloudStorage, OriginError> {
        let builder = match self.source {
            Source::Env => GoogleCloudStorageBuilder::from_env(),
            Source::Anonymous => GoogleCloudStorageBuilder::new().with_skip_signature(true),
            Source::File { path, .. } => {
                // Read here, so that a file that cannot be read is told from one that is wrong.
                GoogleCloudStorageBuilder::new().with_service_account_key(credentials::text(path)?)
            }
        };
        let mut builder = builder
            .with_bucket_name(self.host)
            .with_client_options(self.options())
            .with_retry(Self::no_retry())
            .with_http_connector(self.connector());
        if let Some(endpoint) = self.endpoint() {
            builder = builder.with_base_url(endpoint);
        }
        builder.build().map_err(|e| self.failed(&e))
    }

    fn plain(&self) -> Result<HttpStore, OriginError> {
        let authorization = match self.source {
            Source::Env | Source::Anonymous => None,
            Source::File { path, profile } => {
                let found = Profile::load(path, profile)?;
                let text = match (found.value(&["token"]), found.value(&["user"]), found.value(&["password"]))
                {
                    (Some(token), _, _) => format!("Bearer {token}"),
                    (None, Some(user), Some(password)) => basic(user, password),
                    _ => return Err(self.lacks(path, "token, or user and password")),
                };
                let mut value = HeaderValue::from_str(&text)
                    .map_err(|_| self.lacks(path, "value that fits in a header"))?;
                value.set_sensitive(true);
                Some((AUTHORIZATION, value))
            }
        };
        let connector = Connector {
            counters: Arc::clone(self.counters),
            plain: Some((self.connect_timeout, authorization.into_iter().collect())),
        };
        HttpBuilder::new()
            .with_url(format!("{}://{}", self.scheme.as_str(), self.host))
            .with_client_options(self.options())
            .with_retry(Self::no_retry())
            .with_http_connector(connector)
            .build()
            .map_err(|e| self.failed(&e))
    }
}

/// The value of a Basic authorization header (RFC 7617).
fn basic(user: &str, password: &str) -> String {
    use base64::Engine as _;
    format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}")))
}
