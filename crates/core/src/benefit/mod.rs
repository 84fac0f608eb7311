//! Estimates what cache is worth to a job, from what its acks and the server's own clocks tell.
//!
//! - [`observation`]: what is observed of batches, of an origin's link and of a disk.
//! - [`service`]: how fast a link or disk is while it is busy, and how busy it is.
//! - [`estimate`]: the job's most rate, the origin's rate, where the time goes, and the verdict.
//! - [`predict`]: the job's rate with another part of its data in the cache.
//! - [`mount`]: a bound for programs that read a mount and acknowledge nothing.
//!
//! Rates are samples a second of all ranks together; times are seconds.
//!
//! A batch that did not wait does not show how fast a job computes: it selects the steps after long ones,
//! forgets preparation, and in several ranks counts the waits of others. So the estimate looks at a window of
//! steps as a whole: how long the window took, what computing and preparing its batches took, and whether
//! link, disk and receivers had time left.
//!
//! I1. An estimate says whether its most rate is a value or an upper bound.
//! I2. Every number of an estimate is finite, and the parts of the time add up to 1.

pub mod estimate;
pub mod mount;
pub mod observation;
pub mod predict;
pub mod service;
#[cfg(test)]
mod tests;

pub use estimate::{Estimate, NotMeasured, Parts, Verdict, estimate};
pub use mount::{MountCounts, MountUse, mount_use};
pub use observation::{BatchObservation, Served, Window};
pub use service::service;
