//! The errors of a request: each as an errno for the program, and as a log line with advice for the operator.

use fletch_api::Code;
use fletch_client::ClientError;
use fletch_core::Kind;
use fletch_store::ReadError;
use fletch_tables::TableError;
use std::time::Duration;

/// Why a request failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum FsError {
    /// The tree has no such name or inode.
    #[error("no such entry")]
    NotFound,
    /// A directory operation on an inode that is no directory.
    #[error("not a directory")]
    NotDirectory,
    /// A file operation on a directory.
    #[error("is a directory")]
    IsDirectory,
    /// An operation that this kind of inode does not support.
    #[error("this kind of entry does not support the operation")]
    Invalid,
    /// The inode has no such extended attribute.
    #[error("no such attribute")]
    NoAttribute,
    /// The caller's buffer is too small.
    #[error("buffer too small")]
    Range,
    /// The tables of the version could not be read, or failed their check.
    #[error("the tables of the version cannot be used: {0}")]
    Table(#[from] TableError),
    /// The bytes of a file could not be read.
    #[error("{path:?}: {error}")]
    Read {
        /// The path of the file.
        path: String,
        /// The error of the store.
        error: ReadError,
    },
    /// The whole request took longer than `--io-timeout`.
    #[error("no answer within {0:?}")]
    Late(Duration),
}

/// The kinds of failures that an operator can act on, for the log and the counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Fault {
    /// The server does not answer.
    Unavailable,
    /// The server refuses the token of this mount.
    Denied,
    /// The dataset or version is no longer registered.
    Gone,
    /// An object changed after it was indexed. Only its file fails.
    Changed,
    /// An object was damaged or removed after it was indexed, or its origin does not answer.
    Origin,
    /// Bytes did not hash to their name.
    Corrupt,
    /// The server or this mount stayed at a limit.
    Overloaded,
    /// A defect of Fletch.
    Internal,
}

impl Fault {
    /// All faults, in the order of their numbers.
    pub const ALL: [Fault; 8] = [
        Fault::Unavailable,
        Fault::Denied,
        Fault::Gone,
        Fault::Changed,
        Fault::Origin,
        Fault::Corrupt,
        Fault::Overloaded,
        Fault::Internal,
    ];

    /// Returns the word for the fault in metrics and reports.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Fault::Unavailable => "unavailable",
            Fault::Denied => "denied",
            Fault::Gone => "gone",
            Fault::Changed => "changed",
            Fault::Origin => "origin",
            Fault::Corrupt => "corrupt",
            Fault::Overloaded => "overloaded",
            Fault::Internal => "internal",
        }
    }

    /// Returns what an operator can do about the fault.
    #[must_use]
    pub fn advice(self) -> &'static str {
        match self {
            Fault::Unavailable => {
                "check that fletch-server runs and can be reached; reads then work again by themselves \
                 (with --origin-fallback the mount reads the origin meanwhile)"
            }
            Fault::Denied => "check the token of this mount, and which datasets the server lets it read",
            Fault::Gone => {
                "the dataset is no longer registered, or its tables are missing: \
                 register it again, or unmount"
            }
            Fault::Changed => {
                "the object changed since the index: refresh the dataset, and mount it again; or restore \
                 the object"
            }
            Fault::Origin => {
                "an object at the origin is damaged or gone, or the origin does not answer: follow the \
                 server's hint; if the object was removed on purpose, index the dataset again and mount the \
                 new version"
            }
            Fault::Corrupt => {
                "wrong bytes were refused: check the network and the server's disks; \
                 `fletch verify` checks the origin"
            }
            Fault::Overloaded => {
                "the server, or --memory of this mount, is at its limit: \
                 run fewer readers or give more memory"
            }
            Fault::Internal => "this is a defect of Fletch: please report it with this line",
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
            e if e.code() == Some(Code::OriginChanged) => Fault::Changed,
            // The server checked its tables and its origin, so the problem is at the origin.
            ClientError::Problem { .. } if e.kind() == Kind::Corrupt => Fault::Origin,
            // The server answers. The problem names the origin that does not.
            e if matches!(e.code(), Some(Code::OriginUnavailable | Code::OriginDenied)) => Fault::Origin,
            // This mount read the origin itself: a missing or changed object does not mean revoked access.
            ClientError::Origin { kind: Kind::Corrupt | Kind::NotFound, .. } => Fault::Origin,
            e => Fault::of_kind(e.kind()),
        }
    }
}

impl FsError {
    /// Returns the fault; `None` for an ordinary answer such as "no such name".
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

    /// Returns whether the same request may succeed later, when a server or an origin answers again.
    #[must_use]
    pub fn is_outage(&self) -> bool {
        if let FsError::Read { error: ReadError::Fetch(e), .. } = self
            && let Some(ClientError::Problem { problem, .. }) = e.source.downcast_ref::<ClientError>()
            && problem.code == Code::OriginUnavailable
        {
            return true;
        }
        matches!(self.fault(), Some(Fault::Unavailable | Fault::Overloaded))
    }

    /// Returns the errno that `docs/SEMANTICS.md` documents.
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
    use fletch_api::Problem;
    use fletch_store::FetchError;
    use fletch_tables::SourceError;

    fn read(e: ClientError) -> FsError {
        FsError::Read { path: "a".into(), error: ReadError::Fetch(FetchError::new(e.kind(), e)) }
    }

    fn problem(code: Code) -> FsError {
        read(ClientError::Problem {
            problem: Box::new(Problem::new(code, "d", "h")),
            request: None,
            retry_after: None,
        })
    }

    #[test]
    fn every_failure_has_its_errno_and_fault() {
        let gone = ClientError::Unreachable { endpoint: "e".into(), why: "refused".into(), refused: true };
        let expired = ClientError::LeaseExpired { endpoint: "e".into() };
        let damaged = ClientError::CorruptSample { endpoint: "e".into(), entry: 7 };
        let origin = |kind| read(ClientError::Origin { server: "s".into(), kind, why: "w".into() });
        let source = |kind| FsError::Table(SourceError { kind, message: "m".into() }.into());
        let cases = [
            (problem(Code::NotFound), libc::ESTALE, Fault::Gone),
            (problem(Code::UriNotAllowed), libc::EACCES, Fault::Denied),
            (problem(Code::OriginChanged), libc::EIO, Fault::Changed),
            (problem(Code::OriginCorrupt), libc::EIO, Fault::Origin),
            (problem(Code::OriginUnavailable), libc::EIO, Fault::Origin),
            (problem(Code::Overloaded), libc::EIO, Fault::Overloaded),
            (problem(Code::OriginInvalid), libc::EIO, Fault::Origin),
            (read(gone), libc::EIO, Fault::Unavailable),
            (read(expired), libc::EIO, Fault::Unavailable),
            (read(damaged), libc::EIO, Fault::Corrupt),
            (origin(Kind::NotFound), libc::EIO, Fault::Origin),
            (origin(Kind::Unavailable), libc::EIO, Fault::Unavailable),
            (source(Kind::NotFound), libc::ESTALE, Fault::Gone),
            (source(Kind::Corrupt), libc::EIO, Fault::Corrupt),
            (FsError::Late(Duration::from_secs(1)), libc::EIO, Fault::Unavailable),
        ];
        for (e, errno, fault) in cases {
            assert_eq!((e.errno(), e.fault()), (errno, Some(fault)), "{e}");
        }
        for (passes, error) in [
            (true, problem(Code::OriginUnavailable)),
            (true, problem(Code::Overloaded)),
            (true, FsError::Late(Duration::from_secs(1))),
            (false, problem(Code::OriginChanged)),
            (false, problem(Code::OriginCorrupt)),
            (false, problem(Code::NotFound)),
            (false, FsError::NotFound),
        ] {
            assert_eq!(error.is_outage(), passes, "{error}");
        }
        assert_eq!((FsError::NotFound.errno(), FsError::NotFound.fault()), (libc::ENOENT, None));
    }
}
