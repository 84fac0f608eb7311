//! Reads chunks: decides by the view of the cluster whom a fetch asks, and reads through the store.
//!
//! ```text
//! this server owns the chunk, or is alone   [its former owner, if it has it] ─▶ the origin    keeps it
//!   its disk has no room for it             those that may have taken it ─▶ the origin        offers it
//! another member owns it                    the owner ─▶ the next one ─▶ the origin           keeps nothing
//! it belongs to a sweep of this server      the owners, if they have it ─▶ the origin         keeps it
//! ```
//! I1. A read for another server asks no owner: one hop at most. For [`RING_NEWS`] after a change of the ring
//!     it may ask the former owner, and at any time the members that take what its own disk has no room for.
//!     They answer only with what they have.
//! I2. Reads that wait for another server hold a bounded part of the memory: those of clients one part, those
//!     of other servers another one. So servers whose readers wait for each other all go on (ADR 65).
//! I3. A server that is alone reads as if this room did not exist.
//! I4. A chunk of a draft is read by its content, once that is known. Its first read asks the origin alone:
//!     each server learns for itself, and drafts have no owners.
//! I5. The chunks of a sweep are kept by its own server, and have no owner. The owners for plain readers may
//!     have the same bytes: they are asked for what they have, and fetch nothing for a sweep.

mod pass_on;
mod peer_fetch;

use crate::{
    app::telemetry::ReadWatch,
    cluster::{ClusterState, ClusterView, PeerAddress, PeerCall, PeerRequest, Peers, PinOrder},
    data::versions::{ATTEMPTS, ChunkFetch, LocatedChunk, Sources, Versions},
    tenancy::{
        accounting::JobCosts,
        tenants::{FairPermit, FairPermits, TenantLimit, Tenants},
    },
};
use fletch_api::routes;
use fletch_bounds::{Gate, Waits, in_waits, pass_gate};
use fletch_core::{Domain, Expected, Hash, Kind, StoreKey, Tenant, groups::GroupRun};
use fletch_store::{
    AtOnce, AtPeer, ChunkCheck, DatasetId, Fetch, FetchError, Hit, PartHit, ReadError, Store, Tier, Warmed,
};
use futures::{FutureExt as _, future::BoxFuture};
use parking_lot::Mutex;
use pass_on::PassedOn;
pub use peer_fetch::PeersOverloaded;
use peer_fetch::{PeerFetch, Place, Places};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio_util::task::TaskTracker;

/// How long after a change of the ring a chunk's former owner is asked first.
pub const RING_NEWS: Duration = Duration::from_secs(600);
/// The most members that one read asks as owners.
const OWNERS_MAX: usize = 2;
/// How often a store calls a fetch, at most: each member may return wrong bytes once.
pub const READ_ATTEMPTS: u32 = ATTEMPTS + OWNERS_MAX as u32 + 1;

/// For whom a chunk is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asker {
    /// A client, or a job of this server.
    Client,
    /// Another server of the cluster.
    Peer,
}

/// A file that lies in a chunk with others, and that is read alone.
#[derive(Debug, Clone, Copy)]
pub struct PackedPart {
    /// The chunk, by which the owner is found.
    pub chunk: Hash,
    /// The ordinal of the file's entry.
    pub ordinal: u64,
}

/// A read of a chunk, or of a file that is read alone.
#[derive(Clone, Copy)]
pub struct ChunkRead<'a> {
    /// For whom it is read.
    pub asker: Asker,
    /// The tenant whose permits the read takes.
    pub tenant: &'a Tenant,
    /// What the read costs is counted here.
    pub costs: &'a Arc<JobCosts>,
    /// The version.
    pub sources: &'a Arc<Sources>,
    /// BLAKE3 of the bytes.
    pub hash: Hash,
    /// Where they are at the origin.
    pub located: &'a LocatedChunk,
    /// The dataset for which the disk keeps the bytes, if this server is to keep them.
    pub dataset: DatasetId,
    /// The file, if the bytes are one that is read alone.
    pub part: Option<PackedPart>,
    /// The groups of a chunk, if the bytes are such. `hash` is their name.
    pub run: Option<&'a GroupRun>,
}

impl ChunkRead<'_> {
    fn key(&self) -> StoreKey {
        StoreKey { domain: self.sources.domain.clone(), hash: self.hash }
    }

    /// What the bytes must be.
    fn expected(&self) -> Expected {
        self.run.map_or(Expected::Whole(self.hash), |run| Expected::Run(run.clone()))
    }

    /// The chunk that has the bytes.
    fn chunk(&self) -> Hash {
        let of_run = self.run.map(|run| run.of().chunk());
        self.part.map(|part| part.chunk).or(of_run).unwrap_or(self.hash)
    }

    /// The key that decides who owns the bytes.
    fn placed(&self) -> StoreKey {
        StoreKey { domain: self.sources.domain.clone(), hash: self.chunk() }
    }

    fn request(&self, call: PeerCall) -> PeerRequest {
        PeerRequest {
            path: self.path(),
            domain: self.sources.domain.clone(),
            dataset: self.sources.dataset().to_string(),
            job: Arc::clone(&self.costs.label),
            len: self.located.len,
            part: self.run.map(GroupRun::range),
            call,
            only_if_cached: false,
        }
    }

    fn path(&self) -> String {
        let root = self.sources.root();
        match self.part {
            Some(part) => routes::peer_file(root, part.ordinal),
            None => routes::peer_chunk(root, self.chunk()),
        }
    }
}

/// Whom a fetch asks before the origin.
enum Route {
    /// Nobody, or those that may have the chunk. This server keeps it.
    Own,
    /// The owner, and the next member of the ranking. This server keeps nothing.
    Owners(Vec<PeerAddress>),
}

/// What a read passes to the store.
struct Prepared {
    fetch: Fetch,
    /// The fetch, if it asks other members.
    asked: Option<Arc<PeerFetch>>,
    /// Whether this server keeps the bytes on its disk.
    keeps: bool,
}

/// Where a chunk is kept, and what that took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// On this server.
    Here(Warmed),
    /// On another server of the cluster.
    Elsewhere(Warmed),
}

/// A read under way. Its end, by an answer or because nobody waits any more, tells whether it was slow.
struct WatchedRead<'a> {
    read: &'a ChunkRead<'a>,
    watch: &'a ReadWatch,
    began: Instant,
    waits: Arc<Waits>,
}

impl Drop for WatchedRead<'_> {
    fn drop(&mut self) {
        let (hash, dataset) = (self.read.hash, self.read.sources.dataset());
        self.watch.note(self.began.elapsed(), &self.waits, || format!("chunk {} of {dataset}", hash.short()));
    }
}

/// Returns the tier of bytes that the store returned as of `tier`. Counts those that another member sent.
fn tier_of(read: &ChunkRead<'_>, tier: Tier, asked: Option<Arc<PeerFetch>>) -> Tier {
    // Only a read that led its flight used its own fetch.
    let led = matches!(tier, Tier::Origin | Tier::Bypass);
    let Some(at) = asked.filter(|_| led).and_then(|asked| asked.served()) else { return tier };
    read.costs.receive(u64::from(read.located.len));
    Tier::Peer(at)
}

/// No server that owns a chunk answers.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("no server of the cluster that owns the chunk keeps it now")]
pub struct OwnersSilent;

/// The number of the last ring that was seen, and when it was seen first.
#[derive(Debug)]
struct RingSeen {
    number: u64,
    since: Instant,
}

/// Reads chunks for all rooms of a server.
pub struct ChunkReads {
    store: Arc<Store>,
    versions: Arc<Versions>,
    tenants: Arc<Tenants>,
    cluster: Arc<ClusterState>,
    ring: Mutex<RingSeen>,
    passed_on: PassedOn,
    tasks: TaskTracker,
    watch: Arc<ReadWatch>,
}

impl ChunkReads {
    /// Creates the room.
    #[must_use]
    pub fn new(
        store: Arc<Store>,
        versions: Arc<Versions>,
        tenants: Arc<Tenants>,
        cluster: Arc<ClusterState>,
        tasks: TaskTracker,
        watch: Arc<ReadWatch>,
    ) -> Arc<Self> {
        let ring = Mutex::new(RingSeen { number: 0, since: Instant::now() });
        let passed_on = PassedOn::new();
        Arc::new(ChunkReads { store, versions, tenants, cluster, ring, passed_on, tasks, watch })
    }

    /// Whether a client's read of a chunk of a version goes to another server.
    #[must_use]
    pub fn is_elsewhere(&self, asker: Asker, sources: &Sources, chunk: Hash) -> bool {
        let Some(peers) = self.peers(asker, sources) else { return false };
        let key = StoreKey { domain: sources.domain.clone(), hash: chunk };
        !self.owners(peers, &self.cluster.view(), &key).is_empty()
    }

    /// Returns the other members, if a read may ask owners.
    fn peers(&self, asker: Asker, sources: &Sources) -> Option<&Peers> {
        let may_ask = asker == Asker::Client && sources.are_plain() && !sources.is_draft();
        self.cluster.peers().filter(|_| may_ask)
    }

    /// Returns the members to ask for a chunk, best first. Empty: this server is the first that may serve it.
    fn owners(&self, peers: &Peers, view: &ClusterView, key: &StoreKey) -> Vec<PeerAddress> {
        let own = self.cluster.own_id();
        let serving = view.core.serving(key).filter(|m| m.id == *own || peers.may_ask(&m.id));
        let before_own = serving.take(OWNERS_MAX).take_while(|m| m.id != *own);
        before_own.filter_map(|m| view.address(&m.id)).collect()
    }

    /// Returns the former owners of a chunk of this server, for some time after the ring changed, the latest
    /// first. After several changes at once, the latest may not have got the chunk yet.
    fn former_owners(&self, peers: &Peers, view: &ClusterView, key: &StoreKey) -> Vec<PeerAddress> {
        if !self.is_ring_news(view) {
            return Vec::new();
        }
        let mut former = view.core.former_owners(key);
        former.retain(|id| id != self.cluster.own_id() && peers.may_ask(id));
        former.iter().filter_map(|id| view.address(id)).collect()
    }

    fn is_ring_news(&self, view: &ClusterView) -> bool {
        let mut seen = self.ring.lock();
        if seen.number != view.core.number() {
            *seen = RingSeen { number: view.core.number(), since: Instant::now() };
        }
        seen.since.elapsed() < RING_NEWS
    }

    fn route(&self, read: &ChunkRead<'_>) -> Route {
        let has_owner = read.sources.are_plain() && !read.sources.is_draft();
        let Some(peers) = self.cluster.peers().filter(|_| has_owner) else { return Route::Own };
        let (view, key) = (self.cluster.view(), read.placed());
        if read.asker == Asker::Client {
            let owners = self.owners(peers, &view, &key);
            if !owners.is_empty() {
                return Route::Owners(owners);
            }
        }
        Route::Own
    }

    /// Returns the members that may have a chunk that this server keeps and does not have.
    fn holders(&self, read: &ChunkRead<'_>) -> Vec<PeerAddress> {
        let Some(peers) = self.cluster.peers().filter(|_| !read.sources.is_draft()) else {
            return Vec::new();
        };
        let view = self.cluster.view();
        if !read.sources.are_plain() {
            return self.owners(peers, &view, &read.placed());
        }
        let mut holders = self.takers(peers, &view, read);
        for former in self.former_owners(peers, &view, &read.placed()) {
            if !holders.contains(&former) {
                holders.push(former);
            }
        }
        holders
    }

    /// Reads a chunk, or a file that is read alone.
    ///
    /// # Errors
    /// [`ReadError`].
    pub async fn read(self: &Arc<Self>, read: &ChunkRead<'_>) -> Result<Hit, ReadError> {
        let running =
            WatchedRead { read, watch: &self.watch, began: Instant::now(), waits: Waits::of_part() };
        let reading = async {
            match self.by_content(read) {
                Some(read) => self.read_with(&read, None).await,
                None => self.learn(read).await,
            }
        };
        in_waits(Arc::clone(&running.waits), reading).await
    }

    /// Reads groups of a chunk from its owner or the origin. `chunk` is the chunk's own key, `run` the groups
    /// of the read.
    ///
    /// # Errors
    /// [`ReadError`].
    pub async fn read_run(
        self: &Arc<Self>,
        read: &ChunkRead<'_>,
        chunk: &StoreKey,
        run: &GroupRun,
    ) -> Result<PartHit, ReadError> {
        let running =
            WatchedRead { read, watch: &self.watch, began: Instant::now(), waits: Waits::of_part() };
        let reading = async {
            let Prepared { fetch, asked, .. } = self.prepare(read, &read.key()).await?;
            let mut found = self.store.fetch_run(chunk, run.clone(), fetch).await?;
            found.hit.tier = tier_of(read, found.hit.tier, asked);
            Ok(found)
        };
        in_waits(Arc::clone(&running.waits), reading).await
    }

    /// Returns the key under which the store keeps a chunk of a version. A name of a draft that was never
    /// read has nothing there.
    #[must_use]
    pub fn key(&self, domain: &Domain, name: Hash) -> StoreKey {
        let key = StoreKey { domain: domain.clone(), hash: name };
        match self.versions.learned().content(&key) {
            Some(hash) => StoreKey { hash, ..key },
            None => key,
        }
    }

    /// Returns the read under the hash of its bytes. `None` for a name of a draft that was never read.
    fn by_content<'a>(&self, read: &ChunkRead<'a>) -> Option<ChunkRead<'a>> {
        if !read.sources.is_draft() {
            return Some(*read);
        }
        let hash = self.versions.learned().content(&read.key())?;
        Some(ChunkRead { hash, ..*read })
    }

    /// Reads bytes that a draft names by their place, for the first time.
    async fn learn(&self, read: &ChunkRead<'_>) -> Result<Hit, ReadError> {
        let key = read.key();
        let fetch = ChunkFetch::of_name(&self.versions, read.costs, read.located);
        let fetch = self.permitted(read, &key, fetch).await?;
        let names = self.versions.learned().record(read.located.slice_offset());
        self.store.learn(key, read.located.len, read.dataset, fetch, names).await
    }

    /// Returns the read under the hash of its bytes, which are read first if their hash is not known.
    async fn learned<'a>(&self, read: &ChunkRead<'a>) -> Result<ChunkRead<'a>, ReadError> {
        match self.by_content(read) {
            Some(read) => Ok(read),
            None => Ok(ChunkRead { hash: self.learn(read).await?.chunk.hash(), ..*read }),
        }
    }

    /// Reads a short chunk from a disk of this machine, on this thread. `None` if that cannot be done at
    /// once; it says nothing about the chunk.
    ///
    /// Only on a server that is alone. The read takes the permits of any other, or is not made.
    #[must_use]
    pub fn read_near(self: &Arc<Self>, read: &ChunkRead<'_>) -> Option<Hit> {
        let read = &self.by_content(read)?;
        let key = read.key();
        // Whoever joins a flight waits.
        if self.cluster.peers().is_some()
            || !read.located.is_near()
            || !self.store.needs_fetch(&key, read.located.len)
        {
            return None;
        }
        let meter = read.costs.content_meter();
        let mut fill = |buffer: &mut [u8]| read.located.fill_here(&meter, buffer);
        let at_once = AtOnce { bring: None, fill: &mut fill, keep: true };
        self.read_with(read, Some(at_once)).now_or_never()?.ok()
    }

    async fn read_with(
        self: &Arc<Self>,
        read: &ChunkRead<'_>,
        at_once: Option<AtOnce<'_>>,
    ) -> Result<Hit, ReadError> {
        let (key, len) = (read.key(), read.located.len);
        let Prepared { fetch, asked, keeps } = self.prepare(read, &key).await?;
        let dataset = if keeps { read.dataset } else { DatasetId::UNCACHED };
        let hit = self.store.read_with(key.clone(), len, dataset, fetch, at_once).await?;
        let is_refused = hit.tier == Tier::Bypass && keeps && dataset != DatasetId::UNCACHED;
        let tier = tier_of(read, hit.tier, asked);
        if is_refused && tier == Tier::Bypass && read.part.is_none() && read.sources.are_plain() {
            self.pass_on(read, hit.chunk.clone());
        }
        // Memory may have the chunk from the time when another server owned it.
        if hit.tier == Tier::Memory
            && keeps
            && read.part.is_none()
            && self.cluster.peers().is_some()
            && self.is_ring_news(&self.cluster.view())
        {
            self.store.keep(&key, dataset, &hit.chunk);
        }
        let tier = if tier == Tier::Origin && !keeps { Tier::Bypass } else { tier };
        Ok(Hit { tier, ..hit })
    }

    /// Has a chunk kept where it belongs: on this server's disk, or by the server that owns it, which pins it
    /// then. On this server the caller pins it.
    ///
    /// # Errors
    /// [`ReadError`]; [`OwnersSilent`] in it if no server that owns the chunk answers.
    pub async fn keep(
        self: &Arc<Self>,
        read: &ChunkRead<'_>,
        pin: Option<&PinOrder>,
    ) -> Result<Kept, ReadError> {
        let read = &self.learned(read).await?;
        if let Route::Owners(owners) = self.route(read) {
            let kept = self.at_owners(read, owners).have_kept(pin).await?;
            let at = kept.ok_or_else(|| FetchError::new(Kind::Unavailable, OwnersSilent))?;
            return Ok(Kept::Elsewhere(match at {
                AtPeer::Hit => Warmed::Already,
                AtPeer::Miss => Warmed::Fetched,
                AtPeer::Bypass => Warmed::Refused,
            }));
        }
        let key = read.key();
        let Prepared { fetch, .. } = self.prepare(read, &key).await?;
        Ok(Kept::Here(self.store.warm_to_disk(&key, read.located.len, read.dataset, fetch).await?))
    }

    /// Has a chunk kept by this server, for a sweep. The append to disk may be queued when this returns.
    ///
    /// # Errors
    /// [`ReadError`].
    pub async fn keep_here(self: &Arc<Self>, read: &ChunkRead<'_>) -> Result<Warmed, ReadError> {
        let read = &self.learned(read).await?;
        let (key, len) = (read.key(), read.located.len);
        let Prepared { fetch, asked, .. } = self.prepare(read, &key).await?;
        let warmed = self.store.warm(&key, len, read.dataset, fetch).await?;
        if asked.and_then(|asked| asked.served()).is_some() {
            read.costs.receive(u64::from(len));
        }
        Ok(warmed)
    }

    /// Reads and hashes a chunk where it is kept. Fetches nothing.
    pub async fn check(self: &Arc<Self>, read: &ChunkRead<'_>) -> ChunkCheck {
        let Some(read) = &self.by_content(read) else { return ChunkCheck::Missing };
        if let Route::Owners(owners) = self.route(read) {
            return match self.at_owners(read, owners).have_checked().await {
                Ok(Some(_)) => ChunkCheck::Whole,
                Ok(None) => ChunkCheck::Missing,
                Err(_) => ChunkCheck::Unread,
            };
        }
        self.store.check_chunk(&read.key(), read.located.len).await
    }

    /// Returns a fetch that is used to ask the owners only. It holds no memory, because no bytes come.
    fn at_owners(self: &Arc<Self>, read: &ChunkRead<'_>, owners: Vec<PeerAddress>) -> Arc<PeerFetch> {
        let of = (read.sources, &**read.costs);
        let from_origin = ChunkFetch::fetch(&self.versions, of, read.expected(), read.located);
        PeerFetch::new(self, read, owners.into_iter().map(Place::owner).collect(), None, from_origin)
    }

    /// Decides whom a fetch asks, and waits for what it has to hold.
    async fn prepare(self: &Arc<Self>, read: &ChunkRead<'_>, key: &StoreKey) -> Result<Prepared, ReadError> {
        let of = (read.sources, &**read.costs);
        let from_origin = ChunkFetch::fetch(&self.versions, of, read.expected(), read.located);
        let is_cold = || self.store.needs_fetch(key, read.located.len);
        let (places, keeps): (Places, _) = match self.route(read) {
            Route::Owners(owners) => (owners.into_iter().map(Place::owner).collect(), false),
            Route::Own if is_cold() => (self.holders(read).into_iter().map(Place::holder).collect(), true),
            Route::Own => (Places::new(), true),
        };
        if places.is_empty() {
            let fetch = self.permitted(read, key, from_origin).await?;
            return Ok(Prepared { fetch, asked: None, keeps });
        }
        // Whoever joins a flight, or reads the disk, waits for nobody himself.
        let waits = if is_cold() { Some(self.hold_wait(read).await?) } else { None };
        let asked = PeerFetch::new(self, read, places, waits, from_origin);
        let fetch = {
            let asked = Arc::clone(&asked);
            Arc::new(move |attempt| -> BoxFuture<'static, _> {
                let asked = Arc::clone(&asked);
                Box::pin(async move { asked.next(attempt).await })
            })
        };
        Ok(Prepared { fetch, asked: Some(asked), keeps })
    }

    /// Waits for a permit of the origin, if the read would begin a fetch.
    async fn permitted(
        &self,
        read: &ChunkRead<'_>,
        key: &StoreKey,
        fetch: Fetch,
    ) -> Result<Fetch, ReadError> {
        let chunk = read.located.cold(&self.store, key, read.sources);
        if read.asker == Asker::Client {
            return Ok(self.tenants.with_origin_permit(read.tenant, &chunk, fetch).await?);
        }
        if !self.store.needs_fetch(key, read.located.len) {
            return Ok(fetch);
        }
        let permits = self.tenants.bare_origin_permit(read.tenant, &chunk).await?;
        Ok(Arc::new(move |attempt| {
            let _held = &permits;
            fetch(attempt)
        }))
    }

    /// The memory of reads that wait for other servers (I2).
    fn wait_memory(&self, asker: Asker) -> &Arc<FairPermits> {
        match asker {
            Asker::Client => &self.tenants.peer_waits,
            Asker::Peer => &self.tenants.former_owner_waits,
        }
    }

    /// Waits for a part of the memory of reads that wait for other servers (I2).
    async fn hold_wait(&self, read: &ChunkRead<'_>) -> Result<FairPermit, ReadError> {
        let pool = self.wait_memory(read.asker);
        let within = self.store.deadline() / 2;
        let held = tokio::time::timeout(within, pool.acquire(read.tenant, read.located.len.into()));
        let held = pass_gate(Gate::PeerMemory, held).await;
        held.map_err(|_| {
            self.tenants.count_refusal(read.tenant, TenantLimit::MemoryBytes);
            PeersOverloaded::NoMemory(within).into()
        })
    }

    fn peer(&self) -> Option<&Peers> {
        self.cluster.peers()
    }

    /// Returns the places of a read by the view of now.
    fn places_now(&self, key: &StoreKey) -> Places {
        let Some(peers) = self.peer() else { return Places::new() };
        self.owners(peers, &self.cluster.view(), key).into_iter().map(Place::owner).collect()
    }
}
