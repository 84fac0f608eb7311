//! Training jobs: which sample is next, what is fetched for it, and what cache is worth.
//!
//! ```text
//! a lease ─▶ jobs ─▶ epochs ─▶ sweep (substitute) or prefetch (known orders) ─▶ data
//!                      └▶ acks ─▶ benefit ─▶ allocation ─▶ the shares of the disk
//! ```
//! - `jobs` declares, opens and deletes jobs.
//! - `epochs` grants, acknowledges and records samples; they are durable in ledgers.
//! - `sweep` lets jobs share what they read of a version; `prefetch` reads ahead in orders that are known.
//! - `benefit` observes what jobs wait for, and `allocation` divides the disk by it.

pub mod allocation;
pub mod benefit;
pub mod epochs;
pub mod jobs;
pub mod prefetch;
pub mod sweep;
