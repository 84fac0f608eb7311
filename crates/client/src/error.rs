//! The errors of calls to a server.

use crate::tls::TlsFault;
use fletch_api::{Code, Problem};
use fletch_core::{Kind, Mismatch};
use std::time::Duration;

/// What to do about a server that does not answer.
const CHECK_IT_RUNS: &str = "check that fletch-server runs there";
/// What to do about a server of another release.
const ONE_RELEASE: &str = "use builds of one release";

/// The reason why a call failed. Wrap it in an `Arc` to share it: a clone copies its texts.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ClientError {
    /// The server did not answer: the connection was refused, reset or cut off, or the deadline passed.
    #[error("{endpoint} does not answer: {why}; {}", CHECK_IT_RUNS)]
    Unreachable {
        /// The server that was asked.
        endpoint: String,
        /// How the request failed.
        why: String,
        /// Whether nothing listens at the address: the connection was refused, or the socket does not exist.
        refused: bool,
    },
    /// No TLS connection comes about, for a reason that somebody must remove.
    #[error("{fault}; {}", fault.advice())]
    Tls {
        /// The server and the reason.
        fault: TlsFault,
    },
    /// The server answered with a problem.
    #[error("{problem}{}", of_request(request.as_deref()))]
    Problem {
        /// The server's problem document, unchanged.
        problem: Box<Problem>,
        /// The id of the request, by which the server's log can be searched. Only with a status from 500 on.
        request: Option<String>,
        /// How long the server asked the client to wait.
        retry_after: Option<Duration>,
    },
    /// The answer breaks the API's contract: another program answered, or the server has a defect.
    #[error("{endpoint} sent an answer that does not fit the request: {why}")]
    Protocol {
        /// The server that was asked.
        endpoint: String,
        /// How the answer breaks the contract.
        why: String,
    },
    /// The server supports no version that this build supports.
    #[error("{endpoint} supports {what} {theirs:?}, this build supports {ours}; {}", ONE_RELEASE)]
    Version {
        /// The server that was asked.
        endpoint: String,
        /// The contract or format whose versions differ.
        what: &'static str,
        /// The major versions that the server supports.
        theirs: Vec<u32>,
        /// The major version that this build supports.
        ours: u32,
    },
    /// The bytes of a chunk do not have the hash that was asked for.
    #[error("wrong bytes from {endpoint}: {mismatch}")]
    Corrupt {
        /// The server that sent them.
        endpoint: String,
        /// The expected hash and the hash of the bytes.
        mismatch: Mismatch,
    },
    /// The bytes of a leased sample do not have the length or the hashes that the lease names.
    #[error(
        "wrong bytes from {endpoint}: plan entry {entry} of the lease does not match its hash or length; \
         nothing of it was delivered, check the network and the server's disks"
    )]
    CorruptSample {
        /// The server that sent them.
        endpoint: String,
        /// The plan entry of the sample.
        entry: u32,
    },
    /// The lease expired before it was received whole. The server grants its entries again.
    #[error(
        "a lease of {endpoint} expired while it was received: this worker reads more slowly than the lease \
         lives; take fewer samples in a lease or raise its time to live"
    )]
    LeaseExpired {
        /// The server that granted the lease.
        endpoint: String,
    },
    /// The server does not answer, and the read from the origin failed too.
    #[error("{server}: {why}")]
    Origin {
        /// The state of the server, as a text.
        server: String,
        /// Who can act on the failure of the origin.
        kind: Kind,
        /// The error of the origin.
        why: String,
    },
    /// The configuration or an argument is not valid.
    #[error("{0}")]
    Config(String),
}

fn of_request(id: Option<&str>) -> String {
    match id {
        Some(id) => format!(" (request {id})"),
        None => String::new(),
    }
}

impl ClientError {
    /// Returns who can act on the error.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            ClientError::Unreachable { .. } | ClientError::Tls { .. } | ClientError::LeaseExpired { .. } => {
                Kind::Unavailable
            }
            ClientError::Problem { problem, .. } => match problem.code {
                // The code of a newer server: only the status is known to this build.
                Code::Unknown => kind_of_status(problem),
                code => code.kind(),
            },
            ClientError::Protocol { .. }
            | ClientError::Corrupt { .. }
            | ClientError::CorruptSample { .. } => Kind::Corrupt,
            ClientError::Origin { kind, .. } => *kind,
            ClientError::Version { .. } | ClientError::Config(_) => Kind::Invalid,
        }
    }

    /// Returns whether the server did not answer.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(self, ClientError::Unreachable { .. } | ClientError::Tls { .. })
    }

    /// Returns whether TLS is at fault.
    #[must_use]
    pub fn is_tls(&self) -> bool {
        matches!(self, ClientError::Tls { .. })
    }

    /// Returns whether the server rejected the caller's token or role.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        matches!(self, ClientError::Problem { problem, .. } if matches!(problem.status, 401 | 403))
    }

    pub(crate) fn is_unauthorized(&self) -> bool {
        matches!(self, ClientError::Problem { problem, .. } if problem.status == 401)
    }

    /// Returns the code of the server's problem, if it sent one.
    #[must_use]
    pub fn code(&self) -> Option<Code> {
        match self {
            ClientError::Problem { problem, .. } => Some(problem.code),
            _ => None,
        }
    }

    /// Returns the server's hint, if it sent one.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        match self {
            ClientError::Problem { problem, .. } if !problem.hint.is_empty() => Some(&problem.hint),
            _ => None,
        }
    }

    /// Returns what happened and what to do next, apart: for a caller that prints the two on lines of their
    /// own. The text of the error has both.
    #[must_use]
    pub fn parts(&self) -> (String, Option<&str>) {
        let advice = match self {
            ClientError::Problem { problem, .. } => return (problem.summary(), self.hint()),
            ClientError::Unreachable { .. } => CHECK_IT_RUNS,
            ClientError::Tls { fault } => fault.advice(),
            ClientError::Version { .. } => ONE_RELEASE,
            _ => return (self.to_string(), None),
        };
        let text = self.to_string();
        (text.strip_suffix(&format!("; {advice}")).unwrap_or(&text).to_owned(), Some(advice))
    }

    /// Returns whether nothing listens at the server's address.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        matches!(self, ClientError::Unreachable { refused: true, .. })
    }

    /// Returns the error of a call for which `others` more servers were asked.
    pub(crate) fn and_others(self, others: usize) -> Self {
        match self {
            ClientError::Unreachable { endpoint, why, refused } if others > 0 => {
                let servers = if others == 1 { "server" } else { "servers" };
                let why = format!("{why}, and {others} other {servers} did not answer either");
                ClientError::Unreachable { endpoint, why, refused }
            }
            error => error,
        }
    }

    /// Returns the problem with the name of the server that sent it.
    pub(crate) fn said_by(self, server: &str) -> Self {
        match self {
            ClientError::Problem { mut problem, request, retry_after } => {
                problem.detail = format!("{server}: {}", problem.detail);
                ClientError::Problem { problem, request, retry_after }
            }
            error => error,
        }
    }

    pub(crate) fn retryable(&self) -> bool {
        match self {
            ClientError::Problem { problem, .. } => problem.retryable || self.kind().retryable(),
            e => e.kind().retryable(),
        }
    }

    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            ClientError::Problem { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}

fn kind_of_status(problem: &Problem) -> Kind {
    match problem.status {
        404 | 410 => Kind::NotFound,
        429 => Kind::Overloaded,
        400..=499 => Kind::Invalid,
        // A proxy whose server is away answers 502, which may pass.
        502 if !problem.retryable => Kind::Corrupt,
        502..=504 => Kind::Unavailable,
        _ => Kind::Internal,
    }
}
