//! Entrances for the fuzz targets of `tests/fuzz`: parsers of foreign bytes that no public function reaches.

use crate::{auth::Auth, http::range, jobs::Record, state};
use axum::http::HeaderMap;
use std::{ops::Range, path::Path};

/// Replays the log of registrations. Returns each registration as text, and the length of the valid prefix.
///
/// # Errors
/// The text of the fault.
pub fn registrations(log: &[u8]) -> Result<(Vec<String>, usize), String> {
    let (table, len) = state::replay(Path::new("registrations.log"), log).map_err(|e| e.to_string())?;
    Ok((table.values().map(|r| format!("{:?}", **r)).collect(), len))
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

/// Returns whether the reply to a request is 304.
#[must_use]
pub fn not_modified(request: &HeaderMap, etag: &str) -> bool {
    range::not_modified(request, etag).is_some()
}

/// Returns the tenant of an `Authorization` header under a tokens file; `None` for no known token.
///
/// # Errors
/// The text of the faults of the file.
pub fn principal(tokens: &Path, header: &[u8]) -> Result<Option<String>, String> {
    let auth = Auth::open(Some(tokens)).map_err(|e| e.to_string())?;
    Ok(auth.authenticate(Some(header)).ok().map(|p| p.tenant.to_string()))
}
