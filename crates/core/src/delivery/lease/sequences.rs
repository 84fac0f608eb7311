//! The latest requests of one worker: which lease each of them got.
//!
//! A worker may have several requests under way. If a stream breaks, the worker sends its request again,
//! although it got leases for later ones meanwhile.
//!
//! 1. A request that got a lease gets no second one, unless the first lease ended unacknowledged.
//! 2. A number below the latest one that got no lease is too old: it is a late copy of a request, from a
//!    worker that went on or from its predecessor.

use std::collections::BTreeMap;

/// How many requests of a worker are remembered: its latest ones that got a lease.
///
/// A worker that has at most this many leases under way can ask for each of them again.
pub const SEQUENCES_MAX: usize = 8;

/// What is known of a sequence number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Known {
    /// The number is higher than every number that got a lease.
    New,
    /// The request got this lease, which is live or acknowledged in full.
    Granted {
        /// The lease.
        lease: u64,
        /// The worker's latest number.
        last: u64,
    },
    /// The request got a lease that ended before it was acknowledged in full.
    Ended,
    /// The number is below the latest one, and no lease of it is remembered.
    TooOld {
        /// The worker's latest number.
        last: u64,
    },
}

/// The latest requests of a worker that got a lease.
#[derive(Debug, Clone, Default)]
pub(super) struct Sequences {
    /// By sequence number: the lease; `None` if it ended before it was acknowledged in full.
    leases: BTreeMap<u64, Option<u64>>,
}

impl Sequences {
    /// Returns what is known of a sequence number.
    pub(super) fn known(&self, sequence: u64) -> Known {
        let Some((&last, _)) = self.leases.last_key_value() else { return Known::New };
        match self.leases.get(&sequence) {
            Some(&Some(lease)) => Known::Granted { lease, last },
            Some(None) => Known::Ended,
            None if sequence < last => Known::TooOld { last },
            None => Known::New,
        }
    }

    /// Records that a request got a lease. Forgets the oldest request beyond [`SEQUENCES_MAX`].
    pub(super) fn granted(&mut self, sequence: u64, lease: u64) {
        self.leases.insert(sequence, Some(lease));
        while self.leases.len() > SEQUENCES_MAX {
            self.leases.pop_first();
        }
    }

    /// Records that a lease ended with entries unacknowledged.
    pub(super) fn ended(&mut self, sequence: u64, lease: u64) {
        if let Some(of) = self.leases.get_mut(&sequence)
            && *of == Some(lease)
        {
            *of = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_requests_are_known_and_older_ones_are_too_old() {
        let mut of = Sequences::default();
        assert_eq!(of.known(0), Known::New);
        // Numbers may have gaps: a request without a lease has a number, too.
        let numbers: Vec<u64> = (1..=12).map(|i| i * 10).collect();
        for &n in &numbers {
            assert_eq!(of.known(n), Known::New);
            of.granted(n, n + 1);
        }
        let last = 120;
        let (forgotten, kept) = numbers.split_at(numbers.len() - SEQUENCES_MAX);
        assert!(kept.iter().all(|&n| of.known(n) == Known::Granted { lease: n + 1, last }));
        assert!(forgotten.iter().all(|&n| of.known(n) == Known::TooOld { last }));
        assert_eq!(of.known(115), Known::TooOld { last }, "it never got a lease");
        assert_eq!(of.known(121), Known::New);
        // A lease that ended may be granted anew, and an end of another lease changes nothing.
        of.ended(100, 7);
        assert_eq!(of.known(100), Known::Granted { lease: 101, last });
        of.ended(100, 101);
        of.ended(10, 11);
        assert_eq!((of.known(100), of.known(10)), (Known::Ended, Known::TooOld { last }));
        of.granted(100, 200);
        assert_eq!(of.known(100), Known::Granted { lease: 200, last });
        assert_eq!(of.leases.len(), SEQUENCES_MAX);
    }
}
