//! Why a server cannot start.

use crate::{
    app::tls::TlsError,
    cluster::ClusterError,
    tenancy::{
        auth::{S3KeyError, TokensError},
        state::StateError,
    },
};
use fletch_origin::OriginError;
use fletch_store::disk::DiskError;
use std::path::PathBuf;

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The state directory cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// The tokens file cannot be used.
    #[error(transparent)]
    Tokens(#[from] TokensError),
    /// The files of TLS cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The key file of the S3 door cannot be used.
    #[error(transparent)]
    S3Key(#[from] S3KeyError),
    /// The configured origins are not valid.
    #[error("{0}")]
    Origins(OriginError),
    /// Another process uses the cache directory.
    #[error("cache directory: {0}")]
    Disk(DiskError),
    /// An operation of the system failed.
    #[error("cannot {what}: {error}; {hint}")]
    Io {
        /// The operation.
        what: String,
        /// The system's error.
        error: std::io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// The client for Prometheus cannot be made.
    #[error(
        "dashboard.prometheus_url: the client cannot be made: {0}; install TLS certificates, or unset it"
    )]
    Prometheus(String),
    /// The server cannot be a member of its cluster.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// Another process listens on the socket.
    #[error("another server listens on {0}; stop it, or give another path with --socket")]
    SocketInUse(PathBuf),
}
