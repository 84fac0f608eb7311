//! The catalogue: which records of sealed slabs are dead.
//!
//! Tables of slabs cannot say it, as they are never rewritten. It has one row per sealed slab: which of its
//! table's records were evicted, quarantined or replaced. It is not needed: a lost row makes dead records
//! live again, and a reader hashes their bytes. So it is written in batches. After any error it is kept aside
//! and rebuilt from the index.
//!
//! Invariants:
//! 1. this is the only file that names sled, and neither errors nor panics of sled leave it;
//! 2. the catalogue occupies at most `bytes_max`; damaged catalogues, kept aside, at most `aside_max`.

use parking_lot::Mutex;
use std::{
    collections::HashMap,
    fs, io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    time::Duration,
};

/// Most damaged catalogues that are kept for an analysis.
const ASIDE_MAX: usize = 2;
/// Rows per batch.
const BATCH: usize = 256;
/// How often, and after which wait, sled's own lock is tried again.
const LOCK_TRIES: u32 = 20;
const LOCK_WAIT: Duration = Duration::from_millis(25);
const CACHE_BYTES: u64 = 16 << 20;
const FORMAT_KEY: &[u8] = b"format";
const FORMAT: &[u8] = b"fletch catalogue 1";

/// The dead rows of a sealed slab's table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeadMarks {
    /// Identifies the table: the first eight bytes of its hash.
    pub check: [u8; 8],
    /// Number of rows in the table.
    pub rows: u32,
    /// One bit a row, set for a dead one. Trailing zero bytes are left out.
    pub dead: Vec<u8>,
}

impl DeadMarks {
    pub fn is_dead(&self, row: usize) -> bool {
        self.dead.get(row / 8).is_some_and(|b| b & (1 << (row % 8)) != 0)
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = self.check.to_vec();
        out.extend_from_slice(&self.rows.to_le_bytes());
        out.extend_from_slice(&self.dead);
        out
    }

    pub fn decode(b: &[u8]) -> Option<Self> {
        let check = b.get(..8)?.try_into().ok()?;
        let rows = u32::from_le_bytes(b.get(8..12)?.try_into().ok()?);
        let dead = b.get(12..)?.to_vec();
        (dead.len() <= (rows as usize).div_ceil(8)).then_some(DeadMarks { check, rows, dead })
    }
}

/// A change to the catalogue: new marks of a slab, or its removal.
pub(crate) type Change = (u64, Option<DeadMarks>);

/// Why the whole catalogue must be rebuilt.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CatalogueError {
    #[error("catalogue: {0}")]
    Damaged(String),
    #[error("the catalogue was made for another cache.size")]
    Resized,
    #[error("the catalogue has grown to {0} bytes, near its limit")]
    Grown(u64),
}

impl CatalogueError {
    pub fn damaged(&self) -> bool {
        matches!(self, CatalogueError::Damaged(_))
    }
}

#[derive(Debug)]
pub(crate) struct Catalogue {
    dir: PathBuf,
    bytes_max: u64,
    aside_max: u64,
    db: Mutex<Option<sled::Db>>,
}

impl Catalogue {
    /// Opens `dir/catalogue` and reads all of it. After an error the catalogue is closed and has no rows.
    pub fn open(
        dir: &Path,
        bytes_max: u64,
        aside_max: u64,
    ) -> (Self, HashMap<u64, DeadMarks>, Option<CatalogueError>) {
        let c = Catalogue { dir: dir.into(), bytes_max, aside_max, db: Mutex::new(None) };
        let read = c.connect().and_then(|db| {
            let rows = read_all(&db);
            *c.lock() = Some(db);
            rows
        });
        match read {
            Ok(rows) => (c, rows, None),
            Err(error) => {
                c.disconnect();
                (c, HashMap::new(), Some(error))
            }
        }
    }

    pub fn is_open(&self) -> bool {
        self.lock().is_some()
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, Option<sled::Db>> {
        self.db.lock()
    }

    fn path(&self) -> PathBuf {
        self.dir.join("catalogue")
    }

    fn connect(&self) -> Result<sled::Db, CatalogueError> {
        // sled occupies about five segments however little it holds.
        let segment = if self.bytes_max < 8 << 20 { 64 << 10 } else { 512 << 10 };
        let open = || {
            sled::Config::new()
                .path(self.path())
                .cache_capacity(CACHE_BYTES)
                .flush_every_ms(None)
                .segment_size(segment)
                .open()
        };
        for _ in 0..LOCK_TRIES {
            match catch_sled(open) {
                // The directory is ours. A forked child of its last owner has not closed its copies of the
                // files yet.
                Err(CatalogueError::Damaged(e)) if e.contains("acquire lock") => {
                    std::thread::sleep(LOCK_WAIT)
                }
                done => return done,
            }
        }
        catch_sled(open)
    }

    /// Writes changes in order of their slabs and makes them durable.
    ///
    /// Does nothing while the catalogue is closed.
    pub fn write(&self, mut changes: Vec<Change>) -> Result<(), CatalogueError> {
        if changes.is_empty() {
            return Ok(());
        }
        changes.sort_by_key(|c| c.0);
        let db = self.lock();
        let Some(db) = db.as_ref() else { return Ok(()) };
        let mut rest = &changes[..];
        while !rest.is_empty() {
            let mut batch = sled::Batch::default();
            let (mut rows, mut bytes) = (0, 0);
            for (id, marks) in rest.iter().take(BATCH) {
                let row = marks.as_ref().map(DeadMarks::encode);
                bytes += row.as_ref().map_or(0, Vec::len) as u64;
                // So that no batch takes the catalogue past its limit.
                if rows > 0 && bytes > self.bytes_max / 16 {
                    break;
                }
                match row {
                    Some(row) => batch.insert(&id.to_be_bytes(), row),
                    None => batch.remove(&id.to_be_bytes()),
                }
                rows += 1;
            }
            rest = &rest[rows..];
            catch_sled(|| db.apply_batch(batch).and_then(|()| db.flush()))?;
            let bytes = du(&self.path());
            if bytes > self.bytes_max / 4 * 3 {
                return Err(CatalogueError::Grown(bytes));
            }
        }
        Ok(())
    }

    /// Replaces the catalogue by a new one with `all`. Keeps a `damaged` one aside, and deletes any other.
    pub fn rebuild(&self, all: Vec<Change>, damaged: bool) -> Result<(), CatalogueError> {
        self.disconnect();
        if damaged {
            self.set_aside();
        } else {
            drop(fs::remove_dir_all(self.path()));
        }
        let db = self.connect()?;
        catch_sled(|| db.insert(FORMAT_KEY, FORMAT))?;
        *self.lock() = Some(db);
        let written = self.write(all);
        if written.is_err() {
            // A new catalogue is already too large: the tier works without one.
            self.disconnect();
            drop(fs::remove_dir_all(self.path()));
        }
        written
    }

    /// Closes the catalogue. Everything that was written is durable.
    pub fn disconnect(&self) {
        if let Some(db) = self.lock().take()
            && catch_sled(|| {
                drop(db);
                Ok(())
            })
            .is_err()
        {
            tracing::warn!(
                "the catalogue of the disk tier did not close cleanly; it may be rebuilt at the next start"
            );
        }
    }

    /// Renames the damaged catalogue, and deletes the oldest damaged ones beyond their limits.
    fn set_aside(&self) {
        let mut asides = self.asides();
        let next = asides.last().map_or(0, |a| a.0 + 1);
        let aside = self.dir.join(format!("catalogue.bad-{next}"));
        match fs::rename(self.path(), &aside) {
            Ok(()) => asides.push((next, aside)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(_) => drop(fs::remove_dir_all(self.path()).or_else(|_| fs::remove_file(self.path()))),
        }
        let mut bytes = 0;
        for (kept, (_, path)) in asides.iter().rev().enumerate() {
            bytes += du(path);
            if kept >= ASIDE_MAX || bytes > self.aside_max {
                drop(fs::remove_dir_all(path).or_else(|_| fs::remove_file(path)));
            }
        }
    }

    fn asides(&self) -> Vec<(u64, PathBuf)> {
        let mut out: Vec<_> = fs::read_dir(&self.dir)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|e| {
                Some((e.file_name().to_str()?.strip_prefix("catalogue.bad-")?.parse().ok()?, e.path()))
            })
            .collect();
        out.sort();
        out
    }
}

/// Runs a call of sled, and turns its errors and panics into `CatalogueError`.
fn catch_sled<T>(f: impl FnOnce() -> sled::Result<T>) -> Result<T, CatalogueError> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(t)) => Ok(t),
        // sled's own text advises to restore a setting that Fletch does not have.
        Ok(Err(sled::Error::Unsupported(why))) if why.contains("io buffer size") => {
            Err(CatalogueError::Resized)
        }
        Ok(Err(e)) => Err(CatalogueError::Damaged(e.to_string())),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_string()));
            Err(CatalogueError::Damaged(format!("panicked: {}", text.unwrap_or_default())))
        }
    }
}

fn read_all(db: &sled::Db) -> Result<HashMap<u64, DeadMarks>, CatalogueError> {
    catch_sled(|| {
        let mut rows = HashMap::new();
        if db.is_empty() {
            db.insert(FORMAT_KEY, FORMAT)?;
            return Ok(Some(rows));
        }
        if db.get(FORMAT_KEY)?.as_deref() != Some(FORMAT) {
            return Ok(None);
        }
        for row in db.iter() {
            let (k, v) = row?;
            if &*k == FORMAT_KEY {
                continue;
            }
            match (k.as_ref().try_into().map(u64::from_be_bytes), DeadMarks::decode(&v)) {
                (Ok(id), Some(m)) => drop(rows.insert(id, m)),
                _ => return Ok(None),
            }
        }
        Ok(Some(rows))
    })?
    .ok_or_else(|| CatalogueError::Damaged("it has another format".into()))
}

/// Returns the bytes that a file, or a directory with its content, occupies.
///
/// Files that vanish meanwhile count 0.
pub(crate) fn du(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(meta) = fs::symlink_metadata(path) else { return 0 };
    let inside = if meta.is_dir() {
        fs::read_dir(path).into_iter().flatten().flatten().map(|e| du(&e.path())).sum()
    } else {
        0
    };
    meta.blocks() * 512 + inside
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(n: u64, bytes: usize) -> DeadMarks {
        DeadMarks { check: n.to_le_bytes(), rows: bytes as u32 * 8, dead: vec![n as u8 | 1; bytes] }
    }

    #[test]
    fn what_is_written_is_read_and_the_last_word_counts() {
        let dir = tempfile::tempdir().expect("a directory");
        let (c, rows, error) = Catalogue::open(dir.path(), 3 << 19, 0);
        assert!(rows.is_empty() && error.is_none());
        c.write((0..600).map(|n| (n, Some(marks(n, 3)))).collect()).expect("written");
        c.write(vec![(7, None), (8, Some(marks(80, 5)))]).expect("written");
        c.disconnect();
        let (_c, rows, error) = Catalogue::open(dir.path(), 3 << 19, 0);
        assert!(error.is_none());
        assert_eq!((rows.len(), rows.get(&7), rows.get(&8)), (599, None, Some(&marks(80, 5))));
        assert!(rows[&9].is_dead(0) && !rows[&2].is_dead(2) && !rows[&9].is_dead(1000));
    }

    #[test]
    fn i6_it_never_occupies_more_than_it_may() {
        let dir = tempfile::tempdir().expect("a directory");
        let max = 3 << 19;
        let (c, _, _) = Catalogue::open(dir.path(), max, 0);
        let mut rebuilt = 0;
        for round in 0..400 {
            let all = (0..64).map(|n| (n, Some(marks(n ^ round, 1500)))).collect::<Vec<Change>>();
            if let Err(error) = c.write(all.clone()) {
                assert!(!error.damaged(), "{error}");
                assert!(du(&c.path()) <= max, "{} before it was begun anew", du(&c.path()));
                c.rebuild(all, error.damaged()).expect("rebuilt");
                rebuilt += 1;
            }
            assert!(du(dir.path()) <= max, "{} in round {round}", du(dir.path()));
        }
        assert!(rebuilt < 200, "{rebuilt} rebuilds in 400 rounds");
        // What cannot fit is not kept at all, and costs nothing but revived records.
        let huge: Vec<Change> = (0..4000).map(|n| (n, Some(marks(n, 1500)))).collect();
        assert!(c.write(huge.clone()).is_err());
        assert!(du(dir.path()) <= max, "{} after too much was written", du(dir.path()));
        assert!(c.rebuild(huge, false).is_err());
        assert!(!c.is_open() && !c.path().exists());
        c.write(vec![(1, None)]).expect("nothing is written while there is none");
    }

    #[test]
    fn a_catalogue_for_another_cache_size_is_rebuilt_with_the_reason_in_our_words() {
        let dir = tempfile::tempdir().expect("a directory");
        let (c, _, error) = Catalogue::open(dir.path(), 3 << 19, 0);
        assert!(error.is_none());
        c.disconnect();
        let (c, rows, error) = Catalogue::open(dir.path(), 64 << 20, 64 << 20);
        let error = error.expect("sled does not change the size of its segments");
        assert_eq!(error.to_string(), "the catalogue was made for another cache.size");
        assert!(rows.is_empty() && !c.is_open());
        c.rebuild(vec![(1, Some(marks(1, 3)))], true).expect("rebuilt");
        assert!(c.is_open());
    }

    #[test]
    fn a_panic_stays_here() {
        let error = catch_sled::<()>(|| panic!("inside")).expect_err("contained");
        assert_eq!(error.to_string(), "catalogue: panicked: inside");
    }
}
