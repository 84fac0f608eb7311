//! The values of `cache.policy`, the answers to a newcomer, and the equal division of the disk. Pure.

use crate::dataset_id::DatasetId;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    str::FromStr,
};

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

/// The datasets of the disk that share chunks: a dataset of plain readers, and the sweeps over it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// The dataset of the plain readers.
    pub plain: DatasetId,
    /// The most that all of them can use together, in footprints: each chunk counts once. `None` stands for
    /// no bound.
    pub most: Option<u64>,
}

/// Which datasets share chunks, and how many bytes all chunks of each pool need.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pools {
    /// Sweeps with the dataset of the plain readers whose chunks they share.
    pub sweeps: Vec<(DatasetId, DatasetId)>,
    /// The datasets of plain readers, with the footprints of all chunks of their pools.
    pub most: Vec<(DatasetId, u64)>,
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
    /// The datasets with which it shares chunks.
    pub pool: Pool,
}

impl Claim {
    /// Returns the claim of a dataset that shares chunks with no other.
    #[must_use]
    pub fn alone(dataset: DatasetId, want: Option<u64>, most: Option<u64>) -> Self {
        Claim { dataset, want, most, pool: Pool { plain: dataset, most } }
    }
}

/// Divides `capacity` equally among the wants, and what they leave equally up to what each dataset can use.
///
/// The shares add up to at most `capacity`, and those of each pool to at most what the pool can use.
#[must_use]
pub fn split_by_claims(capacity: u64, claims: &[Claim]) -> Vec<(DatasetId, u64)> {
    let mut claims = claims.to_vec();
    // Each round but the last bounds a pool for good.
    let mut bounded: BTreeSet<DatasetId> = BTreeSet::new();
    loop {
        let shares = split_without_pools(capacity, &claims);
        let mut sums: BTreeMap<DatasetId, u64> = BTreeMap::new();
        for claim in &claims {
            let share = shares.get(&claim.dataset).copied().unwrap_or(0);
            let sum = sums.entry(claim.pool.plain).or_default();
            *sum = sum.saturating_add(share);
        }
        let over = claims.iter().find_map(|c| {
            let (sum, most) = (*sums.get(&c.pool.plain)?, c.pool.most?);
            (sum > most && !bounded.contains(&c.pool.plain)).then_some((c.pool.plain, sum, most))
        });
        let Some((pool, sum, most)) = over else { return shares.into_iter().collect() };
        bounded.insert(pool);
        let mut left = most;
        for claim in claims.iter_mut().filter(|c| c.pool.plain == pool) {
            let share = shares.get(&claim.dataset).copied().unwrap_or(0);
            // Rounded up, so that nothing is lost; the last one gets what is left.
            let part = (u128::from(share) * u128::from(most)).div_ceil(u128::from(sum.max(1)));
            let part = u64::try_from(part).unwrap_or(u64::MAX).min(left);
            left -= part;
            (claim.want, claim.most) = (Some(part), Some(part));
        }
    }
}

/// Gives each pool that has room for all of its chunks to its sweeps first. Pure.
///
/// The parts of a pool add up to the same bytes. A sweep that has room for every unit evicts nothing, and
/// plain readers find its chunks.
#[must_use]
pub fn sweeps_first(mut shares: Vec<(DatasetId, u64)>, claims: &[Claim]) -> Vec<(DatasetId, u64)> {
    let of: BTreeMap<DatasetId, &Claim> = claims.iter().map(|c| (c.dataset, c)).collect();
    let pools: BTreeSet<DatasetId> = claims.iter().map(|c| c.pool.plain).collect();
    for pool in pools {
        let is_member = |id: &DatasetId| of.get(id).is_some_and(|c| c.pool.plain == pool);
        let mut left: u64 = shares.iter().filter(|(id, _)| is_member(id)).map(|(_, share)| *share).sum();
        let most = claims.iter().find(|c| c.pool.plain == pool).and_then(|c| c.pool.most);
        if most.is_none_or(|most| left < most) {
            continue;
        }
        let mut members: Vec<&mut (DatasetId, u64)> =
            shares.iter_mut().filter(|(id, _)| is_member(id)).collect();
        members.sort_by_key(|(id, _)| *id == pool);
        for (id, share) in members {
            let most = of.get(id).and_then(|c| c.most).unwrap_or(u64::MAX);
            *share = if *id == pool { left } else { most.min(left) };
            left -= *share;
        }
    }
    shares
}

/// Divides as [`split_by_claims`], whatever pools can use.
fn split_without_pools(capacity: u64, claims: &[Claim]) -> BTreeMap<DatasetId, u64> {
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
    shares
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
        let claim = |id, want, most| Claim::alone(DatasetId(id), want, most);
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
    fn a_pool_gets_no_more_than_its_chunks_need_and_the_rest_is_for_others() {
        let pool = |most| Pool { plain: DatasetId(1), most: Some(most) };
        let d = DatasetId;
        let claims = |most: u64| {
            [
                Claim { dataset: d(1), want: Some(most), most: Some(most), pool: pool(most) },
                Claim { dataset: d(2), want: Some(most), most: Some(most), pool: pool(most) },
                Claim::alone(d(3), Some(500), Some(500)),
            ]
        };
        // Two thirds of the disk are more than the dataset has.
        assert_eq!(split_by_claims(90, &claims(40)), [(d(1), 20), (d(2), 20), (d(3), 50)]);
        let shares = split_by_claims(90, &claims(40));
        assert_eq!(sweeps_first(shares, &claims(40)), [(d(1), 0), (d(2), 40), (d(3), 50)]);
        // The dataset does not fit.
        let shares = split_by_claims(90, &claims(70));
        assert_eq!(shares, [(d(1), 30), (d(2), 30), (d(3), 30)]);
        assert_eq!(sweeps_first(shares.clone(), &claims(70)), shares);
        let odd = split_by_claims(90, &claims(41));
        assert_eq!(odd, [(d(1), 21), (d(2), 20), (d(3), 49)]);
    }

    #[test]
    fn names() {
        for p in [Policy::Fletch, Policy::Lru, Policy::Pin] {
            assert_eq!(p.to_string().parse(), Ok(p));
        }
        assert!("LRU".parse::<Policy>().is_err());
    }
}
