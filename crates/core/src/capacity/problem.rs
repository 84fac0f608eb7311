//! The problem that a division of the cache solves: values, without a unit system of their own. Sizes are in
//! bytes and rates in bytes a second, as floating-point numbers.

use std::collections::BTreeSet;

/// A job that reads one dataset.
#[derive(Debug, Clone, PartialEq)]
pub struct JobDemand {
    /// Its identity. Ties are decided by it.
    pub id: u64,
    /// The index of its dataset in [`Problem::datasets`].
    pub dataset: usize,
    /// The rate at which it reads if it never waits for data, in bytes a second.
    pub most_rate: f64,
    /// Its weight in the goal; above 0.
    pub weight: f64,
    /// Whether it reads in an order of its own, so that no sweep serves it.
    pub strict: bool,
}

/// A dataset that jobs read.
#[derive(Debug, Clone, PartialEq)]
pub struct DatasetDemand {
    /// Its identity. Ties are decided by it.
    pub id: u64,
    /// Its size, in bytes.
    pub size: f64,
    /// The index of its origin's link in [`Problem::links`].
    pub link: usize,
    /// The bytes that a sweep over it needs. With less, each of its jobs fetches for itself.
    pub window: f64,
    /// The bytes that are pinned in the cache. They count as cached and are not divided.
    pub pinned: f64,
}

/// The connection to an origin.
#[derive(Debug, Clone, PartialEq)]
pub struct Link {
    /// Its identity. Ties are decided by it.
    pub id: u64,
    /// What it carries while requests queue for it, in bytes a second.
    pub bandwidth: f64,
}

/// A limit on the sum of some datasets' shares: a tenant's minimum and quota, or a job's minimum.
#[derive(Debug, Clone, PartialEq)]
pub struct Limit {
    /// Its identity. Ties are decided by it.
    pub id: u64,
    /// The indices of its datasets in [`Problem::datasets`].
    pub datasets: Vec<usize>,
    /// The bytes that they get at least together, if they can use them.
    pub least: f64,
    /// The bytes that they get at most together; infinite for no limit.
    pub most: f64,
}

/// Jobs, datasets, links and limits among which a cache is divided.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Problem {
    /// The bytes that can be divided. Pinned bytes are not among them.
    pub capacity: f64,
    /// The links to origins.
    pub links: Vec<Link>,
    /// The datasets.
    pub datasets: Vec<DatasetDemand>,
    /// The jobs.
    pub jobs: Vec<JobDemand>,
    /// The limits.
    pub limits: Vec<Limit>,
}

/// A problem that has no division.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ProblemError {
    /// A number that must be positive and finite is not.
    #[error("{what} {id}: {name} is {value}, but must be a finite number above 0")]
    NotPositive {
        /// The kind of thing.
        what: &'static str,
        /// Its identity.
        id: u64,
        /// The name of the number.
        name: &'static str,
        /// The number.
        value: f64,
    },
    /// A number that must not be negative is, or is no number.
    #[error("{what} {id}: {name} is {value}, but must be 0 or more")]
    Negative {
        /// The kind of thing.
        what: &'static str,
        /// Its identity.
        id: u64,
        /// The name of the number.
        name: &'static str,
        /// The number.
        value: f64,
    },
    /// Something names a dataset or a link that the problem does not have.
    #[error("{what} {id} names {of} {index}, but the problem has {count}")]
    Unknown {
        /// The kind of thing.
        what: &'static str,
        /// Its identity.
        id: u64,
        /// The kind of thing that it names.
        of: &'static str,
        /// The index that it names.
        index: usize,
        /// How many of them the problem has.
        count: usize,
    },
    /// Two things of a kind have one identity.
    #[error("two {what}s have the id {id}")]
    Twice {
        /// The kind of thing.
        what: &'static str,
        /// The identity.
        id: u64,
    },
}

fn positive(what: &'static str, id: u64, name: &'static str, value: f64) -> Result<(), ProblemError> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(ProblemError::NotPositive { what, id, name, value })
}

fn at_least_zero(what: &'static str, id: u64, name: &'static str, value: f64) -> Result<(), ProblemError> {
    if value >= 0.0 { Ok(()) } else { Err(ProblemError::Negative { what, id, name, value }) }
}

fn known(
    what: &'static str,
    id: u64,
    of: &'static str,
    index: usize,
    count: usize,
) -> Result<(), ProblemError> {
    if index < count { Ok(()) } else { Err(ProblemError::Unknown { what, id, of, index, count }) }
}

fn distinct(what: &'static str, ids: impl Iterator<Item = u64>) -> Result<(), ProblemError> {
    let mut seen = BTreeSet::new();
    for id in ids {
        if !seen.insert(id) {
            return Err(ProblemError::Twice { what, id });
        }
    }
    Ok(())
}

impl Problem {
    /// Checks that every number and index can be used.
    ///
    /// # Errors
    /// The first number, index or identity that cannot be used.
    pub fn check(&self) -> Result<(), ProblemError> {
        at_least_zero("cache", 0, "capacity", self.capacity)?;
        if !self.capacity.is_finite() {
            let (name, value) = ("capacity", self.capacity);
            return Err(ProblemError::NotPositive { what: "cache", id: 0, name, value });
        }
        for l in &self.links {
            positive("link", l.id, "bandwidth", l.bandwidth)?;
        }
        for d in &self.datasets {
            positive("dataset", d.id, "size", d.size)?;
            at_least_zero("dataset", d.id, "window", d.window)?;
            at_least_zero("dataset", d.id, "pinned bytes", d.pinned)?;
            known("dataset", d.id, "link", d.link, self.links.len())?;
        }
        for j in &self.jobs {
            positive("job", j.id, "most rate", j.most_rate)?;
            positive("job", j.id, "weight", j.weight)?;
            known("job", j.id, "dataset", j.dataset, self.datasets.len())?;
        }
        for l in &self.limits {
            at_least_zero("limit", l.id, "least bytes", l.least)?;
            at_least_zero("limit", l.id, "most bytes", l.most)?;
            for &d in &l.datasets {
                known("limit", l.id, "dataset", d, self.datasets.len())?;
            }
        }
        distinct("link", self.links.iter().map(|l| l.id))?;
        distinct("dataset", self.datasets.iter().map(|d| d.id))?;
        distinct("job", self.jobs.iter().map(|j| j.id))?;
        distinct("limit", self.limits.iter().map(|l| l.id))
    }

    /// Returns the sum of the jobs' weights. A value of the goal divided by it is a mean over jobs: a
    /// difference of 0.01 is about 1 % of mean speed.
    #[must_use]
    pub fn weight(&self) -> f64 {
        self.jobs.iter().map(|j| j.weight).sum()
    }

    /// Returns the same problem with every list in the order of identities, and for each dataset there its
    /// index here (I3).
    pub(crate) fn sorted(&self) -> (Problem, Vec<usize>) {
        let order_of = |ids: &[u64]| {
            let mut order: Vec<usize> = (0..ids.len()).collect();
            order.sort_by_key(|&i| ids[i]);
            order
        };
        // Where each old index went.
        let positions = |order: &[usize]| {
            let mut at = vec![0; order.len()];
            for (new, &old) in order.iter().enumerate() {
                at[old] = new;
            }
            at
        };
        let datasets = order_of(&self.datasets.iter().map(|d| d.id).collect::<Vec<_>>());
        let links = order_of(&self.links.iter().map(|l| l.id).collect::<Vec<_>>());
        let (dataset_at, link_at) = (positions(&datasets), positions(&links));
        let mut jobs: Vec<JobDemand> =
            self.jobs.iter().map(|j| JobDemand { dataset: dataset_at[j.dataset], ..j.clone() }).collect();
        jobs.sort_by_key(|j| j.id);
        let within = |l: &Limit| {
            let mut datasets: Vec<usize> = l.datasets.iter().map(|&d| dataset_at[d]).collect();
            datasets.sort_unstable();
            datasets.dedup();
            Limit { datasets, ..l.clone() }
        };
        let mut limits: Vec<Limit> = self.limits.iter().map(within).collect();
        limits.sort_by_key(|l| l.id);
        let dataset =
            |&d: &usize| DatasetDemand { link: link_at[self.datasets[d].link], ..self.datasets[d].clone() };
        let sorted = Problem {
            capacity: self.capacity,
            links: links.iter().map(|&l| self.links[l].clone()).collect(),
            datasets: datasets.iter().map(dataset).collect(),
            jobs,
            limits,
        };
        (sorted, datasets)
    }
}
