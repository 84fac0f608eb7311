//! Runs the parquet decoder over bytes that nobody has checked yet.
//!
//! Owns the only place of the crate where a panic is caught.
//! Must never: let a panic or an error of the decoder reach a caller as anything but a [`TableError`].

use crate::{Table, TableError};
use parquet::errors::{ParquetError, Result as ParquetResult};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Returns what `decode` returns, and turns its errors and panics into [`TableError::Damaged`].
///
/// The parquet crate should answer garbage with an error, but some of its indexing and assertions panic. One
/// damaged table must not end a process that serves many. A panic drops everything that `decode` touches.
pub(crate) fn contained<T>(table: Table, decode: impl FnOnce() -> ParquetResult<T>) -> Result<T, TableError> {
    match catch_unwind(AssertUnwindSafe(decode)) {
        Ok(Ok(v)) => Ok(v),
        Ok(Err(e)) => Err(TableError::damaged(table, e)),
        Err(_) => Err(TableError::damaged(table, "the parquet decoder panicked on it")),
    }
}

/// Runs `decode` on a blocking thread.
pub(crate) async fn blocking<T: Send + 'static>(
    decode: impl FnOnce() -> Result<T, TableError> + Send + 'static,
) -> Result<T, TableError> {
    tokio::task::spawn_blocking(decode).await.map_err(|e| TableError::Internal(e.to_string()))?
}

/// A decoding error with this text.
pub(crate) fn bad(why: impl Into<String>) -> ParquetError {
    ParquetError::General(why.into())
}
