//! Divides the disk among datasets by what its bytes are worth to the jobs that read them
//! (`docs/ALLOCATION.md`).
//!
//! - [`Reader`]: a running job, with its measured rates and its settings.
//! - [`Allocator`]: decides now and then, by [`fletch_core::capacity`], and keeps the decision.
//! - [`Division`]: a decision. It turns the claims of all datasets into claims that carry it out.
//!
//! 1. Only datasets whose readers are jobs, one of them measured, are divided by worth. They divide the bytes
//!    that they would have without measurements, so nobody else gets less because of them.
//! 2. A dataset whose jobs have all ended keeps what the others leave.
//! 3. A division never exceeds a tenant's quota, nor the size of a dataset.

mod allocator;
mod division;
mod problem;
mod reader;

pub use allocator::{Allocator, Limits};
pub use division::{Division, JobRate, Outcome};
pub use problem::TenantShare;
pub use reader::{Measured, RUNNING_FOR, Reader};

#[cfg(test)]
mod tests;
