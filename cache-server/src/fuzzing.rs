//! Entrances for the fuzz targets of `tests/fuzz`: parsers of foreign bytes that no public function reaches.

use crate::{
    http::{credentials, range},
    s3::{
        list_reply,
        query::{Query, decoded},
        signature::{Claim, SignedRequest},
        token::Continuation,
    },
    tenancy::{
        auth::{Auth, Peer, S3Secret, SocketAdmins},
        state,
    },
    training::jobs::Record,
};
use axum::http::{HeaderMap, Method};
use fletch_origin::Given;
use std::{ops::Range, path::Path};

/// Replays the log of registrations. Returns each registration as text, and the length of the valid prefix.
///
/// # Errors
/// The text of the fault.
pub fn registrations(log: &[u8]) -> Result<(Vec<String>, usize), String> {
    let (table, len) = state::replay(Path::new("registrations.log"), log).map_err(|e| e.to_string())?;
    Ok((table.values().map(|r| format!("{:?}", **r)).collect(), len))
}

/// Returns the origin that a user hands over with this body of `PUT /v1/origins/credentials`.
///
/// # Errors
/// The text of the fault.
pub fn given_credentials(body: &[u8]) -> Result<Given, String> {
    credentials::Asked::read(body)?.given().map_err(|e| e.to_string())
}

/// Reads the record of a declared job. Returns the record as the server writes it.
///
/// # Errors
/// The text of the fault.
pub fn job_record(json: &[u8]) -> Result<Vec<u8>, String> {
    let record: Record = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    let written = serde_json::to_vec(&record).map_err(|e| e.to_string())?;
    let id = record.id();
    let summary = record.known();
    if summary.id() == id { Ok(written) } else { Err("the summary has another id".to_owned()) }
}

/// Returns the range that a request gets of `len` bytes; `None` for all of them.
///
/// # Errors
/// The HTTP status of the refusal.
pub fn requested_range(request: &HeaderMap, len: u64, etag: &str) -> Result<Option<Range<u64>>, u16> {
    match range::requested_range(request, len, etag) {
        Ok(range::Requested::Whole) => Ok(None),
        Ok(range::Requested::Part(part)) => Ok(Some(part)),
        Err(error) => Err(error.code().status()),
    }
}

/// Returns the status that the preconditions of a request demand; `None` if the request goes on.
#[must_use]
pub fn precondition(request: &HeaderMap, etag: &str) -> Option<u16> {
    range::precondition(request, etag).map(|reply| reply.status().as_u16())
}

/// Returns the tenant of an `Authorization` header under a tokens file; `None` for no known token.
///
/// # Errors
/// The text of the faults of the file.
pub fn principal(tokens: &Path, header: &[u8]) -> Result<Option<String>, String> {
    let auth = Auth::open(Some(tokens), SocketAdmins::default()).map_err(|e| e.to_string())?;
    Ok(auth.authenticate(Some(header), Peer::Tcp).ok().map(|p| p.tenant.to_string()))
}

/// Returns the signed form of the query of an S3 request; `None` for one that is not UTF-8.
#[must_use]
pub fn s3_query(query: &str) -> Option<String> {
    Some(Query::read(query).ok()?.canonical("X-Amz-Signature"))
}

/// Reads a continuation token of the S3 door, and returns it as the door writes it.
#[must_use]
pub fn s3_token(token: &str) -> Option<String> {
    Some(Continuation::read(token)?.to_token())
}

/// Returns whether the query of an S3 request is that of a listing.
#[must_use]
pub fn s3_listing(query: &str) -> bool {
    Query::read(query).is_ok_and(|query| [false, true].iter().all(|v2| list_reply::is_valid(&query, *v2)))
}

/// Returns what the signature of an S3 request covers, if the request is signed by this secret.
#[must_use]
pub fn s3_signed(method: &str, target: &str, headers: &HeaderMap, secret: &str) -> Option<String> {
    let method: Method = method.parse().ok()?;
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let (path, query) = (decoded(path).ok()?, Query::read(query).ok()?);
    let request = SignedRequest { method: &method, path: &path, query: &query, headers };
    let claim = Claim::read(&request).ok()??;
    claim.is_of(&request, &S3Secret::of_text(secret)).then(|| claim.covered(&request))?
}
