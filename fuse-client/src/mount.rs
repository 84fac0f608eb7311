//! The life of one mount, from start to exit. This module owns every task and thread of the process.
//!
//! A mount ends in this order: signal, unmount (wait, then detach), reply to the requests in flight, stop
//! metrics, write the report, exit. All of it takes at most [`END_WITHIN`].

use crate::access::{self, Access, KernelCache};
use crate::announce;
use crate::cli::Settings;
use crate::error_cache::ErrorCache;
use crate::faults::Faults;
use crate::fs::attr::CommonAttr;
use crate::fs::read::{ChunkSource, ReadCounters, Reader};
use crate::fs::tree::Tree;
use crate::fuse::{self, FuseSession, MountOptions, RequestContext};
use crate::metrics::{self, RequestCounts, Snapshot};
use crate::node::chunk_source::NodeChunks;
use crate::node::{Node, NodeContext, clients::NodeClients, node_store::NodeStore};
use crate::open_version::{OpenVersion, open};
use crate::push::{Pusher, WATCH_EVERY};
use crate::unmount::{Unmounted, unmount};
use crate::{daemon, mount_dir};
use anyhow::{Context, Result, anyhow};
use fletch_api::node::MountedVersion;
use fletch_client::fallback::Fallback;
use fletch_client::{Client, ClientError, Endpoint};
use fletch_core::{Kind, Root};
use fletch_host::mounts;
use fletch_store::{DiskTier, Store, StoreLimits, disk::DiskEngine};
use fletch_tables::{TableError, Version, documents};
use std::{
    io,
    path::Path,
    sync::atomic::Ordering::Relaxed,
    sync::{Arc, OnceLock},
    time::{Duration, UNIX_EPOCH},
};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The longest time from the signal to the exit.
const END_WITHIN: Duration = Duration::from_secs(9);
/// How long the process waits for requests in flight after the unmount.
const DRAIN_WITHIN: Duration = Duration::from_secs(2);
/// The kernel's read-ahead in KiB, if this process may set it.
const KERNEL_READ_AHEAD_KIB: u32 = 1024;
/// How often the store fetches a chunk whose bytes were wrong. With a node store it tries the owner in
/// addition.
const FETCH_ATTEMPTS: u32 = 2;
/// The most bytes of chunks that wait for their append to disk. They count as part of `--memory`.
const APPEND_BYTES_MAX: u64 = 256 << 20;
/// How long the process waits for the node store to close.
const CLOSE_STORE_WITHIN: Duration = Duration::from_secs(2);

/// Returns the exit code for an error.
#[must_use]
pub fn exit_code(e: &anyhow::Error) -> u8 {
    for cause in e.chain() {
        if let Some(c) = cause.downcast_ref::<ClientError>() {
            return match c {
                c if c.is_denied() => 5,
                c if c.is_unreachable() || c.kind().retryable() => 4,
                _ => 1,
            };
        }
        if let Some(TableError::Source(s)) = cause.downcast_ref() {
            return if s.kind == Kind::Unavailable { 4 } else { 1 };
        }
        if cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::PermissionDenied) {
            return 5;
        }
    }
    1
}

/// Mounts, serves until a signal or an unmount by another program, and cleans up.
///
/// # Errors
/// What failed, and what to do. Nothing stays mounted then.
pub fn run(settings: &Settings) -> Result<()> {
    let dir = mount_dir::prepare(&settings.dir, &settings.target.dataset)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        // A disk that hangs blocks every thread that reads it, and hashing needs threads too.
        .max_blocking_threads(if settings.cache.is_some() { 64 } else { 16 })
        .thread_name("fletch-io")
        .enable_all()
        .build()
        .context("starting the runtime")?;
    let opened = runtime.block_on(open(settings))?;
    let metrics = match settings.metrics {
        Some(addr) => {
            let bound = runtime.block_on(TcpListener::bind(addr));
            Some(bound.with_context(|| format!("cannot serve metrics at {addr}"))?)
        }
        None => None,
    };
    let running = RunningMount::new(settings, &opened, &runtime)?;

    if let Some(node) = &running.node {
        // With a role, the first reads find the node's chunks and do not go to the server.
        runtime.block_on(node.wait_for_role());
    }
    // Before the mount exists, so that a signal leaves no mount behind.
    let signals = runtime.block_on(async { EndSignals::listen() })?;
    let name = format!("{}{}", mounts::SOURCE_PREFIX, settings.target.dataset);
    let options = MountOptions { allow_other: settings.allow_other, threads: settings.threads };
    let session = fuse::mount(Arc::clone(&running.context), &dir, &name, options, runtime.handle().clone())
        .map_err(|e| explain_mount(e, &dir))?;
    let entry = mounts::at(&dir)?.context("another program removed the mount at once: mount again")?;
    if settings.push {
        let pusher = Pusher::start(session.page_cache()).context("starting the push thread")?;
        drop(running.context.pusher.set(pusher));
    }
    raise_read_ahead(&entry.device);

    let version = &opened.version;
    let ready = format!(
        "mounted {} (root {}, {} entries) at {}",
        settings.target.dataset,
        version.root().0.short(),
        version.manifest().entries,
        dir.display()
    );
    if let Some(client) = opened.client.clone() {
        let mount = announce::announcement(settings, version.root(), &dir);
        let announced = announce::run(client.clone(), mount, running.stop.clone());
        running.background.spawn_on(announced, runtime.handle());
        running.watch_access(&runtime, client, version.root(), session.kernel_cache());
    }
    let outcome = runtime.block_on(serve(&running, session, metrics, signals, &ready));
    // Bounds the rest of this function.
    std::thread::spawn(|| {
        std::thread::sleep(END_WITHIN);
        tracing::error!(within = ?END_WITHIN, "the mount did not end in time: the process exits now");
        std::process::exit(1);
    });
    let gone = unmount(&dir, &entry.device);
    runtime.block_on(running.end(matches!(gone, Ok(Unmounted::Clean))));
    if let Some(path) = &settings.report {
        write_report(path, &running.snapshot())?;
    }
    runtime.shutdown_background();
    gone?;
    outcome
}

/// The parts of a running mount, and its tasks.
struct RunningMount {
    context: Arc<RequestContext>,
    snapshot: Arc<dyn Fn() -> Snapshot + Send + Sync>,
    /// Waiting requests, and fetches.
    tasks: TaskTracker,
    /// Metrics and watches, which `stop` ends.
    background: TaskTracker,
    /// This mount's part in the node store, if the settings ask for one.
    node: Option<Arc<Node>>,
    /// The tasks of the node store. `stop_node` ends them, and so does `stop`.
    node_tasks: TaskTracker,
    stop_node: CancellationToken,
    stop: CancellationToken,
}

impl RunningMount {
    fn new(settings: &Settings, opened: &OpenVersion, runtime: &Runtime) -> Result<Self> {
        let _context = runtime.enter();
        let (tasks, background, stop) = (TaskTracker::new(), TaskTracker::new(), CancellationToken::new());
        let cache = settings.cache.as_ref().filter(|_| {
            let served = settings.server.as_ref().is_some_and(Endpoint::is_unix);
            if served {
                tracing::info!("the server runs on this node and keeps the chunks: cache.size is not used");
            }
            !served
        });
        let limits = StoreLimits {
            memory_bytes: settings.memory_bytes,
            deadline: settings.io_timeout,
            attempts: FETCH_ATTEMPTS + u32::from(cache.is_some()),
        };
        let disk = cache.map(|_| DiskTier::new((settings.memory_bytes / 4).min(APPEND_BYTES_MAX)));
        let store = Store::new(limits, disk, tasks.clone());
        let version = &opened.version;
        let tree = Tree::new(version.clone());
        let (access, read) = (Arc::<Access>::default(), Arc::<ReadCounters>::default());
        let node = cache.and_then(|cache| {
            let own = (version.root(), Arc::clone(&access));
            let clients = NodeClients::new(opened.client.clone(), own, background.clone(), stop.clone());
            let node_store = NodeStore::new(
                Arc::clone(&store),
                clients.into(),
                opened.client.clone(),
                settings.memory_bytes,
                settings.io_timeout,
            );
            Node::new(NodeContext {
                settings: cache.clone(),
                store: Arc::clone(&store),
                node_store,
                version: MountedVersion { root: version.root(), footprint: footprint_max(version) },
                read: Arc::clone(&read),
                job: settings.job.clone(),
                dataset: settings.target.dataset.clone(),
                io_timeout: settings.io_timeout,
            })
        });
        let source: Arc<dyn ChunkSource> = match &node {
            Some(node) => Arc::new(NodeChunks { node: Arc::clone(node), beyond: opened.chunks() }),
            None => opened.chunks(),
        };
        let reader = Reader::new(tree.clone(), Arc::clone(&store), source, tasks.clone()).with_counters(read);
        let created = documents::unix_ns(&version.manifest().created).unwrap_or(0);
        let common = CommonAttr {
            uid: nix::unistd::getuid().as_raw(),
            gid: nix::unistd::getgid().as_raw(),
            created: UNIX_EPOCH + Duration::from_nanos(created),
        };
        let context = Arc::new(RequestContext {
            tree,
            reader,
            common,
            requests: RequestCounts::default(),
            faults: Faults::default(),
            access,
            error_cache: ErrorCache::default(),
            pusher: OnceLock::new(),
            io_timeout: settings.io_timeout,
            tasks: tasks.clone(),
        });
        let snapshot = snapshot_source(settings, opened, Arc::clone(&context), store, node.clone());
        if let Some(fallback) = opened.fallback.clone() {
            let stop = stop.clone();
            background.spawn(async move { stop.run_until_cancelled(fallback.watch()).await });
        }
        if let Some(watch) = opened.watch.clone() {
            let stop = stop.clone();
            background.spawn(async move { stop.run_until_cancelled(watch.run()).await });
        }
        let (node_tasks, stop_node) = (TaskTracker::new(), stop.child_token());
        if let Some(node) = &node {
            node_tasks.spawn(Arc::clone(node).run(stop_node.clone()));
        }
        Ok(RunningMount { context, snapshot, tasks, background, node, node_tasks, stop_node, stop })
    }

    fn watch_access(&self, runtime: &Runtime, client: Client, root: Root, cache: Arc<dyn KernelCache>) {
        let access = Arc::clone(&self.context.access);
        self.background
            .spawn_on(access::watch(access, client, root, cache, self.stop.clone()), runtime.handle());
    }

    fn snapshot(&self) -> Snapshot {
        (self.snapshot)()
    }

    async fn end(&self, clean: bool) {
        // First: clients of the node store that read on would keep this process busy.
        self.stop_node.cancel();
        self.tasks.close();
        if timeout(DRAIN_WITHIN, self.tasks.wait()).await.is_err() {
            tracing::warn!(left = self.tasks.len(), "requests in flight got no reply before the exit");
        }
        self.stop.cancel();
        self.background.close();
        self.node_tasks.close();
        drop(timeout(Duration::from_millis(500), self.background.wait()).await);
        if timeout(CLOSE_STORE_WITHIN, self.node_tasks.wait()).await.is_err() {
            tracing::warn!("the node store is slow to close: the process exits without waiting for it");
        }
        tracing::info!(clean, "unmounted");
    }
}

/// The signals that end a mount.
struct EndSignals {
    term: Signal,
    int: Signal,
}

impl EndSignals {
    fn listen() -> Result<Self> {
        let listen = |kind| signal(kind).context("listening for signals");
        Ok(EndSignals { term: listen(SignalKind::terminate())?, int: listen(SignalKind::interrupt())? })
    }
}

/// Serves until a signal arrives or another program unmounts.
async fn serve(
    running: &RunningMount,
    session: FuseSession,
    metrics: Option<TcpListener>,
    mut signals: EndSignals,
    ready: &str,
) -> Result<()> {
    if let Some(listener) = metrics {
        let page = metrics::serve(listener, Arc::clone(&running.snapshot), running.stop.clone());
        running.background.spawn(async move {
            if let Err(error) = page.await {
                tracing::error!(%error, "metrics are no longer served: mount again to restore them");
            }
        });
    }
    let (watched, stop) = (Arc::clone(&running.context), running.stop.clone());
    running.background.spawn(async move {
        while timeout(WATCH_EVERY, stop.cancelled()).await.is_err() {
            if let Some(p) = watched.pusher.get() {
                p.answer_late();
            }
        }
    });
    let (ended, mut end) = oneshot::channel();
    std::thread::Builder::new().name("fletch-fuse".into()).spawn(move || {
        // The receiver is gone if a signal came first.
        drop(ended.send(session.serve()));
    })?;
    // The first lookup, without the kernel: the process must never touch its own mount.
    let first = running.context.tree.list(1, 0, |entry| entry.offset > 2);
    if let Err(e) = first.await {
        running.context.faults.record(&e);
        return Err(anyhow!("cannot read the root directory of the version: {e}"));
    }
    say_ready(ready)?;
    let signal = tokio::select! {
        _ = signals.term.recv() => "SIGTERM",
        _ = signals.int.recv() => "SIGINT",
        outcome = &mut end => {
            tracing::info!("another program unmounted this mount");
            return outcome.context("the FUSE threads ended")?.context("the FUSE session failed");
        }
    };
    tracing::info!(signal, "unmounting");
    Ok(())
}

fn say_ready(ready: &str) -> Result<()> {
    if daemon::is_child() {
        tracing::info!("{ready}");
        return daemon::report_ready(ready);
    }
    eprintln!("{ready}");
    Ok(())
}

fn snapshot_source(
    settings: &Settings,
    opened: &OpenVersion,
    context: Arc<RequestContext>,
    store: Arc<Store>,
    node: Option<Arc<Node>>,
) -> Arc<dyn Fn() -> Snapshot + Send + Sync> {
    let (dataset, job) = (settings.target.dataset.to_string(), settings.job.to_string());
    let root = context.tree.version().root().to_string();
    let (client, fallback, watch) = (opened.client.clone(), opened.fallback.clone(), opened.watch.clone());
    Arc::new(move || {
        let (read, store) = (context.reader.counters(), store.stats());
        let client = client.as_ref().map(Client::stats).unwrap_or_default();
        let origin = fallback.as_ref().map(Fallback::origin_stats).unwrap_or_default();
        let (losses, server_refused) = watch.as_ref().map_or((0, 0), |w| w.counts());
        let (pushed_bytes, pushes_skipped) = context.pusher.get().map_or((0, 0), Pusher::counts);
        Snapshot {
            dataset: dataset.clone(),
            root: root.clone(),
            job: job.clone(),
            requests: context.requests.counts(),
            faults: metrics::faults(context.faults.counts()),
            reads: read.reads.load(Relaxed),
            read_bytes: read.bytes.load(Relaxed),
            read_memory_bytes: read.bytes_memory.load(Relaxed),
            read_disk_bytes: read.bytes_disk.load(Relaxed),
            read_joined_bytes: read.bytes_joined.load(Relaxed),
            read_fetched_bytes: read.bytes_fetched.load(Relaxed),
            pushed_bytes,
            pushes_skipped,
            refusals: context.access.refusals(),
            prefetch_slices: read.prefetched.load(Relaxed),
            fetches: store.fetches,
            fetched_bytes: store.fetched_bytes,
            corrupt: store.corrupt,
            memory_live_bytes: store.live_bytes,
            server_requests: client.requests,
            server_retries: client.retries,
            server_bytes: client.bytes,
            server_losses: losses + fallback.as_ref().map_or(0, Fallback::losses),
            server_refused,
            server_gone: watch.as_ref().is_some_and(|w| w.is_gone()),
            server_away: fallback.as_ref().is_some_and(Fallback::is_away),
            origin_requests: origin.requests,
            origin_bytes: origin.bytes_read,
            node: node.as_ref().map(|n| n.snapshot()),
        }
    })
}

/// Returns the most bytes that a version's chunks, or the files of its packed chunks, can take on disk.
fn footprint_max(version: &Version) -> u64 {
    let doc = version.layout_doc();
    let pieces = doc.chunks.max(version.manifest().entries);
    DiskEngine::footprint_max(doc.bytes, pieces)
}

fn explain_mount(e: io::Error, dir: &Path) -> anyhow::Error {
    let what = match e.kind() {
        io::ErrorKind::NotFound => "cannot mount without /dev/fuse: load the fuse module (modprobe fuse)",
        io::ErrorKind::PermissionDenied => {
            "not allowed to mount: your user needs read and write access to /dev/fuse, and --allow-other \
             needs user_allow_other in /etc/fuse.conf unless you are root"
        }
        _ => "cannot mount",
    };
    anyhow::Error::new(e).context(format!("{}: {what}", dir.display()))
}

/// Raises the kernel's read-ahead, which starts small whatever the session asks for. Only root can raise it.
fn raise_read_ahead(device: &str) {
    let path = format!("/sys/class/bdi/{device}/read_ahead_kb");
    match std::fs::write(&path, KERNEL_READ_AHEAD_KIB.to_string()) {
        Ok(()) => tracing::debug!(path, kib = KERNEL_READ_AHEAD_KIB, "raised the kernel's read-ahead"),
        Err(error) => tracing::debug!(path, %error, "cannot raise the kernel's read-ahead"),
    }
}

fn write_report(path: &Path, snapshot: &Snapshot) -> Result<()> {
    let text = serde_json::to_vec_pretty(snapshot).context("cannot encode the report")?;
    let part = path.with_extension("part");
    std::fs::write(&part, text)
        .and_then(|()| std::fs::rename(&part, path))
        .with_context(|| format!("cannot write the report {}", path.display()))
}
