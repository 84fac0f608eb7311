//! The S3 door as requests see it: where it listens, its bucket, and the key of its credentials.

use super::StartError;
use crate::{app::config::S3Config, tenancy::auth::S3Keys};
use std::net::SocketAddr;

/// The S3 door of a running server.
#[derive(Debug)]
pub struct S3Door {
    /// The address on which it listens.
    pub listen: SocketAddr,
    /// The name of its one bucket.
    pub bucket: String,
    /// Derives the secrets of its clients. `None` on a server without tokens: it checks no signature.
    pub keys: Option<S3Keys>,
}

impl S3Door {
    /// Reads the key. `listen` is the address of the bound listener.
    ///
    /// # Errors
    /// [`StartError::S3Key`].
    pub fn open(config: &S3Config, listen: SocketAddr) -> Result<Self, StartError> {
        let keys = config.key_file.as_deref().map(S3Keys::open).transpose()?;
        Ok(S3Door { listen, bucket: config.bucket.clone(), keys })
    }
}
