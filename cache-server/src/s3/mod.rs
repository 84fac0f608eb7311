//! The S3 door: reads of datasets for clients of object stores, on a port of its own.
//!
//! ```text
//! request ─▶ operation ─▶ admit: host, certificate, signature ─▶ object or list ─▶ reply, or XML error
//!               │                                  │                    │
//!               └ query, percent-decoding          └ tenancy/auth       └ data/versions, data/reads
//! ```
//! A key is `DATASET/path`, `DATASET@TAG/path` or `DATASET@ROOT/path`, in the one bucket. The door has the
//! TLS, the limits, the accounts and the metrics of the HTTP API (`http`), whose checks it calls. It only
//! reads.
//!
//! Invariants:
//! 1. (I7) Every request that names a key passes the access check of the HTTP API. A foreign dataset, an
//!    absent one and an absent key are the same error, and a list has datasets of the caller's domain only.
//! 2. The answer to a wrong signature does not say whether its token exists.
//! 3. No reply sends a client to another server: clients follow no redirect. Bytes that another server of the
//!    cluster has come through this one.
//! 4. No log line has a signature or a query.

mod dataset;
mod error;
mod list;
pub mod list_reply;
mod object;
mod operation;
pub mod query;
pub mod signature;
pub mod token;
mod xml;

use crate::{
    app::{limits::Limits, server::Server},
    http::{
        admission::{check_certificate, check_contact, peer_of, prove, refusal},
        browser::BrowserRules,
        context::RequestContext,
        error::ApiError,
        reply_guard::ReplyGuard,
    },
    tenancy::{
        auth::{AccessId, Principal, Role},
        connections::Refusal,
    },
};
use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, Method, header, request::Parts},
    response::{IntoResponse as _, Response},
};
use error::{S3Code, S3Error, S3Result};
use fletch_bounds::in_request;
use list_reply::of_xml;
use object::ObjectRequest;
use operation::{OTHER, Operation};
use query::{Query, decoded};
use signature::{Claim, SignedRequest};
use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

/// The longest body of a request. Reads have none, and none is read.
const BODY_BYTES_MAX: u64 = 64 << 10;
/// The header with the region of the bucket. Every region is right.
const REGION: &str = "x-amz-bucket-region";
/// The header with the id of a request.
const REQUEST_ID: &str = "x-amz-request-id";

/// Returns the router of the S3 door.
pub fn router(server: Arc<Server>) -> Router {
    Router::new().fallback(answer).with_state(server)
}

/// Returns the 503 for a connection that is not served. The connection is closed after it.
pub fn refused(why: Refusal, limits: &Limits) -> Response {
    let mut response = S3Error::from(refusal(why, limits)).into_response("/", "", false);
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// The caller of a request.
struct Caller {
    principal: Principal,
    /// The id of its credentials; `None` on a server without tokens.
    id: Option<AccessId>,
    /// Whether the request has a signature. A server without tokens does not check it.
    is_signed: bool,
}

/// Answers a request: bounds its header and its time, and counts it.
async fn answer(State(server): State<Arc<Server>>, request: Request) -> Response {
    let context = RequestContext::of(&request);
    server.touch();
    let (is_head, resource) = (*request.method() == Method::HEAD, request.uri().path().to_owned());
    let mut name = OTHER;
    let mut response = match operate(&server, &context, request, &mut name).await {
        Ok(response) => response,
        Err(error) => error.into_response(&resource, &context.id().to_string(), is_head),
    };
    if let Ok(id) = HeaderValue::try_from(context.id().to_string()) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    server.requests.count(name, response.status().as_u16(), context.started.elapsed());
    response
}

/// Carries a request out. Writes the name of its operation to `name` as soon as it is known.
async fn operate(
    server: &Arc<Server>,
    context: &RequestContext,
    request: Request,
    name: &mut &'static str,
) -> S3Result {
    let door = server.s3.as_ref().ok_or_else(|| ApiError::internal("the S3 door is off"))?;
    check_length(server, &request)?;
    let query = Query::read(request.uri().query().unwrap_or(""))?;
    let path = decoded(request.uri().path())?;
    let operation = Operation::read(request.method(), &path, &query, &door.bucket)?;
    *name = operation.name();
    let tokens = server.auth.tokens_number();
    let (head, body) = request.into_parts();
    let caller = admit(server, &head, &path, &query)?;
    let mut request = Request::from_parts(head, body);
    request.extensions_mut().insert(caller.principal.clone());
    let waits = context.waits(server, &request);
    let (head, _body) = request.into_parts();
    let performed = perform(server, &caller, &operation, &query, &head.headers);
    let reply = in_request(Arc::clone(&waits), within_deadline(server, performed)).await;
    let operation = operation.name();
    server.read_watch.note_request(&waits, || operation);
    guarded(server, caller, tokens, reply?)
}

/// Runs an operation for at most the deadline.
async fn within_deadline(server: &Server, operation: impl Future<Output = S3Result>) -> S3Result {
    let deadline = server.limits.request_deadline();
    tokio::time::timeout(deadline, operation).await.unwrap_or_else(|_| {
        let why = format!("the request took longer than {deadline:?}; sending it again is safe");
        Err(S3Error::new(S3Code::ServiceUnavailable, why))
    })
}

/// Refuses a header or a body that is too long.
fn check_length(server: &Server, request: &Request) -> S3Result<()> {
    let headers: usize = request.headers().iter().map(|(n, v)| n.as_str().len() + v.len() + 4).sum();
    let length = headers + request.uri().path_and_query().map_or(0, |line| line.as_str().len());
    if length as u64 > server.limits.header_bytes {
        let max = server.limits.header_bytes;
        let why = format!("the header has {length} bytes; at most {max} are allowed");
        return Err(S3Error::new(S3Code::RequestHeaderSectionTooLarge, why));
    }
    let body =
        request.headers().get(header::CONTENT_LENGTH).and_then(|n| n.to_str().ok()?.parse::<u64>().ok());
    if body.is_some_and(|bytes| bytes > BODY_BYTES_MAX) {
        let why = "the body has more than 64 KiB, and reads have none";
        return Err(S3Error::new(S3Code::EntityTooLarge, why));
    }
    Ok(())
}

/// Checks who may ask: the host and the origin of the request, the client certificate, and the signature.
fn admit(server: &Server, head: &Parts, path: &str, query: &Query) -> S3Result<Caller> {
    let peer = peer_of(&head.extensions);
    let rules = BrowserRules {
        hosts: &server.hosts,
        needs_token: server.auth.needs_token(),
        tls: server.tls.is_some() && peer.may_be_browser(),
    };
    rules.check(peer, head)?;
    check_certificate(head)?;
    let caller = authenticate(server, head, path, query)?;
    server.credentials.check_reader(peer).map_err(ApiError::from)?;
    check_contact(server)?;
    prove(server, &head.extensions, &caller.principal)?;
    Ok(caller)
}

/// Returns the caller by its signature. Without tokens, every caller is the anonymous reader.
fn authenticate(server: &Server, head: &Parts, path: &str, query: &Query) -> S3Result<Caller> {
    let request = SignedRequest { method: &head.method, path, query, headers: &head.headers };
    if !server.auth.needs_token() {
        let is_signed = head.headers.contains_key(header::AUTHORIZATION)
            || query.has("X-Amz-Signature")
            || query.has("AWSAccessKeyId");
        return Ok(Caller { principal: Principal::anonymous(Role::Reader), id: None, is_signed });
    }
    let keys = server.s3.as_ref().and_then(|door| door.keys.as_ref());
    let keys = keys.ok_or_else(|| ApiError::internal("the S3 door has no key"))?;
    let refuse = |code: S3Code, id: &str, why: &'static str| {
        server.auth.count_refused();
        tracing::debug!(id, code = code.as_str(), "a request of the S3 door was refused");
        S3Error::new(code, why)
    };
    let claim = Claim::read(&request).inspect_err(|_| server.auth.count_refused())?;
    let Some(claim) = claim else {
        return Err(refuse(S3Code::AccessDenied, "", "the request is not signed"));
    };
    let unknown = "the access key id is not one of this server: run `fletch s3 credentials`";
    let Ok(id) = claim.id.parse::<AccessId>() else {
        return Err(refuse(S3Code::InvalidAccessKeyId, "", unknown));
    };
    let now_s = now_s();
    claim.check_time(now_s).inspect_err(|_| server.auth.count_refused())?;
    // Before anything else is looked up, so that only who knows the secret learns more (invariant 2).
    if !claim.is_of(&request, &keys.secret(&claim.id)) {
        let why = "the signature is not that of the request: check the secret, the host and any proxy";
        return Err(refuse(S3Code::SignatureDoesNotMatch, &claim.id, why));
    }
    if now_s >= id.ends_s {
        let why = "the credentials have expired: run `fletch s3 credentials` again";
        return Err(refuse(S3Code::ExpiredToken, &claim.id, why));
    }
    let principal = principal_of(server, id).ok_or_else(|| {
        refuse(S3Code::InvalidAccessKeyId, &claim.id, "the token of the credentials was revoked")
    })?;
    Ok(Caller { principal, id: Some(id), is_signed: true })
}

/// Returns whom credentials stand for now: a reader of their token's tenant.
fn principal_of(server: &Server, id: AccessId) -> Option<Principal> {
    let principal = server.auth.of_prefix(id.prefix).filter(|principal| principal.role.may_read())?;
    Some(Principal { role: Role::Reader, ..principal })
}

/// Returns a reply that ends when the token of its caller is revoked.
fn guarded(server: &Arc<Server>, caller: Caller, tokens: u64, reply: Response) -> S3Result {
    let Some(id) = caller.id else { return Ok(reply) };
    let look = move |server: &Server| principal_of(server, id);
    Ok(ReplyGuard::new(server, caller.principal, tokens, look).guard(reply)?)
}

async fn perform(
    server: &Arc<Server>,
    caller: &Caller,
    operation: &Operation<'_>,
    query: &Query,
    headers: &HeaderMap,
) -> S3Result {
    let door = server.s3.as_ref().ok_or_else(|| ApiError::internal("the S3 door is off"))?;
    let (principal, bucket) = (&caller.principal, door.bucket.as_str());
    let object = |key, is_head| {
        let is_signed = caller.is_signed;
        object::reply(server, ObjectRequest { principal, key, query, headers, is_head, is_signed })
    };
    match *operation {
        Operation::ListBuckets => {
            let since = SystemTime::now().checked_sub(server.uptime()).unwrap_or(UNIX_EPOCH);
            Ok(of_xml(list_reply::buckets(bucket, since)))
        }
        Operation::HeadBucket => Ok(([(REGION, "us-east-1")], Body::empty()).into_response()),
        Operation::GetBucketLocation => Ok(of_xml(list_reply::location())),
        Operation::ListObjects => list_reply::reply(server, principal, query, false, bucket).await,
        Operation::ListObjectsV2 => list_reply::reply(server, principal, query, true, bucket).await,
        Operation::HeadObject { key } => object(key, true).await,
        Operation::GetObject { key } => object(key, false).await,
    }
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
