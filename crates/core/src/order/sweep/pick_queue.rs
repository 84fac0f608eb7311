//! One job's picks, decided ahead of a grant (R15), and the echoes of a plan that repeats its samples.
//!
//! Loads start when a pick is decided, so the link to the origin is busy all epoch. A pick whose bytes are
//! here may overtake a few older ones, but not many. Without that limit a slow origin would turn every unit
//! into a burst: that ruins the shuffle and saves no time, because the link is busy either way (ADR 10).
//!
//! Data echoing: the first pass over the plan's base comes from the sweep. A block of at least twice the
//! minimum distance is then repeated, each half shuffled within itself. So copies keep their distance, and a
//! block is short enough that its units are still cached.
//!
//! A resumed epoch may owe copies of samples whose block was under way. They come in the order in which their
//! samples were read last, each as soon as its distance allows. They do not come before the last samples of
//! the first pass, whose own copies need a distance too.

use super::{Pick, ReadFrom, SubscriberId, SweepPolicy};
use crate::plan::{Echo, bits::Bits, key::Draws};
use crate::residency::CacheAction;
use std::collections::VecDeque;

/// The picks of one job that are decided and not yet served.
#[derive(Debug, Clone, Default)]
pub struct PickQueue {
    planned: VecDeque<Pick>,
    echoes: Option<Echoes>,
    /// Picks that are to come from the reserve, for a probe.
    from_reserve: u64,
}

#[derive(Debug, Clone)]
struct Echoes {
    echo: Echo,
    draws: Draws,
    /// Slots that had their place in a block. A slot that is given back and drawn again gets no further
    /// echoes.
    seen: Bits,
    /// The block under way: each pick with the number of its draw.
    block: Vec<(u64, Pick)>,
    /// Echoes of the last full block.
    coming: VecDeque<Pick>,
    /// Copies that are owed one by one, each with the number of draws after which it may come, soonest first.
    owed: VecDeque<(u64, DueCopies)>,
    drawn: u64,
}

/// A slot of a resumed epoch that has copies left to deliver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DueCopies {
    /// The slot.
    pub slot: u32,
    /// The slot's unit.
    pub unit: u32,
    /// The passes that are left, in order.
    pub passes: VecDeque<u32>,
    /// How many entries at least were handed out after the slot's last one.
    pub ago: u64,
}

impl Echoes {
    /// Adds a pick of the first pass to the block. `left` is what the first pass has left.
    fn add(&mut self, pick: Pick, left: u64) {
        if self.seen.set(u64::from(pick.slot)) {
            self.block.push((self.drawn, pick));
        }
        let least = 2 * u64::from(self.echo.apart);
        if self.block.len() as u64 >= least && (left == 0 || left >= least) {
            self.repeat_block();
        } else if left == 0 {
            self.owe_block();
        }
    }

    /// Returns the next copy that is owed, if its distance is reached or `anyway`.
    fn next_owed(&mut self, anyway: bool) -> Option<Pick> {
        let (_, mut owed) = self.owed.pop_front_if(|(due, _)| anyway || *due <= self.drawn)?;
        let pass = owed.passes.pop_front()?;
        let pick = Pick { slot: owed.slot, unit: owed.unit, read_from: ReadFrom::Range, pass };
        if !owed.passes.is_empty() {
            // This is later than all others of the queue.
            self.owed.push_back((self.drawn + u64::from(self.echo.apart), owed));
        }
        Some(pick)
    }

    /// Arranges the echoes of a full block.
    fn repeat_block(&mut self) {
        for pass in 1..self.echo.copies {
            let half = self.block.len() / 2;
            let (a, b) = self.block.split_at_mut(half);
            for part in [a, b] {
                for i in (1..part.len()).rev() {
                    part.swap(i, usize::try_from(self.draws.below(i as u64 + 1)).unwrap_or(0));
                }
            }
            self.coming.extend(self.block.iter().map(|&(_, p)| Pick { pass, ..p }));
        }
        self.block.clear();
    }

    /// Ends a block that is too short to be repeated: its copies are owed one by one.
    fn owe_block(&mut self) {
        if self.block.is_empty() {
            return;
        }
        let (apart, copies) = (u64::from(self.echo.apart), self.echo.copies);
        let owed = |(at, p): (u64, Pick)| {
            (at + apart, DueCopies { slot: p.slot, unit: p.unit, passes: (1..copies).collect(), ago: 0 })
        };
        self.owed.extend(std::mem::take(&mut self.block).into_iter().map(owed));
        self.owed.make_contiguous().sort_by_key(|o| o.0);
    }
}

impl PickQueue {
    /// Returns the queue of a plan that echoes. For a resumed epoch, `done` are the slots of the first pass
    /// that were handed out before, and `owed` are those that have copies left.
    #[must_use]
    pub fn echoing(echo: Echo, mut draws: Draws, done: Bits, mut owed: Vec<DueCopies>) -> Self {
        if echo.copies <= 1 {
            return PickQueue::default();
        }
        for i in (1..owed.len()).rev() {
            owed.swap(i, usize::try_from(draws.below(i as u64 + 1)).unwrap_or(0));
        }
        // A stable sort: slots of equal `ago` stay shuffled.
        owed.sort_by_key(|o| std::cmp::Reverse(o.ago));
        // `ago` entries came after the slot's last one, so the next draw is `ago + 1` away.
        let due = |o: &DueCopies| u64::from(echo.apart).saturating_sub(o.ago + 1);
        let owed = owed.into_iter().map(|o| (due(&o), o)).collect();
        let (block, coming) = (Vec::new(), VecDeque::new());
        let echoes = Echoes { echo, draws, seen: done, block, coming, owed, drawn: 0 };
        PickQueue { planned: VecDeque::new(), echoes: Some(echoes), from_reserve: 0 }
    }

    /// Returns whether the plan repeats its samples.
    #[must_use]
    pub fn echoes(&self) -> bool {
        self.echoes.is_some()
    }

    /// Takes the next `n` picks from the reserve, as long as it lasts: for a probe of what a job does when it
    /// waits for no origin. Without effect on a plan that echoes.
    pub fn probe(&mut self, n: u64) {
        self.from_reserve = n;
    }

    /// Decides the next pick: from the sweep, or an echo.
    fn draw(
        &mut self,
        policy: &mut SweepPolicy,
        subscriber: SubscriberId,
        actions: &mut Vec<CacheAction>,
    ) -> Option<Pick> {
        let Some(e) = &mut self.echoes else {
            if self.from_reserve == 0 {
                return policy.next(subscriber, actions);
            }
            self.from_reserve -= 1;
            return policy.next_cached(subscriber, actions);
        };
        let (left, least) = (policy.left(subscriber), 2 * u64::from(e.echo.apart));
        // Copies that are owed wait while the rest of the first pass is too short for a block of its own.
        let first_pass_ends = left > 0 && left + (e.block.len() as u64) < least;
        let mut pick = if first_pass_ends { None } else { e.next_owed(false) };
        if pick.is_none() && e.coming.is_empty() {
            if let Some(pick) = policy.next(subscriber, actions) {
                e.add(pick, policy.left(subscriber));
                e.drawn += 1;
                return Some(pick);
            }
            e.owe_block();
            pick = e.next_owed(true);
        }
        let pick = pick.or_else(|| e.coming.pop_front())?;
        e.drawn += 1;
        Some(Pick {
            read_from: if policy.holds(pick.unit) { ReadFrom::Window } else { ReadFrom::Range },
            ..pick
        })
    }

    /// Takes back a pick that was served and not read, because its lease expired.
    pub fn take_back(&mut self, policy: &mut SweepPolicy, subscriber: SubscriberId, slot: u32, pass: u32) {
        match &mut self.echoes {
            Some(e) if pass > 0 => {
                let unit = policy.plan_units(subscriber).unit(slot);
                e.coming.push_front(Pick { slot, unit, read_from: ReadFrom::Range, pass });
            }
            _ => policy.give_back(subscriber, slot),
        }
    }

    /// Decides picks until `ahead` are planned.
    ///
    /// Plans no more than [`SweepPolicy::ahead_max`] allows, and stops at the epoch's end. `actions` gets the
    /// orders to the store. `new` sees each new pick, so that its range read can start now.
    pub fn fill(
        &mut self,
        policy: &mut SweepPolicy,
        subscriber: SubscriberId,
        ahead: usize,
        actions: &mut Vec<CacheAction>,
        mut new: impl FnMut(&Pick),
    ) {
        let ahead = ahead.min(policy.ahead_max(subscriber)).max(1);
        while self.planned.len() < ahead {
            let Some(pick) = self.draw(policy, subscriber, actions) else { return };
            new(&pick);
            self.planned.push_back(pick);
        }
    }

    /// Removes and returns the next pick to serve: the first whose bytes are `here`, among the oldest pick
    /// and the `overtake` picks behind it; else the oldest.
    ///
    /// A pick whose unit left the cache since it was decided is to be read by range. With data echoing no
    /// pick overtakes another: a pick that waits for its unit would be joined by its copies, which wait for
    /// the same unit, and the distance between them would be lost.
    pub fn next(
        &mut self,
        policy: &SweepPolicy,
        overtake: usize,
        here: impl FnMut(&Pick) -> bool,
    ) -> Option<Pick> {
        let overtake = if self.echoes.is_some() { 0 } else { overtake };
        let at = self.planned.iter().take(overtake.saturating_add(1)).position(here).unwrap_or(0);
        let mut pick = self.planned.remove(at)?;
        if !policy.holds(pick.unit) {
            pick.read_from = ReadFrom::Range;
        }
        Some(pick)
    }

    /// Returns the planned picks, oldest first.
    pub fn planned(&self) -> impl Iterator<Item = &Pick> {
        self.planned.iter()
    }

    /// Returns how many picks are planned.
    #[must_use]
    pub fn len(&self) -> usize {
        self.planned.len()
    }

    /// Returns whether no pick is planned.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.planned.is_empty()
    }

    /// Gives all picks that were not served back to the sweep, because the job leaves or its epoch is saved.
    pub fn give_back(&mut self, policy: &mut SweepPolicy, subscriber: SubscriberId) {
        for pick in std::mem::take(&mut self.planned) {
            self.take_back(policy, subscriber, pick.slot, pick.pass);
        }
    }
}
