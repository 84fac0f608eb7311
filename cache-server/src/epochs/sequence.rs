//! Who chooses the next entries of an epoch: a permutation, what buckets or a ledger say, or the sweep.

use super::{Epoch, Schedule, Setup};
use crate::{
    epochs::{JobError, replay_source::ReplaySource},
    sweep::{DeliveryClass, Sweep},
};
use fletch_core::{
    delivery::{Event, Leases, ledger::Ledger},
    order::{
        Bucketed, RankCursors, StrictAssignment,
        sweep::{DueCopies, PickQueue, SubscriberId},
    },
    plan::{Bits, OrderKey, Plan},
};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

/// See the module.
pub enum Sequence {
    /// The permutation.
    Strict(Box<StrictAssignment>),
    /// Every entry has its rank and its turn.
    AssignedSequence(Box<AssignedSequence>),
    /// The sweep.
    Substitute(Box<SweepSubscription>),
    /// Nobody: the epoch is over, and its subscriber is free.
    Over,
}

/// Ranks' sequences that are known, in one world.
pub struct AssignedSequence {
    turns: Assigned,
    cursors: RankCursors,
    /// Of live leases: the rank, and the turn at which they begin.
    begun: BTreeMap<u64, (u32, u64)>,
}

enum Assigned {
    Buckets(Box<Bucketed>),
    ReplaySource(Arc<ReplaySource>),
}

impl AssignedSequence {
    fn begin(turns: Assigned, ranks: u32) -> Box<Self> {
        Box::new(AssignedSequence { turns, cursors: RankCursors::new(ranks), begun: BTreeMap::new() })
    }

    fn next(&mut self, leases: &Leases, rank: u32, n: u32) -> (Vec<u32>, u64) {
        let free = |e| leases.is_free(e);
        match &self.turns {
            Assigned::Buckets(order) => order.next(&mut self.cursors, rank, n, free),
            Assigned::ReplaySource(told) => self.cursors.next(rank, n, |j| told.turn(rank, j), free),
        }
    }
}

/// An epoch's place at the sweep.
pub struct SweepSubscription {
    sweep: Arc<Sweep>,
    subscriber: SubscriberId,
    queue: PickQueue,
    /// What came back: granted before anything else.
    back: VecDeque<u32>,
    base: u64,
}

/// How long ago entries of a plan's base were delivered, they or a copy of them, and before how many at least all others were:
/// as far back as `most` entries, or the ledger goes. What was rolled back, or came back, was not.
fn delivered_ago(ledger: &Ledger, leases: &Leases, plan: &Plan, most: u64) -> (BTreeMap<u64, u64>, u64) {
    let granted = ledger.events.iter().rev().filter_map(|e| match e {
        Event::Grant { entries, .. } => Some(entries.iter().rev()),
        _ => None,
    });
    let delivered = granted
        .flatten()
        .filter(|&&e| !leases.is_free(e) && u64::from(e) < plan.entries())
        .map(|&e| u64::from(e) % plan.base_entries().max(1));
    let (mut ago, mut all) = (BTreeMap::new(), 0);
    for entry in delivered.take(usize::try_from(most).unwrap_or(usize::MAX)) {
        ago.entry(entry).or_insert(all);
        all += 1;
    }
    (ago, all)
}

impl Drop for SweepSubscription {
    fn drop(&mut self) {
        self.sweep.leave(self.subscriber);
    }
}

impl SweepSubscription {
    /// Sits down: `leases` say what is left, `ledger` what was granted last.
    pub fn join(setup: &Setup, sweep: &Arc<Sweep>, leases: &Leases, ledger: &Ledger, key: &OrderKey) -> Self {
        let base = setup.plan.base_entries();
        let subscriber = sweep.join(setup.plan_units.clone());
        let mut first = Bits::zeros(base);
        for e in leases.free().iter_in(0, base) {
            first.set(e);
        }
        let left = setup.plan_units.to_slots(&first);
        let echo = setup.plan.echo();
        let (mut done, mut owed) = (Bits::zeros(u64::from(setup.plan_units.slots())), Vec::new());
        if echo.copies > 1 {
            let (ago, all) = delivered_ago(ledger, leases, &setup.plan, echo.apart.into());
            for slot in 0..setup.plan_units.slots() {
                let entry = u64::from(setup.plan_units.entry(slot));
                let copies = || (0..echo.copies).map(|pass| (pass, entry + u64::from(pass) * base));
                let planned = |e: u64| leases.planned().get(e);
                if copies().all(|(_, e)| leases.free().get(e) || !planned(e)) && leases.free().get(entry) {
                    continue;
                }
                // Some of it was handed out, or its first pass is left out: what is left comes by itself.
                done.set(u64::from(slot));
                let unit = setup.plan_units.unit(slot);
                let rest = copies().filter(|&(pass, e)| pass > 0 && leases.free().get(e));
                let passes: VecDeque<u32> = rest.map(|(pass, _)| pass).collect();
                if !passes.is_empty() {
                    owed.push(DueCopies { slot, unit, passes, ago: ago.get(&entry).copied().unwrap_or(all) });
                }
            }
        }
        sweep.begin(subscriber, left);
        let queue = PickQueue::echoing(echo, key.draws("echo", u64::MAX), done, owed);
        SweepSubscription { sweep: Arc::clone(sweep), subscriber, queue, back: VecDeque::new(), base }
    }
}

impl Sequence {
    /// The order of a course, where the cache does not choose: from its beginning, or after a restart. `began` is the
    /// leases as they were when their world began.
    pub fn of(schedule: &Schedule, began: &Leases) -> Result<Self, JobError> {
        Ok(match schedule {
            Schedule::Strict(strict) => Sequence::Strict(Box::new(StrictAssignment::resumed(strict, began))),
            Schedule::Buckets(order) => {
                let ranks = began.world().ranks;
                Sequence::AssignedSequence(AssignedSequence::begin(
                    Assigned::Buckets(Box::new(order.with_ranks(ranks)?)),
                    ranks,
                ))
            }
            Schedule::Replay(told, _) => Sequence::AssignedSequence(AssignedSequence::begin(
                Assigned::ReplaySource(Arc::clone(told)),
                began.world().ranks,
            )),
        })
    }

    /// The next `n` free entries for a rank, how each was picked, and where in the rank's turns they begin.
    pub fn choose(
        &mut self,
        epoch: &Epoch,
        leases: &Leases,
        rank: u32,
        n: u32,
    ) -> (Vec<u32>, Vec<DeliveryClass>, u64) {
        match self {
            Sequence::Over => (Vec::new(), Vec::new(), 0),
            Sequence::AssignedSequence(known) => {
                let (entries, from) = known.next(leases, rank, n);
                let classes = vec![DeliveryClass::Exact; entries.len()];
                (entries, classes, from)
            }
            Sequence::Strict(turns) => {
                let Schedule::Strict(strict) = &epoch.schedule else { return (Vec::new(), Vec::new(), 0) };
                let (entries, from) = turns.next(strict, leases, rank, n);
                let classes = vec![DeliveryClass::Exact; entries.len()];
                (entries, classes, from)
            }
            Sequence::Substitute(sweep) => {
                let (mut entries, mut classes) = (Vec::new(), Vec::new());
                while entries.len() < n as usize
                    && let Some(e) = sweep.back.pop_front()
                {
                    if leases.is_free(e) {
                        entries.push(e);
                        classes.push(sweep.sweep.class_of(epoch.schedule.item(e).sample, epoch.owner));
                    }
                }
                while entries.len() < n as usize {
                    let missing = n - u32::try_from(entries.len()).unwrap_or(n);
                    let picked = sweep.sweep.next_picks(
                        sweep.subscriber,
                        &mut sweep.queue,
                        missing,
                        epoch.owner,
                        sweep.base,
                    );
                    if picked.is_empty() {
                        break;
                    }
                    // An echo that the tail rule left out is drawn and not granted.
                    for p in picked.into_iter().filter(|p| leases.is_free(p.entry)) {
                        entries.push(p.entry);
                        classes.push(p.class);
                    }
                }
                (entries, classes, 0)
            }
        }
    }

    /// What was chosen became a lease.
    pub fn granted(&mut self, lease: u64, rank: u32, from: u64) {
        match self {
            Sequence::Strict(turns) => turns.granted(lease, rank, from),
            Sequence::AssignedSequence(known) => {
                known.begun.insert(lease, (rank, from));
            }
            Sequence::Substitute(_) | Sequence::Over => {}
        }
    }

    /// A lease was wholly acknowledged.
    pub fn settled(&mut self, lease: u64) {
        match self {
            Sequence::Strict(turns) => turns.settled(lease),
            Sequence::AssignedSequence(known) => {
                known.begun.remove(&lease);
            }
            Sequence::Substitute(_) | Sequence::Over => {}
        }
    }

    /// A lease expired.
    pub fn expired(&mut self, lease: u64, rank: u32) {
        match self {
            Sequence::Strict(turns) => turns.expired(lease, rank),
            Sequence::AssignedSequence(known) => {
                // One from before a restart: from the beginning, past what is not free.
                let (rank, from) = known.begun.remove(&lease).unwrap_or((rank, 0));
                known.cursors.rewind(rank, from);
            }
            Sequence::Substitute(_) | Sequence::Over => {}
        }
    }

    /// Entries are free again.
    pub fn came_back(&mut self, entries: &[u32]) {
        if let Sequence::Substitute(sweep) = self {
            sweep.back.extend(entries);
        }
    }

    /// Another world has begun.
    pub fn change_world(&mut self, schedule: &Schedule, leases: &Leases) -> Result<(), JobError> {
        if matches!(self, Sequence::Strict(_) | Sequence::AssignedSequence(_)) {
            *self = Sequence::of(schedule, leases)?;
        }
        Ok(())
    }
}
