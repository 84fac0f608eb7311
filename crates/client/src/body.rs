//! Reads the body of an answer, up to a limit, and turns statuses into errors.

use crate::{ClientError, tls::TlsFault};
use bytes::{Bytes, BytesMut};
use fletch_api::{Code, Problem, SPEAKS_TLS, headers};
use http::{StatusCode, header::RETRY_AFTER};
use reqwest::Response;
use std::{io, time::Duration};

/// The longest problem document that is read, in bytes.
const PROBLEM_BYTES_MAX: u64 = 64 << 10;

/// The length that a body must have.
#[derive(Debug, Clone, Copy)]
pub(crate) enum BodyLength {
    /// Exactly this many bytes.
    Exactly(u64),
    /// At most this many bytes.
    AtMost(u64),
}

impl BodyLength {
    fn max(self) -> u64 {
        match self {
            BodyLength::Exactly(n) | BodyLength::AtMost(n) => n,
        }
    }
}

/// The server that answers, by its endpoint. Makes the errors that name it.
pub(crate) struct Responder<'a>(pub &'a str);

impl Responder<'_> {
    /// The error for a request that failed on the way.
    pub fn transport(&self, e: &reqwest::Error) -> ClientError {
        if let Some(fault) = TlsFault::of(self.0, e) {
            return ClientError::Tls { fault };
        }
        // reqwest says "error sending request for url"; the cause is what helps.
        let mut why = e.to_string();
        let mut refused = false;
        let mut source = std::error::Error::source(e);
        while let Some(s) = source {
            why = s.to_string();
            // A socket that does not exist is `NotFound`.
            let kind = s.downcast_ref::<io::Error>().map(io::Error::kind);
            refused |= matches!(kind, Some(io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound));
            source = s.source();
        }
        ClientError::Unreachable { endpoint: self.0.to_owned(), why, refused: refused && e.is_connect() }
    }

    /// The error for an answer that did not come or did not end. Asking again may help.
    pub fn unreachable(&self, why: impl Into<String>) -> ClientError {
        ClientError::Unreachable { endpoint: self.0.to_owned(), why: why.into(), refused: false }
    }

    /// The error for an answer that breaks the API's contract.
    pub fn protocol(&self, why: impl Into<String>) -> ClientError {
        ClientError::Protocol { endpoint: self.0.to_owned(), why: why.into() }
    }

    /// Returns the whole body. A body that ends early is [`ClientError::Unreachable`]: asking again helps.
    pub async fn body(&self, mut response: Response, length: BodyLength) -> Result<Bytes, ClientError> {
        let announced = response.content_length();
        if let Some(n) = announced
            && (n > length.max() || matches!(length, BodyLength::Exactly(want) if n != want))
        {
            return Err(self.protocol(format!("the body has {n} bytes, expected {length:?}")));
        }
        let reserve = announced.unwrap_or(0).max(if let BodyLength::Exactly(n) = length { n } else { 0 });
        // Copied in any case: a piece shares its memory with all that the connection had read at once, up to
        // some hundred kilobytes, and who keeps a short body would keep all of it.
        let mut out = BytesMut::with_capacity(usize::try_from(reserve).unwrap_or(0));
        while let Some(piece) = response.chunk().await.map_err(|e| self.transport(&e))? {
            if (out.len() + piece.len()) as u64 > length.max() {
                return Err(self.protocol(format!("the body is longer than expected, {length:?}")));
            }
            out.extend_from_slice(&piece);
        }
        let bytes = out.freeze();
        match length {
            BodyLength::Exactly(n) if (bytes.len() as u64) < n => {
                let why = format!("the answer ended after {} of {n} bytes", bytes.len());
                Err(self.unreachable(why))
            }
            _ => Ok(bytes),
        }
    }

    /// Returns the answer if its status is one of `want`, and its problem as an error otherwise.
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
        let id = response.headers().get(headers::REQUEST_ID).and_then(|id| id.to_str().ok());
        let request = id.filter(|_| status.is_server_error()).map(str::to_owned);
        let body = self.body(response, BodyLength::AtMost(PROBLEM_BYTES_MAX)).await.unwrap_or_default();
        if status == StatusCode::BAD_REQUEST && body.starts_with(SPEAKS_TLS.as_bytes()) {
            return Err(ClientError::Tls { fault: TlsFault::wanted(self.0) });
        }
        let problem = serde_json::from_slice(&body).unwrap_or_else(|_| without_document(status));
        Err(ClientError::Problem { problem: Box::new(problem), request, retry_after })
    }
}

/// The problem for an error answer without a problem document, such as a proxy's.
fn without_document(status: StatusCode) -> Problem {
    let retryable = matches!(status.as_u16(), 429 | 502..=504);
    Problem {
        type_uri: "about:blank".into(),
        title: format!("status {status}"),
        status: status.as_u16(),
        detail: "the error answer has no problem document, so another program sent it".into(),
        code: Code::Unknown,
        hint: "check the server's URL, and whether a proxy stands between this client and fletch-server"
            .into(),
        retryable,
    }
}
