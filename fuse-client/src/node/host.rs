//! What the owner of a node's store does for guests: a read of its own store, for the guest's job.
//!
//! 1. (I1) what it sends is [`fletch_store::Verified`]; the guest hashes it again.
//! 2. (I7) nothing is sent of a version that the server does not grant ([`Guests`]).
//! 3. (I8) the server is asked in the name of the guest's job, so its accounts say who read; what comes from here
//!    is counted here, when it is handed to the connection, and nowhere else.
//! 4. (I3) a chunk that is on its way is waited for, whoever asked for it first.
//! 5. No guest waits here for a server that is silent: it can go to the server, or its origin, itself.

use super::{door::PLACES, guests::Guests};
use crate::fs::read::{Wanted, dataset};
use crate::source::ask;
use fletch_api::node::{GuestVersion, NodeState};
use fletch_client::{Client, ClientError};
use fletch_core::{Domain, JobName, Root, StoreKey, manifest::CHUNK_BYTES_MAX};
use fletch_store::{Fetch, FetchError, Hit, Shares, Store, Tier};
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
const TURNS: usize = 512;
/// Versions whose footprint is remembered.
const VERSIONS_MAX: usize = 1024;
/// How often a silent server is asked whether it is back, and how long it may take to say so.
const PROBE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(2));

/// Why a guest gets no bytes here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotHere(pub &'static str);

/// Who asks.
#[derive(Debug, Clone)]
pub struct Guest {
    /// Of which version.
    pub root: Root,
    /// For which job.
    pub job: JobName,
}

/// Bytes for a guest, and its turn, to be held until they are sent.
pub struct Served {
    /// The bytes.
    pub hit: Hit,
    /// Its turn.
    pub turn: OwnedSemaphorePermit,
}

/// Bytes sent to guests, by where they came from.
#[derive(Debug, Default)]
struct Sent {
    memory: AtomicU64,
    disk: AtomicU64,
    flight: AtomicU64,
    server: AtomicU64,
}

/// See the module.
pub struct Host {
    store: Arc<Store>,
    guests: Arc<Guests>,
    client: Option<Client>,
    deadline: Duration,
    /// Whether the server does not answer.
    silent: watch::Sender<bool>,
    turns: Arc<Semaphore>,
    places: Arc<Semaphore>,
    footprints: Mutex<HashMap<Root, u64>>,
    shares: Shares,
    started: Instant,
    sent: Sent,
}

impl Host {
    /// Serves from `store`, and from the server that `client` asks.
    #[must_use]
    pub fn new(
        store: Arc<Store>,
        guests: Arc<Guests>,
        client: Option<Client>,
        deadline: Duration,
    ) -> Arc<Self> {
        Arc::new(Host {
            store,
            guests,
            silent: watch::Sender::new(client.is_none()),
            client,
            deadline,
            turns: Arc::new(Semaphore::new(TURNS)),
            places: Arc::new(Semaphore::new(PLACES)),
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

    /// One for each connection.
    pub(super) fn places(&self) -> Arc<Semaphore> {
        Arc::clone(&self.places)
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
    pub fn expect(&self, of: GuestVersion) {
        let mut all = self.footprints.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() < VERSIONS_MAX {
            all.insert(of.root, of.footprint);
        }
    }

    /// Somebody reads this version: it has a share of the disk for the next hour.
    pub fn note(&self, root: Root) {
        let footprints = self.footprints.lock().unwrap_or_else(PoisonError::into_inner);
        let footprint = footprints.get(&root).copied().unwrap_or(u64::MAX);
        drop(footprints);
        self.shares.note(dataset(root), root, footprint, self.now_ns());
    }

    /// The bytes a guest wants.
    ///
    /// # Errors
    /// Why it has to ask the server itself.
    pub async fn bytes(self: &Arc<Self>, guest: Guest, wanted: Wanted) -> Result<Served, NotHere> {
        let (hash, len) = wanted.name();
        if len == 0 || len > CHUNK_BYTES_MAX {
            return Err(NotHere("no chunk has such a length"));
        }
        let turn = Arc::clone(&self.turns).try_acquire_owned();
        let turn = turn.map_err(|_| NotHere("too many requests are under way"))?;
        if !self.guests.may_read(guest.root).await {
            return Err(NotHere("the version is not granted, or not watched here"));
        }
        self.note(guest.root);
        let key = StoreKey { domain: Domain::default_domain(), hash };
        if self.store.has(&key, len) {
            return self.read(&guest, key, len, wanted).await.map(|hit| Served { hit, turn });
        }
        let mut silent = self.silent.subscribe();
        tokio::select! {
            biased;
            _ = silent.wait_for(|s| *s) => Err(NotHere("it is not here, and the server does not answer")),
            hit = self.read(&guest, key, len, wanted) => hit.map(|hit| Served { hit, turn }),
        }
    }

    async fn read(
        self: &Arc<Self>,
        guest: &Guest,
        key: StoreKey,
        len: u32,
        wanted: Wanted,
    ) -> Result<Hit, NotHere> {
        let fetch = self.fetch(guest, wanted);
        self.store.read(key, len, dataset(guest.root), fetch).await.map_err(|error| {
            tracing::debug!(%error, "a guest is sent to the server");
            NotHere("it could not be had")
        })
    }

    /// Asks the server for a guest. Whoever waits for the same chunk here waits as long as ever; guests do not.
    fn fetch(self: &Arc<Self>, guest: &Guest, wanted: Wanted) -> Fetch {
        let (host, root) = (Arc::clone(self), guest.root);
        let client = self.client.as_ref().map(|c| c.for_job(&guest.job));
        Arc::new(move |_| {
            let (host, client, wanted) = (Arc::clone(&host), client.clone(), wanted.clone());
            async move {
                let got =
                    match client.unwrap_or_else(|| Err(ClientError::Config("there is no server".into()))) {
                        Ok(client) => host.ask_server(client, root, &wanted).await,
                        Err(e) => Err(e),
                    };
                got.map_err(|e| FetchError::new(e.kind(), e))
            }
            .boxed()
        })
    }

    async fn ask_server(
        &self,
        client: Client,
        root: Root,
        wanted: &Wanted,
    ) -> Result<bytes::Bytes, ClientError> {
        let got = match ask(client.impatient(), root, wanted).await {
            Err(e) if e.is_unreachable() => {
                self.silent.send_replace(true);
                ask(client, root, wanted).await
            }
            answer => answer,
        };
        if got.is_ok() {
            self.heard();
        }
        got
    }

    fn heard(&self) {
        self.silent.send_if_modified(|s| std::mem::replace(s, false));
    }

    /// Asks a silent server whether it is back, for as long as it is polled.
    pub async fn watch_server(&self) {
        let Some(client) = &self.client else { return std::future::pending().await };
        let client = client.within(PROBE.1).impatient();
        let mut silent = self.silent.subscribe();
        // The sender is ours, so it does not end.
        while silent.wait_for(|s| *s).await.is_ok() {
            if client.info().await.is_ok() {
                self.heard();
            }
            sleep(PROBE.0).await;
        }
    }

    /// Bytes were handed to a guest's connection.
    pub(super) fn sent(&self, tier: Tier, bytes: u64) {
        let counter = match tier {
            Tier::Memory => &self.sent.memory,
            Tier::Disk => &self.sent.disk,
            Tier::Flight => &self.sent.flight,
            Tier::Origin | Tier::Bypass => &self.sent.server,
        };
        counter.fetch_add(bytes, Relaxed);
    }

    /// Bytes sent to guests, by where they came from.
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
