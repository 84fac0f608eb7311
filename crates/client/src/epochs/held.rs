//! The leases that this process must renew: being received, or handed out and not yet released.
//!
//! Holds ids and lifetimes, and says when the next renewal is due. Sends no request.
//!
//! 1. A held lease was handed out whole, or a live [`LeaseHold`] is receiving it.
//! 2. A renewal is due one third of the shortest lifetime after the last renewal of all leases. A lease that
//!    is added in between can bring it forward, never postpone it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

/// The longest time between two renewals.
const HEARTBEAT_MAX: Duration = Duration::from_secs(10);

/// The lifetime in milliseconds of each lease, by epoch and rank.
type Leases = BTreeMap<(u64, u32), BTreeMap<u64, u64>>;

/// The leases that this process holds, by epoch and rank.
#[derive(Debug, Default)]
pub struct HeldLeases {
    leases: Mutex<Leases>,
    /// Notified when a lease is added.
    added: Notify,
}

impl HeldLeases {
    fn lock(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a lease that lives for `ttl_ms` milliseconds without a renewal.
    ///
    /// The reader calls this for every batch that it hands out. A process that gets a batch from another
    /// process calls it itself.
    pub fn hold(&self, epoch: u64, rank: u32, lease: u64, ttl_ms: u64) {
        self.insert(epoch, rank, lease, ttl_ms);
    }

    /// Adds a lease. Returns whether it was not held before.
    fn insert(&self, epoch: u64, rank: u32, lease: u64, ttl_ms: u64) -> bool {
        let new = self.lock().entry((epoch, rank)).or_default().insert(lease, ttl_ms).is_none();
        self.added.notify_waiters();
        new
    }

    /// Removes a lease, after it was acknowledged or when its samples will not be used.
    pub fn release(&self, epoch: u64, rank: u32, lease: u64) {
        let mut all = self.lock();
        if let Some(of) = all.get_mut(&(epoch, rank)) {
            of.remove(&lease);
            if of.is_empty() {
                all.remove(&(epoch, rank));
            }
        }
    }

    /// Returns the number of held leases.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().values().map(BTreeMap::len).sum()
    }

    /// Returns whether no lease is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns all leases as (epoch, rank, ids), with at most `ids_max` ids in each group.
    pub(super) fn renewals(&self, ids_max: usize) -> Vec<(u64, u32, Vec<u64>)> {
        let mut out = Vec::new();
        for (&(epoch, rank), leases) in self.lock().iter() {
            let ids: Vec<u64> = leases.keys().copied().collect();
            out.extend(ids.chunks(ids_max).map(|some| (epoch, rank, some.to_vec())));
        }
        out
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
        let ttl = self.lock().values().flat_map(BTreeMap::values).min().copied();
        ttl.map_or(HEARTBEAT_MAX, |ms| Duration::from_millis(ms / 3))
            .clamp(Duration::from_millis(100), HEARTBEAT_MAX)
    }
}

/// Holds a lease while it is being received.
///
/// Dropping it releases the lease unless [`LeaseHold::hand_out`] was called.
#[derive(Debug)]
pub(super) struct LeaseHold {
    held: Arc<HeldLeases>,
    at: (u64, u32, u64),
    ttl_ms: u64,
    /// Whether this value added the lease. A lease that was held before stays held.
    owns: bool,
}

impl LeaseHold {
    pub(super) fn new(held: &Arc<HeldLeases>, epoch: u64, rank: u32, lease: u64, ttl_ms: u64) -> Self {
        let owns = held.insert(epoch, rank, lease, ttl_ms);
        LeaseHold { held: Arc::clone(held), at: (epoch, rank, lease), ttl_ms, owns }
    }

    /// Returns whether the lease is still held: no renewal has reported it gone.
    pub(super) fn is_held(&self) -> bool {
        let (epoch, rank, lease) = self.at;
        self.held.lock().get(&(epoch, rank)).is_some_and(|of| of.contains_key(&lease))
    }

    /// Keeps the lease held after this value, because its samples are handed out.
    pub(super) fn hand_out(mut self) {
        let (epoch, rank, lease) = self.at;
        self.held.insert(epoch, rank, lease, self.ttl_ms);
        self.owns = false;
    }
}

impl Drop for LeaseHold {
    fn drop(&mut self) {
        if self.owns {
            let (epoch, rank, lease) = self.at;
            self.held.release(epoch, rank, lease);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_that_is_not_handed_out_is_not_held() {
        let held = Arc::new(HeldLeases::default());
        drop(LeaseHold::new(&held, 0, 1, 7, 100));
        assert!(held.is_empty());
        LeaseHold::new(&held, 0, 1, 7, 100).hand_out();
        assert_eq!(held.len(), 1);
        // The lease was handed out. A second request for it that fails does not release it.
        drop(LeaseHold::new(&held, 0, 1, 7, 100));
        assert_eq!(held.len(), 1);
        held.release(0, 1, 7);
        assert!(held.is_empty());
    }

    #[test]
    fn renewals_fit_their_requests() {
        let held = HeldLeases::default();
        (0..10).for_each(|lease| held.hold(0, 0, lease, 100));
        held.hold(0, 1, 3, 100);
        held.hold(5, 0, 3, 100);
        let renewals = held.renewals(4);
        assert!(renewals.iter().all(|c| c.2.len() <= 4));
        let mut all: Vec<_> = renewals.iter().flat_map(|c| c.2.iter().map(|&l| (c.0, c.1, l))).collect();
        all.sort_unstable();
        let mut want: Vec<_> = (0..10).map(|l| (0, 0, l)).chain([(0, 1, 3), (5, 0, 3)]).collect();
        want.sort_unstable();
        assert_eq!(all, want);
    }

    /// A lease that lives for 900 ms is renewed after 300 ms.
    ///
    /// With no lease held, the longest interval applies.
    #[tokio::test(start_paused = true)]
    async fn the_first_lease_is_renewed_in_time() {
        let held = HeldLeases::default();
        let began = Instant::now();
        let ((), ()) = tokio::join!(held.due(), async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            held.hold(0, 0, 1, 900);
        });
        assert_eq!(began.elapsed().as_millis() / 10, 30);
        held.release(0, 0, 1);
        let began = Instant::now();
        held.due().await;
        assert!(began.elapsed() >= HEARTBEAT_MAX);
    }
}
