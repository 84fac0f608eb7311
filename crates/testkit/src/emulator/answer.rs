//! Answers one S3 request, or leaves it unanswered where a fault says so.

use super::objects::Object;
use super::{Fault, Shared, xml};
use crate::serve::{Body, cut_off};
use bytes::Bytes;
use futures::StreamExt as _;
use http::header::{
    ACCEPT_RANGES, AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, IF_MATCH, IF_NONE_MATCH,
    LAST_MODIFIED, RANGE, RETRY_AFTER,
};
use http::{HeaderName, Method, Request, Response, StatusCode, response};
use http_body_util::{BodyExt as _, Empty, Full, Limited, StreamBody};
use hyper::body::{Frame, Incoming};
use percent_encoding::percent_decode_str;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use tokio::time::{Instant, sleep};

/// The longest object that can be written, in bytes.
const PUT_BYTES_MAX: usize = 1 << 30;

pub(super) async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> Option<Response<Body>> {
    let call = S3Request::parse(&request);
    let authorization = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let authorization = authorization.unwrap_or_default().to_owned();
    shared.count_request(&call);
    let key = call.key.as_deref().unwrap_or_default();
    let about = if key.is_empty() { call.query("prefix") } else { key };
    let body_faults = call.method == Method::GET && !key.is_empty();
    let faults = shared.faults.take(|prefix, fault| {
        let any = matches!(fault, Fault::Error { .. } | Fault::SlowDown { .. } | Fault::Stall);
        let etags = matches!(fault, Fault::ChangeEtag) && call.method == Method::HEAD;
        let writes =
            matches!(fault, Fault::LoseAnswer | Fault::IgnoreConditions) && call.method == Method::PUT;
        about.starts_with(prefix) && (any || etags || writes || body_faults)
    });
    sleep(shared.throttle.first_byte()).await;
    let response = if faults.contains(&Fault::Stall) {
        return None;
    } else if !shared.throttle.admit() {
        slow_down(&shared, Some(shared.config.retry_after_s))
    } else if let Some(error) = fault_error(&shared, &faults) {
        error
    } else if !shared.is_signed(&authorization) {
        error(StatusCode::FORBIDDEN, "InvalidAccessKeyId")
    } else if call.bucket != shared.config.bucket {
        error(StatusCode::NOT_FOUND, "NoSuchBucket")
    } else if key.is_empty() {
        shared.list(&call)
    } else if call.method == Method::GET || call.method == Method::HEAD {
        Arc::clone(&shared).read(&call, key, &faults, &request)
    } else {
        let done = shared.write(&call, key, &faults, request).await;
        if faults.contains(&Fault::LoseAnswer) {
            return None;
        }
        done
    };
    if response.status().as_u16() >= 400 {
        shared.count().refused += 1;
    }
    Some(response)
}

/// A request's method, bucket, key and query.
struct S3Request {
    method: Method,
    bucket: String,
    /// `None` if the path names only the bucket.
    key: Option<String>,
    query: HashMap<String, String>,
}

impl S3Request {
    fn parse(request: &Request<Incoming>) -> Self {
        let text = |s: &str| percent_decode_str(s).decode_utf8_lossy().into_owned();
        let path = request.uri().path().trim_start_matches('/');
        let (bucket, key) = match path.split_once('/') {
            Some((bucket, key)) => (bucket, Some(text(key)).filter(|k| !k.is_empty())),
            None => (path, None),
        };
        let query = url::form_urlencoded::parse(request.uri().query().unwrap_or_default().as_bytes());
        S3Request {
            method: request.method().clone(),
            bucket: text(bucket),
            key,
            query: query.into_owned().collect(),
        }
    }

    /// Returns the value of a query key; empty if there is none.
    fn query(&self, key: &str) -> &str {
        self.query.get(key).map(String::as_str).unwrap_or_default()
    }
}

impl Shared {
    fn count_request(&self, call: &S3Request) {
        let early = self.is_early();
        let mut counts = self.count();
        counts.early += u64::from(early);
        match (&call.method, &call.key) {
            (&Method::GET, Some(key)) => {
                counts.get += 1;
                *counts.gets.entry(key.clone()).or_default() += 1;
            }
            (&Method::GET, None) => counts.list += 1,
            (&Method::HEAD, _) => counts.head += 1,
            (&Method::PUT, _) => counts.put += 1,
            (&Method::DELETE, _) => counts.delete += 1,
            _ => counts.post += 1,
        }
    }

    fn list(&self, call: &S3Request) -> Response<Body> {
        if call.method != Method::GET
            || call.query("list-type") != "2"
            || call.query.contains_key("delimiter")
        {
            return error(StatusCode::NOT_IMPLEMENTED, "NotImplemented");
        }
        let max = call.query.get("max-keys").map_or(Some(1000), |n| n.parse().ok());
        let Some(max) = max.map(|n: usize| n.min(1000)) else {
            return error(StatusCode::BAD_REQUEST, "InvalidArgument");
        };
        let after = call.query.get("continuation-token").or_else(|| call.query.get("start-after"));
        let (page, more) = self.objects.list(call.query("prefix"), after.map(String::as_str), max);
        // The token is the last key, so an object that is written between two pages is listed at most once.
        let next = page.last().filter(|_| more).map(|last| last.key.as_str());
        let encode = call.query("encoding-type") == "url";
        xml_answer(xml::listing(&self.config.bucket, call.query("prefix"), max, &page, next, encode))
    }

    fn read(
        self: Arc<Self>,
        call: &S3Request,
        key: &str,
        faults: &[Fault],
        request: &Request<Incoming>,
    ) -> Response<Body> {
        let Some(mut object) = self.objects.find(key) else {
            return error(StatusCode::NOT_FOUND, "NoSuchKey");
        };
        if faults.contains(&Fault::ChangeEtag) {
            object.etag = format!("\"changed-{}\"", object.etag.trim_matches('"'));
        }
        let header = |name: HeaderName| request.headers().get(name).and_then(|v| v.to_str().ok());
        if header(IF_MATCH)
            .is_some_and(|tags| tags != "*" && tags.split(',').all(|t| t.trim() != object.etag))
        {
            return error(StatusCode::PRECONDITION_FAILED, "PreconditionFailed");
        }
        let asked = header(RANGE).filter(|_| !faults.contains(&Fault::IgnoreRange));
        let range = match asked.and_then(|text| range(text, object.size)) {
            Some(Ok(range)) => Some(shifted(range, faults, object.size)),
            Some(Err(())) => {
                let mut response = error(StatusCode::RANGE_NOT_SATISFIABLE, "InvalidRange");
                if let Ok(value) = format!("bytes */{}", object.size).parse() {
                    response.headers_mut().insert(CONTENT_RANGE, value);
                }
                return response;
            }
            None => None,
        };
        let mut head = Response::builder()
            .header(ETAG, &object.etag)
            .header(LAST_MODIFIED, httpdate::fmt_http_date(object.modified))
            .header(CONTENT_TYPE, "application/octet-stream")
            .header(ACCEPT_RANGES, "bytes");
        if let Some(range) = &range {
            let text = format!("bytes {}-{}/{}", range.start, range.end - 1, object.size);
            head = head.status(StatusCode::PARTIAL_CONTENT).header(CONTENT_RANGE, text);
        }
        let mut range = range.unwrap_or(0..object.size);
        for fault in faults {
            if let Fault::Short { by } = fault {
                range.end = range.end.saturating_sub(*by).max(range.start);
            }
        }
        head = head.header(CONTENT_LENGTH, range.end - range.start);
        if call.method == Method::HEAD {
            return finish(head, Empty::new().map_err(|e| match e {}).boxed_unsync());
        }
        let body = Sending {
            shared: self,
            object,
            at: range.start,
            range,
            began: Instant::now(),
            faults: faults.to_vec(),
        };
        finish(head, body.stream())
    }

    async fn write(
        &self,
        call: &S3Request,
        key: &str,
        faults: &[Fault],
        request: Request<Incoming>,
    ) -> Response<Body> {
        let create = request.headers().get(IF_NONE_MATCH).is_some_and(|v| v == "*")
            && !faults.contains(&Fault::IgnoreConditions);
        let upload = call.query("uploadId");
        let Ok(body) = Limited::new(request.into_body(), PUT_BYTES_MAX).collect().await else {
            return error(StatusCode::BAD_REQUEST, "IncompleteBody");
        };
        let bytes = body.to_bytes();
        let no_upload = || error(StatusCode::NOT_FOUND, "NoSuchUpload");
        match (call.method.as_str(), upload.is_empty()) {
            ("PUT", true) if create => match self.objects.create(key, bytes) {
                Ok(Some(etag)) => tagged(&etag),
                Ok(None) => error(StatusCode::PRECONDITION_FAILED, "PreconditionFailed"),
                Err(error) => failed(&error),
            },
            ("PUT", true) => self.objects.put(key, bytes).map_or_else(|e| failed(&e), |etag| tagged(&etag)),
            ("PUT", false) => match call.query("partNumber").parse() {
                Ok(number) => {
                    self.objects.put_part(upload, number, bytes).map_or_else(no_upload, |etag| tagged(&etag))
                }
                Err(_) => error(StatusCode::BAD_REQUEST, "InvalidArgument"),
            },
            ("DELETE", true) => {
                self.objects.delete(key);
                no_content()
            }
            ("DELETE", false) if self.objects.abort_upload(upload) => no_content(),
            ("DELETE", false) => no_upload(),
            ("POST", true) if call.query.contains_key("uploads") => {
                xml_answer(xml::upload_begun(&self.config.bucket, key, &self.objects.begin_upload()))
            }
            ("POST", false) => {
                let Some(numbers) = std::str::from_utf8(&bytes).ok().and_then(xml::parts) else {
                    return error(StatusCode::BAD_REQUEST, "MalformedXML");
                };
                match self.objects.complete_upload(upload, key, &numbers) {
                    Some(Ok(etag)) => xml_answer(xml::upload_completed(&self.config.bucket, key, &etag)),
                    Some(Err(error)) => failed(&error),
                    None => no_upload(),
                }
            }
            _ => error(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
        }
    }
}

/// A response body that is sent piece by piece.
struct Sending {
    shared: Arc<Shared>,
    object: Object,
    at: u64,
    range: Range<u64>,
    began: Instant,
    faults: Vec<Fault>,
}

impl Sending {
    fn stream(self) -> Body {
        let frames = futures::stream::unfold(self, |mut sending| async move {
            let piece = sending.next().await?;
            // An error closes the connection, so no piece follows it.
            Some((piece.map(Frame::data), sending))
        });
        StreamBody::new(frames.fuse()).boxed_unsync()
    }

    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        if self.at >= self.range.end {
            return None;
        }
        let sent = self.at - self.range.start;
        let mut end = self.range.end.min(self.at + self.shared.throttle.piece());
        for fault in &self.faults {
            match fault {
                Fault::Truncate { after } if sent >= *after => return Some(Err(cut_off("truncated").await)),
                Fault::StallAfter(after) if sent >= *after => std::future::pending().await,
                Fault::Truncate { after } | Fault::StallAfter(after) => {
                    end = end.min(self.range.start + after)
                }
                _ => {}
            }
        }
        self.shared.throttle.wait(self.began, sent, end - self.at).await;
        let piece = self.object.read(self.at..end).map(|bytes| self.flipped(bytes));
        if let Ok(bytes) = &piece {
            self.shared.count().bytes_sent += bytes.len() as u64;
        }
        self.at = end;
        Some(piece)
    }

    fn flipped(&self, bytes: Bytes) -> Bytes {
        let mut out = None;
        for fault in &self.faults {
            if let Fault::FlipBit { byte } = fault {
                let byte = byte % self.object.size;
                let here = byte.checked_sub(self.at).filter(|i| *i < bytes.len() as u64);
                if let Some(i) = here {
                    out.get_or_insert_with(|| bytes.to_vec())[i as usize] ^= 1;
                }
            }
        }
        out.map_or(bytes, Bytes::from)
    }
}

/// Parses `bytes=a-b`, `bytes=a-` or `bytes=-n`. `None` is not a single range; `Err` is a range past the end.
fn range(text: &str, size: u64) -> Option<Result<Range<u64>, ()>> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let range = match (first, last) {
        ("", n) => size.saturating_sub(n.parse().ok()?)..size,
        (a, "") => a.parse().ok()?..size,
        (a, b) => a.parse().ok()?..b.parse::<u64>().ok()?.saturating_add(1).min(size),
    };
    Some(if range.start < range.end { Ok(range) } else { Err(()) })
}

fn shifted(range: Range<u64>, faults: &[Fault], size: u64) -> Range<u64> {
    let by = faults.iter().find_map(|f| if let Fault::ShiftRange(by) = f { Some(*by) } else { None });
    let by = by.unwrap_or(0).min(size - range.end);
    range.start + by..range.end + by
}

fn fault_error(shared: &Shared, faults: &[Fault]) -> Option<Response<Body>> {
    faults.iter().find_map(|fault| match fault {
        Fault::SlowDown { retry_after_s } => Some(slow_down(shared, *retry_after_s)),
        Fault::Error { rate, status } if shared.throttle.happens(*rate) => {
            let status = StatusCode::from_u16(*status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            let code = match status.as_u16() {
                400 => "InvalidRequest",
                401 | 403 => "AccessDenied",
                404 => "NoSuchKey",
                412 => "PreconditionFailed",
                503 => "SlowDown",
                _ => "InternalError",
            };
            Some(error(status, code))
        }
        _ => None,
    })
}

fn finish(head: response::Builder, body: Body) -> Response<Body> {
    head.body(body).expect("headers made of numbers, dates and hashes")
}

fn full(text: String) -> Body {
    Full::new(Bytes::from(text)).map_err(|e| match e {}).boxed_unsync()
}

fn xml_answer(text: String) -> Response<Body> {
    finish(Response::builder().header(CONTENT_TYPE, "application/xml"), full(text))
}

fn error(status: StatusCode, code: &str) -> Response<Body> {
    let text = xml::error(code, "the emulator refuses this");
    finish(Response::builder().status(status).header(CONTENT_TYPE, "application/xml"), full(text))
}

fn slow_down(shared: &Shared, retry_after_s: Option<u64>) -> Response<Body> {
    let mut response = error(StatusCode::SERVICE_UNAVAILABLE, "SlowDown");
    if let Some(seconds) = retry_after_s {
        shared.forbid_requests(seconds);
        response.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    response
}

fn failed(error: &io::Error) -> Response<Body> {
    let text = xml::error("InternalError", &error.to_string());
    finish(Response::builder().status(StatusCode::INTERNAL_SERVER_ERROR), full(text))
}

fn tagged(etag: &str) -> Response<Body> {
    finish(Response::builder().header(ETAG, etag), full(String::new()))
}

fn no_content() -> Response<Body> {
    finish(Response::builder().status(StatusCode::NO_CONTENT), full(String::new()))
}
