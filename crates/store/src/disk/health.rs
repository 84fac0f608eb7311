//! The health of the disk tier: when a failing disk turns it off, and when it is on again.
//!
//! ```text
//!        failed write, 3 failed reads in a row, directory gone
//!   On ──────────────────────────────────────────────────────► Off(reason)
//!      ◄──────────────────────────────────────────────────────
//!        `probe`: the directory is ours and can be written
//! ```
//!
//! I5: a disk that fails costs speed only. A failed write turns the tier off. Records that can still be read
//! are served. `Off(Closed)` is final.

use super::{
    DiskEngine, DiskError, MountMemory, OffReason,
    directory_lock::DirectoryLock,
    error::off_reason_for,
    index::SlabLocation,
    open::lock_directory,
    slab::{Files, Slab},
    stats::add,
};
use fletch_core::StoreKey;
use std::{
    fs::{self, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    sync::{Arc, atomic::Ordering},
    time::{Duration, SystemTime},
};

/// Shortest time between two attempts to turn the tier on.
const PROBE_EVERY: Duration = Duration::from_secs(1);
/// Failed reads in a row after which the tier is turned off.
const READ_ERRORS_MAX: u32 = 3;

/// Whether a tier keeps chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// The tier keeps chunks.
    On,
    /// The tier keeps nothing new. `probe` may turn it on.
    Off {
        /// Why the tier is off.
        why: OffReason,
        /// The last `now` that `probe` was given before the tier went off.
        since: SystemTime,
    },
}

/// The health of a tier, and the directory that it depends on.
#[derive(Debug)]
pub(crate) struct HealthState {
    pub health: Health,
    pub now: SystemTime,
    probed: Option<SystemTime>,
    pub directory: Option<DirectoryLock>,
}

impl HealthState {
    /// The state of a tier that was just opened in the directory it locked.
    pub fn on(now: SystemTime, directory: DirectoryLock) -> Self {
        HealthState { health: Health::On, now, probed: None, directory: Some(directory) }
    }

    /// Whether the tier's directory is gone, or another directory lies in its place.
    pub fn directory_lost(&self, dir: &Path) -> bool {
        self.check_directory(dir) == Some(OffReason::Vanished)
    }

    /// Returns why the tier's directory cannot be used, if so.
    fn check_directory(&self, dir: &Path) -> Option<OffReason> {
        match self.directory.as_ref().map(|d| d.is_at(dir)) {
            Some(Ok(true)) => None,
            Some(Err(_)) => Some(OffReason::Denied),
            Some(Ok(false)) | None => Some(OffReason::Vanished),
        }
    }
}

impl DiskEngine {
    /// Whether the tier keeps chunks, and if not, why.
    #[must_use]
    pub fn health(&self) -> Health {
        self.state.lock().health
    }

    fn off_reason(&self) -> Option<OffReason> {
        OffReason::ALL.get(usize::from(self.off.load(Ordering::Acquire)).checked_sub(1)?).copied()
    }

    /// Fails when the tier serves no reads.
    pub(super) fn check_readable(&self) -> Result<(), DiskError> {
        self.off_reason().filter(|w| !w.allows_reads()).map_or(Ok(()), |w| Err(DiskError::Off(w)))
    }

    /// Fails when the tier keeps nothing new.
    pub(super) fn check_writable(&self) -> Result<(), DiskError> {
        self.off_reason().map_or(Ok(()), |w| Err(DiskError::Off(w)))
    }

    /// Fails after `close`.
    pub(super) fn check_not_closed(&self) -> Result<(), DiskError> {
        self.off_reason().filter(|w| *w == OffReason::Closed).map_or(Ok(()), |w| Err(DiskError::Off(w)))
    }

    pub(super) fn turn_off(&self, why: OffReason) {
        let mut s = self.state.lock();
        let worse = match s.health {
            Health::On => true,
            // A read-only disk may still turn out to be gone.
            Health::Off { why: was, .. } => was.allows_reads() && !why.allows_reads(),
        };
        if worse {
            s.health = Health::Off { why, since: s.now };
            self.set_off(Some(why));
            add(&self.counters.turned_off, 1);
            let dir = self.config.dir.display();
            tracing::warn!(%why, %dir, "the disk tier is off; reads skip it until it works again");
        }
    }

    /// Sets the copy of the health that is read without a lock.
    pub(super) fn set_off(&self, why: Option<OffReason>) {
        let code = why.and_then(|w| OffReason::ALL.iter().position(|x| *x == w)).map_or(0, |n| n as u8 + 1);
        self.off.store(code, Ordering::Release);
    }

    /// Checks that the directory is still the tier's, and turns a tier on that works again.
    ///
    /// The owner calls this every few seconds. The tier tries to turn on at most once a second.
    pub fn probe(&self, now: SystemTime) -> Health {
        {
            let mut s = self.state.lock();
            s.now = now;
            let recently = |t: SystemTime| now.duration_since(t).is_ok_and(|d| d < PROBE_EVERY);
            match s.health {
                Health::Off { why: OffReason::Closed, .. } => return s.health,
                Health::Off { .. } if s.probed.is_some_and(recently) => return s.health,
                _ => s.probed = Some(now),
            }
        }
        let lost = self.state.lock().check_directory(&self.config.dir);
        if let Some(why) = lost {
            self.turn_off(why);
        }
        let Health::Off { .. } = self.health() else { return Health::On };
        let back = match lost {
            Some(OffReason::Vanished) => self.start_in_new_directory(),
            Some(why) => Err(DiskError::Off(why)),
            None => self.try_write(),
        };
        match back {
            Ok(()) => {
                tracing::info!(dir = %self.config.dir.display(), "the disk tier is on again");
                self.read_errors.store(0, Ordering::Relaxed);
                self.full.clear();
                self.state.lock().health = Health::On;
                self.set_off(None);
            }
            Err(e) => tracing::debug!(error = %e, "the disk tier stays off"),
        }
        self.health()
    }

    /// Writes a small file and removes it.
    fn try_write(&self) -> Result<(), DiskError> {
        let path = self.config.dir.join("probe");
        let fail = |e| DiskError::io("write", &path, e);
        if self.floor_shortage(self.plan.slab_bytes)? > 0 {
            return Err(DiskError::Off(OffReason::Full));
        }
        let write = || {
            let f = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path)?;
            f.write_all_at(&[0x5a; 4096], 0)?;
            f.sync_data()
        };
        let written = write();
        drop(fs::remove_file(&path));
        written.map_err(fail)
    }

    /// Checks that the file system of the directory is mounted.
    ///
    /// # Errors
    /// As [`MountMemory::check`].
    pub(crate) fn check_mounted(&self) -> Result<(), DiskError> {
        self.config.mount_memory.as_ref().map_or(Ok(()), MountMemory::check)
    }

    /// Starts with an empty index in a new directory, after the old directory vanished.
    fn start_in_new_directory(&self) -> Result<(), DiskError> {
        // The chunks come back with their file system.
        self.check_mounted()?;
        let _exclusive = self.maintenance.lock();
        self.abandon_writing();
        self.catalogue.disconnect();
        self.files.close_all();
        let metas: Vec<_> = {
            let mut index = self.write_index();
            let all: Vec<u32> = index.slabs().map(|(n, _)| n).collect();
            all.into_iter().filter_map(|n| index.drop_slab(n)).collect()
        };
        for m in &metas {
            self.space.give(m.blocks);
        }
        self.state.lock().directory = None;
        let directory = lock_directory(&self.config)?;
        // Another process may have put slabs there that this tier does not know.
        let strays = fs::read_dir(self.files.dir()).into_iter().flatten().flatten();
        for e in strays.filter(|e| e.file_name().to_str().and_then(Files::id_of).is_some()) {
            drop(fs::remove_file(e.path()));
        }
        self.state.lock().directory = Some(directory);
        self.rebuild_catalogue(false);
        self.try_write()
    }

    /// Counts a failed file operation, and turns the tier off if the error means that the disk fails.
    pub(super) fn note_io_error(&self, e: &DiskError) {
        let DiskError::Io { source, .. } = e else { return };
        add(&self.counters.errors, 1);
        match off_reason_for(source) {
            Some(OffReason::Vanished) if !self.state.lock().directory_lost(&self.config.dir) => {
                // Only one file of it: the reader of that slab finds out.
            }
            Some(why) => self.turn_off(why),
            None if source.kind() == io::ErrorKind::WriteZero => self.turn_off(OffReason::Full),
            None => {}
        }
    }

    /// Turns the result of reading a record into bytes, a miss or an error, and quarantines a bad record.
    pub(super) fn check_read<T>(
        &self,
        key: &StoreKey,
        location: SlabLocation,
        slab: &Arc<Slab>,
        read: io::Result<T>,
    ) -> Result<Option<T>, DiskError> {
        match read {
            Ok(got) => {
                self.read_errors.store(0, Ordering::Relaxed);
                Ok(Some(got))
            }
            // The file ends early.
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                self.quarantine_at(key, location);
                Ok(None)
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                if self.state.lock().directory_lost(&self.config.dir) {
                    self.turn_off(OffReason::Vanished);
                    return Err(DiskError::Off(OffReason::Vanished));
                }
                self.drop_lost_slab(slab);
                Ok(None)
            }
            Err(e) => {
                add(&self.counters.errors, 1);
                match off_reason_for(&e) {
                    Some(OffReason::Io) => {
                        self.quarantine_at(key, location);
                        if self.read_errors.fetch_add(1, Ordering::Relaxed) + 1 >= READ_ERRORS_MAX {
                            self.turn_off(OffReason::Io);
                        }
                    }
                    Some(why) => self.turn_off(why),
                    None => {}
                }
                Err(DiskError::io("read", self.files.path(slab.id), e))
            }
        }
    }

    /// Removes a record that cannot be read, unless it moved meanwhile.
    pub(super) fn quarantine_at(&self, key: &StoreKey, location: SlabLocation) {
        if self.write_index().remove_at(key, location).is_some() {
            add(&self.counters.quarantined, 1);
        }
    }

    /// Removes a slab whose file is gone, with all its records.
    pub(super) fn drop_lost_slab(&self, slab: &Arc<Slab>) {
        let mut index = self.write_index();
        let n = index.slabs().find(|(_, m)| Arc::ptr_eq(&m.slab, slab)).map(|(n, _)| n);
        if let Some(meta) = n.and_then(|n| index.drop_slab(n)) {
            drop(index);
            let chunks = meta.live;
            tracing::warn!(
                slab = slab.id,
                chunks,
                "a slab file is gone; its chunks are fetched again when read"
            );
            add(&self.counters.slabs_lost, 1);
            self.release_file(&meta.slab, meta.blocks);
        }
    }
}
