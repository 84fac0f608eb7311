//! The work of a pack: which groups become new chunks, and which members stay in chunks of the parent.
//!
//! Owns the passes over the sorted rows. The rules are in `fletch_core`.

use super::Kept;
use super::sorter::{Merge, Sorted};
use crate::failure::Failure;
use fletch_core::manifest::LayoutParams;
use fletch_core::manifest::pack::{
    ChunkPlan, Fate, Item, KeepRule, Keeper, Packer, ParentLocation, SORT_ROW_BYTES,
};
use std::collections::VecDeque;

/// An item, then its place in the parent: chunk u32 (all ones for none) · offset u32.
pub const ROW_BYTES: usize = SORT_ROW_BYTES + 8;

/// Returns the row of an item.
#[must_use]
pub fn row_of(item: &Item, place: Option<ParentLocation>) -> [u8; ROW_BYTES] {
    let mut row = [0xff; ROW_BYTES];
    row[..SORT_ROW_BYTES].copy_from_slice(&item.to_row());
    if let Some(p) = place {
        row[SORT_ROW_BYTES..SORT_ROW_BYTES + 4].copy_from_slice(&p.chunk.to_be_bytes());
        row[SORT_ROW_BYTES + 4..].copy_from_slice(&p.offset.to_be_bytes());
    }
    row
}

fn item_of(row: &[u8; ROW_BYTES]) -> (Item, Option<ParentLocation>) {
    let (mut item, mut chunk, mut offset) = ([0; SORT_ROW_BYTES], [0; 4], [0; 4]);
    item.copy_from_slice(&row[..SORT_ROW_BYTES]);
    chunk.copy_from_slice(&row[SORT_ROW_BYTES..SORT_ROW_BYTES + 4]);
    offset.copy_from_slice(&row[SORT_ROW_BYTES + 4..]);
    let place = ParentLocation { chunk: u32::from_be_bytes(chunk), offset: u32::from_be_bytes(offset) };
    (Item::from_row(&item), (place.chunk != u32::MAX).then_some(place))
}

/// A canonical group, and the place of each member in the parent.
type Group = (ChunkPlan, Vec<Option<ParentLocation>>);

/// Reads the canonical groups in order.
struct Groups<'a> {
    rows: Merge<'a, ROW_BYTES>,
    packer: Option<Packer>,
    places: VecDeque<Option<ParentLocation>>,
    ready: VecDeque<ChunkPlan>,
}

fn bad(e: impl std::fmt::Display) -> Failure {
    Failure::new(format!("cannot plan the pack: {e}"))
}

impl<'a> Groups<'a> {
    fn new(params: &LayoutParams, rows: &'a Sorted<ROW_BYTES>) -> Self {
        Groups {
            rows: rows.merge(),
            packer: Some(Packer::new(params)),
            places: VecDeque::new(),
            ready: VecDeque::new(),
        }
    }

    fn next(&mut self) -> Result<Option<Group>, Failure> {
        loop {
            if let Some(plan) = self.ready.pop_front() {
                // The members of all plans, one after the other, are the items in order.
                let places = self.places.drain(..plan.members.len()).collect();
                return Ok(Some((plan, places)));
            }
            let Some(packer) = &mut self.packer else { return Ok(None) };
            match self.rows.next_row().map_err(|e| Failure::scratch(&e))? {
                Some(row) => {
                    let (item, place) = item_of(&row);
                    self.places.push_back(place);
                    self.ready.extend(packer.push(item).map_err(bad)?);
                }
                None => self.ready.extend(self.packer.take().map(Packer::finish).unwrap_or_default()),
            }
        }
    }
}

/// One piece of work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Make a chunk of these entries.
    Group(ChunkPlan),
    /// Keep these entries in chunks of the parent.
    Keep(Vec<(Item, ParentLocation)>),
}

/// The work of a run, in the order of the pack.
pub struct Plan<'a> {
    groups: Groups<'a>,
    at: usize,
    keep: Option<(Keeper, Vec<bool>)>,
    /// Groups the members outside the canonical grouping.
    outside: Option<Packer>,
    ready: VecDeque<Work>,
    /// How much of the parent stays.
    pub kept: Kept,
}

impl<'a> Plan<'a> {
    /// Plans a pack of these rows. The keeper knows every unchanged entry of the parent.
    ///
    /// # Errors
    /// [`Failure`] when the rows cannot be read.
    pub fn new(
        params: &LayoutParams,
        rows: &'a Sorted<ROW_BYTES>,
        keeper: Option<Keeper>,
    ) -> Result<Self, Failure> {
        let mut kept = Kept::default();
        let keep = match keeper {
            None => None,
            Some(keeper) => {
                let mut surveys = Vec::new();
                let mut groups = Groups::new(params, rows);
                while let Some((plan, places)) = groups.next()? {
                    surveys.push(keeper.survey(&plan, &places));
                }
                let write = keeper.decide(&surveys);
                for (survey, write) in surveys.iter().zip(&write) {
                    kept.samples += u64::from(survey.samples);
                    kept.samples_outside += if *write { 0 } else { u64::from(survey.outside) };
                }
                Some((keeper, write))
            }
        };
        Ok(Plan {
            groups: Groups::new(params, rows),
            at: 0,
            keep,
            outside: Some(Packer::new(params)),
            ready: VecDeque::new(),
            kept,
        })
    }

    /// Returns the next piece of work; `None` at the end.
    ///
    /// # Errors
    /// [`Failure`] when the rows cannot be read.
    pub fn next_work(&mut self) -> Result<Option<Work>, Failure> {
        loop {
            if let Some(work) = self.ready.pop_front() {
                return Ok(Some(work));
            }
            let Some((plan, places)) = self.groups.next()? else {
                let Some(packer) = self.outside.take() else { return Ok(None) };
                self.ready.extend(packer.finish().into_iter().map(Work::Group));
                continue;
            };
            let write = |keep: &Option<(Keeper, Vec<bool>)>, at: usize| match keep {
                Some((keeper, write)) => keeper.fate(&plan, &places, write.get(at).copied().unwrap_or(true)),
                None => Fate::Write,
            };
            let fate = write(&self.keep, self.at);
            self.at += 1;
            match fate {
                Fate::Write => return Ok(Some(Work::Group(plan))),
                Fate::Same(_) => {
                    let stay = plan.members.iter().zip(&places).filter_map(|(m, p)| Some((m.item, (*p)?)));
                    return Ok(Some(Work::Keep(stay.collect())));
                }
                Fate::Keep { inside, outside } => {
                    if let Some(packer) = &mut self.outside {
                        for item in outside {
                            self.ready.extend(packer.push(item).map_err(bad)?.into_iter().map(Work::Group));
                        }
                    }
                    if !inside.is_empty() {
                        self.ready.push_back(Work::Keep(inside));
                    }
                }
            }
        }
    }
}

/// Returns the rule for how much of a parent may stay.
#[must_use]
pub fn keep_rule(compact: bool) -> KeepRule {
    KeepRule {
        outside_percent: if compact { 0 } else { KeepRule::DEFAULT.outside_percent },
        ..KeepRule::DEFAULT
    }
}
