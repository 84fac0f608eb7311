//! The store of a node without a server: on disk, owned by one mount, which serves the node's others.
//!
//! ```text
//!             the lock is free                      the socket answers
//!   owner ◀──────────────────── alone ────────────────────────────────▶ guest
//!     │ the directory is gone     ▲ ▲              the owner is gone      │
//!     └───────────────────────────┘ └─────────────────────────────────────┘
//! ```
//! Owns which of the three this mount is, the disk tier while it is the owner, and the socket. Adding nothing to
//! what a mount can do without it, it must never be in the way of a read:
//!
//! 1. (I5) a guest scope owner is silent, slow or has nothing asks the server itself, at once;
//! 2. (I1) what comes over the socket is hashed again by the guest's own store;
//! 3. (I7) one store for each server, principal and user ([`directory`], [`settings`]);
//! 4. (I6) the disk's limits are those of `fletch_store::disk`; the socket's are in [`door`] and [`node_store`];
//! 5. the directory's lock says who owns it, and nothing else does. A crash releases it.

pub mod clients;
pub mod directory;
pub mod listener;
pub mod node_store;
mod owner;
pub mod settings;

use crate::fs::read::{FetchRequest, ReadCounters};
use crate::metrics::NodeSnapshot;
use bytes::Bytes;
use directory::{StoreDirectory, socket_path};
use fletch_api::node::MountedVersion;
use fletch_client::{Client, ClientConfig, ClientError, Endpoint};
use fletch_core::JobName;
use fletch_store::{Disk, Store, disk::DiskError, house};
use node_store::NodeStore;
use settings::CacheSettings;
use std::{
    fs::File,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::{Notify, Semaphore, watch},
    task::spawn_blocking,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

/// How often a guest looks whether its owner lives.
const OWNER_CHECK_EVERY: Duration = Duration::from_secs(1);
/// How long an owner may be silent then: it is not waited for longer, whatever it waits for itself.
const OWNER_CHECK_WITHIN: Duration = Duration::from_secs(5);
/// How long a mount that begins waits for the socket of an owner that begins, too.
const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// Between two attempts to become something, at first and then.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// For how long attempts follow fast.
const FAST_RETRIES_FOR: Duration = Duration::from_secs(5);
/// Reads of one guest at its owner at once; more go to the server.
const READS_MAX: usize = 16;
/// Idle connections that a guest keeps for them.
const IDLE_MAX: usize = 4;

/// What a mount is to its node's store.
#[derive(Debug, Clone)]
pub enum Role {
    /// Neither: it reads past the store.
    Direct,
    /// It has the directory's lock.
    Owner,
    /// Another has, and answers.
    Client(Arc<OwnerLink>),
}

impl Role {
    /// The word in metrics and reports.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Role::Direct => "direct",
            Role::Owner => "owner",
            Role::Client(_) => "client",
        }
    }
}

/// A guest's way to its owner.
#[derive(Debug)]
pub struct OwnerLink {
    /// For reads.
    client: Client,
    /// For looking after it: by a connection of its own, behind no read.
    health: Client,
    /// For each read.
    permits: Semaphore,
    /// The socket's path leads through it.
    _dir: File,
    /// A read had no answer.
    check_now: Notify,
    /// No more reads are waited for here.
    gone: CancellationToken,
}

/// What a guest counters, totals.
#[derive(Debug, Default)]
pub struct ClientCounters {
    /// Reads that the owner answered.
    pub reads: AtomicU64,
    /// Bytes of them, not yet checked.
    pub bytes: AtomicU64,
    /// Reads that it left to the server.
    pub left: AtomicU64,
    /// How often an owner was lost.
    pub losses: AtomicU64,
}

/// What a node's store needs to know of its mount.
pub struct NodeContext {
    /// What was said about it.
    pub settings: CacheSettings,
    /// The mount's store, with a directory for a disk tier.
    pub store: Arc<Store>,
    /// What the owner does for guests.
    pub node_store: Arc<NodeStore>,
    /// What this mount reads.
    pub version: MountedVersion,
    /// What it read.
    pub read: Arc<ReadCounters>,
    /// For which job.
    pub job: JobName,
    /// Every read ends within this.
    pub io_timeout: Duration,
}

/// See the module.
pub struct Node {
    context: NodeContext,
    disk: Arc<Disk>,
    /// Where the store lies that this mount owns or reads from, or tried last.
    directory: Mutex<StoreDirectory>,
    role: watch::Sender<Role>,
    role_known: watch::Sender<bool>,
    /// Reads of this mount when its dataset was last recorded_reads.
    recorded_reads: AtomicU64,
    counters: ClientCounters,
}

enum Election {
    Owner,
    Client(Arc<OwnerLink>),
    /// Whether somebody else has the lock.
    Nothing {
        taken: bool,
    },
}

impl Node {
    /// A store on this node; nobody's yet. `None` without a directory for a disk tier.
    #[must_use]
    pub fn new(context: NodeContext) -> Option<Arc<Self>> {
        let disk = Arc::clone(context.store.disk()?);
        context.node_store.register_version(context.version);
        Some(Arc::new(Node {
            directory: Mutex::new(StoreDirectory::new(&context.settings.dir, context.settings.name)),
            disk,
            context,
            role: watch::Sender::new(Role::Direct),
            role_known: watch::Sender::new(false),
            recorded_reads: AtomicU64::new(u64::MAX),
            counters: ClientCounters::default(),
        }))
    }

    fn directory(&self) -> StoreDirectory {
        self.directory.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Where the store lies of the principal that the token speaks for now: its file may have been rotated.
    fn current_directory(&self) -> StoreDirectory {
        let s = &self.context.settings;
        StoreDirectory::new(&s.dir, self.node_store().principal(&s.scope).unwrap_or(s.name))
    }

    /// What this mount is now.
    #[must_use]
    pub fn role(&self) -> Role {
        self.role.borrow().clone()
    }

    /// What it counters from owners.
    #[must_use]
    pub fn counters(&self) -> &ClientCounters {
        &self.counters
    }

    /// What is to be seen of it.
    #[must_use]
    pub fn snapshot(&self) -> NodeSnapshot {
        let (counters, state) = (&self.counters, self.node_store().state());
        NodeSnapshot {
            role: self.role().word(),
            reads: counters.reads.load(Relaxed),
            bytes: counters.bytes.load(Relaxed),
            left: counters.left.load(Relaxed),
            losses: counters.losses.load(Relaxed),
            sent: self.node_store().sent_bytes().into_iter().collect(),
            chunks: state.chunks,
            slab_bytes: state.slab_bytes,
            limit_bytes: state.limit_bytes,
            queued_bytes: state.queued_bytes,
            quarantined: state.quarantined,
        }
    }

    /// What it does for guests.
    #[must_use]
    pub fn node_store(&self) -> &NodeStore {
        &self.context.node_store
    }

    /// Waits until it is known what this mount is, but not for ever.
    pub async fn wait_for_role(&self) {
        let mut role_known = self.role_known.subscribe();
        if timeout(house::OPEN_WITHIN, role_known.wait_for(|known| *known)).await.is_err() {
            tracing::warn!("the cache on disk takes long to open; going on without it until it is");
        }
    }

    /// What the owner has or can get; `None` when there is no owner, or it brought nothing.
    pub async fn fetch_from_owner(&self, request: &FetchRequest) -> Option<Bytes> {
        let Role::Client(link) = self.role() else { return None };
        let Ok(_permit) = link.permits.try_acquire() else {
            self.counters.left.fetch_add(1, Relaxed);
            return None;
        };
        let root = self.context.version.root;
        let asked = async {
            match request {
                FetchRequest::Chunk { hash, len } => {
                    link.client.node_chunk_unchecked(root, *hash, *len).await
                }
                FetchRequest::File { path, hash, len } => {
                    link.client.node_file_unchecked(root, *hash, *len, path).await
                }
            }
        };
        let answer = tokio::select! {
            answer = asked => answer,
            () = link.gone.cancelled() => return None,
        };
        match answer {
            Ok(bytes) => {
                self.counters.reads.fetch_add(1, Relaxed);
                self.counters.bytes.fetch_add(bytes.len() as u64, Relaxed);
                Some(bytes)
            }
            Err(error) => {
                self.counters.left.fetch_add(1, Relaxed);
                if error.is_unreachable() {
                    link.check_now.notify_one();
                }
                tracing::debug!(%error, "the owner of the node's store leaves a read to the server");
                None
            }
        }
    }

    /// Owns the store, or is a guest of who does, until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let (begun, mut hasty_until) = (Instant::now(), Instant::now() + CONNECT_WITHIN);
        while !stop.is_cancelled() {
            match self.elect().await {
                Election::Owner => self.run_as_owner(&stop).await,
                Election::Client(link) => self.run_as_client(&link, &stop).await,
                Election::Nothing { taken } => {
                    // Whoever has the lock may be about to listen.
                    if begun.elapsed() > CONNECT_WITHIN || !taken {
                        self.role_known.send_replace(true);
                    }
                    let rest = if Instant::now() < hasty_until { RETRY_PAUSE.0 } else { RETRY_PAUSE.1 };
                    stop.run_until_cancelled(sleep(rest)).await;
                    continue;
                }
            }
            hasty_until = Instant::now() + FAST_RETRIES_FOR;
        }
    }

    fn set_role(&self, role: Role) {
        self.role.send_replace(role);
        self.role_known.send_replace(true);
    }

    async fn elect(self: &Arc<Self>) -> Election {
        let now = self.current_directory();
        *self.directory.lock().unwrap_or_else(PoisonError::into_inner) = now;
        let node = Arc::clone(self);
        let opened = spawn_blocking(move || house::open(&*node, &node.disk)).await;
        let taken = match opened {
            Ok(Ok(Some(_))) => return Election::Owner,
            Ok(Ok(None)) => false,
            Ok(Err(e)) => matches!(e, DiskError::Locked { .. }),
            Err(error) => {
                tracing::error!(%error, "opening the node's store was lost");
                false
            }
        };
        match self.connect_to_owner().await {
            Ok(link) => Election::Client(link),
            Err(error) => {
                tracing::debug!(%error, "no owner of the node's store answers");
                Election::Nothing { taken }
            }
        }
    }

    fn owner_check_within(&self) -> Duration {
        OWNER_CHECK_WITHIN.min(self.context.io_timeout / 4)
    }

    async fn connect_to_owner(&self) -> Result<Arc<OwnerLink>, ClientError> {
        let directory = self.directory();
        let closed = |e: std::io::Error| ClientError::Config(format!("{}: {e}", directory.dir().display()));
        let dir = directory.open().map_err(closed)?;
        let config = |connections_idle_max| ClientConfig {
            job: Some(self.context.job.clone()),
            // The other half is for the server.
            io_timeout: self.context.io_timeout / 2,
            connections_idle_max,
            ..ClientConfig::new(Endpoint::Unix(socket_path(&dir)), "mount")
        };
        let client = Client::new(config(IDLE_MAX))?.impatient();
        let health = Client::new(config(1))?.impatient().within(self.owner_check_within());
        health.node_state(self.context.version).await?;
        let (permits, check_now, gone) = (Semaphore::new(READS_MAX), Notify::new(), CancellationToken::new());
        Ok(Arc::new(OwnerLink { client, health, permits, _dir: dir, check_now, gone }))
    }

    async fn run_as_client(&self, link: &Arc<OwnerLink>, stop: &CancellationToken) {
        let directory = self.directory();
        tracing::info!(dir = %directory.dir().display(), "another mount owns this node's store: reading by way of it");
        self.set_role(Role::Client(Arc::clone(link)));
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = link.check_now.notified() => {}
                () = sleep(OWNER_CHECK_EVERY) => {}
            }
            let seen = link.health.node_state(self.context.version).await;
            let error = match seen {
                Err(e) => e,
                Ok(_) if self.current_directory() != directory => {
                    ClientError::Config("the token is another".to_owned())
                }
                Ok(_) => continue,
            };
            self.role.send_replace(Role::Direct);
            link.gone.cancel();
            self.counters.losses.fetch_add(1, Relaxed);
            tracing::info!(%error, "the owner of this node's store is gone: reading from the server");
            return;
        }
    }
}
