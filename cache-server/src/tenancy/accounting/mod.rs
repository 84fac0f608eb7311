//! Accounting: every delivered byte, counted once where it is sent, by domain, tenant, job and dataset (I8),
//! and what it cost.

mod accounts;
mod costs;
mod live_jobs;
mod savings;

pub use accounts::{Accounts, Component, Cost, EXPIRED, Tally};
pub use costs::{CostsOf, JobCosts, NO_JOB, PEERS, WARMUP, Waiting};
pub use live_jobs::{JobLimits, LABELS_MAX, LiveJob, LiveJobs, TooManyJobs};
pub use savings::SavingsFile;
