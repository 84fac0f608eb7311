//! Answers one S3 request, or leaves it unanswered where a fault says so.

use super::manners::{Api, Delimiters, Manners, TagForm};
use super::objects::{Object, generation};
use super::outage::{Outage, Refusal};
use super::request::S3Request;
use super::{Fault, Shared, listing, pages, xml};
use crate::serve::{Body, cut_off};
use bytes::Bytes;
use futures::StreamExt as _;
use http::header::{
    ACCEPT_ENCODING, ACCEPT_RANGES, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE,
    CONTENT_TYPE, ETAG, IF_MATCH, IF_NONE_MATCH, LAST_MODIFIED, RANGE, RETRY_AFTER,
};
use http::{HeaderName, Method, Request, Response, StatusCode, response};
use http_body_util::{BodyExt as _, Empty, Full, Limited, StreamBody};
use hyper::body::{Frame, Incoming};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tokio::time::{Instant, sleep};

/// The longest object that can be written, in bytes.
const PUT_BYTES_MAX: usize = 1 << 30;

pub(super) async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> Option<Response<Body>> {
    let manners = shared.manners();
    let call = S3Request::parse(&request, &shared.config.bucket, &manners);
    let authorization = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let authorization = authorization.unwrap_or_default().to_owned();
    shared.count_request(&call);
    let key = call.key.as_deref().unwrap_or_default();
    let about = if key.is_empty() { call.query("prefix") } else { key };
    let body_faults = call.method == Method::GET && !key.is_empty();
    let faults = shared.faults.take(|prefix, fault| {
        let any =
            matches!(fault, Fault::Error { .. } | Fault::SlowDown { .. } | Fault::Stall | Fault::Refuse(_));
        let etags = matches!(fault, Fault::ChangeEtag) && call.method == Method::HEAD;
        let writes =
            matches!(fault, Fault::LoseAnswer | Fault::IgnoreConditions) && call.method == Method::PUT;
        about.starts_with(prefix) && (any || etags || writes || body_faults)
    });
    let outage = shared.outage.meet();
    if outage == Some(Outage::ClosePort) {
        shared.port.send_replace(false);
    }
    let is_listing = call.method == Method::GET && key.is_empty();
    if is_listing {
        let now = shared.listing.fetch_add(1, Relaxed) + 1;
        let mut counts = shared.count();
        counts.lists_at_once = counts.lists_at_once.max(now);
    }
    sleep(shared.throttle.first_byte()).await;
    if is_listing {
        shared.listing.fetch_sub(1, Relaxed);
    }
    let response = if faults.contains(&Fault::Stall) {
        return None;
    } else if let Some(outage) = outage {
        match outage {
            Outage::Refuse(why) => refused(&why),
            Outage::Hang | Outage::ClosePort => return None,
        }
    } else if !shared.throttle.admit() {
        slow_down(&shared, Some(shared.config.retry_after_s))
    } else if let Some(error) = fault_error(&shared, &faults) {
        error
    } else if !shared.is_signed(&authorization) {
        error(StatusCode::FORBIDDEN, "InvalidAccessKeyId")
    } else if call.bucket != shared.config.bucket {
        error(StatusCode::NOT_FOUND, "NoSuchBucket")
    } else if key.is_empty() {
        shared.list(&call, &manners)
    } else if call.method == Method::GET || call.method == Method::HEAD {
        Arc::clone(&shared).read(&call, key, &faults, &request, &manners)
    } else {
        let done = shared.write(&call, key, &faults, request, &manners).await;
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

    fn list(&self, call: &S3Request, manners: &Manners) -> Response<Body> {
        if call.method != Method::GET {
            return error(StatusCode::NOT_IMPLEMENTED, "NotImplemented");
        }
        let Some(asked) = call.listing() else {
            return error(StatusCode::BAD_REQUEST, "InvalidArgument");
        };
        let is_refused = match manners.delimiters {
            Delimiters::Known | Delimiters::Ignored => false,
            Delimiters::Refused => call.has("delimiter"),
            Delimiters::PrefixesRefused => !asked.prefix.is_empty(),
        };
        if is_refused {
            return error(StatusCode::FORBIDDEN, "AccessDenied");
        }
        let page = pages::page(&self.objects, manners, &asked);
        xml_answer(listing::write(&self.config.bucket, manners, &asked, &page))
    }

    fn read(
        self: Arc<Self>,
        call: &S3Request,
        key: &str,
        faults: &[Fault],
        request: &Request<Incoming>,
        manners: &Manners,
    ) -> Response<Body> {
        let Some(mut object) = self.objects.find(key) else {
            return error(StatusCode::NOT_FOUND, "NoSuchKey");
        };
        if faults.contains(&Fault::ChangeEtag) {
            object.etag = format!("\"changed-{}\"", object.etag.trim_matches('"'));
        }
        let header = |name: HeaderName| request.headers().get(name).and_then(|v| v.to_str().ok());
        let tag = manners.answered.tag.of(&object.etag);
        if let Some(tags) = header(IF_MATCH).filter(|_| manners.answered.tag != TagForm::Absent)
            && tags != "*"
            && tags.split(',').all(|one| Some(one.trim()) != tag.as_deref())
        {
            return error(StatusCode::PRECONDITION_FAILED, "PreconditionFailed");
        }
        let mut head = Response::builder();
        if let Some(tag) = &tag {
            head = head.header(ETAG, tag);
        }
        if let Some(time) = manners.answered.time.in_answer(object.modified) {
            head = head.header(LAST_MODIFIED, time);
        }
        if manners.api == Api::Gcs {
            head = head.header("x-goog-generation", generation(&object.etag));
            head = head.header("x-goog-metageneration", 1);
        }
        let compressed = self.compressed(key);
        if let Some(plain) = compressed.as_ref().filter(|_| manners.api == Api::Gcs) {
            let taken = header(ACCEPT_ENCODING).unwrap_or_default();
            if !taken.split(',').any(|one| one.split(';').next().unwrap_or_default().trim() == "gzip") {
                return decompressed(head, plain.clone(), call.method == Method::HEAD);
            }
        }
        if compressed.is_some() {
            head = head.header(CONTENT_ENCODING, "gzip");
        }
        head = head.header(CONTENT_TYPE, self.content_type(key));
        head = head.header(ACCEPT_RANGES, "bytes");
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
        manners: &Manners,
    ) -> Response<Body> {
        let condition = match manners.api {
            Api::S3 => request.headers().get(IF_NONE_MATCH).is_some_and(|v| v == "*"),
            Api::Gcs => request.headers().get("x-goog-if-generation-match").is_some_and(|v| v == "0"),
        };
        let create = condition && !faults.contains(&Fault::IgnoreConditions);
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
            ("DELETE", true) if manners.api == Api::Gcs && self.objects.find(key).is_none() => {
                error(StatusCode::NOT_FOUND, "NoSuchKey")
            }
            ("DELETE", true) => {
                self.objects.delete(key);
                no_content()
            }
            ("DELETE", false) if self.objects.abort_upload(upload) => no_content(),
            ("DELETE", false) => no_upload(),
            ("POST", true) if call.has("uploads") => {
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
        Fault::Refuse(why) => Some(refused(why)),
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

fn refused(why: &Refusal) -> Response<Body> {
    let status = StatusCode::from_u16(why.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = error(status, &why.code);
    for (name, value) in &why.headers {
        response.headers_mut().insert(name, value.clone());
    }
    response
}

/// Answers as GCS does for a compressed object: the plain bytes, whole, without a length.
fn decompressed(head: response::Builder, plain: Bytes, bodiless: bool) -> Response<Body> {
    let head = head.header("warning", "214 UploadServer gunzipped").header("vary", "Accept-Encoding");
    if bodiless {
        return finish(head, Empty::new().map_err(|e| match e {}).boxed_unsync());
    }
    let frames = futures::stream::iter([Ok(Frame::data(plain))]);
    finish(head, StreamBody::new(frames).boxed_unsync())
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
