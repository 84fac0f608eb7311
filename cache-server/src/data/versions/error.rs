//! The errors of opening a version and reading its bytes.

use super::{UriNotAllowed, home::Home};
use fletch_api::Code;
use fletch_core::{DatasetName, Kind};
use fletch_origin::OriginError;
use fletch_tables::TableError;
use std::sync::Arc;

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
    /// The version is a draft, and the request needs the hashes of its content.
    #[error("{0} is a draft: not all of its content was read yet")]
    Draft(DatasetName),
    /// The settings no longer allow the dataset's URI.
    #[error(transparent)]
    UriNotAllowed(UriNotAllowed),
    /// The origin failed.
    #[error(transparent)]
    Origin(OriginError),
    /// Several homes of the version failed, each of them in its own way.
    #[error("{} homes of this version do not answer: {}", .0.len(), .0.join("; "))]
    Homes(Arc<[String]>),
    /// The tenant looked for too many roots that are not open.
    #[error("this tenant looked for too many versions that are not open")]
    TooManyLookups,
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
            VersionError::Draft(_) => Code::NotSealed,
            VersionError::Lost => Code::Internal,
            VersionError::Homes(_) => Code::OriginUnavailable,
            VersionError::TooManyLookups => Code::Overloaded,
            // An origin's error: the reader may read it, and the server lost what it needs for that.
            VersionError::UriNotAllowed(UriNotAllowed::NoCredentials(_)) => Code::OriginDenied,
            VersionError::UriNotAllowed(e) => e.code(),
            VersionError::Origin(e) => match e {
                OriginError::Denied { .. } | OriginError::Expired { .. } => Code::OriginDenied,
                OriginError::NotFound { .. } => Code::OriginMissing,
                OriginError::Changed { .. } => Code::OriginChanged,
                // Also a rejected request, and an address that the `[[origin]]` does not allow.
                OriginError::WrongAnswer { .. }
                | OriginError::NoBucket { .. }
                | OriginError::OtherRegion { .. }
                | OriginError::Invalid { .. } => Code::OriginInvalid,
                OriginError::Throttled { .. } | OriginError::Unavailable { .. } => Code::OriginUnavailable,
                OriginError::GaveWay { .. } => Code::Overloaded,
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

    /// Returns whether a home did not answer, or answered that it cannot answer now.
    #[must_use]
    pub fn is_outage(&self) -> bool {
        match self {
            VersionError::Origin(e) => e.transient() || matches!(e, OriginError::GaveWay { .. }),
            VersionError::Tables(TableError::Source(s)) => {
                matches!(s.kind, Kind::Unavailable | Kind::Overloaded)
            }
            VersionError::Homes(_) => true,
            _ => false,
        }
    }

    /// Returns the error of a read that failed at these homes. `None` for no home.
    pub(super) fn of_outages(outages: &[(Arc<Home>, VersionError)]) -> Option<Self> {
        let mut homes: Vec<&(Arc<Home>, VersionError)> = Vec::new();
        for outage in outages.iter().rev() {
            if !homes.iter().any(|(home, _)| Arc::ptr_eq(home, &outage.0)) {
                homes.push(outage);
            }
        }
        match &homes[..] {
            [] => None,
            [(_, e)] => Some(e.clone()),
            several => Some(VersionError::Homes(several.iter().rev().map(|(_, e)| e.to_string()).collect())),
        }
    }

    /// Returns the error of a read that failed in two places: the one that says more.
    pub(super) fn or(self, other: Self) -> Self {
        match (self, other) {
            (VersionError::NotFound, e) | (e, VersionError::NotFound) => e,
            (a, b) if a.is_outage() && b.is_outage() => {
                VersionError::Homes([a.to_string(), b.to_string()].into())
            }
            (a, b) => {
                if b.is_outage() {
                    b
                } else {
                    a
                }
            }
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
        match self {
            VersionError::UriNotAllowed(UriNotAllowed::NoCredentials(_)) => return UriNotAllowed::HAND_OVER,
            VersionError::Origin(OriginError::Expired { is_given, .. }) => {
                return match is_given {
                    true => "run `fletch mount` again to hand over new credentials; open mounts then go on",
                    false => {
                        "renew the credentials of the origin: its [[origin]] table says where they are; open \
                         mounts then go on"
                    }
                };
            }
            _ => {}
        }
        match self.code() {
            Code::NotFound => "check the root, hash, path or tag, and that its dataset is registered here",
            Code::NotSealed => "run `fletch seal NAME`, which reads what is missing; then try again",
            Code::OriginChanged => {
                "run `fletch refresh NAME`, and read the new version; or restore the object"
            }
            Code::OriginMissing => {
                "restore the object, or run `fletch refresh NAME` and read the new version; if its root is \
                 the same, restart the server"
            }
            Code::OriginCorrupt => {
                "the storage returned wrong bytes: check the storage, or restore the object"
            }
            Code::OriginInvalid => {
                "the fault is at the origin or at its [[origin]] table: check that the URL and the region \
                 are the store's own, and that no proxy or gateway answers in its place"
            }
            Code::UriNotAllowed => {
                "the server's settings no longer allow the dataset's URI; ask the administrator"
            }
            Code::OriginDenied => "check the credentials of the origin, or the permissions of the files",
            Code::OriginUnavailable => {
                "check that the origin can be reached; sending the request again is safe"
            }
            Code::TablesCorrupt => "index the dataset again; no wrong byte was delivered",
            Code::Overloaded => {
                "wait and send the request again; name the dataset in a Fletch-Dataset header, or raise \
                 limits.root_lookups"
            }
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
