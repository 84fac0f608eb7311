//! Prefetch of a known order, segment by segment: a [`Prefetch`] over a part of the order at a time, so that
//! an order of any length costs the memory of two parts.
//!
//! A *key* names what is fetched: a unit, or a sample where samples are fetched one by one. Segments follow
//! each other in the order. A position is named by its entry.
//!
//! I1. The segments together hold at most the budget, in bytes. A key that is larger than the whole budget is
//!     held as the only key.
//! I2. A key that one segment no longer needs and the next segment needs is handed over, not fetched again.
//!     So nothing is fetched twice, if the budget has room for what is read together and segments are no
//!     shorter than that.
//! I3. A key without further use is evicted at once, as soon as the next segment is known.
//!
//! Cost: O(log keys) a position. Memory: about 80 bytes a position of the open segments.

use super::{BadUses, Prefetch, Uses};
use crate::{plan::bits::Bits, residency::CacheAction};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The most segments that are open at once.
const OPEN_MAX: usize = 2;

/// A part of an order, before it is opened.
#[derive(Debug, Clone)]
pub struct Segment {
    /// The position of each entry in the segment.
    places: BTreeMap<u32, u32>,
    /// The key of each unit of the segment, and the unit of each key.
    keys: Vec<u32>,
    units: BTreeMap<u32, u32>,
    /// The unit at each position.
    at: Vec<u32>,
    bytes: Vec<u64>,
}

impl Segment {
    /// Returns the segment with these (entry, key) pairs, in order. `bytes` is the length of each key's data.
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

/// An open segment, with its own prefetch.
#[derive(Debug)]
struct OpenSegment {
    places: BTreeMap<u32, u32>,
    keys: Vec<u32>,
    units: BTreeMap<u32, u32>,
    at: Vec<u32>,
    prefetch: Prefetch,
}

impl OpenSegment {
    /// Returns whether all positions were served.
    fn is_served(&self) -> bool {
        self.prefetch.head() == self.at.len() as u64
    }

    /// Returns whether the prefetch has looked at all positions.
    fn is_looked_at(&self) -> bool {
        self.prefetch.ahead() == self.at.len() as u64
    }
}

/// The prefetch of one order. The numbers in its [`CacheAction`]s are keys.
#[derive(Debug)]
pub struct SegmentedPrefetch {
    budget: u64,
    segments: VecDeque<OpenSegment>,
    /// The last segment is open, or was.
    last_opened: bool,
    /// How many segments hold each key.
    holders: BTreeMap<u32, u32>,
    /// Bytes of keys that several segments hold, once for each further segment.
    shared_bytes: u64,
    /// Keys held for an order that was given up, until the first segments of the new order are open.
    former: BTreeSet<u32>,
    /// Entries that need no prefetch any more.
    done: Bits,
}

impl SegmentedPrefetch {
    /// Returns a prefetch without open segments. `done` marks the entries, of all entries of the epoch, that
    /// need no prefetch.
    #[must_use]
    pub fn new(budget: u64, done: Bits) -> Self {
        SegmentedPrefetch {
            budget,
            segments: VecDeque::new(),
            last_opened: false,
            holders: BTreeMap::new(),
            shared_bytes: 0,
            former: BTreeSet::new(),
            done,
        }
    }

    /// Begins another order. Keys that are held stay until its first segments are open, which may need them.
    pub fn renew(&mut self, done: Bits) {
        self.former.extend(std::mem::take(&mut self.holders).into_keys());
        self.segments.clear();
        (self.last_opened, self.done, self.shared_bytes) = (false, done, 0);
    }

    /// Returns whether another segment should be opened.
    #[must_use]
    pub fn wants(&self) -> bool {
        !self.last_opened && self.segments.len() < OPEN_MAX
    }

    /// Returns whether no segment was opened yet.
    #[must_use]
    pub fn is_new(&self) -> bool {
        !self.last_opened && self.segments.is_empty()
    }

    /// Opens the next segment. `last` means that no other segment follows.
    ///
    /// # Errors
    /// [`BadUses`]: the segment has more than 2^32 − 1 positions.
    pub fn open(&mut self, segment: Segment, last: bool) -> Result<(), BadUses> {
        let uses = Uses::new(segment.at.clone(), segment.keys.len())?;
        let mut prefetch = Prefetch::new(uses, segment.bytes, self.budget);
        for (&entry, &place) in &segment.places {
            if u64::from(entry) < self.done.len() && self.done.get(entry.into()) {
                prefetch.serve(place.into());
            }
        }
        let Segment { places, keys, units, at, .. } = segment;
        self.segments.push_back(OpenSegment { places, keys, units, at, prefetch });
        self.last_opened = last;
        Ok(())
    }

    /// Returns the key of an entry in an open segment.
    #[must_use]
    pub fn key(&self, entry: u32) -> Option<u32> {
        let of = |c: &OpenSegment| Some(c.keys[c.at[*c.places.get(&entry)? as usize] as usize]);
        self.segments.iter().find_map(of)
    }

    /// Returns whether a key is held: loaded, and not evicted.
    #[must_use]
    pub fn holds(&self, key: u32) -> bool {
        self.holders.contains_key(&key)
    }

    /// Returns the bytes of all held keys.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.segments.iter().map(|c| c.prefetch.held_bytes()).sum::<u64>() - self.shared_bytes
    }

    /// Looks at up to `positions` more positions, as far as the budget allows, and loads their keys. A key
    /// that is `here` anyway is not loaded.
    pub fn look(&mut self, positions: u64, here: impl Fn(u32) -> bool, actions: &mut Vec<CacheAction>) {
        let (mut left, mut i) = (positions, 0);
        while left > 0 && i < self.segments.len() {
            let own = self.segments[i].prefetch.held_bytes();
            let all = self.held_bytes();
            let room = self.budget.saturating_sub(all);
            let (shared_bytes, mut local) = (self.shared_bytes, Vec::new());
            let c = &mut self.segments[i];
            c.prefetch.set_budget(own + room, &mut local);
            c.prefetch.allow_oversized(own == all);
            let before = c.prefetch.ahead();
            let (keys, until) = (&c.keys, before.saturating_add(left));
            c.prefetch.advance(until, |u| here(keys[u as usize]), &mut local);
            left = left.saturating_sub(c.prefetch.ahead() - before);
            let looked_at = c.is_looked_at();
            self.apply_actions(i, local, actions);
            // A key that two segments hold counts once, which can leave room for more: look again.
            if looked_at {
                i += 1;
            } else if self.shared_bytes == shared_bytes {
                break;
            }
        }
        if !self.wants() && !self.former.is_empty() {
            for key in std::mem::take(&mut self.former) {
                actions.push(CacheAction::Evict(key));
            }
        }
        self.close_served(actions);
    }

    /// Marks an entry as served. Ranks serve entries in any order.
    pub fn serve(&mut self, entry: u32, actions: &mut Vec<CacheAction>) {
        if u64::from(entry) < self.done.len() && !self.done.set(entry.into()) {
            return;
        }
        if let Some(c) = self.segments.iter_mut().find(|c| c.places.contains_key(&entry)) {
            let place = c.places[&entry];
            c.prefetch.serve(place.into());
        }
        self.close_served(actions);
    }

    /// Notes that a key that was cached anyway has vanished. It is loaded if there is room.
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

    /// Evicts keys without further use, and closes segments that were served, in order.
    fn close_served(&mut self, actions: &mut Vec<CacheAction>) {
        for i in 0..self.segments.len() {
            // The next segment must be open: it may need the key.
            if i + 1 < self.segments.len() || self.last_opened {
                let mut local = Vec::new();
                self.segments[i].prefetch.evict_unused(&mut local);
                self.apply_actions(i, local, actions);
            }
        }
        while self.segments.front().is_some_and(OpenSegment::is_served)
            && (self.segments.len() > 1 || self.last_opened)
        {
            self.segments.pop_front();
        }
    }

    /// Turns the actions of one segment, on its units, into actions on keys.
    fn apply_actions(&mut self, segment: usize, local: Vec<CacheAction>, actions: &mut Vec<CacheAction>) {
        for action in local {
            match action {
                CacheAction::Load(unit) => {
                    let key = self.segments[segment].keys[unit as usize];
                    let holders = self.holders.entry(key).or_default();
                    *holders += 1;
                    if *holders > 1 {
                        self.shared_bytes += self.segments[segment].prefetch.bytes_of(unit);
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
                    let Some(holders) = self.holders.get_mut(&key) else { continue };
                    *holders -= 1;
                    if *holders > 0 {
                        self.shared_bytes -= self.segments[segment].prefetch.bytes_of(unit);
                    } else {
                        self.holders.remove(&key);
                        actions.push(CacheAction::Evict(key));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
