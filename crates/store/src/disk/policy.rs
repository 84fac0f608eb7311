//! The values of `cache.policy`, the answers to a newcomer, and the equal division of the disk. Pure.

use crate::dataset_id::DatasetId;
use std::{fmt, str::FromStr};

/// The policy that decides which chunks stay on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Policy {
    /// Each dataset has a share, and its chunks stay until the shares change.
    ///
    /// A newcomer is refused when the share is full, so that nothing thrashes.
    #[default]
    Fletch,
    /// Every newcomer is kept, and the least recently used chunks leave.
    Lru,
    /// Newcomers are kept until the disk is full, and nothing is evicted.
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

/// A text that is not the name of a policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a cache policy; use fletch, lru or pin")]
pub struct BadPolicy(pub String);

impl FromStr for Policy {
    type Err = BadPolicy;
    fn from_str(s: &str) -> Result<Self, BadPolicy> {
        let all = [Policy::Fletch, Policy::Lru, Policy::Pin];
        all.into_iter().find(|p| p.to_string() == s).ok_or_else(|| BadPolicy(s.chars().take(80).collect()))
    }
}

/// Whether the tier would keep a chunk now. `put` decides later and may differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// The tier would keep it.
    Yes,
    /// The tier would not keep it: the caller should read only the range that it needs.
    No,
}

/// Why the tier did not keep a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The share of its dataset is full.
    Share,
    /// The tier is full and the policy has no victim, or the file system is at its floor.
    Full,
    /// The chunk is longer than 16 MiB, or too long for a tier of this size.
    TooLong,
    /// The tier has 65,535 domains already.
    Domains,
}

/// The result of `put`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// The tier keeps the chunk.
    Yes,
    /// The tier had the chunk already.
    Already,
    /// The tier does not keep the chunk.
    Refused(Refusal),
}

/// Divides `capacity` equally among datasets, each up to the footprints it can use, if that is known.
///
/// What a dataset cannot use is divided among the others. The shares add up to at most `capacity`.
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
