//! Reads the parts of a request: path parameters and bodies. Every body is bounded (I6).
//!
//! A handler reads a body after the request was authenticated, and after it found what the path names. The
//! bytes of a body come out of the memory for requests, as they arrive. A client that sends a body too slowly
//! loses the request, so that it keeps nothing from other callers.

use super::error::{ApiError, ApiResult};
use crate::{
    app::server::Server,
    tenancy::connections::{BodyRefusal, Caller, NoMemory, RequestBytes},
};
use axum::{
    BoxError,
    body::{Body, Bytes},
    extract::{
        Path,
        rejection::{PathRejection, QueryRejection},
    },
};
use bytes::BytesMut;
use fletch_api::Code;
use fletch_core::Tenant;
use http_body::Body as _;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use std::{str::FromStr, time::Duration};
use tokio::time::{Instant, timeout_at};

/// How long the client may take before the first byte of a body.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(5);
/// The slowest rate, in bytes a second, at which a body may arrive.
const BYTES_PER_S_MIN: u64 = 64 << 10;
/// The bytes of memory that a body takes at once while it arrives.
const STEP_BYTES: u64 = 64 << 10;

/// One parameter of a route's path.
pub type OnePath = Result<Path<String>, PathRejection>;
/// Two parameters of a route's path.
pub type TwoPaths = Result<Path<(String, String)>, PathRejection>;

impl From<PathRejection> for ApiError {
    fn from(e: PathRejection) -> Self {
        ApiError::bad_request(e.body_text())
    }
}

impl From<QueryRejection> for ApiError {
    fn from(e: QueryRejection) -> Self {
        ApiError::bad_request(e.body_text())
    }
}

/// Parses a parameter of a path or query.
pub fn parse_param<T: FromStr<Err: std::fmt::Display>>(text: &str) -> ApiResult<T> {
    text.parse().map_err(|e: T::Err| ApiError::bad_request(e.to_string()))
}

/// A body, and the memory that it holds. Parse it with [`Received::json`].
#[derive(Debug)]
pub struct Received {
    pub bytes: Bytes,
    memory: RequestBytes,
}

/// Reads and parses a JSON body of at most `limits.body_bytes`.
///
/// # Errors
/// Those of [`read_body`] and [`Received::json`].
pub async fn read_json<T: DeserializeOwned>(server: &Server, tenant: &Tenant, body: Body) -> ApiResult<T> {
    let max = usize::try_from(server.limits.body_bytes).unwrap_or(usize::MAX);
    let hint = "send a smaller request, or raise limits.body_bytes";
    let received = read_body(server, tenant, body, max, hint).await?;
    Ok(received.json(server, tenant)?.0)
}

/// Reads a body of at most `max` bytes. `hint` says what to do about a longer one.
///
/// # Errors
/// [`Code::BodyTooLarge`]; [`Code::BadRequest`] if the client aborts; [`Code::Deadline`] if it is too slow;
/// [`Code::Overloaded`] if the tenant's requests hold too much memory.
pub async fn read_body(
    server: &Server,
    tenant: &Tenant,
    body: Body,
    max: usize,
    hint: &'static str,
) -> ApiResult<Received> {
    let most_of_one = usize::try_from(server.request_memory.most_of_one()).unwrap_or(usize::MAX);
    let refused = |why, error| {
        server.request_memory.count_refused_body(tenant, why);
        error
    };
    // A body without a length is copied when its buffer grows, so both buffers count.
    let declared = body.size_hint().exact().and_then(|n| usize::try_from(n).ok());
    let weight = if declared.is_some() { 1 } else { 3 };
    if let Some(length) = declared
        && (length > max || length > most_of_one)
    {
        return Err(refused(BodyRefusal::TooLarge, too_large(length, max, most_of_one, hint)));
    }
    let caller = Caller::Tenant(tenant.clone());
    let first = declared.map_or(STEP_BYTES, |n| STEP_BYTES.min(n as u64));
    let no_memory = |e| refused(BodyRefusal::Memory, no_memory(e));
    let mut memory = server.request_memory.take(caller, first).map_err(no_memory)?;
    let mut bytes = BytesMut::with_capacity(declared.unwrap_or(0));
    let (mut body, began) = (Limited::new(body, max), Instant::now());
    loop {
        let due = began + FIRST_BYTE_TIMEOUT + Duration::from_secs(bytes.len() as u64 / BYTES_PER_S_MIN);
        let Ok(next) = timeout_at(due, body.frame()).await else {
            let detail = format!("only {} bytes of the body arrived in {:?}", bytes.len(), began.elapsed());
            let hint = "send the body faster: it holds memory that other requests need";
            return Err(refused(BodyRefusal::Slow, ApiError::new(Code::Deadline, detail, hint)));
        };
        match next {
            Some(Ok(frame)) => {
                let data = frame.data_ref().map_or(&[][..], |b| b);
                let length = (bytes.len() + data.len()) as u64;
                if weight * length > most_of_one as u64 {
                    let error = too_large(bytes.len() + data.len(), max, most_of_one, hint);
                    return Err(refused(BodyRefusal::TooLarge, error));
                }
                memory.grow_to(weight * length.next_multiple_of(STEP_BYTES)).map_err(no_memory)?;
                bytes.extend_from_slice(data);
            }
            None => {
                memory.shrink_to(bytes.len() as u64);
                return Ok(Received { bytes: bytes.freeze(), memory });
            }
            Some(Err(e)) if e.is::<LengthLimitError>() => {
                let error =
                    ApiError::new(Code::BodyTooLarge, format!("the body is longer than {max} bytes"), hint);
                return Err(refused(BodyRefusal::TooLarge, error));
            }
            Some(Err(e)) => return Err(aborted(&e)),
        }
    }
}

impl Received {
    /// Parses the body as JSON. Takes the memory of the parsed form first, and returns it with that memory.
    ///
    /// # Errors
    /// [`Code::BadRequest`]; [`Code::BodyTooLarge`] and [`Code::Overloaded`] if the memory does not suffice.
    pub fn json<T: DeserializeOwned>(self, server: &Server, tenant: &Tenant) -> ApiResult<(T, RequestBytes)> {
        let Received { bytes, mut memory } = self;
        let (parsed, most) = (parsed_bytes(&bytes), server.request_memory.most_of_one());
        let whole = bytes.len() as u64 + parsed;
        if whole > most {
            server.request_memory.count_refused_body(tenant, BodyRefusal::TooLarge);
            let detail = format!("the body needs {whole} bytes to be parsed; at most {most} are allowed");
            let hint = "send fewer values, or raise --memory of the server";
            return Err(ApiError::new(Code::BodyTooLarge, detail, hint));
        }
        memory.grow_to(whole).map_err(|e| {
            server.request_memory.count_refused_body(tenant, BodyRefusal::Memory);
            no_memory(e)
        })?;
        let value = serde_json::from_slice(&bytes)
            .map_err(|e| ApiError::bad_request(format!("the body is not valid: {e}")))?;
        drop(bytes);
        memory.shrink_to(parsed);
        Ok((value, memory))
    }
}

/// Returns the most bytes that a JSON text occupies when it is parsed into vectors, strings and structs.
///
/// A vector doubles as it grows. A string has a header of 24 bytes, and the allocator adds 16 to each.
fn parsed_bytes(json: &[u8]) -> u64 {
    let (mut strings, mut values, mut objects) = (0u64, 0u64, 0u64);
    for byte in json {
        match byte {
            b'"' => strings += 1,
            b',' => values += 1,
            b'{' => objects += 1,
            _ => {}
        }
    }
    json.len() as u64 + strings / 2 * 64 + values * 16 + objects * 128
}

fn too_large(length: usize, max: usize, most_of_one: usize, hint: &'static str) -> ApiError {
    let allowed = max.min(most_of_one);
    let hint = if allowed < max { "send a smaller request, or raise --memory of the server" } else { hint };
    let detail = format!("the body has {length} bytes or more; at most {allowed} are allowed");
    ApiError::new(Code::BodyTooLarge, detail, hint)
}

fn no_memory(e: NoMemory) -> ApiError {
    let hint = "wait and send the request again; send fewer bodies at once, or raise --memory of the server";
    ApiError::new(Code::Overloaded, e.to_string(), hint)
}

fn aborted(e: &BoxError) -> ApiError {
    ApiError::bad_request(format!("the body was not received completely: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parsed_form_of_many_small_values_is_counted() {
        let batch = format!("{{\"items\":[{}]}}", vec!["{\"ordinal\":1}"; 100_000].join(","));
        assert!(parsed_bytes(batch.as_bytes()) > 100_000 * 128);
        let keys = format!("[{}]", vec!["\"\""; 1_000].join(","));
        assert!(parsed_bytes(keys.as_bytes()) > 1_000 * 64);
        assert!(parsed_bytes(b"{\"rank\": 0}") < 512);
    }
}
