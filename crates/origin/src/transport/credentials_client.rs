//! The HTTP client that fetches credentials, and the errors of that.
//!
//! It asks instance metadata, pod identity and token services. Their addresses are link-local in most
//! clouds, so no address is refused here. `object_store` makes the requests: to the clouds' own addresses, or
//! to those that the environment of the process names.
//!
//! 1. Data never comes through this client: [`Named`] hands out credentials and nothing else.
//! 2. No text of an answer reaches an error.

use super::{ClientSettings, refused, unusable};
use http::{Method, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions, CredentialProvider, Error};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// The most bytes of an answer with credentials.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// The longest time to connect. A machine without a metadata service must not wait long for it.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(2);

/// Makes the HTTP clients that fetch credentials.
#[derive(Debug)]
pub(crate) struct CredentialsConnector(pub ClientSettings);

#[derive(Debug)]
struct CredentialsService(HttpClient);

impl HttpConnector for CredentialsConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let settings = ClientSettings {
            connect_timeout: self.0.connect_timeout.min(CONNECT_TIMEOUT_MAX),
            ..self.0.clone()
        };
        // `object_store` allows HTTP for metadata services and forbids it for token services.
        let allow_http = options.get_config_value(&ClientConfigKey::AllowHttp).as_deref() == Some("true");
        let mut builder = settings.builder()?.https_only(!allow_http);
        if let Some(proxy) = &settings.proxy {
            // Token services are asked through the proxy. Metadata services use HTTP and are this machine's.
            builder = builder.proxy(reqwest::Proxy::https(proxy.as_str()).map_err(unusable)?);
        }
        Ok(HttpClient::new(CredentialsService(HttpClient::new(builder.build().map_err(unusable)?))))
    }
}

#[async_trait::async_trait]
impl HttpService for CredentialsService {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let is_put = request.method() == Method::PUT;
        let path = request.uri().path();
        // `object_store` puts these answers into the next request as they are, and panics if they do not fit.
        let is_word = path.ends_with("/latest/api/token") || path.ends_with("/iam/security-credentials/");
        let (parts, body) = self.0.execute(request).await?.into_parts();
        match parts.status {
            // `object_store` takes it as the answer of an older instance metadata service.
            StatusCode::FORBIDDEN if is_put => Ok(HttpResponse::from_parts(parts, Vec::new().into())),
            s if s.is_success() => {
                let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
                let body = body.map_err(|e| HttpError::new_boxed(HttpErrorKind::Unknown, e))?;
                let body = body.to_bytes();
                if is_word {
                    let word = body.trim_ascii();
                    if word.is_empty() || !word.iter().all(|c| is_of_word(*c)) {
                        return Err(HttpError::new(HttpErrorKind::Decode, NoWord));
                    }
                    return Ok(HttpResponse::from_parts(parts, word.to_vec().into()));
                }
                Ok(HttpResponse::from_parts(parts, body.into()))
            }
            s => Err(refused(RejectedStatus(s.as_u16()))),
        }
    }
}

/// Returns whether a token of a session, or the name of a role, can have a character.
fn is_of_word(c: u8) -> bool {
    c.is_ascii_alphanumeric() || b"+=,.@-_/~".contains(&c)
}

/// An answer that is no token of a session and no name of a role.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("no token and no name of a role")]
struct NoWord;

/// The status by which a credential service rejected a request.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the credential service answered with status {0}")]
struct RejectedStatus(u16);

/// Why no credentials could be had. Travels as the source of an `object_store::Error`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub(crate) struct NoCredentials {
    pub why: String,
    /// Whether the same request may succeed a moment later.
    pub transient: bool,
}

/// A provider of credentials whose errors say that they are about credentials, and quote no answer.
#[derive(Debug)]
pub(crate) struct Named<C> {
    inner: Arc<dyn CredentialProvider<Credential = C>>,
    /// Where there are none, if the machine's identity is what is left to ask.
    looked_at: Option<String>,
    /// Whether there were credentials before.
    had: AtomicBool,
}

impl<C> Named<C> {
    /// Names the errors of a provider. `looked_at` lists the places that have no credentials, if the provider
    /// asks for the machine's identity: most machines have none, and then that is the answer.
    pub fn new(inner: Arc<dyn CredentialProvider<Credential = C>>, looked_at: Option<String>) -> Self {
        Named { inner, looked_at, had: AtomicBool::new(false) }
    }
}

#[async_trait::async_trait]
impl<C: std::fmt::Debug + Send + Sync + 'static> CredentialProvider for Named<C> {
    type Credential = C;

    async fn get_credential(&self) -> object_store::Result<Arc<C>> {
        let got = self.inner.get_credential().await;
        if got.is_ok() {
            self.had.store(true, Relaxed);
        }
        got.map_err(|error| {
            let mut error = no_credentials(&error);
            if let (Some(looked_at), false) = (&self.looked_at, self.had.load(Relaxed)) {
                error = not_found(looked_at, error);
            }
            Error::Generic { store: "credentials", source: Box::new(error) }
        })
    }
}

/// Returns the error of a machine that has no credentials at all, as far as anybody can see.
fn not_found(looked_at: &str, of_machine: NoCredentials) -> NoCredentials {
    let NoCredentials { why, transient } = of_machine;
    let why =
        if why == OTHER_FORM { "the credential service's answer has no credentials".to_owned() } else { why };
    // A service that is busy exists.
    let transient = transient && why.contains("with status");
    NoCredentials { why: format!("{looked_at}, this machine's identity: {why})"), transient }
}

/// The answer of something that is no credential service, or of one that Fletch does not know.
const OTHER_FORM: &str = "the answer of the credential service has another form than expected";

fn no_credentials(error: &Error) -> NoCredentials {
    let fixed = |why: &str| NoCredentials { why: why.to_owned(), transient: false };
    let mut deepest = String::new();
    let (mut asked, mut decoding) = (false, false);
    for cause in std::iter::successors(std::error::Error::source(error), |e| e.source()) {
        if let Some(RejectedStatus(status)) = cause.downcast_ref() {
            let transient = *status >= 500 || matches!(status, 408 | 429);
            return NoCredentials { why: RejectedStatus(*status).to_string(), transient };
        }
        if let Some(http) = cause.downcast_ref::<HttpError>() {
            asked = true;
            decoding = http.kind() == HttpErrorKind::Decode;
        }
        if let (Some(io), false) = (cause.downcast_ref::<std::io::Error>(), asked) {
            return fixed(&format!("a file with credentials cannot be read: {io}"));
        }
        deepest = cause.to_string();
    }
    if asked && !decoding {
        let why = format!("the credential service does not answer: {deepest}");
        return NoCredentials { why, transient: true };
    }
    // The text of `object_store` about a file, which has no byte of an answer.
    if !asked && deepest.starts_with("Failed to read token file") {
        return fixed(&deepest);
    }
    fixed(OTHER_FORM)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> NoCredentials {
        no_credentials(&Error::Generic { store: "S3", source: source.into() })
    }

    #[test]
    fn errors_name_the_cause_and_quote_no_answer() {
        let status = |status| why(HttpError::new(HttpErrorKind::Unknown, RejectedStatus(status)));
        assert_eq!((status(404).transient, status(503).transient), (false, true));
        assert!(status(404).why.ends_with("status 404"));
        let text = serde_json_error();
        assert!(text.to_string().contains("hunter2"), "{text}");
        let decoded = why(HttpError::new(HttpErrorKind::Decode, text));
        assert!(!decoded.why.contains("hunter2") && !decoded.transient, "{decoded}");
        let parsed = why("Invalid AssumeRoleWithWebIdentity response: hunter2");
        assert!(!parsed.why.contains("hunter2"), "{parsed}");
        let io = || std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let away = why(HttpError::new(HttpErrorKind::Connect, io()));
        assert!(away.transient && away.why.contains("does not answer"), "{away}");
        assert!(why(io()).why.contains("a file with credentials cannot be read"));
        assert!(why("Failed to read token file '/run/t': gone").why.contains("/run/t"));
    }

    /// An error of a parser that quotes what it parsed.
    fn serde_json_error() -> std::io::Error {
        std::io::Error::other("invalid type: string \"hunter2\", expected a map")
    }
}
