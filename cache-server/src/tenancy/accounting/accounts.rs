//! Accounts: bytes counted once, where they are handed to a connection (I8).
//!
//! Each (domain, tenant, job, root, dataset) has one [`Tally`] of counters by component and tier. A request
//! looks its tally up once and then only adds. When a job expires, its sums move to the job
//! [`EXPIRED`], so that sums over jobs stay exact and memory stays bounded.

use super::{
    LiveJob,
    costs::{Costs, CostsOf, JobCosts, NO_JOB},
};
use fletch_api::{Account, AccountKey, ByteResult, ByteTier, JobUse};
use fletch_core::{DatasetName, Domain, JobName, Root, Tenant};
use parking_lot::RwLock;
use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// The job that holds the sums of expired jobs.
pub const EXPIRED: &str = "expired";

/// The kind of program that sent a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Component {
    /// A FUSE mount.
    Mount = 0,
    /// A training loader.
    Loader = 1,
    /// A command of a person.
    Cli = 2,
    /// Another server.
    Peer = 3,
    /// Anything else.
    Other = 4,
    /// A client of the S3 door.
    S3 = 5,
}

/// The words of [`Component`], in the order of its variants.
pub const COMPONENTS: [&str; 6] = ["mount", "loader", "cli", "peer", "other", "s3"];

impl Component {
    /// Returns the component that a `Fletch-Component` header names.
    #[must_use]
    pub fn from_word(word: &str) -> Self {
        match word {
            "mount" => Component::Mount,
            "loader" => Component::Loader,
            "cli" => Component::Cli,
            "peer" => Component::Peer,
            _ => Component::Other,
        }
    }
}

/// As what a delivered byte counts, and the tier that it came from.
pub type Cost = (ByteResult, ByteTier);

/// Every cost, by its index in a tally.
pub const TIERS: [Cost; 15] = [
    (ByteResult::Hit, ByteTier::Memory),
    (ByteResult::Hit, ByteTier::Disk),
    (ByteResult::Hit, ByteTier::Flight),
    (ByteResult::Substituted, ByteTier::Memory),
    (ByteResult::Substituted, ByteTier::Disk),
    (ByteResult::Substituted, ByteTier::Flight),
    (ByteResult::Miss, ByteTier::Memory),
    (ByteResult::Miss, ByteTier::Disk),
    (ByteResult::Miss, ByteTier::Flight),
    (ByteResult::Miss, ByteTier::Origin),
    (ByteResult::Bypass, ByteTier::Origin),
    (ByteResult::Hit, ByteTier::Peer),
    (ByteResult::Substituted, ByteTier::Peer),
    (ByteResult::Miss, ByteTier::Peer),
    (ByteResult::Bypass, ByteTier::Peer),
];

/// The counters of one (domain, tenant, job, root, dataset).
#[derive(Debug)]
pub struct Tally {
    label: Arc<str>,
    costs: Arc<JobCosts>,
    bytes: [[AtomicU64; TIERS.len()]; COMPONENTS.len()],
}

impl Tally {
    fn new(label: Arc<str>, costs: Arc<JobCosts>) -> Self {
        Tally { label, costs, bytes: Default::default() }
    }

    /// Returns what the job's reads of the dataset cost.
    #[must_use]
    pub fn costs(&self) -> &Arc<JobCosts> {
        &self.costs
    }

    /// Counts `n` bytes that were handed to a connection.
    pub fn add(&self, component: Component, cost: Cost, n: u64) {
        let tier = TIERS.iter().position(|c| *c == cost).unwrap_or(0);
        self.bytes[component as usize][tier].fetch_add(n, Relaxed);
        self.costs.deliver(n);
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Of {
    domain: Domain,
    tenant: Tenant,
    job: JobName,
    root: Root,
    /// Several datasets of a domain may have the same root.
    dataset: DatasetName,
}

/// Bytes by the labels of metrics.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Row {
    /// The tenant that is charged.
    pub tenant: Tenant,
    /// The job's label.
    pub job: Arc<str>,
    pub dataset: DatasetName,
    /// The kind of program.
    pub component: &'static str,
    /// As what the bytes count.
    pub result: ByteResult,
    /// The tier that they came from.
    pub tier: ByteTier,
}

/// All accounts of the server.
#[derive(Debug, Default)]
pub struct Accounts {
    tallies: RwLock<HashMap<Of, Arc<Tally>>>,
    table_bytes: AtomicU64,
    /// What the reads of all jobs cost.
    pub costs: Costs,
}

impl Of {
    fn costs(&self) -> CostsOf {
        let (domain, tenant) = (self.domain.clone(), self.tenant.clone());
        CostsOf { domain, tenant, job: self.job.clone(), dataset: self.dataset.clone() }
    }
}

impl Accounts {
    /// Returns the tally of a job's reads of a version; `dataset` is the version's label in metrics.
    pub fn tally(&self, domain: &Domain, job: &LiveJob, root: Root, dataset: &DatasetName) -> Arc<Tally> {
        let (domain, dataset) = (domain.clone(), dataset.clone());
        let of = Of { domain, tenant: job.tenant.clone(), job: job.name.clone(), root, dataset };
        if let Some(t) = self.tallies.read().get(&of) {
            return Arc::clone(t);
        }
        let mut tallies = self.tallies.write();
        let costs = self.costs.of(of.costs(), &job.label);
        let new = || Arc::new(Tally::new(Arc::clone(&job.label), costs));
        Arc::clone(tallies.entry(of).or_insert_with(new))
    }

    /// Counts bytes of version tables.
    pub fn add_table_bytes(&self, n: u64) {
        self.table_bytes.fetch_add(n, Relaxed);
    }

    /// Returns the bytes of version tables.
    #[must_use]
    pub fn table_bytes(&self) -> u64 {
        self.table_bytes.load(Relaxed)
    }

    /// Returns the accounts of some domains and tenants, in order, without empty ones.
    #[must_use]
    pub fn list(&self, wanted: impl Fn(&Domain, &Tenant) -> bool) -> Vec<Account> {
        let tallies = self.tallies.read();
        // One account for all datasets that have the root.
        let mut sums: BTreeMap<AccountKey, u64> = BTreeMap::new();
        for (of, tally) in tallies.iter().filter(|(of, _)| wanted(&of.domain, &of.tenant)) {
            for (i, (result, tier)) in TIERS.into_iter().enumerate() {
                let bytes: u64 = tally.bytes.iter().map(|c| c[i].load(Relaxed)).sum();
                if bytes > 0 {
                    let Of { domain, tenant, job, root, .. } = of.clone();
                    *sums.entry(AccountKey { domain, tenant, job, root, result, tier }).or_default() += bytes;
                }
            }
        }
        sums.into_iter().map(|(key, bytes)| Account { key, bytes }).collect()
    }

    /// Returns what jobs of some domains and tenants received of each dataset, and what that cost.
    #[must_use]
    pub fn jobs(&self, wanted: impl Fn(&Domain, &Tenant) -> bool) -> Vec<JobUse> {
        self.jobs_by_domain(wanted).into_values().collect()
    }

    /// As [`Accounts::jobs`], by the domain, the tenant, the job and the dataset.
    #[must_use]
    pub fn jobs_by_domain(&self, wanted: impl Fn(&Domain, &Tenant) -> bool) -> BTreeMap<CostsOf, JobUse> {
        let mut jobs: BTreeMap<CostsOf, JobUse> = BTreeMap::new();
        for row in self.costs.rows().into_iter().filter(|r| wanted(&r.of.domain, &r.of.tenant)) {
            let (of, content) = (row.of, row.content);
            let new = JobUse {
                tenant: of.tenant.clone(),
                job: of.job.clone(),
                dataset: of.dataset.clone(),
                hit_bytes: 0,
                substituted_bytes: 0,
                miss_bytes: 0,
                bypass_bytes: 0,
                origin_bytes: content,
                stalled_ms: u64::try_from(row.stalled.as_millis()).unwrap_or(u64::MAX),
            };
            // Tables alone are no reads of a job.
            if of.job.as_str() != NO_JOB || content > 0 {
                jobs.insert(of, new);
            }
        }
        let tallies = self.tallies.read();
        for (of, tally) in tallies.iter() {
            let Some(job) = jobs.get_mut(&of.costs()) else { continue };
            for (i, (result, _)) in TIERS.into_iter().enumerate() {
                let sum = match result {
                    ByteResult::Hit => &mut job.hit_bytes,
                    ByteResult::Substituted => &mut job.substituted_bytes,
                    ByteResult::Miss => &mut job.miss_bytes,
                    ByteResult::Bypass => &mut job.bypass_bytes,
                };
                *sum += tally.bytes.iter().map(|c| c[i].load(Relaxed)).sum::<u64>();
            }
        }
        jobs
    }

    /// Returns sums by the labels of metrics, without empty ones.
    #[must_use]
    pub fn rows(&self) -> Vec<(Row, u64)> {
        let tallies = self.tallies.read();
        let mut rows: HashMap<Row, u64> = HashMap::new();
        for (of, tally) in tallies.iter() {
            for (component, tiers) in COMPONENTS.into_iter().zip(&tally.bytes) {
                for ((result, tier), n) in TIERS.into_iter().zip(tiers) {
                    let n = n.load(Relaxed);
                    if n > 0 {
                        let row = Row {
                            tenant: of.tenant.clone(),
                            job: Arc::clone(&tally.label),
                            dataset: of.dataset.clone(),
                            component,
                            result,
                            tier,
                        };
                        *rows.entry(row).or_default() += n;
                    }
                }
            }
        }
        let mut rows: Vec<_> = rows.into_iter().collect();
        rows.sort();
        rows
    }

    /// Moves the sums of jobs that are no longer live to the job [`EXPIRED`].
    pub fn fold(&self, is_live: impl Fn(&Tenant, &JobName) -> bool) {
        let Ok(expired) = JobName::new(EXPIRED) else { return };
        let mut tallies = self.tallies.write();
        let over = |of: &Of, tally: &Arc<Tally>| {
            // A request still holds the tally and will add to it: a later call moves it.
            of.job != expired && !is_live(&of.tenant, &of.job) && Arc::strong_count(tally) == 1
        };
        let folded: Vec<_> = tallies.extract_if(|of, tally| over(of, tally)).collect();
        for (of, tally) in folded {
            let to = Of { job: expired.clone(), ..of };
            let costs = self.costs.of(to.costs(), &EXPIRED.into());
            let new = || Arc::new(Tally::new(EXPIRED.into(), costs));
            let into = tallies.entry(to).or_insert_with(new);
            for (a, b) in into.bytes.iter().flatten().zip(tally.bytes.iter().flatten()) {
                a.fetch_add(b.load(Relaxed), Relaxed);
            }
        }
        drop(tallies);
        self.costs.fold(&expired, is_live);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{JobLimits, LiveJobs};
    use super::*;
    use fletch_core::Hash;
    use std::time::Duration;

    #[test]
    fn i8_sums_stay_exact_when_jobs_expire() {
        let (accounts, jobs) = (Accounts::default(), LiveJobs::new(10_000, Duration::from_nanos(1)));
        let (domain, tenant) = (Domain::default_domain(), Tenant::default_tenant());
        let (root, dataset) = (Root(Hash::of(b"r")), DatasetName::new("d").expect("name"));
        for i in 0..1200u64 {
            let name = JobName::new(&format!("j{i}")).expect("name");
            let most = JobLimits { jobs: 10_000, labels: super::super::live_jobs::LABELS_MAX };
            let (job, _) = jobs.touch(&tenant, &name, most, 0).expect("job");
            let tally = accounts.tally(&domain, &job, root, &dataset);
            tally.add(Component::Mount, (ByteResult::Hit, ByteTier::Memory), i);
            tally.add(Component::Other, (ByteResult::Miss, ByteTier::Origin), 1);
        }
        let sum = |rows: &[Account]| rows.iter().map(|a| a.bytes).sum::<u64>();
        let want = 1199 * 1200 / 2 + 1200;
        let mine = |d: &Domain, t: &Tenant| (d, t) == (&domain, &tenant);
        let before = accounts.list(mine);
        assert_eq!((before.len(), sum(&before)), (2399, want), "one row a job and tier but j0's empty one");
        let rows = accounts.rows();
        assert!(rows.len() <= 2 * (super::super::live_jobs::LABELS_MAX + 1));
        assert_eq!(rows.iter().map(|(_, n)| n).sum::<u64>(), want);
        assert_eq!(jobs.expire(5), 1200);
        accounts.fold(|tenant, job| jobs.is_live(tenant, job));
        let after = accounts.list(mine);
        assert_eq!((after.len(), sum(&after)), (2, want));
        assert!(after.iter().all(|a| a.key.job.as_str() == EXPIRED));
        assert!(accounts.list(|d, _| *d != domain).is_empty(), "I7");
    }
}
