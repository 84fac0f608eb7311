//! The values of `cache.policy`, the answers to a newcomer, and the equal division of the disk. Pure.

use crate::dataset_id::DatasetId;
use std::{collections::BTreeMap, fmt, str::FromStr};

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

/// What a dataset claims of the disk, in footprints. `None` stands for no bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// The dataset.
    pub dataset: DatasetId,
    /// What its reads asked for so far. It competes with the wants of the other datasets.
    pub want: Option<u64>,
    /// The most that it can use. It takes that much where the others leave it.
    pub most: Option<u64>,
}

/// Divides `capacity` equally among the wants, and what they leave equally up to what each dataset can use.
///
/// The shares add up to at most `capacity`.
#[must_use]
pub fn split_by_claims(capacity: u64, claims: &[Claim]) -> Vec<(DatasetId, u64)> {
    let bounded = |c: &Claim| match (c.want, c.most) {
        (Some(want), Some(most)) => Some(want.min(most)),
        (want, most) => want.or(most),
    };
    let wants: Vec<_> = claims.iter().map(|c| (c.dataset, bounded(c))).collect();
    let mut shares: BTreeMap<DatasetId, u64> = equal_split(capacity, &wants).into_iter().collect();
    let left = capacity - shares.values().sum::<u64>();
    let has = |c: &Claim| shares.get(&c.dataset).copied().unwrap_or(0);
    let rest: Vec<_> = claims.iter().map(|c| (c.dataset, c.most.map(|m| m.saturating_sub(has(c))))).collect();
    for (dataset, more) in equal_split(left, &rest) {
        *shares.entry(dataset).or_default() += more;
    }
    shares.into_iter().collect()
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
    fn wants_compete_and_what_they_leave_goes_to_those_who_can_use_it() {
        let claim = |id, want, most| Claim { dataset: DatasetId(id), want, most };
        let d = DatasetId;
        // A plain reader that asked for little beside a sweep that can use everything.
        let beside = [claim(1, Some(2), Some(500)), claim(2, None, Some(400))];
        assert_eq!(split_by_claims(100, &beside), [(d(1), 2), (d(2), 98)]);
        // Alone it takes what is free, although it asked for nothing yet.
        assert_eq!(split_by_claims(100, &[claim(1, Some(0), Some(500))]), [(d(1), 100)]);
        assert_eq!(split_by_claims(100, &[claim(1, Some(0), Some(30))]), [(d(1), 30)]);
        // A sweep that needs less than its part leaves the rest.
        let small = [claim(1, Some(2), Some(500)), claim(2, None, Some(40))];
        assert_eq!(split_by_claims(100, &small), [(d(1), 60), (d(2), 40)]);
        let two = [claim(1, Some(200), Some(500)), claim(2, Some(10), None)];
        assert_eq!(split_by_claims(100, &two), [(d(1), 90), (d(2), 10)]);
    }

    #[test]
    fn names() {
        for p in [Policy::Fletch, Policy::Lru, Policy::Pin] {
            assert_eq!(p.to_string().parse(), Ok(p));
        }
        assert!("LRU".parse::<Policy>().is_err());
    }
}
