//! Chunks that this server owns and has no room for: another member of the ranking keeps them.
//!
//! Without this the disks of a cluster never hold all of what fits on them together: chunks are placed at
//! random, so some disks are full while others have room.
//!
//! I1. A member that takes a chunk displaces nothing for it, and checks it like every chunk.
//! I2. What this server remembers is a hint. A member that lost the chunk says so. Then the origin is read,
//!     and the chunk is offered anew.
//! I3. No read waits for an offer.
//! I4. A member that did not take a chunk is offered none for [`REFUSAL_RESTS`]. Otherwise a dataset that is
//!     larger than all disks would cross the network at every read, for nothing.

use super::{ChunkRead, ChunkReads};
use crate::cluster::{ClusterView, PeerAddress, PeerAnswer, PeerCall, Peers};
use fletch_core::{MemberId, StoreKey, cluster::MEMBERS_MAX};
use fletch_store::{AtPeer, DatasetId, DiskTier, Verified};
use moka::sync::Cache;
use parking_lot::Mutex;
use std::{collections::HashSet, sync::Arc, time::Duration};
use tokio::time::Instant;

/// The most chunks whose places are remembered. One takes about 200 bytes.
const REMEMBERED_MAX: u64 = 1 << 18;
/// The most chunks that are offered at once. Their bytes lie in memory.
const OFFERS_MAX: usize = 8;
/// The most members that are asked to keep one chunk, or for one that they may keep.
const ASKED_MAX: usize = 3;
/// The space, in chunks, that a disk without passed-on chunks has left: a restart frees some space.
const ROOM: u64 = 8;
/// How long a member that did not take a chunk is left alone.
const REFUSAL_RESTS: Duration = Duration::from_secs(10);
/// How long a member may take to keep a chunk.
const OFFER_WITHIN: Duration = Duration::from_secs(5);

/// Where chunks of this server are.
pub struct PassedOn {
    at: Cache<StoreKey, MemberId>,
    offered: Mutex<HashSet<StoreKey>>,
    /// The members that did not take a chunk a moment ago.
    refused: Cache<MemberId, ()>,
}

impl PassedOn {
    pub fn new() -> Self {
        let refused = Cache::builder().max_capacity(MEMBERS_MAX as u64).time_to_live(REFUSAL_RESTS).build();
        PassedOn { at: Cache::new(REMEMBERED_MAX), offered: Mutex::default(), refused }
    }

    /// Notes that a chunk is being offered, if it is not yet, and there are not too many.
    fn begin(&self, key: &StoreKey) -> bool {
        let mut offered = self.offered.lock();
        offered.len() < OFFERS_MAX && offered.insert(key.clone())
    }

    fn end(&self, key: &StoreKey) {
        self.offered.lock().remove(key);
    }
}

impl ChunkReads {
    /// Offers a chunk to the next members of its ranking, in the background.
    pub(super) fn pass_on(self: &Arc<Self>, read: &ChunkRead<'_>, chunk: Verified) {
        let key = read.key();
        // A server that is alone has nobody to offer it to.
        if self.peer().is_none() || !self.passed_on.begin(&key) {
            return;
        }
        let request = read.request(PeerCall::Offer(chunk.bytes().clone()));
        let this = Arc::clone(self);
        self.tasks.spawn(async move {
            if let Some(peers) = this.peer() {
                this.passed_on.at.invalidate(&key);
                for to in this.next_members(&this.cluster.view(), &key) {
                    let until = Instant::now() + OFFER_WITHIN;
                    if this.passed_on.refused.contains_key(&to.id) || !peers.may_ask(&to.id) {
                        continue;
                    }
                    let answer = peers.ask(&to, &request, until).await;
                    if matches!(answer, PeerAnswer::Bytes(_, AtPeer::Hit | AtPeer::Miss)) {
                        this.passed_on.at.insert(key.clone(), to.id);
                        peers.add_passed_on();
                        break;
                    }
                    this.passed_on.refused.insert(to.id, ());
                }
            }
            this.passed_on.end(&key);
        });
    }

    /// Returns the members that may have taken a chunk of this server, if its disk has no room for it.
    ///
    /// After a restart nothing is remembered. So the members to which the chunk would be offered are asked.
    pub(super) fn takers(&self, peers: &Peers, view: &ClusterView, read: &ChunkRead<'_>) -> Vec<PeerAddress> {
        let key = read.placed();
        let may_ask = |to: &PeerAddress| peers.may_ask(&to.id);
        if let Some(holder) = self.passed_on.at.get(&key) {
            return view.address(&holder).filter(may_ask).into_iter().collect();
        }
        let len = read.located.len;
        let has_room = |disk: &DiskTier| disk.admits_beside(&key, read.dataset, len, ROOM * u64::from(len));
        let has_room = self.store.disk().is_none_or(|disk| has_room(disk));
        if has_room || read.part.is_some() || read.dataset == DatasetId::UNCACHED {
            return Vec::new();
        }
        self.next_members(view, &key).into_iter().filter(may_ask).collect()
    }

    /// Returns the members after this one in the ranking of a chunk.
    fn next_members(&self, view: &ClusterView, key: &StoreKey) -> Vec<PeerAddress> {
        let own = self.cluster.own_id();
        let others = view.core.serving(key).filter(|m| m.id != *own && m.weight > 0);
        others.take(ASKED_MAX).filter_map(|m| view.address(&m.id)).collect()
    }
}
