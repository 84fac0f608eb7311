//! The one error of this crate.

use fletch_core::Kind;
use std::time::Duration;

/// Why an origin did not do what was asked. `what` is the object's URI.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OriginError {
    /// There is no such object.
    #[error("{what}: not found")]
    NotFound {
        /// The object.
        what: String,
    },
    /// It is there already, and was to be created.
    #[error("{what}: exists already")]
    AlreadyExists {
        /// The object.
        what: String,
    },
    /// The object is not the one that was pinned. Its old bytes are gone; asking again is no use.
    #[error("{what}: changed since it was indexed: {why}")]
    Changed {
        /// The object.
        what: String,
        /// How it differs.
        why: String,
    },
    /// The origin refuses our credentials or permissions.
    #[error(
        "{what}: access denied: {why}; check the credentials of its [[origin]] or the file's permissions"
    )]
    Denied {
        /// The object.
        what: String,
        /// What it said.
        why: String,
    },
    /// The request, URI, path or configuration cannot be.
    #[error("{what}: {why}")]
    Invalid {
        /// What is invalid.
        what: String,
        /// Why.
        why: String,
    },
    /// The origin asks us to slow down.
    #[error("{what}: the origin asks to slow down")]
    Throttled {
        /// The object.
        what: String,
        /// How long it asked us to wait.
        retry_after: Option<Duration>,
    },
    /// The origin cannot be reached, failed, or did not answer in time.
    #[error("{what}: origin unavailable: {why}")]
    Unavailable {
        /// The object.
        what: String,
        /// What happened.
        why: String,
    },
    /// The origin answered with other bytes than were asked for (short, or of another range).
    #[error("{what}: wrong answer from the origin: {why}")]
    Corrupt {
        /// The object.
        what: String,
        /// What was wrong with it.
        why: String,
    },
}

impl OriginError {
    /// Who can act on it. `Changed` is `Corrupt` (the pinned bytes can never be had again);
    /// `Denied` is `Unavailable` (the operator can act, the reader cannot).
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            OriginError::NotFound { .. } => Kind::NotFound,
            OriginError::AlreadyExists { .. } | OriginError::Invalid { .. } => Kind::Invalid,
            OriginError::Changed { .. } | OriginError::Corrupt { .. } => Kind::Corrupt,
            OriginError::Denied { .. } | OriginError::Unavailable { .. } => Kind::Unavailable,
            OriginError::Throttled { .. } => Kind::Overloaded,
        }
    }

    /// Whether the same call may succeed a moment later.
    #[must_use]
    pub fn transient(&self) -> bool {
        matches!(self, OriginError::Throttled { .. } | OriginError::Unavailable { .. })
    }

    pub(crate) fn invalid(what: impl ToString, why: impl ToString) -> Self {
        OriginError::Invalid { what: what.to_string(), why: why.to_string() }
    }

    /// The error of an operation of the local file system.
    pub(crate) fn io(what: &str, error: &std::io::Error) -> Self {
        use std::io::ErrorKind as E;
        let what = what.to_owned();
        let why = error.to_string();
        match error.kind() {
            E::NotFound => OriginError::NotFound { what },
            // `a/b` where `a` is a file, and `a` where it is a directory, name no object.
            E::NotADirectory => OriginError::NotFound { what },
            E::AlreadyExists => OriginError::AlreadyExists { what },
            E::PermissionDenied => OriginError::Denied { what, why },
            E::InvalidInput | E::InvalidFilename | E::IsADirectory | E::ReadOnlyFilesystem => {
                OriginError::Invalid { what, why }
            }
            _ if error.raw_os_error() == Some(libc::ELOOP) => OriginError::Invalid { what, why },
            _ => OriginError::Unavailable { what, why },
        }
    }
}
