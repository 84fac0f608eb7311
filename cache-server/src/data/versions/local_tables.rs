//! The directory for the tables of versions, in which they are searched.

use fletch_store::disk::MountMemory;
use fletch_tables::LocalTables;
use std::{io, path::Path};

/// The directory, below the cache directory.
const NAME: &str = "tables";

/// Opens the directory, which has at most about `bytes_max` bytes. Blocking. `place` knows whether the file
/// system of the cache directory is mounted.
///
/// Returns `None` for 0 bytes, and when the directory cannot be used: then tables are in memory only.
#[must_use]
pub fn open(cache_dir: &Path, bytes_max: u64, place: MountMemory) -> Option<LocalTables> {
    if bytes_max == 0 {
        return None;
    }
    let check = move || place.check().map_err(io::Error::other);
    let opened = LocalTables::open(&cache_dir.join(NAME), bytes_max, Box::new(check));
    opened.map_err(|error| tracing::warn!(%error, "tables are kept in memory only")).ok()
}
