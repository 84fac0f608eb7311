//! One job's picks, decided ahead of time: fetches start early and service comes later, so that
//! the way to the origin is busy all epoch (pacing, DESIGN §7).
//!
//! What is here may overtake what is still on its way, but only a little: where the origin is
//! the bottleneck, serving everything on arrival would hand out each unit in one burst, which
//! gains nothing (the link is busy either way) and ruins the shuffle (ADR 10).
//!
//! Echo is done here too: the first pass over the plan's base comes from the sweep; each block of
//! at least twice the distance is then repeated, its halves shuffled within themselves, so that
//! copies keep their distance, and blocks are short enough for their units to be here still. An epoch that is
//! resumed owes copies of blocks that were under way: they come in the order in which their samples were read last, each as soon
//! as it is far enough, and not before the last samples of the first pass, whose copies want a distance, too.

use super::{Pick, ReadFrom, SubscriberId, SweepPolicy};
use crate::plan::{Echo, bits::Bits, key::Draws};
use crate::residency::CacheAction;
use std::collections::VecDeque;

/// Picks that were decided and not yet served.
#[derive(Debug, Clone, Default)]
pub struct PickQueue {
    planned: VecDeque<Pick>,
    echoes: Option<Echoes>,
}

#[derive(Debug, Clone)]
struct Echoes {
    echo: Echo,
    draws: Draws,
    /// Spots whose echoes are arranged for: given back and drawn again, they echo no more often.
    arranged: Bits,
    /// Each with its place among what was drawn.
    block: Vec<(u64, Pick)>,
    coming: VecDeque<Pick>,
    /// Of a resumed epoch: what may come once so much was drawn, soonest first.
    owed: VecDeque<(u64, DueCopies)>,
    drawn: u64,
}

/// A slot of a resumed epoch of which copies are left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DueCopies {
    /// The slot.
    pub slot: u32,
    /// Its unit.
    pub unit: u32,
    /// The passes that are left, in order.
    pub passes: VecDeque<u32>,
    /// How many entries at least were handed out since it was, itself not counted.
    pub ago: u64,
}

impl Echoes {
    fn see(&mut self, pick: Pick, left: u64) {
        if self.arranged.set(u64::from(pick.slot)) {
            self.block.push((self.drawn, pick));
        }
        let least = 2 * u64::from(self.echo.apart);
        if self.block.len() as u64 >= least && (left == 0 || left >= least) {
            self.repeat();
        } else if left == 0 {
            self.owe_block();
        }
    }

    /// The next of what is owed, when it is due or `anyway`.
    fn pay(&mut self, anyway: bool) -> Option<Pick> {
        let (_, mut owed) = self.owed.pop_front_if(|(due, _)| anyway || *due <= self.drawn)?;
        let pass = owed.passes.pop_front()?;
        let pick = Pick { slot: owed.slot, unit: owed.unit, read_from: ReadFrom::Range, pass };
        if !owed.passes.is_empty() {
            // Later than all that is due already.
            self.owed.push_back((self.drawn + u64::from(self.echo.apart), owed));
        }
        Some(pick)
    }

    fn repeat(&mut self) {
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

    /// What is left of a block that is too short to be repeated is owed one by one.
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
    /// A feed of a plan that echoes. `done` are the slots of the first pass that were handed out
    /// before (of a resumed epoch), `owed` those of which copies are still to come.
    #[must_use]
    pub fn echoing(echo: Echo, mut draws: Draws, done: Bits, mut owed: Vec<DueCopies>) -> Self {
        if echo.copies <= 1 {
            return PickQueue::default();
        }
        for i in (1..owed.len()).rev() {
            owed.swap(i, usize::try_from(draws.below(i as u64 + 1)).unwrap_or(0));
        }
        // Where that is all that is known they stay shuffled.
        owed.sort_by_key(|o| std::cmp::Reverse(o.ago));
        // The draw after those is one further away.
        let due = |o: &DueCopies| u64::from(echo.apart).saturating_sub(o.ago + 1);
        let owed = owed.into_iter().map(|o| (due(&o), o)).collect();
        let (block, coming) = (Vec::new(), VecDeque::new());
        let echoes = Echoes { echo, draws, arranged: done, block, coming, owed, drawn: 0 };
        PickQueue { planned: VecDeque::new(), echoes: Some(echoes) }
    }

    fn draw(
        &mut self,
        policy: &mut SweepPolicy,
        subscriber: SubscriberId,
        actions: &mut Vec<CacheAction>,
    ) -> Option<Pick> {
        let Some(e) = &mut self.echoes else { return policy.next(subscriber, actions) };
        let (left, least) = (policy.left(subscriber), 2 * u64::from(e.echo.apart));
        // The last samples of the first pass are a block of their own if there are enough of them.
        let first = left > 0 && left + (e.block.len() as u64) < least;
        let mut pick = if first { None } else { e.pay(false) };
        if pick.is_none() && e.coming.is_empty() {
            if let Some(pick) = policy.next(subscriber, actions) {
                e.see(pick, policy.left(subscriber));
                e.drawn += 1;
                return Some(pick);
            }
            e.owe_block();
            pick = e.pay(true);
        }
        let pick = pick.or_else(|| e.coming.pop_front())?;
        e.drawn += 1;
        Some(Pick {
            read_from: if policy.holds(pick.unit) { ReadFrom::Window } else { ReadFrom::Range },
            ..pick
        })
    }

    /// A pick that was served comes back unread (its lease expired).
    pub fn take_back(&mut self, policy: &mut SweepPolicy, subscriber: SubscriberId, slot: u32, pass: u32) {
        match &mut self.echoes {
            Some(e) if pass > 0 => {
                let unit = policy.plan_units(subscriber).unit(slot);
                e.coming.push_front(Pick { slot, unit, read_from: ReadFrom::Range, pass });
            }
            _ => policy.give_back(subscriber, slot),
        }
    }

    /// Decides until `ahead` picks are planned, or as many as the window allows
    /// ([`SweepPolicy::ahead_max`]), or the epoch has no more. Orders to the store go
    /// to `acts`; `new` sees each new pick, so that range reads can start now.
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

    /// The next pick to serve: the first that is `here` among the oldest and the `overtake` picks
    /// behind it, else the oldest. A pick whose unit left the cache since it was decided is to be
    /// read by range. Where copies keep a distance nothing overtakes: one that waits for its unit would be
    /// joined by its copies, which wait for the same.
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

    /// What is planned, oldest first.
    pub fn planned(&self) -> impl Iterator<Item = &Pick> {
        self.planned.iter()
    }

    /// How many picks are planned.
    #[must_use]
    pub fn len(&self) -> usize {
        self.planned.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.planned.is_empty()
    }

    /// Gives everything that was not served back to the sweep (the job leaves or its epoch is
    /// saved).
    pub fn give_back(&mut self, policy: &mut SweepPolicy, subscriber: SubscriberId) {
        for pick in std::mem::take(&mut self.planned) {
            self.take_back(policy, subscriber, pick.slot, pick.pass);
        }
    }
}
