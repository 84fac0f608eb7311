//! Live jobs: which jobs asked for bytes lately, and under which label metrics show them.
//!
//! A job that nobody declared is ephemeral: it exists from its first request until `ttl` after
//! its last. The first [`LABELS_MAX`] live jobs have a metric label of their own, later ones
//! share [`OTHER`]; accounts know every job.
//!
//! 1. A tenant at its limit makes room among its own idle jobs, the least recently used ones first. It never
//!    displaces a job of another tenant.
//! 2. A job that a request holds is never displaced.

use fletch_core::{JobName, Tenant};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// Most live jobs that have a metric label of their own.
pub const LABELS_MAX: usize = 1000;
/// The metric label of all other jobs.
pub const OTHER: &str = "other";
/// A full tenant displaces one of this many of its jobs at once, so that few requests have to.
const DISPLACED_PART: usize = 16;

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

impl LiveJob {
    fn is_labelled(&self) -> bool {
        &*self.label != OTHER
    }
}

/// The most live jobs of one tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobLimits {
    /// Live jobs.
    pub jobs: usize,
    /// Live jobs with a metric label of their own.
    pub labels: usize,
}

/// The tenant has as many live jobs as it may, and each of them has a running request.
#[derive(Debug, thiserror::Error)]
#[error("this tenant reads as {0} jobs at once, its limit; reuse a job name, or wait until a job ends")]
pub struct TooManyJobs(usize);

/// The live jobs of one tenant.
#[derive(Debug, Default)]
struct TenantJobs {
    jobs: HashMap<JobName, Arc<LiveJob>>,
    labelled: usize,
}

impl TenantJobs {
    /// Forgets the jobs that `gone` selects among those that no request holds.
    fn forget(&mut self, gone: impl Fn(&LiveJob) -> bool) -> usize {
        let before = self.jobs.len();
        self.jobs.retain(|_, job| Arc::strong_count(job) > 1 || !gone(job));
        self.labelled = self.jobs.values().filter(|j| j.is_labelled()).count();
        before - self.jobs.len()
    }

    /// Forgets the least recently used idle jobs, so that one more job fits below `most`.
    fn displace(&mut self, most: usize) -> usize {
        let mut idle: Vec<u64> = self
            .jobs
            .values()
            .filter(|job| Arc::strong_count(job) == 1)
            .map(|job| job.seen_ns.load(Relaxed))
            .collect();
        let too_many = (self.jobs.len() + 1).saturating_sub(most);
        let n = too_many.max(most / DISPLACED_PART).min(idle.len());
        if n == 0 {
            return 0;
        }
        let (_, &mut last, _) = idle.select_nth_unstable(n - 1);
        self.forget(|job| job.seen_ns.load(Relaxed) <= last)
    }
}

#[derive(Debug, Default)]
struct Live {
    tenants: HashMap<Tenant, TenantJobs>,
    len: usize,
}

impl Live {
    fn get(&self, tenant: &Tenant, name: &JobName) -> Option<&Arc<LiveJob>> {
        self.tenants.get(tenant)?.jobs.get(name)
    }

    fn labelled(&self) -> usize {
        self.tenants.values().map(|t| t.labelled).sum()
    }
}

/// All live jobs.
#[derive(Debug)]
pub struct LiveJobs {
    max: usize,
    ttl_ns: u64,
    live: RwLock<Live>,
}

impl LiveJobs {
    /// An empty list of at most `max` jobs, each forgotten `ttl` after its last request.
    #[must_use]
    pub fn new(max: usize, ttl: Duration) -> Self {
        let ttl_ns = u64::try_from(ttl.as_nanos()).unwrap_or(u64::MAX);
        LiveJobs { max, ttl_ns, live: RwLock::default() }
    }

    fn read(&self) -> RwLockReadGuard<'_, Live> {
        self.live.read()
    }

    fn write(&self) -> RwLockWriteGuard<'_, Live> {
        self.live.write()
    }

    /// Returns the job of a request at `now_ns` (any clock that only goes forward), and how many idle jobs of
    /// the tenant it displaced.
    ///
    /// # Errors
    /// [`TooManyJobs`].
    pub fn touch(
        &self,
        tenant: &Tenant,
        name: &JobName,
        most: JobLimits,
        now_ns: u64,
    ) -> Result<(Arc<LiveJob>, usize), TooManyJobs> {
        let seen = |job: &Arc<LiveJob>| {
            job.seen_ns.fetch_max(now_ns, Relaxed);
            (Arc::clone(job), 0)
        };
        if let Some(job) = self.read().get(tenant, name) {
            return Ok(seen(job));
        }
        let mut live = self.write();
        if let Some(job) = live.get(tenant, name) {
            return Ok(seen(job));
        }
        // The other tenants' jobs stay: this tenant has what they leave.
        let (labelled, all) = (live.labelled(), live.len);
        let own = live.tenants.entry(tenant.clone()).or_default();
        let (before, others) = (own.jobs.len(), all - own.jobs.len());
        let max = most.jobs.min(self.max.saturating_sub(others));
        let displaced = if before >= max { own.displace(max) } else { 0 };
        let full = own.jobs.len() >= max;
        if !full {
            let labelled = labelled < LABELS_MAX && own.labelled < most.labels;
            own.labelled += usize::from(labelled);
            let label = if labelled { name.as_str().into() } else { OTHER.into() };
            let seen_ns = AtomicU64::new(now_ns);
            let job = LiveJob { tenant: tenant.clone(), name: name.clone(), label, seen_ns };
            own.jobs.insert(name.clone(), Arc::new(job));
        }
        let (job, after) = (own.jobs.get(name).cloned(), own.jobs.len());
        live.len = others + after;
        job.map(|job| (job, displaced)).ok_or(TooManyJobs(max))
    }

    /// Forgets jobs whose last request is older than the TTL at `now_ns` and that no request holds.
    ///
    /// Returns the number of forgotten jobs.
    pub fn expire(&self, now_ns: u64) -> usize {
        let mut live = self.write();
        let over = |job: &LiveJob| now_ns.saturating_sub(job.seen_ns.load(Relaxed)) > self.ttl_ns;
        let gone: usize = live.tenants.values_mut().map(|own| own.forget(over)).sum();
        live.tenants.retain(|_, own| !own.jobs.is_empty());
        live.len -= gone;
        gone
    }

    /// Returns whether the job is live.
    #[must_use]
    pub fn is_live(&self, tenant: &Tenant, name: &JobName) -> bool {
        self.read().get(tenant, name).is_some()
    }

    /// Returns the number of live jobs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.read().len
    }

    /// Returns the number of live jobs of a tenant.
    #[must_use]
    pub fn len_of(&self, tenant: &Tenant) -> usize {
        self.read().tenants.get(tenant).map_or(0, |own| own.jobs.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: JobLimits = JobLimits { jobs: usize::MAX, labels: LABELS_MAX };

    fn name(i: usize) -> JobName {
        JobName::new(&format!("job-{i}")).expect("name")
    }

    fn tenant(name: &str) -> Tenant {
        Tenant::new(name).expect("name")
    }

    #[test]
    fn labels_are_bounded_and_come_free_by_expiry() {
        let jobs = LiveJobs::new(1500, Duration::from_nanos(10));
        let t = Tenant::default_tenant();
        let touch = |i, now| jobs.touch(&t, &name(i), MOST, now).expect("a job").0;
        for i in 0..1500 {
            let job = touch(i, 0);
            assert_eq!(&*job.label == OTHER, i >= LABELS_MAX, "{i}");
        }
        assert_eq!(&*touch(0, 5).label, "job-0");
        let held = touch(1, 0);
        assert_eq!((jobs.expire(11), jobs.len()), (1498, 2));
        assert!(jobs.is_live(&t, &name(0)) && jobs.is_live(&t, &held.name) && !jobs.is_live(&t, &name(2)));
        assert_eq!(&*touch(1400, 11).label, "job-1400");
    }

    #[test]
    fn a_full_tenant_displaces_its_own_idle_jobs_and_no_others() {
        let jobs = LiveJobs::new(1_000, Duration::from_secs(3600));
        let (a, b) = (tenant("a"), tenant("b"));
        let most = JobLimits { jobs: 160, labels: 20 };
        jobs.touch(&b, &name(0), most, 0).expect("first");
        let (held, _) = jobs.touch(&a, &name(0), most, 0).expect("first");
        let mut displaced = 0;
        for i in 1..10_000 {
            displaced += jobs.touch(&a, &name(i), most, i as u64).expect("idle ones make room").1;
            assert!(jobs.len_of(&a) <= 160);
        }
        assert_eq!(displaced, 10_000 - jobs.len_of(&a));
        assert_eq!((jobs.len(), jobs.len_of(&b)), (jobs.len_of(&a) + 1, 1));
        assert!(jobs.is_live(&b, &name(0)) && jobs.is_live(&a, &held.name));
        assert!((9_900..10_000).all(|i| jobs.is_live(&a, &name(i))), "the latest stay");
        let labels = |t: &Tenant, of: std::ops::Range<usize>| {
            let all = of.filter_map(|i| jobs.touch(t, &name(i), most, 0).ok());
            all.filter(|(job, _)| job.is_labelled()).count()
        };
        assert!(labels(&a, 9_900..10_000) <= 20);
        assert_eq!(labels(&b, 1..100), 19, "another tenant has labels of its own");
    }

    #[test]
    fn a_tenant_with_a_running_request_for_each_job_is_refused_and_others_are_not() {
        let jobs = LiveJobs::new(6, Duration::from_secs(3600));
        let (a, b) = (tenant("a"), tenant("b"));
        let most = JobLimits { jobs: 3, labels: 3 };
        let held: Vec<_> = (0..3).map(|i| jobs.touch(&a, &name(i), most, 0).expect("free").0).collect();
        let full = jobs.touch(&a, &name(3), most, 1).expect_err("all run").to_string();
        assert!(full.contains("3 jobs"), "{full}");
        let others: Vec<_> = (0..3).map(|i| jobs.touch(&b, &name(i), most, 1).expect("free").0).collect();
        drop(held);
        assert_eq!(jobs.touch(&a, &name(3), most, 2).expect("one made room").1, 3, "all were as old");
        assert_eq!((jobs.len_of(&a), jobs.len_of(&b), others.len()), (1, 3, 3));
    }
}
