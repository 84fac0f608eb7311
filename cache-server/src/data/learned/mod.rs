//! What the location names of drafts stand for: a table from names to content hashes.
//!
//! ```text
//! first read of a name ─▶ fetched once, hashed ─▶ a row here, and in the log within a second
//! every later read     ─▶ by the content hash, from any tier, like a read of any other version
//! ```
//! 1. Only this server's own reads make rows. It computes a name itself from the pin with which it reads, so
//!    neither a table nor a client can teach it anything.
//! 2. A row never changes. Other bytes under the same name are an error of the read that brought them.
//! 3. (I7) Two domains share no row.
//! 4. (I5) Soft: a lost row costs one more fetch. A log that is damaged is set aside, and begun anew.
//! 5. (I6) At most [`ROWS_MAX`] rows, of about 100 bytes of memory. Names beyond that are fetched each time
//!    that their bytes are not in the cache.

mod log;

use crate::tenancy::state::StateError;
use fletch_core::{
    Hash, Kind, StoreKey, Verified,
    manifest::{
        location_name::{ShortName, short_name},
        slice_hash::{ChainingValue, SliceHash, SliceHasher},
    },
};
use fletch_store::{FetchError, Names};
use log::{LearnedLog, LoggedRow};
use parking_lot::RwLock;
use std::{
    collections::HashMap,
    path::Path,
    sync::Arc,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

/// The most rows.
const ROWS_MAX: usize = 8_000_000;

/// The bytes of a location name are others than those that were read before.
#[derive(Debug, thiserror::Error)]
#[error("other bytes came than at the first read of {0}")]
struct OtherBytes(Hash);

#[derive(Debug, Default)]
struct Rows {
    content: HashMap<ShortName, Hash>,
    /// The values of the slices of large files in the trees of their files.
    subtrees: HashMap<ShortName, ChainingValue>,
}

/// The table. See the head of this module.
#[derive(Debug)]
pub struct LearnedNames {
    rows: RwLock<Rows>,
    log: LearnedLog,
    refused: AtomicU64,
}

impl LearnedNames {
    /// Opens the table in a state directory. Blocking.
    ///
    /// # Errors
    /// [`StateError::Open`].
    pub fn open(state_dir: &Path) -> Result<Arc<Self>, StateError> {
        let mut rows = Rows::default();
        let log = LearnedLog::open(&state_dir.join("learned.log"), |row| {
            if rows.content.len() < ROWS_MAX {
                rows.content.insert(row.key, row.content);
                rows.subtrees.extend(row.subtree.map(|subtree| (row.key, subtree)));
            }
        })?;
        Ok(Arc::new(LearnedNames { rows: RwLock::new(rows), log, refused: AtomicU64::new(0) }))
    }

    /// Returns the hash of the bytes that a name stands for, if it was learned.
    #[must_use]
    pub fn content(&self, name: &StoreKey) -> Option<Hash> {
        self.rows.read().content.get(&short_name(name)).copied()
    }

    /// Returns the hashes of the slice of a large file that a name stands for.
    #[must_use]
    pub fn slice(&self, name: &StoreKey) -> Option<SliceHash> {
        let key = short_name(name);
        let rows = self.rows.read();
        Some(SliceHash { chunk: *rows.content.get(&key)?, subtree: *rows.subtrees.get(&key)? })
    }

    /// Returns the record of one read. `slice_of` is the offset of the bytes in their file, if they are not
    /// all of it.
    #[must_use]
    pub fn record(self: &Arc<Self>, slice_of: Option<u64>) -> Arc<dyn Names> {
        Arc::new(ReadRecord { table: Arc::clone(self), slice_of })
    }

    /// Returns the number of rows, and of names that found no room.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.rows.read().content.len() as u64, self.refused.load(Relaxed))
    }

    /// Writes new rows to the log. Blocking. Call it every second, and once at the end.
    pub fn write_log(&self) {
        self.log.write();
    }

    fn insert(
        &self,
        name: &StoreKey,
        content: Hash,
        subtree: Option<ChainingValue>,
    ) -> Result<(), OtherBytes> {
        let key = short_name(name);
        let mut rows = self.rows.write();
        match rows.content.get(&key) {
            Some(known) if *known == content => return Ok(()),
            Some(_) => return Err(OtherBytes(name.hash)),
            None => {}
        }
        if rows.content.len() >= ROWS_MAX {
            if self.refused.fetch_add(1, Relaxed) == 0 {
                tracing::warn!(
                    rows = ROWS_MAX,
                    "the table of drafts is full: seal drafts with `fletch seal`"
                );
            }
            return Ok(());
        }
        rows.content.insert(key, content);
        rows.subtrees.extend(subtree.map(|subtree| (key, subtree)));
        self.log.push(&LoggedRow { key, content, subtree });
        Ok(())
    }
}

/// What one read records.
struct ReadRecord {
    table: Arc<LearnedNames>,
    slice_of: Option<u64>,
}

impl Names for ReadRecord {
    fn content(&self, name: &StoreKey) -> Option<Hash> {
        self.table.content(name)
    }

    fn learn(&self, name: &StoreKey, bytes: &Verified) -> Result<(), FetchError> {
        let subtree = self.slice_of.map(|offset| {
            let mut hasher = SliceHasher::new(offset);
            hasher.update(bytes.bytes());
            hasher.finish().0.subtree
        });
        let recorded = self.table.insert(name, bytes.hash(), subtree);
        recorded.map_err(|e| FetchError::new(Kind::Corrupt, e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use fletch_core::{Domain, manifest::slice_hash::file_hash};

    fn name(domain: &str, text: &str) -> StoreKey {
        StoreKey { domain: domain.parse().expect("a domain"), hash: Hash::of(text.as_bytes()) }
    }

    fn learn(table: &Arc<LearnedNames>, name: &StoreKey, bytes: &[u8]) -> Result<(), FetchError> {
        table.record(None).learn(name, &Verified::of(Bytes::copy_from_slice(bytes)))
    }

    #[test]
    fn rows_survive_a_restart_and_belong_to_one_domain() {
        let dir = tempfile::tempdir().expect("tempdir");
        let table = LearnedNames::open(dir.path()).expect("open");
        learn(&table, &name("a", "x"), b"bytes").expect("learned");
        learn(&table, &name("a", "x"), b"bytes").expect("the same again");
        assert!(learn(&table, &name("a", "x"), b"other").is_err(), "a row never changes");
        learn(&table, &name("b", "x"), b"other").expect("another domain");
        assert_eq!(table.content(&name("a", "y")), None);
        table.write_log();
        learn(&table, &name("a", "z"), b"lost").expect("learned, and not written");
        drop(table);
        let table = LearnedNames::open(dir.path()).expect("open");
        assert_eq!(table.content(&name("a", "x")), Some(Hash::of(b"bytes")));
        assert_eq!(table.content(&name("b", "x")), Some(Hash::of(b"other")));
        assert_eq!((table.content(&name("a", "z")), table.counts()), (None, (2, 0)));
        assert_eq!(Domain::default_domain().as_str(), "default");
    }

    #[test]
    fn the_slices_of_a_large_file_give_its_hash() {
        let dir = tempfile::tempdir().expect("tempdir");
        let table = LearnedNames::open(dir.path()).expect("open");
        let step = 4 << 20;
        let file: Vec<u8> = (0..2 * step + 99).map(|i: usize| ((i * 31) >> 3) as u8).collect();
        let names: Vec<StoreKey> = (0..3).map(|i| name("a", &i.to_string())).collect();
        for (i, (slice, name)) in file.chunks(step).zip(&names).enumerate() {
            let record = table.record(Some((i * step) as u64));
            record.learn(name, &Verified::of(Bytes::copy_from_slice(slice))).expect("learned");
        }
        table.write_log();
        drop(table);
        let table = LearnedNames::open(dir.path()).expect("open");
        let slices: Vec<SliceHash> = names.iter().map(|n| table.slice(n).expect("learned")).collect();
        assert_eq!(file_hash(&slices), Hash::of(&file));
    }
}
