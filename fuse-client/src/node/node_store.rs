//! What the owner of a node's store does for clients: a read of its own store, for the guest's job.
//!
//! 1. (I1) what it sends is [`fletch_store::Verified`]; the guest hashes it again.
//! 2. (I7) nothing is sent of a version that the server does not access ([`NodeClients`]).
//! 3. (I8) the server is asked in the name of the guest's job, so its accounts say who read; what comes from here
//!    is counted here, when it is handed to the connection, and nowhere else.
//! 4. (I3) a chunk that is on its way is waited for, whoever asked for it first.
//! 5. No guest waits here for a server that is server_silent: it can go to the server, or its origin, itself. Nor does the
//!    owner: what a guest's fetch could not bring, it asks for itself (`fletch_store::Store::read`).
//! 6. (I6) what guests hold of the owner's memory, sent slowly or on its way, is half of it at most ([`ServedBytes`]).

use super::clients::{NodeClient, NodeClients};
use super::listener::CONNECTIONS_MAX;
use crate::chunk_sources::fetch_from_server;
use crate::fs::read::{FetchRequest, dataset_id};
use bytes::Bytes;
use fletch_api::node::{MountedVersion, NodeState};
use fletch_client::{Client, ClientError};
use fletch_core::{Domain, Hash, Kind, Root, StoreKey, manifest::CHUNK_BYTES_MAX};
use fletch_store::{By, Fetch, FetchError, Hit, Shares, Store, Tier};
use futures::future::FutureExt;
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, sleep},
};

/// Requests for bytes at once; of more, guests ask the server.
const REQUESTS_MAX: usize = 512;
/// Versions scope footprint is remembered.
const VERSIONS_MAX: usize = 1024;
/// How often a silent server is asked whether it is back, and how long it may take to say so.
const SERVER_PROBE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(2));

/// Why a guest gets no bytes here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Declined(pub &'static str);

/// Bytes for a guest, and the right to hold them, to be kept until they are sent.
pub struct ServedBytes {
    /// The bytes.
    pub hit: Hit,
    /// Its permit, and its memory of the memory.
    pub permits: ServePermits,
}

/// A permit of a request.
type RequestPermit = OwnedSemaphorePermit;
/// So many bytes of the guests' memory of the memory. The fetch holds them, too: it outlives a guest that goes.
type MemoryPermit = Arc<OwnedSemaphorePermit>;
/// Both.
pub type ServePermits = (RequestPermit, MemoryPermit);

/// Bytes sent to clients, by where they came from.
#[derive(Debug, Default)]
struct Sent {
    memory: AtomicU64,
    disk: AtomicU64,
    flight: AtomicU64,
    server: AtomicU64,
}

/// See the module.
pub struct NodeStore {
    store: Arc<Store>,
    clients: Arc<NodeClients>,
    client: Option<Client>,
    deadline: Duration,
    /// Whether the server does not answer.
    server_silent: watch::Sender<bool>,
    request_permits: Arc<Semaphore>,
    /// Bytes that guests may hold.
    memory: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    footprints: Mutex<HashMap<Root, u64>>,
    shares: Shares,
    started: Instant,
    sent: Sent,
}

impl NodeStore {
    /// Serves from `store`, scope memory is `memory_bytes`, and from the server that `client` asks.
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

    /// The longest an answer takes.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// The name of whom the token speaks for now, among those of `scope`; none where there is no server.
    #[must_use]
    pub fn principal(&self, scope: &str) -> Option<Hash> {
        self.client.as_ref().map(|c| c.principal(scope))
    }

    /// One for each connection.
    pub(super) fn connections(&self) -> Arc<Semaphore> {
        Arc::clone(&self.connections)
    }

    /// Which datasets have a share of the disk.
    #[must_use]
    pub fn shares(&self) -> &Shares {
        &self.shares
    }

    /// Nanoseconds since the start.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// A guest will read this version.
    pub fn register_version(&self, of: MountedVersion) {
        let mut all = self.footprints.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() < VERSIONS_MAX {
            all.insert(of.root, of.footprint);
        }
    }

    /// Somebody reads this version: it has a share of the disk for the next hour.
    pub fn record_read(&self, root: Root) {
        let footprints = self.footprints.lock().unwrap_or_else(PoisonError::into_inner);
        let footprint = footprints.get(&root).copied().unwrap_or(u64::MAX);
        drop(footprints);
        self.shares.note(dataset_id(root), root, footprint, By::Anyone, self.now_ns());
    }

    /// The bytes a guest wants.
    ///
    /// # Errors
    /// Why it has to ask the server itself.
    pub async fn serve(
        self: &Arc<Self>,
        guest: NodeClient,
        request: FetchRequest,
    ) -> Result<ServedBytes, Declined> {
        let (hash, len) = request.hash_and_len();
        if len == 0 || len > CHUNK_BYTES_MAX {
            return Err(Declined("no chunk has such a length"));
        }
        let permit = Arc::clone(&self.request_permits).try_acquire_owned();
        let permit = permit.map_err(|_| Declined("too many requests are under way"))?;
        let memory = Arc::clone(&self.memory).try_acquire_many_owned(len);
        let memory: MemoryPermit =
            memory.map_err(|_| Declined("guests hold all the memory they may"))?.into();
        if !self.clients.may_read(guest.root).await {
            return Err(Declined("the version is not granted, or not watched here"));
        }
        self.record_read(guest.root);
        let key = StoreKey { domain: Domain::default_domain(), hash };
        if self.store.has(&key, len) {
            let hit = self.read(&guest, key, len, request, &memory).await?;
            return Ok(ServedBytes { hit, permits: (permit, memory) });
        }
        let mut server_silent = self.server_silent.subscribe();
        tokio::select! {
            biased;
            _ = server_silent.wait_for(|s| *s) => Err(Declined("it is not here, and the server does not answer")),
            hit = self.read(&guest, key, len, request, &memory) => Ok(ServedBytes { hit: hit?, permits: (permit, memory) }),
        }
    }

    async fn read(
        self: &Arc<Self>,
        guest: &NodeClient,
        key: StoreKey,
        len: u32,
        request: FetchRequest,
        memory: &MemoryPermit,
    ) -> Result<Hit, Declined> {
        let fetch = self.fetch(guest, request, memory);
        self.store.read(key, len, dataset_id(guest.root), fetch).await.map_err(|error| {
            tracing::debug!(%error, "a guest is sent to the server");
            Declined("it could not be had")
        })
    }

    /// Asks the server for a guest, and holds its memory of the memory for as long as that takes, or anybody waits
    /// for what it brings.
    fn fetch(self: &Arc<Self>, guest: &NodeClient, request: FetchRequest, memory: &MemoryPermit) -> Fetch {
        let (host, root, memory) = (Arc::clone(self), guest.root, Arc::clone(memory));
        let client = self.client.as_ref().map(|c| c.for_job(&guest.job));
        Arc::new(move |_| {
            let (host, client, request) = (Arc::clone(&host), client.clone(), request.clone());
            let memory = Arc::clone(&memory);
            async move {
                let _part = memory;
                let none = || Err(ClientError::Config("there is no server".into()));
                let client = client.unwrap_or_else(none).map_err(|e| FetchError::new(e.kind(), e))?;
                host.ask_server(client, root, &request).await
            }
            .boxed()
        })
    }

    /// Nobody waits for a server that is silent in a guest's name.
    async fn ask_server(
        &self,
        client: Client,
        root: Root,
        request: &FetchRequest,
    ) -> Result<Bytes, FetchError> {
        if *self.server_silent.borrow() {
            return Err(FetchError::new(Kind::Unavailable, "the server does not answer"));
        }
        let got = fetch_from_server(client.impatient(), root, request).await;
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

    /// Asks a silent server whether it is back, for as long as it is polled.
    pub async fn watch_server(&self) {
        let Some(client) = &self.client else { return std::future::pending().await };
        let client = client.within(SERVER_PROBE.1).impatient();
        let mut server_silent = self.server_silent.subscribe();
        // The sender is ours, so it does not end.
        while server_silent.wait_for(|s| *s).await.is_ok() {
            if client.info().await.is_ok() {
                self.server_answered();
            }
            sleep(SERVER_PROBE.0).await;
        }
    }

    /// Bytes were handed to a guest's connection.
    pub(super) fn count_sent(&self, tier: Tier, bytes: u64) {
        let counter = match tier {
            Tier::Memory => &self.sent.memory,
            Tier::Disk => &self.sent.disk,
            Tier::Flight => &self.sent.flight,
            Tier::Origin | Tier::Bypass => &self.sent.server,
        };
        counter.fetch_add(bytes, Relaxed);
    }

    /// Bytes sent to clients, by where they came from.
    #[must_use]
    pub fn sent_bytes(&self) -> [(&'static str, u64); 4] {
        let s = &self.sent;
        [("memory", &s.memory), ("disk", &s.disk), ("flight", &s.flight), ("server", &s.server)]
            .map(|(tier, n)| (tier, n.load(Relaxed)))
    }

    /// How the store is.
    #[must_use]
    pub fn state(&self) -> NodeState {
        let report = self.store.disk().map(|d| d.report());
        let tier = report.as_ref().and_then(|r| r.tier.as_ref());
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
