//! The arms: policies between the jobs and the origin. One is Fletch; the others are common practice without
//! it.

mod fletch;
mod plain;
mod strict;

pub(crate) use crate::links::OriginLink;
use crate::{Case, statistics::Statistics};
use fletch_core::order::sweep::SweepParams;
use serde::{Deserialize, Serialize};

pub use fletch::Fletch;
pub use plain::Plain;

/// A sample that a job was granted.
#[derive(Debug, Clone, Copy)]
pub struct Granted {
    /// The sample's number.
    pub sample: u32,
    /// Time at which its bytes arrive.
    pub arrives: f64,
    /// Time at which they were requested from the origin.
    pub asked: f64,
    /// Whether they were requested for this grant.
    pub forced: bool,
}

/// A policy between jobs and origin.
pub(crate) trait Arm {
    /// Starts an epoch of job j.
    fn begin(&mut self, j: usize, stats: &mut Statistics);
    /// Grants the next sample to job j; `None` when its epoch has none left.
    fn grant(&mut self, j: usize, now: f64, link: &mut OriginLink, stats: &mut Statistics)
    -> Option<Granted>;
    /// Removes job j.
    fn leave(&mut self, j: usize);
    /// Takes the recorded trace since the last call; empty when nothing is recorded.
    fn take_trace(&mut self) -> Vec<u8> {
        Vec::new()
    }
}

/// The kind of an arm.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ArmKind {
    /// No cache: reads every sample by range.
    Direct,
    /// Evicts the least recently used sample; every job reads its own permutation.
    Lru,
    /// Keeps the samples that came first; every job reads its own permutation.
    Pin,
    /// The sweep chooses the next sample.
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

/// Returns the key of a job's epoch. `u64::MAX` stands for the cache itself.
pub(crate) fn key(case: &Case, job: u64, epoch: u64) -> fletch_core::plan::OrderKey {
    let name = |s: &str| fletch_core::Hash::of(s.as_bytes());
    let (root, plan) = (fletch_core::Root(name("simulated")), name("plan"));
    // Epochs of a job lie far from those of any other.
    let number = job.wrapping_add(epoch.wrapping_mul(1 << 32));
    fletch_core::plan::OrderKey::new(root, plan, case.seed, number)
}
