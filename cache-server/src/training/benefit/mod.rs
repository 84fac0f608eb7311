//! What the server observes of each job, origin and disk, and the estimate of [`fletch_core::benefit`].
//!
//! - [`ServiceLog`]: the latest requests of an origin or of the disk.
//! - [`LeaseTimes`]: what the stream of a lease waited for.
//! - [`JobWindow`]: the latest batches of a job, with the times of their leases.
//!
//! (I6) A job remembers at most 512 leases, and 512 batches or 256 for each of its first sixteen ranks. A log
//! remembers 4,096 requests.

mod lease_times;
mod probe;
mod service_log;
mod window;

pub use lease_times::{LeaseTimes, WaitCause};
pub use service_log::{ServiceLog, ServiceSums, busy_rate};
pub use window::{AckedLease, JobWindow, PROBE_STEPS, Served};
