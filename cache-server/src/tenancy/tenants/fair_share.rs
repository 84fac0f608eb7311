//! Divides a bounded resource among tenants: how much a tenant may take now. Pure.
//!
//! Half of the resource is divided equally among the known tenants: the *guaranteed* part of each. The rest
//! goes to whoever asks first. A tenant may take more than its guaranteed part only from what no other tenant
//! is guaranteed. (The rule is Dijkstra's: never lend what another tenant may claim.)
//!
//! ```text
//! committed = sum over tenants of max(used, guaranteed)        granted if committed stays within `all`
//! ```
//!
//! Invariants:
//! 1. The tenants never use more than `all` together.
//! 2. A known tenant that stays within its guaranteed part is never refused because of other tenants, unless
//!    the tenants themselves changed while the resource was in use.
//! 3. A tenant never uses more than its own limit.

use fletch_core::Tenant;
use std::collections::BTreeMap;

/// How much each tenant uses of a bounded resource.
#[derive(Debug)]
pub struct FairShare {
    all: u64,
    /// The most that one request takes. Each tenant is guaranteed this much, if there is enough.
    unit: u64,
    guaranteed: u64,
    used: u64,
    /// The sum of `max(used, guaranteed)` of all tenants.
    committed: u64,
    tenants: BTreeMap<Tenant, Part>,
}

/// What one tenant uses, and what it may use.
#[derive(Debug, Clone, Copy)]
struct Part {
    used: u64,
    guaranteed: u64,
    max: u64,
}

/// Why a tenant gets nothing now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The tenant uses as much as its own limit allows.
    OwnLimit,
    /// The rest is guaranteed to other tenants, or in use.
    Shared,
}

/// What a tenant uses, and what it may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ShareUse {
    /// Used now.
    pub used: u64,
    /// Guaranteed to the tenant, whatever other tenants do.
    pub guaranteed: u64,
    /// The most that it may use, if others leave it.
    pub max: u64,
}

impl FairShare {
    /// Divides `all` among no tenant yet. `unit` is the most that one request takes.
    #[must_use]
    pub fn new(all: u64, unit: u64) -> Self {
        FairShare { all, unit, guaranteed: 0, used: 0, committed: 0, tenants: BTreeMap::new() }
    }

    /// Sets the known tenants, each with its own limit.
    ///
    /// A tenant that is no longer known is guaranteed nothing. What it uses stays in use until it gives it
    /// back.
    pub fn set_tenants(&mut self, known: &[(Tenant, Option<u64>)]) {
        let n = known.len().max(1) as u64;
        self.guaranteed = (self.all / 2 / n).max(self.unit).min(self.all / n);
        for part in self.tenants.values_mut() {
            (part.guaranteed, part.max) = (0, self.all);
        }
        for (tenant, max) in known {
            let max = max.map_or(self.all, |max| max.min(self.all));
            let part = self.tenants.entry(tenant.clone()).or_insert(Part { used: 0, guaranteed: 0, max });
            (part.guaranteed, part.max) = (self.guaranteed.min(max), max);
        }
        self.tenants.retain(|_, part| part.used > 0 || part.guaranteed > 0);
        self.committed = self.tenants.values().map(|p| p.used.max(p.guaranteed)).sum();
    }

    /// Returns what a request for `n` takes: less where no request of the tenant could take as much.
    #[must_use]
    pub fn clamp(&self, tenant: &Tenant, n: u64) -> u64 {
        n.min(self.tenants.get(tenant).map_or(self.all, |part| part.max))
    }

    /// Returns whether a tenant may take `n` now.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn check(&self, tenant: &Tenant, n: u64) -> Result<(), Refused> {
        let part = self.part(tenant);
        if part.used + n > part.max {
            return Err(Refused::OwnLimit);
        }
        let more = (part.used + n).max(part.guaranteed) - part.used.max(part.guaranteed);
        // A change of the tenants can leave more committed than there is. Then only free units count.
        let within = if more == 0 { self.used + n <= self.all } else { self.committed + more <= self.all };
        if within { Ok(()) } else { Err(Refused::Shared) }
    }

    /// Takes `n` for a tenant.
    ///
    /// # Errors
    /// [`Refused`]; nothing was taken.
    pub fn take(&mut self, tenant: &Tenant, n: u64) -> Result<(), Refused> {
        self.check(tenant, n)?;
        self.force(tenant, n);
        Ok(())
    }

    /// Takes `n` for a tenant that holds it already, for example since before a restart.
    pub fn force(&mut self, tenant: &Tenant, n: u64) {
        let mut part = self.part(tenant);
        let before = part.used.max(part.guaranteed);
        part.used += n;
        self.used += n;
        self.committed += part.used.max(part.guaranteed) - before;
        self.tenants.insert(tenant.clone(), part);
    }

    /// Gives back `n` that the tenant took.
    pub fn give_back(&mut self, tenant: &Tenant, n: u64) {
        let Some(part) = self.tenants.get_mut(tenant) else { return };
        let before = part.used.max(part.guaranteed);
        part.used = part.used.saturating_sub(n);
        self.used = self.used.saturating_sub(n);
        self.committed -= before - part.used.max(part.guaranteed);
        if part.used == 0 && part.guaranteed == 0 {
            self.tenants.remove(tenant);
        }
    }

    fn part(&self, tenant: &Tenant) -> Part {
        self.tenants.get(tenant).copied().unwrap_or(Part { used: 0, guaranteed: 0, max: self.all })
    }

    /// Returns what all tenants use together.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Returns the most that a tenant may use while every other tenant keeps its guaranteed part.
    #[must_use]
    pub fn reach(&self, tenant: &Tenant) -> u64 {
        let others = self.tenants.iter().filter(|(name, _)| *name != tenant);
        let kept: u64 = others.map(|(_, part)| part.guaranteed).sum();
        self.part(tenant).max.min(self.all.saturating_sub(kept))
    }

    /// Returns what a tenant uses and may use.
    #[must_use]
    pub fn of(&self, tenant: &Tenant) -> ShareUse {
        let Part { used, guaranteed, max } = self.part(tenant);
        ShareUse { used, guaranteed, max }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tenant(i: usize) -> Tenant {
        Tenant::new(&format!("t{i}")).expect("a name")
    }

    fn share(all: u64, unit: u64, known: usize, own: Option<u64>) -> FairShare {
        let mut share = FairShare::new(all, unit);
        share.set_tenants(&(0..known).map(|i| (tenant(i), own)).collect::<Vec<_>>());
        share
    }

    #[test]
    fn one_tenant_alone_takes_all_but_the_part_of_the_others() {
        let mut one = share(1024, 1, 1, None);
        (0..1024).for_each(|_| one.take(&tenant(0), 1).expect("alone"));
        assert_eq!(one.take(&tenant(0), 1), Err(Refused::OwnLimit));
        let mut four = share(1024, 1, 4, None);
        assert_eq!(four.reach(&tenant(0)), 1024 - 3 * 128);
        let taken = (0..2000).filter(|_| four.take(&tenant(0), 1).is_ok()).count();
        assert_eq!((taken, four.of(&tenant(1)).guaranteed), (1024 - 3 * 128, 128));
        assert_eq!(four.take(&tenant(0), 1), Err(Refused::Shared));
        (0..128).for_each(|_| four.take(&tenant(1), 1).expect("guaranteed"));
        assert_eq!(four.take(&tenant(1), 1), Err(Refused::Shared), "nothing else is left");
    }

    #[test]
    fn a_tenant_that_is_removed_keeps_what_it_holds_until_it_gives_it_back() {
        let mut share = share(8, 1, 2, None);
        (0..6).for_each(|_| share.take(&tenant(0), 1).expect("free"));
        share.set_tenants(&[(tenant(1), None)]);
        assert_eq!((share.of(&tenant(0)).used, share.of(&tenant(0)).guaranteed), (6, 0));
        assert_eq!((0..9).filter(|_| share.take(&tenant(1), 1).is_ok()).count(), 2, "what is free");
        share.give_back(&tenant(0), 6);
        assert_eq!((0..9).filter(|_| share.take(&tenant(1), 1).is_ok()).count(), 6);
        assert_eq!(share.used(), 8);
    }

    proptest! {
        /// Invariants 1, 2 and 3, for every order of requests.
        #[test]
        fn whoever_stays_within_the_guaranteed_part_is_never_refused(
            (all, unit, known) in (1u64..200, 1u64..20, 1usize..9),
            own in proptest::option::of(1u64..100),
            steps in proptest::collection::vec((0usize..10, 1u64..20, any::<bool>()), 0..400),
        ) {
            let mut share = share(all, unit, known, own);
            let mut held: Vec<Vec<u64>> = vec![Vec::new(); 10];
            for (i, n, take) in steps {
                let t = tenant(i);
                if take {
                    let before = share.of(&t);
                    let taken = share.take(&t, n);
                    if before.used + n <= before.guaranteed {
                        prop_assert!(taken.is_ok(), "{before:?} and {n}: {share:?}");
                    }
                    if taken.is_ok() {
                        held[i].push(n);
                    }
                } else if let Some(n) = held[i].pop() {
                    share.give_back(&t, n);
                }
                let used: u64 = held.iter().flatten().sum();
                prop_assert!(used == share.used() && used <= all);
                prop_assert!(share.committed <= all && share.of(&t).used <= share.of(&t).max);
            }
        }

        /// The guaranteed parts are worth as much as they can be.
        #[test]
        fn the_guaranteed_parts_fit_together(all in 1u64..10_000, unit in 1u64..50, known in 1usize..100) {
            let share = share(all, unit, known, None);
            let each = share.of(&tenant(0)).guaranteed;
            prop_assert!(each * known as u64 <= all);
            prop_assert!(each >= unit || unit * known as u64 > all);
        }
    }
}
