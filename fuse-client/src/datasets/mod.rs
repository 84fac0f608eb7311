//! All datasets of a server, mounted below one directory. This module owns every task of the process.
//!
//! The watcher lists the datasets that the token may read, mounts the versions that their tags name, and
//! keeps a link for each name. A token reads one domain, so one process shows one domain.
//!
//! The process ends in this order: signal, delete the ready file, close the directory, unmount (wait, then
//! detach), reply to the requests in flight, stop the tasks, exit.

pub mod announcer;
pub mod directory;
pub mod node_label;
pub mod plan;
pub mod version_mount;
pub mod watcher;

use crate::cli::DatasetsSettings;
use crate::keeper::Keeper;
use crate::leaving;
use crate::metrics::{self, PageAddress, Snapshot};
use crate::mount::{EndSignals, exit_after, say_ready};
use crate::open_version;
use crate::push::{PushThreads, WATCH_EVERY};
use crate::server_watch::ServerWatch;
use crate::session::SessionThreads;
use crate::shared_parts::SharedParts;
use anyhow::{Context, Result, anyhow};
use directory::DatasetsDir;
use fletch_client::Client;
use fletch_host::replace::replace_file;
use node_label::NodeLabel;
use std::{
    fs, io,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::runtime::Runtime;
use version_mount::{Attempt, MountParts, VersionMount};
use watcher::Watcher;

/// The threads for work that waits.
const WORKERS: usize = 2;
/// The threads that push pages of all mounts.
const PUSH_THREADS: usize = 2;
/// The threads for calls that block: with a cache on disk, and without.
const BLOCKING_THREADS: (usize, usize) = (48, 32);
/// How long a stop waits for programs that use a mount.
const GRACE: Duration = Duration::from_secs(3);
const RETRY_EVERY: Duration = Duration::from_millis(100);
/// The threads that unmount at the end: the kernel takes time to forget the names of each mount.
const UNMOUNT_THREADS: usize = 4;
/// The longest time from the signal to the exit.
const END_WITHIN: Duration = Duration::from_secs(25);

/// Mounts all datasets, follows the server until a signal, and cleans up.
///
/// # Errors
/// What failed, and what to do. Nothing stays mounted then.
pub fn run(settings: &DatasetsSettings) -> Result<()> {
    let process = &settings.process;
    // Before the process has another thread.
    let keeper = Keeper::of_process(settings.mount_set()).context("asking the keeper of the mounts")?;
    let blocking = if process.cache.is_some() { BLOCKING_THREADS.0 } else { BLOCKING_THREADS.1 };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(blocking)
        .thread_name("fletch-io")
        .enable_all()
        .build()
        .context("starting the runtime")?;
    // Before anything is mounted, so that a signal leaves no mount behind.
    let mut signals = runtime.block_on(async { EndSignals::listen() })?;
    let client = open_version::client(process, &settings.server)?;
    let label = settings.node_label.clone().map(|label| {
        let variable = |name| std::env::var(format!("KUBERNETES_SERVICE_{name}")).ok();
        NodeLabel::new(label, variable("HOST"), variable("PORT")).map(Arc::new)
    });
    let label = label.transpose()?;
    let metrics = match process.metrics {
        Some(addr) => {
            let takes_over = match &keeper {
                Some(keeper) => !keeper.kept().context("asking the keeper of the mounts")?.is_empty(),
                None => false,
            };
            let bound = runtime.block_on(metrics::listen(addr, takes_over));
            Some(bound.with_context(|| format!("cannot serve metrics at {addr}"))?)
        }
        None => None,
    };
    let dir = DatasetsDir::open(&settings.dir, keeper.as_deref());
    let is_taken_over = dir.as_ref().is_ok_and(DatasetsDir::is_taken_over);
    // The names that are taken over can be used, and programs wait meanwhile.
    if let Some(path) = settings.ready_file.as_deref().filter(|_| !is_taken_over) {
        remove_ready_file(path)?;
    }
    let dir = dir?;
    let shared = Arc::new(SharedParts::new(process, Some(&client), runtime.handle()));
    let watch = ServerWatch::new(client.clone(), None);
    let parts = MountParts {
        shared: Arc::clone(&shared),
        push: process.push.then(|| PushThreads::start(PUSH_THREADS)).transpose()?,
        allow_other: process.allow_other,
        sessions: SessionThreads::start(process.threads, runtime.handle().clone())?,
        keeper,
    };
    let tables = process.part_cache();
    let watcher = Watcher::new(settings, dir, client.clone(), Arc::clone(&watch), tables, parts);
    watcher.take_over()?;
    let watcher = Arc::new(watcher);
    start_tasks(&runtime, &shared, &watcher, &client, &watch, metrics, label.clone());
    let outcome = runtime.block_on(async {
        if let Some(node) = &shared.node {
            node.wait_for_role().await;
        }
        tokio::select! {
            signal = signals.wait() => {
                tracing::info!(signal, "unmounting all datasets");
                Ok(())
            }
            outcome = watcher.run(|text| ready(settings.ready_file.as_deref(), text)) => outcome,
        }
    });
    exit_after(END_WITHIN);
    let removed = settings.ready_file.as_deref().map_or(Ok(()), remove_ready_file);
    if let Some(label) = &label {
        runtime.block_on(label.end());
    }
    let stays = outcome.is_ok() && watcher.is_kept_for_others();
    let closed = if stays {
        leaving::leave();
        Ok(())
    } else {
        close(&watcher)
    };
    runtime.block_on(shared.end());
    if stays {
        watcher.directory().leave();
        tracing::info!("the mounts wait for the next process");
    } else {
        tracing::info!("all datasets are unmounted");
    }
    runtime.shutdown_background();
    outcome.and(removed).and(closed)
}

/// Starts the tasks that run beside the watcher until the process stops.
fn start_tasks(
    runtime: &Runtime,
    shared: &Arc<SharedParts>,
    watcher: &Arc<Watcher>,
    client: &Client,
    watch: &Arc<ServerWatch>,
    metrics: Option<PageAddress>,
    label: Option<Arc<NodeLabel>>,
) {
    let spawn = |work: futures::future::BoxFuture<'static, ()>| {
        let stop = shared.stop.clone();
        let work = async move { stop.run_until_cancelled(work).await };
        shared.background.spawn_on(work, runtime.handle());
    };
    let watching = Arc::clone(watch);
    spawn(Box::pin(async move { watching.run().await }));
    let checked = Arc::clone(watcher);
    spawn(Box::pin(async move { checked.check_access().await }));
    if let Some(label) = label.clone() {
        spawn(Box::pin(async move { label.run().await }));
    }
    let pushers = Arc::clone(watcher);
    spawn(Box::pin(async move {
        loop {
            tokio::time::sleep(WATCH_EVERY).await;
            pushers.answer_late();
        }
    }));
    let (announced, server, stop) = (Arc::clone(watcher), client.clone(), shared.stop.clone());
    shared.background.spawn_on(announcer::run(server, announced, stop), runtime.handle());
    if let Some(address) = metrics {
        let (counted, shared) = (Arc::clone(watcher), Arc::clone(shared));
        let (client, watch) = (client.clone(), Arc::clone(watch));
        let stop = shared.stop.clone();
        let snapshot = Arc::new(move || Snapshot {
            node_label: label.as_deref().map(NodeLabel::is_set),
            ..counted.snapshot(shared.counters(Some(&client), Some(&watch)))
        });
        spawn(Box::pin(async move {
            if let Err(error) = metrics::serve(address, snapshot, stop).await {
                tracing::error!(%error, "metrics are no longer served: start again to restore them");
            }
        }));
    }
}

/// Unmounts every version and the directory. Blocks.
fn close(watcher: &Watcher) -> Result<()> {
    let hidden = watcher.directory().hide();
    let mut left = watcher.take_mounts();
    let until = Instant::now() + GRACE;
    let mut is_logged = false;
    let mut failed = Ok(());
    loop {
        let (busy, outcome) = unmount_all(&left, until);
        failed = failed.and(outcome);
        left = busy;
        if left.is_empty() || Instant::now() >= until {
            break;
        }
        if !std::mem::replace(&mut is_logged, true) {
            tracing::info!(mounts = left.len(), grace = ?GRACE, "mounts are in use: waiting");
        }
        std::thread::sleep(RETRY_EVERY);
    }
    for mount in &left {
        tracing::warn!(
            dataset = %mount.dataset, root = %mount.root,
            "the mount is still in use and is detached: programs with open files there get errors"
        );
    }
    // The directory goes with everything that is still mounted below it.
    let closed = watcher.close_directory();
    hidden.and(failed).and(closed)
}

/// Tries once to unmount each version, until a deadline. Returns those that are left, and an error that is
/// not about their use.
fn unmount_all(mounts: &[Arc<VersionMount>], until: Instant) -> (Vec<Arc<VersionMount>>, Result<()>) {
    let attempt = |part: &[Arc<VersionMount>]| {
        let mut left = (Vec::new(), Ok(()));
        for mount in part {
            let outcome = if Instant::now() < until { mount.try_unmount() } else { Ok(Attempt::Busy) };
            match outcome {
                Ok(Attempt::Unmounted) => {}
                Ok(Attempt::Busy) => left.0.push(Arc::clone(mount)),
                Err(e) => {
                    left.0.push(Arc::clone(mount));
                    left.1 = Err(e);
                }
            }
        }
        left
    };
    let part = mounts.len().div_ceil(UNMOUNT_THREADS).max(1);
    std::thread::scope(|scope| {
        let running: Vec<_> = mounts.chunks(part).map(|part| scope.spawn(move || attempt(part))).collect();
        let mut all = (Vec::new(), Ok(()));
        for thread in running {
            match thread.join() {
                Ok((left, outcome)) => {
                    all.0.extend(left);
                    all.1 = std::mem::replace(&mut all.1, Ok(())).and(outcome);
                }
                Err(_) => all.1 = Err(anyhow!("a thread that unmounts failed: please report this line")),
            }
        }
        all
    })
}

/// Reports the first complete pass: by the ready file, and to the terminal.
fn ready(file: Option<&Path>, text: &str) -> Result<()> {
    if let Some(path) = file {
        let written = replace_file(path, format!("{text}\n").as_bytes());
        written.with_context(|| format!("cannot write the ready file {}", path.display()))?;
    }
    say_ready(text)
}

fn remove_ready_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot delete the ready file {}", path.display()))
        }
        _ => Ok(()),
    }
}
