//! Decides which reads of hung objects give their permit back, so that an origin's other objects are read.
//!
//! A call is *stalled* when it has brought no byte for the patience of its backend: four times as long as the
//! backend usually takes to the first byte, at least 250 ms, and a second while that is unknown.
//!
//! While callers wait, stalled calls keep at most half of the permits that the backend holds: the newest
//! beyond that are revoked. An object whose call stalled is a *suspect* for a minute. A call to a suspect
//! begins only while such calls and stalled calls together hold less than a quarter of the permits.
//!
//! This file decides, and takes `now` as a value; `watch.rs` waits. `docs/adr/0074-hung-objects-hold-half.md`
//! has the reasons.
//!
//! Invariants:
//! 1. Nothing is revoked while no caller waits, and never more calls than callers wait.
//! 2. A revoked call was silent for the patience. A call that brought a byte since is never revoked.
//! 3. The oldest stalled calls keep half of the permits that a backend holds: an origin that is slow
//!    altogether answers them, and its answers raise the patience.
//! 4. At most [`SUSPECTS_MAX`] suspects of a backend are remembered.

use crate::backend::Backend;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

mod watch;

pub(crate) use watch::{Holding, StallWatch, SuspectSlot, heard};

/// The shortest silence after which a call is stalled.
const PATIENCE_MIN: Duration = Duration::from_millis(250);
/// The patience with a backend that has not answered yet.
const PATIENCE_UNKNOWN: Duration = Duration::from_secs(1);
/// The patience, as a multiple of the smoothed time to the first byte.
const PATIENCE_TIMES: u32 = 4;
/// The part of a backend's permits that calls to suspects may hold, as a divisor.
const SLOTS_PART: usize = 4;
/// For how long an object whose call stalled is a suspect.
const SUSPECT_FOR: Duration = Duration::from_secs(60);
/// The most suspects of one backend.
const SUSPECTS_MAX: usize = 1024;

pub(crate) type CallId = u64;

/// The permit for which a caller waits.
#[derive(Debug, Clone, Copy)]
pub(crate) enum WaitsFor<'a> {
    /// One of a backend.
    Backend(&'a Backend),
    /// One of a user of this crate, who limits the calls to the backend.
    Outside(&'a Backend),
    /// One of all origins.
    Any,
}

/// The calls in flight to all backends, and the callers that wait.
#[derive(Debug)]
pub(crate) struct Stalls {
    backends: BTreeMap<Backend, Calls>,
    /// The permits of all backends together.
    permits_max: usize,
    /// The longest patience: then the attempt ends anyway.
    patience_max: Duration,
    waiting: usize,
    next: CallId,
}

/// The calls to one backend.
#[derive(Debug, Default)]
struct Calls {
    /// The smoothed time to the first byte.
    first_byte: Option<Duration>,
    /// The permits that callers hold.
    held: usize,
    waiting: usize,
    /// Of those that wait, the callers that wait for a permit of a user of this crate.
    outside: usize,
    attempts: BTreeMap<CallId, Attempt>,
    suspects: BTreeMap<String, Suspect>,
    /// The calls to suspects that have a slot.
    slots_used: usize,
}

#[derive(Debug)]
struct Attempt {
    object: String,
    /// Whether the call has a slot for suspects.
    has_slot: bool,
    began: Instant,
    /// When the last byte came, or the attempt began.
    last: Instant,
    is_heard: bool,
    is_revoked: bool,
}

#[derive(Debug, Clone, Copy)]
struct Suspect {
    until: Instant,
    silence: Duration,
}

impl Calls {
    fn patience(&self, max: Duration) -> Duration {
        let patience = match self.first_byte {
            None => PATIENCE_UNKNOWN,
            Some(usual) => usual.saturating_mul(PATIENCE_TIMES).max(PATIENCE_MIN),
        };
        patience.min(max)
    }

    /// Smooths the time to the first byte. It follows slower answers faster than faster ones, so it lies
    /// above the mean of an origin whose times vary.
    fn answered(&mut self, took: Duration) {
        self.first_byte = Some(match self.first_byte {
            None => took,
            Some(usual) if took > usual => usual + (took - usual) / 4,
            Some(usual) => usual - (usual - took) / 16,
        });
    }

    /// Returns the stalled attempts that are not revoked: when each was heard last, and its id.
    fn stalled(&self, now: Instant, max: Duration) -> impl Iterator<Item = (Instant, CallId)> {
        let patience = self.patience(max);
        let silent = move |a: &Attempt| now.saturating_duration_since(a.last) >= patience;
        let stalled = self.attempts.iter().filter(move |(_, a)| !a.is_revoked && silent(a));
        stalled.map(|(id, a)| (a.last, *id))
    }

    /// Returns how many revoked attempts have not ended yet.
    fn revoked(&self) -> usize {
        self.attempts.values().filter(|a| a.is_revoked).count()
    }

    fn suspect(&mut self, object: String, suspect: Suspect) {
        self.suspects.insert(object, suspect);
        if self.suspects.len() > SUSPECTS_MAX {
            let first = self.suspects.iter().min_by_key(|(_, s)| s.until).map(|(object, _)| object.clone());
            first.and_then(|object| self.suspects.remove(&object));
        }
    }
}

/// Returns the ids of the stalled calls to revoke: the newest beyond `allowed`, at most `wanted`.
fn excess(mut stalled: Vec<(Instant, CallId)>, allowed: usize, wanted: usize) -> Vec<CallId> {
    stalled.sort_unstable();
    let n = stalled.len().saturating_sub(allowed).min(wanted);
    stalled.into_iter().rev().take(n).map(|(_, id)| id).collect()
}

impl Stalls {
    /// Creates the table for `permits_max` permits of all backends, and attempts of at most `patience_max`.
    pub fn new(permits_max: usize, patience_max: Duration) -> Self {
        Stalls { backends: BTreeMap::new(), permits_max, patience_max, waiting: 0, next: 0 }
    }

    fn of(&mut self, backend: &Backend) -> &mut Calls {
        if !self.backends.contains_key(backend) {
            self.backends.insert(backend.clone(), Calls::default());
        }
        self.backends.entry(backend.clone()).or_default()
    }

    /// Counts a permit that a caller of the backend holds (`+1`) or gave back (`-1`).
    pub fn held(&mut self, backend: &Backend, by: isize) {
        let calls = self.of(backend);
        calls.held = calls.held.saturating_add_signed(by);
    }

    /// Counts a caller that waits (`+1`) or waits no longer (`-1`).
    pub fn waiting(&mut self, what: WaitsFor<'_>, by: isize) {
        let waiting = match what {
            WaitsFor::Backend(backend) => &mut self.of(backend).waiting,
            WaitsFor::Outside(backend) => {
                let calls = self.of(backend);
                calls.outside = calls.outside.saturating_add_signed(by);
                &mut calls.waiting
            }
            WaitsFor::Any => &mut self.waiting,
        };
        *waiting = waiting.saturating_add_signed(by);
    }

    /// Returns whether callers wait for a permit that a call to the backend holds outside of this crate.
    pub fn is_awaited_outside(&self, backend: &Backend) -> bool {
        self.backends.get(backend).is_some_and(|calls| calls.outside > 0)
    }

    /// Records that an attempt to read an object began.
    pub fn began(&mut self, backend: &Backend, (object, has_slot): (&str, bool), now: Instant) -> CallId {
        let id = self.next;
        self.next += 1;
        let object = object.to_owned();
        let attempt = Attempt { object, has_slot, began: now, last: now, is_heard: false, is_revoked: false };
        self.of(backend).attempts.insert(id, attempt);
        id
    }

    /// Records that the head or a piece of an answer came.
    pub fn heard(&mut self, backend: &Backend, id: CallId, now: Instant) {
        let calls = self.of(backend);
        let Some(attempt) = calls.attempts.get_mut(&id) else { return };
        attempt.last = now;
        if !std::mem::replace(&mut attempt.is_heard, true) {
            let took = now.saturating_duration_since(attempt.began);
            calls.answered(took);
        }
    }

    /// Records that an attempt ended. Its object is a suspect if the attempt was stalled, and else is none.
    pub fn ended(&mut self, backend: &Backend, id: CallId, now: Instant) {
        let max = self.patience_max;
        let calls = self.of(backend);
        let Some(attempt) = calls.attempts.remove(&id) else { return };
        let silence = now.saturating_duration_since(attempt.last);
        if attempt.is_revoked || silence >= calls.patience(max) {
            calls.suspect(attempt.object, Suspect { until: now + SUSPECT_FOR, silence });
        } else if attempt.is_heard {
            calls.suspects.remove(&attempt.object);
        }
    }

    /// Returns whether a call to the object stalled lately. No longer once the backend is known to be slower.
    pub fn is_suspect(&mut self, backend: &Backend, object: &str, now: Instant) -> bool {
        let max = self.patience_max;
        let calls = self.of(backend);
        let patience = calls.patience(max);
        let Some(suspect) = calls.suspects.get(object).copied() else { return false };
        let is_suspect = now < suspect.until && suspect.silence >= patience;
        if !is_suspect {
            calls.suspects.remove(object);
        }
        is_suspect
    }

    /// Takes a slot for a call to a suspect: one of a quarter of `permits`, at least one, less the stalled
    /// calls that have no slot. Returns whether there was one.
    pub fn take_slot(&mut self, backend: &Backend, permits: usize, now: Instant) -> bool {
        let max = self.patience_max;
        let calls = self.of(backend);
        let has_slot = |id: &CallId| calls.attempts.get(id).is_some_and(|a| a.has_slot);
        let stalled = calls.stalled(now, max).filter(|(_, id)| !has_slot(id)).count();
        let is_free = calls.slots_used + stalled < (permits / SLOTS_PART).max(1);
        calls.slots_used += usize::from(is_free);
        is_free
    }

    pub fn give_slot_back(&mut self, backend: &Backend) {
        let calls = self.of(backend);
        calls.slots_used = calls.slots_used.saturating_sub(1);
    }

    /// Returns how long the backend's calls may be silent.
    pub fn patience(&mut self, backend: &Backend) -> Duration {
        let max = self.patience_max;
        self.of(backend).patience(max)
    }

    /// Revokes stalled calls for the callers that wait, and returns the calls' ids.
    pub fn revoke(&mut self, now: Instant) -> Vec<CallId> {
        let max = self.patience_max;
        let mut ids = Vec::new();
        for calls in self.backends.values().filter(|calls| calls.waiting > 0) {
            let wanted = calls.waiting.saturating_sub(calls.revoked());
            // An origin may have more permits of its own than all have together.
            let allowed = calls.held.min(self.permits_max) / 2;
            ids.extend(excess(calls.stalled(now, max).collect(), allowed, wanted));
        }
        if self.waiting > 0 {
            let all = self.backends.values();
            let revoked = ids.len() + all.clone().map(Calls::revoked).sum::<usize>();
            let stalled = all.flat_map(|calls| calls.stalled(now, max)).filter(|(_, id)| !ids.contains(id));
            let wanted = self.waiting.saturating_sub(revoked);
            ids.extend(excess(stalled.collect(), self.permits_max / 2, wanted));
        }
        for attempt in self.backends.values_mut().flat_map(|calls| calls.attempts.iter_mut()) {
            attempt.1.is_revoked |= ids.contains(attempt.0);
        }
        ids
    }
}

#[cfg(test)]
mod tests;
