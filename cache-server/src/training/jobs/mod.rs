//! Jobs that a tenant declared: their records, their plans, and which of them are open.
//!
//! [`Registry`] keeps the record of every job in the state directory and opens a job at its first request;
//! an [`OpenJob`] has what its [epochs](crate::training::epochs) share.

mod ledger_term;
mod loaders;
mod open_job;
mod plan;
mod reclaims;
mod record;
mod registry;
mod settings;

pub use open_job::OpenJob;
pub use reclaims::Reclaims;
pub use record::{Record, RecordSummary};
pub use registry::{MovedJob, Registry};
