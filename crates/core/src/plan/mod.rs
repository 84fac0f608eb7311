//! Plans: the multiset of samples an epoch delivers (`docs/FORMATS.md`, "Plan").
//!
//! A version's samples are numbered in the order of their first entries. A plan chooses a
//! multiset of them, the *base*; echo delivers the whole base `copies` times. Entries are
//! numbered `pass · base + i`, where `i` runs over the base by sample, then by copy. A plan
//! that is fitted to whole steps of several ranks ([`Fitted`]) leaves out the entries at the
//! last positions of the epoch's strict order (`drop`), or appends entries that repeat those
//! at its first positions (`pad`).
//!
//! I1. A plan is a value: its hash names it, and two plans with the same entries hash alike.
//! I2. Entry numbers are `0..entries()`, each delivered exactly once; [`Plan::item`] says
//!     which sample and which copy of it that is, and no two entries are the same item.

pub mod bits;
pub mod key;
pub mod permutation;
pub mod unit_map;
mod world;

pub use bits::Bits;
pub use key::{Draws, OrderKey};
pub use permutation::Permutation;
pub use unit_map::{PlanUnits, UnitMap};
pub use world::{Tail, World};

use crate::{Hash, Kind, hash::context};
use std::sync::Arc;

/// No plan has more entries, and no version more samples in a plan.
pub const ENTRIES_MAX: u64 = 1 << 31;
/// No sample is delivered more often by one pass over the base.
pub const COPIES_MAX: u32 = 1 << 20;
/// No echo delivers the base more often.
pub const ECHO_MAX: u32 = 1024;
/// No world has more ranks.
pub const RANKS_MAX: u32 = 65_536;
/// No step of all ranks together has more entries. What a last step lacks is kept in memory, pad by pad.
pub const BATCH_MAX: u32 = 1 << 20;

/// Which samples.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Base {
    /// Each sample once.
    All,
    /// `(sample, how often)`, ascending, each at least once; and where each one's entries
    /// begin, with the total at the end.
    Counts { counts: Arc<[(u32, u32)]>, starts: Arc<[u32]> },
}

/// Data echoing: the base is delivered `copies` times, copies of one entry at least `apart`
/// positions from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Echo {
    /// How often each entry of the base is delivered; 1 is no echo.
    pub copies: u32,
    /// At least this many positions lie between two copies of one entry.
    pub apart: u32,
}

/// No echo.
pub const ONCE: Echo = Echo { copies: 1, apart: 0 };

/// The multiset of samples an epoch delivers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    samples: u32,
    base: Base,
    echo: Echo,
}

/// What one entry of a plan is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Item {
    /// The sample's number in the version.
    pub sample: u32,
    /// Which of its copies; those that only fill up a last step count from [`PAD`].
    pub copy: u32,
}

/// Copies of this number and above only fill up the last step.
pub const PAD: u32 = 1 << 31;

/// Why something is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// It has no entries.
    #[error("the plan is empty")]
    Empty,
    /// It has too many.
    #[error("the plan has {0} entries; at most {ENTRIES_MAX} are possible")]
    TooLong(u64),
    /// It names a sample that the version does not have.
    #[error("the plan names sample {sample}, but the version has {samples}")]
    Unknown {
        /// The number it names.
        sample: u64,
        /// How many samples the version has.
        samples: u32,
    },
    /// A weight is negative, infinite or not a number.
    #[error("weight {weight} of sample {sample} is not a finite number of at least 0")]
    Weight {
        /// Whose weight.
        sample: u32,
        /// As text, since NaN compares with nothing.
        weight: String,
    },
    /// There are not as many weights as samples.
    #[error("{weights} weights for {samples} samples")]
    Weights {
        /// How many were given.
        weights: usize,
        /// How many samples the version has.
        samples: u32,
    },
    /// Copies that cannot be delivered, or not that far apart.
    #[error("{copies} copies at least {apart} apart do not fit {base} entries: {why}")]
    Echo {
        /// Copies of each entry.
        copies: u32,
        /// The distance asked for.
        apart: u32,
        /// Entries of one pass.
        base: u64,
        /// Which rule it breaks.
        why: &'static str,
    },
    /// One sample too often.
    #[error("sample {sample} is planned {copies} times; at most {COPIES_MAX} are possible")]
    Copies {
        /// Which.
        sample: u32,
        /// How often.
        copies: u64,
    },
    /// A step that ranks cannot share.
    #[error("a global batch of {batch} cannot be shared by {ranks} ranks: {why}")]
    World {
        /// Entries a step.
        batch: u32,
        /// Ranks.
        ranks: u32,
        /// Which rule it breaks.
        why: &'static str,
    },
}

impl PlanError {
    /// Always the caller's to mend.
    #[must_use]
    pub fn kind(&self) -> Kind {
        Kind::Invalid
    }
}

impl Plan {
    /// Every sample of a version of `samples` samples, once.
    ///
    /// # Errors
    /// [`PlanError::Empty`], [`PlanError::TooLong`].
    pub fn all(samples: u64) -> Result<Self, PlanError> {
        Ok(Plan { samples: length(samples)?, base: Base::All, echo: ONCE })
    }

    /// The samples of `chosen`, once each, however often they are named.
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

    /// `draws` entries in proportion to `weights` (one a sample), as an exact multiset chosen
    /// by `key`: each sample gets ⌊x⌋ or ⌈x⌉ copies of its expected x, and x on average.
    ///
    /// Weights become integers, `round(w / max · 2³²)`; then one random offset and systematic
    /// sampling in integer arithmetic, so that everyone gets the same multiset.
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

    /// An exact multiset: `(sample, how often)`, ascending and each at least once.
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

    /// The same base, delivered `copies` times with copies at least `apart` positions apart.
    ///
    /// # Errors
    /// [`PlanError::Echo`] when the base has fewer than `2 · apart` entries (then no order
    /// could keep them apart and still be random), or there are no or too many copies.
    pub fn echoed(self, copies: u32, apart: u32) -> Result<Self, PlanError> {
        let base = self.base_entries();
        let bad = |why| Err(PlanError::Echo { copies, apart, base, why });
        match copies {
            0 => return bad("at least one copy"),
            1 => return Ok(Plan { echo: ONCE, ..self }),
            _ => {}
        }
        if copies > ECHO_MAX {
            return bad("at most 1024 copies");
        }
        if u64::from(apart) * 2 > base {
            return bad("twice the distance is more than one pass has");
        }
        length(base * u64::from(copies))?;
        Ok(Plan { echo: Echo { copies, apart: apart.max(1) }, ..self })
    }

    /// How many samples the version has.
    #[must_use]
    pub fn samples(&self) -> u32 {
        self.samples
    }

    /// Entries of one pass over the base.
    #[must_use]
    pub fn base_entries(&self) -> u64 {
        match &self.base {
            Base::All => u64::from(self.samples),
            Base::Counts { starts, .. } => u64::from(starts[starts.len() - 1]),
        }
    }

    /// All entries.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.base_entries() * u64::from(self.echo.copies)
    }

    /// How it echoes.
    #[must_use]
    pub fn echo(&self) -> Echo {
        self.echo
    }

    /// Whether one pass delivers each sample of the version exactly once.
    #[must_use]
    pub fn is_all(&self) -> bool {
        self.base == Base::All
    }

    /// How often one pass delivers a sample.
    #[must_use]
    pub fn copies_of(&self, sample: u32) -> u32 {
        match &self.base {
            Base::All => u32::from(sample < self.samples),
            Base::Counts { counts, .. } => {
                counts.binary_search_by_key(&sample, |c| c.0).map_or(0, |i| counts[i].1)
            }
        }
    }

    /// The first base entry of a sample, if one pass delivers it.
    #[must_use]
    pub fn first_entry(&self, sample: u32) -> Option<u32> {
        match &self.base {
            Base::All => (sample < self.samples).then_some(sample),
            Base::Counts { counts, starts } => {
                counts.binary_search_by_key(&sample, |c| c.0).ok().map(|i| starts[i])
            }
        }
    }

    /// What an entry is.
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

    /// The plan's name: BLAKE3 in key-derivation mode over its canonical encoding.
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

fn length(n: u64) -> Result<u32, PlanError> {
    match u32::try_from(n) {
        Ok(0) => Err(PlanError::Empty),
        Ok(x) if n <= ENTRIES_MAX => Ok(x),
        _ => Err(PlanError::TooLong(n)),
    }
}

#[cfg(test)]
mod tests;
