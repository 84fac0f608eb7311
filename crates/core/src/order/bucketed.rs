//! The bucketed order: coordinated reads (`docs/FORMATS-epochs.md`, "Bucketed order").
//!
//! In each step all ranks get entries of one bucket: samples of similar length, or one group. So no rank pads
//! its batch to the longest sample of another rank.
//!
//! The order follows the coordinated reads of tf.data service (Audibert et al., SoCC 2023). Like the strict
//! order it is a function of its key, and known in advance.
//!
//! I1. All entries of a step come from one bucket, whatever the number of ranks.
//! I2. Each entry of the plan is in exactly one step. The entries that do not fill the last step of their
//!     bucket are left out (`drop`), completed by repeats from that bucket (`pad`), or make a short step
//!     (`keep`, one rank).
//! I3. Every rank has the same number of steps, and the same number of entries in each step.
//! I4. A step is the same set for every number of ranks that divides its batch.
//! I5. Entries that are drawn at once come from one step: no lease mixes steps, however many entries it asks
//!     for.

use super::rank_cursors::RankCursors;
use crate::{Hash, Kind};
use crate::{
    hash::context,
    plan::{Item, PAD, Plan, PlanError, Tail, World, bits::Bits, key::OrderKey, permutation::Permutation},
};
use std::sync::Arc;

/// The most buckets of a plan.
pub const BUCKETS_MAX: u32 = 65_536;

/// The bucket of each sample of a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buckets {
    of: Arc<[u32]>,
    count: u32,
}

/// Why an epoch cannot be bucketed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BadBuckets {
    /// The number of buckets is not the number of samples.
    #[error("{buckets} samples have a bucket, and the version has {samples} samples")]
    Samples {
        /// How many samples have a bucket.
        buckets: usize,
        /// How many samples the version has.
        samples: u32,
    },
    /// A bucket's number is too large.
    #[error("bucket {0} is too large a number; bucket numbers are below {BUCKETS_MAX}")]
    TooMany(u32),
    /// The bounds of length buckets do not ascend.
    #[error("the bounds of length buckets do not ascend")]
    Bounds,
    /// The plan echoes: buckets cannot keep the distance of copies.
    #[error("a plan with data echoing cannot be bucketed")]
    Echo,
    /// The world is impossible.
    #[error(transparent)]
    World(#[from] PlanError),
}

impl BadBuckets {
    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> Kind {
        Kind::Invalid
    }
}

impl Buckets {
    /// Returns buckets by number: `of[s]` is the bucket of sample s. Numbers may have gaps.
    ///
    /// # Errors
    /// [`BadBuckets::TooMany`].
    pub fn new(of: Vec<u32>) -> Result<Self, BadBuckets> {
        let most = of.iter().copied().max().unwrap_or(0);
        if most >= BUCKETS_MAX {
            return Err(BadBuckets::TooMany(most));
        }
        Ok(Buckets { of: of.into(), count: most + 1 })
    }

    /// Returns buckets by length: below the first bound, from it to below the next, …, from the last bound
    /// on.
    ///
    /// # Errors
    /// [`BadBuckets::Bounds`], [`BadBuckets::TooMany`].
    pub fn by_length(lengths: impl IntoIterator<Item = u64>, bounds: &[u64]) -> Result<Self, BadBuckets> {
        if !bounds.is_sorted_by(|a, b| a < b) {
            return Err(BadBuckets::Bounds);
        }
        let bucket = |x: u64| u32::try_from(bounds.partition_point(|&b| b <= x)).unwrap_or(u32::MAX);
        Buckets::new(lengths.into_iter().map(bucket).collect())
    }

    /// Returns how many samples have a bucket.
    #[must_use]
    pub fn len(&self) -> usize {
        self.of.len()
    }

    /// Returns whether no sample has a bucket.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// Returns the bucket of a sample.
    ///
    /// # Panics
    /// When there is no such sample.
    #[must_use]
    pub fn of(&self, sample: u32) -> u32 {
        self.of[sample as usize]
    }

    /// Returns how many entries of a plan each bucket has.
    ///
    /// # Panics
    /// When the plan is of a version with more samples.
    #[must_use]
    pub fn sizes(&self, plan: &Plan) -> Vec<u64> {
        let mut sizes = vec![0; self.count as usize];
        for s in (0..plan.samples()).filter(|&s| plan.copies_of(s) > 0) {
            sizes[self.of(s) as usize] += u64::from(plan.copies_of(s));
        }
        sizes
    }

    /// Returns the hash of a plan with these buckets. It takes the place of the plan's hash in the order key,
    /// the ledger and the receipt, so that two divisions of one plan are never mistaken for each other.
    #[must_use]
    pub fn hash(&self, plan: Hash) -> Hash {
        let mut h = blake3::Hasher::new_derive_key(context::BUCKETS);
        h.update(plan.as_bytes());
        h.update(&(self.of.len() as u64).to_le_bytes());
        for b in self.of.iter() {
            h.update(&b.to_le_bytes());
        }
        h.finalize().into()
    }
}

/// One bucket: the index of its first entry, its permutation, its first step and its first pad.
#[derive(Debug, Clone)]
struct Bucket {
    from: usize,
    permutation: Permutation,
    step: u64,
    pad: u64,
}

/// The bucketed order of one epoch. Entries from [`Plan::entries`] on are its pads. Its state is a bitmap
/// over [`Bucketed::entries`].
#[derive(Debug, Clone)]
pub struct Bucketed {
    plan: Plan,
    world: World,
    buckets: Buckets,
    /// Entries bucket by bucket, ascending in each bucket.
    entries: Vec<u32>,
    /// The buckets that have entries.
    parts: Vec<Bucket>,
    steps: Permutation,
    pads: u64,
    /// With `keep`: the position where each step of the epoch begins, and the end.
    begins: Vec<u64>,
}

impl Bucketed {
    /// Returns the order of the epoch with this key, which was made with [`Buckets::hash`].
    ///
    /// # Errors
    /// [`BadBuckets::Samples`], [`BadBuckets::Echo`], [`BadBuckets::World`].
    pub fn new(plan: Plan, world: World, key: &OrderKey, buckets: Buckets) -> Result<Self, BadBuckets> {
        world.check()?;
        if buckets.of.len() != plan.samples() as usize {
            return Err(BadBuckets::Samples { buckets: buckets.of.len(), samples: plan.samples() });
        }
        if plan.echo().copies > 1 {
            return Err(BadBuckets::Echo);
        }
        let number = |x: u64| u32::try_from(x).unwrap_or(u32::MAX);
        let mut sorted: Vec<Vec<u32>> = vec![Vec::new(); buckets.count as usize];
        for e in (0..plan.entries()).map(number) {
            sorted[buckets.of(plan.item(e).sample) as usize].push(e);
        }
        let (mut entries, mut parts, mut steps, mut pads) = (Vec::new(), Vec::new(), 0, 0);
        for (b, list) in (0u64..).zip(sorted).filter(|x| !x.1.is_empty()) {
            let n = list.len() as u64;
            let permutation = Permutation::new(key, "bucket", b, n);
            parts.push(Bucket { from: entries.len(), permutation, step: steps, pad: pads });
            steps += world.steps(n);
            pads += world.delivered(n).saturating_sub(n);
            entries.extend(list);
        }
        let steps = Permutation::new(key, "steps", 0, steps);
        let mut order = Bucketed { plan, world, buckets, entries, parts, steps, pads, begins: Vec::new() };
        if world.tail == Tail::Keep {
            let mut at = 0;
            for s in 0..order.steps() {
                order.begins.push(at);
                at += order.size(s);
            }
            order.begins.push(at);
        }
        Ok(order)
    }

    /// Returns the same epoch for another number of ranks. The batch stays, because it divides the epoch in
    /// steps.
    ///
    /// # Errors
    /// [`BadBuckets::World`].
    pub fn with_ranks(&self, ranks: u32) -> Result<Self, BadBuckets> {
        let world = World { ranks, ..self.world };
        world.check()?;
        Ok(Bucketed { world, ..self.clone() })
    }

    /// Returns the plan that it orders.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the number of steps of the epoch.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps.len()
    }

    /// Returns the number of entries, including pads and those that `drop` leaves out.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.plan.entries() + self.pads
    }

    /// Returns the index of a step's bucket among `parts`, and the number of the step in that bucket.
    fn part(&self, step: u64) -> (usize, u64) {
        let c = self.steps.at(step);
        let b = self.parts.partition_point(|p| p.step <= c) - 1;
        // A bucket that `drop` leaves out has no step, so the next bucket begins with the same number.
        (b, c - self.parts[b].step)
    }

    /// Returns how many entries a step has.
    #[must_use]
    pub fn size(&self, step: u64) -> u64 {
        let (b, k) = self.part(step);
        let g = u64::from(self.world.batch);
        match self.world.tail {
            Tail::Keep => g.min(self.parts[b].permutation.len() - k * g),
            Tail::Drop | Tail::Pad => g,
        }
    }

    /// Returns the bucket of a step.
    ///
    /// # Panics
    /// Past the last step.
    #[must_use]
    pub fn bucket(&self, step: u64) -> u32 {
        self.buckets.of(self.plan.item(self.entries[self.parts[self.part(step).0].from]).sample)
    }

    /// Returns the entry at a position of a step.
    ///
    /// # Panics
    /// Past the last step, or past the step's [`Bucketed::size`].
    #[must_use]
    pub fn entry(&self, step: u64, position: u64) -> u32 {
        assert!(position < self.size(step), "position {position} of step {step}");
        let (b, k) = self.part(step);
        let (part, q) = (&self.parts[b], k * u64::from(self.world.batch) + position);
        match q.checked_sub(part.permutation.len()) {
            None => self.entries[part.from + usize::try_from(part.permutation.at(q)).unwrap_or(usize::MAX)],
            Some(i) => u32::try_from(self.plan.entries() + part.pad + i).unwrap_or(u32::MAX),
        }
    }

    /// Returns the item of an entry or a pad. The i-th pad of a bucket repeats the bucket's i-th entry.
    ///
    /// # Panics
    /// When there is no such entry.
    #[must_use]
    pub fn item(&self, entry: u32) -> Item {
        let Some(i) = u64::from(entry).checked_sub(self.plan.entries()) else { return self.plan.item(entry) };
        assert!(i < self.pads, "pad {i} of {}", self.pads);
        let part = &self.parts[self.parts.partition_point(|p| p.pad <= i) - 1];
        let q = part.permutation.at((i - part.pad) % part.permutation.len());
        let like = self.entries[part.from + usize::try_from(q).unwrap_or(usize::MAX)];
        Item { sample: self.plan.item(like).sample, copy: PAD + u32::try_from(i).unwrap_or(0) }
    }

    /// Returns the entries that the epoch delivers, as a bitmap over [`Bucketed::entries`].
    ///
    /// [`Leases`](crate::delivery::Leases) are made with it. Every rank's share is then whole steps, and
    /// leases add no pads.
    #[must_use]
    pub fn planned(&self) -> Bits {
        let mut planned = Bits::ones(self.entries());
        if self.world.tail == Tail::Drop {
            for part in &self.parts {
                let n = part.permutation.len();
                for q in self.world.delivered(n)..n {
                    let at = part.from + usize::try_from(part.permutation.at(q)).unwrap_or(usize::MAX);
                    planned.clear(u64::from(self.entries[at]));
                }
            }
        }
        planned
    }

    /// Returns the j-th entry of a rank, from the epoch's beginning; `None` past the end.
    #[must_use]
    pub fn entry_of_rank(&self, rank: u32, j: u64) -> Option<u32> {
        if self.world.tail == Tail::Keep {
            let step = self.begins.partition_point(|&b| b <= j) as u64 - 1;
            return (step < self.steps())
                .then(|| self.entry(step, j - self.begins[usize::try_from(step).unwrap_or(0)]));
        }
        let per = u64::from(self.world.batch / self.world.ranks);
        let step = j / per;
        (step < self.steps() && rank < self.world.ranks)
            .then(|| self.entry(step, u64::from(rank) * per + j % per))
    }

    /// Returns a rank's first position after the step that has its position `j`.
    fn step_end(&self, j: u64) -> u64 {
        if self.world.tail == Tail::Keep {
            let step = self.begins.partition_point(|&b| b <= j);
            return self.begins.get(step).copied().unwrap_or(u64::MAX);
        }
        let per = u64::from(self.world.batch / self.world.ranks);
        (j / per + 1) * per
    }

    /// Returns a rank's next `n` entries that are `free`, and the position of the first.
    ///
    /// No entry is past the step of the first (I5).
    /// After a restart, or a change of world at a step boundary, new cursors continue the order.
    pub fn next(
        &self,
        cursors: &mut RankCursors,
        rank: u32,
        n: u32,
        free: impl Fn(u32) -> bool,
    ) -> (Vec<u32>, u64) {
        let (first, from) = cursors.next(rank, n.min(1), |j| self.entry_of_rank(rank, j), &free);
        if first.is_empty() {
            return (first, from);
        }
        cursors.rewind(rank, from);
        let end = self.step_end(from);
        cursors.next(rank, n, |j| if j < end { self.entry_of_rank(rank, j) } else { None }, free)
    }

    /// Returns how many `free` entries each rank may still be granted.
    #[must_use]
    pub fn shares(&self, free: impl Fn(u32) -> bool) -> Vec<u64> {
        let of = |rank| (0..).map_while(|j| self.entry_of_rank(rank, j)).filter(|&e| free(e)).count() as u64;
        (0..self.world.ranks).map(of).collect()
    }

    /// Returns whether the epoch is at a step boundary: each step is either wholly free or not free at all.
    /// Only then may its number of ranks change.
    #[must_use]
    pub fn at_boundary(&self, free: impl Fn(u32) -> bool) -> bool {
        (0..self.steps()).all(|s| {
            let n = (0..self.size(s)).filter(|&q| free(self.entry(s, q))).count() as u64;
            n == 0 || n == self.size(s)
        })
    }
}

#[cfg(test)]
mod tests;
