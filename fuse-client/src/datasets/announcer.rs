//! Announces each name of the process to the server, so that `fletch status` lists it by its directory, and
//! names the versions that are not mounted.

use super::watcher::Watcher;
use crate::announce::make_use_visible;
use fletch_api::{AnnounceMount, mounts::ANNOUNCE_INTERVAL};
use fletch_client::{Client, ClientError};
use fletch_core::{Hash, Kind, MountId};
use futures::{StreamExt as _, stream};
use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{task::spawn_blocking, time::timeout};
use tokio_util::sync::CancellationToken;

/// The announcements at once.
const AT_ONCE: usize = 4;
/// How long one announcement may take.
const WITHIN: Duration = Duration::from_secs(5);
/// How long all farewells may take together: the process is about to end.
const FORGET_WITHIN: Duration = Duration::from_millis(300);
/// The shortest time between two rounds.
const PERIOD_MIN: Duration = Duration::from_secs(1);

/// Announces every name again and again until `stop`, then tells the server that they ended.
///
/// A server that does not answer, or is older than this route, changes nothing for the mounts.
pub async fn run(client: Client, watcher: Arc<Watcher>, stop: CancellationToken) {
    let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let prefix = format!("{}-{}", std::process::id(), began.as_nanos());
    let id = |name: &str| MountId::new(&format!("{prefix}-{}", Hash::of(name.as_bytes()).short()));
    let client = client.within(WITHIN).fail_fast();
    let mut known: BTreeMap<MountId, String> = BTreeMap::new();
    loop {
        let mut all: BTreeMap<MountId, (String, AnnounceMount)> = BTreeMap::new();
        for (name, mount) in watcher.announcements() {
            match id(&name) {
                Ok(id) => drop(all.insert(id, (name, mount))),
                Err(error) => tracing::error!(%error, "a defect: a mount has no id; please report this line"),
            }
        }
        let gone: Vec<MountId> = known.keys().filter(|id| !all.contains_key(*id)).cloned().collect();
        forget(&client, gone).await;
        let calls: Vec<_> = all.iter().map(|(id, (_, mount))| client.announce_mount(id, mount)).collect();
        let calls = stream::iter(calls).buffer_unordered(AT_ONCE);
        let outcomes: Vec<Result<(), ClientError>> = calls.collect().await;
        if outcomes.iter().any(|o| o.as_ref().is_err_and(|e| e.kind() == Kind::NotFound)) {
            tracing::debug!("the server does not list mounts");
            return;
        }
        if let Some(error) = outcomes.iter().find_map(|o| o.as_ref().err()) {
            tracing::debug!(%error, "the server did not hear of all mounts: trying again");
        }
        let kernels = watcher.kernel_caches();
        let visible = move || kernels.iter().for_each(|kernel| make_use_visible(&**kernel));
        drop(spawn_blocking(visible).await);
        known = all.into_iter().map(|(id, (name, _))| (id, name)).collect();
        let next = async {
            tokio::time::sleep(PERIOD_MIN).await;
            // Either a name changed, or the server is about to forget the names.
            drop(timeout(ANNOUNCE_INTERVAL - PERIOD_MIN, watcher.wait_for_change()).await);
        };
        if stop.run_until_cancelled(next).await.is_none() {
            break;
        }
    }
    // A server that does not hear it forgets the mounts by itself.
    drop(timeout(FORGET_WITHIN, forget(&client, known.into_keys().collect())).await);
}

async fn forget(client: &Client, ids: Vec<MountId>) {
    let calls: Vec<_> = ids.iter().map(|id| client.forget_mount(id)).collect();
    let outcomes: Vec<Result<(), ClientError>> =
        stream::iter(calls).buffer_unordered(AT_ONCE).collect().await;
    if let Some(error) = outcomes.iter().find_map(|o| o.as_ref().err()) {
        tracing::debug!(%error, "the server did not hear that a mount ended; it forgets it by itself");
    }
}
