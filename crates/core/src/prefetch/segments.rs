//! Reading ahead of an order that is known, segment by segment: [`super::prefetch`] over a part of the order at a
//! time, so that an order of any length costs the memory of two parts.
//!
//! What is fetched has a *key*: a unit, or a sample where samples are fetched by themselves. Segments follow each
//! other in the order; positions are named by the entries that stand there.
//!
//! I1. The segments together hold at most the budget, in bytes; a key that is larger than all of it is held alone.
//! I2. What one segment is done with and the next one needs is handed over, not fetched again: with room for what is
//!     read together, and segments no shorter than that, nothing is fetched twice.
//! I3. What has no use any more is dropped at once, when it is known what comes next.
//!
//! Cost: O(log keys) a position. Memory: about 80 bytes a position of the segments that are open.

use super::{BadUses, Prefetch, Uses};
use crate::{plan::bits::Bits, residency::CacheAction};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Segments that are open at once.
const OPEN: usize = 2;

/// A part of the order.
#[derive(Debug, Clone)]
pub struct Segment {
    /// Where each entry stands.
    places: BTreeMap<u32, u32>,
    /// The key of each of its units, and the unit of each key.
    keys: Vec<u32>,
    units: BTreeMap<u32, u32>,
    /// The unit at each place.
    at: Vec<u32>,
    bytes: Vec<u64>,
}

impl Segment {
    /// A part in which these (entry, key) stand in this order; `bytes` says how long what a key names is.
    #[must_use]
    pub fn new(steps: impl IntoIterator<Item = (u32, u32)>, bytes: impl Fn(u32) -> u64) -> Self {
        let mut c = Segment {
            places: BTreeMap::new(),
            keys: Vec::new(),
            units: BTreeMap::new(),
            at: Vec::new(),
            bytes: Vec::new(),
        };
        for (place, (entry, key)) in (0u32..).zip(steps) {
            let next = u32::try_from(c.keys.len()).unwrap_or(u32::MAX);
            let unit = *c.units.entry(key).or_insert(next);
            if unit == next {
                c.keys.push(key);
                c.bytes.push(bytes(key));
            }
            c.at.push(unit);
            c.places.insert(entry, place);
        }
        c
    }
}

#[derive(Debug)]
struct Open {
    places: BTreeMap<u32, u32>,
    keys: Vec<u32>,
    units: BTreeMap<u32, u32>,
    at: Vec<u32>,
    prefetch: Prefetch,
}

impl Open {
    fn read(&self) -> bool {
        self.prefetch.head() == self.at.len() as u64
    }

    fn looked(&self) -> bool {
        self.prefetch.ahead() == self.at.len() as u64
    }
}

/// See the module. Orders are [`CacheAction`]s whose numbers are keys.
#[derive(Debug)]
pub struct SegmentedPrefetch {
    budget: u64,
    segments: VecDeque<Open>,
    /// The last segment is open, or was.
    whole: bool,
    /// By how many segments a key is held.
    claims: BTreeMap<u32, u32>,
    /// Bytes of keys that are held by more than one segment, once for each more.
    again: u64,
    /// Held for an order that was given up, until the new one has said what it needs.
    former: BTreeSet<u32>,
    /// Entries that need nothing any more.
    done: Bits,
}

impl SegmentedPrefetch {
    /// Nothing is open yet. `done` are the entries that need nothing, of as many as there are.
    #[must_use]
    pub fn new(budget: u64, done: Bits) -> Self {
        SegmentedPrefetch {
            budget,
            segments: VecDeque::new(),
            whole: false,
            claims: BTreeMap::new(),
            again: 0,
            former: BTreeSet::new(),
            done,
        }
    }

    /// Another order from here on: what is held stays until its first segments are open and say what they need.
    pub fn renew(&mut self, done: Bits) {
        self.former.extend(std::mem::take(&mut self.claims).into_keys());
        self.segments.clear();
        (self.whole, self.done, self.again) = (false, done, 0);
    }

    /// Whether another segment should be opened.
    #[must_use]
    pub fn wants(&self) -> bool {
        !self.whole && self.segments.len() < OPEN
    }

    /// Whether nothing was opened yet.
    #[must_use]
    pub fn is_new(&self) -> bool {
        !self.whole && self.segments.is_empty()
    }

    /// Opens the next segment; `last` says that no other follows.
    ///
    /// # Errors
    /// [`BadUses`]: a segment of more than 2^32 − 1 positions.
    pub fn open(&mut self, segment: Segment, last: bool) -> Result<(), BadUses> {
        let uses = Uses::new(segment.at.clone(), segment.keys.len())?;
        let mut prefetch = Prefetch::new(uses, segment.bytes, self.budget);
        for (&entry, &place) in &segment.places {
            if u64::from(entry) < self.done.len() && self.done.get(entry.into()) {
                prefetch.serve(place.into());
            }
        }
        let Segment { places, keys, units, at, .. } = segment;
        self.segments.push_back(Open { places, keys, units, at, prefetch });
        self.whole = last;
        Ok(())
    }

    /// The key of an entry in an open segment.
    #[must_use]
    pub fn key(&self, entry: u32) -> Option<u32> {
        let of = |c: &Open| Some(c.keys[c.at[*c.places.get(&entry)? as usize] as usize]);
        self.segments.iter().find_map(of)
    }

    /// Whether a key is held: asked for, and not dropped.
    #[must_use]
    pub fn holds(&self, key: u32) -> bool {
        self.claims.contains_key(&key)
    }

    /// Bytes held.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.segments.iter().map(|c| c.prefetch.held_bytes()).sum::<u64>() - self.again
    }

    /// Looks at up to `positions` more positions, as far as the budget allows. What is `here` anyway is not asked
    /// for.
    pub fn look(&mut self, positions: u64, here: impl Fn(u32) -> bool, actions: &mut Vec<CacheAction>) {
        let (mut left, mut i) = (positions, 0);
        while left > 0 && i < self.segments.len() {
            let own = self.segments[i].prefetch.held_bytes();
            let all = self.held_bytes();
            let room = self.budget.saturating_sub(all);
            let (again, mut local) = (self.again, Vec::new());
            let c = &mut self.segments[i];
            c.prefetch.set_budget(own + room, &mut local);
            c.prefetch.hold_alone(own == all);
            let before = c.prefetch.ahead();
            let (keys, until) = (&c.keys, before.saturating_add(left));
            c.prefetch.advance(until, |u| here(keys[u as usize]), &mut local);
            left = left.saturating_sub(c.prefetch.ahead() - before);
            let looked = c.looked();
            self.obey(i, local, actions);
            // What another segment holds, too, left room for more.
            if looked {
                i += 1;
            } else if self.again == again {
                break;
            }
        }
        if !self.wants() && !self.former.is_empty() {
            for key in std::mem::take(&mut self.former) {
                actions.push(CacheAction::Evict(key));
            }
        }
        self.tidy(actions);
    }

    /// An entry needs nothing any more, in whatever order ranks get to theirs.
    pub fn serve(&mut self, entry: u32, actions: &mut Vec<CacheAction>) {
        if u64::from(entry) < self.done.len() && !self.done.set(entry.into()) {
            return;
        }
        if let Some(c) = self.segments.iter_mut().find(|c| c.places.contains_key(&entry)) {
            let place = c.places[&entry];
            c.prefetch.serve(place.into());
        }
        self.tidy(actions);
    }

    /// What a key names was to be here anyway and is not: it is asked for, if there is room.
    pub fn lost(&mut self, key: u32) {
        if self.holds(key) {
            return;
        }
        for c in &mut self.segments {
            if let Some(&unit) = c.units.get(&key) {
                c.prefetch.lost(unit);
            }
        }
    }

    /// Drops what is spent, and closes segments that were read, in their order.
    fn tidy(&mut self, actions: &mut Vec<CacheAction>) {
        for i in 0..self.segments.len() {
            // Only with the next one open it is known whether that needs it.
            if i + 1 < self.segments.len() || self.whole {
                let mut local = Vec::new();
                self.segments[i].prefetch.drop_spent(&mut local);
                self.obey(i, local, actions);
            }
        }
        while self.segments.front().is_some_and(Open::read) && (self.segments.len() > 1 || self.whole) {
            self.segments.pop_front();
        }
    }

    fn obey(&mut self, segment: usize, local: Vec<CacheAction>, actions: &mut Vec<CacheAction>) {
        for action in local {
            match action {
                CacheAction::Load(unit) => {
                    let key = self.segments[segment].keys[unit as usize];
                    let claims = self.claims.entry(key).or_default();
                    *claims += 1;
                    if *claims > 1 {
                        self.again += self.segments[segment].prefetch.bytes_of(unit);
                    } else if !self.former.remove(&key) {
                        actions.push(CacheAction::Load(key));
                    }
                }
                CacheAction::Evict(unit) => {
                    let key = self.segments[segment].keys[unit as usize];
                    let mut later = self.segments.range_mut(segment + 1..);
                    let next = later.find_map(|c| Some((*c.units.get(&key)?, c)));
                    let taken = next.is_some_and(|(u, c)| !c.prefetch.holds(u) && c.prefetch.adopt(u));
                    if taken {
                        continue;
                    }
                    let Some(claims) = self.claims.get_mut(&key) else { continue };
                    *claims -= 1;
                    if *claims > 0 {
                        self.again -= self.segments[segment].prefetch.bytes_of(unit);
                    } else {
                        self.claims.remove(&key);
                        actions.push(CacheAction::Evict(key));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
