//! Answers into bytes, with a bound; statuses into errors.

use crate::ClientError;
use bytes::{Bytes, BytesMut};
use fletch_api::{Code, Problem};
use http::{StatusCode, header::RETRY_AFTER};
use reqwest::Response;
use std::time::Duration;

/// No problem document is longer.
const PROBLEM_BYTES_MAX: u64 = 64 << 10;

/// How long a body may be.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Length {
    /// Exactly this many bytes.
    Exactly(u64),
    /// At most this many.
    AtMost(u64),
}

impl Length {
    fn max(self) -> u64 {
        match self {
            Length::Exactly(n) | Length::AtMost(n) => n,
        }
    }
}

/// Who answers, for messages.
pub(crate) struct From<'a>(pub &'a str);

impl From<'_> {
    pub fn unreachable(&self, e: &reqwest::Error) -> ClientError {
        // reqwest says "error sending request for url"; the cause is what helps.
        let mut why = e.to_string();
        let mut source = std::error::Error::source(e);
        while let Some(s) = source {
            why = s.to_string();
            source = s.source();
        }
        self.gone(why)
    }

    pub fn gone(&self, why: impl Into<String>) -> ClientError {
        ClientError::Unreachable { endpoint: self.0.to_owned(), why: why.into() }
    }

    pub fn protocol(&self, why: impl Into<String>) -> ClientError {
        ClientError::Protocol { endpoint: self.0.to_owned(), why: why.into() }
    }

    /// The whole body. A body that stops early is [`ClientError::Unreachable`]: asking again helps.
    pub async fn body(&self, mut response: Response, length: Length) -> Result<Bytes, ClientError> {
        let told = response.content_length();
        if let Some(n) = told
            && (n > length.max() || matches!(length, Length::Exactly(want) if n != want))
        {
            return Err(self.protocol(format!("a body of {n} bytes, expected {length:?}")));
        }
        let reserve = told.unwrap_or(0).max(if let Length::Exactly(n) = length { n } else { 0 });
        let mut out: Option<BytesMut> = None;
        let mut first = Bytes::new();
        while let Some(piece) = response.chunk().await.map_err(|e| self.unreachable(&e))? {
            let have = out.as_ref().map_or(first.len(), BytesMut::len);
            if (have + piece.len()) as u64 > length.max() {
                return Err(self.protocol(format!("a body longer than {length:?}")));
            }
            match &mut out {
                Some(buf) => buf.extend_from_slice(&piece),
                None if first.is_empty() => first = piece,
                None => {
                    let mut buf = BytesMut::with_capacity(usize::try_from(reserve).unwrap_or(0));
                    buf.extend_from_slice(&first);
                    buf.extend_from_slice(&piece);
                    first = Bytes::new();
                    out = Some(buf);
                }
            }
        }
        let bytes = out.map_or(first, BytesMut::freeze);
        match length {
            Length::Exactly(n) if (bytes.len() as u64) < n => {
                Err(self.gone(format!("the answer stopped after {} of {n} bytes", bytes.len())))
            }
            _ => Ok(bytes),
        }
    }

    /// The answer itself when its status is one of `want`, else its problem.
    pub async fn accept(&self, response: Response, want: &[StatusCode]) -> Result<Response, ClientError> {
        let status = response.status();
        if want.contains(&status) {
            return Ok(response);
        }
        let retry_after = response
            .headers()
            .get(RETRY_AFTER)
            .and_then(|v| v.to_str().ok()?.trim().parse().ok())
            .map(Duration::from_secs);
        if status.is_success() || status.is_redirection() {
            return Err(self.protocol(format!("status {status}, expected {want:?}")));
        }
        let body = self.body(response, Length::AtMost(PROBLEM_BYTES_MAX)).await.unwrap_or_default();
        let problem = serde_json::from_slice(&body).unwrap_or_else(|_| foreign(status));
        Err(ClientError::Problem { problem: Box::new(problem), retry_after })
    }
}

/// A problem for an answer that carries none (a proxy's, say, whose server is not there).
fn foreign(status: StatusCode) -> Problem {
    let retryable = matches!(status.as_u16(), 429 | 502..=504);
    Problem {
        type_uri: "about:blank".into(),
        title: format!("status {status}"),
        status: status.as_u16(),
        detail: "the answer carries no problem document".into(),
        code: Code::Unknown,
        hint: "is something between this client and fletch-server?".into(),
        retryable,
    }
}
