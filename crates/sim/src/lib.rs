//! Simulates jobs, a cache, servers and an origin in virtual time, around Fletch's pure core. The functions
//! that decide are those that the server calls; this crate owns the jobs, the cache's bytes, the origin and
//! the clock.
//!
//! A [`Case`] is a set of jobs with speeds, starts, pauses and ends over one dataset. An [`ArmKind`] is the
//! policy between them and the origin. [`simulate`] runs one against the other and returns an [`Outcome`]
//! with the distance to the lower bound. Everything is deterministic. Units: a sample is one unit of length,
//! time is in seconds, speeds are samples a second.

pub mod arms;
mod bound;
pub mod case;
pub mod cases;
pub mod cli;
pub mod cluster;
mod engine;
pub mod file;
mod links;
mod rng;
mod servers;
mod statistics;
pub mod table;
pub mod traces;

pub use arms::ArmKind;
pub use case::{Case, JobSpec, Network, Origin, Reader, Server, Subset};
pub use engine::{Outcome, record, simulate, simulate_with};
pub use file::BadCase;
