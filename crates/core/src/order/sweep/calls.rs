//! The doors of a sweep: every call that changes it, told to a [`TraceLog`](super::tape::TraceLog) when one runs.

use super::{Call, CallResult, Pick, SubscriberId, SweepPolicy};
use crate::residency::CacheAction;
use crate::{
    plan::{bits::Bits, unit_map::PlanUnits},
    residency::Residency,
};

impl SweepPolicy {
    /// Changes the capacity. What no longer fits leaves by random draw from the reserve, then
    /// oldest first from the window.
    pub fn set_capacity(&mut self, capacity: u64, actions: &mut Vec<CacheAction>) {
        let from = actions.len();
        self.resize(capacity, actions);
        self.tell(|| Call::Capacity { bytes: capacity }, || CallResult::actions(&actions[from..]));
    }

    /// Takes over what the cache already holds (after a restart): the reserve is filled with
    /// it, the rest becomes window. What exceeds the capacity is evicted.
    pub fn adopt(&mut self, residency: &Residency, actions: &mut Vec<CacheAction>) {
        let from = actions.len();
        self.take_over(residency, actions);
        self.tell(|| Call::Adopt { residency: residency.clone() }, || CallResult::actions(&actions[from..]));
    }

    /// A job sits down. Its epoch starts with [`SweepPolicy::begin`].
    ///
    /// # Panics
    /// When 2^32 jobs sit already.
    pub fn join(&mut self, plan_units: PlanUnits) -> SubscriberId {
        let kept = self.trace_log.is_some().then(|| plan_units.clone());
        let subscriber = self.sit(plan_units);
        if let Some(plan_units) = kept {
            self.tell(
                || Call::Join { plan_units },
                || CallResult { subscriber: Some(subscriber), ..CallResult::default() },
            );
        }
        subscriber
    }

    /// The job is gone: it protects nothing and blocks nothing any more.
    pub fn leave(&mut self, subscriber: SubscriberId) {
        self.rise(subscriber);
        self.tell(|| Call::Leave { subscriber }, CallResult::default);
    }

    /// Starts (or resumes) an epoch: `left` are the slots still to be handed out.
    ///
    /// # Panics
    /// When `left` has another length than the plan has slots.
    pub fn begin(&mut self, subscriber: SubscriberId, left: Bits) {
        let kept = self.trace_log.is_some().then(|| left.clone());
        self.start(subscriber, left);
        if let Some(left) = kept {
            self.tell(|| Call::Begin { subscriber, left }, CallResult::default);
        }
    }

    /// The next sample of a job, and the orders to the store that come with it; `None` when its
    /// epoch has nothing left to hand out.
    pub fn next(&mut self, subscriber: SubscriberId, actions: &mut Vec<CacheAction>) -> Option<Pick> {
        let from = actions.len();
        let pick = self.pick(subscriber, actions);
        self.tell(
            || Call::Next { subscriber },
            || CallResult { pick, ..CallResult::actions(&actions[from..]) },
        );
        pick
    }

    /// Moves the sweep by one unit ahead of need, because the way to the origin is idle (pacing:
    /// fetch early, serve later); whether it moved. Only a job that is alone gains by it: its
    /// next turn costs the same bytes, sooner. Several jobs would fall out of step (ADR 10), and
    /// to fetch for an epoch that has not begun would displace what that epoch wants as much.
    pub fn advance(&mut self, actions: &mut Vec<CacheAction>) -> bool {
        let from = actions.len();
        let moved = self.press(actions);
        self.tell(|| Call::Advance, || CallResult { moved, ..CallResult::actions(&actions[from..]) });
        moved
    }

    /// A slot that was handed out comes back unread (its lease expired): it is due at once.
    ///
    /// # Panics
    /// When the slot was not handed out.
    pub fn give_back(&mut self, subscriber: SubscriberId, slot: u32) {
        self.put_back(subscriber, slot);
        self.tell(|| Call::GiveBack { subscriber, slot }, CallResult::default);
    }

    /// The unit is not here after all: it vanished (a cache may lose anything), or its load
    /// failed. Nothing is handed out twice or lost by it.
    pub fn lost(&mut self, unit: u32) {
        self.lose(unit);
        self.tell(|| Call::Lost { unit }, CallResult::default);
    }

    /// The store had no room for a unit that was ordered: it keeps less than the capacity. So much less is planned with
    /// from now on, until [`SweepPolicy::set_capacity`] says otherwise, and what leaves for it is in `acts`; the load may then
    /// be tried again. `false`, and nothing changes, when the unit is no longer wanted or half of `granted` is already
    /// given up: a store that refuses more is no store that lacks room.
    pub fn give_way(&mut self, unit: u32, granted: u64, actions: &mut Vec<CacheAction>) -> bool {
        let less = self.capacity.checked_sub(self.unit_map.bytes(unit)).filter(|&less| less >= granted / 2);
        let Some(less) = less.filter(|_| self.holds(unit)) else { return false };
        self.set_capacity(less, actions);
        self.holds(unit)
    }

    /// Compares with what is really here: units that the snapshot lacks although they were
    /// ordered before it was made are [`SweepPolicy::lost`]. `as_of` is
    /// [`SweepProgress::swept_bytes`](super::SweepProgress::swept_bytes) of a moment whose loads had all finished
    /// when the snapshot was made; an old one is harmless, it only finds less.
    pub fn reconcile(&mut self, residency: &Residency, as_of: u64) {
        self.compare(residency, as_of);
        self.tell(|| Call::Reconcile { residency: residency.clone(), as_of }, CallResult::default);
    }
}
