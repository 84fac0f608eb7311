//! Long bodies: plans and states. Few are held at once, and one that does not come keeps no other from coming.

use super::{
    not_whole,
    problem::{Answer, Fault},
};
use crate::server::Server;
use axum::body::{Body, Bytes};
use bytes::BytesMut;
use fletch_api::Code;
use http_body::Body as _;
use http_body_util::{BodyExt as _, Limited};
use std::time::Duration;
use tokio::{
    sync::SemaphorePermit,
    time::{Instant, timeout_at},
};

/// Whose body is said to be at most so long needs no turn to send it.
const SHORT_BYTES: u64 = 1 << 20;
/// How long a body with a turn may take to begin, ...
const PATIENCE: Duration = Duration::from_secs(5);
/// ... and how many bytes a second it brings from then on, or it is given up.
const BYTES_PER_S: u64 = 256 << 10;

/// A body of at most `max` bytes, and the turn to hold it if it is long; `hint` says what to do about one that is longer.
///
/// # Errors
/// It is too long, was cut off, or does not come.
pub async fn read<'a>(
    server: &'a Server,
    body: Body,
    max: usize,
    hint: &'static str,
) -> Answer<(Bytes, Option<SemaphorePermit<'a>>)> {
    let short = body.size_hint().upper().is_some_and(|n| n <= SHORT_BYTES);
    // Turns are never closed.
    let turn = if short { None } else { server.plans.acquire().await.ok() };
    let (mut body, mut bytes, began) = (Limited::new(body, max), BytesMut::new(), Instant::now());
    loop {
        let due = began + PATIENCE + Duration::from_secs(bytes.len() as u64 / BYTES_PER_S);
        let next = match timeout_at(due, body.frame()).await {
            Ok(next) => next,
            // Nobody waits for this one, and the request has its own deadline.
            Err(_) if turn.is_none() => body.frame().await,
            Err(_) => {
                let detail = format!("{} bytes of the body came in {:?}", bytes.len(), began.elapsed());
                return Err(Fault::new(Code::Deadline, detail, "others wait for their turn: send it faster"));
            }
        };
        match next {
            Some(Ok(frame)) => bytes.extend_from_slice(frame.data_ref().map_or(&[], |b| b)),
            None => {
                let turn = turn.filter(|_| bytes.len() as u64 > SHORT_BYTES);
                return Ok((bytes.freeze(), turn));
            }
            Some(Err(e)) => return Err(not_whole(&e, max, hint)),
        }
    }
}
