//! Plans: the multiset of samples that an epoch delivers (`docs/FORMATS-epochs.md`, "Plan").
//!
//! A version's samples are numbered in the order of their first entries. A plan chooses a multiset of them,
//! the *base*. Data echoing delivers the whole base `copies` times. Entries are numbered `pass · base + i`,
//! where `i` runs over the base by sample, then by copy.
//!
//! A [`World`] divides a plan in whole steps. With `drop` it leaves out the entries at the last positions of
//! the epoch's order; with `pad` it appends entries that repeat those at the first positions.
//!
//! I1. A plan is a value: its hash names it, and two plans with the same entries have the same hash.
//! I2. Entries are numbered `0..entries()`, and each is delivered exactly once. [`Plan::item`] gives an
//!     entry's sample and copy, and no two entries are the same item.

pub mod bits;
pub mod key;
pub mod packed_ints;
pub mod permutation;
pub mod unit_map;
mod world;

pub use bits::Bits;
pub use key::{Draws, OrderKey};
pub use packed_ints::{PackedInts, PackedIntsBuilder};
pub use permutation::Permutation;
pub use unit_map::{PlanUnits, UnitMap};
pub use world::{Tail, World};

use crate::{Hash, Kind, hash::context};
use std::sync::Arc;

/// The most entries of a plan, and the most samples of a version that a plan can name.
pub const ENTRIES_MAX: u64 = 1 << 31;
/// The most copies of a sample in one pass over the base.
pub const COPIES_MAX: u32 = 1 << 20;
/// The most passes over the base.
pub const ECHO_MAX: u32 = 1024;
/// The most ranks of a world.
pub const RANKS_MAX: u32 = 65_536;
/// The largest global batch, in entries. The pads of a last step are kept in memory one by one.
pub const BATCH_MAX: u32 = 1 << 20;

/// The samples of one pass.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Base {
    /// Each sample once.
    All,
    /// `(sample, copies)`, ascending, each sample at least once; and the first entry of each sample, with the
    /// total at the end.
    Counts { counts: Arc<[(u32, u32)]>, starts: Arc<[u32]> },
}

/// Data echoing: the base is delivered `copies` times, with copies of one entry at least `apart` positions
/// from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Echo {
    /// How often each entry of the base is delivered; 1 means no echoing.
    pub copies: u32,
    /// The minimum distance between two copies of one entry, in positions.
    pub apart: u32,
}

/// No echoing.
pub const ONCE: Echo = Echo { copies: 1, apart: 0 };

/// The multiset of samples that an epoch delivers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    samples: u32,
    base: Base,
    echo: Echo,
}

/// The sample and copy of a plan entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Item {
    /// The sample's number in the version.
    pub sample: u32,
    /// The number of the copy. Pads, which only fill up a last step, count from [`PAD`].
    pub copy: u32,
}

/// The number of the first pad. Copies of this number and above only fill up the last step.
pub const PAD: u32 = 1 << 31;

/// Why a plan or a world is impossible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The plan has no entries.
    #[error("the plan is empty")]
    Empty,
    /// The plan has too many entries.
    #[error("the plan has {0} entries; at most {ENTRIES_MAX} are possible")]
    TooLong(u64),
    /// The plan names a sample that the version does not have.
    #[error("the plan names sample {sample}; the version has {samples} samples, numbered from 0")]
    Unknown {
        /// The number that the plan names.
        sample: u64,
        /// How many samples the version has.
        samples: u32,
    },
    /// A weight is negative, infinite or not a number.
    #[error("the weight {weight} of sample {sample} is not a finite number of at least 0")]
    Weight {
        /// The sample.
        sample: u32,
        /// Its weight, as text: NaN would not compare equal to itself.
        weight: String,
    },
    /// The number of weights is not the number of samples.
    #[error("there are {weights} weights for {samples} samples; give one weight a sample")]
    Weights {
        /// How many weights were given.
        weights: usize,
        /// How many samples the version has.
        samples: u32,
    },
    /// The copies cannot be delivered, or not that far apart.
    #[error("{copies} copies at least {apart} apart do not fit {base} entries: {why}")]
    Echo {
        /// Copies of each entry.
        copies: u32,
        /// The requested distance.
        apart: u32,
        /// Entries of one pass.
        base: u64,
        /// The rule that is broken.
        why: &'static str,
    },
    /// One sample is planned too often.
    #[error("sample {sample} is planned {copies} times; at most {COPIES_MAX} are possible")]
    Copies {
        /// The sample.
        sample: u32,
        /// How often it is planned.
        copies: u64,
    },
    /// The ranks cannot share a step.
    #[error("a global batch of {batch} cannot be shared by {ranks} ranks: {why}")]
    World {
        /// The global batch, in entries.
        batch: u32,
        /// The number of ranks.
        ranks: u32,
        /// The rule that is broken.
        why: &'static str,
    },
}

impl PlanError {
    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> Kind {
        Kind::Invalid
    }
}

impl Plan {
    /// Returns the plan of every sample, once, of a version with `samples` samples.
    ///
    /// # Errors
    /// [`PlanError::Empty`], [`PlanError::TooLong`].
    pub fn all(samples: u64) -> Result<Self, PlanError> {
        Ok(Plan { samples: length(samples)?, base: Base::All, echo: ONCE })
    }

    /// Returns the plan of the samples in `chosen`, each once, however often it is named.
    ///
    /// # Errors
    /// [`PlanError::Unknown`] and those of [`Plan::all`].
    pub fn subset(samples: u64, chosen: impl IntoIterator<Item = u64>) -> Result<Self, PlanError> {
        let samples = length(samples)?;
        let mut v = chosen
            .into_iter()
            .map(|s| match u32::try_from(s) {
                Ok(x) if x < samples => Ok((x, 1)),
                _ => Err(PlanError::Unknown { sample: s, samples }),
            })
            .collect::<Result<Vec<_>, _>>()?;
        v.sort_unstable();
        v.dedup();
        Plan::counts(samples, v)
    }

    /// Returns the plan of `draws` entries in proportion to `weights`, one weight a sample.
    ///
    /// The key chooses an exact multiset: a sample with x expected copies gets ⌊x⌋ or ⌈x⌉, and x on average.
    /// Weights become integers, `round(w / max · 2³²)`. One random offset and systematic sampling in integer
    /// arithmetic then give every server the same multiset.
    ///
    /// # Errors
    /// [`PlanError::Weight`], [`PlanError::Weights`], [`PlanError::Copies`] and those of
    /// [`Plan::all`].
    pub fn weighted(samples: u64, weights: &[f64], draws: u64, key: &OrderKey) -> Result<Self, PlanError> {
        let samples = length(samples)?;
        length(draws)?;
        if weights.len() != samples as usize {
            return Err(PlanError::Weights { weights: weights.len(), samples });
        }
        for (sample, &w) in (0u32..).zip(weights) {
            if !w.is_finite() || w < 0.0 {
                return Err(PlanError::Weight { sample, weight: w.to_string() });
            }
        }
        let most = weights.iter().copied().fold(0.0, f64::max);
        if most == 0.0 {
            return Err(PlanError::Empty);
        }
        // Finite, non-negative and at most 2^32: the conversion is exact.
        let units: Vec<u64> = weights.iter().map(|w| (w / most * 4_294_967_296.0).round() as u64).collect();
        let total: u128 = units.iter().map(|&u| u128::from(u)).sum();
        let mut stream = key.draws("weights", 0);
        let offset = ((u128::from(stream.word()) << 64 | u128::from(stream.word())) / 2) % total;
        let (mut sum, mut before) = (0u128, 0u128);
        let mut counts = Vec::new();
        for (sample, u) in (0u32..).zip(units) {
            sum += u128::from(u);
            let upto = (offset + sum * u128::from(draws)) / total;
            let n = u64::try_from(upto - before).unwrap_or(u64::MAX);
            before = upto;
            if n > u64::from(COPIES_MAX) {
                return Err(PlanError::Copies { sample, copies: n });
            }
            if n > 0 {
                counts.push((sample, u32::try_from(n).unwrap_or(COPIES_MAX)));
            }
        }
        Plan::counts(samples, counts)
    }

    /// Returns the plan of an exact multiset: `(sample, copies)`, ascending, each sample at least once.
    fn counts(samples: u32, counts: Vec<(u32, u32)>) -> Result<Self, PlanError> {
        let mut starts = Vec::with_capacity(counts.len() + 1);
        let mut sum = 0u64;
        for &(_, n) in &counts {
            starts.push(u32::try_from(sum).unwrap_or(u32::MAX));
            sum += u64::from(n);
        }
        starts.push(length(sum)?);
        let base = if counts.len() == samples as usize && sum == u64::from(samples) {
            Base::All
        } else {
            Base::Counts { counts: counts.into(), starts: starts.into() }
        };
        Ok(Plan { samples, base, echo: ONCE })
    }

    /// Returns the plan that delivers the same base `copies` times, copies at least `apart` from each other.
    ///
    /// # Errors
    /// [`PlanError::Echo`] when `copies` is 0 or too large, or when the base has fewer than `2 · apart`
    /// entries: no order could keep copies apart and still be random.
    pub fn echoed(self, copies: u32, apart: u32) -> Result<Self, PlanError> {
        let base = self.base_entries();
        let bad = |why| Err(PlanError::Echo { copies, apart, base, why });
        match copies {
            0 => return bad("there must be at least one copy"),
            1 => return Ok(Plan { echo: ONCE, ..self }),
            _ => {}
        }
        if copies > ECHO_MAX {
            return bad("at most 1024 copies are possible");
        }
        if u64::from(apart) * 2 > base {
            return bad("one pass must have at least twice the distance in entries");
        }
        length(base * u64::from(copies))?;
        Ok(Plan { echo: Echo { copies, apart: apart.max(1) }, ..self })
    }

    /// Returns how many samples the version has.
    #[must_use]
    pub fn samples(&self) -> u32 {
        self.samples
    }

    /// Returns the number of entries of one pass.
    #[must_use]
    pub fn base_entries(&self) -> u64 {
        match &self.base {
            Base::All => u64::from(self.samples),
            Base::Counts { starts, .. } => u64::from(starts[starts.len() - 1]),
        }
    }

    /// Returns the number of entries of all passes.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.base_entries() * u64::from(self.echo.copies)
    }

    /// Returns the plan's echoing.
    #[must_use]
    pub fn echo(&self) -> Echo {
        self.echo
    }

    /// Returns whether one pass delivers each sample of the version exactly once.
    #[must_use]
    pub fn is_all(&self) -> bool {
        self.base == Base::All
    }

    /// Returns how often one pass delivers a sample.
    #[must_use]
    pub fn copies_of(&self, sample: u32) -> u32 {
        match &self.base {
            Base::All => u32::from(sample < self.samples),
            Base::Counts { counts, .. } => {
                counts.binary_search_by_key(&sample, |c| c.0).map_or(0, |i| counts[i].1)
            }
        }
    }

    /// Returns the first base entry of a sample, if one pass delivers the sample.
    #[must_use]
    pub fn first_entry(&self, sample: u32) -> Option<u32> {
        match &self.base {
            Base::All => (sample < self.samples).then_some(sample),
            Base::Counts { counts, starts } => {
                counts.binary_search_by_key(&sample, |c| c.0).ok().map(|i| starts[i])
            }
        }
    }

    /// Returns the sample and copy of an entry.
    ///
    /// # Panics
    /// When there is no such entry.
    #[must_use]
    pub fn item(&self, entry: u32) -> Item {
        let base = u32::try_from(self.base_entries()).unwrap_or(u32::MAX);
        assert!(u64::from(entry) < self.entries(), "entry {entry} of {}", self.entries());
        let (pass, i) = (entry / base, entry % base);
        match &self.base {
            Base::All => Item { sample: i, copy: pass },
            Base::Counts { counts, starts } => {
                let at = starts.partition_point(|&s| s <= i) - 1;
                Item { sample: counts[at].0, copy: pass * counts[at].1 + (i - starts[at]) }
            }
        }
    }

    /// Returns the plan's hash: BLAKE3 in key-derivation mode over its canonical encoding.
    #[must_use]
    pub fn hash(&self) -> Hash {
        let mut h = blake3::Hasher::new_derive_key(context::PLAN);
        h.update(&u64::from(self.samples).to_le_bytes());
        h.update(&self.echo.copies.to_le_bytes());
        h.update(&self.echo.apart.to_le_bytes());
        match &self.base {
            Base::All => h.update(&[0]),
            Base::Counts { counts, .. } => {
                h.update(&[1]);
                h.update(&(counts.len() as u64).to_le_bytes());
                for (sample, n) in counts.iter() {
                    h.update(&sample.to_le_bytes());
                    h.update(&n.to_le_bytes());
                }
                &mut h
            }
        };
        h.finalize().into()
    }
}

/// Checks a number of entries or samples.
fn length(n: u64) -> Result<u32, PlanError> {
    match u32::try_from(n) {
        Ok(0) => Err(PlanError::Empty),
        Ok(x) if n <= ENTRIES_MAX => Ok(x),
        _ => Err(PlanError::TooLong(n)),
    }
}

#[cfg(test)]
mod tests;
