//! The doors of a sweep: every call that changes it, told to a [`Tape`](super::tape::Tape) when one runs.

use super::{Act, Call, Came, Flywheel, Pick, SeatId};
use crate::{
    order::{bits::Bits, shape::Laid},
    residency::Residency,
};

impl Flywheel {
    /// Changes the capacity. What no longer fits leaves by random draw from the reserve, then
    /// oldest first from the window.
    pub fn set_capacity(&mut self, capacity: u64, acts: &mut Vec<Act>) {
        let from = acts.len();
        self.resize(capacity, acts);
        self.tell(|| Call::Capacity { bytes: capacity }, || Came::acts(&acts[from..]));
    }

    /// Takes over what the cache already holds (after a restart): the reserve is filled with
    /// it, the rest becomes window. What exceeds the capacity is evicted.
    pub fn adopt(&mut self, residency: &Residency, acts: &mut Vec<Act>) {
        let from = acts.len();
        self.take_over(residency, acts);
        self.tell(|| Call::Adopt { residency: residency.clone() }, || Came::acts(&acts[from..]));
    }

    /// A job sits down. Its epoch starts with [`Flywheel::begin`].
    ///
    /// # Panics
    /// When 2^32 jobs sit already.
    pub fn join(&mut self, laid: Laid) -> SeatId {
        let kept = self.tape.is_some().then(|| laid.clone());
        let seat = self.sit(laid);
        if let Some(laid) = kept {
            self.tell(|| Call::Join { laid }, || Came { seat: Some(seat), ..Came::default() });
        }
        seat
    }

    /// The job is gone: it protects nothing and blocks nothing any more.
    pub fn leave(&mut self, seat: SeatId) {
        self.rise(seat);
        self.tell(|| Call::Leave { seat }, Came::default);
    }

    /// Starts (or resumes) an epoch: `left` are the spots still to be handed out.
    ///
    /// # Panics
    /// When `left` has another length than the plan has spots.
    pub fn begin(&mut self, seat: SeatId, left: Bits) {
        let kept = self.tape.is_some().then(|| left.clone());
        self.start(seat, left);
        if let Some(left) = kept {
            self.tell(|| Call::Begin { seat, left }, Came::default);
        }
    }

    /// The next sample of a job, and the orders to the store that come with it; `None` when its
    /// epoch has nothing left to hand out.
    pub fn next(&mut self, seat: SeatId, acts: &mut Vec<Act>) -> Option<Pick> {
        let from = acts.len();
        let pick = self.pick(seat, acts);
        self.tell(|| Call::Next { seat }, || Came { pick, ..Came::acts(&acts[from..]) });
        pick
    }

    /// Moves the sweep by one unit ahead of need, because the way to the origin is idle (pacing:
    /// fetch early, serve later); whether it moved. Only a job that is alone gains by it: its
    /// next turn costs the same bytes, sooner. Several jobs would fall out of step (ADR 10), and
    /// to fetch for an epoch that has not begun would displace what that epoch wants as much.
    pub fn advance(&mut self, acts: &mut Vec<Act>) -> bool {
        let from = acts.len();
        let moved = self.press(acts);
        self.tell(|| Call::Advance, || Came { moved, ..Came::acts(&acts[from..]) });
        moved
    }

    /// A spot that was handed out comes back unread (its lease expired): it is due at once.
    ///
    /// # Panics
    /// When the spot was not handed out.
    pub fn give_back(&mut self, seat: SeatId, spot: u32) {
        self.put_back(seat, spot);
        self.tell(|| Call::GiveBack { seat, spot }, Came::default);
    }

    /// The unit is not here after all: it vanished (a cache may lose anything), or its load
    /// failed. Nothing is handed out twice or lost by it.
    pub fn lost(&mut self, unit: u32) {
        self.lose(unit);
        self.tell(|| Call::Lost { unit }, Came::default);
    }

    /// The store had no room for a unit that was ordered: it keeps less than the capacity. So much less is planned with
    /// from now on, until [`Flywheel::set_capacity`] says otherwise, and what leaves for it is in `acts`; the load may then
    /// be tried again. `false`, and nothing changes, when the unit is no longer wanted or half of `granted` is already
    /// given up: a store that refuses more is no store that lacks room.
    pub fn give_way(&mut self, unit: u32, granted: u64, acts: &mut Vec<Act>) -> bool {
        let less = self.capacity.checked_sub(self.shape.bytes(unit)).filter(|&less| less >= granted / 2);
        let Some(less) = less.filter(|_| self.holds(unit)) else { return false };
        self.set_capacity(less, acts);
        self.holds(unit)
    }

    /// Compares with what is really here: units that the snapshot lacks although they were
    /// ordered before it was made are [`Flywheel::lost`]. `as_of` is
    /// [`Standing::swept_bytes`](super::Standing::swept_bytes) of a moment whose loads had all finished
    /// when the snapshot was made; an old one is harmless, it only finds less.
    pub fn reconcile(&mut self, residency: &Residency, as_of: u64) {
        self.compare(residency, as_of);
        self.tell(|| Call::Reconcile { residency: residency.clone(), as_of }, Came::default);
    }
}
