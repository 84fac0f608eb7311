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
        /// Whether every object of the origin is denied: the origin does not accept the credentials at all.
        is_of_origin: bool,
    },
    /// The credentials have expired: by the time that was handed over with them, or by the origin's code.
    #[error("{what}: the credentials for this origin expired {why}")]
    Expired {
        /// The object.
        what: String,
        /// When they expired, or the origin's status and code; then what to do.
        why: String,
        /// Whether a user handed them over with `fletch mount`.
        is_given: bool,
    },
    /// The bucket is in another region than the one that was asked.
    #[error("{what}: {why}")]
    OtherRegion {
        /// The object or the listing.
        what: String,
        /// The status, the code and the region.
        why: String,
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
    /// The object brought no byte while callers waited for permits that this read held ([`Origin::awaited`]).
    ///
    /// [`Origin::awaited`]: crate::Origin::awaited
    #[error("{what}: no byte came, and the read gave way to others that wait for the origin; retry later")]
    GaveWay {
        /// The object.
        what: String,
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
        /// Whether every request gets such an answer: a store redirects them all.
        is_of_origin: bool,
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
            OriginError::AlreadyExists { .. }
            | OriginError::OtherRegion { .. }
            | OriginError::Invalid { .. } => Kind::Invalid,
            OriginError::Changed { .. } => Kind::Corrupt,
            OriginError::Denied { .. }
            | OriginError::Expired { .. }
            | OriginError::NoBucket { .. }
            | OriginError::Unavailable { .. }
            | OriginError::WrongAnswer { .. } => Kind::Unavailable,
            OriginError::Throttled { .. } | OriginError::GaveWay { .. } => Kind::Overloaded,
        }
    }

    /// Returns whether the same call may succeed a moment later.
    ///
    /// Not for `GaveWay`: the caller is to give its permits back before it asks again.
    #[must_use]
    pub fn transient(&self) -> bool {
        matches!(self, OriginError::Throttled { .. } | OriginError::Unavailable { .. })
    }

    /// Returns whether the error is the whole origin's: every other call to it fails alike.
    ///
    /// False for errors of one object, and for those that can be either. Those are `Denied` by a 403 that
    /// names no fault of the credentials (one object's rules, or the bucket's), `Unavailable` (one object
    /// that hangs, or an origin that is down) and `NotFound` (one object, or a place that was moved). The
    /// caller knows more: whether calls to other objects succeed.
    #[must_use]
    pub fn is_of_origin(&self) -> bool {
        match self {
            OriginError::Expired { .. } | OriginError::NoBucket { .. } | OriginError::OtherRegion { .. } => {
                true
            }
            // An origin slows down a client, not an object.
            OriginError::Throttled { .. } => true,
            OriginError::Denied { is_of_origin, .. } | OriginError::WrongAnswer { is_of_origin, .. } => {
                *is_of_origin
            }
            OriginError::NotFound { .. }
            | OriginError::AlreadyExists { .. }
            | OriginError::Changed { .. }
            | OriginError::Invalid { .. }
            | OriginError::GaveWay { .. }
            | OriginError::Unavailable { .. } => false,
        }
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
            E::PermissionDenied => OriginError::Denied {
                what,
                why: format!("{why}; check the permissions of the file"),
                is_of_origin: false,
            },
            E::InvalidInput | E::InvalidFilename | E::IsADirectory | E::ReadOnlyFilesystem => {
                OriginError::Invalid { what, why }
            }
            _ if error.raw_os_error() == Some(libc::ELOOP) => OriginError::Invalid { what, why },
            _ => OriginError::Unavailable { what, why },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_whole_origin_are_told_from_errors_of_an_object() {
        let (what, why) = (|| "s3://b/x".to_owned(), || "why".to_owned());
        let of_origin = [
            OriginError::Denied { what: what(), why: why(), is_of_origin: true },
            OriginError::Expired { what: what(), why: why(), is_given: false },
            OriginError::NoBucket { what: what(), why: why() },
            OriginError::OtherRegion { what: what(), why: why() },
            OriginError::WrongAnswer { what: what(), why: why(), is_of_origin: true },
            OriginError::Throttled { what: what(), retry_after: None },
        ];
        let of_object = [
            OriginError::Denied { what: what(), why: why(), is_of_origin: false },
            OriginError::WrongAnswer { what: what(), why: why(), is_of_origin: false },
            OriginError::NotFound { what: what() },
            OriginError::AlreadyExists { what: what() },
            OriginError::Changed { what: what(), why: why() },
            OriginError::Invalid { what: what(), why: why() },
            OriginError::Unavailable { what: what(), why: why() },
            OriginError::GaveWay { what: what() },
        ];
        assert!(of_origin.iter().all(OriginError::is_of_origin));
        assert!(!of_object.iter().any(OriginError::is_of_origin));
    }
}
