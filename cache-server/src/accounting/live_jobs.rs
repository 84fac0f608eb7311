//! Live jobs: which jobs asked for bytes lately, and under which label metrics show them.
//!
//! A job that nobody declared is ephemeral: it exists from its first request until `ttl` after
//! its last. The first [`LABELS_MAX`] live jobs have a metric label of their own, later ones
//! share [`OTHER`]; accounts know every job.

use fletch_core::{JobName, Tenant};
use std::{
    collections::HashMap,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// Most live jobs that have a metric label of their own.
pub const LABELS_MAX: usize = 1000;
/// The metric label of all other jobs.
pub const OTHER: &str = "other";

/// One live job.
#[derive(Debug)]
pub struct LiveJob {
    /// The tenant.
    pub tenant: Tenant,
    /// The job's name.
    pub name: JobName,
    /// The job's label in metrics.
    pub label: Arc<str>,
    /// Time of the last request, in nanoseconds on the caller's clock.
    seen_ns: AtomicU64,
}

/// The server knows as many jobs as it may.
#[derive(Debug, thiserror::Error)]
#[error("the server knows {0} jobs, its limit; reuse a job name, or wait until idle jobs expire")]
pub struct TooManyJobs(usize);

type Key = (Tenant, JobName);

/// All live jobs.
#[derive(Debug)]
pub struct LiveJobs {
    max: usize,
    ttl_ns: u64,
    live: RwLock<HashMap<Key, Arc<LiveJob>>>,
}

impl LiveJobs {
    /// An empty list of at most `max` jobs, each forgotten `ttl` after its last request.
    #[must_use]
    pub fn new(max: usize, ttl: Duration) -> Self {
        let ttl_ns = u64::try_from(ttl.as_nanos()).unwrap_or(u64::MAX);
        LiveJobs { max, ttl_ns, live: RwLock::default() }
    }

    /// Returns the job of a request at `now_ns` (any clock that only goes forward).
    ///
    /// # Errors
    /// [`TooManyJobs`].
    pub fn touch(&self, tenant: &Tenant, name: &JobName, now_ns: u64) -> Result<Arc<LiveJob>, TooManyJobs> {
        let key = (tenant.clone(), name.clone());
        if let Some(job) = self.live.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            job.seen_ns.fetch_max(now_ns, Relaxed);
            return Ok(Arc::clone(job));
        }
        let mut live = self.live.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(job) = live.get(&key) {
            job.seen_ns.fetch_max(now_ns, Relaxed);
            return Ok(Arc::clone(job));
        }
        if live.len() >= self.max {
            return Err(TooManyJobs(self.max));
        }
        // Expiry frees labels too, so labelled jobs are counted and not numbered.
        let labelled = live.values().filter(|j| &*j.label != OTHER).count();
        let label = if labelled < LABELS_MAX { name.as_str().into() } else { OTHER.into() };
        let job = Arc::new(LiveJob {
            tenant: tenant.clone(),
            name: name.clone(),
            label,
            seen_ns: AtomicU64::new(now_ns),
        });
        live.insert(key, Arc::clone(&job));
        Ok(job)
    }

    /// Forgets jobs whose last request is older than the TTL at `now_ns` and that no request holds.
    ///
    /// Returns the number of forgotten jobs.
    pub fn expire(&self, now_ns: u64) -> usize {
        let mut live = self.live.write().unwrap_or_else(PoisonError::into_inner);
        let before = live.len();
        live.retain(|_, job| {
            let idle = now_ns.saturating_sub(job.seen_ns.load(Relaxed)) > self.ttl_ns;
            !idle || Arc::strong_count(job) > 1
        });
        before - live.len()
    }

    /// Returns whether the job is live.
    #[must_use]
    pub fn is_live(&self, tenant: &Tenant, name: &JobName) -> bool {
        let key = (tenant.clone(), name.clone());
        self.live.read().unwrap_or_else(PoisonError::into_inner).contains_key(&key)
    }

    /// Returns the number of live jobs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.live.read().unwrap_or_else(PoisonError::into_inner).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(i: usize) -> JobName {
        JobName::new(&format!("job-{i}")).expect("name")
    }

    #[test]
    fn labels_are_bounded_and_come_free_by_expiry() {
        let jobs = LiveJobs::new(1500, Duration::from_nanos(10));
        let t = Tenant::default_tenant();
        for i in 0..1500 {
            let job = jobs.touch(&t, &name(i), 0).expect("below the limit");
            assert_eq!(&*job.label == OTHER, i >= LABELS_MAX, "{i}");
        }
        assert!(jobs.touch(&t, &name(1500), 0).is_err());
        assert_eq!(&*jobs.touch(&t, &name(0), 5).expect("known").label, "job-0");
        let held = jobs.touch(&t, &name(1), 0).expect("known");
        assert_eq!((jobs.expire(11), jobs.len()), (1498, 2));
        assert!(jobs.is_live(&t, &name(0)) && jobs.is_live(&t, &held.name) && !jobs.is_live(&t, &name(2)));
        assert_eq!(&*jobs.touch(&t, &name(1400), 11).expect("again").label, "job-1400");
    }
}
