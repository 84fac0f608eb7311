//! Divides a cache among datasets, so that each byte goes where jobs gain most from it.
//!
//! - [`problem`]: the jobs, datasets, links and limits, in bytes and bytes a second.
//! - [`streams`]: what the jobs of a dataset read from the origin at a given share.
//! - [`rates`]: how links divide their bandwidth, and the rate of every job.
//! - [`allocator`]: the search for the best division; [`greedy`] and [`exchange`] are its steps.
//! - [`decision`]: whether a new division is worth the bytes that it moves.
//!
//! The goal is the sum over jobs of weight × ln(rate / most rate), weighted proportional fairness (Kelly,
//! "Charging and rate control for elastic traffic", 1997), less a small price on origin bytes. The rate of a
//! job is that of SiloD (Zhao et al., EuroSys 2023): the least of what it can compute and what its stream
//! fetches, b / (1 − c/D). All jobs of a sweep share one stream, so the origin is paid once for all of them.
//!
//! I1. A division never exceeds the capacity, a dataset's size or a limit's most bytes.
//! I2. By its own estimate a division is never worse than the equal split.
//! I3. The division depends on the problem, not on the order of its lists. The search counts evaluations and
//!     reads no clock, so the same problem gives the same division.

pub mod allocator;
pub mod decision;
mod exchange;
mod greedy;
pub mod problem;
pub mod rates;
mod streams;
#[cfg(test)]
pub(crate) mod tests;

/// The part of a job's weight that counts while it reads a dataset alone and for the first time. Such a job
/// gains from the cache only if it reads the dataset again, which nobody knows yet.
pub const FIRST_PASS_WEIGHT: f64 = 0.25;

pub use allocator::{Division, Previous, divide};
pub use decision::{Decision, Hysteresis, Reason};
pub use problem::{DatasetDemand, JobDemand, Limit, Link, Problem, ProblemError};
pub use rates::{byte_values, job_rates, origin_rates};
