//! Follows the server's datasets: lists them, mounts and unmounts versions, and moves the links.
//!
//! [`plan`] decides, [`DatasetsDir`] and [`VersionMount`] act, and this module waits.
//!
//! 1. A link leads only to a mounted version. While a new version cannot be mounted, its name keeps the old.
//! 2. A server that does not answer changes nothing.
//! 3. One name that fails delays no other name longer than one pass.

mod kept;
mod names;
mod reports;

use super::directory::DatasetsDir;
use super::plan::{self, MountedState};
use super::version_mount::{Attempt, MountParts, VersionMount};
use crate::access::{self, KernelCache};
use crate::cli::DatasetsSettings;
use crate::metrics::Snapshot;
use crate::open_version::open_shared;
use crate::push::Pusher;
use crate::server_watch::ServerWatch;
use anyhow::{Context, Result, anyhow};
use fletch_api::ResolvedVersion;
use fletch_client::{Client, ClientError};
use fletch_core::{DatasetName, JobName, Root, TagName};
use fletch_tables::PartCache;
use futures::{StreamExt as _, stream};
use globset::GlobMatcher;
use kept::KeptMount;
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::Notify,
    task::spawn_blocking,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

/// The calls to the server at once, and the versions that are mounted at once.
const AT_ONCE: usize = 8;
/// The time between the starts of two access checks of all versions. With the time of the checks this stays
/// below the 5 s that SEMANTICS S21 promises.
const ACCESS_EVERY: Duration = Duration::from_millis(2500);
/// The time between two attempts to take over the mounts of an earlier process.
const KEPT_EVERY: Duration = Duration::from_secs(1);
/// The names that a log line lists.
const NAMES_LOGGED: usize = 20;

/// Why a name does not lead to the version that it should.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Problem {
    /// There is no room among `--mounts-max` versions.
    OverLimit,
    /// The version could not be resolved or mounted.
    Failed(String),
}

/// One name below the directory.
#[derive(Debug, Clone)]
struct Name {
    dataset: DatasetName,
    tag: TagName,
    /// The version that the name should lead to, if the server resolved it.
    wanted: Option<ResolvedVersion>,
    /// The version to which the link leads.
    linked: Option<Root>,
    problem: Option<Problem>,
}

struct Mounted {
    mount: Arc<VersionMount>,
    unneeded_since: Option<Instant>,
}

#[derive(Default)]
struct State {
    names: BTreeMap<String, Name>,
    mounted: BTreeMap<Root, Mounted>,
    /// The counters of mounts that ended.
    ended: Snapshot,
    /// The mounts of an earlier process that this one does not serve yet.
    kept: BTreeMap<Root, KeptMount>,
    /// The names over the limit that were logged last.
    logged: Vec<String>,
}

/// The settings of a [`Watcher`].
struct Rules {
    tags: Option<GlobMatcher>,
    keep: Duration,
    mounts_max: usize,
    interval: Duration,
    job: JobName,
}

/// Follows the datasets of one server.
pub struct Watcher {
    rules: Rules,
    dir: DatasetsDir,
    client: Client,
    watch: Arc<ServerWatch>,
    tables: PartCache,
    parts: MountParts,
    state: Mutex<State>,
    passes: AtomicU64,
    passes_failed: AtomicU64,
    /// Whether the tags of a dataset could not be listed before.
    tags_failed: AtomicBool,
    /// Whether there were more names than links before.
    names_cut: AtomicBool,
    /// Whether a log line said that the dataset `NOT-MOUNTED` is left out.
    has_left_out: AtomicBool,
    /// Notified when names or mounts changed.
    changed: Notify,
    /// Notified when access may have ended: check it now.
    check_now: Notify,
}

/// Why a pass ended early.
enum PassError {
    /// The server did not answer, or refused.
    Server(ClientError),
    /// The process cannot go on.
    Fatal(anyhow::Error),
}

impl From<anyhow::Error> for PassError {
    fn from(e: anyhow::Error) -> Self {
        PassError::Fatal(e)
    }
}

impl Watcher {
    /// Returns a watcher over `dir`, which shows nothing yet.
    #[must_use]
    pub fn new(
        settings: &DatasetsSettings,
        dir: DatasetsDir,
        client: Client,
        watch: Arc<ServerWatch>,
        tables: PartCache,
        parts: MountParts,
    ) -> Self {
        let rules = Rules {
            tags: settings.tags.clone(),
            keep: settings.keep,
            mounts_max: settings.mounts_max,
            interval: settings.interval,
            job: settings.process.job.clone(),
        };
        Watcher {
            rules,
            dir,
            client,
            watch,
            tables,
            parts,
            state: Mutex::default(),
            passes: AtomicU64::new(0),
            passes_failed: AtomicU64::new(0),
            tags_failed: AtomicBool::new(false),
            names_cut: AtomicBool::new(false),
            has_left_out: AtomicBool::new(false),
            changed: Notify::new(),
            check_now: Notify::new(),
        }
    }

    /// Returns whether the mounts stay when this process ends.
    #[must_use]
    pub fn is_kept_for_others(&self) -> bool {
        self.parts.keeper.as_ref().is_some_and(|keeper| keeper.is_of_many())
    }

    #[must_use]
    pub fn directory(&self) -> &DatasetsDir {
        &self.dir
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change leaves the state consistent, so a panic elsewhere does no harm.
        self.state.lock()
    }

    /// Follows the server. Calls `ready` after the first complete pass. Ends only with an error.
    ///
    /// # Errors
    /// The server refuses the token before the first pass, or the directory is gone.
    pub async fn run(&self, ready: impl FnOnce(&str) -> Result<()>) -> Result<()> {
        let mut ready = Some(ready);
        let mut is_failing = false;
        loop {
            let started = Instant::now();
            match self.pass().await {
                Ok(()) => {
                    self.passes.fetch_add(1, Relaxed);
                    if std::mem::take(&mut is_failing) {
                        tracing::info!("the server lists its datasets again");
                    }
                    if let Some(ready) = ready.take() {
                        self.dir.show()?;
                        ready(&self.summary())?;
                    }
                }
                Err(PassError::Fatal(e)) => return Err(e),
                Err(PassError::Server(e)) => {
                    self.passes_failed.fetch_add(1, Relaxed);
                    if e.is_denied() {
                        self.check_now.notify_one();
                        // What was taken over is served before the first pass: its readers keep it.
                        if ready.is_some() && !self.dir.is_taken_over() {
                            return Err(e.into());
                        }
                    }
                    if !std::mem::replace(&mut is_failing, true) {
                        let server = self.client.servers();
                        tracing::warn!(%server, error = %e, "cannot list the datasets: trying again");
                    }
                }
            }
            // Programs wait for the mounts of an earlier process.
            let waits = !self.state().kept.is_empty();
            let interval = if waits { KEPT_EVERY.min(self.rules.interval) } else { self.rules.interval };
            sleep(interval.saturating_sub(started.elapsed())).await;
        }
    }

    fn summary(&self) -> String {
        let state = self.state();
        let linked = state.names.values().filter(|n| n.linked.is_some()).count();
        format!(
            "mounted {} versions for {linked} of {} names at {}",
            state.mounted.len(),
            state.names.len(),
            self.dir.path().display()
        )
    }

    async fn pass(&self) -> Result<(), PassError> {
        if !self.dir.is_mounted()? {
            let dir = self.dir.path().display();
            return Err(anyhow!("another program unmounted {dir}, or mounted over it: start again").into());
        }
        self.attach_kept().await;
        let wanted = self.wanted_names().await.map_err(PassError::Server)?;
        let mut changed = self.drop_names(&wanted)?;
        changed |= self.forget_ended()?;
        self.record(wanted);
        changed |= self.mount_and_unmount().await?;
        changed |= self.move_links();
        self.log_over_limit();
        if changed {
            self.changed.notify_one();
        }
        Ok(())
    }

    /// Removes the links of names that are gone. Returns whether there were any.
    fn drop_names(&self, wanted: &BTreeMap<String, Name>) -> Result<bool> {
        let mut state = self.state();
        let gone: Vec<String> = state.names.keys().filter(|n| !wanted.contains_key(*n)).cloned().collect();
        for name in &gone {
            let known = state.names.remove(name);
            if known.is_some_and(|known| known.linked.is_some()) {
                self.dir.remove_link(name).with_context(|| format!("cannot remove the link {name}"))?;
            }
            tracing::info!(name, "a name is gone: its dataset was unregistered, or its tag deleted");
        }
        if !gone.is_empty() {
            self.check_now.notify_one();
        }
        Ok(!gone.is_empty())
    }

    /// Takes mounts out of the state that another program unmounted, and their links with them.
    fn forget_ended(&self) -> Result<bool> {
        let table = std::fs::read("/proc/self/mountinfo").context("cannot read the mount table")?;
        let devices: BTreeSet<String> =
            fletch_host::mounts::parse(&table).into_iter().map(|m| m.device).collect();
        let ended: Vec<Arc<VersionMount>> = {
            let state = self.state();
            let is_gone = |mount: &VersionMount| mount.has_ended() || !devices.contains(mount.device());
            let mounts = state.mounted.values().map(|m| &m.mount);
            mounts.filter(|mount| is_gone(mount)).cloned().collect()
        };
        for mount in &ended {
            tracing::warn!(root = %mount.root, "another program unmounted a version: mounting it again");
            self.forget_mount(mount.root)?;
        }
        Ok(!ended.is_empty())
    }

    /// Takes a version that is not mounted any more out of the state.
    fn forget_mount(&self, root: Root) -> Result<()> {
        let mut state = self.state();
        let leading: Vec<String> = state
            .names
            .iter()
            .filter(|(_, n)| n.linked == Some(root))
            .map(|(name, _)| name.clone())
            .collect();
        for name in leading {
            self.dir.remove_link(&name).with_context(|| format!("cannot remove the link {name}"))?;
            if let Some(known) = state.names.get_mut(&name) {
                known.linked = None;
            }
        }
        if let Some(mounted) = state.mounted.remove(&root) {
            state.ended.add_mount(&Snapshot::of_mount(&mounted.mount.context));
        }
        drop(state);
        if let Some(node) = &self.parts.shared.node {
            node.remove_version(root);
        }
        if let Err(error) = self.dir.remove_version_dir(root) {
            tracing::warn!(%root, %error, "cannot remove the directory of a version; it stays closed");
        }
        Ok(())
    }

    /// Replaces what is known about names by what the server said. Links stay as they are.
    fn record(&self, wanted: BTreeMap<String, Name>) {
        let mut state = self.state();
        for (name, new) in wanted {
            let linked = state.names.get(&name).and_then(|known| known.linked);
            if let Some(Problem::Failed(why)) = &new.problem
                && state.names.get(&name).is_none_or(|known| known.problem != new.problem)
            {
                tracing::warn!(name, why, "cannot resolve a version: its link stays as it is");
            }
            let problem = match (&new.wanted, state.names.get(&name)) {
                // The problem of an earlier attempt to mount the same version.
                (Some(wanted), Some(known))
                    if known.wanted.as_ref().is_some_and(|before| before.root == wanted.root) =>
                {
                    known.problem.clone()
                }
                _ => new.problem,
            };
            state.names.insert(name, Name { linked, problem, ..new });
        }
    }

    /// Returns the versions that names need, in the order in which they get room.
    fn needed(&self) -> Vec<ResolvedVersion> {
        let (state, latest) = (self.state(), TagName::latest());
        let (first, then): (Vec<&Name>, Vec<&Name>) = state.names.values().partition(|n| n.tag == latest);
        first.into_iter().chain(then).filter_map(|n| n.wanted.clone()).collect()
    }

    async fn mount_and_unmount(&self) -> Result<bool> {
        let needed = self.needed();
        let roots: Vec<Root> = needed.iter().map(|v| v.root).collect();
        let now = Instant::now();
        let plan = {
            let mut state = self.state();
            let linked: BTreeSet<Root> = state.names.values().filter_map(|n| n.linked).collect();
            for (root, mounted) in &mut state.mounted {
                let is_needed = roots.contains(root) || linked.contains(root);
                mounted.unneeded_since =
                    if is_needed { None } else { Some(mounted.unneeded_since.unwrap_or(now)) };
            }
            let mounted = state.mounted.iter().map(|(root, m)| {
                let is_refused = m.mount.context.access.refused().is_some();
                (*root, MountedState { unneeded_since: m.unneeded_since, is_refused })
            });
            plan::plan(&roots, &linked, &mounted.collect(), now, self.rules.keep)
        };
        let mut changed = false;
        for root in plan.unmount {
            changed |= self.unmount(root).await?;
        }
        for root in plan.make_room {
            let mounted = self.state().mounted.len();
            if plan::excess(mounted, plan.mount.len(), self.rules.mounts_max) == 0 {
                break;
            }
            changed |= self.unmount(root).await?;
        }
        let room = self.rules.mounts_max.saturating_sub(self.state().mounted.len());
        let mut first: Vec<ResolvedVersion> = Vec::new();
        // What an earlier process mounted is there already.
        let kept: BTreeSet<Root> = self.state().kept.keys().copied().collect();
        for root in plan.mount.iter().take(room).filter(|root| !kept.contains(root)) {
            first.extend(needed.iter().find(|v| v.root == *root).cloned());
        }
        changed |= !first.is_empty();
        let mounting = stream::iter(first.into_iter().map(|version| async move {
            let root = version.root;
            (root, self.mount(version).await)
        }));
        let mut mounting = mounting.buffer_unordered(AT_ONCE);
        while let Some((root, outcome)) = mounting.next().await {
            self.record_mount(root, outcome);
        }
        let over: BTreeSet<Root> = plan.mount.into_iter().skip(room).collect();
        for name in self.state().names.values_mut() {
            let root = name.wanted.as_ref().map(|v| v.root);
            if root.is_some_and(|root| over.contains(&root)) {
                name.problem = Some(Problem::OverLimit);
            }
        }
        Ok(changed)
    }

    /// Unmounts a version unless a program uses it. Returns whether it is gone.
    async fn unmount(&self, root: Root) -> Result<bool> {
        let Some(mount) = self.state().mounted.get(&root).map(|m| Arc::clone(&m.mount)) else {
            return Ok(false);
        };
        let dataset = mount.dataset.clone();
        match spawn_blocking(move || mount.try_unmount()).await? {
            Ok(Attempt::Unmounted) => {
                tracing::info!(%dataset, %root, "unmounted a version that no name needs");
                self.forget_mount(root)?;
                Ok(true)
            }
            Ok(Attempt::Busy) => Ok(false),
            Err(error) => {
                tracing::warn!(%dataset, %root, error = format!("{error:#}"), "cannot unmount: trying again");
                Ok(false)
            }
        }
    }

    async fn mount(&self, version: ResolvedVersion) -> Result<VersionMount> {
        let root = version.root;
        let of = (&version.dataset, root, version.layout);
        let opened = open_shared(&self.client, &self.watch, of, &self.tables).await?;
        let dir = self.dir.make_version_dir(root)?;
        let mounted = VersionMount::mount(&self.parts, opened, version.dataset, dir, false).await;
        if mounted.is_err() {
            self.dir.remove_version_dir(root).context("cannot remove the directory of the version")?;
        }
        mounted
    }

    fn record_mount(&self, root: Root, outcome: Result<VersionMount>) {
        let mut state = self.state();
        let problem = match outcome {
            Ok(mount) => {
                tracing::info!(dataset = %mount.dataset, %root, "mounted a version");
                let mounted = Mounted { mount: Arc::new(mount), unneeded_since: None };
                state.mounted.insert(root, mounted);
                None
            }
            Err(e) => Some(Problem::Failed(format!("{e:#}"))),
        };
        for (name, known) in &mut state.names {
            if known.wanted.as_ref().is_none_or(|v| v.root != root) {
                continue;
            }
            if let Some(Problem::Failed(why)) = &problem
                && known.problem != problem
            {
                tracing::warn!(name, %root, why, "cannot mount a version: trying again");
            }
            known.problem.clone_from(&problem);
        }
    }

    /// Makes each link lead to its version, as far as that is mounted. Returns whether a link moved.
    fn move_links(&self) -> bool {
        let mut state = self.state();
        let State { names, mounted, .. } = &mut *state;
        let mut changed = false;
        for (name, known) in names {
            let Some(root) = known.wanted.as_ref().map(|v| v.root).filter(|r| mounted.contains_key(r)) else {
                continue;
            };
            if known.linked == Some(root) {
                known.problem = None;
                continue;
            }
            // One name without room costs no other name its link. A lost directory ends the next pass.
            if let Err(error) = self.dir.set_link(name, root) {
                let problem = Some(Problem::Failed(format!("cannot set the link: {error}")));
                if known.problem != problem {
                    tracing::warn!(name, %error, "cannot set a link: trying again");
                }
                known.problem = problem;
                continue;
            }
            known.problem = None;
            let before = known.linked.replace(root);
            tracing::info!(name, %root, before = before.map(|r| r.to_string()), "a link leads to a version");
            changed = true;
        }
        changed
    }

    fn log_over_limit(&self) {
        let mut state = self.state();
        let is_over = |n: &Name| n.problem == Some(Problem::OverLimit);
        let over: Vec<String> =
            state.names.iter().filter(|(_, n)| is_over(n)).map(|(name, _)| name.clone()).collect();
        if over != state.logged && !over.is_empty() {
            let names = over.iter().take(NAMES_LOGGED).map(String::as_str).collect::<Vec<_>>().join(", ");
            let (count, mounts_max) = (over.len(), self.rules.mounts_max);
            tracing::warn!(
                count,
                mounts_max,
                names,
                "versions are not mounted, because --mounts-max is reached: raise it, or unregister datasets"
            );
        }
        state.logged = over;
    }

    fn mounts(&self) -> Vec<Arc<VersionMount>> {
        self.state().mounted.values().map(|m| Arc::clone(&m.mount)).collect()
    }

    /// Checks the access to every mounted version, again and again. Drop the future to stop.
    pub async fn check_access(&self) {
        let never = CancellationToken::new();
        loop {
            let started = Instant::now();
            let checks = stream::iter(self.mounts()).map(|mount| {
                let never = &never;
                async move {
                    let (access, cache) = (&mount.context.access, &mount.kernel_cache);
                    let client = mount.client.within(access::HOLD_SLACK);
                    access::check(access, &client, mount.root, cache, Duration::ZERO, never).await;
                }
            });
            checks.buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;
            let pause = ACCESS_EVERY.saturating_sub(started.elapsed());
            // Either the time passed, or access may have ended.
            drop(timeout(pause, self.check_now.notified()).await);
        }
    }

    /// Replies to READs that waited too long for a push.
    pub fn answer_late(&self) {
        for mount in self.mounts() {
            mount.context.pusher.get().into_iter().for_each(Pusher::answer_late);
        }
    }

    /// Returns the kernel's caches of all mounts.
    #[must_use]
    pub fn kernel_caches(&self) -> Vec<Arc<dyn KernelCache>> {
        self.mounts().iter().map(|mount| Arc::clone(&mount.kernel_cache)).collect()
    }

    /// Waits until names or mounts changed.
    pub async fn wait_for_change(&self) {
        self.changed.notified().await;
    }

    /// Takes all mounts out of the state, for the end of the process.
    #[must_use]
    pub fn take_mounts(&self) -> Vec<Arc<VersionMount>> {
        let mounted = std::mem::take(&mut self.state().mounted);
        mounted.into_values().map(|m| m.mount).collect()
    }

    /// Unmounts the directory. Blocks.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn close_directory(&self) -> Result<()> {
        self.dir.close()
    }
}
