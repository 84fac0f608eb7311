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
//! 1. (I5) a guest whose owner is silent, slow or has nothing asks the server itself, at once;
//! 2. (I1) what comes over the socket is hashed again by the guest's own store;
//! 3. (I7) one store for each server, principal and user ([`place`], [`settings`]);
//! 4. (I6) the disk's limits are those of `fletch_store::disk`; the socket's are in [`door`] and [`host`];
//! 5. the directory's lock says who owns it, and nothing else does. A crash releases it.

pub mod door;
pub mod guests;
pub mod host;
mod owner;
pub mod place;
pub mod settings;
pub mod source;

use crate::fs::read::{ReadCounters, Wanted};
use crate::metrics::NodeSnapshot;
use bytes::Bytes;
use fletch_api::node::NodeClientVersion;
use fletch_client::{Client, ClientConfig, ClientError, Endpoint};
use fletch_core::JobName;
use fletch_store::{DiskTier, Store, disk::DiskError, maintenance};
use host::Host;
use place::{Place, socket_path};
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
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long an owner may be silent then: it is not waited for longer, whatever it waits for itself.
const LOOK_WITHIN: Duration = Duration::from_secs(5);
/// How long a mount that begins waits for the socket of an owner that begins, too.
const ATTACH_WITHIN: Duration = Duration::from_secs(2);
/// Between two attempts to become something, at first and then.
const REST: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// For how long attempts follow fast.
const HASTE: Duration = Duration::from_secs(5);
/// Reads of one guest at its owner at once; more go to the server.
const READS_MAX: usize = 16;
/// Idle connections that a guest keeps for them.
const IDLE_MAX: usize = 4;

/// What a mount is to its node's store.
#[derive(Debug, Clone)]
pub enum Role {
    /// Neither: it reads past the store.
    Alone,
    /// It has the directory's lock.
    Owner,
    /// Another has, and answers.
    Guest(Arc<Link>),
}

impl Role {
    /// The word in metrics and reports.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Role::Alone => "alone",
            Role::Owner => "owner",
            Role::Guest(_) => "guest",
        }
    }
}

/// A guest's way to its owner.
#[derive(Debug)]
pub struct Link {
    /// For reads.
    client: Client,
    /// For looking after it: by a connection of its own, behind no read.
    look: Client,
    /// For each read.
    turns: Semaphore,
    /// The socket's path leads through it.
    _dir: File,
    /// A read had no answer.
    doubt: Notify,
    /// No more reads are waited for here.
    gone: CancellationToken,
}

/// What a guest got, totals.
#[derive(Debug, Default)]
pub struct Got {
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
pub struct Means {
    /// What was said about it.
    pub settings: CacheSettings,
    /// The mount's store, with a place for a disk tier.
    pub store: Arc<Store>,
    /// What the owner does for guests.
    pub host: Arc<Host>,
    /// What this mount reads.
    pub version: NodeClientVersion,
    /// What it read.
    pub read: Arc<ReadCounters>,
    /// For which job.
    pub job: JobName,
    /// Every read ends within this.
    pub io_timeout: Duration,
}

/// See the module.
pub struct Node {
    means: Means,
    disk: Arc<DiskTier>,
    /// Where the store lies that this mount owns or reads from, or tried last.
    place: Mutex<Place>,
    role: watch::Sender<Role>,
    begun: watch::Sender<bool>,
    /// Reads of this mount when its dataset was last noted.
    noted: AtomicU64,
    got: Got,
}

enum Elected {
    Owner,
    Guest(Arc<Link>),
    /// Whether somebody else has the lock.
    Nothing {
        taken: bool,
    },
}

impl Node {
    /// A store on this node; nobody's yet. `None` without a place for a disk tier.
    #[must_use]
    pub fn new(means: Means) -> Option<Arc<Self>> {
        let disk = Arc::clone(means.store.disk()?);
        means.host.expect(means.version);
        Some(Arc::new(Node {
            place: Mutex::new(Place::new(&means.settings.dir, means.settings.name)),
            disk,
            means,
            role: watch::Sender::new(Role::Alone),
            begun: watch::Sender::new(false),
            noted: AtomicU64::new(u64::MAX),
            got: Got::default(),
        }))
    }

    fn place(&self) -> Place {
        self.place.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Where the store lies of the principal that the token speaks for now: its file may have been rotated.
    fn place_now(&self) -> Place {
        let s = &self.means.settings;
        Place::new(&s.dir, self.host().principal(&s.whose).unwrap_or(s.name))
    }

    /// What this mount is now.
    #[must_use]
    pub fn role(&self) -> Role {
        self.role.borrow().clone()
    }

    /// What it got from owners.
    #[must_use]
    pub fn got(&self) -> &Got {
        &self.got
    }

    /// What is to be seen of it.
    #[must_use]
    pub fn snapshot(&self) -> NodeSnapshot {
        let (got, state) = (&self.got, self.host().state());
        NodeSnapshot {
            role: self.role().word(),
            reads: got.reads.load(Relaxed),
            bytes: got.bytes.load(Relaxed),
            left: got.left.load(Relaxed),
            losses: got.losses.load(Relaxed),
            sent: self.host().sent_bytes().into_iter().collect(),
            chunks: state.chunks,
            slab_bytes: state.slab_bytes,
            limit_bytes: state.limit_bytes,
            queued_bytes: state.queued_bytes,
            quarantined: state.quarantined,
        }
    }

    /// What it does for guests.
    #[must_use]
    pub fn host(&self) -> &Host {
        &self.means.host
    }

    /// Waits until it is known what this mount is, but not for ever.
    pub async fn begin(&self) {
        let mut begun = self.begun.subscribe();
        if timeout(maintenance::OPEN_WITHIN, begun.wait_for(|b| *b)).await.is_err() {
            tracing::warn!("the cache on disk takes long to open; going on without it until it is");
        }
    }

    /// What the owner has or can get; `None` when there is no owner, or it brought nothing.
    pub async fn ask_owner(&self, wanted: &Wanted) -> Option<Bytes> {
        let Role::Guest(link) = self.role() else { return None };
        let Ok(_turn) = link.turns.try_acquire() else {
            self.got.left.fetch_add(1, Relaxed);
            return None;
        };
        let root = self.means.version.root;
        let asked = async {
            match wanted {
                Wanted::Chunk { hash, len } => link.client.node_chunk_unchecked(root, *hash, *len).await,
                Wanted::File { path, hash, len } => {
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
                self.got.reads.fetch_add(1, Relaxed);
                self.got.bytes.fetch_add(bytes.len() as u64, Relaxed);
                Some(bytes)
            }
            Err(error) => {
                self.got.left.fetch_add(1, Relaxed);
                if error.is_unreachable() {
                    link.doubt.notify_one();
                }
                tracing::debug!(%error, "the owner of the node's store leaves a read to the server");
                None
            }
        }
    }

    /// Owns the store, or is a guest of who does, until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let (begun, mut hasty_until) = (Instant::now(), Instant::now() + ATTACH_WITHIN);
        while !stop.is_cancelled() {
            match self.elect().await {
                Elected::Owner => self.own(&stop).await,
                Elected::Guest(link) => self.visit(&link, &stop).await,
                Elected::Nothing { taken } => {
                    // Whoever has the lock may be about to listen.
                    if begun.elapsed() > ATTACH_WITHIN || !taken {
                        self.begun.send_replace(true);
                    }
                    let rest = if Instant::now() < hasty_until { REST.0 } else { REST.1 };
                    stop.run_until_cancelled(sleep(rest)).await;
                    continue;
                }
            }
            hasty_until = Instant::now() + HASTE;
        }
    }

    fn becomes(&self, role: Role) {
        self.role.send_replace(role);
        self.begun.send_replace(true);
    }

    async fn elect(self: &Arc<Self>) -> Elected {
        let now = self.place_now();
        *self.place.lock().unwrap_or_else(PoisonError::into_inner) = now;
        let node = Arc::clone(self);
        let opened = spawn_blocking(move || maintenance::open(&*node, &node.disk)).await;
        let taken = match opened {
            Ok(Ok(Some(_))) => return Elected::Owner,
            Ok(Ok(None)) => false,
            Ok(Err(e)) => matches!(e, DiskError::Locked { .. }),
            Err(error) => {
                tracing::error!(%error, "opening the node's store was lost");
                false
            }
        };
        match self.attach().await {
            Ok(link) => Elected::Guest(link),
            Err(error) => {
                tracing::debug!(%error, "no owner of the node's store answers");
                Elected::Nothing { taken }
            }
        }
    }

    fn look_within(&self) -> Duration {
        LOOK_WITHIN.min(self.means.io_timeout / 4)
    }

    async fn attach(&self) -> Result<Arc<Link>, ClientError> {
        let place = self.place();
        let closed = |e: std::io::Error| ClientError::Config(format!("{}: {e}", place.dir().display()));
        let dir = place.open().map_err(closed)?;
        let config = |connections_idle_max| ClientConfig {
            job: Some(self.means.job.clone()),
            // The other half is for the server.
            io_timeout: self.means.io_timeout / 2,
            connections_idle_max,
            ..ClientConfig::new(Endpoint::Unix(socket_path(&dir)), "mount")
        };
        let client = Client::new(config(IDLE_MAX))?.fail_fast();
        let look = Client::new(config(1))?.fail_fast().within(self.look_within());
        look.node_state(self.means.version).await?;
        let (turns, doubt, gone) = (Semaphore::new(READS_MAX), Notify::new(), CancellationToken::new());
        Ok(Arc::new(Link { client, look, turns, _dir: dir, doubt, gone }))
    }

    async fn visit(&self, link: &Arc<Link>, stop: &CancellationToken) {
        let place = self.place();
        tracing::info!(dir = %place.dir().display(), "another mount owns this node's store: reading by way of it");
        self.becomes(Role::Guest(Arc::clone(link)));
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = link.doubt.notified() => {}
                () = sleep(LOOK_EVERY) => {}
            }
            let seen = link.look.node_state(self.means.version).await;
            let error = match seen {
                Err(e) => e,
                Ok(_) if self.place_now() != place => ClientError::Config("the token is another".to_owned()),
                Ok(_) => continue,
            };
            self.role.send_replace(Role::Alone);
            link.gone.cancel();
            self.got.losses.fetch_add(1, Relaxed);
            tracing::info!(%error, "the owner of this node's store is gone: reading from the server");
            return;
        }
    }
}
