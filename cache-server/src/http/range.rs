//! Ranges and preconditions of GET and HEAD (RFC 9110). A request gets one range of bytes, or everything.

use super::error::{ApiError, ApiResult};
use axum::{
    body::Body,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
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

/// Returns the reply that the preconditions of a request demand, or `None` if the request goes on.
///
/// In the order of RFC 9110, section 13.2.2: a 412 if `If-Match` names other representations only, then a 304
/// if `If-None-Match` names this one. The caller evaluates `If-Range` and `Range` afterwards.
#[must_use]
pub fn precondition(request: &HeaderMap, etag: &str) -> Option<Response> {
    // A weak etag never matches here: `If-Match` compares strongly.
    if names(request, &header::IF_MATCH, |tag| tag == etag) == Some(false) {
        let detail = format!("If-Match names another representation; this one has the etag {etag}");
        let hint = "request it without If-Match, or with the etag of this representation";
        return Some(ApiError::new(Code::PreconditionFailed, detail, hint).into_response());
    }
    if names(request, &header::IF_NONE_MATCH, |tag| tag.trim_start_matches("W/") == etag) != Some(true) {
        return None;
    }
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NOT_MODIFIED;
    response.headers_mut().insert(header::ETAG, HeaderValue::from_str(etag).ok()?);
    Some(response)
}

/// Returns whether a header lists an etag that `same` accepts, or is `*`. `None` without the header.
fn names(request: &HeaderMap, name: &HeaderName, same: impl Fn(&str) -> bool) -> Option<bool> {
    let mut values = request.get_all(name).iter().peekable();
    values.peek()?;
    // A value that is no text names no etag of this server.
    Some(values.filter_map(|v| v.to_str().ok()).any(|v| v.trim() == "*" || etags(v).any(&same)))
}

/// Returns the etags of a list. A comma inside the quotes of an etag belongs to the etag.
fn etags(list: &str) -> impl Iterator<Item = &str> {
    let mut quoted = false;
    let between = move |c: char| {
        quoted ^= c == '"';
        c == ',' && !quoted
    };
    list.split(between).map(str::trim)
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
            assert_eq!(precondition(&h, "\"e\"").is_some(), same, "{tags}");
        }
    }

    #[test]
    fn if_match_compares_strongly_and_comes_first() {
        let status = |if_match: &[&'static str], none: Option<&'static str>| {
            let mut h = HeaderMap::new();
            for v in if_match {
                h.append(header::IF_MATCH, HeaderValue::from_static(v));
            }
            if let Some(none) = none {
                h.insert(header::IF_NONE_MATCH, HeaderValue::from_static(none));
            }
            precondition(&h, "\"e\"").map(|r| r.status().as_u16())
        };
        for same in [&["\"e\""][..], &["*"], &["\"a\", \"e\""], &["\"a\"", "\"e\""], &["\"a,b\",\"e\""]] {
            assert_eq!(status(same, None), None, "{same:?}");
            assert_eq!(status(same, Some("\"e\"")), Some(304), "{same:?}");
        }
        for other in [&["\"a\""][..], &["W/\"e\""], &["e"], &[""], &["\"a\", \"b\""], &["\"a,\"e\",\""]] {
            assert_eq!(status(other, None), Some(412), "{other:?}");
            assert_eq!(status(other, Some("\"e\"")), Some(412), "{other:?}");
        }
    }
}
