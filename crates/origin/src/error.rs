//! The error of this crate.

use fletch_core::Kind;
use std::time::Duration;

/// Why a call to an origin failed. `what` is the URI of the object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OriginError {
    /// The object does not exist.
    #[error("{what}: not found")]
    NotFound {
        /// The object.
        what: String,
    },
    /// The object exists already, and the call was to create it.
    #[error("{what}: the object exists already")]
    AlreadyExists {
        /// The object.
        what: String,
    },
    /// The object differs from its pin. Its old bytes are gone, so retrying does not help.
    #[error("{what}: the object changed after it was indexed ({why}); index the dataset again")]
    Changed {
        /// The object.
        what: String,
        /// How the object differs from its pin.
        why: String,
    },
    /// The origin rejected the credentials or permissions.
    #[error("{what}: access denied: {why}")]
    Denied {
        /// The object.
        what: String,
        /// The origin's reason.
        why: String,
    },
    /// The credentials that a user handed over have expired. No request was sent.
    #[error(
        "{what}: the credentials for this origin expired {ago:?} ago; run `fletch mount` again with new \
         ones, which hands them to the running server"
    )]
    Expired {
        /// The object.
        what: String,
        /// How long ago they expired.
        ago: Duration,
    },
    /// The store has no such bucket or container.
    #[error(
        "{what}: the store has no such bucket or container ({why}); check the name, the endpoint and the \
         account"
    )]
    NoBucket {
        /// The object or the listing.
        what: String,
        /// The store's status and code.
        why: String,
    },
    /// The request, URI, path or configuration is not valid.
    #[error("{what}: {why}")]
    Invalid {
        /// The URI, path or table that is not valid.
        what: String,
        /// The reason.
        why: String,
    },
    /// The origin asks clients to slow down.
    #[error(
        "{what}: the origin asks clients to slow down; retry later, or set requests_per_second in the \
         settings of this origin"
    )]
    Throttled {
        /// The object.
        what: String,
        /// How long the origin asked clients to wait.
        retry_after: Option<Duration>,
    },
    /// The origin cannot be reached, failed, or did not answer in time.
    #[error("{what}: the origin is unavailable: {why}")]
    Unavailable {
        /// The object.
        what: String,
        /// How the call failed.
        why: String,
    },
    /// The origin sent an answer that does not fit the request: a redirect, another range, other lengths.
    ///
    /// The fault is the origin's, or of a proxy before it. It says nothing about the object.
    #[error("{what}: the origin sent a wrong answer: {why}")]
    WrongAnswer {
        /// The object.
        what: String,
        /// How the answer differs from the request.
        why: String,
    },
}

impl OriginError {
    /// Returns who can act on the error.
    ///
    /// `Changed` is `Corrupt`: nobody can read the pinned bytes again. `Denied`, `Expired`, `NoBucket` and
    /// `WrongAnswer` are `Unavailable`: the operator can act, the reader cannot.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            OriginError::NotFound { .. } => Kind::NotFound,
            OriginError::AlreadyExists { .. } | OriginError::Invalid { .. } => Kind::Invalid,
            OriginError::Changed { .. } => Kind::Corrupt,
            OriginError::Denied { .. }
            | OriginError::Expired { .. }
            | OriginError::NoBucket { .. }
            | OriginError::Unavailable { .. }
            | OriginError::WrongAnswer { .. } => Kind::Unavailable,
            OriginError::Throttled { .. } => Kind::Overloaded,
        }
    }

    /// Returns whether the same call may succeed a moment later.
    #[must_use]
    pub fn transient(&self) -> bool {
        matches!(self, OriginError::Throttled { .. } | OriginError::Unavailable { .. })
    }

    pub(crate) fn invalid(what: impl ToString, why: impl ToString) -> Self {
        OriginError::Invalid { what: what.to_string(), why: why.to_string() }
    }

    /// Returns the error for a failed operation of the local file system.
    pub(crate) fn io(what: &str, error: &std::io::Error) -> Self {
        use std::io::ErrorKind as E;
        let what = what.to_owned();
        let why = error.to_string();
        match error.kind() {
            E::NotFound => OriginError::NotFound { what },
            // `a/b` where `a` is a file, and `a` where it is a directory, name no object.
            E::NotADirectory => OriginError::NotFound { what },
            E::AlreadyExists => OriginError::AlreadyExists { what },
            E::PermissionDenied => {
                OriginError::Denied { what, why: format!("{why}; check the permissions of the file") }
            }
            E::InvalidInput | E::InvalidFilename | E::IsADirectory | E::ReadOnlyFilesystem => {
                OriginError::Invalid { what, why }
            }
            _ if error.raw_os_error() == Some(libc::ELOOP) => OriginError::Invalid { what, why },
            _ => OriginError::Unavailable { what, why },
        }
    }
}
