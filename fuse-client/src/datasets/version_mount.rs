//! One mounted version of a process with many mounts.

use crate::access::KernelCache;
use crate::fs::inode::ENCODING;
use crate::fuse::{self, FuseSession};
use crate::keeper::{Keeper, State};
use crate::mount::{explain_mount, raise_read_ahead};
use crate::open_version::OpenVersion;
use crate::push::PushThreads;
use crate::requests::RequestContext;
use crate::session::{SessionEnd, SessionThreads};
use crate::shared_parts::SharedParts;
use crate::unmount;
use anyhow::{Context, Result, anyhow};
use fletch_client::Client;
use fletch_core::{DatasetName, Root};
use fletch_host::mounts;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};
use tokio::task::spawn_blocking;

pub struct VersionMount {
    /// The root of the version.
    pub root: Root,
    /// The dataset through which the mount reads.
    pub dataset: DatasetName,
    /// Answers the requests of the kernel.
    pub context: Arc<RequestContext>,
    /// The kernel's caches, which forget a refused version.
    pub kernel_cache: Arc<dyn KernelCache>,
    /// Asks the server about access to the version.
    pub client: Client,
    dir: PathBuf,
    device: String,
    end: SessionEnd,
}

/// How an attempt to unmount ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attempt {
    /// The version is not mounted any more.
    Unmounted,
    /// A program uses the mount.
    Busy,
}

/// What all mounts of the process use.
pub struct MountParts {
    /// Memory, disk and tasks.
    pub shared: Arc<SharedParts>,
    /// The threads that push pages; `None` if pushing is off.
    pub push: Option<PushThreads>,
    /// Whether other users may read.
    pub allow_other: bool,
    /// The threads that receive the requests of all mounts.
    pub sessions: SessionThreads,
    /// The keeper of this process's mounts, if there is one.
    pub keeper: Option<Arc<Keeper>>,
}

impl VersionMount {
    /// Mounts an open version at `dir`, or takes over the mount that is kept there.
    ///
    /// # Errors
    /// What failed, and what to do. Nothing stays mounted then, except what is kept.
    pub async fn mount(
        parts: &MountParts,
        opened: OpenVersion,
        dataset: DatasetName,
        dir: PathBuf,
        is_kept: bool,
    ) -> Result<Self> {
        let client = opened.client.clone().context("a version of a server has a client")?;
        let root = opened.version.root();
        let state = State {
            root,
            layout: opened.version.layout(),
            dataset: dataset.clone(),
            dir: dir.clone(),
            inode_encoding: ENCODING,
        };
        let context = parts.shared.context(&opened, &dataset, false);
        let mounted = Self::start(parts, &context, state, is_kept).await;
        if mounted.is_err()
            && let Some(node) = &parts.shared.node
        {
            node.remove_version(root);
        }
        let (session, device, end) = mounted?;
        let kernel_cache = session.kernel_cache();
        Ok(VersionMount { root, dataset, context, kernel_cache, client, dir, device, end })
    }

    async fn start(
        parts: &MountParts,
        context: &Arc<RequestContext>,
        state: State,
        is_kept: bool,
    ) -> Result<(FuseSession, String, SessionEnd)> {
        // The first lookup, without the kernel: a version with unreadable tables is not mounted.
        let first = context.tree.list(1, 0, |entry| entry.offset > 2).await;
        first.map_err(|e| anyhow!("cannot read the root directory of the version: {e}"))?;
        if is_kept {
            context.expect_all_known().await.context("reading the root directory")?;
        }
        let name = format!("{}{}", mounts::SOURCE_PREFIX, state.dataset);
        let (of, allow_other) = (Arc::clone(context), parts.allow_other);
        let (keeper, dir) = (parts.keeper.clone(), state.dir.clone());
        let session = spawn_blocking(move || match keeper {
            None => fuse::mount(&of, &state.dir, &name, allow_other),
            Some(keeper) if is_kept => keeper.attach(&of, state),
            Some(keeper) => keeper.mount(&of, name, allow_other, state),
        });
        let dir = &dir;
        let session = session.await?.map_err(|e| explain_mount(e, dir))?;
        let served = Self::serve(parts, context, dir, &session);
        let (device, end) = served.inspect_err(|_| fuse::abandon(dir))?;
        raise_read_ahead(&device);
        Ok((session, device, end))
    }

    fn serve(
        parts: &MountParts,
        context: &Arc<RequestContext>,
        dir: &Path,
        session: &FuseSession,
    ) -> Result<(String, SessionEnd)> {
        let entry = mounts::at(dir).context("cannot read the mount table")?;
        let device = entry.context("another program removed the mount at once")?.device;
        let end = parts.sessions.serve(session.device(), Arc::clone(context))?;
        if let Some(push) = &parts.push {
            drop(context.pusher.set(push.pusher(session.page_cache())));
        }
        Ok((device, end))
    }

    /// Returns the device of the mount, as the mount table names it.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Returns whether another program unmounted this mount, or its device failed.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.end.has_come()
    }

    /// Unmounts the version, unless a program uses it. Blocks.
    ///
    /// # Errors
    /// The kernel refuses for another reason.
    pub fn try_unmount(&self) -> Result<Attempt> {
        if mounts::of_device(&self.device).context("cannot read the mount table")?.is_none() {
            return Ok(Attempt::Unmounted);
        }
        match unmount::once(&self.dir, false) {
            Ok(()) => Ok(Attempt::Unmounted),
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => Ok(Attempt::Busy),
            Err(e) => Err(e).with_context(|| format!("cannot unmount {}", self.dir.display())),
        }
    }
}
