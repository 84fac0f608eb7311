//! The node store as its owner serves it: reads the owner's own store on behalf of a client's job.
//!
//! 1. (I1) The owner sends only [`fletch_store::Verified`] bytes, and the client hashes them again.
//! 2. (I7) The owner sends no byte of a version that the server does not let it read ([`NodeClients`]).
//! 3. (I8) The owner asks the server in the name of the client's job, so the server's accounts name the
//!    reader. Bytes from this store are counted here only, when they are handed to the connection.
//! 4. (I3) A client waits for a chunk that is already being fetched, whichever reader asked first.
//! 5. No client waits here for a silent server: the client can ask the server, or its origin, itself. The
//!    owner does not wait either: when a client's fetch fails, the owner's own reader fetches again
//!    (`fletch_store::Store::read`).
//! 6. (I6) Clients hold at most half of the owner's memory, in fetches and in answers ([`ServedBytes`]).

use super::clients::{NodeClient, NodeClients};
use crate::chunk_sources::fetch_from_server;
use crate::fs::read::{FetchRequest, dataset_id};
use bytes::Bytes;
use fletch_api::node::{MountedVersion, NodeState};
use fletch_client::{Client, ClientError};
use fletch_core::{Domain, Hash, Kind, Root, StoreKey, manifest::CHUNK_BYTES_MAX};
use fletch_store::{Fetch, FetchError, Footprint, Hit, ReaderKind, Shares, Store, Tier, VersionIds};
use futures::future::FutureExt;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// The most open connections of clients.
pub const CONNECTIONS_MAX: usize = 256;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, sleep},
};

/// The most requests for bytes under way at once. Beyond that, clients ask the server.
const REQUESTS_MAX: usize = 512;
/// The most versions with a remembered footprint.
const VERSIONS_MAX: usize = 1024;
/// The pause between two probes of a silent server, and the time a probe may take.
const SERVER_PROBE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(2));

/// Why the owner sends a client no bytes; the client then asks the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Declined(pub &'static str);

/// Bytes for a client, with the permits to keep until they are sent.
pub struct ServedBytes {
    /// The bytes.
    pub hit: Hit,
    /// The permits: one for the request, and one for its memory.
    pub permits: ServePermits,
}

/// The permit of one request.
type RequestPermit = OwnedSemaphorePermit;
/// The permit for the bytes of one request. The fetch shares it, because a fetch outlives a client that
/// leaves.
type MemoryPermit = Arc<OwnedSemaphorePermit>;
/// The permits of a request and of its bytes.
pub type ServePermits = (RequestPermit, MemoryPermit);

/// Bytes sent to clients, by the tier they came from.
#[derive(Debug, Default)]
struct Sent {
    memory: AtomicU64,
    disk: AtomicU64,
    flight: AtomicU64,
    server: AtomicU64,
}

/// Serves the clients of the node store.
pub struct NodeStore {
    store: Arc<Store>,
    clients: Arc<NodeClients>,
    client: Option<Client>,
    deadline: Duration,
    /// True while the server does not answer.
    server_silent: watch::Sender<bool>,
    request_permits: Arc<Semaphore>,
    /// One permit for each byte that clients may hold.
    memory: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    footprints: Mutex<HashMap<Root, u64>>,
    shares: Shares,
    started: Instant,
    sent: Sent,
}

impl NodeStore {
    /// Returns a node store over `store`, which has `memory_bytes` of memory, and the server behind `client`.
    #[must_use]
    pub fn new(
        store: Arc<Store>,
        clients: Arc<NodeClients>,
        client: Option<Client>,
        memory_bytes: u64,
        deadline: Duration,
    ) -> Arc<Self> {
        let memory = usize::try_from(memory_bytes / 2).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Arc::new(NodeStore {
            store,
            clients,
            server_silent: watch::Sender::new(client.is_none()),
            client,
            deadline,
            request_permits: Arc::new(Semaphore::new(REQUESTS_MAX)),
            memory: Arc::new(Semaphore::new(memory)),
            connections: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            footprints: Mutex::default(),
            shares: Shares::default(),
            started: Instant::now(),
            sent: Sent::default(),
        })
    }

    /// Returns the longest time that an answer takes.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Returns the hash that names the principal of the current token within `scope`. `None` without a
    /// server.
    #[must_use]
    pub fn principal(&self, scope: &str) -> Option<Hash> {
        self.client.as_ref().map(|c| c.principal(scope))
    }

    /// Returns the semaphore with one permit for each connection.
    pub(super) fn connections(&self) -> Arc<Semaphore> {
        Arc::clone(&self.connections)
    }

    /// Returns the shares of the disk by dataset.
    #[must_use]
    pub fn shares(&self) -> &Shares {
        &self.shares
    }

    /// Returns the nanoseconds since this value was made.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Remembers the footprint of a version that a mount will read.
    pub fn register_version(&self, of: MountedVersion) {
        let mut all = self.footprints.lock();
        if all.len() < VERSIONS_MAX {
            all.insert(of.root, of.footprint);
        }
    }

    /// Records a read of this version, which gives its dataset a share of the disk for the next hour.
    pub fn record_read(&self, root: Root) {
        let footprints = self.footprints.lock();
        // A node store keeps all chunks, so their number does not matter.
        let footprint = Footprint { bytes: footprints.get(&root).copied().unwrap_or(u64::MAX), chunks: 1 };
        drop(footprints);
        let plain = dataset_id(root);
        // No sweep reads a node's store.
        let ids = VersionIds { plain, sweep: plain };
        self.shares.note(ids, root, footprint, ReaderKind::Plain, self.now_ns());
    }

    /// Returns the bytes that a client asks for.
    ///
    /// # Errors
    /// The reason why the client has to ask the server itself.
    pub async fn serve(
        self: &Arc<Self>,
        reader: NodeClient,
        request: FetchRequest,
    ) -> Result<ServedBytes, Declined> {
        let (hash, len) = request.hash_and_len();
        if len == 0 || len > CHUNK_BYTES_MAX {
            return Err(Declined("a chunk has 1 byte to 16 MiB"));
        }
        let permit = Arc::clone(&self.request_permits).try_acquire_owned();
        let permit = permit.map_err(|_| Declined("the owner serves as many requests as it may"))?;
        let memory = Arc::clone(&self.memory).try_acquire_many_owned(len);
        let memory: MemoryPermit =
            memory.map_err(|_| Declined("node clients hold all the memory that they may"))?.into();
        if !self.clients.may_read(reader.root).await {
            return Err(Declined("the server refuses the version, or the owner watches too many versions"));
        }
        self.record_read(reader.root);
        let key = StoreKey { domain: Domain::default_domain(), hash };
        if self.store.has(&key, len) {
            let hit = self.read(&reader, key, len, request, &memory).await?;
            return Ok(ServedBytes { hit, permits: (permit, memory) });
        }
        let mut server_silent = self.server_silent.subscribe();
        tokio::select! {
            biased;
            _ = server_silent.wait_for(|s| *s) => {
                Err(Declined("the chunk is not on this node, and the server does not answer"))
            }
            hit = self.read(&reader, key, len, request, &memory) => {
                Ok(ServedBytes { hit: hit?, permits: (permit, memory) })
            }
        }
    }

    async fn read(
        self: &Arc<Self>,
        reader: &NodeClient,
        key: StoreKey,
        len: u32,
        request: FetchRequest,
        memory: &MemoryPermit,
    ) -> Result<Hit, Declined> {
        let fetch = self.fetch(reader, request, memory);
        self.store.read(key, len, dataset_id(reader.root), fetch).await.map_err(|error| {
            tracing::debug!(%error, "a read for a node client failed: the client asks the server");
            Declined("the owner could not read the chunk")
        })
    }

    /// Returns the fetch from the server for a client. It holds the memory permit while the fetch runs, and
    /// while any reader waits for its bytes.
    fn fetch(self: &Arc<Self>, reader: &NodeClient, request: FetchRequest, memory: &MemoryPermit) -> Fetch {
        let (node_store, root, memory) = (Arc::clone(self), reader.root, Arc::clone(memory));
        let client =
            self.client.as_ref().map(|c| c.for_dataset(reader.dataset.as_ref()).for_job(&reader.job));
        Arc::new(move |_| {
            let (node_store, client, request) = (Arc::clone(&node_store), client.clone(), request.clone());
            let memory = Arc::clone(&memory);
            async move {
                let _memory = memory;
                let none = || Err(ClientError::Config("this mount has no server".into()));
                let client = client.unwrap_or_else(none).map_err(|e| FetchError::new(e.kind(), e))?;
                node_store.ask_server(client, root, &request).await
            }
            .boxed()
        })
    }

    /// Asks the server on behalf of a client, and fails at once while the server is silent.
    async fn ask_server(
        &self,
        client: Client,
        root: Root,
        request: &FetchRequest,
    ) -> Result<Bytes, FetchError> {
        if *self.server_silent.borrow() {
            return Err(FetchError::new(Kind::Unavailable, "the server does not answer"));
        }
        let got = fetch_from_server(client.fail_fast(), root, request).await;
        match &got {
            Ok(_) => self.server_answered(),
            Err(e) if e.is_unreachable() => drop(self.server_silent.send_replace(true)),
            Err(_) => {}
        }
        got.map_err(|e| FetchError::new(e.kind(), e))
    }

    fn server_answered(&self) {
        self.server_silent.send_if_modified(|s| std::mem::replace(s, false));
    }

    /// Probes a silent server until it answers. Never ends; drop the future to stop.
    pub async fn watch_server(&self) {
        let Some(client) = &self.client else { return std::future::pending().await };
        let client = client.within(SERVER_PROBE.1).fail_fast();
        let mut server_silent = self.server_silent.subscribe();
        // `self` holds the sender, so this wait cannot fail.
        while server_silent.wait_for(|s| *s).await.is_ok() {
            if client.info().await.is_ok() {
                self.server_answered();
            }
            sleep(SERVER_PROBE.0).await;
        }
    }

    /// Counts bytes that were handed to a client's connection.
    pub(super) fn count_sent(&self, tier: Tier, bytes: u64) {
        let counter = match tier {
            Tier::Memory => &self.sent.memory,
            Tier::Disk => &self.sent.disk,
            Tier::Flight => &self.sent.flight,
            Tier::Origin | Tier::Bypass | Tier::Peer(_) => &self.sent.server,
        };
        counter.fetch_add(bytes, Relaxed);
    }

    /// Returns the bytes sent to clients, by the tier they came from.
    #[must_use]
    pub fn sent_bytes(&self) -> [(&'static str, u64); 4] {
        let s = &self.sent;
        [("memory", &s.memory), ("disk", &s.disk), ("flight", &s.flight), ("server", &s.server)]
            .map(|(tier, n)| (tier, n.load(Relaxed)))
    }

    /// Returns the state of the store, as the owner reports it.
    #[must_use]
    pub fn state(&self) -> NodeState {
        let report = self.store.disk().map(|d| d.report());
        let tier = report.as_ref().and_then(|r| r.engine.as_ref());
        NodeState {
            pid: std::process::id(),
            chunks: tier.map_or(0, |t| t.chunks),
            slab_bytes: tier.map_or(0, |t| t.slab_bytes),
            limit_bytes: tier.map_or(0, |t| t.limit),
            queued_bytes: report.as_ref().map_or(0, |r| r.queued_bytes),
            quarantined: report.as_ref().map_or(0, |r| r.damaged()),
        }
    }
}

#[cfg(test)]
mod tests;
