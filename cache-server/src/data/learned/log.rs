//! The log of learned names (`docs/FORMATS.md`, "Learned names"). It is appended to once a second.
//!
//! A record has the rows of one write: kind 1, rows of `key 16 · content 32`; kind 2, the slices of large
//! files, rows of `key 16 · content 32 · subtree 32`. A row is never written twice, so the log has no more
//! rows than the table.

use crate::tenancy::state::StateError;
use fletch_core::{
    Hash,
    manifest::{location_name::ShortName, slice_hash::ChainingValue},
    record,
};
use parking_lot::Mutex;
use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

const FILES: u8 = 1;
const SLICES: u8 = 2;
const FILE_BYTES: usize = 48;
const SLICE_BYTES: usize = 80;
/// The most bytes of rows that wait for a write. Later rows are in memory only.
const PENDING_BYTES_MAX: usize = 64 << 20;
/// The most bytes of one record, a multiple of both lengths of rows.
const RECORD_BYTES_MAX: usize = FILE_BYTES * SLICE_BYTES * 256;

/// A row, as the log has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoggedRow {
    /// The key of the name.
    pub key: ShortName,
    /// The hash of the bytes.
    pub content: Hash,
    /// The value in the tree of the file, if the bytes are a slice of a large one.
    pub subtree: Option<ChainingValue>,
}

#[derive(Debug, Default)]
struct Pending {
    files: Vec<u8>,
    slices: Vec<u8>,
}

/// The file, and how much of it is whole.
#[derive(Debug)]
struct LogFile {
    file: File,
    len: u64,
    /// Whether the last write failed, and may have left a part of a record after `len`.
    failing: bool,
}

#[derive(Debug)]
pub struct LearnedLog {
    path: PathBuf,
    pending: Mutex<Pending>,
    file: Mutex<LogFile>,
}

impl LearnedLog {
    /// Opens the log, and passes its rows to `take`. Blocking. A damaged log is set aside.
    ///
    /// # Errors
    /// [`StateError::Open`].
    pub fn open(path: &Path, mut take: impl FnMut(LoggedRow)) -> Result<Self, StateError> {
        let failed = |error| StateError::Open { path: path.to_owned(), error };
        let old = match std::fs::read(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            old => old.map_err(failed)?,
        };
        let len = match record::read(&old) {
            Ok((records, len)) => {
                records.iter().flat_map(|r| rows_of(r.kind, r.payload)).for_each(&mut take);
                len
            }
            Err(why) => {
                let aside = path.with_extension("damaged");
                tracing::warn!(
                    log = %path.display(), %why, aside = %aside.display(),
                    "what drafts had learned is read again"
                );
                std::fs::rename(path, aside).map_err(failed)?;
                0
            }
        };
        let mut open = OpenOptions::new();
        let mut file = open.create(true).append(true).mode(0o600).open(path).map_err(failed)?;
        let mut len = len as u64;
        file.set_len(len).map_err(failed)?;
        if len == 0 {
            file.write_all(&record::file_header()).map_err(failed)?;
            len = record::FILE_HEADER_BYTES as u64;
        }
        let file = Mutex::new(LogFile { file, len, failing: false });
        Ok(LearnedLog { path: path.to_owned(), pending: Mutex::default(), file })
    }

    /// Adds a row to the next write.
    pub fn push(&self, row: &LoggedRow) {
        let mut pending = self.pending.lock();
        if pending.files.len() + pending.slices.len() >= PENDING_BYTES_MAX {
            return;
        }
        let rows = if row.subtree.is_some() { &mut pending.slices } else { &mut pending.files };
        rows.extend_from_slice(&row.key);
        rows.extend_from_slice(row.content.as_bytes());
        rows.extend(row.subtree.iter().flatten());
    }

    /// Appends the rows that came since the last write, and syncs. After a failure the rows are in memory
    /// only, and the file is as before. Blocking.
    pub fn write(&self) {
        let rows = std::mem::take(&mut *self.pending.lock());
        let mut out = Vec::with_capacity(rows.files.len() + rows.slices.len());
        for (kind, rows) in [(FILES, &rows.files), (SLICES, &rows.slices)] {
            rows.chunks(RECORD_BYTES_MAX).for_each(|rows| record::append(&mut out, kind, rows));
        }
        if out.is_empty() {
            return;
        }
        let mut log = self.file.lock();
        // A record after half a record would make the whole log a damaged one.
        let whole = if log.failing { log.file.set_len(log.len) } else { Ok(()) };
        let written = whole.and_then(|()| log.file.write_all(&out)).and_then(|()| log.file.sync_data());
        match written {
            Ok(()) => {
                log.len += out.len() as u64;
                log.failing = false;
            }
            Err(error) => {
                if !std::mem::replace(&mut log.failing, true) {
                    let log = self.path.display();
                    tracing::warn!(%log, %error, "what drafts learn is not kept beyond a restart");
                }
            }
        }
    }
}

/// Returns the rows of a record. An unknown kind has none.
fn rows_of(kind: u8, payload: &[u8]) -> impl Iterator<Item = LoggedRow> + '_ {
    let len = match kind {
        FILES => FILE_BYTES,
        SLICES => SLICE_BYTES,
        _ => usize::MAX,
    };
    payload.chunks_exact(len).filter_map(|row| {
        let (key, rest) = row.split_at_checked(size_of::<ShortName>())?;
        let (content, subtree) = rest.split_at_checked(size_of::<Hash>())?;
        Some(LoggedRow {
            key: key.try_into().ok()?,
            content: content.try_into().ok()?,
            subtree: subtree.try_into().ok(),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(i: u8) -> LoggedRow {
        let subtree = i.is_multiple_of(3).then_some([i; 32]);
        LoggedRow { key: [i; 16], content: Hash([i; 32]), subtree }
    }

    fn read(path: &Path) -> Vec<LoggedRow> {
        let mut rows = Vec::new();
        LearnedLog::open(path, |row| rows.push(row)).expect("open");
        rows.sort_by_key(|row| row.key);
        rows
    }

    #[test]
    fn every_torn_tail_is_cut_and_damage_is_set_aside() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("learned.log");
        let log = LearnedLog::open(&path, |_| {}).expect("open");
        (0..4).for_each(|i| log.push(&row(i)));
        log.write();
        let first = std::fs::metadata(&path).expect("stat").len();
        (4..9).for_each(|i| log.push(&row(i)));
        log.write();
        log.write();
        drop(log);
        assert_eq!(read(&path), (0..9).map(row).collect::<Vec<_>>());
        let whole = std::fs::read(&path).expect("read");
        for len in [0, 7, record::FILE_HEADER_BYTES, 40, whole.len() - 1] {
            std::fs::write(&path, &whole[..len]).expect("write");
            let rows = read(&path);
            let max = if (len as u64) < first { 4 } else { 9 };
            assert!(rows.len() < max && rows.iter().all(|r| *r == row(r.key[0])), "{len}: {rows:?}");
            // The log goes on after the tail that was cut.
            let log = LearnedLog::open(&path, |_| {}).expect("open");
            log.push(&row(200));
            log.write();
            assert_eq!(read(&path).last(), Some(&row(200)), "{len}");
        }
        let mut damaged = whole.clone();
        damaged[record::FILE_HEADER_BYTES + 3] ^= 1;
        std::fs::write(&path, &damaged).expect("write");
        assert_eq!(read(&path), []);
        assert_eq!(std::fs::read(dir.path().join("learned.damaged")).expect("set aside"), damaged);
    }
}
