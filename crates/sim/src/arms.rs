//! What stands between jobs and origin: Fletch, or what people do without it.

mod fletch;
mod plain;
mod strict;

pub(crate) use crate::net::Net;
use crate::{Case, books::Books};
use fletch_core::order::sweep::SweepParams;
use serde::{Deserialize, Serialize};

pub use fletch::Fletch;
pub use plain::Plain;

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
    fn begin(&mut self, j: usize, books: &mut Books);
    /// The next sample for job j, if its epoch has any left to grant.
    fn grant(&mut self, j: usize, now: f64, net: &mut Net, books: &mut Books) -> Option<Granted>;
    /// Job j has left.
    fn leave(&mut self, j: usize);
    /// What was recorded and not taken; nothing where nothing is.
    fn take_trace(&mut self) -> Vec<u8> {
        Vec::new()
    }
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
    pub(crate) fn build(self, case: &Case, params: SweepParams, recorded: bool) -> Box<dyn Arm> {
        match self {
            ArmKind::Direct => Box::new(Plain::new(case, plain::Policy::Direct)),
            ArmKind::Lru => Box::new(Plain::new(case, plain::Policy::Lru)),
            ArmKind::Pin => Box::new(Plain::new(case, plain::Policy::Pin)),
            ArmKind::Fletch => Box::new(Fletch::new(case, params, recorded)),
        }
    }
}

/// The key of a job's epoch; `u64::MAX` is nobody.
pub(crate) fn key(case: &Case, job: u64, epoch: u64) -> fletch_core::plan::OrderKey {
    let name = |s: &str| fletch_core::Hash::of(s.as_bytes());
    let (root, plan) = (fletch_core::Root(name("simulated")), name("plan"));
    // Epochs of a job lie far from those of any other.
    let number = job.wrapping_add(epoch.wrapping_mul(1 << 32));
    fletch_core::plan::OrderKey::new(root, plan, case.seed, number)
}
