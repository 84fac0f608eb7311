//! The journal of the leases that a process got, for another process that outlives it.
//!
//! ```text
//! worker: grant frame ─► LeaseJournal::note ─► a file of numbers ─► the process that made the worker
//! ```
//!
//! A worker can be killed with leases that it received and that its consumer never got. The process that made
//! the worker reads their numbers and releases them.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

/// The length of a slot: the number of a lease, little-endian. 0: no lease.
const SLOT_BYTES: u64 = 8;

/// Writes the numbers of the latest leases to slots of a file, in turn.
#[derive(Debug)]
pub struct LeaseJournal {
    file: File,
    first: u64,
    slots: u64,
    noted: AtomicU64,
}

impl LeaseJournal {
    /// Opens the file whose slots from `first` on, `slots` of them, are for this process only.
    ///
    /// # Errors
    /// [`io::Error`]: the file cannot be opened for writing.
    pub fn open(path: &Path, first: u64, slots: u64) -> io::Result<Self> {
        let file = File::options().write(true).open(path)?;
        Ok(LeaseJournal { file, first, slots: slots.max(1), noted: AtomicU64::new(0) })
    }

    /// Writes the number of a lease.
    pub(super) fn note(&self, lease: u64) {
        let slot = self.first + self.noted.fetch_add(1, Relaxed) % self.slots;
        if let Err(error) = self.file.write_all_at(&lease.to_le_bytes(), slot * SLOT_BYTES) {
            tracing::warn!(%error, lease, "could not note a lease; if this process is killed, it expires");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_leases_are_in_the_slots_of_the_process() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("journal");
        std::fs::write(&path, [0; 8 * 6]).expect("written");
        let journal = LeaseJournal::open(&path, 2, 3).expect("opened");
        (11..=14).for_each(|lease| journal.note(lease));
        let bytes = std::fs::read(&path).expect("read");
        let slots: Vec<u64> = bytes.chunks(8).map(|b| u64::from_le_bytes(b.try_into().expect("8"))).collect();
        assert_eq!(slots, [0, 0, 14, 12, 13, 0]);
        assert!(LeaseJournal::open(&dir.path().join("none"), 0, 1).is_err());
    }
}
