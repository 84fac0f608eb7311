//! The HTTP layer below `object_store`: counts requests, limits error bodies, and turns statuses into errors.
//!
//! `object_store` drops the `Retry-After` header and accepts some wrong answers, so this layer checks each
//! answer first.

use crate::stats::Counters;
use http::header::{CONTENT_RANGE, LOCATION, RANGE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, StatusCode};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The most bytes of an error body that are read.
const ERROR_BYTES_MAX: usize = 16 << 10;

/// The most bytes of a listing page that are read.
///
/// 1,000 keys of S3 need less than 2 MiB, 5,000 of Azure less than 10 MiB.
const PAGE_BYTES_MAX: usize = 16 << 20;

/// An answer that does not fit the request. Travels as the source of an `HttpError`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadAnswer {
    #[error("the origin asks clients to slow down")]
    SlowDown { retry_after: Option<Duration> },
    #[error("status {status} {code}")]
    Failed { status: u16, code: String },
    #[error("status {status} {code}")]
    Denied { status: u16, code: String },
    #[error("the server rejected the request with status {status} {code}")]
    Refused { status: u16, code: String },
    #[error("the range begins after the end of the object")]
    PastEnd,
    #[error("the server sent the whole object for a range")]
    RangeIgnored,
    #[error(
        "the server redirects to another URL, and redirects are not followed; use the other URL as origin"
    )]
    Redirected,
    #[error("a page of a listing is longer than 16 MiB")]
    TooLong,
}

/// Makes HTTP clients that count requests and check answers.
#[derive(Debug)]
pub(crate) struct Connector {
    pub counters: Arc<Counters>,
    /// For a plain server: the connect timeout, and the headers of every request.
    pub plain: Option<(Duration, HeaderMap)>,
}

#[derive(Debug)]
struct CheckedService {
    client: HttpClient,
    counters: Arc<Counters>,
    plain: bool,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = match &self.plain {
            None => ReqwestConnector::default().connect(options)?,
            Some((connect_timeout, headers)) => {
                // No redirects: neither to a host that is not configured, nor from a file to the page of a
                // directory.
                let client = reqwest::Client::builder()
                    .redirect(reqwest::redirect::Policy::none())
                    .connect_timeout(*connect_timeout)
                    .default_headers(headers.clone())
                    .http1_only()
                    .build();
                let client = client
                    .map_err(|e| object_store::Error::Generic { store: "HTTP", source: Box::new(e) })?;
                HttpClient::new(client)
            }
        };
        Ok(HttpClient::new(CheckedService {
            client,
            counters: Arc::clone(&self.counters),
            plain: self.plain.is_some(),
        }))
    }
}

#[async_trait::async_trait]
impl HttpService for CheckedService {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        self.counters.request();
        let range = request.headers().get(RANGE).cloned();
        let ranged = range.is_some();
        let page_of = |q| matches!(q, "list-type=2" | "comp=list");
        let listing = request.uri().query().is_some_and(|query| query.split('&').any(page_of));
        let path = request.uri().path().to_owned();
        let response = self.client.execute(request).await?;
        let status = response.status();
        let answer = match status {
            StatusCode::OK if ranged => BadAnswer::RangeIgnored,
            StatusCode::RANGE_NOT_SATISFIABLE => BadAnswer::PastEnd,
            // Some servers send an empty body for a range that begins at the end, instead of 416.
            StatusCode::PARTIAL_CONTENT if past_end(range.as_ref(), response.headers()) => BadAnswer::PastEnd,
            s if s.is_redirection() && self.plain && s != StatusCode::NOT_MODIFIED => {
                let to = response.headers().get(LOCATION).and_then(|v| v.to_str().ok()).unwrap_or_default();
                if to.strip_suffix('/').is_some_and(|to| to.ends_with(&path)) {
                    // The page of a directory is no object, as in a store.
                    let (mut parts, _) = response.into_parts();
                    parts.status = StatusCode::NOT_FOUND;
                    return Ok(HttpResponse::from_parts(parts, Vec::new().into()));
                }
                BadAnswer::Redirected
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                let asked = response.headers().get(RETRY_AFTER).and_then(|v| v.to_str().ok());
                BadAnswer::SlowDown { retry_after: asked.and_then(|v| retry_after(v, SystemTime::now())) }
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                BadAnswer::Denied { status: status.as_u16(), code: code(response).await }
            }
            StatusCode::REQUEST_TIMEOUT => BadAnswer::Failed { status: 408, code: code(response).await },
            // `object_store` has a variant for each of these; only the body is bounded.
            StatusCode::NOT_FOUND | StatusCode::CONFLICT | StatusCode::PRECONDITION_FAILED => {
                let (parts, body) = response.into_parts();
                let body = bounded(body).await;
                return Ok(HttpResponse::from_parts(parts, body.into()));
            }
            // A retry would not help: the server does not know the method.
            StatusCode::NOT_IMPLEMENTED => BadAnswer::Refused { status: 501, code: code(response).await },
            s if s.is_server_error() => BadAnswer::Failed { status: s.as_u16(), code: code(response).await },
            s if s.is_client_error() => BadAnswer::Refused { status: s.as_u16(), code: code(response).await },
            _ if listing => return page(response).await,
            _ => return Ok(response),
        };
        // `Unknown` is a kind that `object_store` never retries by itself.
        Err(HttpError::new(HttpErrorKind::Unknown, answer))
    }
}

/// Reads a listing page here, because `object_store` would read a page of any length.
async fn page(response: HttpResponse) -> Result<HttpResponse, HttpError> {
    let (parts, body) = response.into_parts();
    match Limited::new(body, PAGE_BYTES_MAX).collect().await {
        Ok(body) => Ok(HttpResponse::from_parts(parts, body.to_bytes().into())),
        Err(error) if error.is::<LengthLimitError>() => {
            Err(HttpError::new(HttpErrorKind::Unknown, BadAnswer::TooLong))
        }
        Err(error) => Err(HttpError::new_boxed(HttpErrorKind::Unknown, error)),
    }
}

async fn bounded(body: object_store::client::HttpResponseBody) -> Vec<u8> {
    // A body that cannot be read does not hide the error that it belongs to.
    Limited::new(body, ERROR_BYTES_MAX).collect().await.map(|b| b.to_bytes().to_vec()).unwrap_or_default()
}

/// Returns the word in `<Code>` of an error of S3, Azure or GCS, or an empty text.
///
/// Keeps nothing else of the body, because some servers put keys and signed strings into it.
async fn code(response: HttpResponse) -> String {
    let body = bounded(response.into_body()).await;
    let text = String::from_utf8_lossy(&body);
    let word =
        text.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>")).map(|(word, _)| word);
    word.filter(|w| w.len() <= 64 && w.bytes().all(|b| b.is_ascii_alphanumeric()))
        .unwrap_or_default()
        .to_owned()
}

/// Returns whether the requested range begins at or after the end of the object that the answer describes.
fn past_end(asked: Option<&HeaderValue>, answer: &HeaderMap) -> bool {
    let number = |text: Option<&str>| text.and_then(|t| t.parse::<u64>().ok());
    let start = asked.and_then(|v| v.to_str().ok()?.strip_prefix("bytes=")?.split_once('-'));
    let size = answer.get(CONTENT_RANGE).and_then(|v| v.to_str().ok()?.rsplit_once('/'));
    match (number(start.map(|s| s.0)), number(size.map(|s| s.1))) {
        (Some(start), Some(size)) => start >= size,
        _ => false,
    }
}

/// Parses the value of `Retry-After`: seconds, or an HTTP date.
fn retry_after(text: &str, now: SystemTime) -> Option<Duration> {
    match text.trim().parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => httpdate::parse_http_date(text).ok().map(|at| at.duration_since(now).unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        assert_eq!(retry_after("7", now), Some(Duration::from_secs(7)));
        assert_eq!(retry_after("Sun, 06 Nov 1994 08:49:47 GMT", now), Some(Duration::from_secs(10)));
        assert_eq!(retry_after("Sun, 06 Nov 1994 08:49:27 GMT", now), Some(Duration::ZERO));
        assert_eq!(retry_after("soon", now), None);
    }
}
