//! Bounds how often a tenant makes the server search its datasets for a root that is not open. Pure.
//!
//! Each such search asks every dataset of the domain, and whoever invents roots causes one search a root.
//! A tenant has a bucket of tokens. A search needs a token in the bucket, and takes one for each dataset that
//! it asks. The bucket may go into debt by one search, so that a domain of many datasets is searched, too.

use fletch_core::Tenant;
use parking_lot::Mutex;
use std::collections::HashMap;
use tokio::time::Instant;

/// The seconds after which an empty bucket is full again.
const FULL_AFTER_S: f64 = 10.0;
/// The most tenants whose buckets are remembered. Full buckets are forgotten first.
const TENANTS_MAX: usize = 10_000;

/// The buckets of all tenants.
#[derive(Debug)]
pub struct RootLookups {
    per_s: f64,
    buckets: Mutex<HashMap<Tenant, Bucket>>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    tokens: f64,
    at: Instant,
}

impl RootLookups {
    /// Returns full buckets that refill by `per_s` datasets a second.
    #[must_use]
    pub fn new(per_s: u32) -> Self {
        RootLookups { per_s: f64::from(per_s), buckets: Mutex::default() }
    }

    /// Returns whether a tenant may search `datasets` datasets at `now`, and takes the tokens if so.
    pub fn admit(&self, tenant: &Tenant, datasets: usize, now: Instant) -> bool {
        let full = self.per_s * FULL_AFTER_S;
        let mut buckets = self.buckets.lock();
        let refilled = |b: &Bucket| {
            (b.tokens + self.per_s * now.saturating_duration_since(b.at).as_secs_f64()).min(full)
        };
        if buckets.len() >= TENANTS_MAX && !buckets.contains_key(tenant) {
            buckets.retain(|_, b| refilled(b) < full);
            if buckets.len() >= TENANTS_MAX {
                return false;
            }
        }
        let bucket = buckets.entry(tenant.clone()).or_insert(Bucket { tokens: full, at: now });
        let tokens = refilled(bucket);
        let admitted = tokens > 0.0;
        // The debt is bounded, so that the wait after one search is bounded: at most FULL_AFTER_S.
        let taken = if admitted { (datasets as f64).min(full) } else { 0.0 };
        *bucket = Bucket { tokens: tokens - taken, at: now };
        admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    #[test]
    fn each_tenant_has_a_bucket_and_no_debt_lasts_longer_than_ten_seconds() {
        let (lookups, now) = (RootLookups::new(10), Instant::now());
        let (a, b) = (Tenant::new("a").expect("name"), Tenant::new("b").expect("name"));
        let admitted = (0..1000).filter(|_| lookups.admit(&a, 1, now)).count();
        assert_eq!(admitted, 100);
        assert!(lookups.admit(&b, 1_000_000, now), "another tenant's bucket, and any number of datasets");
        assert!(!lookups.admit(&b, 1, now));
        assert!(lookups.admit(&a, 1, now + Duration::from_millis(101)));
        assert!(lookups.admit(&b, 1, now + Duration::from_secs(10)));
    }

    proptest! {
        #[test]
        fn the_work_is_bounded_in_any_span(
            steps in prop::collection::vec((0u64..2000, 1usize..50), 1..300),
        ) {
            let (lookups, begun) = (RootLookups::new(20), Instant::now());
            let tenant = Tenant::default_tenant();
            let (mut now, mut asked) = (begun, 0);
            for (ms, datasets) in steps {
                now += Duration::from_millis(ms);
                asked += if lookups.admit(&tenant, datasets, now) { datasets } else { 0 };
                let earned = 20.0 * (now - begun).as_secs_f64();
                prop_assert!(asked as f64 <= 200.0 + earned + 50.0);
            }
        }
    }
}
