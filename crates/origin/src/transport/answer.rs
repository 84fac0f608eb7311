//! Judges the answers of stores and servers by their status and headers.
//!
//! `object_store` accepts some wrong answers and quotes others, so every answer passes here first.
//!
//! 1. No text here repeats a body or a header: only numbers, known content codings, known error codes, and
//!    words of the form of a region.
//! 2. An answer that does not fit its request is [`BadAnswer::Unexpected`], which says what came and what was
//!    expected. It never counts as a changed object.

use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, IF_MATCH, RANGE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use std::fmt;
use std::ops::Range;
use std::time::Duration;

/// An answer that does not fit the request. Travels as the source of an `HttpError`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadAnswer {
    #[error("the origin asks clients to slow down")]
    SlowDown { retry_after: Option<Duration> },
    #[error("status {status}{code}")]
    Failed { status: u16, code: ErrorCode },
    #[error("status {status}{code}")]
    Denied { status: u16, code: ErrorCode },
    #[error("the server rejected the request with status {status}{code}")]
    Refused { status: u16, code: ErrorCode },
    /// The range begins after the end of the object, whose size the answer may give.
    #[error("the range begins after the end of the object")]
    PastEnd { size: Option<u64> },
    #[error("{0}; expected status 206 with the requested range")]
    RangeIgnored(Answered),
    #[error(
        "{answered}{code}; Fletch follows no redirects: set the store's own URL or region for this origin"
    )]
    Redirected { answered: Answered, code: ErrorCode },
    #[error(
        "status {status}{code}; the bucket is in region {region}: set AWS_REGION, or `region` \
         in the settings of this origin"
    )]
    OtherRegion { status: u16, code: ErrorCode, region: Region },
    #[error("status {status}{code}")]
    NoBucket { status: u16, code: ErrorCode },
    #[error("{answered}; expected {expected}")]
    Unexpected { answered: Answered, expected: String },
    #[error("a page of a listing is longer than 16 MiB")]
    TooLong,
}

/// What an answer says about itself: its status, its content coding and its length.
///
/// Travels in the extensions of an accepted answer, for errors that only its body or its pin shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Answered {
    pub status: u16,
    /// A known name, `an unknown coding`, or `None` for the stored bytes.
    pub coding: Option<&'static str>,
    pub length: Option<u64>,
    /// The bytes that `Content-Range` names.
    pub range: Option<(u64, u64)>,
    /// Whether `Content-Range` has `*` in place of the object's size.
    pub is_size_unknown: bool,
}

impl fmt::Display for Answered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "status {}", self.status)?;
        if let Some(coding) = self.coding {
            write!(f, ", Content-Encoding {coding}")?;
        }
        if let Some((first, last)) = self.range {
            write!(f, ", Content-Range {first}-{last}")?;
        }
        match self.length {
            Some(length) => write!(f, ", Content-Length {length}"),
            None => write!(f, ", no Content-Length"),
        }
    }
}

/// The content codings that an error names. A server may put any text into the header.
const CODINGS: [&str; 10] =
    ["aws-chunked", "br", "compress", "dcb", "deflate", "exi", "gzip", "pack200-gzip", "x-gzip", "zstd"];

impl Answered {
    pub fn of(status: StatusCode, headers: &HeaderMap) -> Self {
        let text = |name| headers.get(name).and_then(|v: &HeaderValue| v.to_str().ok());
        let coding = match text(CONTENT_ENCODING).map(|t| t.trim().to_ascii_lowercase()) {
            None if headers.contains_key(CONTENT_ENCODING) => Some("an unknown coding"),
            None => None,
            Some(t) if t.is_empty() || t == "identity" => None,
            Some(t) => Some(CODINGS.into_iter().find(|c| *c == t).unwrap_or("an unknown coding")),
        };
        let range = headers.get(CONTENT_RANGE).and_then(ContentRange::parse);
        Answered {
            status: status.as_u16(),
            coding,
            length: text(CONTENT_LENGTH).and_then(|t| t.trim().parse().ok()),
            range: range.map(|r| (r.first, r.last)),
            is_size_unknown: range.is_some_and(|r| r.size.is_none()),
        }
    }

    pub fn expected(self, expected: impl Into<String>) -> BadAnswer {
        BadAnswer::Unexpected { answered: self, expected: expected.into() }
    }
}

/// The value of `Content-Range`: `bytes FIRST-LAST/SIZE`, or `*` as the size (RFC 9110, 14.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ContentRange {
    first: u64,
    last: u64,
    size: Option<u64>,
}

impl ContentRange {
    fn parse(value: &HeaderValue) -> Option<Self> {
        let (unit, rest) = value.to_str().ok()?.trim().split_once(' ')?;
        let (range, size) = rest.trim().split_once('/')?;
        let (first, last) = range.split_once('-')?;
        let (first, last) = (number(first)?, number(last)?);
        let size = if size == "*" { None } else { Some(number(size)?) };
        let sane = unit.eq_ignore_ascii_case("bytes") && first <= last && last < u64::MAX;
        (sane && size.is_none_or(|size| last < size)).then_some(ContentRange { first, last, size })
    }
}

/// Parses digits only: `str::parse` accepts a sign, too.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

/// Returns the size in `Content-Range: bytes */SIZE`, or in any other form of the header.
fn size_of(headers: &HeaderMap) -> Option<u64> {
    number(headers.get(CONTENT_RANGE)?.to_str().ok()?.rsplit_once('/')?.1)
}

/// The request, as far as its answer is judged by it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Asked {
    method: Method,
    /// The requested range of a `GET`.
    range: Option<Range<u64>>,
    /// Whether the request is for a page of a listing.
    pub is_listing: bool,
    /// Whether the request may be answered with 412.
    has_condition: bool,
    /// Whether the server is a plain HTTP server.
    is_plain: bool,
}

impl Asked {
    pub fn of(method: &Method, query: Option<&str>, headers: &HeaderMap, is_plain: bool) -> Self {
        let page_of = |q| matches!(q, "list-type=2" | "comp=list");
        let range = headers.get(RANGE).and_then(|v| {
            let (first, last) = v.to_str().ok()?.strip_prefix("bytes=")?.split_once('-')?;
            Some(number(first)?..number(last)?.checked_add(1)?)
        });
        Asked {
            method: method.clone(),
            range: range.filter(|_| method == Method::GET),
            is_listing: query.is_some_and(|query| query.split('&').any(page_of)),
            has_condition: headers.contains_key(IF_MATCH),
            is_plain,
        }
    }

    /// Whether the request reads an object or a listing.
    pub fn is_read(&self) -> bool {
        matches!(self.method, Method::GET | Method::HEAD)
    }

    /// Judges a success or a status that a read never gets. Changes headers that `object_store` cannot read.
    ///
    /// Other statuses depend on the body, and are judged where the body is read.
    pub fn check(&self, status: StatusCode, headers: &mut HeaderMap) -> Result<Answered, BadAnswer> {
        let answered = Answered::of(status, headers);
        if !self.is_read() {
            return Ok(answered);
        }
        if status == StatusCode::PRECONDITION_FAILED && !self.has_condition {
            return Err(answered.expected("the object: the request has no condition"));
        }
        if status == StatusCode::NOT_MODIFIED {
            return Err(answered.expected("the object: the request has no such condition"));
        }
        if status == StatusCode::RANGE_NOT_SATISFIABLE && self.range.is_some() {
            return Err(BadAnswer::PastEnd { size: size_of(headers) });
        }
        if !status.is_success() {
            return Ok(answered);
        }
        if answered.coding.is_some() && (self.is_plain || self.is_listing) {
            return Err(answered.expected("the stored bytes"));
        }
        match (&self.range, status) {
            (None, StatusCode::OK) if self.is_listing || answered.length.is_some() => Ok(answered),
            (None, StatusCode::OK) => Err(answered.expected("the length of the object")),
            (None, _) => Err(answered.expected("status 200 with the whole object")),
            (Some(range), StatusCode::PARTIAL_CONTENT) => self.check_range(range, answered, headers),
            (Some(_), StatusCode::OK) => Err(BadAnswer::RangeIgnored(answered)),
            (Some(_), _) => Err(answered.expected("status 206 with the requested range")),
        }
    }

    fn check_range(
        &self,
        asked: &Range<u64>,
        answered: Answered,
        headers: &mut HeaderMap,
    ) -> Result<Answered, BadAnswer> {
        // Some servers send an empty body for a range that begins at the end, instead of 416.
        if let Some(size) = size_of(headers)
            && asked.start >= size
        {
            return Err(BadAnswer::PastEnd { size: Some(size) });
        }
        let wrong = || {
            let stored = if answered.coding.is_some() { " of the stored bytes" } else { "" };
            answered.expected(format!("bytes {}-{}{stored}", asked.start, asked.end.saturating_sub(1)))
        };
        let range = headers.get(CONTENT_RANGE).and_then(ContentRange::parse).ok_or_else(wrong)?;
        let end = range.last + 1;
        // The object may end before the range does.
        let fits =
            range.first == asked.start && (end == asked.end || range.size == Some(end) && end < asked.end);
        if !fits || answered.length.is_some_and(|length| length != end - range.first) {
            return Err(wrong());
        }
        if answered.length.is_none() {
            headers.insert(CONTENT_LENGTH, HeaderValue::from(end - range.first));
        }
        if range.size.is_none() {
            // `object_store` reads numbers only. `Answered` says that this size is not the object's.
            let value = HeaderValue::try_from(format!("bytes {}-{}/{end}", range.first, range.last));
            headers.insert(CONTENT_RANGE, value.map_err(|_| wrong())?);
        }
        Ok(answered)
    }
}

/// A region of S3, as the header `x-amz-bucket-region` names it.
///
/// Only words of the form `eu-west-1` are regions: a server may put any text into the header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Region(String);

impl Region {
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let text = headers.get("x-amz-bucket-region")?.to_str().ok()?;
        let mut parts: Vec<&str> = text.split('-').collect();
        let number = parts.pop()?;
        let is_word = |p: &&str| (2..=10).contains(&p.len()) && p.bytes().all(|b| b.is_ascii_lowercase());
        let is_number = number.len() <= 2 && self::number(number).is_some();
        let sane = is_number && (2..=4).contains(&parts.len()) && parts.iter().all(is_word);
        sane.then(|| Region(text.to_owned()))
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A known error code of S3, Azure or GCS. Displays as ` CODE` with what it means, or as nothing.
///
/// Only codes of this list appear in errors: a server may put any text into its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ErrorCode(Option<&'static str>);

const CODES: [&str; 45] = [
    "AccessDenied",
    "AccountIsDisabled",
    "AllAccessDisabled",
    "AuthenticationFailed",
    "AuthenticationRequired",
    "AuthorizationFailure",
    "AuthorizationHeaderMalformed",
    "AuthorizationPermissionMismatch",
    "AuthorizationProtocolMismatch",
    "AuthorizationServiceMismatch",
    "BadRequest",
    "BlobArchived",
    "ContainerNotFound",
    "ExpiredToken",
    "Forbidden",
    "InsufficientAccountPermissions",
    "InternalError",
    "InvalidAccessKeyId",
    "InvalidAuthenticationInfo",
    "InvalidArgument",
    "InvalidBucketName",
    "InvalidHeaderValue",
    "InvalidObjectState",
    "InvalidQueryParameterValue",
    "InvalidRange",
    "InvalidRequest",
    "InvalidSecurity",
    "InvalidToken",
    "KeyBasedAuthenticationNotPermitted",
    "MethodNotAllowed",
    "NoAuthenticationInformation",
    "NoSuchBucket",
    "NoSuchKey",
    "NotImplemented",
    "OperationTimedOut",
    "PermanentRedirect",
    "PreconditionFailed",
    "PublicAccessNotPermitted",
    "RequestTimeTooSkewed",
    "RequestTimeout",
    "ServerBusy",
    "ServiceUnavailable",
    "SignatureDoesNotMatch",
    "TemporaryRedirect",
    "UserProjectMissing",
];

impl ErrorCode {
    /// Returns the known word in `<Code>` of an error document.
    pub fn in_document(body: &[u8]) -> Self {
        let text = String::from_utf8_lossy(body);
        let word = text.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>"));
        ErrorCode(word.and_then(|(word, _)| CODES.into_iter().find(|known| *known == word)))
    }
}

impl ErrorCode {
    /// Whether the store says that the bucket or container does not exist.
    pub fn is_missing_bucket(self) -> bool {
        matches!(self.0, Some("NoSuchBucket" | "ContainerNotFound"))
    }

    /// Whether the store says that the request was signed for, or sent to, another region.
    pub fn is_wrong_region(self) -> bool {
        matches!(
            self.0,
            Some("AuthorizationHeaderMalformed" | "PermanentRedirect" | "TemporaryRedirect" | "BadRequest")
        )
    }

    /// Returns what the code means, and what to do, where its word does not say it.
    fn meaning(self) -> Option<&'static str> {
        Some(match self.0? {
            "AccessDenied"
            | "AllAccessDisabled"
            | "AuthorizationFailure"
            | "AuthorizationPermissionMismatch"
            | "Forbidden"
            | "InsufficientAccountPermissions" => {
                "the credentials are known, and may not do this: ask the bucket's owner for the permission \
                 to list and read it"
            }
            "AuthenticationFailed" | "SignatureDoesNotMatch" => "the secret key does not fit the access key",
            "AuthenticationRequired" | "NoAuthenticationInformation" | "PublicAccessNotPermitted" => {
                "the store gives nothing without credentials"
            }
            "AuthorizationHeaderMalformed" => {
                "another region was asked: set AWS_REGION, or `region` in the settings of this origin"
            }
            "BlobArchived" | "InvalidObjectState" => "the object is archived: restore it first",
            "ExpiredToken" => "the credentials have expired: get new ones",
            "InvalidAccessKeyId" => "the store does not know the access key",
            "InvalidToken" => "the session token is not valid: get new credentials",
            "RequestTimeTooSkewed" => "the clock of this machine is wrong: set it",
            "UserProjectMissing" => "the requester pays for this bucket, which Fletch does not support",
            _ => return None,
        })
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(code) = self.0 else { return Ok(()) };
        write!(f, " {code}")?;
        self.meaning().map_or(Ok(()), |meaning| write!(f, " ({meaning})"))
    }
}

#[cfg(test)]
mod tests;
