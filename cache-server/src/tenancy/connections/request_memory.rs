//! The memory for heads and bodies of requests: one budget, which no caller can use up.
//!
//! A connection takes from it before its first byte is read, and gives it back when the request was parsed or
//! dropped. A caller may take more only as long as it holds no more than what is then still free. So one
//! caller has at most half, two have a third each, and there is always some left for the next. (This is the
//! dynamic threshold of Choudhury and Hahne, 1998, for switches with shared memory.)
//!
//! Callers without a token have at most a quarter together, divided among their sources by the same rule.

use super::table::Source;
use crate::app::telemetry::Event;
use fletch_core::Tenant;
use parking_lot::{Mutex, MutexGuard};
use std::{collections::HashMap, sync::Arc};
use tokio::sync::Notify;

/// Whose request holds the memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Caller {
    /// A tenant.
    Tenant(Tenant),
    /// A source whose connection has not proven a tenant yet.
    Stranger(Source),
}

/// The memory is used up for this caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("requests of this caller hold {held} bytes of the memory for requests, and {wanted} more do not fit")]
pub struct NoMemory {
    /// Bytes that the caller holds.
    pub held: u64,
    /// Bytes that it wants in addition.
    pub wanted: u64,
}

/// The budget.
#[derive(Debug)]
pub struct RequestMemory {
    max: u64,
    held: Mutex<Held>,
    freed: Notify,
    refused: [Event; BodyRefusal::ALL.len()],
}

/// Why a body was not read to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyRefusal {
    /// The caller's requests hold too much memory.
    Memory = 0,
    /// The client sent it too slowly.
    Slow = 1,
    /// It is longer than any body may be.
    TooLarge = 2,
}

impl BodyRefusal {
    const ALL: [BodyRefusal; 3] = [BodyRefusal::Memory, BodyRefusal::Slow, BodyRefusal::TooLarge];

    fn as_str(self) -> &'static str {
        match self {
            BodyRefusal::Memory => "memory",
            BodyRefusal::Slow => "slow",
            BodyRefusal::TooLarge => "too_large",
        }
    }
}

#[derive(Debug, Default)]
struct Held {
    all: u64,
    strangers: u64,
    callers: HashMap<Caller, u64>,
}

impl Held {
    /// Returns whether a caller may hold `n` more of `max` bytes.
    fn fits(&self, caller: &Caller, n: u64, max: u64) -> Result<(), NoMemory> {
        let held = self.callers.get(caller).copied().unwrap_or(0);
        let fair = |max: u64, all: u64| held + n <= max.saturating_sub(all + n);
        let known = matches!(caller, Caller::Tenant(_)) || fair(max / 4, self.strangers);
        if known && fair(max, self.all) { Ok(()) } else { Err(NoMemory { held, wanted: n }) }
    }

    fn add(&mut self, caller: &Caller, n: u64) {
        self.all += n;
        if matches!(caller, Caller::Stranger(_)) {
            self.strangers += n;
        }
        *self.callers.entry(caller.clone()).or_default() += n;
    }

    fn remove(&mut self, caller: &Caller, n: u64) {
        self.all -= n;
        if matches!(caller, Caller::Stranger(_)) {
            self.strangers -= n;
        }
        if let Some(held) = self.callers.get_mut(caller) {
            *held -= n;
            if *held == 0 {
                self.callers.remove(caller);
            }
        }
    }
}

impl RequestMemory {
    /// Creates a budget of `max` bytes.
    #[must_use]
    pub fn new(max: u64) -> Arc<Self> {
        Arc::new(RequestMemory {
            max,
            held: Mutex::default(),
            freed: Notify::new(),
            refused: Default::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock()
    }

    /// Takes `n` bytes for a caller.
    ///
    /// # Errors
    /// [`NoMemory`].
    pub fn take(self: &Arc<Self>, caller: Caller, n: u64) -> Result<RequestBytes, NoMemory> {
        let mut held = self.lock();
        held.fits(&caller, n, self.max)?;
        held.add(&caller, n);
        drop(held);
        Ok(RequestBytes { memory: Arc::clone(self), caller, n })
    }

    /// Returns the most bytes that one caller can hold, while no other holds any.
    #[must_use]
    pub fn most_of_one(&self) -> u64 {
        self.max / 2
    }

    /// Counts a body that was not read to its end, and logs it if it is time for a line.
    pub fn count_refused_body(&self, tenant: &Tenant, why: BodyRefusal) {
        if let Some(new) = self.refused[why as usize].count() {
            tracing::warn!(
                %tenant, reason = why.as_str(), refused = new,
                "a body was not read to its end (the count is since the last such line)"
            );
        }
    }

    /// Returns how many bodies were not read to their end, by reason.
    #[must_use]
    pub fn refused_bodies(&self) -> Vec<(&'static str, u64)> {
        BodyRefusal::ALL.map(|why| (why.as_str(), self.refused[why as usize].total())).to_vec()
    }

    /// Returns a value on which to wait until a caller gives bytes back.
    pub fn freed(&self) -> &Notify {
        &self.freed
    }

    /// Returns the bytes that are taken by tenants, by callers without a token, and the limit.
    #[must_use]
    pub fn stats(&self) -> (u64, u64, u64) {
        let held = self.lock();
        (held.all - held.strangers, held.strangers, self.max)
    }
}

/// Bytes that a caller took. Dropping them gives them back.
#[derive(Debug)]
pub struct RequestBytes {
    memory: Arc<RequestMemory>,
    caller: Caller,
    n: u64,
}

impl RequestBytes {
    /// Takes more, so that the whole is `n` bytes. Does nothing if it is as much already.
    ///
    /// # Errors
    /// [`NoMemory`]; nothing was taken.
    pub fn grow_to(&mut self, n: u64) -> Result<(), NoMemory> {
        let more = n.saturating_sub(self.n);
        let mut held = self.memory.lock();
        held.fits(&self.caller, more, self.memory.max)?;
        held.add(&self.caller, more);
        self.n += more;
        Ok(())
    }

    /// Gives back what is more than `n` bytes.
    pub fn shrink_to(&mut self, n: u64) {
        let less = self.n.saturating_sub(n);
        if less == 0 {
            return;
        }
        self.memory.lock().remove(&self.caller, less);
        self.n -= less;
        self.memory.freed.notify_waiters();
    }

    /// Makes the bytes those of a tenant, which is now known.
    pub fn belong_to(&mut self, tenant: &Tenant) {
        let caller = Caller::Tenant(tenant.clone());
        if caller != self.caller {
            let mut held = self.memory.lock();
            held.remove(&self.caller, self.n);
            held.add(&caller, self.n);
            self.caller = caller;
        }
    }
}

impl Drop for RequestBytes {
    fn drop(&mut self) {
        self.memory.lock().remove(&self.caller, self.n);
        self.memory.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tenant(n: u8) -> Caller {
        Caller::Tenant(Tenant::new(&format!("t{n}")).expect("a name"))
    }

    fn stranger(n: u8) -> Caller {
        Caller::Stranger(Source::of([10, 0, 0, n].into()))
    }

    #[test]
    fn one_caller_has_half_and_the_next_always_some() {
        let memory = RequestMemory::new(1 << 20);
        let mut of_a = memory.take(tenant(0), 1 << 19).expect("half");
        assert!(of_a.grow_to((1 << 19) + 1).is_err() && memory.take(tenant(0), 1).is_err());
        let of_b = memory.take(tenant(1), 1 << 18).expect("half of the rest");
        let of_c = memory.take(tenant(2), 1 << 17).expect("and so on");
        assert_eq!(memory.stats(), ((1 << 19) + (1 << 18) + (1 << 17), 0, 1 << 20));
        of_a.shrink_to(5);
        drop((of_b, of_c));
        assert_eq!(memory.stats(), (5, 0, 1 << 20));
    }

    #[test]
    fn callers_without_a_token_have_a_quarter_until_they_are_known() {
        let memory = RequestMemory::new(1000);
        let mut bytes = memory.take(stranger(1), 125).expect("room");
        assert_eq!(memory.take(stranger(1), 1).err(), Some(NoMemory { held: 125, wanted: 1 }));
        assert_eq!(memory.take(stranger(2), 63).err(), Some(NoMemory { held: 0, wanted: 63 }));
        drop(memory.take(stranger(2), 62).expect("half of the rest"));
        bytes.belong_to(&Tenant::new("t").expect("a name"));
        assert_eq!(memory.stats(), (125, 0, 1000));
        assert!(memory.take(stranger(2), 125).is_ok());
    }

    proptest! {
        /// Whatever callers take, the budget holds, and a caller that holds nothing gets a share.
        #[test]
        fn the_budget_holds_and_nobody_is_shut_out(
            takes in proptest::collection::vec((0u8..6, 1u64..600, any::<bool>()), 1..100),
        ) {
            let memory = RequestMemory::new(1 << 12);
            let mut kept = Vec::new();
            for (who, n, keep) in takes {
                let taken = memory.take(tenant(who), n);
                if keep && let Ok(bytes) = taken {
                    kept.push(bytes);
                }
                prop_assert!(memory.stats().0 <= 1 << 12);
                prop_assert!(memory.take(tenant(99), 16).is_ok(), "a seventh caller gets a little");
            }
            drop(kept);
            prop_assert_eq!(memory.stats().0, 0);
        }
    }
}
