//! Traces of sweeps (`docs/FORMATS-epochs.md`, "Trace"): every call to a sweep and what came of it, in a file
//! that `fletch simulate --play` makes again.
//!
//! 1. (I6) All traces of one run together are at most as long as was said, but for the marks that say that
//!    they were cut.
//! 2. A recording never stops a sweep: what cannot be written ends it, and is said once.
//! 3. A file always ends with a whole record; what was not written yet when the server was killed is lost.

use crate::data::versions::Source;
use fletch_core::{LayoutId, Root, order::SweepPolicy};
use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Write as _},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{SystemTime, UNIX_EPOCH},
};
use tokio_util::task::TaskTracker;

/// Where traces go, and how much of them.
#[derive(Debug)]
pub struct Recorder {
    dir: PathBuf,
    left_bytes: AtomicU64,
    begun: AtomicU64,
}

/// The trace of one sweep.
#[derive(Debug)]
pub struct Recording {
    recorder: Arc<Recorder>,
    path: PathBuf,
    /// What is to be written, in its order. Taken with the file locked.
    waiting: Mutex<VecDeque<Vec<u8>>>,
    /// Gone once it ended.
    file: Mutex<Option<File>>,
    /// Whether its header is among what was taken. A sweep's first piece is that and nothing else.
    begun: AtomicBool,
    /// There was no room for that: it takes nothing more, and its file goes.
    given_up: AtomicBool,
}

impl Recorder {
    /// Traces in `dir`, of `bytes` together.
    #[must_use]
    pub fn new(dir: PathBuf, bytes: u64) -> Arc<Self> {
        Arc::new(Recorder { dir, left_bytes: AtomicU64::new(bytes), begun: AtomicU64::new(0) })
    }

    /// A file for the trace of a sweep that begins now. Blocking.
    ///
    /// # Errors
    /// What the system said.
    pub fn begin(self: &Arc<Self>, root: Root, layout: LayoutId) -> io::Result<Arc<Recording>> {
        std::fs::create_dir_all(&self.dir)?;
        let millis = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_millis());
        let (root, layout) = (root.to_string(), layout.to_string());
        let number = self.begun.fetch_add(1, Relaxed);
        let name = format!("sweep-{}-{}-{millis}-{number}.trace", &root[..12], &layout[..12]);
        let path = self.dir.join(name);
        let file = File::options().write(true).create_new(true).open(&path)?;
        tracing::info!(trace = %path.display(), "a sweep is recorded");
        Ok(Arc::new(Recording {
            recorder: Arc::clone(self),
            path,
            waiting: Mutex::default(),
            file: Mutex::new(Some(file)),
            begun: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
        }))
    }
}

impl Recording {
    /// Takes what the sweep's tape holds; it is written on `tasks`.
    pub fn take(self: &Arc<Self>, sweep: &mut SweepPolicy, tasks: &TaskTracker) {
        if self.collect(sweep) {
            let this = Arc::clone(self);
            tasks.spawn_blocking(move || this.write());
        }
    }

    /// Takes what the tape holds and writes it. Blocking.
    pub fn end(&self, sweep: &mut SweepPolicy) {
        self.collect(sweep);
        self.write();
    }

    /// Whether there is anything to write.
    fn collect(&self, sweep: &mut SweepPolicy) -> bool {
        let mut piece = sweep.take_trace();
        if piece.is_empty() {
            return false;
        }
        let left = &self.recorder.left_bytes;
        let taken = left.fetch_update(Relaxed, Relaxed, |n| n.checked_sub(piece.len() as u64));
        if taken.is_err() && !self.begun.load(Relaxed) {
            // Not even its header: no trace, rather than one that nothing can read.
            self.given_up.store(true, Relaxed);
            drop(sweep.cut_trace());
            return true;
        }
        self.begun.store(true, Relaxed);
        if taken.is_err() {
            tracing::warn!(
                trace = %self.path.display(),
                "traces are as long as trace.bytes allows; this one ends"
            );
            piece = sweep.cut_trace();
        }
        self.waiting.lock().push_back(piece);
        true
    }

    /// Removes what has no header. Blocking.
    fn remove(&self) {
        let path = self.path.display();
        tracing::warn!(trace = %path, "a sweep is not recorded: trace.bytes has no room for its header");
        if let Err(e) = std::fs::remove_file(&self.path) {
            tracing::error!(trace = %path, error = %e, "an empty trace cannot be removed");
        }
    }

    fn write(&self) {
        let mut file = self.file.lock();
        let pieces = std::mem::take(&mut *self.waiting.lock());
        if self.given_up.load(Relaxed) {
            if file.take().is_some() {
                self.remove();
            }
            return;
        }
        let Some(open) = file.as_mut() else { return };
        if let Err(e) = pieces.iter().try_for_each(|p| open.write_all(p)) {
            tracing::error!(
                trace = %self.path.display(), error = %e,
                "a trace cannot be written; it ends here"
            );
            *file = None;
        }
    }
}

/// The file of a new sweep's trace, if sweeps are recorded.
pub(super) async fn of(recorder: Option<&Arc<Recorder>>, source: &Source) -> Option<Arc<Recording>> {
    let recorder = Arc::clone(recorder?);
    let (root, layout) = (source.version.root(), source.version.layout());
    let begun = tokio::task::spawn_blocking(move || recorder.begin(root, layout)).await;
    match begun.map_err(io::Error::from).and_then(|r| r) {
        Ok(recording) => Some(recording),
        Err(e) => {
            tracing::error!(error = %e, "a sweep is not recorded");
            None
        }
    }
}
