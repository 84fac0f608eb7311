//! Permits that backends share, so that backends that hang leave some to the others.
//!
//! A backend may take a permit while it holds less than a fixed multiple of the *free* permits. The multiple
//! is such that one backend alone takes at most `to_one` of `all`. The next one then takes the same part of
//! what is left, and so on. A backend that holds more than its threshold is now gets no permit before it gave
//! some back. So all backends that want more than there is end with equal numbers, and a part stays free for
//! the next one.
//!
//! The rule is the dynamic threshold of A. K. Choudhury and E. L. Hahne ("Dynamic Queue Length Thresholds for
//! Shared-Memory Packet Switches", IEEE/ACM Transactions on Networking, 1998).
//!
//! ```text
//! all = 88, to_one = 66      one backend takes 66; the next ones take 17, 4 and 1 while it keeps them
//!                            when all gave some back: two have 76 together, three 80, eight 85
//! ```
//!
//! Invariants:
//! 1. A backend that holds nothing gets a permit as soon as one is free.
//! 2. One backend never takes more than `to_one`.
//! 3. The callers of one backend are served in their order. Of several backends, the one that holds least
//!    goes first.

use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use tokio::sync::oneshot;

/// The permits. `K` names a backend.
pub struct SharedPermits<K: Ord + Clone> {
    state: Mutex<State<K>>,
}

/// A permit of one backend. Dropping it gives it back.
pub struct SharedPermit<K: Ord + Clone> {
    permits: Arc<SharedPermits<K>>,
    key: K,
}

struct State<K: Ord + Clone> {
    all: usize,
    to_one: usize,
    /// The permits that all backends hold together.
    held: usize,
    backends: BTreeMap<K, Held<SharedPermit<K>>>,
}

struct Held<P> {
    n: usize,
    waiting: VecDeque<oneshot::Sender<P>>,
}

impl<P> Held<P> {
    fn drop_gone(&mut self) {
        self.waiting.retain(|sender| !sender.is_closed());
    }
}

impl<K: Ord + Clone> fmt::Debug for SharedPermits<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let State { all, to_one, held, .. } = &*self.lock();
        write!(f, "SharedPermits({held} of {all} held, {to_one} to one)")
    }
}

impl<K: Ord + Clone> fmt::Debug for SharedPermit<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedPermit(..)")
    }
}

impl<K: Ord + Clone> State<K> {
    /// Returns whether a backend that holds `n` permits may take another one.
    fn may_take(&self, n: usize) -> bool {
        let free = self.all.saturating_sub(self.held) as u128;
        let reserve = self.all.saturating_sub(self.to_one) as u128;
        // With a reserve: n < to_one / reserve * free.
        if reserve == 0 { free > 0 } else { n as u128 * reserve < self.to_one as u128 * free }
    }

    fn take(&mut self, key: &K) {
        if let Some(backend) = self.backends.get_mut(key) {
            backend.n += 1;
            self.held += 1;
        }
    }

    /// Takes a permit for the next waiting caller: that of the backend which holds least and may take one.
    fn next(&mut self) -> Option<(K, oneshot::Sender<SharedPermit<K>>)> {
        self.backends.values_mut().for_each(Held::drop_gone);
        self.backends.retain(|_, backend| backend.n > 0 || !backend.waiting.is_empty());
        let waiting = self.backends.iter().filter(|(_, b)| !b.waiting.is_empty() && self.may_take(b.n));
        let key = waiting.min_by_key(|(_, backend)| backend.n)?.0.clone();
        let sender = self.backends.get_mut(&key)?.waiting.pop_front()?;
        self.take(&key);
        Some((key, sender))
    }
}

impl<K: Ord + Clone> SharedPermits<K> {
    /// Divides `all` permits. One backend alone takes at most `to_one` of them.
    #[must_use]
    pub fn new(all: usize, to_one: usize) -> Arc<Self> {
        let state = State { all, to_one, held: 0, backends: BTreeMap::new() };
        Arc::new(SharedPermits { state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State<K>> {
        self.state.lock()
    }

    /// Changes the numbers. Backends that hold more keep what they hold.
    pub fn resize(self: &Arc<Self>, all: usize, to_one: usize) {
        let changed = {
            let mut state = self.lock();
            let before = std::mem::replace(&mut state.all, all) != all;
            std::mem::replace(&mut state.to_one, to_one) != to_one || before
        };
        if changed {
            self.serve_waiting();
        }
    }

    /// Waits until the backend may take a permit. The caller bounds the time.
    pub async fn acquire(self: &Arc<Self>, key: &K) -> SharedPermit<K> {
        loop {
            let receiver = {
                let mut state = self.lock();
                let new = || Held { n: 0, waiting: VecDeque::new() };
                let backend = state.backends.entry(key.clone()).or_insert_with(new);
                backend.drop_gone();
                let (n, waits) = (backend.n, !backend.waiting.is_empty());
                if !waits && state.may_take(n) {
                    state.take(key);
                    return self.permit(key);
                }
                let (sender, receiver) = oneshot::channel();
                if let Some(backend) = state.backends.get_mut(key) {
                    backend.waiting.push_back(sender);
                }
                receiver
            };
            // A sender is dropped unused only with all permits.
            if let Ok(permit) = receiver.await {
                return permit;
            }
        }
    }

    /// Returns how many permits a backend holds.
    #[must_use]
    pub fn held(&self, key: &K) -> usize {
        self.lock().backends.get(key).map_or(0, |backend| backend.n)
    }

    fn permit(self: &Arc<Self>, key: &K) -> SharedPermit<K> {
        SharedPermit { permits: Arc::clone(self), key: key.clone() }
    }

    fn serve_waiting(self: &Arc<Self>) {
        loop {
            let next = self.lock().next();
            let Some((key, sender)) = next else { return };
            // Without the lock: if the caller is gone, the permit is dropped here and gives itself back.
            drop(sender.send(self.permit(&key)));
        }
    }
}

impl<K: Ord + Clone> Drop for SharedPermit<K> {
    fn drop(&mut self) {
        let waits = {
            let mut state = self.permits.lock();
            state.held -= 1;
            if let Some(backend) = state.backends.get_mut(&self.key) {
                backend.n -= 1;
                if backend.n == 0 && backend.waiting.is_empty() {
                    state.backends.remove(&self.key);
                }
            }
            state.backends.values().any(|backend| !backend.waiting.is_empty())
        };
        if waits {
            self.permits.serve_waiting();
        }
    }
}

#[cfg(test)]
mod tests;
