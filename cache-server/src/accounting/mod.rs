//! Accounting: every delivered byte, counted once where it is sent, by domain, tenant, job and dataset (I8).

mod accounts;
mod live_jobs;

pub use accounts::{Accounts, Component, Cost, Tally};
pub use live_jobs::{JobLimits, LABELS_MAX, LiveJob, LiveJobs, TooManyJobs};
