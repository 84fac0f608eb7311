//! Ranges and preconditions of GET and HEAD (RFC 9110). A request gets one range of bytes, or everything.

use super::error::{ApiError, ApiResult};
use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use fletch_api::Code;
use std::ops::Range;

/// The part of a representation that a request gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Requested {
    /// Everything.
    Whole,
    /// These bytes, which lie within its length.
    Part(Range<u64>),
}

impl Requested {
    /// Returns the requested bytes of a representation of `len` bytes.
    #[must_use]
    pub fn range(&self, len: u64) -> Range<u64> {
        match self {
            Requested::Whole => 0..len,
            Requested::Part(r) => r.clone(),
        }
    }

    /// Returns the head of a 200 or 206, for a representation of `len` bytes with this etag.
    pub fn head(&self, len: u64, etag: &str) -> axum::http::response::Builder {
        let r = self.range(len);
        let builder = Response::builder()
            .header(header::ACCEPT_RANGES, "bytes")
            .header(header::ETAG, etag)
            .header(header::CONTENT_LENGTH, r.end - r.start);
        match self {
            Requested::Whole => builder.status(StatusCode::OK),
            Requested::Part(r) => builder
                .status(StatusCode::PARTIAL_CONTENT)
                .header(header::CONTENT_RANGE, format!("bytes {}-{}/{len}", r.start, r.end - 1)),
        }
    }
}

/// Returns a 304 if the client already has the representation with this etag.
#[must_use]
pub fn not_modified(request: &HeaderMap, etag: &str) -> Option<Response> {
    let tags = request.get(header::IF_NONE_MATCH)?.to_str().ok()?;
    let same = tags.split(',').map(str::trim).any(|t| t == "*" || t.trim_start_matches("W/") == etag);
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NOT_MODIFIED;
    response.headers_mut().insert(header::ETAG, HeaderValue::from_str(etag).ok()?);
    same.then_some(response)
}

/// Returns the part that a request gets of a representation of `len` bytes with this etag.
///
/// The request gets everything if its range cannot be parsed, if it has several ranges, and if its `If-Range`
/// names another etag.
///
/// # Errors
/// [`Code::RangeNotSatisfiable`].
pub fn requested_range(request: &HeaderMap, len: u64, etag: &str) -> ApiResult<Requested> {
    let text = |name| request.get(name).and_then(|v| v.to_str().ok());
    if text(header::IF_RANGE).is_some_and(|tag| tag != etag) {
        return Ok(Requested::Whole);
    }
    let Some(spec) = text(header::RANGE).and_then(|v| v.strip_prefix("bytes=")) else {
        return Ok(Requested::Whole);
    };
    let Some((from, to)) = spec.trim().split_once('-') else { return Ok(Requested::Whole) };
    let number = |s: &str| -> Option<Option<u64>> {
        if s.is_empty() {
            return Some(None);
        }
        // Only digits: `parse` alone would also take a plus sign. A number past u64 is past any end.
        s.bytes().all(|b| b.is_ascii_digit()).then(|| Some(s.parse().unwrap_or(u64::MAX)))
    };
    let range = match (number(from), number(to)) {
        (Some(Some(a)), Some(b)) if b.is_none_or(|b| a <= b) => {
            a..b.map_or(len, |b| b.saturating_add(1).min(len))
        }
        (Some(None), Some(Some(n))) => len.saturating_sub(n)..len,
        _ => return Ok(Requested::Whole),
    };
    if range.start >= range.end {
        let detail = format!("the range {spec:?} lies past the end of {len} bytes");
        return Err(ApiError::new(Code::RangeNotSatisfiable, detail, "request bytes within that length"));
    }
    Ok(Requested::Part(range))
}

/// Returns the reply for an error of [`requested_range`]. A 416 names the length of the representation.
#[must_use]
pub fn range_error(error: ApiError, len: u64) -> Response {
    let unsatisfiable = error.code() == Code::RangeNotSatisfiable;
    let mut response = error.into_response();
    if unsatisfiable && let Ok(v) = HeaderValue::from_str(&format!("bytes */{len}")) {
        response.headers_mut().insert(header::CONTENT_RANGE, v);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(range: &str) -> Option<Requested> {
        let mut h = HeaderMap::new();
        h.insert(header::RANGE, HeaderValue::from_str(range).expect("header"));
        requested_range(&h, 10, "\"e\"").ok()
    }

    #[test]
    fn ranges_as_in_the_rfc() {
        let part = |r| Some(Requested::Part(r));
        assert_eq!(ask("bytes=0-0"), part(0..1));
        assert_eq!(ask("bytes=2-"), part(2..10));
        assert_eq!(ask("bytes=-3"), part(7..10));
        assert_eq!(ask("bytes=-99"), part(0..10));
        assert_eq!(ask("bytes=5-99999999999999999999999"), part(5..10));
        for whole in
            ["bytes=0-1,3-4", "bytes=5-2", "bytes=a-b", "items=0-1", "bytes=+1-2", "bytes=-", "bytes=1"]
        {
            assert_eq!(ask(whole), Some(Requested::Whole), "{whole}");
        }
        for none in ["bytes=10-", "bytes=10-20", "bytes=-0"] {
            assert_eq!(ask(none), None, "{none}");
        }
    }

    #[test]
    fn preconditions() {
        let mut h = HeaderMap::new();
        h.insert(header::RANGE, HeaderValue::from_static("bytes=0-0"));
        h.insert(header::IF_RANGE, HeaderValue::from_static("\"other\""));
        assert_eq!(requested_range(&h, 10, "\"e\"").ok(), Some(Requested::Whole));
        for (tags, same) in [("\"e\"", true), ("\"a\", W/\"e\"", true), ("*", true), ("\"a\"", false)] {
            h.insert(header::IF_NONE_MATCH, HeaderValue::from_static(tags));
            assert_eq!(not_modified(&h, "\"e\"").is_some(), same, "{tags}");
        }
    }
}
