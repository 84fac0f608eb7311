//! Packing a version whose parent is packed: which of the parent's chunks stay.
//!
//! A sample is *inside* the canonical grouping when every live member of its chunk belongs to one and the
//! same canonical group; else it is *outside*. Entries that a change leaves over are packed by themselves, in
//! the same order and with the same cuts, and are outside. Chunks of new data only are biased samples, so
//! their share is bounded. Past the bound, the groups with the most samples outside are written anew, until
//! the share is small enough.
//!
//! There are three passes, each over the plans of [`super::Packer`] in order: [`Keeper::found`] for every
//! unchanged entry, while old and new entries are joined by path; [`Keeper::survey`] for every plan; and,
//! after [`Keeper::decide`], [`Keeper::fate`] for every plan.
//!
//! Memory: 8 bytes a chunk of the parent, 13 bytes a group. The root covers entries only, so it does not
//! depend on any of this.

use super::{ChunkPlan, Item, Member, PackParams};
use crate::manifest::LayoutParams;

/// Limits on the parent's chunks that stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepRule {
    /// How many of 100 grouped samples may be outside the canonical grouping. 0 gives the canonical layout,
    /// with the same id as without a parent; equal chunks still stay.
    pub outside_percent: u32,
    /// How many of 100 bytes of a kept chunk may belong to no entry any more.
    pub dead_percent: u32,
}

impl KeepRule {
    /// The default: 3 % outside, 10 % dead.
    pub const DEFAULT: KeepRule = KeepRule { outside_percent: 3, dead_percent: 10 };
}

/// The position of an unchanged entry in the parent's layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParentLocation {
    /// The number of the parent's chunk, as in [`Keeper::new`].
    pub chunk: u32,
    /// The offset of the entry in the chunk, in bytes.
    pub offset: u32,
}

/// The effect of keeping a group's old chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Survey {
    /// The samples of the group.
    pub samples: u32,
    /// How many of them would be outside.
    pub outside: u32,
    /// Bytes to write if the group is written anew.
    pub bytes: u32,
}

/// The decision about a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// The group is this chunk of the parent, byte for byte. Nothing is read or written.
    Same(u32),
    /// The group is written as planned.
    Write,
    /// The old chunks stay.
    Keep {
        /// The members that stay in the parent's chunks.
        inside: Vec<(Item, ParentLocation)>,
        /// The members outside, in order. They go to a [`super::Packer`] of their own.
        outside: Vec<Item>,
    },
}

/// Decides, group by group, which chunks of a parent with the same parameters stay.
#[derive(Debug, Clone)]
pub struct Keeper {
    rule: KeepRule,
    pack: PackParams,
    /// The length of each chunk of the parent.
    len: Vec<u32>,
    /// How many unchanged entries of this version are in each chunk of the parent.
    live: Vec<u32>,
}

type Row = (Member, Option<ParentLocation>);

fn samples(rows: &[Row]) -> impl Iterator<Item = &[Row]> {
    rows.chunk_by(|a, b| a.0.item.key == b.0.item.key)
}

fn rows(plan: &ChunkPlan, places: &[Option<ParentLocation>]) -> Vec<Row> {
    plan.members.iter().copied().zip(places.iter().copied().chain(std::iter::repeat(None))).collect()
}

impl Keeper {
    /// Returns a keeper for a parent whose grouped chunks have these lengths. Nothing can be kept of a parent
    /// with other parameters: the caller then gives no chunks.
    #[must_use]
    pub fn new(rule: KeepRule, params: &LayoutParams, parent_len: Vec<u32>) -> Self {
        let live = vec![0; parent_len.len()];
        Keeper { rule, pack: params.pack.unwrap_or(PackParams::DEFAULT), len: parent_len, live }
    }

    /// Counts a grouped entry that the parent has too, with equal content. The caller calls this once for
    /// each such entry, before the first survey.
    ///
    /// Returns false when the parent has no such chunk: the entry then counts as new.
    #[must_use]
    pub fn found(&mut self, place: ParentLocation) -> bool {
        match self.live.get_mut(place.chunk as usize) {
            Some(n) => {
                *n += 1;
                true
            }
            None => false,
        }
    }

    /// Returns the effect of keeping one group. `places` has one value for each member, in order: `None` for
    /// an entry that is new or has changed.
    #[must_use]
    pub fn survey(&self, plan: &ChunkPlan, places: &[Option<ParentLocation>]) -> Survey {
        let rows = rows(plan, places);
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let outside = if self.same(plan, &rows).is_some() {
            0
        } else {
            let homes = self.homes(&rows);
            samples(&rows).filter(|s| home(&homes, s).is_none()).count()
        };
        Survey { samples: count(samples(&rows).count()), outside: count(outside), bytes: plan.len }
    }

    /// Returns which groups are written anew: those that would be outside altogether, and as many more as the
    /// bound needs. Groups with the most samples outside per byte come first, and among equals the earlier
    /// groups.
    #[must_use]
    pub fn decide(&self, surveys: &[Survey]) -> Vec<bool> {
        let total: u64 = surveys.iter().map(|s| u64::from(s.samples)).sum();
        let budget = total * u64::from(self.rule.outside_percent.min(100)) / 100;
        let canonical = self.rule.outside_percent == 0;
        let mut write: Vec<bool> = surveys.iter().map(|s| canonical || s.outside == s.samples).collect();
        let mut open: Vec<usize> =
            (0..surveys.len()).filter(|&i| !write[i] && surveys[i].outside > 0).collect();
        let mut outside: u64 = open.iter().map(|&i| u64::from(surveys[i].outside)).sum();
        // Cross-multiplied in integers, so that rounding cannot change the order.
        let gain = |i: usize, other: usize| u64::from(surveys[i].outside) * u64::from(surveys[other].bytes);
        open.sort_unstable_by(|&a, &b| gain(b, a).cmp(&gain(a, b)).then(a.cmp(&b)));
        for i in open {
            if outside <= budget {
                break;
            }
            write[i] = true;
            outside -= u64::from(surveys[i].outside);
        }
        write
    }

    /// Returns the fate of one group, given the decision of [`Keeper::decide`].
    #[must_use]
    pub fn fate(&self, plan: &ChunkPlan, places: &[Option<ParentLocation>], write: bool) -> Fate {
        let rows = rows(plan, places);
        if let Some(chunk) = self.same(plan, &rows) {
            return Fate::Same(chunk);
        }
        if write {
            return Fate::Write;
        }
        let homes = self.homes(&rows);
        let (mut inside, mut outside) = (Vec::new(), Vec::new());
        for sample in samples(&rows) {
            let stays = home(&homes, sample).is_some();
            for (m, place) in sample {
                match place {
                    Some(place) if stays => inside.push((m.item, *place)),
                    _ => outside.push(m.item),
                }
            }
        }
        Fate::Keep { inside, outside }
    }

    /// Returns the parent's chunks that can stay for this group, ascending.
    ///
    /// All live members of such a chunk are in this group, and they fill enough of the chunk.
    fn homes(&self, rows: &[Row]) -> Vec<u32> {
        let mut chunks: Vec<u32> = rows.iter().filter_map(|r| r.1).map(|p| p.chunk).collect();
        chunks.sort_unstable();
        let whole: Vec<u32> = chunks
            .chunk_by(|a, b| a == b)
            .filter(|run| self.live.get(run[0] as usize).is_some_and(|&n| n as usize == run.len()))
            .map(|run| run[0])
            .collect();
        let mut used = vec![0u64; whole.len()];
        for sample in samples(rows) {
            if let Some(at) = home(&whole, sample) {
                used[at] += sample.iter().map(|(m, _)| self.pack.room(m.item.len)).sum::<u64>();
            }
        }
        let alive = u64::from(100 - self.rule.dead_percent.min(100));
        let enough = |chunk: u32, used: u64| used * 100 >= u64::from(self.len[chunk as usize]) * alive;
        whole.into_iter().zip(used).filter(|&(c, u)| enough(c, u)).map(|(c, _)| c).collect()
    }

    /// Returns the chunk of the parent that is equal to the planned chunk. Plans have no gaps, so a chunk
    /// with equal offsets and an equal length has no other members.
    fn same(&self, plan: &ChunkPlan, rows: &[Row]) -> Option<u32> {
        let chunk = rows.first()?.1?.chunk;
        let fits = self.len.get(chunk as usize) == Some(&plan.len)
            && rows.iter().all(|(m, p)| *p == Some(ParentLocation { chunk, offset: m.offset }));
        fits.then_some(chunk)
    }
}

/// Returns the index of the chunk in `homes` (ascending) that holds all of a sample.
fn home(homes: &[u32], sample: &[Row]) -> Option<usize> {
    let chunk = sample.first()?.1?.chunk;
    let whole = sample.iter().all(|r| r.1.is_some_and(|p| p.chunk == chunk));
    homes.binary_search(&chunk).ok().filter(|_| whole)
}
