//! Who may stay: the arms of `cache.policy`, and the equal split. Pure.

use super::DatasetId;
use std::{fmt, str::FromStr};

/// What decides residency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Policy {
    /// A no-thrash share per dataset: what is cached stays until the allocation changes, and a
    /// newcomer is refused when its dataset's share is full.
    #[default]
    Fletch,
    /// The least recently used chunk makes room for every newcomer.
    Lru,
    /// First come, first kept: everything is admitted until the disk is full, nothing is evicted.
    Pin,
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Policy::Fletch => "fletch",
            Policy::Lru => "lru",
            Policy::Pin => "pin",
        })
    }
}

/// A text that names no policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a cache policy (fletch, lru or pin): {0:?}")]
pub struct BadPolicy(pub String);

impl FromStr for Policy {
    type Err = BadPolicy;
    fn from_str(s: &str) -> Result<Self, BadPolicy> {
        let all = [Policy::Fletch, Policy::Lru, Policy::Pin];
        all.into_iter().find(|p| p.to_string() == s).ok_or_else(|| BadPolicy(s.chars().take(80).collect()))
    }
}

/// Whether a chunk would be kept if it were fetched whole now. A word, not a promise: `put` decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It would.
    Yes,
    /// It would not: read it by range.
    No,
}

/// Why a chunk was not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// Its dataset's share is full.
    Share,
    /// The tier is full and nothing may leave, or the disk is down to its floor.
    Full,
    /// It is longer than 16 MiB, or than what such a small tier can keep.
    TooLong,
    /// There are 65,535 domains already.
    Domains,
}

/// What became of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// It is kept.
    Yes,
    /// It was there already.
    Already,
    /// It is not kept.
    Refused(Refusal),
}

/// Divides `capacity` equally among datasets; what one of them does not want (its size in footprints, if
/// known) is divided among the others. The shares add up to `capacity` at most.
#[must_use]
pub fn equal_split(capacity: u64, datasets: &[(DatasetId, Option<u64>)]) -> Vec<(DatasetId, u64)> {
    let mut by_want: Vec<_> = datasets.iter().map(|&(id, want)| (want.unwrap_or(u64::MAX), id)).collect();
    by_want.sort_unstable();
    let mut left = capacity;
    let mut out = Vec::with_capacity(by_want.len());
    for (i, &(want, id)) in by_want.iter().enumerate() {
        let share = want.min(left / (by_want.len() - i) as u64);
        left -= share;
        out.push((id, share));
    }
    out.sort_unstable();
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_equal_split_wastes_nothing() {
        let d = DatasetId;
        assert_eq!(equal_split(100, &[(d(1), None), (d(2), None)]), [(d(1), 50), (d(2), 50)]);
        assert_eq!(
            equal_split(100, &[(d(1), None), (d(2), Some(10)), (d(3), Some(80))]),
            [(d(1), 45), (d(2), 10), (d(3), 45)]
        );
        assert_eq!(equal_split(100, &[]), []);
        assert_eq!(equal_split(100, &[(d(1), Some(7))]), [(d(1), 7)]);
    }

    #[test]
    fn names() {
        for p in [Policy::Fletch, Policy::Lru, Policy::Pin] {
            assert_eq!(p.to_string().parse(), Ok(p));
        }
        assert!("LRU".parse::<Policy>().is_err());
    }
}
