//! The errors of opening a version and reading its bytes.

use super::UriNotAllowed;
use fletch_api::Code;
use fletch_core::Kind;
use fletch_origin::OriginError;
use fletch_tables::TableError;

/// Why bytes of a version cannot be read. `http/error.rs` maps it to a reply.
#[derive(Debug, Clone, thiserror::Error)]
pub enum VersionError {
    /// The domain has no such version, layout, chunk, file or tag.
    ///
    /// The text is the same whether another domain has it or not (I7).
    #[error("the server has no such version, chunk, file or tag for this domain")]
    NotFound,
    /// An object changed after it was indexed.
    #[error("{what} changed after it was indexed: {why}")]
    Changed {
        /// The object.
        what: String,
        /// How the object differs.
        why: String,
    },
    /// An object that was indexed is gone.
    #[error("the object {0} is gone")]
    Missing(String),
    /// An object that seems unchanged has other bytes.
    #[error("{0} has other bytes than were indexed, although its size and its etag (or time) are the same")]
    Corrupt(String),
    /// The settings no longer allow the dataset's URI.
    #[error(transparent)]
    UriNotAllowed(UriNotAllowed),
    /// The origin failed.
    #[error(transparent)]
    Origin(OriginError),
    /// The tables failed.
    #[error(transparent)]
    Tables(TableError),
    /// A task was lost: it panicked, or the runtime is going down.
    #[error("a task of the server was lost")]
    Lost,
}

impl VersionError {
    /// Returns the stable code.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            VersionError::NotFound => Code::NotFound,
            VersionError::Changed { .. } => Code::OriginChanged,
            VersionError::Missing(_) => Code::OriginMissing,
            VersionError::Corrupt(_) => Code::OriginCorrupt,
            VersionError::Lost => Code::Internal,
            VersionError::UriNotAllowed(e) => e.code(),
            VersionError::Origin(e) => match e {
                OriginError::Denied { .. } => Code::OriginDenied,
                OriginError::NotFound { .. } => Code::OriginMissing,
                OriginError::Changed { .. } => Code::OriginChanged,
                // Also a request that the origin rejects, and an address that its `[[origin]]` does not allow.
                OriginError::WrongAnswer { .. } | OriginError::Invalid { .. } => Code::OriginInvalid,
                OriginError::Throttled { .. } | OriginError::Unavailable { .. } => Code::OriginUnavailable,
                OriginError::AlreadyExists { .. } => Code::Internal,
            },
            VersionError::Tables(e) => match e {
                TableError::Newer { .. } => Code::UnsupportedFormat,
                TableError::Source(s) if s.kind == Kind::NotFound => Code::OriginMissing,
                TableError::Source(s) if s.kind.retryable() => Code::OriginUnavailable,
                TableError::Source(s) if s.kind == Kind::Invalid => Code::OriginInvalid,
                TableError::Internal(_) => Code::Internal,
                _ => Code::TablesCorrupt,
            },
        }
    }

    /// Returns the kind, which says who can act.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.code().kind()
    }

    /// Returns what to do about it.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self.code() {
            Code::NotFound => "check the root, hash, path or tag, and that its dataset is registered here",
            Code::OriginChanged | Code::OriginMissing => {
                "restore the object, or index the dataset again with --parent and read the new version; if \
                 its root is the same, restart the server"
            }
            Code::OriginCorrupt => {
                "the storage returned wrong bytes: check the storage, or restore the object"
            }
            Code::OriginInvalid => {
                "the fault is at the origin or at its [[origin]] table: check that the URL and the region are \
                 the store's own, and that no proxy or gateway answers in its place"
            }
            Code::UriNotAllowed => {
                "the server's settings no longer allow the dataset's URI; ask the administrator"
            }
            Code::OriginDenied => "check the credentials of its [[origin]] or the permissions of the files",
            Code::OriginUnavailable => {
                "check that the origin can be reached; sending the request again is safe"
            }
            Code::TablesCorrupt => "index the dataset again; no wrong byte was delivered",
            Code::UnsupportedFormat => "use a newer fletch-server",
            _ => "see the server's log",
        }
    }
}

impl From<TableError> for VersionError {
    fn from(e: TableError) -> Self {
        VersionError::Tables(e)
    }
}

/// An indexed object that is not found is gone.
impl From<OriginError> for VersionError {
    fn from(e: OriginError) -> Self {
        match e {
            OriginError::NotFound { what } => VersionError::Missing(what),
            OriginError::Changed { what, why } => VersionError::Changed { what, why },
            e => VersionError::Origin(e),
        }
    }
}
