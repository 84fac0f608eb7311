//! `HeadObject` and `GetObject`: one object, or one range of it.

use super::{
    dataset::DatasetVersion,
    error::{S3Code, S3Error, S3Result},
    query::Query,
};
use crate::{
    app::server::Server,
    data::{
        reads::{content_hash, spans},
        versions::{AskTables, Source, Sources},
    },
    http::{
        admission::{Admitted, acquire_read_permit},
        error::ApiError,
        range::{Requested, requested_range},
        response_body::{BodyError, Piece, body_of_stream, respond},
    },
    tenancy::{accounting::Component, auth::Principal},
};
use axum::{
    body::Body,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header, response::Builder},
    response::Response,
};
use fletch_api::{Code, headers};
use fletch_core::{Hash, JobName};
use fletch_tables::Key;
use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _, stream};
use httpdate::{fmt_http_date, parse_http_date};
use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Parameters that set a header of the reply.
const REPLY_HEADERS: [(&str, HeaderName); 6] = [
    ("response-cache-control", header::CACHE_CONTROL),
    ("response-content-disposition", header::CONTENT_DISPOSITION),
    ("response-content-encoding", header::CONTENT_ENCODING),
    ("response-content-language", header::CONTENT_LANGUAGE),
    ("response-content-type", header::CONTENT_TYPE),
    ("response-expires", header::EXPIRES),
];

/// A request for one object.
pub struct ObjectRequest<'a> {
    pub principal: &'a Principal,
    pub key: &'a str,
    pub query: &'a Query,
    pub headers: &'a HeaderMap,
    pub is_head: bool,
    /// Whether the request is signed. Only then it may set headers of its reply.
    pub is_signed: bool,
}

/// An object that was found.
struct Object {
    sources: Arc<Sources>,
    source: Arc<Source>,
    key: Key,
    hash: Hash,
    size: u64,
    modified: SystemTime,
}

/// Answers a request for an object.
///
/// # Errors
/// [`S3Code::NoSuchKey`] for a key that the caller's domain does not have; [`S3Code::PreconditionFailed`];
/// [`S3Code::InvalidRange`]; those of the origin and of limits.
pub async fn reply(server: &Arc<Server>, request: ObjectRequest<'_>) -> S3Result {
    let overrides = reply_headers(&request)?;
    let permit = acquire_read_permit(server, &request.principal.tenant)?;
    let object = find(server, request.principal, request.key).await?.ok_or_else(S3Error::no_such_key)?;
    let etag = format!("\"{}\"", object.hash);
    match condition(request.headers, &object.hash.to_string(), object.modified) {
        Condition::Holds => {}
        Condition::Failed => {
            let why = "at least one of the preconditions does not hold";
            return Err(S3Error::new(S3Code::PreconditionFailed, why));
        }
        Condition::NotModified => return not_modified(&etag, object.modified),
    }
    let requested = requested_part(&request, object.size, &etag)?;
    let mut head = requested
        .head(object.size, &etag)
        .header(header::LAST_MODIFIED, fmt_http_date(object.modified))
        .header(header::CONTENT_TYPE, "binary/octet-stream")
        // A browser runs nothing of an object in the name of this server.
        .header(header::CONTENT_SECURITY_POLICY, "sandbox")
        .header(header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    if let Some(headers) = head.headers_mut() {
        headers.extend(overrides);
    }
    if request.is_head {
        return sent(head, Body::empty());
    }
    let job = JobName::new(headers::JOB_ANONYMOUS).map_err(|e| ApiError::internal(e.to_string()))?;
    let admitted = Admitted {
        principal: request.principal.clone(),
        job: server.live_job(&request.principal.tenant, &job).map_err(ApiError::from)?,
        component: Component::S3,
        permit: Some(permit),
    };
    send(server, admitted, &object, requested, head).await
}

/// Finds the object of a key; `None` if the caller's domain has none.
async fn find(server: &Arc<Server>, principal: &Principal, key: &str) -> S3Result<Option<Object>> {
    let Some((component, path)) = key.split_once('/') else { return Ok(None) };
    let Some(dataset) = DatasetVersion::read(component) else { return Ok(None) };
    let Some(sources) = dataset.open(server, principal, None).await? else { return Ok(None) };
    let path: Arc<str> = path.into();
    let ask: AskTables<_> = Box::new(move |source| {
        let path = Arc::clone(&path);
        async move { Ok(source.version.find_key(&path).await?) }.boxed()
    });
    let (source, found) = server.versions.ask_tables(&sources, None, ask).await?;
    let Some(key) = found else { return Ok(None) };
    let (hash, size) = content_of(&key)?;
    let modified = modified(&source);
    Ok(Some(Object { sources, source, key, hash, size, modified }))
}

/// Returns the hash and the size of what a key names. An empty directory is an object without bytes.
pub fn content_of(key: &Key) -> S3Result<(Hash, u64)> {
    match &key.file {
        None => Ok((Hash::of(b""), 0)),
        Some(file) => {
            let entry = file.entry();
            Ok((content_hash(&entry).map_err(ApiError::from)?, entry.size))
        }
    }
}

/// Returns when the objects of a version were made, in whole seconds, as HTTP has it.
pub fn modified(source: &Source) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(source.version.manifest().created_ns() / 1_000_000_000)
}

/// Sends the bytes of an object. A failure before the first byte is a status; a later one cuts the
/// connection.
async fn send(
    server: &Arc<Server>,
    mut admitted: Admitted,
    object: &Object,
    requested: Requested,
    head: Builder,
) -> S3Result {
    let Some(file) = &object.key.file else { return sent(head, Body::empty()) };
    let (root, range) = (object.sources.root(), requested.range(object.size));
    let length = range.end - range.start;
    let charge = admitted.charges(server, &object.sources, root);
    let payer = admitted.payer(server, &object.sources, root);
    let costs = Arc::clone(&payer.costs);
    let waiting = costs.wait();
    let spans = spans(&object.source, file, range);
    let mut reads = Box::pin(server.reads.spans(&payer, &object.sources, spans));
    let first = reads.try_next().await.map_err(ApiError::from)?;
    drop(waiting);
    let all = stream::iter(first.map(Ok)).chain(reads);
    let pieces =
        all.map(move |read| Ok::<_, BodyError>(Piece::of_read(read.map_err(ApiError::from)?, &charge)));
    sent(head, body_of_stream(server, pieces, Some(length), admitted.permit.take(), Some(&costs)))
}

fn sent(head: Builder, body: Body) -> S3Result {
    Ok(respond(head, body)?)
}

/// Returns the part of an object that a request gets.
fn requested_part(request: &ObjectRequest<'_>, size: u64, etag: &str) -> S3Result<Requested> {
    let Some(part) = request.query.get("partNumber") else {
        return requested_range(request.headers, size, etag).map_err(|e| match e.code() {
            Code::RangeNotSatisfiable => {
                S3Error::new(S3Code::InvalidRange, "the requested range is past the end of the object")
                    .of_length(size)
            }
            _ => e.into(),
        });
    };
    if request.headers.contains_key(header::RANGE) {
        let why = "a request has a Range or a partNumber, not both";
        return Err(S3Error::new(S3Code::InvalidRequest, why));
    }
    match part.parse::<u32>() {
        Ok(1) if size > 0 => Ok(Requested::Part(0..size)),
        Ok(1) => Ok(Requested::Whole),
        Ok(2..=10_000) => {
            Err(S3Error::new(S3Code::InvalidPartNumber, "each object has one part, with the number 1"))
        }
        _ => Err(S3Error::new(S3Code::InvalidArgument, "partNumber must be within 1 and 10000")),
    }
}

/// Returns the headers of the reply that a request sets.
fn reply_headers(request: &ObjectRequest<'_>) -> S3Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (parameter, name) in REPLY_HEADERS {
        let Some(value) = request.query.get(parameter) else { continue };
        if !request.is_signed {
            let why = "only a signed request may set headers of its reply";
            return Err(S3Error::new(S3Code::InvalidRequest, why));
        }
        let value = HeaderValue::try_from(value).map_err(|_| {
            S3Error::new(S3Code::InvalidArgument, format!("{parameter} is not the value of a header"))
        })?;
        headers.insert(name, value);
    }
    Ok(headers)
}

/// What the preconditions of a request say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Condition {
    Holds,
    Failed,
    NotModified,
}

/// Checks the preconditions in the order of RFC 9110. An entity tag may lack its quotes, as S3 takes it.
fn condition(request: &HeaderMap, hash: &str, modified: SystemTime) -> Condition {
    let text = |name: HeaderName| request.get(name).map(|value| value.to_str().unwrap_or_default());
    let date = |name: HeaderName| text(name).and_then(|value| parse_http_date(value).ok());
    let names = |list: &str, is_weak_equal: bool| {
        list.split(',').map(str::trim).any(|tag| {
            let tag = if is_weak_equal { tag.trim_start_matches("W/") } else { tag };
            tag == "*" || tag.trim_matches('"') == hash
        })
    };
    let unchanged = match text(header::IF_MATCH) {
        Some(list) => names(list, false),
        None => date(header::IF_UNMODIFIED_SINCE).is_none_or(|since| modified <= since),
    };
    if !unchanged {
        return Condition::Failed;
    }
    let changed = match text(header::IF_NONE_MATCH) {
        Some(list) => !names(list, true),
        None => date(header::IF_MODIFIED_SINCE).is_none_or(|since| modified > since),
    };
    if changed { Condition::Holds } else { Condition::NotModified }
}

fn not_modified(etag: &str, modified: SystemTime) -> S3Result {
    let head = Response::builder()
        .status(StatusCode::NOT_MODIFIED)
        .header(header::ETAG, etag)
        .header(header::LAST_MODIFIED, fmt_http_date(modified));
    sent(head, Body::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preconditions_as_in_the_rfc() {
        let modified = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let (then, before) = (fmt_http_date(modified), fmt_http_date(modified - Duration::from_secs(1)));
        let (then, before) = (then.as_str(), before.as_str());
        let ask = |headers: &[(HeaderName, &str)]| {
            let all = headers.iter().map(|(name, value)| (name.clone(), value.parse().expect("a value")));
            condition(&all.collect(), "abc", modified)
        };
        assert_eq!(ask(&[]), Condition::Holds);
        for same in ["\"abc\"", "abc", "*", "\"x\", \"abc\""] {
            assert_eq!(ask(&[(header::IF_MATCH, same)]), Condition::Holds, "{same}");
            assert_eq!(ask(&[(header::IF_NONE_MATCH, same)]), Condition::NotModified, "{same}");
        }
        assert_eq!(ask(&[(header::IF_MATCH, "\"x\"")]), Condition::Failed);
        assert_eq!(ask(&[(header::IF_MATCH, "W/\"abc\"")]), Condition::Failed);
        assert_eq!(ask(&[(header::IF_NONE_MATCH, "W/\"abc\"")]), Condition::NotModified);
        assert_eq!(ask(&[(header::IF_UNMODIFIED_SINCE, then)]), Condition::Holds);
        assert_eq!(ask(&[(header::IF_UNMODIFIED_SINCE, before)]), Condition::Failed);
        assert_eq!(ask(&[(header::IF_MODIFIED_SINCE, then)]), Condition::NotModified);
        assert_eq!(ask(&[(header::IF_MODIFIED_SINCE, before)]), Condition::Holds);
        assert_eq!(ask(&[(header::IF_MODIFIED_SINCE, "yesterday")]), Condition::Holds);
        let both = [(header::IF_MATCH, "abc"), (header::IF_UNMODIFIED_SINCE, before)];
        assert_eq!(ask(&both), Condition::Holds, "the entity tag says more");
        let both = [(header::IF_NONE_MATCH, "x"), (header::IF_MODIFIED_SINCE, then)];
        assert_eq!(ask(&both), Condition::Holds, "the entity tag says more");
    }
}
