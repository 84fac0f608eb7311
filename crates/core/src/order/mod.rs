//! Orders: which of a plan's entries a rank gets next.
//!
//! - [`strict`]: a keyed permutation, known before the epoch starts; [`strict_assignment`] shares it between ranks.
//! - [`bucketed`]: the same, with every step taken from one bucket.
//! - [`replay`]: the sequence that a ledger recorded.
//! - [`sweep`]: substitution. The cache chooses among the entries that the epoch still needs.
//!
//! An order decides; [`crate::delivery`] grants what it chose and keeps account of it. Everything here is a value
//! or a state machine: no clock, no IO, no OS randomness.

pub mod bucketed;
pub mod rank_cursors;
pub mod replay;
pub mod strict;
pub mod strict_assignment;
pub mod sweep;

pub use bucketed::{Bucketed, Buckets};
pub use rank_cursors::RankCursors;
pub use replay::Replay;
pub use strict::Strict;
pub use strict_assignment::StrictAssignment;
pub use sweep::SweepPolicy;
