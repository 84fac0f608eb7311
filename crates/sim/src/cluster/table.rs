//! Tables of clusters: each mix under each arm, as means over seeds.

use super::{Arm, Outcome, mixes::Mix, play};
use fletch_core::capacity::ProblemError;
use serde::Serialize;

/// The heading of the columns.
pub const HEADING: &str = "cluster                                  arm      slowdown    p95  fairness  \
     GPU use  origin  hours  reassigned";

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The name of the mix.
    pub cluster: &'static str,
    /// The way to divide the cache.
    pub arm: Arm,
    /// How many seeds the means are over.
    pub seeds: u64,
    /// The means.
    #[serde(flatten)]
    pub outcome: Outcome,
}

impl Row {
    /// Plays a mix under an arm with the seeds `first` to `first + seeds`.
    ///
    /// # Errors
    /// A cluster whose numbers cannot be used.
    pub fn play(mix: &Mix, arm: Arm, first: u64, seeds: u64) -> Result<Row, ProblemError> {
        let outcomes: Result<Vec<Outcome>, ProblemError> =
            (first..first + seeds).map(|seed| play(&mix.cluster(seed), arm, seed)).collect();
        Ok(Row { cluster: mix.name, arm, seeds, outcome: Outcome::mean(&outcomes?) })
    }

    /// Returns the row as a line below [`HEADING`].
    #[must_use]
    pub fn line(&self) -> String {
        let o = &self.outcome;
        let arm = format!("{:?}", self.arm).to_lowercase();
        format!(
            "{:<40} {arm:<8} {:>8.2} {:>6.2} {:>9.3} {:>8.3} {:>7.3} {:>6.1} {:>11.3}",
            self.cluster,
            o.slowdown,
            o.slowdown_p95,
            o.fairness,
            o.gpu_use,
            o.origin,
            o.makespan_hours,
            o.reassigned
        )
    }
}
