//! Units whose samples were promised and not read yet: the SweepPolicy is done with a unit once its last sample is
//! decided, while the bytes leave a moment later. So what it drops stays until then, but never for long.
//!
//! Counts may be wrong (a stream that breaks off reads nothing): then a unit goes when its time is over, and a sample
//! that comes too late is read alone.

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant},
};

/// So long a dropped unit stays for samples of it that are still to be read; shorter while the disk is full.
pub(super) const WITHIN: Duration = Duration::from_secs(10);
pub(super) const WITHIN_FULL: Duration = Duration::from_secs(2);

pub(super) struct PendingReads {
    /// Of each unit: samples that were decided and not read.
    picks: Vec<u32>,
    /// Dropped by the SweepPolicy, and still here: since when, and in that order. What stands in the order with another time
    /// has gone since.
    kept: HashMap<u32, Instant>,
    order: VecDeque<(Instant, u32)>,
}

impl PendingReads {
    pub fn new(units: usize) -> Self {
        PendingReads { picks: vec![0; units], kept: HashMap::new(), order: VecDeque::new() }
    }

    /// A sample of the unit will be read.
    pub fn decided(&mut self, unit: u32) {
        self.picks[unit as usize] += 1;
    }

    /// A sample of the unit was read; whether the unit may go now.
    pub fn served(&mut self, unit: u32) -> bool {
        let left = &mut self.picks[unit as usize];
        *left = left.saturating_sub(1);
        *left == 0 && self.forget(unit)
    }

    /// The unit is brought anew, or still is here.
    pub fn loaded(&mut self, unit: u32) {
        self.forget(unit);
        self.picks[unit as usize] = 0;
    }

    /// The SweepPolicy drops the unit; whether it stays for a moment.
    pub fn dropped(&mut self, unit: u32, now: Instant) -> bool {
        let stays = self.is_owed(unit);
        if stays {
            self.kept.insert(unit, now);
            self.order.push_back((now, unit));
        }
        stays
    }

    /// Whether samples of the unit are still to be read.
    pub fn is_owed(&self, unit: u32) -> bool {
        self.picks[unit as usize] > 0
    }

    /// Whether the unit was dropped and is here.
    pub fn keeps(&self, unit: u32) -> bool {
        self.kept.contains_key(&unit)
    }

    /// A unit that has stayed for so long, and is forgotten.
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
        assert!(!pending_reads.dropped(0, now), "nothing is pending_reads of it");
        pending_reads.decided(1);
        pending_reads.decided(1);
        assert!(pending_reads.dropped(1, now) && pending_reads.keeps(1));
        assert!(!pending_reads.served(1) && pending_reads.keeps(1));
        assert!(pending_reads.served(1) && !pending_reads.keeps(1));
        assert!(!pending_reads.served(1), "it has gone");
        // Brought anew while it stayed: nothing of before counts.
        pending_reads.decided(2);
        assert!(pending_reads.dropped(2, now));
        pending_reads.loaded(2);
        assert!(!pending_reads.keeps(2) && !pending_reads.is_owed(2));
        pending_reads.decided(0);
        assert!(pending_reads.dropped(0, now));
        assert_eq!(pending_reads.overdue(now + long / 2, long), None);
        assert_eq!((pending_reads.overdue(now + long, long), pending_reads.keeps(0)), (Some(0), false));
        assert_eq!(pending_reads.overdue(now + long, long), None);
        // Dropped again after it was brought anew: its time begins again.
        pending_reads.decided(1);
        assert!(pending_reads.dropped(1, now));
        pending_reads.loaded(1);
        pending_reads.decided(1);
        let later = now + long / 2;
        assert!(pending_reads.dropped(1, later));
        assert_eq!(pending_reads.overdue(now + long, long), None);
        assert_eq!(pending_reads.overdue(later + long, long), Some(1));
    }
}
