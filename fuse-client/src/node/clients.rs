//! Whether what guests read is granted: the owner asks the server itself, and believes no guest.
//!
//! NodeClients have the owner's user, server and token, so what is granted to the owner is granted to them. A version
//! is asked for before its first byte is served, and watched for as long as it is read; the server's refusal is the
//! owner's. A server that does not answer refuses nothing. I6: at most [`VERSIONS_MAX`] versions are watched.

use crate::access::{self, Access};
use fletch_client::Client;
use fletch_core::{JobName, Root};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::OnceCell,
    time::{Instant, sleep},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Versions of guests at once; of more, guests ask the server.
const VERSIONS_MAX: usize = 64;
/// A version that nobody reads is not watched for longer.
const IDLE_AFTER: Duration = Duration::from_secs(60);
/// How long the first question may take.
const FIRST_WITHIN: Duration = Duration::from_secs(2);

/// Who asks.
#[derive(Debug, Clone)]
pub struct NodeClient {
    /// Of which version.
    pub root: Root,
    /// For which job.
    pub job: JobName,
}

/// See the module.
pub struct NodeClients {
    /// None where there is no server: nobody can refuse.
    client: Option<Client>,
    /// The version that is mounted here is watched anyway.
    own_version: (Root, Arc<Access>),
    versions: Mutex<HashMap<Root, Arc<WatchedVersion>>>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

struct WatchedVersion {
    refused: AtomicBool,
    asked: OnceCell<()>,
    read: Mutex<Instant>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl NodeClients {
    /// Asks `client`; watches on `tasks` until `stop`.
    #[must_use]
    pub fn new(
        client: Option<Client>,
        own_version: (Root, Arc<Access>),
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        NodeClients { client, own_version, versions: Mutex::default(), tasks, stop }
    }

    /// Whether a version may be served now.
    pub async fn may_read(self: &Arc<Self>, root: Root) -> bool {
        if root == self.own_version.0 {
            return self.own_version.1.refused().is_none();
        }
        let Some(client) = &self.client else { return true };
        let Some(watched) = self.watched(root) else { return false };
        let client = client.within(FIRST_WITHIN);
        watched.asked.get_or_init(|| watched.ask(&client, root, Duration::ZERO)).await;
        !watched.refused.load(Relaxed)
    }

    fn watched(self: &Arc<Self>, root: Root) -> Option<Arc<WatchedVersion>> {
        let mut versions = lock(&self.versions);
        if let Some(w) = versions.get(&root) {
            *lock(&w.read) = Instant::now();
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
            let begun = Instant::now();
            watched.ask(&client, root, hold).await;
            {
                // Under both locks: who reads it now keeps it, or watches it anew.
                let mut versions = lock(&self.versions);
                if lock(&watched.read).elapsed() > IDLE_AFTER {
                    versions.remove(&root);
                    return;
                }
            }
            sleep(access::PERIOD_MIN.saturating_sub(begun.elapsed())).await;
        }
    }
}

impl WatchedVersion {
    async fn ask(&self, client: &Client, root: Root, hold: Duration) {
        match client.has_access(root, hold).await {
            Ok(()) => self.refused.store(false, Relaxed),
            Err(e) if access::refusal(&e).is_some() => {
                if !self.refused.swap(true, Relaxed) {
                    tracing::info!(%root, error = %e, "a version that guests read is refused");
                }
            }
            Err(e) => tracing::debug!(%root, error = %e, "whether guests may read is not known"),
        }
    }
}
