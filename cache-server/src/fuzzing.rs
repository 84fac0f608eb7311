//! Entrances for the fuzz targets of `tests/fuzz`: parsers of foreign bytes that no public function reaches.

use crate::{
    http::{credentials, range},
    tenancy::{
        auth::{Auth, Peer, SocketAdmins},
        state,
    },
    training::jobs::Record,
};
use axum::http::HeaderMap;
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
