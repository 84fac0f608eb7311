//! A cluster in which jobs come and go, under several ways to divide its cache.
//!
//! The other modules of this crate simulate one dataset sample by sample. Here a step is a minute, and the
//! rates of jobs come from the model by which the server divides its cache (`fletch_core::capacity`). The arm
//! [`Arm::Fletch`] calls the server's own decisions.
//!
//! The bytes of a dataset grow only by what is fetched and shrink at once. They help a job that is alone on
//! its dataset from its next pass on. Estimates of a job's rate have an error of 5 % that drifts. Sizes are
//! in GB, times in seconds and rates in GB/s.

mod arm;
mod lru;
pub mod mixes;
mod play;
pub mod table;

pub use arm::Arm;
pub use play::{Outcome, play};

/// A job of a cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// The time at which it starts, in seconds.
    pub start: f64,
    /// The index of its dataset.
    pub dataset: usize,
    /// The rate at which it reads if it never waits, in GB/s.
    pub most_rate: f64,
    /// What it reads in all, in GB.
    pub work: f64,
    /// Whether it reads in an order of its own.
    pub strict: bool,
}

/// A dataset of a cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct Dataset {
    /// Its size in GB.
    pub size: f64,
    /// What a sweep over it needs, in GB.
    pub window: f64,
}

/// Jobs over datasets behind one link, and a cache.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// The size of the cache in GB.
    pub cache: f64,
    /// The bandwidth of the origin's link in GB/s.
    pub link: f64,
    pub datasets: Vec<Dataset>,
    /// The jobs, by start.
    pub jobs: Vec<Job>,
}
