//! The node store: a cache on disk for a node that runs no server, shared by the mounts of that node.
//!
//! One mount, the owner, keeps the store and serves the other mounts, its clients, through a unix socket.
//!
//! ```text
//!             the lock is free                       the socket answers
//!   owner ◀──────────────────── direct ───────────────────────────────▶ client
//!     │ the directory is gone     ▲ ▲              the owner is gone      │
//!     └───────────────────────────┘ └─────────────────────────────────────┘
//! ```
//! This module owns the role of this mount, the disk tier while the mount is the owner, and the socket. A
//! mount works without the node store too, so the node store must never delay or fail a read:
//!
//! 1. (I5) A client asks the server itself, at once, when the owner is silent, slow or has no bytes.
//! 2. (I1) A client's own store hashes again every byte that came over the socket.
//! 3. (I7) Each combination of server, principal and user has its own store ([`directory`], [`settings`]).
//! 4. (I6) `fletch_store::disk` limits the disk; [`listener`] and [`node_store`] limit the socket.
//! 5. The mount that holds the lock of the directory is the owner. A crash releases the lock.

pub mod chunk_source;
pub mod clients;
pub mod directory;
pub mod listener;
pub mod node_store;
pub mod own_versions;
mod owner;
pub mod settings;

use crate::fs::read::FetchRequest;
use crate::metrics::NodeSnapshot;
use bytes::Bytes;
use directory::{StoreDirectory, socket_path};
use fletch_client::{Client, ClientConfig, ClientError, Endpoint};
use fletch_core::{DatasetName, JobName, Root};
use fletch_store::{DiskTier, Store, disk::DiskError, maintenance};
use node_store::NodeStore;
use own_versions::{OwnVersion, OwnVersions};
use parking_lot::Mutex;
use settings::CacheSettings;
use std::{
    fs::File,
    sync::{
        Arc,
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

/// How often a client checks that its owner answers.
const OWNER_CHECK_EVERY: Duration = Duration::from_secs(1);
/// The longest a client waits for the answer to that check, even if the owner itself waits for the server.
const OWNER_CHECK_WITHIN: Duration = Duration::from_secs(5);
/// How long a starting mount waits for the socket of an owner that is starting too.
const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// The pause between two elections: while retries are fast, and afterwards.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// How long retries stay fast after this mount lost a role.
const FAST_RETRIES_FOR: Duration = Duration::from_secs(5);
/// The most reads that one client has at its owner at once. Further reads go to the server.
const READS_MAX: usize = 16;
/// The idle connections that a client keeps for these reads.
const IDLE_MAX: usize = 4;

/// The role of a mount in the node store.
#[derive(Debug, Clone)]
pub enum Role {
    /// Neither owner nor client: the mount reads from the server, past the node store.
    Direct,
    /// The mount holds the lock of the store directory.
    Owner,
    /// Another mount holds the lock and answers at its socket.
    Client(Arc<OwnerLink>),
}

impl Role {
    /// Returns the word for the role in metrics and reports.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Role::Direct => "direct",
            Role::Owner => "owner",
            Role::Client(_) => "client",
        }
    }
}

/// A client's connection to the owner.
#[derive(Debug)]
pub struct OwnerLink {
    /// Sends reads.
    client: Client,
    /// Checks the owner, over a connection of its own, so that a check never queues behind a read.
    health: Client,
    /// One permit for each read under way.
    permits: Semaphore,
    /// Open for as long as the link lives: the path of the socket leads through this descriptor.
    _dir: File,
    /// Notified when a read had no answer: check the owner now.
    check_now: Notify,
    /// Cancelled when the owner is gone: ends every read that still waits for it.
    gone: CancellationToken,
}

/// What this mount received from owners; totals.
#[derive(Debug, Default)]
pub struct ClientCounters {
    /// Reads that the owner answered.
    pub reads: AtomicU64,
    /// Bytes of those answers, before they are hashed.
    pub bytes: AtomicU64,
    /// Reads that the owner did not answer and this mount took to the server.
    pub left: AtomicU64,
    /// How often this mount lost its owner.
    pub losses: AtomicU64,
}

/// What the node store needs from its process.
pub struct NodeContext {
    /// The settings of the node store.
    pub settings: CacheSettings,
    /// The process's own store, which has room for a disk tier.
    pub store: Arc<Store>,
    /// Serves clients while this mount is the owner.
    pub node_store: Arc<NodeStore>,
    /// The versions that the mounts of this process read.
    pub own: Arc<OwnVersions>,
    /// The job that this process reads for.
    pub job: JobName,
    /// The time within which every read ends.
    pub io_timeout: Duration,
}

/// This mount's part in the node store: its role, its disk tier, and its link to the owner.
pub struct Node {
    context: NodeContext,
    disk: Arc<DiskTier>,
    /// The directory of the store that this mount owns, reads from, or tried last.
    directory: Mutex<StoreDirectory>,
    role: watch::Sender<Role>,
    role_known: watch::Sender<bool>,
    counters: ClientCounters,
}

enum Election {
    Owner,
    Client(Arc<OwnerLink>),
    /// Neither; `locked` says whether another process holds the lock.
    Undecided {
        locked: bool,
    },
}

impl Node {
    /// Returns a node without a role yet. `None` if the mount's store has no room for a disk tier.
    #[must_use]
    pub fn new(context: NodeContext) -> Option<Arc<Self>> {
        let disk = Arc::clone(context.store.disk()?);
        Some(Arc::new(Node {
            directory: Mutex::new(StoreDirectory::new(&context.settings.dir, context.settings.name)),
            disk,
            context,
            role: watch::Sender::new(Role::Direct),
            role_known: watch::Sender::new(false),
            counters: ClientCounters::default(),
        }))
    }

    /// Adds the version of a mount of this process.
    pub fn add_version(&self, version: OwnVersion) {
        self.node_store().register_version(version.mounted);
        if version.reserves_disk && matches!(self.role(), Role::Owner) {
            self.node_store().record_read(version.mounted.root);
        }
        self.context.own.add(version);
    }

    /// Removes the version of a mount that ended.
    pub fn remove_version(&self, root: Root) {
        self.context.own.remove(root);
    }

    fn directory(&self) -> StoreDirectory {
        self.directory.lock().clone()
    }

    /// Returns the store directory for the token in use now, which differs after the token file was rotated.
    fn current_directory(&self) -> StoreDirectory {
        let s = &self.context.settings;
        StoreDirectory::new(&s.dir, self.node_store().principal(&s.scope).unwrap_or(s.name))
    }

    /// Returns the current role of this mount.
    #[must_use]
    pub fn role(&self) -> Role {
        self.role.borrow().clone()
    }

    /// Returns what this mount received from owners.
    #[must_use]
    pub fn counters(&self) -> &ClientCounters {
        &self.counters
    }

    /// Returns the numbers for metrics and the report.
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

    /// Returns the part that serves clients.
    #[must_use]
    pub fn node_store(&self) -> &NodeStore {
        &self.context.node_store
    }

    /// Waits until this mount has its first role, for a bounded time.
    pub async fn wait_for_role(&self) {
        let mut role_known = self.role_known.subscribe();
        if timeout(maintenance::OPEN_WITHIN, role_known.wait_for(|known| *known)).await.is_err() {
            tracing::warn!("the cache on disk is slow to open; the mount reads without it until it is open");
        }
    }

    /// Fetches bytes from the owner. `None` if this mount has no owner, or the owner sent no bytes.
    pub async fn fetch_from_owner(
        &self,
        root: Root,
        dataset: &DatasetName,
        request: &FetchRequest,
    ) -> Option<Bytes> {
        let Role::Client(link) = self.role() else { return None };
        let Ok(_permit) = link.permits.try_acquire() else {
            self.counters.left.fetch_add(1, Relaxed);
            return None;
        };
        let client = link.client.for_dataset(Some(dataset));
        let asked = async {
            match request {
                FetchRequest::Chunk { hash, len } => client.node_chunk_unchecked(root, *hash, *len).await,
                FetchRequest::File { path, hash, len, .. } => {
                    client.node_file_unchecked(root, *hash, *len, path).await
                }
                // A node store keeps whole chunks, and its clients ask for nothing else.
                FetchRequest::Part { .. } | FetchRequest::Groups { .. } => {
                    Err(ClientError::Config("the store of a node has whole chunks only".into()))
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
                tracing::debug!(%error, "the owner sent no bytes: this read goes to the server");
                None
            }
        }
    }

    /// Takes part in the node store, as owner or client, until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let (started, mut fast_until) = (Instant::now(), Instant::now() + CONNECT_WITHIN);
        while !stop.is_cancelled() {
            match self.elect().await {
                Election::Owner => self.run_as_owner(&stop).await,
                Election::Client(link) => self.run_as_client(&link, &stop).await,
                Election::Undecided { locked } => {
                    // The process that holds the lock may be about to listen at its socket.
                    if started.elapsed() > CONNECT_WITHIN || !locked {
                        self.role_known.send_replace(true);
                    }
                    let pause = if Instant::now() < fast_until { RETRY_PAUSE.0 } else { RETRY_PAUSE.1 };
                    stop.run_until_cancelled(sleep(pause)).await;
                    continue;
                }
            }
            fast_until = Instant::now() + FAST_RETRIES_FOR;
        }
    }

    fn set_role(&self, role: Role) {
        self.role.send_replace(role);
        self.role_known.send_replace(true);
    }

    async fn elect(self: &Arc<Self>) -> Election {
        let now = self.current_directory();
        *self.directory.lock() = now;
        let node = Arc::clone(self);
        let opened = spawn_blocking(move || maintenance::open(&*node, &node.disk)).await;
        let locked = match opened {
            Ok(Ok(Some(_))) => return Election::Owner,
            Ok(Ok(None)) => false,
            Ok(Err(e)) => matches!(e, DiskError::Locked { .. }),
            Err(error) => {
                tracing::error!(%error, "the task that opens the node store failed; please report this line");
                false
            }
        };
        match self.connect_to_owner().await {
            Ok(link) => Election::Client(link),
            Err(error) => {
                tracing::debug!(%error, "no owner of the node store answers");
                Election::Undecided { locked }
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
            // The server gets the other half.
            io_timeout: self.context.io_timeout / 2,
            connections_idle_max,
            ..ClientConfig::new(Endpoint::Unix(socket_path(&dir)), "mount")
        };
        let client = Client::new(config(IDLE_MAX))?.fail_fast();
        let health = Client::new(config(1))?.fail_fast().within(self.owner_check_within());
        health.node_state(self.context.own.next()).await?;
        let (permits, check_now, gone) = (Semaphore::new(READS_MAX), Notify::new(), CancellationToken::new());
        Ok(Arc::new(OwnerLink { client, health, permits, _dir: dir, check_now, gone }))
    }

    async fn run_as_client(&self, link: &Arc<OwnerLink>, stop: &CancellationToken) {
        let directory = self.directory();
        let dir = directory.dir().display();
        tracing::info!(%dir, "another mount owns this node's store: this mount reads through it");
        self.set_role(Role::Client(Arc::clone(link)));
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = link.check_now.notified() => {}
                () = sleep(OWNER_CHECK_EVERY) => {}
            }
            let state = link.health.node_state(self.context.own.next()).await;
            let error = match state {
                Err(e) => e,
                Ok(_) if self.current_directory() != directory => {
                    ClientError::Config("the token was rotated".to_owned())
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
