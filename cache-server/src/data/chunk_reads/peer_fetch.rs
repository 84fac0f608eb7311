//! The fetch of a chunk that other members are asked for, before the origin.
//!
//! The store calls [`PeerFetch::next`] again when the bytes of the call before were wrong. Wrong bytes blame
//! the member that sent them, and the next place is asked.

use super::{Asker, ChunkRead, ChunkReads};
use crate::{
    cluster::{PeerAddress, PeerAnswer, PeerCall, PeerRequest, PinOrder},
    data::versions::{LocatedChunk, Sources},
    tenancy::tenants::{FairPermit, OriginPermits},
};
use bytes::Bytes;
use fletch_bounds::{Gate, pass_gate};
use fletch_core::{Kind, MemberId, StoreKey, Tenant};
use fletch_store::{AtPeer, Fetch, FetchError, ReadError};
use parking_lot::Mutex;
use std::{collections::VecDeque, sync::Arc, time::Duration};
use tokio::time::{Instant, sleep};
use tracing::{Instrument as _, info_span};

/// The longest pause before a member that is at a limit is asked again.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The longest wait for a member that is asked only for what it has.
const CACHED_WITHIN: Duration = Duration::from_secs(5);

/// Why a read that needs another server failed, although each server works.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeersOverloaded {
    /// The memory for reads that wait for other servers is in use.
    #[error("the memory for reads that wait for other servers of the cluster was in use for {0:?}")]
    NoMemory(Duration),
    /// The owner answered 429 until the end.
    #[error("the server {0} of the cluster, which owns the chunk, is at its limit")]
    Owner(MemberId),
}

/// A member that is asked.
#[derive(Debug, Clone)]
pub(super) struct Place {
    to: PeerAddress,
    only_if_cached: bool,
}

/// Members in the order in which they are asked.
pub(super) type Places = VecDeque<Place>;

impl Place {
    /// A member that serves the chunk.
    pub fn owner(to: PeerAddress) -> Self {
        Place { to, only_if_cached: false }
    }

    /// A member that may have the chunk, although it does not own it: its former owner, or the one to which
    /// it was passed on.
    pub fn holder(to: PeerAddress) -> Self {
        Place { to, only_if_cached: true }
    }
}

/// A fetch that asks other members, then the origin.
pub(super) struct PeerFetch {
    reads: Arc<ChunkReads>,
    asker: Asker,
    tenant: Tenant,
    sources: Arc<Sources>,
    located: LocatedChunk,
    key: StoreKey,
    placed: StoreKey,
    request: PeerRequest,
    from_origin: Fetch,
    state: Mutex<State>,
}

struct State {
    places: Places,
    /// When every call of this fetch ends. `None` before the first call.
    deadline: Option<Instant>,
    /// The memory that the read may hold while it waits for members.
    waits: Option<FairPermit>,
    /// The member whose bytes the store is judging, and what it did for them.
    served: Option<(MemberId, AtPeer)>,
    /// Whether the view was looked at again after a member said that it is not the owner.
    looked_again: bool,
    origin_permits: Option<OriginPermits>,
}

impl PeerFetch {
    pub fn new(
        reads: &Arc<ChunkReads>,
        read: &ChunkRead<'_>,
        places: Places,
        waits: Option<FairPermit>,
        from_origin: Fetch,
    ) -> Arc<Self> {
        let request = read.request(PeerCall::Get);
        let state =
            State { places, deadline: None, waits, served: None, looked_again: false, origin_permits: None };
        Arc::new(PeerFetch {
            reads: Arc::clone(reads),
            asker: read.asker,
            tenant: read.tenant.clone(),
            sources: Arc::clone(read.sources),
            located: read.located.clone(),
            key: read.key(),
            placed: read.placed(),
            request,
            from_origin,
            state: Mutex::new(state),
        })
    }

    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.lock())
    }

    /// Returns what a member did for the bytes of the last call, or `None` if they came from the origin.
    pub fn served(&self) -> Option<AtPeer> {
        self.with(|s| s.served.as_ref().map(|(_, at)| *at))
    }

    /// Returns the bytes of the next place that has them. They are not verified.
    pub async fn next(&self, attempt: u32) -> Result<Bytes, FetchError> {
        if let (Some((wrong, _)), Some(peers)) = (self.with(|s| s.served.take()), self.reads.peer()) {
            peers.blame(&wrong, &self.request.path);
        }
        let new = || self.reads.versions.call_deadline();
        let deadline = self.with(|s| *s.deadline.get_or_insert_with(new));
        self.hold_wait();
        while let Some(place) = self.with(|s| s.places.pop_front()) {
            let only_if_cached = place.only_if_cached;
            let request = PeerRequest { only_if_cached, ..self.request.clone() };
            if let Some((bytes, at)) = self.ask(&place, &request, deadline).await? {
                self.with(|s| s.served = Some((place.to.id, at)));
                return Ok(bytes);
            }
        }
        // From here the read waits for the origin only.
        drop(self.with(|s| s.waits.take()));
        if self.with(|s| s.origin_permits.is_none()) {
            let cold = self.located.cold(&self.reads.store, &self.key, &self.sources);
            let permits = self.reads.tenants.bare_origin_permit(&self.tenant, &cold).await;
            let permits = permits.map_err(|e| FetchError::new(Kind::Overloaded, e))?;
            self.with(|s| s.origin_permits = Some(permits));
        }
        (self.from_origin)(attempt).await
    }

    /// Has the first member that answers keep the bytes, and returns what that took it. `None`: none answers.
    pub async fn have_kept(&self, pin: Option<&PinOrder>) -> Result<Option<AtPeer>, FetchError> {
        self.have(PeerCall::Keep(pin.cloned()), false).await
    }

    /// Has members read what they have, and fetch nothing. `None`: no member has the bytes, or none answers.
    pub async fn have_checked(&self) -> Result<Option<AtPeer>, FetchError> {
        self.have(PeerCall::Keep(None), true).await
    }

    async fn have(&self, call: PeerCall, only_if_cached: bool) -> Result<Option<AtPeer>, FetchError> {
        let deadline = self.reads.versions.call_deadline();
        while let Some(mut place) = self.with(|s| s.places.pop_front()) {
            place.only_if_cached = only_if_cached;
            let request = PeerRequest { call: call.clone(), only_if_cached, ..self.request.clone() };
            if let Some((_, at)) = self.ask(&place, &request, deadline).await? {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    /// Takes the memory of a read that was to join another fetch, which failed. Without it the read asks no
    /// member: it holds memory for the bytes by now, so it may not wait for more.
    fn hold_wait(&self) {
        self.with(|s| {
            if s.waits.is_none() && !s.places.is_empty() {
                let pool = self.reads.wait_memory(self.asker);
                s.waits = pool.try_acquire(&self.tenant, self.located.len.into()).ok();
                if s.waits.is_none() {
                    s.places.clear();
                }
            }
        });
    }

    /// Asks a member until it answers. `None`: the next place is to be asked.
    async fn ask(
        &self,
        place: &Place,
        request: &PeerRequest,
        deadline: Instant,
    ) -> Result<Option<(Bytes, AtPeer)>, FetchError> {
        let Some(peers) = self.reads.peer() else { return Ok(None) };
        // A quarter of the time is left for the places after this one.
        let left = deadline.saturating_duration_since(Instant::now());
        let within = if place.only_if_cached { left.min(CACHED_WITHIN) } else { left - left / 4 };
        let until = Instant::now() + within;
        loop {
            if !peers.may_ask(&place.to.id) {
                return Ok(None);
            }
            let span = info_span!("peer_call", peer = %place.to.id, path = %request.path);
            match pass_gate(Gate::Peer, peers.ask(&place.to, request, until).instrument(span)).await {
                PeerAnswer::Bytes(bytes, at) => return Ok(Some((bytes, at))),
                // Others would only get the load that the owner cannot carry. A former owner is a shortcut.
                PeerAnswer::Overloaded(pause) if !place.only_if_cached => {
                    let pause = pause.min(PAUSE_MAX).mul_f64(0.5 + rand::random::<f64>() / 2.0);
                    if Instant::now() + pause >= deadline {
                        let e = PeersOverloaded::Owner(place.to.id.clone());
                        return Err(FetchError::new(Kind::Overloaded, e));
                    }
                    pass_gate(Gate::Retry, sleep(pause)).await;
                }
                PeerAnswer::WrongServer(view, owner) => {
                    self.look_again(view, owner);
                    return Ok(None);
                }
                PeerAnswer::Overloaded(_) | PeerAnswer::Absent | PeerAnswer::Failed => return Ok(None),
            }
        }
    }

    /// Looks at the view again, once, because a member with the view `view` does not own the chunk.
    ///
    /// If this server's view is still older, the owner that the member named is asked.
    fn look_again(&self, view: u64, owner: Option<PeerAddress>) {
        if self.with(|s| std::mem::replace(&mut s.looked_again, true)) {
            return;
        }
        let places: Places = if self.reads.cluster.view_number() >= view {
            self.reads.places_now(&self.placed)
        } else {
            let own = self.reads.cluster.own_id();
            owner.filter(|to| to.id != *own).map(Place::owner).into_iter().collect()
        };
        if !places.is_empty() {
            self.with(|s| s.places = places);
        }
    }
}

impl From<PeersOverloaded> for ReadError {
    fn from(e: PeersOverloaded) -> Self {
        FetchError::new(Kind::Overloaded, e).into()
    }
}
