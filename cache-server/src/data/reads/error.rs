//! Why bytes of a version cannot be read.

use crate::{
    data::{chunk_reads::PeersOverloaded, versions::VersionError},
    tenancy::tenants::{NoChunkMemory, NoOriginPermit},
};
use fletch_api::Code;
use fletch_core::{
    groups::GROUPED_BYTES_MIN,
    manifest::{EntryKind, EntryRef},
};
use fletch_store::ReadError;
use std::borrow::Cow;
use tokio::task::JoinError;

/// The hint of errors that only the log explains.
const SEE_LOG: &str = "see the server's log";

/// Why bytes of a version cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ContentError {
    /// The version is not registered any more, or its tables or its origins fail.
    #[error(transparent)]
    Version(#[from] VersionError),
    /// The store has no bytes.
    #[error("{0}")]
    Read(ReadError),
    /// The tenant has no memory for a chunk.
    #[error(transparent)]
    Memory(#[from] NoChunkMemory),
    /// The tables say something wrong about the bytes.
    #[error("{0}")]
    Tables(String),
    /// The entry has no bytes.
    #[error("{path:?} is {kind}")]
    NotAFile {
        /// The entry's path.
        path: String,
        /// What it is.
        kind: &'static str,
        /// What to request instead.
        hint: String,
    },
    /// The chunk is so short that its groups have no hashes of their own.
    #[error("the chunk is always read whole: it is shorter than {GROUPED_BYTES_MIN} bytes")]
    Ungrouped,
    /// A task of the server was lost.
    #[error("a task of the server was lost: {0}")]
    Task(#[from] JoinError),
}

impl ContentError {
    /// Returns the error of an entry without bytes.
    pub(super) fn not_a_file(entry: &EntryRef<'_>) -> Self {
        let (kind, hint) = match entry.kind {
            EntryKind::Symlink => {
                ("a symbolic link", format!("it points to {:?}: request that path instead", entry.target))
            }
            _ => ("an empty directory", "it has no bytes to read".to_owned()),
        };
        ContentError::NotAFile { path: entry.path.to_owned(), kind, hint }
    }

    /// Returns the code that tells a client the error's kind.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            ContentError::Version(e) => e.code(),
            ContentError::Read(e) => code_of(e),
            ContentError::Memory(_) => Code::Overloaded,
            ContentError::Tables(_) => Code::TablesCorrupt,
            ContentError::NotAFile { .. } => Code::NotAFile,
            ContentError::Ungrouped => Code::BadRequest,
            ContentError::Task(_) => Code::Internal,
        }
    }

    /// Returns what the caller can do about the error.
    #[must_use]
    pub fn hint(&self) -> Cow<'static, str> {
        Cow::Borrowed(match self {
            ContentError::Version(e) => e.hint(),
            ContentError::Read(e) => hint_of(e),
            ContentError::Memory(_) => NoChunkMemory::HINT,
            ContentError::Tables(_) => "index or pack the dataset again; no wrong byte was delivered",
            ContentError::NotAFile { hint, .. } => return Cow::Owned(hint.clone()),
            ContentError::Ungrouped => "read the chunk, and hash all of it",
            ContentError::Task(_) => SEE_LOG,
        })
    }
}

impl From<ReadError> for ContentError {
    fn from(e: ReadError) -> Self {
        if let ReadError::Fetch(fetch) = &e
            && let Some(version) = fetch.source.downcast_ref::<VersionError>()
        {
            return version.clone().into();
        }
        ContentError::Read(e)
    }
}

fn code_of(e: &ReadError) -> Code {
    match e {
        ReadError::Fetch(f) if f.source.is::<PeersOverloaded>() || f.source.is::<NoOriginPermit>() => {
            Code::Overloaded
        }
        ReadError::Fetch(_) | ReadError::Lost => Code::Internal,
        ReadError::Corrupt(_) => Code::OriginCorrupt,
        ReadError::Overloaded { .. } => Code::Overloaded,
        ReadError::Deadline(_) => Code::OriginUnavailable,
    }
}

fn hint_of(e: &ReadError) -> &'static str {
    match e {
        ReadError::Fetch(f) if f.source.is::<PeersOverloaded>() => {
            "wait and send the request again; if this lasts, raise --memory of the servers"
        }
        ReadError::Fetch(f) => match f.source.downcast_ref::<NoOriginPermit>() {
            Some(refused) => refused.hint(),
            None => SEE_LOG,
        },
        ReadError::Corrupt(_) => "the storage returned wrong bytes: check the storage",
        ReadError::Overloaded { .. } => {
            "wait and send the request again; if this lasts, raise --memory of the server"
        }
        ReadError::Deadline(_) => "check that the origin can be reached; sending the request again is safe",
        ReadError::Lost => SEE_LOG,
    }
}
