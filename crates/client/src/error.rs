//! What can go wrong when a server is asked.

use fletch_api::{Code, Problem};
use fletch_core::{Kind, Mismatch};
use std::time::Duration;

/// A call failed. Cheap to clone is not promised; wrap it in an `Arc` to share it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ClientError {
    /// No answer: refused, reset, cut off, or past the deadline.
    #[error("{endpoint} does not answer: {why}; check that fletch-server runs there")]
    Unreachable {
        /// Who was asked.
        endpoint: String,
        /// What happened on the way.
        why: String,
    },
    /// The server answered with a problem.
    #[error("{problem}")]
    Problem {
        /// The problem as it came, `code` and `hint` included.
        problem: Box<Problem>,
        /// How long the server asked to wait.
        retry_after: Option<Duration>,
    },
    /// The server's answer breaks the contract (another program, or a defect).
    #[error("{endpoint} answered something else than asked: {why}")]
    Protocol {
        /// Who was asked.
        endpoint: String,
        /// What is wrong with the answer.
        why: String,
    },
    /// The server does not speak a version this build speaks.
    #[error("{endpoint} speaks {what} {theirs:?}, this build speaks {ours}; use builds of one release")]
    Version {
        /// Who was asked.
        endpoint: String,
        /// Which contract.
        what: &'static str,
        /// The majors it speaks.
        theirs: Vec<u32>,
        /// The major this build speaks.
        ours: u32,
    },
    /// The bytes of a chunk are not the ones asked for.
    #[error("wrong bytes from {endpoint}: {mismatch}")]
    Corrupt {
        /// Who sent them.
        endpoint: String,
        /// What they are.
        mismatch: Mismatch,
    },
    /// The server is gone, and the origin that was read instead failed, too.
    #[error("{server}: {why}")]
    Origin {
        /// What is with the server.
        server: String,
        /// Who can act on the origin's failure.
        kind: Kind,
        /// What the origin said.
        why: String,
    },
    /// A client cannot be made of this configuration.
    #[error("{0}")]
    Config(String),
}

impl ClientError {
    /// Who can act on it.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            ClientError::Unreachable { .. } => Kind::Unavailable,
            ClientError::Problem { problem, .. } => match problem.code {
                // A newer server's code: the status says as much as this build can know.
                Code::Unknown => kind_of_status(problem),
                code => code.kind(),
            },
            ClientError::Protocol { .. } | ClientError::Corrupt { .. } => Kind::Corrupt,
            ClientError::Origin { kind, .. } => *kind,
            ClientError::Version { .. } | ClientError::Config(_) => Kind::Invalid,
        }
    }

    /// Whether the server could not be reached at all.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(self, ClientError::Unreachable { .. })
    }

    /// Whether the server refused who asks.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        matches!(self, ClientError::Problem { problem, .. } if matches!(problem.status, 401 | 403))
    }

    pub(crate) fn is_unauthorized(&self) -> bool {
        matches!(self, ClientError::Problem { problem, .. } if problem.status == 401)
    }

    /// The server's code, if it sent one.
    #[must_use]
    pub fn code(&self) -> Option<Code> {
        match self {
            ClientError::Problem { problem, .. } => Some(problem.code),
            _ => None,
        }
    }

    /// What a person can do about it, if the server said so.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        match self {
            ClientError::Problem { problem, .. } if !problem.hint.is_empty() => Some(&problem.hint),
            _ => None,
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
        // That of a proxy whose server is away may pass.
        502 if !problem.retryable => Kind::Corrupt,
        502..=504 => Kind::Unavailable,
        _ => Kind::Internal,
    }
}
