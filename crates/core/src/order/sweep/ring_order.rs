//! The order of the ring: how far the sweep may move at once (R6), and how the ring changes (R8).

use super::SweepPolicy;
use crate::plan::bits::Ring;

impl SweepPolicy {
    /// R6: returns whether ring index `p` lies farther ahead than the sweep may move at once.
    ///
    /// Units of the reserve do not count as distance.
    pub(super) fn is_beyond_jump(&self, p: usize) -> bool {
        let n = self.ring.len();
        let enough = (self.params.jump * n as f64) as usize;
        let from = self.pointer % n;
        let gaps = if from <= p {
            self.reserve_indexes.gaps_in(from, p, enough)
        } else {
            let first = self.reserve_indexes.gaps_in(from, n, enough);
            if first > enough { first } else { first + self.reserve_indexes.gaps_in(0, p, enough - first) }
        };
        gaps > enough
    }

    /// R8: exchanges the unit just passed, at ring index `p`, with one passed a little earlier.
    pub(super) fn stir(&mut self, p: usize) {
        let n = self.ring.len();
        let reach = (self.params.stir * n as f64) as u64;
        let i = (p + n - self.draws.below(reach + 1) as usize % n) % n;
        self.swap_indexes(p, i);
    }

    /// R8: shuffles the whole ring, for a lone job that begins an epoch.
    pub(super) fn shuffle_ring(&mut self) {
        for i in (1..self.ring.len()).rev() {
            let q = self.draws.below(i as u64 + 1) as usize;
            self.swap_indexes(i, q);
        }
    }

    fn swap_indexes(&mut self, p: usize, i: usize) {
        if p == i {
            return;
        }
        self.ring.swap(p, i);
        let (a, b) = (self.ring[p] as usize, self.ring[i] as usize);
        (self.ring_index[a], self.ring_index[b]) =
            (u32::try_from(p).unwrap_or(u32::MAX), u32::try_from(i).unwrap_or(u32::MAX));
        let swap = |r: &mut Ring| {
            let (x, y) = (r.has(p), r.has(i));
            if x != y {
                r.put(p, y);
                r.put(i, x);
            }
        };
        swap(&mut self.reserve_indexes);
        self.subscribers.iter_mut().filter(|s| s.joined).for_each(|s| swap(&mut s.lacking));
    }
}
