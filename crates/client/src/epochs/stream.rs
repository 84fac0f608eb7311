//! Decodes the answer to one lease request into samples, and compares every file with its hash.

use super::lease::LeasedSample;
use crate::{ClientError, body::Responder};
use bytes::{Bytes, BytesMut};
use fletch_api::{
    Problem, SampleHead, SampleRef,
    frames::{Decoder, Frame},
};
use fletch_core::Hash;
use std::time::Duration;
use tokio::time::timeout;

/// The longest sample that is received, in bytes.
const SAMPLE_BYTES_MAX: u64 = 4 << 30;
/// The longest frame that is received, in bytes. A data frame is as long as one read; other frames are small.
const FRAME_BYTES_MAX: u64 = 64 << 20;

/// Why a stream did not bring a whole lease.
pub(super) enum StreamError {
    /// Asking again, from the first sample that is missing, may succeed.
    Retry(ClientError),
    /// A retry cannot succeed.
    Fatal(ClientError),
}

/// Builds a sample from its head and its bytes. Fails if a length or a hash differs from the head.
pub(super) fn checked(
    head: SampleHead,
    bytes: Bytes,
    server: &Responder<'_>,
) -> Result<LeasedSample, ClientError> {
    let SampleHead { entry, sample, ordinal, copy, files, shared } = head;
    let sample = LeasedSample { entry, sample, ordinal, copy, heads: files, bytes, shared };
    let total: u64 = sample.heads.iter().map(|f| f.size).sum();
    let right = total == sample.bytes.len() as u64 && sample.files().all(|(f, b)| Hash::of(&b) == f.hash);
    if right {
        return Ok(sample);
    }
    Err(ClientError::CorruptSample { endpoint: server.0.to_owned(), entry })
}

/// The frames of one answer.
pub(super) struct Stream<'a> {
    pub server: Responder<'a>,
    response: reqwest::Response,
    decoder: Decoder,
    /// The longest wait for the next piece of the answer.
    patience: Duration,
}

impl<'a> Stream<'a> {
    pub(super) fn new(server: Responder<'a>, response: reqwest::Response, patience: Duration) -> Self {
        Stream { server, response, decoder: Decoder::new(FRAME_BYTES_MAX), patience }
    }

    pub(super) fn json<T: serde::de::DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, ClientError> {
        serde_json::from_slice(bytes).map_err(|e| self.server.protocol(format!("unreadable JSON: {e}")))
    }

    /// Returns the next frame, or `None` after the end frame. Skips heartbeats.
    pub(super) async fn frame(&mut self) -> Result<Option<Frame>, ClientError> {
        loop {
            if let Some(frame) = self.decoder.next_frame().map_err(|e| self.server.protocol(e.to_string()))? {
                return Ok(Some(frame));
            }
            if self.decoder.ended() {
                return Ok(None);
            }
            match timeout(self.patience, self.response.chunk()).await {
                Err(_) => {
                    let why = format!("the lease stream sent nothing for {:?}", self.patience);
                    return Err(self.server.unreachable(why));
                }
                Ok(Err(e)) => return Err(self.server.transport(&e)),
                Ok(Ok(Some(more))) => self.decoder.feed(more),
                Ok(Ok(None)) => self.decoder.finish().map_err(|e| self.server.unreachable(e.to_string()))?,
            }
        }
    }

    /// Receives samples in order, until the end of the stream or the first failure.
    ///
    /// Appends samples that came with bytes to `samples`, and samples that came as references to `refs`.
    pub(super) async fn samples(
        &mut self,
        samples: &mut Vec<LeasedSample>,
        refs: &mut Vec<(SampleHead, SampleRef)>,
    ) -> Result<(), StreamError> {
        let mut open: Option<(SampleHead, Vec<Bytes>, u64)> = None;
        loop {
            match self.frame().await.map_err(StreamError::Retry)? {
                None | Some(Frame::End { .. }) => return Ok(()),
                Some(Frame::Sample { head, .. }) => {
                    open = Some((self.json(&head).map_err(StreamError::Fatal)?, Vec::new(), 0));
                }
                Some(Frame::Data { whole, bytes, .. }) => {
                    let Some((_, pieces, len)) = &mut open else {
                        return Err(self.broken("a data frame came before any sample frame"));
                    };
                    *len += bytes.len() as u64;
                    if *len > SAMPLE_BYTES_MAX {
                        return Err(self.broken("a sample is longer than 4 GiB"));
                    }
                    pieces.push(bytes);
                    if whole && let Some((head, pieces, len)) = open.take() {
                        let sample = checked(head, joined(pieces, len), &self.server);
                        samples.push(sample.map_err(StreamError::Retry)?);
                    }
                }
                Some(Frame::Ref { location, .. }) => match open.take() {
                    Some((head, _, _)) => {
                        refs.push((head, self.json(&location).map_err(StreamError::Fatal)?));
                    }
                    None => return Err(self.broken("a ref frame came before any sample frame")),
                },
                Some(Frame::Error { problem, .. }) => {
                    let problem: Problem = self.json(&problem).map_err(StreamError::Fatal)?;
                    let error =
                        ClientError::Problem { problem: Box::new(problem), request: None, retry_after: None };
                    return Err(if error.retryable() {
                        StreamError::Retry(error)
                    } else {
                        StreamError::Fatal(error)
                    });
                }
                Some(Frame::Grant { .. }) => return Err(self.broken("a second grant frame in one stream")),
            }
        }
    }

    pub(super) fn broken(&self, why: &str) -> StreamError {
        StreamError::Fatal(self.server.protocol(why))
    }
}

fn joined(mut pieces: Vec<Bytes>, len: u64) -> Bytes {
    if pieces.len() == 1 {
        return pieces.swap_remove(0);
    }
    let mut all = BytesMut::with_capacity(usize::try_from(len).unwrap_or(0));
    pieces.iter().for_each(|p| all.extend_from_slice(p));
    all.freeze()
}
