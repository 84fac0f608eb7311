//! The sequence of an epoch: which entries its ranks get next, by a permutation, by an assignment or by the
//! sweep.

use super::{Epoch, JobSetup, Schedule};
use crate::training::{
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

/// Chooses the next entries of an epoch.
pub enum Sequence {
    /// Follows the strict order.
    Strict(Box<StrictAssignment>),
    /// Follows a fixed assignment of entries to ranks.
    Assigned(Box<AssignedSequence>),
    /// Asks the sweep.
    Substitute(Box<SweepSubscription>),
    /// Chooses nothing: the epoch is over and its subscription has ended.
    Over,
}

/// The fixed sequences of all ranks in one world.
pub struct AssignedSequence {
    assignment: Assignment,
    cursors: RankCursors,
    /// By live lease: the rank, and the position in the rank's sequence at which the lease begins.
    begun: BTreeMap<u64, (u32, u64)>,
}

enum Assignment {
    Buckets(Box<Bucketed>),
    Replay(Arc<ReplaySource>),
}

impl AssignedSequence {
    fn begin(assignment: Assignment, ranks: u32) -> Box<Self> {
        Box::new(AssignedSequence { assignment, cursors: RankCursors::new(ranks), begun: BTreeMap::new() })
    }

    fn next(&mut self, leases: &Leases, rank: u32, n: u32) -> (Vec<u32>, u64) {
        let free = |e| leases.is_free(e);
        match &self.assignment {
            Assignment::Buckets(order) => order.next(&mut self.cursors, rank, n, free),
            Assignment::Replay(told) => self.cursors.next(rank, n, |j| told.entry_at(rank, j), free),
        }
    }
}

/// An epoch's subscription to the sweep.
pub struct SweepSubscription {
    sweep: Arc<Sweep>,
    subscriber: SubscriberId,
    queue: PickQueue,
    /// Entries of leases that expired or were released: granted before anything else.
    released: VecDeque<u32>,
    base: u64,
}

/// Returns how long ago entries of the plan's base were delivered, in entries, by base entry.
///
/// The second value is a lower bound for all entries that the map does not have. The search goes back by
/// `most` entries, or to the ledger's beginning. Entries that were rolled back or whose lease expired do not
/// count.
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
    /// Subscribes to the sweep: `leases` have the entries that are left, `ledger` the latest grants.
    pub fn join(
        setup: &JobSetup,
        sweep: &Arc<Sweep>,
        leases: &Leases,
        ledger: &Ledger,
        key: &OrderKey,
    ) -> Self {
        let base = setup.plan.base_entries();
        let subscriber = sweep.join(setup.plan_units.clone());
        let mut first = Bits::zeros(base);
        for e in leases.free().iter_in(0, base) {
            first.set(e);
        }
        let left = setup.plan_units.to_slots(&first);
        let echo = setup.plan.echo();
        let (mut done, mut due_copies) = (Bits::zeros(u64::from(setup.plan_units.slots())), Vec::new());
        if echo.copies > 1 {
            let (ago, all) = delivered_ago(ledger, leases, &setup.plan, echo.apart.into());
            for slot in 0..setup.plan_units.slots() {
                let entry = u64::from(setup.plan_units.entry(slot));
                let copies = || (0..echo.copies).map(|pass| (pass, entry + u64::from(pass) * base));
                let planned = |e: u64| leases.planned().get(e);
                if copies().all(|(_, e)| leases.free().get(e) || !planned(e)) && leases.free().get(entry) {
                    continue;
                }
                // A copy was granted already, or the first pass leaves the entry out: the other copies follow
                // by themselves.
                done.set(u64::from(slot));
                let unit = setup.plan_units.unit(slot);
                let rest = copies().filter(|&(pass, e)| pass > 0 && leases.free().get(e));
                let passes: VecDeque<u32> = rest.map(|(pass, _)| pass).collect();
                if !passes.is_empty() {
                    due_copies.push(DueCopies {
                        slot,
                        unit,
                        passes,
                        ago: ago.get(&entry).copied().unwrap_or(all),
                    });
                }
            }
        }
        sweep.begin(subscriber, left);
        let queue = PickQueue::echoing(echo, key.draws("echo", u64::MAX), done, due_copies);
        SweepSubscription { sweep: Arc::clone(sweep), subscriber, queue, released: VecDeque::new(), base }
    }
}

impl Sequence {
    /// Returns the sequence of a schedule whose order is known, at the beginning or after a restart.
    ///
    /// `began` is the leases as they were when their world began.
    pub fn of(schedule: &Schedule, began: &Leases) -> Result<Self, JobError> {
        Ok(match schedule {
            Schedule::Strict(strict) => Sequence::Strict(Box::new(StrictAssignment::begin(strict, began))),
            Schedule::Buckets(order) => {
                let ranks = began.world().ranks;
                Sequence::Assigned(AssignedSequence::begin(
                    Assignment::Buckets(Box::new(order.with_ranks(ranks)?)),
                    ranks,
                ))
            }
            Schedule::Replay(told, _) => Sequence::Assigned(AssignedSequence::begin(
                Assignment::Replay(Arc::clone(told)),
                began.world().ranks,
            )),
        })
    }

    /// Returns the next `n` free entries for a rank, their classes, and where in the rank's sequence they
    /// begin.
    pub fn choose(
        &mut self,
        epoch: &Epoch,
        leases: &Leases,
        rank: u32,
        n: u32,
    ) -> (Vec<u32>, Vec<DeliveryClass>, u64) {
        match self {
            Sequence::Over => (Vec::new(), Vec::new(), 0),
            Sequence::Assigned(assigned) => {
                let (entries, from) = assigned.next(leases, rank, n);
                let classes = vec![DeliveryClass::Exact; entries.len()];
                (entries, classes, from)
            }
            Sequence::Strict(assignment) => {
                let Schedule::Strict(strict) = &epoch.schedule else { return (Vec::new(), Vec::new(), 0) };
                let (entries, from) = assignment.next(strict, leases, rank, n);
                let classes = vec![DeliveryClass::Exact; entries.len()];
                (entries, classes, from)
            }
            Sequence::Substitute(sweep) => {
                let (mut entries, mut classes) = (Vec::new(), Vec::new());
                while entries.len() < n as usize
                    && let Some(e) = sweep.released.pop_front()
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
                    // The sweep also picks copies that the tail rule left out; those are not granted.
                    for p in picked.into_iter().filter(|p| leases.is_free(p.entry)) {
                        entries.push(p.entry);
                        classes.push(p.class);
                    }
                }
                (entries, classes, 0)
            }
        }
    }

    /// Begins a probe of `n` entries besides twice those that are under way, `held` by ranks or decided: they
    /// come from the cache. Returns how many they are.
    ///
    /// # Errors
    /// [`JobError::NoProbe`].
    pub fn probe(&mut self, n: u64, held: u64) -> Result<u64, JobError> {
        let Sequence::Substitute(of) = self else {
            return Err(JobError::NoProbe("its epoch is over".to_owned()));
        };
        if of.queue.echoes() {
            let why = "its plan repeats samples, at a distance that a probe would change";
            return Err(JobError::NoProbe(why.to_owned()));
        }
        let all = n.saturating_add(held.saturating_add(of.queue.len() as u64).saturating_mul(2));
        let cached = of.sweep.left_in_reserve(of.subscriber);
        if cached < all {
            return Err(JobError::NoProbe(format!(
                "that takes {all} cached samples, and the cache has {cached} that its epoch still needs"
            )));
        }
        of.queue.probe(all);
        Ok(all)
    }

    /// Records that the chosen entries became a lease.
    pub fn granted(&mut self, lease: u64, rank: u32, from: u64) {
        match self {
            Sequence::Strict(assignment) => assignment.granted(lease, rank, from),
            Sequence::Assigned(assigned) => {
                assigned.begun.insert(lease, (rank, from));
            }
            Sequence::Substitute(_) | Sequence::Over => {}
        }
    }

    /// Records that a lease was acknowledged in full.
    pub fn settled(&mut self, lease: u64) {
        match self {
            Sequence::Strict(assignment) => assignment.settled(lease),
            Sequence::Assigned(assigned) => {
                assigned.begun.remove(&lease);
            }
            Sequence::Substitute(_) | Sequence::Over => {}
        }
    }

    /// Returns to the beginning of a lease that expired or was released.
    pub fn ended(&mut self, lease: u64, rank: u32) {
        match self {
            Sequence::Strict(assignment) => assignment.expired(lease, rank),
            Sequence::Assigned(assigned) => {
                // A lease from before a restart: begin at the start of the sequence, which skips entries that
                // are not free.
                let (rank, from) = assigned.begun.remove(&lease).unwrap_or((rank, 0));
                assigned.cursors.rewind(rank, from);
            }
            Sequence::Substitute(_) | Sequence::Over => {}
        }
    }

    /// Takes back entries that are free again.
    pub fn take_back(&mut self, entries: &[u32]) {
        if let Sequence::Substitute(sweep) = self {
            sweep.released.extend(entries);
        }
    }

    /// Continues in another world.
    pub fn change_world(&mut self, schedule: &Schedule, leases: &Leases) -> Result<(), JobError> {
        if matches!(self, Sequence::Strict(_) | Sequence::Assigned(_)) {
            *self = Sequence::of(schedule, leases)?;
        }
        Ok(())
    }
}
