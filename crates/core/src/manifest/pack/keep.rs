//! Packing a version whose parent is packed: which of the parent's chunks stay.
//!
//! A sample lies *inside* the canonical grouping when every live member of the chunk that it is
//! in belongs to one and the same canonical group; else *outside*. What a change leaves over is
//! packed by itself, in the same order and by the same cuts, and lies outside. Chunks of only
//! new data are biased samples, so their share is bounded: past it, the groups with the most
//! samples outside are written anew, until the share holds again.
//!
//! Three passes, each over the plans of [`super::Packer`] in order: [`Keeper::found`] for every
//! unchanged entry (while joining by path), [`Keeper::survey`] for every plan, and, after
//! [`Keeper::decide`], [`Keeper::fate`] for every plan. Memory: 8 bytes a chunk of the parent,
//! 13 a group. The root is the entries' and knows nothing of any of this.

use super::{ChunkPlan, Item, Member, PackParams};
use crate::manifest::LayoutParams;

/// How much of a parent may stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepRule {
    /// How many of 100 grouped samples may lie outside the canonical grouping. 0 is the canonical
    /// layout, which has the same id whether there was a parent or not; equal chunks still stay.
    pub outside_percent: u32,
    /// How many of 100 bytes of a kept chunk may belong to nobody any more.
    pub dead_percent: u32,
}

impl KeepRule {
    /// 3 % outside, 10 % dead.
    pub const DEFAULT: KeepRule = KeepRule { outside_percent: 3, dead_percent: 10 };
}

/// Where an unchanged entry lies in the parent's layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParentLocation {
    /// Which chunk of the parent, as numbered for [`Keeper::new`].
    pub chunk: u32,
    /// Where in it the entry begins.
    pub offset: u32,
}

/// What keeping a group's old chunks would mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Survey {
    /// Samples of the group.
    pub samples: u32,
    /// How many of them would lie outside.
    pub outside: u32,
    /// Bytes to write when the group is written anew.
    pub bytes: u32,
}

/// What becomes of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// It is this chunk of the parent, byte for byte: nothing is read or written.
    Same(u32),
    /// It is written as planned.
    Write,
    /// The old chunks stay.
    Keep {
        /// Members that stay where the parent has them.
        inside: Vec<(Item, ParentLocation)>,
        /// Members that go to a [`super::Packer`] of what lies outside, in order.
        outside: Vec<Item>,
    },
}

/// Decides, group by group, what stays of a parent whose parameters are the same.
#[derive(Debug, Clone)]
pub struct Keeper {
    rule: KeepRule,
    pack: PackParams,
    /// Length of each chunk of the parent.
    len: Vec<u32>,
    /// Entries of this version that lie in it, unchanged.
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
    /// For a parent whose grouped chunks have these lengths. Nothing can be kept of a parent
    /// with other parameters: give none of its chunks then.
    #[must_use]
    pub fn new(rule: KeepRule, params: &LayoutParams, parent_len: Vec<u32>) -> Self {
        let live = vec![0; parent_len.len()];
        Keeper { rule, pack: params.pack.unwrap_or(PackParams::DEFAULT), len: parent_len, live }
    }

    /// Counts a grouped entry that the parent has too, with equal content. To be called once for
    /// each such entry, before the first survey. False when there is no such chunk: the entry
    /// then counts as new.
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

    /// Looks at one group. `places` are those of its members, in order: `None` for an entry that
    /// is new or has changed.
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

    /// Which groups are written anew: those that would lie outside altogether, and as many more
    /// as the share needs, most samples outside a byte first, earlier groups first among equals.
    #[must_use]
    pub fn decide(&self, surveys: &[Survey]) -> Vec<bool> {
        let total: u64 = surveys.iter().map(|s| u64::from(s.samples)).sum();
        let budget = total * u64::from(self.rule.outside_percent.min(100)) / 100;
        let canonical = self.rule.outside_percent == 0;
        let mut write: Vec<bool> = surveys.iter().map(|s| canonical || s.outside == s.samples).collect();
        let mut open: Vec<usize> =
            (0..surveys.len()).filter(|&i| !write[i] && surveys[i].outside > 0).collect();
        let mut outside: u64 = open.iter().map(|&i| u64::from(surveys[i].outside)).sum();
        // Cross-multiplied, so that no rounding decides.
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

    /// What becomes of one group, given the decision for it.
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

    /// The chunks whose live members are all in this group and fill enough of them, ascending.
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

    /// The chunk of the parent that the plan would come out as: plans have no gaps, so equal
    /// places and an equal length leave nothing else in it.
    fn same(&self, plan: &ChunkPlan, rows: &[Row]) -> Option<u32> {
        let chunk = rows.first()?.1?.chunk;
        let fits = self.len.get(chunk as usize) == Some(&plan.len)
            && rows.iter().all(|(m, p)| *p == Some(ParentLocation { chunk, offset: m.offset }));
        fits.then_some(chunk)
    }
}

/// Which of `homes` (ascending) holds all of a sample.
fn home(homes: &[u32], sample: &[Row]) -> Option<usize> {
    let chunk = sample.first()?.1?.chunk;
    let whole = sample.iter().all(|r| r.1.is_some_and(|p| p.chunk == chunk));
    homes.binary_search(&chunk).ok().filter(|_| whole)
}
