//! What the owner of a node's store does for guests: a read of its own store, for the guest's job.
//!
//! 1. (I1) what it sends is [`fletch_store::Verified`]; the guest hashes it again.
//! 2. (I7) nothing is sent of a version that the server does not grant ([`Guests`]).
//! 3. (I8) the server is asked in the name of the guest's job, so its accounts say who read; what comes from here
//!    is counted here, when it is handed to the connection, and nowhere else.
//! 4. (I3) a chunk that is on its way is waited for, whoever asked for it first.
//! 5. No guest waits here for a server that is silent: it can go to the server, or its origin, itself. Nor does the
//!    owner: what a guest's fetch could not bring, it asks for itself (`fletch_store::Store::read`).
//! 6. (I6) what guests hold of the owner's memory, sent slowly or on its way, is half of it at most ([`Served`]).

use super::{door::PLACES, guests::Guests};
use crate::fs::read::{Wanted, dataset};
use crate::source::ask;
use bytes::Bytes;
use fletch_api::node::{NodeClientVersion, NodeState};
use fletch_client::{Client, ClientError};
use fletch_core::{Domain, Hash, JobName, Kind, Root, StoreKey, manifest::CHUNK_BYTES_MAX};
use fletch_store::{Fetch, FetchError, Hit, ReaderKind, Shares, Store, Tier};
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

/// Bytes for a guest, and the right to hold them, to be kept until they are sent.
pub struct Served {
    /// The bytes.
    pub hit: Hit,
    /// Its turn, and its part of the memory.
    pub right: Right,
}

/// A turn of a request.
type Turn = OwnedSemaphorePermit;
/// So many bytes of the guests' part of the memory. The fetch holds them, too: it outlives a guest that goes.
type Part = Arc<OwnedSemaphorePermit>;
/// Both.
pub type Right = (Turn, Part);

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
    /// Bytes that guests may hold.
    memory: Arc<Semaphore>,
    places: Arc<Semaphore>,
    footprints: Mutex<HashMap<Root, u64>>,
    shares: Shares,
    started: Instant,
    sent: Sent,
}

impl Host {
    /// Serves from `store`, whose memory is `memory_bytes`, and from the server that `client` asks.
    #[must_use]
    pub fn new(
        store: Arc<Store>,
        guests: Arc<Guests>,
        client: Option<Client>,
        memory_bytes: u64,
        deadline: Duration,
    ) -> Arc<Self> {
        let part = usize::try_from(memory_bytes / 2).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Arc::new(Host {
            store,
            guests,
            silent: watch::Sender::new(client.is_none()),
            client,
            deadline,
            turns: Arc::new(Semaphore::new(TURNS)),
            memory: Arc::new(Semaphore::new(part)),
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

    /// The name of whom the token speaks for now, among those of `whose`; none where there is no server.
    #[must_use]
    pub fn principal(&self, whose: &str) -> Option<Hash> {
        self.client.as_ref().map(|c| c.principal(whose))
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
    pub fn expect(&self, of: NodeClientVersion) {
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
        self.shares.note(dataset(root), root, footprint, ReaderKind::Plain, self.now_ns());
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
        let part = Arc::clone(&self.memory).try_acquire_many_owned(len);
        let part: Part = part.map_err(|_| NotHere("guests hold all the memory they may"))?.into();
        if !self.guests.may_read(guest.root).await {
            return Err(NotHere("the version is not granted, or not watched here"));
        }
        self.note(guest.root);
        let key = StoreKey { domain: Domain::default_domain(), hash };
        if self.store.has(&key, len) {
            let hit = self.read(&guest, key, len, wanted, &part).await?;
            return Ok(Served { hit, right: (turn, part) });
        }
        let mut silent = self.silent.subscribe();
        tokio::select! {
            biased;
            _ = silent.wait_for(|s| *s) => Err(NotHere("it is not here, and the server does not answer")),
            hit = self.read(&guest, key, len, wanted, &part) => Ok(Served { hit: hit?, right: (turn, part) }),
        }
    }

    async fn read(
        self: &Arc<Self>,
        guest: &Guest,
        key: StoreKey,
        len: u32,
        wanted: Wanted,
        part: &Part,
    ) -> Result<Hit, NotHere> {
        let fetch = self.fetch(guest, wanted, part);
        self.store.read(key, len, dataset(guest.root), fetch).await.map_err(|error| {
            tracing::debug!(%error, "a guest is sent to the server");
            NotHere("it could not be had")
        })
    }

    /// Asks the server for a guest, and holds its part of the memory for as long as that takes, or anybody waits
    /// for what it brings.
    fn fetch(self: &Arc<Self>, guest: &Guest, wanted: Wanted, part: &Part) -> Fetch {
        let (host, root, part) = (Arc::clone(self), guest.root, Arc::clone(part));
        let client = self.client.as_ref().map(|c| c.for_job(&guest.job));
        Arc::new(move |_| {
            let (host, client, wanted) = (Arc::clone(&host), client.clone(), wanted.clone());
            let part = Arc::clone(&part);
            async move {
                let _part = part;
                let none = || Err(ClientError::Config("there is no server".into()));
                let client = client.unwrap_or_else(none).map_err(|e| FetchError::new(e.kind(), e))?;
                host.ask_server(client, root, &wanted).await
            }
            .boxed()
        })
    }

    /// Nobody waits for a server that is silent in a guest's name.
    async fn ask_server(&self, client: Client, root: Root, wanted: &Wanted) -> Result<Bytes, FetchError> {
        if *self.silent.borrow() {
            return Err(FetchError::new(Kind::Unavailable, "the server does not answer"));
        }
        let got = ask(client.fail_fast(), root, wanted).await;
        match &got {
            Ok(_) => self.heard(),
            Err(e) if e.is_unreachable() => drop(self.silent.send_replace(true)),
            Err(_) => {}
        }
        got.map_err(|e| FetchError::new(e.kind(), e))
    }

    fn heard(&self) {
        self.silent.send_if_modified(|s| std::mem::replace(s, false));
    }

    /// Asks a silent server whether it is back, for as long as it is polled.
    pub async fn watch_server(&self) {
        let Some(client) = &self.client else { return std::future::pending().await };
        let client = client.within(PROBE.1).fail_fast();
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
