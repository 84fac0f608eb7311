//! The answers to requests of the kernel, without the protocol that carries them.
//!
//! [`crate::session`] carries requests and replies. This module decides only which thread a request waits on.
//!
//! A request is polled once on the thread that received it, which replies if the data is in memory, or if the
//! server of this machine has it at hand ([`hit_connections`]). A request that has to wait moves to the
//! runtime, which sends the reply. So a slow server holds that thread for a tenth of a second at most.

use crate::access::Access;
use crate::error_cache::ErrorCache;
use crate::faults::Faults;
use crate::fs::attr::CommonAttr;
use crate::fs::error::FsError;
use crate::fs::file_runs::{FileRuns, is_marker};
use crate::fs::inode::Ino;
use crate::fs::read::{ChunkSource, ReadCounters, ReadReply, Reader};
use crate::fs::tree::{self, Tree};
use crate::hit_connections;
use crate::mapped_reads::MappedRead;
use crate::metrics::{Op, RequestCounts};
use crate::push::Pusher;
use crate::read_clock::ReadClock;
use bytes::Bytes;
use fletch_api::MountReads;
use fletch_core::DatasetName;
use fletch_store::Store;
use fletch_tables::{Version, documents};
use std::{
    future::Future,
    ops::Range,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    sync::{Arc, OnceLock},
    task::{Context, Waker},
    time::{Duration, Instant, UNIX_EPOCH},
};
use tokio::{runtime::Handle, time::timeout};
use tokio_util::task::TaskTracker;

/// How long the kernel may cache names and attributes. A version never changes.
pub const TTL: Duration = Duration::from_secs(24 * 3600);
/// The `f_namemax` of a mount: the longest name, in bytes.
pub const NAME_BYTES_MAX: u32 = 255;
/// The unit in which `statfs` counts blocks, in bytes.
pub const BLOCK_BYTES: u32 = 512;
/// Added to the timeout of a request, so that the store's own deadline ends first and says why.
const STORE_DEADLINE_SLACK: Duration = Duration::from_millis(500);

/// What a mount needs to answer a request.
pub struct RequestContext {
    /// Names and attributes.
    pub tree: Tree,
    /// Bytes.
    pub reader: Reader,
    /// The attributes that all inodes share.
    pub common: CommonAttr,
    /// Requests by kind.
    pub requests: RequestCounts,
    /// The fault counters.
    pub faults: Faults,
    /// The access check, and the record of what the kernel caches.
    pub access: Arc<Access>,
    /// The errors of recent slow READs, for the kernel's second READ.
    pub error_cache: ErrorCache,
    /// The time of READs, and between them.
    pub read_clock: Arc<ReadClock>,
    /// The programs that read small files in their order.
    pub file_runs: FileRuns,
    /// Pushes pages; set once the session exists.
    pub pusher: OnceLock<Pusher>,
    /// The times within which requests end.
    pub timeouts: Timeouts,
    /// The tasks of requests that wait.
    pub tasks: TaskTracker,
    /// Whether the kernel opens files without a request after one ENOSYS.
    pub no_open: AtomicBool,
    /// Whether the kernel opens directories without a request after one ENOSYS.
    pub no_opendir: AtomicBool,
}

/// The times within which requests end, apart from a little slack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Of every request but those that the next one is for.
    pub io: Duration,
    /// Of a READ for a page of a mapped file, while the server or the origin is away.
    pub mapped: Duration,
}

/// Why a request got no answer.
#[derive(Debug)]
enum Failure {
    /// The version is refused, with this errno.
    Refused(i32),
    Failed(FsError),
}

/// Where the reads of one mount come from, and where they are counted.
pub struct ReadParts {
    /// The chunks in memory and on disk.
    pub store: Arc<Store>,
    /// Fetches the chunks that the store does not have.
    pub source: Arc<dyn ChunkSource>,
    /// Counts the reads.
    pub counters: Arc<ReadCounters>,
    /// The access check of the version.
    pub access: Arc<Access>,
    /// The dataset, if it has a name, for the log.
    pub dataset: Option<DatasetName>,
}

impl RequestContext {
    /// Records that the kernel may know every file, because an earlier process served the mount.
    ///
    /// Of names it records those in the root directory; the kernel forgets what is below them with them.
    ///
    /// # Errors
    /// The root directory cannot be read.
    pub async fn expect_all_known(&self) -> Result<(), FsError> {
        self.access.kernel.record_all(self.tree.totals().entries);
        let mut offset = 0;
        loop {
            let before = offset;
            let add = |entry: tree::DirEntry| {
                self.access.kernel.record_name(1, entry.name.as_bytes());
                self.access.kernel.record_inode(entry.attr.ino);
                offset = entry.offset;
                false
            };
            self.tree.list(1, before, add).await?;
            if offset == before {
                return Ok(());
            }
        }
    }

    /// Returns the context of a mount of `version`, owned by the user of this process.
    #[must_use]
    pub fn new(version: &Version, parts: ReadParts, timeouts: Timeouts, tasks: TaskTracker) -> Arc<Self> {
        let tree = Tree::new(version.clone());
        let reader = Reader::new(tree.clone(), parts.store, parts.source, tasks.clone());
        let created = documents::unix_ns(&version.manifest().created).unwrap_or(0);
        let common = CommonAttr {
            uid: nix::unistd::getuid().as_raw(),
            gid: nix::unistd::getgid().as_raw(),
            created: UNIX_EPOCH + Duration::from_nanos(created),
        };
        Arc::new(RequestContext {
            tree,
            reader: reader.with_counters(parts.counters),
            common,
            requests: RequestCounts::default(),
            faults: Faults::new(parts.dataset),
            access: parts.access,
            error_cache: ErrorCache::default(),
            read_clock: Arc::default(),
            file_runs: FileRuns::default(),
            pusher: OnceLock::new(),
            timeouts,
            tasks,
            no_open: AtomicBool::new(false),
            no_opendir: AtomicBool::new(false),
        })
    }

    /// Runs the work of one request: checks access before and after, bounds its time, records its failure.
    ///
    /// # Errors
    /// The errno of the reply.
    pub async fn run<T>(&self, work: impl Future<Output = Result<T, FsError>>) -> Result<T, i32> {
        self.attempt(work).await.map_err(|failure| self.recorded(failure))
    }

    async fn attempt<T>(&self, work: impl Future<Output = Result<T, FsError>>) -> Result<T, Failure> {
        self.check_access().map_err(Failure::Refused)?;
        let late = self.timeouts.io + STORE_DEADLINE_SLACK;
        let outcome = timeout(late, work).await.unwrap_or(Err(FsError::Late(self.timeouts.io)));
        // Access may have ended while the work ran.
        self.check_access().map_err(Failure::Refused)?;
        outcome.map_err(Failure::Failed)
    }

    /// Records a failure that the program sees, and returns its errno.
    fn recorded(&self, failure: Failure) -> i32 {
        match failure {
            Failure::Refused(errno) => errno,
            Failure::Failed(error) => {
                self.faults.record(&error);
                error.errno()
            }
        }
    }

    /// Returns whether the server still lets this mount read its version.
    ///
    /// # Errors
    /// The errno of every reply while the version is refused.
    pub fn check_access(&self) -> Result<(), i32> {
        self.access.refused().map_or(Ok(()), Err)
    }

    /// Records that the kernel may cache this name and inode.
    pub fn record_lookup(&self, parent: u64, name: &[u8], ino: u64) {
        self.access.kernel.record_inode(ino);
        self.access.kernel.record_name(parent, name);
    }

    /// Returns the errno for an extended attribute outside `user.`; `None` for a name of `user.`.
    ///
    /// `ls -l` asks for such names. It stops asking after this answer, as at any file system without ACLs and
    /// labels; after ENODATA it would ask again for each file.
    #[must_use]
    pub fn foreign_xattr(&self, name: &[u8]) -> Option<i32> {
        if tree::has_namespace(name) {
            return None;
        }
        self.requests.count(Op::Xattr);
        Some(self.check_access().err().unwrap_or(libc::ENOTSUP))
    }

    /// Returns what the mount counted of its reads since it began.
    #[must_use]
    pub fn reads(&self) -> MountReads {
        let (times, counters) = (self.read_clock.times(), self.reader.counters());
        let ns = |d: Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        let (pushed, _) = self.pusher.get().map_or((0, 0), Pusher::counts);
        MountReads {
            read_ns: ns(times.read),
            think_ns: ns(times.think),
            reads: counters.reads.load(Relaxed),
            bytes: counters.bytes.load(Relaxed).saturating_add(pushed),
            other_requests: self.requests.of_programs(),
        }
    }

    /// Polls the work of one request once on this thread, and moves it to the runtime if it has to wait.
    pub fn dispatch<F>(self: &Arc<Self>, op: Op, runtime: &Handle, work: impl FnOnce(Arc<Self>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.requests.count(op);
        let in_flight = self.access.enter();
        let work = work(Arc::clone(self));
        let mut work = Box::pin(async move {
            work.await;
            drop(in_flight);
        });
        let _context = runtime.enter();
        let _may_ask = hit_connections::enter();
        if work.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            self.tasks.spawn_on(work, runtime);
        }
    }

    /// Reads bytes of a file for a thread, and replies. `direct` says that the READ holds no page lock, and
    /// is for no mapped page.
    pub async fn read(
        self: Arc<Self>,
        (ino, offset, size): (u64, u64, u32),
        direct: bool,
        pid: u32,
        reply: impl FnOnce(Result<&Bytes, i32>) + Send + 'static,
    ) {
        let started = Instant::now();
        let mut wait = MappedRead::new(pid, ino, started);
        if let Some(errno) = self.error_cache.recent(ino) {
            let may_wait = !direct && errno == libc::EIO;
            if !may_wait || !wait.wait(self.timeouts.mapped, || "its last read failed".to_owned()).await {
                return reply(Err(errno));
            }
        }
        let timed = self.read_clock.enter();
        let under_way = self.pusher.get().filter(|_| !direct).map(|pusher| pusher.note_read(ino));
        let outcome = loop {
            let reading = async {
                match direct {
                    true => self.reader.read_direct(ino, offset, size).await,
                    false => self.reader.read(ino, offset, size).await,
                }
            };
            let failure = match self.attempt(reading).await {
                Ok(read) => break Ok(read),
                Err(failure) => failure,
            };
            let may_wait = match &failure {
                Failure::Failed(error) if !direct && error.is_outage() => {
                    wait.wait(self.timeouts.mapped, || error.to_string()).await
                }
                _ => false,
            };
            if !may_wait {
                break Err(self.recorded(failure));
            }
        };
        match outcome {
            Ok(ReadReply { bytes, push: None }) => {
                reply(Ok(&bytes));
                if offset == 0 && !direct {
                    self.note_file_read(ino);
                }
            }
            // A direct READ must not wait for READs that hold a page lock (push.rs, 2).
            Ok(ReadReply { bytes, push }) => match (push.filter(|_| !direct), self.pusher.get()) {
                (Some(push), Some(pusher)) => {
                    let (in_flight, context) = (self.access.enter(), Arc::clone(&self));
                    let send_reply = move || {
                        reply(context.check_access().map(|()| &bytes));
                        drop((in_flight, timed, under_way));
                    };
                    pusher.push_then(ino, push, Box::new(send_reply));
                }
                _ => reply(Ok(&bytes)),
            },
            Err(errno) => {
                self.error_cache.record(ino, started, errno);
                reply(Err(errno));
            }
        }
    }

    /// Notes that a program reads a file. Pushes the next ones if it reads files in their order.
    fn note_file_read(self: &Arc<Self>, ino: u64) {
        let (Some(pusher), Some(Ino::Entry(ordinal))) = (self.pusher.get(), Ino::decode(ino)) else { return };
        let Some(next) = self.file_runs.read(ordinal) else { return };
        let (context, to, runtime) = (Arc::clone(self), pusher.clone(), Handle::current());
        pusher.run_ahead(move || {
            let _runtime = runtime.enter();
            context.push_ahead(next, &to);
        });
    }

    /// Pushes what the server has at hand of the files with these ordinals. Blocks for a short time.
    fn push_ahead(&self, ordinals: Range<u64>, pusher: &Pusher) {
        let _in_flight = self.access.enter();
        if self.check_access().is_err() {
            return;
        }
        let _may_ask = hit_connections::enter();
        let files = ordinals.filter(|ordinal| !is_marker(*ordinal));
        let inodes = files.filter_map(|ordinal| Ino::Entry(ordinal).number());
        for (ino, file) in self.reader.bring_files(inodes) {
            if !pusher.store_file(ino, file.bytes()) {
                self.file_runs.not_taken();
                return;
            }
        }
    }
}
