//! The frames of one lease's answer, as samples that were checked.

use super::reader::{LeasedSample, Short};
use crate::{ClientError, body::From as Answerer};
use bytes::{Bytes, BytesMut};
use fletch_api::{
    Problem, SampleHead, SampleRef,
    frames::{Decoder, Frame},
};
use fletch_core::Hash;
use std::time::Duration;
use tokio::time::timeout;

/// The largest sample that is received.
const SAMPLE_BYTES_MAX: u64 = 4 << 30;
/// No frame is longer: data frames have the length of a read, others are small.
const FRAME_BYTES_MAX: u64 = 64 << 20;

/// A sample whose bytes are what its head says.
pub(super) fn checked(
    head: SampleHead,
    bytes: Bytes,
    from: &Answerer<'_>,
) -> Result<LeasedSample, ClientError> {
    let SampleHead { entry, sample, ordinal, copy, files } = head;
    let sample = LeasedSample { entry, sample, ordinal, copy, heads: files, bytes };
    let total: u64 = sample.heads.iter().map(|f| f.size).sum();
    let right = total == sample.bytes.len() as u64 && sample.files().all(|(f, b)| Hash::of(&b) == f.hash);
    if right { Ok(sample) } else { Err(from.gone(format!("the bytes of entry {entry} came damaged"))) }
}

/// The frames of one answer.
pub(super) struct Stream<'a> {
    /// Who answers.
    pub from: Answerer<'a>,
    response: reqwest::Response,
    decoder: Decoder,
    patience: Duration,
}

impl<'a> Stream<'a> {
    pub(super) fn new(from: Answerer<'a>, response: reqwest::Response, patience: Duration) -> Self {
        Stream { from, response, decoder: Decoder::new(FRAME_BYTES_MAX), patience }
    }

    pub(super) fn json<T: serde::de::DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, ClientError> {
        serde_json::from_slice(bytes).map_err(|e| self.from.protocol(format!("unreadable JSON: {e}")))
    }

    /// The next frame; `None` at the end. Signs of life are waited through.
    pub(super) async fn frame(&mut self) -> Result<Option<Frame>, ClientError> {
        loop {
            if let Some(frame) = self.decoder.next_frame().map_err(|e| self.from.protocol(e.to_string()))? {
                return Ok(Some(frame));
            }
            if self.decoder.ended() {
                return Ok(None);
            }
            match timeout(self.patience, self.response.chunk()).await {
                Err(_) => return Err(self.from.gone("the lease's stream is silent")),
                Ok(Err(e)) => return Err(self.from.unreachable(&e)),
                Ok(Ok(Some(more))) => self.decoder.feed(more),
                Ok(Ok(None)) => self.decoder.finish().map_err(|e| self.from.gone(e.to_string()))?,
            }
        }
    }

    /// Samples, in order, until the end or the first that failed.
    pub(super) async fn samples(
        &mut self,
        samples: &mut Vec<LeasedSample>,
        places: &mut Vec<(SampleHead, SampleRef)>,
    ) -> Result<(), Short> {
        let mut open: Option<(SampleHead, Vec<Bytes>, u64)> = None;
        loop {
            match self.frame().await.map_err(Short::Again)? {
                None | Some(Frame::End { .. }) => return Ok(()),
                Some(Frame::Sample { head, .. }) => {
                    open = Some((self.json(&head).map_err(Short::Failed)?, Vec::new(), 0));
                }
                Some(Frame::Data { whole, bytes, .. }) => {
                    let Some((_, pieces, len)) = &mut open else {
                        return Err(Short::Failed(self.from.protocol("bytes of no sample")));
                    };
                    *len += bytes.len() as u64;
                    if *len > SAMPLE_BYTES_MAX {
                        return Err(Short::Failed(self.from.protocol("a sample is longer than 4 GiB")));
                    }
                    pieces.push(bytes);
                    if whole && let Some((head, pieces, len)) = open.take() {
                        samples.push(checked(head, joined(pieces, len), &self.from).map_err(Short::Again)?);
                    }
                }
                Some(Frame::Ref { place, .. }) => match open.take() {
                    Some((head, _, _)) => places.push((head, self.json(&place).map_err(Short::Failed)?)),
                    None => return Err(Short::Failed(self.from.protocol("the place of no sample"))),
                },
                Some(Frame::Error { problem, .. }) => {
                    let problem: Problem = self.json(&problem).map_err(Short::Failed)?;
                    let error = ClientError::Problem { problem: Box::new(problem), retry_after: None };
                    return Err(if error.retryable() { Short::Again(error) } else { Short::Failed(error) });
                }
                Some(Frame::Grant { .. }) => {
                    return Err(Short::Failed(self.from.protocol("a second grant in one stream")));
                }
            }
        }
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
