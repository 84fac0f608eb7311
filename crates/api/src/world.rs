//! The world of an epoch: how its steps are shared by ranks.

use fletch_core::plan::Tail;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The ranks that share each step of a job, and the size of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = World)]
pub struct WorldSpec {
    /// Number of data-parallel ranks.
    pub ranks: u32,
    /// Entries in a step of all ranks together. A multiple of `ranks`.
    pub batch: u32,
    /// How an incomplete last step is handled: `keep` (one rank only), `drop` or `pad`.
    #[schema(value_type = String)]
    pub tail: Tail,
}
