//! Permits of a resource that tenants share fairly: [`FairShare`] decides, and callers wait here.
//!
//! A tenant's callers are served in their order. Among tenants, the one that uses least goes first. So a long
//! queue of one tenant delays no other tenant.

use super::fair_share::{FairShare, Refused, ShareUse};
use fletch_core::Tenant;
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};
use tokio::sync::oneshot;

#[derive(Debug)]
pub struct FairPermits {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    share: FairShare,
    waiting: BTreeMap<Tenant, VecDeque<Waiter>>,
}

#[derive(Debug)]
struct Waiter {
    n: u64,
    sender: oneshot::Sender<FairPermit>,
}

/// What a tenant took. Dropping it gives it back.
#[derive(Debug)]
pub struct FairPermit {
    permits: Arc<FairPermits>,
    tenant: Tenant,
    n: u64,
}

impl FairPermit {
    /// Returns how much it is: less than was asked for where the tenant may have no more.
    #[must_use]
    pub fn n(&self) -> u64 {
        self.n
    }
}

impl FairPermits {
    /// Divides `all` among tenants. `unit` is the most that one request takes.
    #[must_use]
    pub fn new(all: u64, unit: u64) -> Arc<Self> {
        let state = State { share: FairShare::new(all, unit), waiting: BTreeMap::new() };
        Arc::new(FairPermits { state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Sets the known tenants, each with its own limit.
    pub fn set_tenants(self: &Arc<Self>, known: &[(Tenant, Option<u64>)]) {
        self.lock().share.set_tenants(known);
        self.serve_waiting();
    }

    fn permit(self: &Arc<Self>, tenant: &Tenant, n: u64) -> FairPermit {
        FairPermit { permits: Arc::clone(self), tenant: tenant.clone(), n }
    }

    /// Takes `n` now. Fails also while earlier callers of the tenant wait.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn try_acquire(self: &Arc<Self>, tenant: &Tenant, n: u64) -> Result<FairPermit, Refused> {
        let mut state = self.lock();
        if state.has_waiting(tenant) {
            return Err(Refused::Shared);
        }
        let n = state.share.clamp(tenant, n);
        state.share.take(tenant, n)?;
        Ok(self.permit(tenant, n))
    }

    /// Takes `n`, whatever the tenant holds. For what it held before a restart.
    #[must_use]
    pub fn force(self: &Arc<Self>, tenant: &Tenant, n: u64) -> FairPermit {
        self.lock().share.force(tenant, n);
        self.permit(tenant, n)
    }

    /// Waits until the tenant may take `n`. The caller bounds the time.
    pub async fn acquire(self: &Arc<Self>, tenant: &Tenant, n: u64) -> FairPermit {
        loop {
            let receiver = {
                let mut state = self.lock();
                let n = state.share.clamp(tenant, n);
                if !state.has_waiting(tenant) && state.share.take(tenant, n).is_ok() {
                    return self.permit(tenant, n);
                }
                let (sender, receiver) = oneshot::channel();
                state.waiting.entry(tenant.clone()).or_default().push_back(Waiter { n, sender });
                receiver
            };
            // A sender is dropped unused only with all permits.
            if let Ok(permit) = receiver.await {
                return permit;
            }
        }
    }

    /// Checks whether the tenant could take `n` now.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn check(&self, tenant: &Tenant, n: u64) -> Result<(), Refused> {
        self.lock().share.check(tenant, n)
    }

    /// Returns what all tenants use together.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.lock().share.used()
    }

    /// Returns the most that a tenant may use while every other tenant keeps its guaranteed part.
    #[must_use]
    pub fn reach(&self, tenant: &Tenant) -> u64 {
        self.lock().share.reach(tenant)
    }

    /// Returns what a tenant uses and may use.
    #[must_use]
    pub fn of(&self, tenant: &Tenant) -> ShareUse {
        self.lock().share.of(tenant)
    }

    /// Grants what waiting callers may take now.
    fn serve_waiting(self: &Arc<Self>) {
        loop {
            let next = self.lock().next();
            let Some((tenant, waiter)) = next else { return };
            // Without the lock: if the caller is gone, the permit is dropped here and gives itself back.
            drop(waiter.sender.send(self.permit(&tenant, waiter.n)));
        }
    }
}

impl State {
    fn has_waiting(&mut self, tenant: &Tenant) -> bool {
        let Some(queue) = self.waiting.get_mut(tenant) else { return false };
        queue.retain(|waiter| !waiter.sender.is_closed());
        !queue.is_empty()
    }

    /// Takes for the next waiting caller: of the tenants whose first caller may go on, the one that uses
    /// least.
    fn next(&mut self) -> Option<(Tenant, Waiter)> {
        self.waiting.retain(|_, queue| {
            while queue.front().is_some_and(|waiter| waiter.sender.is_closed()) {
                queue.pop_front();
            }
            !queue.is_empty()
        });
        let heads = self.waiting.iter().filter_map(|(tenant, queue)| Some((tenant, queue.front()?.n)));
        let (tenant, n) = heads
            .filter(|(tenant, n)| self.share.check(tenant, *n).is_ok())
            .min_by_key(|(tenant, _)| self.share.of(tenant).used)?;
        let tenant = tenant.clone();
        let waiter = self.waiting.get_mut(&tenant)?.pop_front()?;
        self.share.take(&tenant, n).ok()?;
        Some((tenant, waiter))
    }
}

impl Drop for FairPermit {
    fn drop(&mut self) {
        let idle = {
            let mut state = self.permits.lock();
            state.share.give_back(&self.tenant, self.n);
            state.waiting.is_empty()
        };
        if !idle {
            self.permits.serve_waiting();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;

    fn tenant(name: &str) -> Tenant {
        Tenant::new(name).expect("a name")
    }

    #[tokio::test]
    async fn a_long_queue_of_one_tenant_delays_no_other() {
        let (a, b) = (tenant("a"), tenant("b"));
        let permits = FairPermits::new(8, 1);
        permits.set_tenants(&[(a.clone(), None), (b.clone(), None)]);
        let mut held: Vec<_> = (0..6).map(|_| permits.try_acquire(&a, 1).expect("free")).collect();
        let mut queue: Vec<_> = (0..50).map(|_| Box::pin(permits.acquire(&a, 1))).collect();
        for waiting in &mut queue {
            assert!(waiting.as_mut().now_or_never().is_none());
        }
        let guaranteed = permits.of(&b).guaranteed;
        assert_eq!(guaranteed, 2);
        let mut of_b: Vec<_> = (0..2).map(|_| permits.try_acquire(&b, 1).expect("guaranteed")).collect();
        let mut third = Box::pin(permits.acquire(&b, 1));
        assert!(third.as_mut().now_or_never().is_none());
        // Of what comes free, the tenant that uses less gets its part first, although it came last.
        drop(held.pop());
        of_b.push(third.now_or_never().expect("served before the queue of the other tenant"));
        assert!(queue[0].as_mut().now_or_never().is_none());
        drop(held.pop());
        let first = queue.remove(0).now_or_never().expect("then the first of the queue");
        assert!(permits.try_acquire(&a, 1).is_err(), "nobody overtakes the queue of its own tenant");
        // Callers that leave take nothing with them.
        drop(queue);
        drop((first, held, of_b));
        assert_eq!(permits.used(), 0);
        assert!(permits.try_acquire(&a, 1).is_ok());
    }
}
