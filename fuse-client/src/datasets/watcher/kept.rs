//! The mounts and links of an earlier process of the same keeper, which this process takes over.

use super::{AT_ONCE, Mounted, Name, Watcher};
use crate::datasets::version_mount::VersionMount;
use crate::fs::inode::ENCODING;
use crate::keeper::State as MountState;
use crate::open_version::open_shared;
use crate::unmount;
use anyhow::{Context, Result, anyhow};
use fletch_client::ClientError;
use fletch_core::{DatasetName, Kind, Root, TagName};
use fletch_host::mounts;
use fletch_tables::TableError;
use futures::{StreamExt as _, stream};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

/// A mount that waits to be served.
#[derive(Debug, Clone)]
pub(super) struct KeptMount {
    state: MountState,
    /// Why the last attempt failed.
    problem: Option<String>,
}

/// Returns the dataset and the tag of a name below the directory.
fn parts_of(name: &str) -> Option<(DatasetName, TagName)> {
    let (dataset, tag) = match name.split_once('@') {
        Some((dataset, tag)) => (dataset, tag.parse().ok()?),
        None => (name, TagName::latest()),
    };
    Some((dataset.parse().ok()?, tag))
}

impl Watcher {
    /// Learns what an earlier process left: its links, and its mounts, which [`Watcher::attach_kept`] serves.
    ///
    /// # Errors
    /// The keeper or the directory is gone.
    pub fn take_over(&self) -> Result<()> {
        if !self.dir.is_taken_over() {
            return Ok(());
        }
        let keeper = self.parts.keeper.as_ref().context("the directory was taken over from a keeper")?;
        let kept = keeper.kept().context("asking the keeper of the mounts")?;
        self.detach_unkept(kept.iter().map(|state| state.dir.clone()).collect())?;
        let mut state = self.state();
        for (name, root) in self.dir.links()? {
            let Some((dataset, tag)) = parts_of(&name) else { continue };
            let linked = Some(root);
            state.names.insert(name, Name { dataset, tag, wanted: None, linked, problem: None });
        }
        for mount in kept {
            // A program of another release mounted it. Names lead to a new mount, and open files fail.
            if mount.inode_encoding != ENCODING {
                let root = mount.root;
                tracing::warn!(%root, "a version is mounted again: its files have other numbers now");
                detach(&mount.dir)?;
                continue;
            }
            state.kept.insert(mount.root, KeptMount { state: mount, problem: None });
        }
        tracing::info!(mounts = state.kept.len(), links = state.names.len(), "taking over mounts");
        Ok(())
    }

    /// Detaches mounts that nobody can serve: their devices are closed.
    fn detach_unkept(&self, kept: BTreeSet<PathBuf>) -> Result<()> {
        let table = std::fs::read("/proc/self/mountinfo").context("cannot read the mount table")?;
        let below = self.dir.versions();
        for mount in mounts::parse(&table) {
            if mount.dir.parent() == Some(&below) && !kept.contains(&mount.dir) {
                tracing::warn!(dir = %mount.dir.display(), "detached a dead mount");
                detach(&mount.dir)?;
            }
        }
        Ok(())
    }

    /// Begins to serve the mounts that were taken over. One that fails waits for the next call.
    pub(super) async fn attach_kept(&self) {
        let waiting: Vec<MountState> = self.state().kept.values().map(|kept| kept.state.clone()).collect();
        let attaching = stream::iter(waiting.into_iter().map(|kept| async move {
            let root = kept.root;
            (root, self.attach(kept).await)
        }));
        let mut attaching = attaching.buffer_unordered(AT_ONCE);
        while let Some((root, outcome)) = attaching.next().await {
            self.record_attached(root, outcome);
        }
    }

    async fn attach(&self, kept: MountState) -> Result<VersionMount> {
        let of = (&kept.dataset, kept.root, kept.layout);
        let opened = open_shared(&self.client, &self.watch, of, &self.tables).await?;
        VersionMount::mount(&self.parts, opened, kept.dataset, kept.dir, true).await
    }

    fn record_attached(&self, root: Root, outcome: Result<VersionMount>) {
        let mut state = self.state();
        let Some(kept) = state.kept.get_mut(&root) else { return };
        let is_done = match outcome {
            Ok(mount) => {
                tracing::debug!(dataset = %mount.dataset, %root, "took over the mount of a version");
                state.mounted.insert(root, Mounted { mount: Arc::new(mount), unneeded_since: None });
                true
            }
            Err(error) => {
                let why = format!("{error:#}");
                if kept.problem.as_ref() != Some(&why) {
                    let dataset = &kept.state.dataset;
                    tracing::warn!(%dataset, %root, why, "cannot take over a mount: its readers wait");
                }
                kept.problem = Some(why);
                self.is_unmounted_after(&error, &kept.state)
            }
        };
        if is_done {
            state.kept.remove(&root);
        }
    }

    /// Unmounts a kept mount that cannot be taken over any more. Returns whether it is gone.
    fn is_unmounted_after(&self, error: &anyhow::Error, kept: &MountState) -> bool {
        let (root, dir) = (kept.root, &kept.dir);
        // Another program unmounted it, or the keeper ended and took the device along.
        let is_mounted = mounts::at(dir).is_ok_and(|entry| entry.is_some());
        let keeper = self.parts.keeper.as_ref().filter(|keeper| is_mounted && !keeper.is_gone());
        let unmounted = match keeper {
            None => unmount::detach(dir),
            // Its dataset was unregistered, or the token may not read it any more.
            Some(keeper) if is_gone(error) => {
                if let Err(error) = keeper.give_up(dir.clone()) {
                    tracing::warn!(%root, %error, "the readers of a mount wait");
                }
                unmount::attempt(dir, false)
            }
            Some(_) => return false,
        };
        if let Err(why) = unmounted {
            tracing::debug!(%root, why, "a mount that nobody serves is in use");
            return false;
        }
        if let Err(error) = self.dir.remove_version_dir(root) {
            tracing::warn!(%root, %error, "cannot remove the directory of a version");
        }
        true
    }
}

fn detach(dir: &Path) -> Result<()> {
    unmount::detach(dir).map_err(|why| anyhow!("cannot detach {}: {why}", dir.display()))
}

/// Whether the server does not know a version, or refuses it.
fn is_gone(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let of_client = cause.downcast_ref::<ClientError>();
        let of_tables = cause.downcast_ref::<TableError>();
        of_client.is_some_and(|e| e.is_denied() || e.kind() == Kind::NotFound)
            || of_tables.is_some_and(|e| e.kind() == Kind::NotFound)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_dataset_or_a_dataset_and_a_tag() {
        let parts = |name| parts_of(name).map(|(dataset, tag)| (dataset.to_string(), tag.to_string()));
        assert_eq!(parts("set"), Some(("set".into(), "latest".into())));
        assert_eq!(parts("set@v1"), Some(("set".into(), "v1".into())));
        assert_eq!(parts("@v1"), None);
        assert_eq!(parts(".versions"), None);
    }
}
