//! The HTTP layer below `object_store`: counts requests, checks addresses, and turns answers into errors.
//!
//! `object_store` drops the `Retry-After` header, accepts some wrong answers, and quotes bodies in its
//! errors. So this layer checks each answer first, and passes on no error body.
//!
//! 1. No client follows a redirect, and none takes a proxy from the environment.
//! 2. A client of a store connects only to addresses that [`AddressRule`] allows.
//! 3. A client of credentials connects to any address: the metadata services of clouds have link-local ones.
//!    Only the environment of the process, which an administrator sets, names its servers. It is a client of
//!    its own, and no request for data goes through it.

mod answer;
pub(crate) mod credentials_client;
mod page;
mod rewrite;
mod times;

pub(crate) use answer::{Answered, BadAnswer};
pub(crate) use page::{CarriedPage, Page};
pub(crate) use rewrite::{PLACEHOLDER, Rewrite, Signer};

use crate::address::{AddressRule, CheckedResolver, SystemResolver};
use crate::stalls;
use crate::stats::Counters;
use answer::{Asked, ErrorCode, Region};
use http::header::{ACCEPT_ENCODING, DATE, ETAG, HeaderValue, LAST_MODIFIED, LOCATION, RETRY_AFTER};
use http::{HeaderMap, StatusCode};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The longest pause for which an origin may ask. A wrong clock or a hostile origin must not stop its reads.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(300);

/// The most bytes of an error body that are read.
const ERROR_BYTES_MAX: usize = 16 << 10;

/// The most bytes of a listing page that are read.
///
/// 1,000 keys of S3 need less than 2 MiB, 5,000 of Azure less than 10 MiB.
const PAGE_BYTES_MAX: usize = 16 << 20;

/// What every client of one origin has in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ClientSettings {
    pub connect_timeout: Duration,
    pub allow_http: bool,
    /// The URL of the proxy in the `[[origin]]`.
    pub proxy: Option<String>,
    /// Authorities that servers may have, besides those of the system: PEM text that was checked.
    pub authorities: Option<Arc<str>>,
}

impl ClientSettings {
    /// Returns a builder whose client follows no redirect and takes no proxy from the environment.
    fn builder(&self) -> object_store::Result<reqwest::ClientBuilder> {
        let pem = self.authorities.as_deref().unwrap_or_default();
        let authorities = reqwest::Certificate::from_pem_bundle(pem.as_bytes()).map_err(unusable)?;
        let builder = reqwest::Client::builder()
            .tls_certs_merge(authorities)
            .dns_resolver(Arc::new(SystemResolver))
            .user_agent(concat!("fletch/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            // Decoded bytes would not be the stored ones.
            .no_gzip()
            .no_brotli()
            .no_zstd()
            .no_deflate()
            .connect_timeout(self.connect_timeout)
            .http1_only();
        Ok(builder)
    }

    /// Returns a client that asks a service of logins. It uses HTTPS, except on this machine.
    pub fn login_client(&self, url: &url::Url) -> Result<reqwest::Client, String> {
        let is_near = match url.host() {
            Some(url::Host::Domain(name)) => name == "localhost",
            Some(url::Host::Ipv4(v4)) => v4.is_loopback(),
            Some(url::Host::Ipv6(v6)) => v6.is_loopback(),
            None => false,
        };
        if url.scheme() != "https" && !is_near {
            return Err(
                "the service must have an https:// URL: a token must not travel unencrypted".to_owned()
            );
        }
        let cannot = |_| "cannot make an HTTP client".to_owned();
        let mut builder = self.builder().map_err(|_| "cannot make an HTTP client".to_owned())?;
        builder = builder.https_only(!is_near);
        if let Some(proxy) = &self.proxy {
            builder = builder.proxy(reqwest::Proxy::https(proxy.as_str()).map_err(cannot)?);
        }
        builder.build().map_err(cannot)
    }
}

/// Warns once if the environment names a proxy, which no client of an origin uses.
///
/// A proxy resolves names by itself, so the check of addresses would be void without anybody's intent.
pub(crate) fn warn_of_ignored_proxy() {
    static WARNED: std::sync::Once = std::sync::Once::new();
    let names = ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];
    if let Some(variable) = names.into_iter().find(|n| std::env::var_os(n).is_some_and(|v| !v.is_empty())) {
        WARNED.call_once(|| {
            tracing::warn!(
                variable,
                "origins are read without the proxy of the environment; give it as `proxy` in [[origin]]"
            );
        });
    }
}

fn unusable(error: reqwest::Error) -> object_store::Error {
    object_store::Error::Generic { store: "HTTP", source: Box::new(error) }
}

/// Makes the HTTP clients of one origin's data.
#[derive(Debug)]
pub(crate) struct Connector {
    pub counters: Arc<Counters>,
    pub settings: ClientSettings,
    pub rule: AddressRule,
    /// For a plain server: the headers of every request.
    pub plain: Option<HeaderMap>,
    /// Signs requests that are rewritten here.
    pub signer: Option<Signer>,
    /// The content codings to ask for, so that the answer has the stored bytes.
    pub codings: &'static str,
}

#[derive(Debug)]
struct CheckedService {
    client: HttpClient,
    counters: Arc<Counters>,
    rule: AddressRule,
    plain: bool,
    signer: Option<Signer>,
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let resolver = CheckedResolver { inner: Arc::new(SystemResolver), rule: self.rule };
        let mut builder =
            self.settings.builder()?.https_only(!self.settings.allow_http).dns_resolver(Arc::new(resolver));
        if let Some(proxy) = &self.settings.proxy {
            builder = builder.proxy(reqwest::Proxy::all(proxy.as_str()).map_err(unusable)?);
        }
        let mut headers = self.plain.clone().unwrap_or_default();
        // A plain server may compress what it sends. The stored bytes are wanted. Signatures do not cover
        // this header.
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static(self.codings));
        builder = builder.default_headers(headers);
        Ok(HttpClient::new(CheckedService {
            client: HttpClient::new(builder.build().map_err(unusable)?),
            counters: Arc::clone(&self.counters),
            rule: self.rule,
            plain: self.plain.is_some(),
            signer: self.signer.clone(),
        }))
    }
}

/// `Unknown` is a kind that `object_store` never retries by itself.
fn refused(error: impl std::error::Error + Send + Sync + 'static) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, error)
}

#[async_trait::async_trait]
impl HttpService for CheckedService {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        self.counters.store_request();
        let request = match request.extensions().get::<Rewrite>().cloned() {
            None => request,
            Some(rewrite) => {
                let rewritten = rewrite::rewrite(request, &rewrite, self.signer.as_ref()).await;
                rewritten.map_err(|e| HttpError::new_boxed(HttpErrorKind::Unknown, e))?
            }
        };
        // The HTTP client parses the URL in the same way, so it connects to the host that is checked here.
        let url = request.uri().to_string().parse::<url::Url>().map_err(refused)?;
        self.rule.check_host(&url).map_err(refused)?;
        let asked = Asked::of(request.method(), request.uri().query(), request.headers(), self.plain);
        let path = request.uri().path().to_owned();
        let (mut parts, body) = self.client.execute(request).await?.into_parts();
        stalls::heard();
        let date = parts.headers.get(DATE).and_then(|v| v.to_str().ok());
        if let Some(date) = date.and_then(|text| httpdate::parse_http_date(text).ok()) {
            self.counters.dated(date, SystemTime::now());
        }
        let answered = asked.check(parts.status, &mut parts.headers).map_err(refused)?;
        let status = answered.status;
        let bad = match parts.status {
            StatusCode::NOT_MODIFIED => return Ok(HttpResponse::from_parts(parts, Vec::new().into())),
            s if s.is_redirection() => {
                let to = parts.headers.get(LOCATION).and_then(|v| v.to_str().ok()).unwrap_or_default();
                if self.plain && to.strip_suffix('/').is_some_and(|to| to.ends_with(&path)) {
                    // The page of a directory is no object, as in a store.
                    parts.status = StatusCode::NOT_FOUND;
                    return Ok(HttpResponse::from_parts(parts, Vec::new().into()));
                }
                let (code, is_plain) = (code(body).await, self.plain);
                match Region::of(&parts.headers) {
                    Some(region) => BadAnswer::OtherRegion { status, code, region },
                    None => BadAnswer::Redirected { answered, code, is_plain },
                }
            }
            s if s.is_client_error() || s.is_server_error() => {
                match failure(&asked, &parts, body, self.plain).await {
                    Some(bad) => bad,
                    // `object_store` has a variant for each of these, by the status alone.
                    None => return Ok(HttpResponse::from_parts(parts, Vec::new().into())),
                }
            }
            _ if asked.is_listing => return listing(parts, body, asked.is_azure_listing).await,
            _ => {
                readable(&mut parts.headers);
                parts.extensions.insert(answered);
                return Ok(HttpResponse::from_parts(parts, body));
            }
        };
        Err(refused(bad))
    }
}

type Body = object_store::client::HttpResponseBody;

/// Gives the time and the entity tag of an answer the forms that `object_store` requires.
///
/// A missing time becomes 1970, and a missing tag an empty one: both mean none.
fn readable(headers: &mut HeaderMap) {
    let text = |headers: &HeaderMap, name| headers.get(name).and_then(|v| v.to_str().ok().map(str::to_owned));
    let time = text(headers, LAST_MODIFIED).unwrap_or_default();
    if httpdate::parse_http_date(&time).is_err() {
        let at = times::parse(&time).unwrap_or(SystemTime::UNIX_EPOCH);
        if let Ok(value) = HeaderValue::try_from(httpdate::fmt_http_date(at)) {
            headers.insert(LAST_MODIFIED, value);
        }
    }
    if text(headers, ETAG).is_none() {
        headers.insert(ETAG, HeaderValue::from_static(""));
    }
}

/// Reads and parses a listing page. `object_store` gets a page without keys.
async fn listing(
    mut parts: http::response::Parts,
    body: Body,
    is_azure: bool,
) -> Result<HttpResponse, HttpError> {
    let body = match Limited::new(body, PAGE_BYTES_MAX).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => return Err(refused(BadAnswer::TooLong)),
        Err(error) => return Err(HttpError::new_boxed(HttpErrorKind::Unknown, error)),
    };
    let page = page::parse(&body).ok_or_else(|| refused(BadAnswer::NoListing))?;
    parts.extensions.insert(CarriedPage::new(page));
    Ok(HttpResponse::from_parts(parts, page::stand_in(is_azure).to_owned().into()))
}

/// Returns the known error code in an error body, and nothing else of the body.
///
/// Some servers put keys and signed strings into it, and a request that was led astray answers with anything.
async fn code(body: Body) -> ErrorCode {
    // A body that cannot be read does not hide the error that it belongs to.
    let body = Limited::new(body, ERROR_BYTES_MAX).collect().await;
    body.map(|b| ErrorCode::in_document(&b.to_bytes())).unwrap_or_default()
}

/// Returns the error of an answer with a status of 400 or more. `None` if `object_store` knows the status.
///
/// The code decides before the status: stores and gateways send the same code with other statuses.
async fn failure(
    asked: &Asked,
    parts: &http::response::Parts,
    body: Body,
    is_plain: bool,
) -> Option<BadAnswer> {
    let status = parts.status.as_u16();
    let code = if is_plain && status == 404 { ErrorCode::default() } else { code(body).await };
    Some(match status {
        _ if code.is_slow_down() || matches!(status, 429 | 503) => {
            let asked = parts.headers.get(RETRY_AFTER).and_then(|v| v.to_str().ok());
            BadAnswer::SlowDown { retry_after: asked.and_then(|v| retry_after(v, SystemTime::now())) }
        }
        _ if code.is_expired() => BadAnswer::Expired { status, code },
        // 499: a gateway says that the client went away, which it did not.
        _ if code.is_passing() || matches!(status, 408 | 499) => BadAnswer::Failed { status, code },
        401 | 403 | 407 => BadAnswer::Denied { status, code },
        // The answer of a HEAD has no code. A store sends 400 for an expired token.
        400 if asked.is_head() && !is_plain => BadAnswer::Denied { status, code },
        404 if code.is_missing_bucket() => BadAnswer::NoBucket { status, code },
        // The request has no range: the answer is for another request, or of a replica that is behind.
        416 if asked.is_read() => BadAnswer::Failed { status, code },
        // Azure answers a read of an archived blob with 409.
        404 | 412 => return None,
        409 if !asked.is_read() => return None,
        // A retry would not help: the server does not know the method.
        501 => refusal(parts, code),
        500.. => BadAnswer::Failed { status, code },
        _ => refusal(parts, code),
    })
}

/// Returns the error of a request that the store rejects. S3 rejects a signature for another region in this
/// way, and names the region.
fn refusal(parts: &http::response::Parts, code: ErrorCode) -> BadAnswer {
    let status = parts.status.as_u16();
    match Region::of(&parts.headers) {
        Some(region) if code.is_wrong_region() => BadAnswer::OtherRegion { status, code, region },
        _ => BadAnswer::Refused { status, code },
    }
}

/// Parses the value of `Retry-After`: seconds, or an HTTP date. Returns at most [`RETRY_AFTER_MAX`].
fn retry_after(text: &str, now: SystemTime) -> Option<Duration> {
    let asked = match text.trim().parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => httpdate::parse_http_date(text).ok().map(|at| at.duration_since(now).unwrap_or_default()),
    };
    asked.map(|asked| asked.min(RETRY_AFTER_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_without_time_or_tag_is_readable() {
        let mut headers = HeaderMap::new();
        readable(&mut headers);
        assert_eq!(headers[LAST_MODIFIED], "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(headers[ETAG], "");
        let form = |value: &'static str| HeaderValue::from_static(value);
        headers.insert(LAST_MODIFIED, form("2024-11-05 10:00:00"));
        headers.insert(ETAG, form("W/\"x\""));
        readable(&mut headers);
        assert_eq!(headers[LAST_MODIFIED], "Tue, 05 Nov 2024 10:00:00 GMT");
        assert_eq!(headers[ETAG], "W/\"x\"");
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        assert_eq!(retry_after("7", now), Some(Duration::from_secs(7)));
        assert_eq!(retry_after("Sun, 06 Nov 1994 08:49:47 GMT", now), Some(Duration::from_secs(10)));
        assert_eq!(retry_after("Sun, 06 Nov 1994 08:49:27 GMT", now), Some(Duration::ZERO));
        assert_eq!(retry_after("soon", now), None);
        // Found by the fuzzer: the end of such a pause is no time that a clock can show.
        for long in ["9223372036854775808", "18446744073709551615", "Fri, 31 Dec 9999 23:59:59 GMT"] {
            assert_eq!(retry_after(long, now), Some(RETRY_AFTER_MAX), "{long}");
        }
    }
}
