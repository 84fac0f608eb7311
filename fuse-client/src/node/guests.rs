//! Whether what guests read is granted: the owner asks the server itself, and believes no guest.
//!
//! Guests have the owner's user, server and token, so what is granted to the owner is granted to them. A version
//! is asked for before its first byte is served, and watched for as long as it is read; the server's refusal is the
//! owner's. A server that does not answer refuses nothing. I6: at most [`VERSIONS_MAX`] versions are watched.

use crate::grant::{self, Grant};
use fletch_client::Client;
use fletch_core::Root;
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

/// See the module.
pub struct Guests {
    /// None where there is no server: nobody can refuse.
    client: Option<Client>,
    /// The version that is mounted here is watched anyway.
    own: (Root, Arc<Grant>),
    versions: Mutex<HashMap<Root, Arc<Watched>>>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

struct Watched {
    refused: AtomicBool,
    asked: OnceCell<()>,
    read: Mutex<Instant>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Guests {
    /// Asks `client`; watches on `tasks` until `stop`.
    #[must_use]
    pub fn new(
        client: Option<Client>,
        own: (Root, Arc<Grant>),
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        Guests { client, own, versions: Mutex::default(), tasks, stop }
    }

    /// Whether a version may be served now.
    pub async fn may_read(self: &Arc<Self>, root: Root) -> bool {
        if root == self.own.0 {
            return self.own.1.refused().is_none();
        }
        let Some(client) = &self.client else { return true };
        let Some(watched) = self.watched(root) else { return false };
        let client = client.within(FIRST_WITHIN);
        watched.asked.get_or_init(|| watched.ask(&client, root, Duration::ZERO)).await;
        !watched.refused.load(Relaxed)
    }

    fn watched(self: &Arc<Self>, root: Root) -> Option<Arc<Watched>> {
        let mut versions = lock(&self.versions);
        if let Some(w) = versions.get(&root) {
            *lock(&w.read) = Instant::now();
            return Some(Arc::clone(w));
        }
        if versions.len() >= VERSIONS_MAX {
            return None;
        }
        let new = Watched {
            refused: AtomicBool::new(false),
            asked: OnceCell::new(),
            read: Mutex::new(Instant::now()),
        };
        let new = Arc::new(new);
        versions.insert(root, Arc::clone(&new));
        let (guests, watched) = (Arc::clone(self), Arc::clone(&new));
        self.tasks.spawn(async move {
            let stop = guests.stop.clone();
            stop.run_until_cancelled(guests.watch(root, &watched)).await;
        });
        Some(new)
    }

    async fn watch(&self, root: Root, watched: &Watched) {
        let Some(client) = &self.client else { return };
        let hold = grant::HOLD.min(client.io_timeout() / 4);
        let client = client.within(hold + grant::LATE);
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
            sleep(grant::PERIOD_MIN.saturating_sub(begun.elapsed())).await;
        }
    }
}

impl Watched {
    async fn ask(&self, client: &Client, root: Root, hold: Duration) {
        match client.check_access(root, hold).await {
            Ok(()) => self.refused.store(false, Relaxed),
            Err(e) if grant::refusal(&e).is_some() => {
                if !self.refused.swap(true, Relaxed) {
                    tracing::info!(%root, error = %e, "a version that guests read is refused");
                }
            }
            Err(e) => tracing::debug!(%root, error = %e, "whether guests may read is not known"),
        }
    }
}
