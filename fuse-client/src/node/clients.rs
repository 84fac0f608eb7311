//! The clients of the node store, and the access check for the versions that they read.
//!
//! The owner asks the server itself and trusts no client. Clients have the owner's user, server and token, so
//! they may read what the owner may read. The owner checks a version before it serves the first byte of it,
//! and watches the version for as long as clients read it. When the server refuses a version, so does the
//! owner. A server that does not answer refuses nothing. I6: the owner watches at most [`VERSIONS_MAX`]
//! versions.

use super::own_versions::OwnVersions;
use crate::access;
use fletch_client::Client;
use fletch_core::{DatasetName, JobName, Root};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::OnceCell,
    time::{Instant, sleep},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The most versions watched for clients. Clients of further versions ask the server.
const VERSIONS_MAX: usize = 64;
/// How long the owner watches a version after the last read.
const IDLE_AFTER: Duration = Duration::from_secs(60);
/// How long the first check of a version may take.
const FIRST_WITHIN: Duration = Duration::from_secs(2);

/// A mount that reads through the owner.
#[derive(Debug, Clone)]
pub struct NodeClient {
    /// The version that the client reads.
    pub root: Root,
    /// The job that the client reads for.
    pub job: JobName,
    /// The dataset through which the client reads.
    pub dataset: Option<DatasetName>,
}

/// The versions that clients read, each with the server's last answer about access.
pub struct NodeClients {
    /// `None` if this mount has no server. Then every version may be read.
    client: Option<Client>,
    /// The versions of this process's mounts, whose access is checked already.
    own: Arc<OwnVersions>,
    versions: Mutex<HashMap<Root, Arc<WatchedVersion>>>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

struct WatchedVersion {
    refused: AtomicBool,
    asked: OnceCell<()>,
    read: Mutex<Instant>,
}

impl NodeClients {
    /// Returns a check that asks the server through `client`. Watches run on `tasks` until `stop`.
    #[must_use]
    pub fn new(
        client: Option<Client>,
        own: Arc<OwnVersions>,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        // The clients' versions may belong to other datasets than the owner's.
        let client = client.map(|c| c.for_dataset(None));
        NodeClients { client, own, versions: Mutex::default(), tasks, stop }
    }

    /// Returns whether the owner may serve a version now.
    pub async fn may_read(self: &Arc<Self>, root: Root) -> bool {
        if let Some(may_read) = self.own.may_read(root) {
            return may_read;
        }
        let Some(client) = &self.client else { return true };
        let Some(watched) = self.watched(root) else { return false };
        let client = client.within(FIRST_WITHIN);
        watched.asked.get_or_init(|| watched.ask(&client, root, Duration::ZERO)).await;
        !watched.refused.load(Relaxed)
    }

    fn watched(self: &Arc<Self>, root: Root) -> Option<Arc<WatchedVersion>> {
        let mut versions = self.versions.lock();
        if let Some(w) = versions.get(&root) {
            *w.read.lock() = Instant::now();
            return Some(Arc::clone(w));
        }
        if versions.len() >= VERSIONS_MAX {
            return None;
        }
        let new = WatchedVersion {
            refused: AtomicBool::new(false),
            asked: OnceCell::new(),
            read: Mutex::new(Instant::now()),
        };
        let new = Arc::new(new);
        versions.insert(root, Arc::clone(&new));
        let (clients, watched) = (Arc::clone(self), Arc::clone(&new));
        self.tasks.spawn(async move {
            let stop = clients.stop.clone();
            stop.run_until_cancelled(clients.watch(root, &watched)).await;
        });
        Some(new)
    }

    async fn watch(&self, root: Root, watched: &WatchedVersion) {
        let Some(client) = &self.client else { return };
        let hold = access::HOLD.min(client.io_timeout() / 4);
        let client = client.within(hold + access::HOLD_SLACK);
        loop {
            let started = Instant::now();
            watched.ask(&client, root, hold).await;
            {
                // Under both locks: a client that reads now either keeps this watch or starts a new one.
                let mut versions = self.versions.lock();
                if watched.read.lock().elapsed() > IDLE_AFTER {
                    versions.remove(&root);
                    return;
                }
            }
            sleep(access::PERIOD_MIN.saturating_sub(started.elapsed())).await;
        }
    }
}

impl WatchedVersion {
    async fn ask(&self, client: &Client, root: Root, hold: Duration) {
        match client.check_access(root, hold).await {
            Ok(()) => self.refused.store(false, Relaxed),
            Err(e) if access::refusal(&e).is_some() => {
                if !self.refused.swap(true, Relaxed) {
                    tracing::info!(%root, error = %e, "the server refuses a version that node clients read");
                }
            }
            Err(e) => {
                tracing::debug!(%root, error = %e, "the server did not say whether node clients may read")
            }
        }
    }
}
