//! What a request can end in, as an errno and as a line that says what to do.

use fletch_client::ClientError;
use fletch_core::Kind;
use fletch_store::ReadError;
use fletch_tables::TableError;
use std::time::Duration;

/// A request failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum FsError {
    /// No such name, or an inode that no entry has.
    #[error("no such entry")]
    NotFound,
    /// A directory operation on something else.
    #[error("not a directory")]
    NotDirectory,
    /// A file operation on a directory.
    #[error("is a directory")]
    IsDirectory,
    /// An operation that this kind of entry does not have.
    #[error("not possible on this entry")]
    Invalid,
    /// No such extended attribute.
    #[error("no such attribute")]
    NoAttribute,
    /// The caller's buffer is too small.
    #[error("buffer too small")]
    Range,
    /// The tree's tables could not be read or believed.
    #[error("tables of the version: {0}")]
    Table(#[from] TableError),
    /// A file's bytes could not be had.
    #[error("{path:?}: {error}")]
    Read {
        /// Which file.
        path: String,
        /// Why.
        error: ReadError,
    },
    /// The request as a whole took too long.
    #[error("no answer within {0:?}")]
    Late(Duration),
}

/// Failures that an operator can do something about, told apart for the log and the counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Fault {
    /// The server does not answer, or its origin does not.
    Unavailable,
    /// The server refuses this mount.
    Denied,
    /// The dataset or version is not served any more.
    Gone,
    /// An object was changed, damaged or removed after it was indexed.
    Origin,
    /// Bytes did not hash to their name.
    Corrupt,
    /// A limit was reached and stayed reached.
    Overloaded,
    /// A defect of ours.
    Internal,
}

impl Fault {
    /// All of them, in the order of their numbers.
    pub const ALL: [Fault; 7] = [
        Fault::Unavailable,
        Fault::Denied,
        Fault::Gone,
        Fault::Origin,
        Fault::Corrupt,
        Fault::Overloaded,
        Fault::Internal,
    ];

    /// The word in metrics and reports.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Fault::Unavailable => "unavailable",
            Fault::Denied => "denied",
            Fault::Gone => "gone",
            Fault::Origin => "origin",
            Fault::Corrupt => "corrupt",
            Fault::Overloaded => "overloaded",
            Fault::Internal => "internal",
        }
    }

    /// What a person can do about it.
    #[must_use]
    pub fn advice(self) -> &'static str {
        match self {
            Fault::Unavailable => {
                "check that fletch-server runs and reaches its origin; reads work again when it does \
                 (with --origin-fallback they go to the origin meanwhile)"
            }
            Fault::Denied => "check the token of this mount and its access on the server",
            Fault::Gone => {
                "the dataset is not registered any more, or its tables are not there: register it again, or unmount"
            }
            Fault::Origin => {
                "an object is not what was indexed, or may not be read: do what the server says of it; index the dataset again \
                 and mount the new version only where the new content is right"
            }
            Fault::Corrupt => {
                "wrong bytes were refused: check the network and the server's disks; see fletch verify"
            }
            Fault::Overloaded => {
                "the server or this mount's --memory is at its limit: fewer readers or more memory"
            }
            Fault::Internal => "this is a defect: please report it with this line",
        }
    }

    fn of_kind(kind: Kind) -> Self {
        match kind {
            Kind::NotFound => Fault::Gone,
            Kind::Invalid => Fault::Denied,
            Kind::Corrupt => Fault::Corrupt,
            Kind::Unavailable => Fault::Unavailable,
            Kind::Overloaded => Fault::Overloaded,
            Kind::Internal => Fault::Internal,
        }
    }

    fn of_client(e: &ClientError) -> Self {
        match e {
            e if e.is_denied() => Fault::Denied,
            // The server checked its tables and its origin, so this is its word about the origin.
            ClientError::Problem { .. } if e.kind() == Kind::Corrupt => Fault::Origin,
            // Read from here: an object that is gone or another is no revoked access.
            ClientError::Origin { kind: Kind::Corrupt | Kind::NotFound, .. } => Fault::Origin,
            e => Fault::of_kind(e.kind()),
        }
    }
}

impl FsError {
    /// The fault behind it; `None` for plain answers such as "no such name".
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        Some(match self {
            FsError::Table(TableError::Source(e)) => Fault::of_kind(e.kind),
            FsError::Table(e) if e.kind() == Kind::Invalid => Fault::Corrupt,
            FsError::Table(e) => Fault::of_kind(e.kind()),
            FsError::Read { error: ReadError::Fetch(e), .. } => {
                match e.source.downcast_ref::<ClientError>() {
                    Some(c) => Fault::of_client(c),
                    None => Fault::of_kind(e.kind),
                }
            }
            FsError::Read { error, .. } => Fault::of_kind(error.kind()),
            FsError::Late(_) => Fault::Unavailable,
            _ => return None,
        })
    }

    /// The errno, as documented in `docs/SEMANTICS.md`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            FsError::NotFound => libc::ENOENT,
            FsError::NotDirectory => libc::ENOTDIR,
            FsError::IsDirectory => libc::EISDIR,
            FsError::Invalid => libc::EINVAL,
            FsError::NoAttribute => libc::ENODATA,
            FsError::Range => libc::ERANGE,
            FsError::Table(_) | FsError::Read { .. } | FsError::Late(_) => match self.fault() {
                Some(Fault::Gone) => libc::ESTALE,
                Some(Fault::Denied) => libc::EACCES,
                _ => libc::EIO,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_api::{Code, Problem};
    use fletch_store::FetchError;
    use fletch_tables::SourceError;

    fn read(e: ClientError) -> FsError {
        FsError::Read { path: "a".into(), error: ReadError::Fetch(FetchError::new(e.kind(), e)) }
    }

    fn problem(code: Code) -> FsError {
        read(ClientError::Problem { problem: Box::new(Problem::new(code, "d", "h")), retry_after: None })
    }

    #[test]
    fn every_failure_has_its_errno_and_fault() {
        let gone = ClientError::Unreachable { endpoint: "e".into(), why: "refused".into() };
        let origin = |kind| read(ClientError::Origin { server: "s".into(), kind, why: "w".into() });
        let source = |kind| FsError::Table(SourceError { kind, message: "m".into() }.into());
        let cases = [
            (problem(Code::NotFound), libc::ESTALE, Fault::Gone),
            (problem(Code::UriNotAllowed), libc::EACCES, Fault::Denied),
            (problem(Code::OriginChanged), libc::EIO, Fault::Origin),
            (problem(Code::OriginCorrupt), libc::EIO, Fault::Origin),
            (problem(Code::OriginUnavailable), libc::EIO, Fault::Unavailable),
            (problem(Code::Overloaded), libc::EIO, Fault::Overloaded),
            (read(gone), libc::EIO, Fault::Unavailable),
            (origin(Kind::NotFound), libc::EIO, Fault::Origin),
            (origin(Kind::Unavailable), libc::EIO, Fault::Unavailable),
            (source(Kind::NotFound), libc::ESTALE, Fault::Gone),
            (source(Kind::Corrupt), libc::EIO, Fault::Corrupt),
            (FsError::Late(Duration::from_secs(1)), libc::EIO, Fault::Unavailable),
        ];
        for (e, errno, fault) in cases {
            assert_eq!((e.errno(), e.fault()), (errno, Some(fault)), "{e}");
        }
        assert_eq!((FsError::NotFound.errno(), FsError::NotFound.fault()), (libc::ENOENT, None));
    }
}
