//! Orders: which of a plan's entries a rank gets next.
//!
//! - [`strict`]: a keyed permutation, known before the epoch starts; [`strict_assignment`] divides it among
//!   ranks.
//! - [`bucketed`]: a permutation that takes each step from one bucket.
//! - [`replay`]: the order that a ledger recorded.
//! - [`sweep`]: substitution. The cache chooses among the entries that the epoch still needs.
//!
//! An order chooses entries; [`crate::delivery`] grants them and accounts for them. Everything here is a
//! value or a state machine: no clock, no IO, no OS randomness.

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
