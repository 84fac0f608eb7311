//! What stands between jobs and origin: Fletch, or what people do without it.

mod fletch;
mod plain;

use crate::{Case, Origin, books::Books};
use fletch_core::order::substitute::Knobs;
use serde::{Deserialize, Serialize};

pub use fletch::Fletch;
pub use plain::Plain;

/// The way to the origin: one link, first come first served.
#[derive(Debug, Clone)]
pub struct Net {
    origin: Option<Origin>,
    free: f64,
}

impl Net {
    pub(crate) fn new(origin: Option<Origin>) -> Self {
        Net { origin, free: 0.0 }
    }

    /// Whether the link has nothing to do for a while (and fetching takes time at all).
    pub(crate) fn idle(&self, now: f64, samples: u64) -> bool {
        self.origin.is_some_and(|o| self.free <= now + samples as f64 / o.bandwidth)
    }

    /// When `samples` samples' worth of bytes arrive that are asked for now.
    pub(crate) fn request(&mut self, now: f64, samples: u64) -> f64 {
        match self.origin {
            None => now,
            Some(o) => {
                self.free = self.free.max(now) + samples as f64 / o.bandwidth;
                self.free + o.latency
            }
        }
    }
}

/// A sample that a job was granted.
#[derive(Debug, Clone, Copy)]
pub struct Granted {
    /// Which.
    pub sample: u32,
    /// When its bytes are there.
    pub arrives: f64,
    /// When they were asked of the origin.
    pub asked: f64,
    /// Whether they were asked for this very grant.
    pub forced: bool,
}

/// What stands between jobs and origin.
pub(crate) trait Arm {
    /// Job j starts an epoch.
    fn begin(&mut self, j: usize, books: &Books);
    /// The next sample for job j, if its epoch has any left to grant.
    fn grant(&mut self, j: usize, now: f64, net: &mut Net, books: &mut Books) -> Option<Granted>;
    /// Job j has left.
    fn leave(&mut self, j: usize);
}

/// Which arm.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ArmKind {
    /// No cache: every sample by range.
    Direct,
    /// Least recently used samples leave; every job reads a permutation of its own.
    Lru,
    /// What came first stays; every job reads a permutation of its own.
    Pin,
    /// The cache chooses.
    Fletch,
}

impl ArmKind {
    pub(crate) fn build(self, case: &Case, knobs: Knobs) -> Box<dyn Arm> {
        match self {
            ArmKind::Direct => Box::new(Plain::new(case, plain::Policy::Direct)),
            ArmKind::Lru => Box::new(Plain::new(case, plain::Policy::Lru)),
            ArmKind::Pin => Box::new(Plain::new(case, plain::Policy::Pin)),
            ArmKind::Fletch => Box::new(Fletch::new(case, knobs)),
        }
    }
}

pub(crate) fn key(case: &Case, job: usize) -> fletch_core::order::OrderKey {
    let name = |s: &str| fletch_core::Hash::of(s.as_bytes());
    fletch_core::order::OrderKey::new(
        fletch_core::Root(name("simulated")),
        name("plan"),
        case.seed,
        job as u64,
    )
}
