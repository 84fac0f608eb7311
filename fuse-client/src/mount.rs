//! The life of one mount, from start to exit. This module owns every task and thread of the process.
//!
//! A mount ends in this order: signal, unmount (wait, then detach), reply to the requests in flight, stop
//! metrics, write the report, exit. All of it takes at most [`END_WITHIN`].

use crate::access::{self, KernelCache};
use crate::announce;
use crate::cli::Settings;
use crate::fs::inode::ENCODING;
use crate::fuse::{self, FuseSession};
use crate::keeper::{Keeper, State};
use crate::leaving;
use crate::metrics::{self, PageAddress, Snapshot};
use crate::open_version::{OpenVersion, open};
use crate::push::{PushThreads, WATCH_EVERY};
use crate::requests::RequestContext;
use crate::session::serve_alone;
use crate::shared_parts::SharedParts;
use crate::unmount::{Unmounted, unmount};
use crate::{daemon, mount_dir, service_manager};
use anyhow::{Context, Result, anyhow};
use fletch_client::fallback::Fallback;
use fletch_client::{Client, ClientError};
use fletch_core::{Kind, Root};
use fletch_host::{mounts, replace::replace_file};
use fletch_tables::TableError;
use std::{io, path::Path, sync::Arc, time::Duration};
use tokio::{
    runtime::{Handle, Runtime},
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
    time::timeout,
};

/// The longest time from the signal to the exit.
const END_WITHIN: Duration = Duration::from_secs(9);
/// The kernel's read-ahead in KiB, if this process may set it.
const KERNEL_READ_AHEAD_KIB: u32 = 1024;
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
    let set = settings.mount_set(mount_dir::real_path(&settings.dir)?);
    let keeper = Keeper::of_process(set).context("asking the keeper of the mount")?;
    let kept = keeper.as_deref().map(Keeper::kept).transpose().context("asking the keeper of the mount")?;
    let kept = kept.and_then(|kept| kept.into_iter().next());
    let mut settings = settings.clone();
    let dir = match &kept {
        Some(kept) if kept.inode_encoding != ENCODING => {
            return Err(anyhow!(
                "this program numbers files in another way than the one that mounted: unmount and mount again"
            ));
        }
        Some(kept) => {
            settings.target.version = kept.root.to_string();
            kept.dir.clone()
        }
        None => mount_dir::prepare(&settings.dir, &settings.target.dataset)?,
    };
    let settings = &settings;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        // A disk that hangs blocks every thread that reads it, and hashing needs threads too.
        .max_blocking_threads(if settings.process.cache.is_some() { 64 } else { 32 })
        .thread_name("fletch-io")
        .enable_all()
        .build()
        .context("starting the runtime")?;
    let opened = runtime.block_on(open(settings))?;
    let metrics = match settings.process.metrics {
        Some(addr) => {
            let bound = runtime.block_on(metrics::listen(addr, kept.is_some()));
            Some(bound.with_context(|| format!("cannot serve metrics at {addr}"))?)
        }
        None => None,
    };
    let running = RunningMount::new(settings, &opened, &runtime);

    if let Some(node) = &running.shared.node {
        // With a role, the first reads find the node's chunks and do not go to the server.
        runtime.block_on(node.wait_for_role());
    }
    // Before the mount exists, so that a signal leaves no mount behind.
    let signals = runtime.block_on(async { EndSignals::listen() })?;
    let name = format!("{}{}", mounts::SOURCE_PREFIX, settings.target.dataset);
    let push = settings.process.push.then(|| PushThreads::start(1)).transpose();
    let push = push.context("starting the push thread")?;
    let (context, allow_other) = (&running.context, settings.process.allow_other);
    let session = match (&keeper, &kept) {
        (None, _) => fuse::mount(context, &dir, &name, allow_other),
        (Some(keeper), None) => {
            let dataset = settings.target.dataset.clone();
            let (root, layout) = (opened.version.root(), opened.version.layout());
            let state = State { root, layout, dataset, dir: dir.clone(), inode_encoding: ENCODING };
            keeper.mount(context, name, allow_other, state)
        }
        (Some(keeper), Some(kept)) => {
            runtime.block_on(context.expect_all_known()).context("reading the root directory")?;
            keeper.attach(context, kept.clone())
        }
    };
    let session = session.map_err(|e| explain_mount(e, &dir))?;
    let entry = mounts::at(&dir).inspect_err(|_| fuse::abandon(&dir))?;
    let entry = entry.context("another program removed the mount at once: mount again")?;
    if let Some(threads) = push {
        drop(running.context.pusher.set(threads.pusher(session.page_cache())));
    }
    raise_read_ahead(&entry.device);

    let version = &opened.version;
    let ready = format!(
        "{} {} (root {}, {} entries) at {}",
        if kept.is_some() { "took over the mount of" } else { "mounted" },
        settings.target.dataset,
        version.root().0.short(),
        version.manifest().entries,
        dir.display()
    );
    if let Some(client) = opened.client.clone() {
        let mount = announce::announcement(settings, version.root(), &dir);
        let (kernel, stop) = (session.kernel_cache(), running.shared.stop.clone());
        let of = (Arc::clone(&running.context), Arc::clone(&kernel));
        let announced = announce::run(client.clone(), mount, of, dir.clone(), stop);
        running.shared.background.spawn_on(announced, runtime.handle());
        running.watch_access(&runtime, client, version.root(), kernel);
    }
    let threads = settings.process.threads;
    let outcome = runtime.block_on(serve(&running, (session, threads), metrics, signals, &ready));
    // Bounds the rest of this function.
    exit_after(END_WITHIN);
    let is_there = || mounts::of_device(&entry.device).is_ok_and(|mount| mount.is_some());
    let stays = outcome.is_ok() && keeper.is_some_and(|keeper| keeper.is_of_many()) && is_there();
    let gone = if stays {
        leaving::leave();
        Ok(Unmounted::Kept)
    } else {
        unmount(&dir, &entry.device)
    };
    runtime.block_on(running.end(gone.as_ref().ok().copied()));
    if let Some(path) = &settings.report {
        write_report(path, &running.snapshot())?;
    }
    runtime.shutdown_background();
    gone?;
    outcome
}

/// Ends the process after a time, whatever it waits for then.
pub(crate) fn exit_after(within: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(within);
        tracing::error!(?within, "the mount did not end in time: the process exits now");
        std::process::exit(1);
    });
}

/// The parts of a running mount, and its tasks.
struct RunningMount {
    context: Arc<RequestContext>,
    snapshot: Arc<dyn Fn() -> Snapshot + Send + Sync>,
    shared: Arc<SharedParts>,
}

impl RunningMount {
    fn new(settings: &Settings, opened: &OpenVersion, runtime: &Runtime) -> Self {
        let shared = Arc::new(SharedParts::new(&settings.process, opened.client.as_ref(), runtime.handle()));
        let context = shared.context(opened, &settings.target.dataset, true);
        let snapshot = snapshot_source(settings, opened, Arc::clone(&context), Arc::clone(&shared));
        if let Some(fallback) = opened.fallback.clone() {
            let stop = shared.stop.clone();
            let watching = async move { stop.run_until_cancelled(fallback.watch()).await };
            shared.background.spawn_on(watching, runtime.handle());
        }
        if let Some(watch) = opened.watch.clone() {
            let stop = shared.stop.clone();
            let watching = async move { stop.run_until_cancelled(watch.run()).await };
            shared.background.spawn_on(watching, runtime.handle());
        }
        RunningMount { context, snapshot, shared }
    }

    fn watch_access(&self, runtime: &Runtime, client: Client, root: Root, cache: Arc<dyn KernelCache>) {
        let access = Arc::clone(&self.context.access);
        let watching = access::watch(access, client, root, cache, self.shared.stop.clone());
        self.shared.background.spawn_on(watching, runtime.handle());
    }

    fn snapshot(&self) -> Snapshot {
        (self.snapshot)()
    }

    async fn end(&self, unmounted: Option<Unmounted>) {
        self.shared.end().await;
        match unmounted {
            Some(Unmounted::Kept) => tracing::info!("the mount waits for the next process"),
            how => tracing::info!(clean = how == Some(Unmounted::Clean), "unmounted"),
        }
    }
}

/// The signals that end a mount.
pub(crate) struct EndSignals {
    term: Signal,
    int: Signal,
}

impl EndSignals {
    pub(crate) fn listen() -> Result<Self> {
        let listen = |kind| signal(kind).context("listening for signals");
        Ok(EndSignals { term: listen(SignalKind::terminate())?, int: listen(SignalKind::interrupt())? })
    }

    /// Waits for a signal and returns its name.
    pub(crate) async fn wait(&mut self) -> &'static str {
        tokio::select! {
            _ = self.term.recv() => "SIGTERM",
            _ = self.int.recv() => "SIGINT",
        }
    }
}

/// Serves until a signal arrives or another program unmounts.
async fn serve(
    running: &RunningMount,
    (session, threads): (FuseSession, usize),
    metrics: Option<PageAddress>,
    mut signals: EndSignals,
    ready: &str,
) -> Result<()> {
    if let Some(address) = metrics {
        let page = metrics::serve(address, Arc::clone(&running.snapshot), running.shared.stop.clone());
        running.shared.background.spawn(async move {
            if let Err(error) = page.await {
                tracing::error!(%error, "metrics are no longer served: mount again to restore them");
            }
        });
    }
    let (watched, stop) = (Arc::clone(&running.context), running.shared.stop.clone());
    running.shared.background.spawn(async move {
        while timeout(WATCH_EVERY, stop.cancelled()).await.is_err() {
            if let Some(p) = watched.pusher.get() {
                p.answer_late();
            }
        }
    });
    let (ended, mut end) = oneshot::channel();
    let (context, runtime) = (Arc::clone(&running.context), Handle::current());
    std::thread::Builder::new().name("fletch-fuse".into()).spawn(move || {
        // The receiver is gone if a signal came first.
        drop(ended.send(serve_alone(session.device(), context, threads, runtime)));
    })?;
    // The first lookup, without the kernel: the process must never touch its own mount.
    let first = running.context.tree.list(1, 0, |entry| entry.offset > 2);
    if let Err(e) = first.await {
        running.context.faults.record(&e);
        return Err(anyhow!("cannot read the root directory of the version: {e}"));
    }
    say_ready(ready)?;
    let signal = tokio::select! {
        signal = signals.wait() => signal,
        outcome = &mut end => {
            tracing::info!("another program unmounted this mount");
            return outcome.context("the FUSE threads ended")?.context("the FUSE session failed");
        }
    };
    tracing::info!(signal, "unmounting");
    Ok(())
}

pub(crate) fn say_ready(ready: &str) -> Result<()> {
    service_manager::tell(service_manager::READY);
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
    shared: Arc<SharedParts>,
) -> Arc<dyn Fn() -> Snapshot + Send + Sync> {
    let (dataset, job) = (settings.target.dataset.to_string(), settings.process.job.to_string());
    let root = context.tree.version().root().to_string();
    let (client, fallback, watch) = (opened.client.clone(), opened.fallback.clone(), opened.watch.clone());
    Arc::new(move || {
        let origin = fallback.as_ref().map(Fallback::origin_stats).unwrap_or_default();
        let mut all = shared.counters(client.as_ref(), watch.as_deref());
        all.add_mount(&Snapshot::of_mount(&context));
        all.server_losses += fallback.as_ref().map_or(0, Fallback::losses);
        Snapshot {
            dataset: dataset.clone(),
            root: root.clone(),
            job: job.clone(),
            server_away: fallback.as_ref().is_some_and(Fallback::is_away),
            origin_requests: origin.requests,
            origin_bytes: origin.bytes_read,
            ..all
        }
    })
}

pub(crate) fn explain_mount(e: io::Error, dir: &Path) -> anyhow::Error {
    let what = match e.kind() {
        io::ErrorKind::NotFound => {
            "cannot mount without /dev/fuse: load the fuse module (modprobe fuse), or read without a mount \
             (docs/howto/without-fuse.md)"
        }
        io::ErrorKind::PermissionDenied => {
            "not allowed to mount: your user needs read and write access to /dev/fuse, and --allow-other \
             needs user_allow_other in /etc/fuse.conf unless you are root"
        }
        _ => "cannot mount",
    };
    anyhow::Error::new(e).context(format!("{}: {what}", dir.display()))
}

/// Raises the kernel's read-ahead, which starts small whatever the session asks for. Only root can raise it.
pub(crate) fn raise_read_ahead(device: &str) {
    let path = format!("/sys/class/bdi/{device}/read_ahead_kb");
    match std::fs::write(&path, KERNEL_READ_AHEAD_KIB.to_string()) {
        Ok(()) => tracing::debug!(path, kib = KERNEL_READ_AHEAD_KIB, "raised the kernel's read-ahead"),
        Err(error) => tracing::debug!(path, %error, "cannot raise the kernel's read-ahead"),
    }
}

fn write_report(path: &Path, snapshot: &Snapshot) -> Result<()> {
    let text = serde_json::to_vec_pretty(snapshot).context("cannot encode the report")?;
    replace_file(path, &text).with_context(|| format!("cannot write the report {}", path.display()))
}
