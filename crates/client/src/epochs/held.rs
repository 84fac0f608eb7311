//! Leases that are held: received, and neither acknowledged nor given up.
//!
//! It keeps ids and their lives, and says when they are to be renewed; it asks nobody.
//!
//! 1. What is held was handed out whole, or is being received by somebody who lives: [`Hold`].
//! 2. A lease is due a third of the shortest life after the last renewal of all, however late it came to be held.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

/// The longest between two heartbeats.
const HEARTBEAT_MAX: Duration = Duration::from_secs(10);

type Leases = BTreeMap<(u64, u32), BTreeMap<u64, u64>>;

/// Leases that were received and not yet acknowledged, by epoch and rank.
#[derive(Debug, Default)]
pub struct Held {
    leases: Mutex<Leases>,
    more: Notify,
}

impl Held {
    fn lock(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A lease is held. Called for every batch that is handed out; a process that was handed a batch by another calls it
    /// itself.
    pub fn hold(&self, epoch: u64, rank: u32, lease: u64, ttl_ms: u64) {
        self.insert(epoch, rank, lease, ttl_ms);
    }

    /// Whether it was not held before.
    fn insert(&self, epoch: u64, rank: u32, lease: u64, ttl_ms: u64) -> bool {
        let new = self.lock().entry((epoch, rank)).or_default().insert(lease, ttl_ms).is_none();
        self.more.notify_waiters();
        new
    }

    /// A lease is not held any more: it was acknowledged, or given up.
    pub fn drop_lease(&self, epoch: u64, rank: u32, lease: u64) {
        let mut all = self.lock();
        if let Some(of) = all.get_mut(&(epoch, rank)) {
            of.remove(&lease);
            if of.is_empty() {
                all.remove(&(epoch, rank));
            }
        }
    }

    /// How many leases are held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().values().map(BTreeMap::len).sum()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of them, at most `most` together.
    pub(super) fn chunks(&self, most: usize) -> Vec<(u64, u32, Vec<u64>)> {
        let mut out = Vec::new();
        for (&(epoch, rank), leases) in self.lock().iter() {
            let ids: Vec<u64> = leases.keys().copied().collect();
            out.extend(ids.chunks(most).map(|some| (epoch, rank, some.to_vec())));
        }
        out
    }

    /// Waits until what is held is to be renewed, counted from now. A lease that comes to be held meanwhile may be
    /// due earlier than those before it.
    pub(super) async fn due(&self) {
        let since = Instant::now();
        loop {
            let more = self.more.notified();
            tokio::pin!(more);
            more.as_mut().enable();
            if timeout_at(since + self.pause(), more).await.is_err() {
                return;
            }
        }
    }

    /// A third of the shortest life.
    fn pause(&self) -> Duration {
        let ttl = self.lock().values().flat_map(BTreeMap::values).min().copied();
        ttl.map_or(HEARTBEAT_MAX, |ms| Duration::from_millis(ms / 3))
            .clamp(Duration::from_millis(100), HEARTBEAT_MAX)
    }
}

/// A lease on its way: held while this lives, and from then on only if it was [`Hold::keep`]t.
#[derive(Debug)]
pub(super) struct Hold {
    held: Arc<Held>,
    at: (u64, u32, u64),
    ttl_ms: u64,
    /// One that somebody else holds stays held.
    mine: bool,
}

impl Hold {
    pub(super) fn new(held: &Arc<Held>, epoch: u64, rank: u32, lease: u64, ttl_ms: u64) -> Self {
        let mine = held.insert(epoch, rank, lease, ttl_ms);
        Hold { held: Arc::clone(held), at: (epoch, rank, lease), ttl_ms, mine }
    }

    /// Whether nobody has heard that the lease is gone.
    pub(super) fn lives(&self) -> bool {
        let (epoch, rank, lease) = self.at;
        self.held.lock().get(&(epoch, rank)).is_some_and(|of| of.contains_key(&lease))
    }

    /// It is handed out.
    pub(super) fn keep(mut self) {
        let (epoch, rank, lease) = self.at;
        self.held.insert(epoch, rank, lease, self.ttl_ms);
        self.mine = false;
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.mine {
            let (epoch, rank, lease) = self.at;
            self.held.drop_lease(epoch, rank, lease);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_handed_out_is_not_held() {
        let held = Arc::new(Held::default());
        drop(Hold::new(&held, 0, 1, 7, 100));
        assert!(held.is_empty());
        Hold::new(&held, 0, 1, 7, 100).keep();
        assert_eq!(held.len(), 1);
        // Asked for again by somebody who then fails: it was handed out before.
        drop(Hold::new(&held, 0, 1, 7, 100));
        assert_eq!(held.len(), 1);
        held.drop_lease(0, 1, 7);
        assert!(held.is_empty());
    }

    #[test]
    fn renewals_fit_their_requests() {
        let held = Held::default();
        (0..10).for_each(|lease| held.hold(0, 0, lease, 100));
        held.hold(0, 1, 3, 100);
        held.hold(5, 0, 3, 100);
        let chunks = held.chunks(4);
        assert!(chunks.iter().all(|c| c.2.len() <= 4));
        let mut all: Vec<_> = chunks.iter().flat_map(|c| c.2.iter().map(|&l| (c.0, c.1, l))).collect();
        all.sort_unstable();
        let mut want: Vec<_> = (0..10).map(|l| (0, 0, l)).chain([(0, 1, 3), (5, 0, 3)]).collect();
        want.sort_unstable();
        assert_eq!(all, want);
    }

    /// With nothing held there is no hurry; a lease that lives for a second is renewed before that.
    #[tokio::test(start_paused = true)]
    async fn the_first_lease_is_renewed_in_time() {
        let held = Held::default();
        let began = Instant::now();
        let ((), ()) = tokio::join!(held.due(), async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            held.hold(0, 0, 1, 900);
        });
        assert_eq!(began.elapsed().as_millis() / 10, 30);
        held.drop_lease(0, 0, 1);
        let began = Instant::now();
        held.due().await;
        assert!(began.elapsed() >= HEARTBEAT_MAX);
    }
}
