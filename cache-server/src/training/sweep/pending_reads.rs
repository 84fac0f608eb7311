//! Pending reads: samples that were granted from a unit and not read yet.
//!
//! The policy is done with a unit once it has picked the unit's last sample; the bytes leave the server a
//! moment later. So an evicted unit stays until its pending reads have ended, and for a limited time at most
//! (`docs/adr/0041-keep-evicted-units-until-read.md`).
//!
//! The counts may be wrong: a stream that breaks off reads nothing. Then the time limit ends the unit's stay,
//! and a sample that comes later is read directly.

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant},
};

/// How long an evicted unit stays for its pending reads; shorter while the disk is full.
pub(super) const WITHIN: Duration = Duration::from_secs(10);
pub(super) const WITHIN_FULL: Duration = Duration::from_secs(2);

pub(super) struct PendingReads {
    /// By unit: samples that were picked and not read.
    picks: Vec<u32>,
    /// Evicted units that stay, and since when; `order` has them by time. An entry of `order` whose time
    /// differs from the one in `kept` is void.
    kept: HashMap<u32, Instant>,
    order: VecDeque<(Instant, u32)>,
}

impl PendingReads {
    pub fn new(units: usize) -> Self {
        PendingReads { picks: vec![0; units], kept: HashMap::new(), order: VecDeque::new() }
    }

    /// Adds a pending read of the unit.
    pub fn add(&mut self, unit: u32) {
        self.picks[unit as usize] += 1;
    }

    /// Ends one pending read; returns whether an evicted unit may leave now.
    pub fn finish(&mut self, unit: u32) -> bool {
        let left = &mut self.picks[unit as usize];
        *left = left.saturating_sub(1);
        *left == 0 && self.forget(unit)
    }

    /// Forgets the pending reads of a unit that is fetched anew or stays resident.
    pub fn reset(&mut self, unit: u32) {
        self.forget(unit);
        self.picks[unit as usize] = 0;
    }

    /// Notes that the policy evicts the unit; returns whether the unit stays for a moment.
    pub fn on_evict(&mut self, unit: u32, now: Instant) -> bool {
        let stays = self.has_reads(unit);
        if stays {
            self.kept.insert(unit, now);
            self.order.push_back((now, unit));
        }
        stays
    }

    /// Returns whether the unit has pending reads.
    pub fn has_reads(&self, unit: u32) -> bool {
        self.picks[unit as usize] > 0
    }

    /// Returns whether the unit was evicted and stays for its pending reads.
    pub fn is_kept(&self, unit: u32) -> bool {
        self.kept.contains_key(&unit)
    }

    /// Removes and returns a unit that has stayed for longer than `within`.
    pub fn overdue(&mut self, now: Instant, within: Duration) -> Option<u32> {
        while let Some(&(since, unit)) = self.order.front() {
            let stays = self.kept.get(&unit) == Some(&since);
            if stays && now.saturating_duration_since(since) < within {
                return None;
            }
            self.order.pop_front();
            if stays {
                self.kept.remove(&unit);
                self.picks[unit as usize] = 0;
                return Some(unit);
            }
        }
        None
    }

    fn forget(&mut self, unit: u32) -> bool {
        self.kept.remove(&unit).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_stays_until_its_last_sample_was_read_or_its_time_is_over() {
        let (now, long) = (Instant::now(), Duration::from_secs(2));
        let mut pending_reads = PendingReads::new(3);
        assert!(!pending_reads.on_evict(0, now), "nothing is pending_reads of it");
        pending_reads.add(1);
        pending_reads.add(1);
        assert!(pending_reads.on_evict(1, now) && pending_reads.is_kept(1));
        assert!(!pending_reads.finish(1) && pending_reads.is_kept(1));
        assert!(pending_reads.finish(1) && !pending_reads.is_kept(1));
        assert!(!pending_reads.finish(1), "it has gone");
        // Brought anew while it stayed: nothing of before counts.
        pending_reads.add(2);
        assert!(pending_reads.on_evict(2, now));
        pending_reads.reset(2);
        assert!(!pending_reads.is_kept(2) && !pending_reads.has_reads(2));
        pending_reads.add(0);
        assert!(pending_reads.on_evict(0, now));
        assert_eq!(pending_reads.overdue(now + long / 2, long), None);
        assert_eq!((pending_reads.overdue(now + long, long), pending_reads.is_kept(0)), (Some(0), false));
        assert_eq!(pending_reads.overdue(now + long, long), None);
        // Dropped again after it was brought anew: its time begins again.
        pending_reads.add(1);
        assert!(pending_reads.on_evict(1, now));
        pending_reads.reset(1);
        pending_reads.add(1);
        let later = now + long / 2;
        assert!(pending_reads.on_evict(1, later));
        assert_eq!(pending_reads.overdue(now + long, long), None);
        assert_eq!(pending_reads.overdue(later + long, long), Some(1));
    }
}
