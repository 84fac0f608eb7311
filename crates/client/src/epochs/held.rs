//! The leases that this process must renew (being received, or handed out and not yet consumed), and those
//! that it must release.
//!
//! Holds ids and lifetimes, and says when the next renewal is due. Sends no request.
//!
//! 1. A held lease was handed out whole, or a live [`LeaseHold`] is receiving it.
//! 2. A renewal is due one third of the shortest lifetime after the last renewal of all leases. A lease that
//!    is added in between can bring it forward, never postpone it.
//! 3. A lease is held, or to be released, or neither; never both. A lease whose release is under way is not
//!    held again: the reader asks for its entries anew.

use parking_lot::{Mutex, MutexGuard};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

/// The longest time between two renewals.
const HEARTBEAT_MAX: Duration = Duration::from_secs(10);

/// The most leases that wait to be released. Any further one expires.
const RELEASES_MAX: usize = 1 << 16;

/// The epoch and the rank of a lease.
type Of = (u64, u32);

/// A held lease.
#[derive(Debug)]
struct HeldLease {
    ttl_ms: u64,
    /// The number of the [`LeaseHold`] that is receiving it; 0 once it was handed out.
    holder: u64,
}

#[derive(Debug, Default)]
struct State {
    leases: BTreeMap<Of, BTreeMap<u64, HeldLease>>,
    /// The number of holds that were made.
    holders: u64,
    /// The leases to release, and whether a request that releases them is under way.
    releases: BTreeMap<Of, BTreeMap<u64, bool>>,
    /// Requests that nobody waits for any more, and that may still get a lease.
    unanswered: usize,
}

impl State {
    fn remove(&mut self, of: Of, lease: u64) -> bool {
        let Some(leases) = self.leases.get_mut(&of) else { return false };
        let was_held = leases.remove(&lease).is_some();
        if leases.is_empty() {
            self.leases.remove(&of);
        }
        was_held
    }

    fn release(&mut self, of: Of, lease: u64) {
        self.remove(of, lease);
        let waiting: usize = self.releases.values().map(BTreeMap::len).sum();
        if waiting < RELEASES_MAX {
            self.releases.entry(of).or_default().entry(lease).or_insert(false);
        }
    }

    /// Takes a lease back from those to release. Returns `false` if its release is under way.
    fn keep(&mut self, of: Of, lease: u64) -> bool {
        let Some(waiting) = self.releases.get_mut(&of) else { return true };
        if waiting.get(&lease) == Some(&true) {
            return false;
        }
        waiting.remove(&lease);
        if waiting.is_empty() {
            self.releases.remove(&of);
        }
        true
    }
}

/// The leases that this process holds or releases, by epoch and rank.
#[derive(Debug, Default)]
pub struct HeldLeases {
    state: Mutex<State>,
    /// Notified when a lease is added.
    added: Notify,
    /// Notified when a lease is to be released, and when releases have ended.
    releases_changed: Notify,
}

impl HeldLeases {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Adds a lease that lives for `ttl_ms` milliseconds without a renewal.
    ///
    /// The reader calls this for every batch that it hands out. A process that gets a batch from another
    /// process calls it itself.
    pub fn hold(&self, epoch: u64, rank: u32, lease: u64, ttl_ms: u64) {
        let mut state = self.lock();
        if !state.keep((epoch, rank), lease) {
            return;
        }
        state.leases.entry((epoch, rank)).or_default().insert(lease, HeldLease { ttl_ms, holder: 0 });
        drop(state);
        self.added.notify_waiters();
    }

    /// Removes a lease that was acknowledged or is gone. Tells the server nothing.
    pub fn forget(&self, epoch: u64, rank: u32, lease: u64) {
        self.lock().remove((epoch, rank), lease);
    }

    /// Removes a lease whose samples will not be used. The server can grant them again at once.
    ///
    /// [`JobHandle::keep_alive`](super::JobHandle::keep_alive) tells the server. If it does not run, or the
    /// server does not answer, the lease expires. The release of an acknowledged lease changes nothing.
    pub fn release(&self, epoch: u64, rank: u32, lease: u64) {
        self.lock().release((epoch, rank), lease);
        self.releases_changed.notify_waiters();
    }

    /// Returns the number of held leases.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().leases.values().map(BTreeMap::len).sum()
    }

    /// Returns whether no lease is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the server has yet to be told of this release.
    #[must_use]
    pub fn is_releasing(&self, epoch: u64, rank: u32, lease: u64) -> bool {
        let state = self.lock();
        match state.releases.get(&(epoch, rank)) {
            Some(waiting) => waiting.contains_key(&lease),
            None => false,
        }
    }

    /// Returns whether the server knows every release, and no request of a dropped reader is under way.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let state = self.lock();
        state.releases.is_empty() && state.unanswered == 0
    }

    /// Waits until [`HeldLeases::is_settled`]. Without a server that may take for ever.
    pub async fn settled(&self) {
        loop {
            let changed = self.releases_changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.is_settled() {
                return;
            }
            changed.await;
        }
    }

    /// Returns all leases as (epoch, rank, ids), with at most `ids_max` ids in each group.
    pub(super) fn renewals(&self, ids_max: usize) -> Vec<(u64, u32, Vec<u64>)> {
        let mut out = Vec::new();
        for (&(epoch, rank), leases) in &self.lock().leases {
            let ids: Vec<u64> = leases.keys().copied().collect();
            out.extend(ids.chunks(ids_max).map(|some| (epoch, rank, some.to_vec())));
        }
        out
    }

    /// Waits for leases to release. Returns those of one rank of an epoch, at most `ids_max`.
    ///
    /// Their release is under way until [`HeldLeases::release_ended`].
    pub(super) async fn next_releases(&self, ids_max: usize) -> (u64, u32, Vec<u64>) {
        loop {
            let changed = self.releases_changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some((&(epoch, rank), waiting)) = self.lock().releases.iter_mut().next() {
                let mut ids = Vec::new();
                for (&lease, is_under_way) in waiting.iter_mut().take(ids_max) {
                    *is_under_way = true;
                    ids.push(lease);
                }
                return (epoch, rank, ids);
            }
            changed.await;
        }
    }

    /// Records that a release ended: the server knows of it, or the leases expire.
    pub(super) fn release_ended(&self, epoch: u64, rank: u32, leases: &[u64]) {
        let mut state = self.lock();
        if let Some(waiting) = state.releases.get_mut(&(epoch, rank)) {
            for lease in leases {
                waiting.remove(lease);
            }
            if waiting.is_empty() {
                state.releases.remove(&(epoch, rank));
            }
        }
        drop(state);
        self.releases_changed.notify_waiters();
    }

    /// Waits until the next renewal is due, counted from this call.
    pub(super) async fn due(&self) {
        let since = Instant::now();
        loop {
            let added = self.added.notified();
            tokio::pin!(added);
            added.as_mut().enable();
            if timeout_at(since + self.renewal_interval(), added).await.is_err() {
                return;
            }
        }
    }

    /// Returns one third of the shortest lifetime, within 100 ms and [`HEARTBEAT_MAX`].
    fn renewal_interval(&self) -> Duration {
        let ttl = self.lock().leases.values().flat_map(BTreeMap::values).map(|lease| lease.ttl_ms).min();
        match ttl {
            Some(ms) => Duration::from_millis(ms / 3).clamp(Duration::from_millis(100), HEARTBEAT_MAX),
            None => HEARTBEAT_MAX,
        }
    }
}

/// Counts a request that nobody waits for any more, until it is known whether it got a lease.
#[derive(Debug)]
pub(super) struct Unanswered(Arc<HeldLeases>);

impl Unanswered {
    pub(super) fn new(held: &Arc<HeldLeases>) -> Self {
        held.lock().unanswered += 1;
        Unanswered(Arc::clone(held))
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        self.0.lock().unanswered -= 1;
        self.0.releases_changed.notify_waiters();
    }
}

/// Holds a lease while it is being received.
///
/// Dropping it releases the lease, unless [`LeaseHold::hand_out`] was called or another value receives the
/// lease now.
#[derive(Debug)]
pub(super) struct LeaseHold {
    held: Arc<HeldLeases>,
    at: (u64, u32, u64),
    ttl_ms: u64,
    /// Identifies this value as the holder. 0 if the lease was handed out before: then it stays held.
    holder: u64,
}

impl LeaseHold {
    pub(super) fn new(held: &Arc<HeldLeases>, epoch: u64, rank: u32, lease: u64, ttl_ms: u64) -> Self {
        let mut state = held.lock();
        state.holders += 1;
        let mut holder = state.holders;
        if state.keep((epoch, rank), lease) {
            let new = HeldLease { ttl_ms, holder };
            let one = state.leases.entry((epoch, rank)).or_default().entry(lease).or_insert(new);
            if one.holder == 0 {
                holder = 0;
            }
            *one = HeldLease { ttl_ms, holder };
        }
        drop(state);
        held.added.notify_waiters();
        LeaseHold { held: Arc::clone(held), at: (epoch, rank, lease), ttl_ms, holder }
    }

    /// Returns whether the lease is still held: no renewal has reported it gone, and it is not released.
    pub(super) fn is_held(&self) -> bool {
        let (epoch, rank, lease) = self.at;
        match self.held.lock().leases.get(&(epoch, rank)) {
            Some(of) => of.contains_key(&lease),
            None => false,
        }
    }

    /// Keeps the lease held after this value, because its samples are handed out.
    pub(super) fn hand_out(mut self) {
        let (epoch, rank, lease) = self.at;
        self.held.hold(epoch, rank, lease, self.ttl_ms);
        self.holder = 0;
    }
}

impl Drop for LeaseHold {
    fn drop(&mut self) {
        if self.holder == 0 {
            return;
        }
        let (epoch, rank, lease) = self.at;
        let mut state = self.held.lock();
        let holder = match state.leases.get(&(epoch, rank)) {
            Some(of) => of.get(&lease).map(|one| one.holder),
            None => None,
        };
        if holder == Some(self.holder) {
            state.release((epoch, rank), lease);
            drop(state);
            self.held.releases_changed.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests;
