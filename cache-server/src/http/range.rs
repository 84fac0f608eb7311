//! Ranges and preconditions of GET and HEAD (RFC 9110): one range of bytes or the whole.

use super::problem::{Answer, Fault};
use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::Response,
};
use fletch_api::Code;
use std::ops::Range;

/// What of a representation is to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// All of it.
    Whole,
    /// These bytes, within its length.
    Part(Range<u64>),
}

impl Wanted {
    /// The bytes wanted of `len`.
    #[must_use]
    pub fn range(&self, len: u64) -> Range<u64> {
        match self {
            Wanted::Whole => 0..len,
            Wanted::Part(r) => r.clone(),
        }
    }

    /// 200 or 206 with what a representation of `len` bytes and this etag says about itself.
    pub fn head(&self, len: u64, etag: &str) -> axum::http::response::Builder {
        let r = self.range(len);
        let builder = Response::builder()
            .header(header::ACCEPT_RANGES, "bytes")
            .header(header::ETAG, etag)
            .header(header::CONTENT_LENGTH, r.end - r.start);
        match self {
            Wanted::Whole => builder.status(StatusCode::OK),
            Wanted::Part(r) => builder
                .status(StatusCode::PARTIAL_CONTENT)
                .header(header::CONTENT_RANGE, format!("bytes {}-{}/{len}", r.start, r.end - 1)),
        }
    }
}

/// Whether the client has this representation already.
#[must_use]
pub fn not_modified(request: &HeaderMap, etag: &str) -> Option<Response> {
    let tags = request.get(header::IF_NONE_MATCH)?.to_str().ok()?;
    let same = tags.split(',').map(str::trim).any(|t| t == "*" || t.trim_start_matches("W/") == etag);
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NOT_MODIFIED;
    response.headers_mut().insert(header::ETAG, HeaderValue::from_str(etag).ok()?);
    same.then_some(response)
}

/// What a request wants of `len` bytes with this etag. A range that cannot be read, several
/// ranges, and one whose `If-Range` names something else mean the whole.
///
/// # Errors
/// [`Code::RangeNotSatisfiable`].
pub fn wanted(request: &HeaderMap, len: u64, etag: &str) -> Answer<Wanted> {
    let text = |name| request.get(name).and_then(|v| v.to_str().ok());
    if text(header::IF_RANGE).is_some_and(|tag| tag != etag) {
        return Ok(Wanted::Whole);
    }
    let Some(spec) = text(header::RANGE).and_then(|v| v.strip_prefix("bytes=")) else {
        return Ok(Wanted::Whole);
    };
    let Some((from, to)) = spec.trim().split_once('-') else { return Ok(Wanted::Whole) };
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
        _ => return Ok(Wanted::Whole),
    };
    if range.start >= range.end {
        let detail = format!("range {spec:?} of {len} bytes");
        return Err(Fault::new(Code::RangeNotSatisfiable, detail, "ask for bytes that exist"));
    }
    Ok(Wanted::Part(range))
}

/// The 416 answer says how long the thing is.
#[must_use]
pub fn unsatisfiable(fault: Fault, len: u64) -> Response {
    use axum::response::IntoResponse as _;
    let is = fault.code() == Code::RangeNotSatisfiable;
    let mut response = fault.into_response();
    if is && let Ok(v) = HeaderValue::from_str(&format!("bytes */{len}")) {
        response.headers_mut().insert(header::CONTENT_RANGE, v);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(range: &str) -> Option<Wanted> {
        let mut h = HeaderMap::new();
        h.insert(header::RANGE, HeaderValue::from_str(range).expect("header"));
        wanted(&h, 10, "\"e\"").ok()
    }

    #[test]
    fn ranges_as_in_the_rfc() {
        let part = |r| Some(Wanted::Part(r));
        assert_eq!(ask("bytes=0-0"), part(0..1));
        assert_eq!(ask("bytes=2-"), part(2..10));
        assert_eq!(ask("bytes=-3"), part(7..10));
        assert_eq!(ask("bytes=-99"), part(0..10));
        assert_eq!(ask("bytes=5-99999999999999999999999"), part(5..10));
        for whole in
            ["bytes=0-1,3-4", "bytes=5-2", "bytes=a-b", "items=0-1", "bytes=+1-2", "bytes=-", "bytes=1"]
        {
            assert_eq!(ask(whole), Some(Wanted::Whole), "{whole}");
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
        assert_eq!(wanted(&h, 10, "\"e\"").ok(), Some(Wanted::Whole));
        for (tags, same) in [("\"e\"", true), ("\"a\", W/\"e\"", true), ("*", true), ("\"a\"", false)] {
            h.insert(header::IF_NONE_MATCH, HeaderValue::from_static(tags));
            assert_eq!(not_modified(&h, "\"e\"").is_some(), same, "{tags}");
        }
    }
}
