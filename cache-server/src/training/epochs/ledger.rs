//! The ledger file of an epoch: events appended in order and made durable in groups.
//!
//! ```text
//! append (under the epoch's lock) ─► pending ─► one blocking thread: write, fdatasync ─► waiters go on
//! ```
//!
//! 1. Events up to a length that [`LedgerFile::durable`] or [`Recorded::durable`] confirmed survive a crash;
//!    later events may or may not.
//! 2. One fsync serves every request that arrived while the fsync before it ran.
//! 3. After a failure the file is cut back to its durable length and takes no more events: the epoch has to
//!    be opened anew from the file.

use super::JobError;
use crate::tenancy::tenants::FileCharge;
use fletch_core::delivery::Event;
use parking_lot::Mutex;
use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
};
use tokio::{sync::watch, task::spawn_blocking};

#[derive(Debug)]
struct State {
    pending: Vec<u8>,
    /// Bytes appended, pending ones included.
    appended: u64,
    /// A thread is writing.
    writing: bool,
    /// The file takes no more events.
    closed: bool,
}

/// Why the file takes no more events.
#[derive(Debug, Clone)]
enum Stopped {
    /// The file was closed; the caller asks the epoch that is opened anew.
    Closed,
    /// The system refused a write.
    Failed(Arc<io::Error>),
}

/// The durable length, or why it does not grow any more.
type Progress = Result<u64, Stopped>;

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    file: Mutex<File>,
    state: Mutex<State>,
    progress: watch::Sender<Progress>,
    /// Follows the length of the file.
    charge: Arc<FileCharge>,
}

/// Events that a ledger file has, and that become durable without further calls.
#[derive(Debug, Clone)]
pub struct Recorded {
    file: LedgerFile,
    upto: u64,
}

impl Recorded {
    /// Waits until the events are durable.
    ///
    /// # Errors
    /// Those of [`LedgerFile::durable`].
    pub async fn durable(&self) -> Result<(), JobError> {
        self.file.durable(self.upto).await
    }
}

/// The ledger file of one epoch. Clones share the file.
#[derive(Debug, Clone)]
pub struct LedgerFile(Arc<Shared>);

/// Returns whether a file that begins with `head_bytes` bytes was never synced: it is shorter, or all zeros.
/// Blocking.
pub fn is_unsynced(path: &Path, head_bytes: usize) -> io::Result<bool> {
    let mut file = File::open(path)?;
    let what = file.metadata()?;
    if what.is_file() && what.len() < head_bytes as u64 {
        return Ok(true);
    }
    let mut first = [0; 8];
    file.read_exact(&mut first)?;
    Ok(first == [0; 8] && std::fs::read(path)?.iter().all(|b| *b == 0))
}

impl LedgerFile {
    /// Opens a ledger file with `len` valid bytes; cuts off the torn append after them. Blocking.
    ///
    /// `charge` follows the length of the file.
    ///
    /// # Errors
    /// What the system said.
    pub fn open(path: &Path, len: u64, charge: Arc<FileCharge>) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).open(path)?;
        if file.metadata()?.len() > len {
            tracing::warn!(file = %path.display(), at = len, "a crash tore the last record; it is cut off");
            file.set_len(len)?;
        }
        // Bytes written before a crash may be in the page cache only. The caller is about to rely on them.
        file.sync_all()?;
        charge.set(len);
        Ok(LedgerFile(Arc::new(Shared {
            path: path.to_owned(),
            file: Mutex::new(file),
            state: Mutex::new(State { pending: Vec::new(), appended: len, writing: false, closed: false }),
            progress: watch::Sender::new(Ok(len)),
            charge,
        })))
    }

    /// Returns the file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Returns the number of bytes appended so far.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.state.lock().appended
    }

    /// Returns the number of durable bytes; `None` once the file failed or was closed.
    #[must_use]
    pub fn durable_len(&self) -> Option<u64> {
        self.0.progress.borrow().as_ref().ok().copied()
    }

    /// Returns whether the file still takes events.
    #[must_use]
    pub fn works(&self) -> bool {
        self.0.progress.borrow().is_ok()
    }

    /// Appends events; returns the length to pass to [`LedgerFile::durable`].
    pub fn append(&self, events: &[Event]) -> u64 {
        let mut state = self.0.state.lock();
        let before = state.pending.len();
        events.iter().for_each(|e| e.append(&mut state.pending));
        state.appended += (state.pending.len() - before) as u64;
        if !state.closed {
            self.0.charge.set(state.appended);
        }
        state.appended
    }

    /// Closes the file: returns when no thread writes, so that the file may be opened anew. Waiters fail.
    /// Blocking.
    pub fn close(&self) {
        self.0.state.lock().closed = true;
        let _written = self.0.file.lock();
        self.0.progress.send_if_modified(|p| {
            let works = p.is_ok();
            if works {
                *p = Err(Stopped::Closed);
            }
            works
        });
    }

    /// Starts to make the first `upto` bytes durable, and returns at once.
    pub fn record(&self, upto: u64) -> Recorded {
        if self.durable_len().is_some_and(|durable| durable < upto) {
            self.start_writing();
        }
        Recorded { file: self.clone(), upto }
    }

    /// Starts to write the pending events, unless a thread writes already.
    fn start_writing(&self) {
        if !std::mem::replace(&mut self.0.state.lock().writing, true) {
            let shared = Arc::clone(&self.0);
            drop(spawn_blocking(move || shared.write()));
        }
    }

    /// Waits until the first `upto` bytes are durable. The write goes on when the caller goes away.
    ///
    /// # Errors
    /// [`JobError::Io`], and [`JobError::Reopening`] when it was closed meanwhile; what was appended may be
    /// lost.
    pub async fn durable(&self, upto: u64) -> Result<(), JobError> {
        let mut progress = self.0.progress.subscribe();
        loop {
            match &*progress.borrow_and_update() {
                Ok(len) if *len >= upto => return Ok(()),
                Ok(_) => {}
                Err(why) => return Err(self.0.stopped(why)),
            }
            self.start_writing();
            progress.changed().await.map_err(|_| JobError::TaskLost)?;
        }
    }
}

impl Shared {
    fn stopped(&self, why: &Stopped) -> JobError {
        match why {
            Stopped::Closed => JobError::Reopening,
            Stopped::Failed(e) => {
                let error = io::Error::new(e.kind(), e.to_string());
                JobError::Io { path: self.path.clone(), error }
            }
        }
    }

    /// Writes until no event is pending.
    fn write(&self) {
        let mut file = self.file.lock();
        loop {
            let (bytes, upto) = {
                let mut state = self.state.lock();
                if state.closed {
                    return;
                }
                if state.pending.is_empty() {
                    state.writing = false;
                    return;
                }
                (std::mem::take(&mut state.pending), state.appended)
            };
            let durable = upto - bytes.len() as u64;
            match file.write_all(&bytes).and_then(|()| file.sync_data()) {
                Ok(()) => drop(self.progress.send_replace(Ok(upto))),
                Err(e) => {
                    tracing::error!(
                        file = %self.path.display(), error = %e,
                        "the ledger cannot be written; its epoch is opened anew"
                    );
                    if let Err(e) = file.set_len(durable) {
                        tracing::error!(
                            error = %e,
                            "the ledger cannot be cut back; the next start cuts its torn end"
                        );
                    }
                    self.charge.set(durable);
                    // `writing` stays set: this file is not written again.
                    drop(self.progress.send_replace(Err(Stopped::Failed(Arc::new(e)))));
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenancy::tenants::{FairPermits, StateBytes};
    use fletch_core::delivery::ledger::{Header, Ledger, begin};
    use fletch_core::{
        LayoutId, Root,
        plan::{Tail, World},
    };
    use fletch_host::replace::replace_file;

    fn charge() -> Arc<FileCharge> {
        let tenant = fletch_core::Tenant::default_tenant();
        let place = FairPermits::new(1, 1).force(&tenant, 1);
        StateBytes::default().job(&tenant, place).ledger(0)
    }

    fn header() -> Vec<u8> {
        let h = fletch_core::Hash::of(b"x");
        let world = World { batch: 1, ranks: 1, tail: Tail::Keep };
        begin(&Header {
            job: "j".into(),
            epoch: 0,
            root: Root(h),
            layout: LayoutId(h),
            plan: h,
            order: "strict".into(),
            seed: 0,
            world,
        })
    }

    #[tokio::test]
    async fn what_is_durable_is_read_again_and_torn_ends_are_cut() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("e.ledger");
        let head = header();
        replace_file(&path, &head).expect("written");
        let file = LedgerFile::open(&path, head.len() as u64, charge()).expect("open");
        let event = |lease| Event::Expire { lease };
        let waits = (0..50).map(|i| {
            let upto = file.append(&[event(i)]);
            let file = file.clone();
            async move { file.durable(upto).await }
        });
        for done in futures::future::join_all(waits).await {
            done.expect("durable");
        }
        assert_eq!(file.durable_len(), Some(file.len()));
        assert_eq!(file.0.charge.bytes(), file.len(), "the charge follows the file");
        // A crash in the middle of an append.
        OpenOptions::new().append(true).open(&path).expect("open").write_all(&[9; 11]).expect("torn");
        let read = Ledger::read(&std::fs::read(&path).expect("bytes")).expect("torn is not damaged");
        assert_eq!(read.events, (0..50).map(event).collect::<Vec<_>>());
        let again = LedgerFile::open(&path, read.len as u64, charge()).expect("open");
        assert_eq!(std::fs::metadata(&path).expect("metadata").len(), again.len());
        let upto = again.append(&[event(99)]);
        again.durable(upto).await.expect("durable");
        let read = Ledger::read(&std::fs::read(&path).expect("bytes")).expect("whole");
        assert_eq!(read.events.last(), Some(&event(99)));
    }

    #[tokio::test]
    async fn events_become_durable_although_nobody_waits_for_them() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("e.ledger");
        let head = header();
        replace_file(&path, &head).expect("written");
        let file = LedgerFile::open(&path, head.len() as u64, charge()).expect("open");
        let mut progress = file.0.progress.subscribe();
        let recorded = file.record(file.append(&[Event::Expire { lease: 3 }]));
        progress.changed().await.expect("it lives");
        assert_eq!(file.durable_len(), Some(file.len()));
        recorded.durable().await.expect("durable");
        let read = Ledger::read(&std::fs::read(&path).expect("bytes")).expect("whole");
        assert_eq!(read.events, [Event::Expire { lease: 3 }]);
        file.close();
        let lost = file.record(file.append(&[Event::Expire { lease: 4 }]));
        assert!(matches!(lost.durable().await, Err(JobError::Reopening)), "a closed file takes no events");
        recorded.durable().await.expect_err("nothing is known of a closed file");
    }

    #[tokio::test]
    async fn one_sync_serves_all_that_came_while_the_file_was_busy() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("e.ledger");
        replace_file(&path, &header()).expect("written");
        let file = LedgerFile::open(&path, header().len() as u64, charge()).expect("open");
        let mut progress = file.0.progress.subscribe();
        let (busy, free) = std::sync::mpsc::channel::<()>();
        let shared = Arc::clone(&file.0);
        let (begun, holds) = tokio::sync::oneshot::channel();
        let holder = std::thread::spawn(move || {
            let _file = shared.file.lock();
            begun.send(()).expect("awaited");
            free.recv().expect("released");
        });
        holds.await.expect("held");
        let mut waits = tokio::task::JoinSet::new();
        for lease in 0..50 {
            let file = file.clone();
            waits.spawn(async move {
                let upto = file.append(&[Event::Expire { lease }]);
                file.durable(upto).await
            });
        }
        let mut one = Vec::new();
        Event::Expire { lease: 0 }.append(&mut one);
        while file.0.state.lock().pending.len() < 50 * one.len() {
            tokio::task::yield_now().await;
        }
        busy.send(()).expect("held");
        progress.changed().await.expect("it lives");
        assert_eq!(progress.borrow().as_ref().ok(), Some(&file.len()), "the first sync was of all of them");
        while let Some(done) = waits.join_next().await {
            done.expect("it ran").expect("durable");
        }
        holder.join().expect("it ended");
    }

    /// An ack that waits to be durable while the epoch is closed may be asked again, of what is opened anew.
    #[tokio::test(flavor = "multi_thread")]
    async fn what_waits_while_it_is_closed_may_be_asked_again() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("e.ledger");
        let head = header();
        replace_file(&path, &head).expect("written");
        let file = LedgerFile::open(&path, head.len() as u64, charge()).expect("open");
        let (closing, waiting) = (file.clone(), file.clone());
        // The disk is busy: nothing becomes durable until this is given back.
        let busy = file.0.file.lock();
        let upto = file.append(&[Event::Expire { lease: 1 }]);
        let acks = tokio_util::task::TaskTracker::new();
        let ack = acks.spawn(async move { waiting.durable(upto).await });
        while !file.0.state.lock().writing {
            std::thread::yield_now();
        }
        let closed = std::thread::spawn(move || closing.close());
        while !file.0.state.lock().closed {
            std::thread::yield_now();
        }
        drop(busy);
        closed.join().expect("closed");
        let refused = ack.await.expect("a task").expect_err("it is not durable");
        assert!(matches!(refused, JobError::Reopening) && refused.code().retryable(), "{refused}");
        // Nobody wrote, then or later.
        let more = file.append(&[Event::Expire { lease: 2 }]);
        assert!(matches!(file.durable(more).await, Err(JobError::Reopening)));
        assert_eq!(std::fs::metadata(&path).expect("metadata").len(), head.len() as u64);
    }

    #[tokio::test]
    async fn a_file_that_cannot_be_written_says_so_and_takes_nothing_more() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("e.ledger");
        replace_file(&path, &header()).expect("written");
        // A descriptor that is not open for writing fails like a disk that is full.
        let file = File::open(&path).expect("open");
        let len = file.metadata().expect("metadata").len();
        let broken = LedgerFile(Arc::new(Shared {
            path: path.clone(),
            file: Mutex::new(file),
            state: Mutex::new(State { pending: Vec::new(), appended: len, writing: false, closed: false }),
            progress: watch::Sender::new(Ok(len)),
            charge: charge(),
        }));
        for _ in 0..2 {
            let upto = broken.append(&[Event::Expire { lease: 1 }]);
            assert!(matches!(broken.durable(upto).await, Err(JobError::Io { .. })));
        }
        assert!(!broken.works());
        assert_eq!(std::fs::metadata(&path).expect("metadata").len(), len);
    }
}
