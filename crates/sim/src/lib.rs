//! Virtual time around Fletch's pure core: the very functions that the server calls decide, and
//! this crate plays the jobs, the cache's bytes, the origin and the clock.
//!
//! A [`Case`] is jobs with speeds, starts, pauses and ends over one dataset; an [`ArmKind`] is what
//! stands between them and the origin; [`simulate`] runs one against the other and gives an
//! [`Outcome`] with the distance to the bound. Everything is deterministic. Units: a sample is
//! one unit of length, time is in seconds, speeds are samples a second.

pub mod arms;
mod books;
mod bound;
pub mod case;
pub mod cases;
pub mod cli;
mod engine;
pub mod file;
mod net;
mod servers;
pub mod table;
pub mod traces;

pub use arms::ArmKind;
pub use case::{Case, JobSpec, Network, Origin, Reader, Server, Subset};
pub use engine::{Outcome, record, simulate, simulate_with};
pub use file::BadCase;
