//! Reads a local tree: one thread walks, N threads read and hash, and the caller's thread gets the outcomes
//! in walk order.
//!
//! Bounds: at most [`WINDOW`] entries are between the walk and the caller; each reader has one buffer of
//! 256 KiB. Several threads read a file that is larger than a slice, slice by slice.

use super::Outcome;
use crate::failure::Failure;
use crate::run::Counters;
use crate::run::file_record::FileRecord;
use crate::source::content::{self, ReadFault, SliceHash};
use crate::source::draft::places;
use crate::source::outage::directory_outage;
use crate::source::pin::pin_of;
use crate::source::walk::Step;
use fletch_core::manifest::SLICE_BYTES_DEFAULT;
use fletch_core::manifest::tar::shard::is_shard;
use fletch_tables::GroupLists;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::fs::{self, File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// The most entries between the walk and the caller.
const WINDOW: usize = 8192;
/// Steps that the walker hands over at a time.
const FEED: usize = 128;
/// The most files that a reader takes at a time.
const TAKE_MAX: usize = 32;
/// How often a waiting thread checks whether the run was stopped.
const POLL: Duration = Duration::from_millis(100);

/// A step of the walk, with the record of the file from an earlier run.
pub type Fed = (Step, Option<FileRecord>);

/// A large file that several threads read.
struct Large {
    seq: u64,
    path: String,
    follow: bool,
    tries: u32,
    file: File,
    meta: Metadata,
    next: AtomicU64,
    broken: AtomicBool,
    slices: Mutex<Vec<Option<SliceHash>>>,
    left: AtomicUsize,
    fault: Mutex<Option<ReadFault>>,
    /// Why a file that is named like a tar shard is treated as a plain file.
    plain: Option<String>,
}

impl Large {
    fn new(
        seq: u64,
        path: String,
        follow: bool,
        tries: u32,
        (file, meta): (File, Metadata),
        plain: Option<String>,
    ) -> Large {
        let n = usize::try_from(content::slice_count(meta.size())).unwrap_or(usize::MAX);
        Large {
            seq,
            path,
            follow,
            tries,
            file,
            meta,
            next: AtomicU64::new(0),
            broken: AtomicBool::new(false),
            slices: Mutex::new(vec![None; n]),
            left: AtomicUsize::new(n),
            fault: Mutex::new(None),
            plain,
        }
    }
}

struct Job {
    seq: u64,
    step: Step,
    known: Option<FileRecord>,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    large: VecDeque<Arc<Large>>,
    /// Outcomes from number `first` on, in walk order; `None` for those that are not finished.
    ring: VecDeque<Option<Outcome>>,
    first: u64,
    /// Whether the walk is over. Its failure is in `failure`.
    ended: bool,
    failure: Option<Failure>,
    stopped: bool,
}

/// The tree to read, and how.
pub struct TreeReads<'a> {
    /// Its top.
    pub base: &'a Path,
    /// The number of readers.
    pub threads: usize,
    /// The URI of the dataset at the server, to make a draft: no file is read.
    pub draft: Option<&'a str>,
    /// Where the hashes of groups go.
    pub groups: Option<&'a GroupLists>,
}

struct Pool<'a> {
    base: &'a Path,
    threads: usize,
    draft: Option<&'a str>,
    groups: Option<&'a GroupLists>,
    counters: &'a Counters,
    state: Mutex<State>,
    work: Condvar,
    results: Condvar,
    space: Condvar,
}

/// Reads every step that `feed` returns, with several readers, and passes every outcome, in order, to
/// `take`.
///
/// # Errors
/// The failure of `feed` or `take`, or that `stop` was set.
pub fn run(
    tree: TreeReads<'_>,
    counters: &Counters,
    stop: &AtomicBool,
    mut feed: impl FnMut() -> Result<Option<Fed>, Failure> + Send,
    mut take: impl FnMut(Outcome) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let pool = Pool {
        base: tree.base,
        threads: tree.threads.max(1),
        draft: tree.draft,
        groups: tree.groups,
        counters,
        state: Mutex::default(),
        work: Condvar::new(),
        results: Condvar::new(),
        space: Condvar::new(),
    };
    std::thread::scope(|scope| {
        // However this closure ends, the threads must end too.
        let _guard = StopOnDrop(&pool);
        for i in 0..pool.threads {
            let pool = &pool;
            std::thread::Builder::new()
                .name(format!("read-{i}"))
                .spawn_scoped(scope, move || {
                    // After a panic the run must end, and not wait for the outcome of this thread.
                    let _guard = StopOnPanic(pool);
                    pool.read();
                })
                .map_err(|e| Failure::io("cannot start a reader thread", &e))?;
        }
        let walker = &pool;
        std::thread::Builder::new()
            .name("walk".into())
            .spawn_scoped(scope, move || {
                let _guard = StopOnPanic(walker);
                let end = walker.walk(&mut feed);
                let mut s = walker.state.lock();
                s.ended = true;
                s.failure = end.err();
                drop(s);
                walker.work.notify_all();
                walker.results.notify_all();
            })
            .map_err(|e| Failure::io("cannot start the walker thread", &e))?;
        pool.deliver(stop, &mut take)
    })
}

struct StopOnDrop<'a, 'b>(&'a Pool<'b>);

impl Drop for StopOnDrop<'_, '_> {
    fn drop(&mut self) {
        self.0.halt();
    }
}

struct StopOnPanic<'a, 'b>(&'a Pool<'b>);

impl Drop for StopOnPanic<'_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.halt();
        }
    }
}

impl Pool<'_> {
    fn halt(&self) {
        self.state.lock().stopped = true;
        self.work.notify_all();
        self.space.notify_all();
        self.results.notify_all();
    }

    /// The loop of the walker's thread.
    fn walk(&self, feed: &mut impl FnMut() -> Result<Option<Fed>, Failure>) -> Result<(), Failure> {
        let mut batch = Vec::with_capacity(FEED);
        loop {
            let step = feed();
            let last = !matches!(step, Ok(Some(_)));
            let end = match step {
                Ok(Some(fed)) => {
                    batch.push(fed);
                    Ok(())
                }
                Ok(None) => Ok(()),
                Err(e) => Err(e),
            };
            if batch.len() < FEED && !last {
                continue;
            }
            let mut s = self.state.lock();
            while s.ring.len() >= WINDOW && !s.stopped {
                self.space.wait_for(&mut s, POLL);
            }
            if s.stopped {
                return Ok(());
            }
            let mut ready = false;
            for (step, known) in batch.drain(..) {
                let seq = s.first + s.ring.len() as u64;
                let done = match step {
                    Step::DirEnd { path } | Step::OtherFileSystem { path } => Some(Outcome::DirEnd { path }),
                    Step::Fault { path, why } => Some(Outcome::Fault { path, why }),
                    Step::Unreadable { path, why } => Some(Outcome::Lost { path, why }),
                    Step::Outage { path, errno } => Some(self.outage(&path, errno)),
                    step => {
                        s.jobs.push_back(Job { seq, step, known });
                        None
                    }
                };
                ready |= done.is_some();
                s.ring.push_back(done);
            }
            drop(s);
            self.work.notify_all();
            if ready {
                self.results.notify_one();
            }
            if last {
                return end;
            }
        }
    }

    /// The loop of the caller's thread: passes finished outcomes to `take`.
    fn deliver(
        &self,
        stop: &AtomicBool,
        take: &mut impl FnMut(Outcome) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut ready = Vec::new();
        loop {
            let mut s = self.state.lock();
            loop {
                Failure::if_stopped(stop)?;
                if matches!(s.ring.front(), Some(Some(_))) {
                    break;
                }
                if s.stopped {
                    return Err(Failure::new("a reader thread panicked")
                        .hint("the message above says why; report it"));
                }
                if s.ended && s.ring.is_empty() {
                    return s.failure.take().map_or(Ok(()), Err);
                }
                self.results.wait_for(&mut s, POLL);
            }
            while matches!(s.ring.front(), Some(Some(_))) {
                ready.extend(s.ring.pop_front().flatten());
                s.first += 1;
            }
            drop(s);
            self.space.notify_one();
            for outcome in ready.drain(..) {
                take(outcome)?;
            }
        }
    }

    /// The loop of a reader's thread.
    fn read(&self) {
        let mut buf = Vec::new();
        let mut mine: Vec<Job> = Vec::new();
        let mut done: Vec<(u64, Outcome)> = Vec::new();
        loop {
            let mut s = self.state.lock();
            let large = loop {
                if s.stopped {
                    return;
                }
                if let Some(large) = s.large.front() {
                    break Some(Arc::clone(large));
                }
                if !s.jobs.is_empty() {
                    let n = (s.jobs.len() / (2 * self.threads)).clamp(1, TAKE_MAX).min(s.jobs.len());
                    mine.extend(s.jobs.drain(..n));
                    break None;
                }
                self.work.wait_for(&mut s, POLL);
            };
            drop(s);
            if let Some(large) = large {
                self.read_slices(&large, &mut buf);
                continue;
            }
            for job in mine.drain(..) {
                if let Some(outcome) = self.job(job.seq, job.step, job.known, &mut buf) {
                    done.push((job.seq, outcome));
                } else {
                    // This job began a large file. Finished outcomes must not wait for it.
                    self.put(&mut done);
                    let begun = self.state.lock().large.front().map(Arc::clone);
                    if let Some(large) = begun {
                        self.read_slices(&large, &mut buf);
                    }
                }
            }
            self.put(&mut done);
        }
    }

    fn put(&self, done: &mut Vec<(u64, Outcome)>) {
        if done.is_empty() {
            return;
        }
        let mut s = self.state.lock();
        let first = s.first;
        for (seq, outcome) in done.drain(..) {
            // An outcome is taken only after it was put, so its number is not below `first`.
            if let Some(slot) = usize::try_from(seq - first).ok().and_then(|i| s.ring.get_mut(i)) {
                *slot = Some(outcome);
            }
        }
        let front = matches!(s.ring.front(), Some(Some(_)));
        drop(s);
        if front {
            self.results.notify_one();
        }
    }

    /// Does one job. Returns `None` for a large file: the last of its readers stores the outcome.
    fn job(&self, seq: u64, step: Step, known: Option<FileRecord>, buf: &mut Vec<u8>) -> Option<Outcome> {
        match step {
            Step::File { path, follow } => self.file(seq, path, follow, known, 0, buf),
            Step::Link { path } => Some(match content::read_target(&self.base.join(&path)) {
                Ok(target) => Outcome::Link { path, target },
                Err(e) => self.fault(path, &e),
            }),
            Step::DirEnd { path } | Step::OtherFileSystem { path } => Some(Outcome::DirEnd { path }),
            Step::Fault { path, why } => Some(Outcome::Fault { path, why }),
            Step::Unreadable { path, why } => Some(Outcome::Lost { path, why }),
            Step::Outage { path, errno } => Some(self.outage(&path, errno)),
        }
    }

    fn outage(&self, path: &str, errno: i32) -> Outcome {
        let error = std::io::Error::from_raw_os_error(errno);
        Outcome::Outage(directory_outage(&self.base.join(path), &error))
    }

    fn fault(&self, path: String, fault: &ReadFault) -> Outcome {
        match fault.outage(&self.base.join(&path)) {
            Some(failure) => Outcome::Outage(failure),
            None if fault.is_loss() => Outcome::Lost { path, why: fault.to_string() },
            None => Outcome::Fault { path, why: fault.to_string() },
        }
    }

    fn file(
        &self,
        seq: u64,
        path: String,
        follow: bool,
        known: Option<FileRecord>,
        mut tries: u32,
        buf: &mut Vec<u8>,
    ) -> Option<Outcome> {
        let full = self.base.join(&path);
        if let Some(uri) = self.draft {
            let meta = if follow { fs::metadata(&full) } else { fs::symlink_metadata(&full) };
            return Some(match meta {
                Ok(meta) if meta.is_file() => {
                    let pin = pin_of(&meta);
                    let content = places(uri, &path, &pin);
                    Outcome::File { path, pin, content, reused: false, plain: None }
                }
                Ok(_) => self.fault(path, &ReadFault::Kind),
                Err(e) => self.fault(path, &ReadFault::Io(e)),
            });
        }
        if let Some(known) = known {
            let meta = if follow { fs::metadata(&full) } else { fs::symlink_metadata(&full) };
            if meta.is_ok_and(|m| m.is_file() && pin_of(&m) == known.pin) {
                self.counters.reuse(1, known.pin.size);
                let FileRecord { pin, content, .. } = known;
                return Some(Outcome::File { path, pin, content, reused: true, plain: None });
            }
        }
        let mut plain = None;
        loop {
            let (file, meta) = match content::open(&full, follow) {
                Ok(opened) => opened,
                Err(e) => return Some(self.fault(path, &e)),
            };
            if is_shard(&path) && plain.is_none() {
                let fault = |why: ReadFault| Some(self.fault(path.clone(), &why));
                match content::read_shard(&file, &meta, buf, self.groups) {
                    Ok(Some(Ok(content))) => {
                        self.counters.read(meta.size());
                        let pin = pin_of(&meta);
                        return Some(Outcome::File { path, pin, content, reused: false, plain });
                    }
                    Ok(Some(Err(bad))) => plain = Some(bad.to_string()),
                    Ok(None) if tries < content::RETRIES => {
                        tries += 1;
                        pause(tries);
                        continue;
                    }
                    Ok(None) => return fault(ReadFault::Changing),
                    Err(e) => return fault(e),
                }
            }
            if meta.size() > u64::from(SLICE_BYTES_DEFAULT) {
                self.begin(Large::new(seq, path, follow, tries, (file, meta), plain));
                return None;
            }
            match content::read_small(&file, &meta, buf, self.groups) {
                Ok(Some(content)) => {
                    self.counters.read(meta.size());
                    return Some(Outcome::File { path, pin: pin_of(&meta), content, reused: false, plain });
                }
                Ok(None) if tries < content::RETRIES => {
                    tries += 1;
                    pause(tries);
                }
                Ok(None) => return Some(self.fault(path, &ReadFault::Changing)),
                Err(e) => return Some(self.fault(path, &e)),
            }
        }
    }

    fn begin(&self, large: Large) {
        let mut s = self.state.lock();
        s.large.push_back(Arc::new(large));
        drop(s);
        self.work.notify_all();
    }

    /// Reads slices of a large file until other readers have taken the rest.
    fn read_slices(&self, large: &Arc<Large>, buf: &mut Vec<u8>) {
        let size = large.meta.size();
        let n = content::slice_count(size);
        loop {
            let i = large.next.fetch_add(1, Relaxed);
            if i >= n {
                let mut s = self.state.lock();
                s.large.retain(|l| !Arc::ptr_eq(l, large));
                return;
            }
            if self.state.lock().stopped {
                large.broken.store(true, Relaxed);
            }
            if !large.broken.load(Relaxed) {
                let (offset, len) = content::slice_at(size, i);
                match content::read_slice(&large.file, offset, len, buf, self.groups) {
                    Ok(Some(hash)) => {
                        self.counters.bytes_read.fetch_add(u64::from(len), Relaxed);
                        let at = usize::try_from(i).unwrap_or(usize::MAX);
                        large.slices.lock()[at] = Some(hash);
                    }
                    Ok(None) => large.broken.store(true, Relaxed),
                    Err(e) => {
                        large.broken.store(true, Relaxed);
                        large.fault.lock().get_or_insert(ReadFault::Io(e));
                    }
                }
            }
            if large.left.fetch_sub(1, std::sync::atomic::Ordering::AcqRel) == 1 {
                self.finish(large, buf);
            }
        }
    }

    /// Stores the outcome of a large file whose slices were all tried, or reads the file again.
    fn finish(&self, large: &Arc<Large>, buf: &mut Vec<u8>) {
        let path = large.path.clone();
        let slices: Option<Vec<SliceHash>> = std::mem::take(&mut *large.slices.lock()).into_iter().collect();
        let still = large.file.metadata().is_ok_and(|m| content::same(&large.meta, &m));
        let outcome = match (large.fault.lock().take(), slices) {
            (Some(fault), _) => Some(self.fault(path, &fault)),
            (None, Some(slices)) if still => {
                self.counters.files_read.fetch_add(1, Relaxed);
                let content = content::fold(large.meta.size(), &slices);
                let plain = large.plain.clone();
                Some(Outcome::File { path, pin: pin_of(&large.meta), content, reused: false, plain })
            }
            (None, _) if large.tries < content::RETRIES => {
                pause(large.tries + 1);
                self.file(large.seq, path, large.follow, None, large.tries + 1, buf)
            }
            (None, _) => Some(self.fault(path, &ReadFault::Changing)),
        };
        if let Some(outcome) = outcome {
            self.put(&mut vec![(large.seq, outcome)]);
        }
    }
}

/// Waits, longer with each attempt, for the program that writes the file.
fn pause(tries: u32) {
    std::thread::sleep(Duration::from_millis(10 << tries.min(5)));
}
