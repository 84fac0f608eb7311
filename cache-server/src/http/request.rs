//! Reads the parts of a request: path parameters and bodies. Every body is bounded (I6).
//!
//! Long bodies (plans, epoch states) need a permit, because the server holds few of them at once. A client
//! that sends its body too slowly loses the permit, so that it blocks no other client.

use super::error::{ApiError, ApiResult};
use crate::server::Server;
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
use http_body::Body as _;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use std::{str::FromStr, time::Duration};
use tokio::{
    sync::SemaphorePermit,
    time::{Instant, timeout_at},
};

/// A body whose declared length is at most this many bytes needs no permit while it arrives.
const SHORT_BYTES_MAX: u64 = 1 << 20;
/// How long the client of a body with a permit may take before its first byte.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(5);
/// The slowest rate, in bytes a second, at which a body with a permit may arrive.
const BYTES_PER_S_MIN: u64 = 256 << 10;

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

/// Reads a JSON body of at most `limits.body_bytes`.
pub async fn read_json<T: DeserializeOwned>(server: &Server, body: Body) -> ApiResult<T> {
    let max = usize::try_from(server.limits.body_bytes).unwrap_or(usize::MAX);
    let hint = "send a smaller request, or raise limits.body_bytes";
    let bytes = Limited::new(body, max).collect().await.map_err(|e| body_error(&e, max, hint))?;
    parse_json(&bytes.to_bytes())
}

/// Parses JSON bytes.
pub fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> ApiResult<T> {
    serde_json::from_slice(bytes).map_err(|e| ApiError::bad_request(format!("the body is not valid: {e}")))
}

/// Maps the failure of a body of at most `max` bytes. `hint` is for a body that is longer.
fn body_error(e: &BoxError, max: usize, hint: &'static str) -> ApiError {
    if e.is::<LengthLimitError>() {
        return ApiError::new(Code::BodyTooLarge, format!("the body is longer than {max} bytes"), hint);
    }
    ApiError::bad_request(format!("the body was not received completely: {e}"))
}

/// Reads a body of at most `max` bytes. Returns it with a permit if it is longer than [`SHORT_BYTES_MAX`].
///
/// The caller holds the permit as long as it holds the bytes. `hint` says what to do about a body that is
/// longer than `max`.
///
/// # Errors
/// [`Code::BodyTooLarge`]; [`Code::BadRequest`] if the client aborts; [`Code::Deadline`] if it is too slow.
pub async fn read_long<'a>(
    server: &'a Server,
    body: Body,
    max: usize,
    hint: &'static str,
) -> ApiResult<(Bytes, Option<SemaphorePermit<'a>>)> {
    let short = body.size_hint().upper().is_some_and(|n| n <= SHORT_BYTES_MAX);
    // The semaphore is never closed, so that `acquire` cannot fail.
    let permit = if short { None } else { server.long_body_permits.acquire().await.ok() };
    let (mut body, mut bytes, began) = (Limited::new(body, max), BytesMut::new(), Instant::now());
    loop {
        let due = began + FIRST_BYTE_TIMEOUT + Duration::from_secs(bytes.len() as u64 / BYTES_PER_S_MIN);
        let next = match timeout_at(due, body.frame()).await {
            Ok(next) => next,
            // A short body blocks no other client, and the request has a deadline of its own.
            Err(_) if permit.is_none() => body.frame().await,
            Err(_) => {
                let detail =
                    format!("only {} bytes of the body arrived in {:?}", bytes.len(), began.elapsed());
                let hint = "send the body faster: other clients wait for the permit that it holds";
                return Err(ApiError::new(Code::Deadline, detail, hint));
            }
        };
        match next {
            Some(Ok(frame)) => bytes.extend_from_slice(frame.data_ref().map_or(&[], |b| b)),
            None => {
                let permit = permit.filter(|_| bytes.len() as u64 > SHORT_BYTES_MAX);
                return Ok((bytes.freeze(), permit));
            }
            Some(Err(e)) => return Err(body_error(&e, max, hint)),
        }
    }
}
