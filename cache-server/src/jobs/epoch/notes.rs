//! What an epoch notes beside its leases.

use super::{Inner, Order, SETTLED_MAX, SETTLED_RANK};
use fletch_core::delivery::certificate::Shuffle;

impl Inner {
    /// Nothing is granted any more.
    pub(super) fn over(&mut self) {
        self.order = Order::Over;
        if let Some(ahead) = self.ahead.take() {
            ahead.close();
        }
    }

    pub(super) fn note_acked(&mut self, entries: &[u32]) {
        if let Some(ahead) = &self.ahead {
            ahead.served(entries);
        }
        let n = self.leases.planned().len();
        self.padded.extend(entries.iter().filter(|&&e| u64::from(e) >= n));
    }

    pub(super) fn settle(&mut self, lease: u64, rank: u32, entries: u32) {
        self.order.settled(lease);
        self.classes.remove(&lease);
        self.settled.insert(lease, (rank, entries));
        let most = SETTLED_MAX.max(SETTLED_RANK * self.leases.world().ranks as usize);
        while self.settled.len() > most {
            self.settled.pop_first();
        }
    }

    pub(super) fn widen(&mut self) {
        let ranks = self.leases.world().ranks as usize;
        let more = ranks.saturating_sub(self.shuffles.len());
        self.shuffles.extend(std::iter::repeat_with(Shuffle::default).take(more));
    }
}
