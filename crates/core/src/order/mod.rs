//! Epochs: which sample a rank gets next, and the proof that all were delivered.
//!
//! A *plan* is a multiset of samples ([`plan`]); its *entries* are numbered, and everything
//! here speaks of entries by number. An *order* decides the sequence: [`strict`] (a keyed
//! permutation, known in advance), [`bucketed`] (the same, each step from one bucket),
//! [`replay`] (what a ledger tells) or [`substitute`] (the cache chooses). [`lease`] hands
//! entries to ranks exactly once (I2), [`ledger`] is the durable log of that, and
//! [`receipt`] and [`certificate`] say at the end what was delivered and how well shuffled;
//! [`notes`] are what consumers hold against that.
//!
//! Everything is a value or a state machine: no clock, no IO, no OS randomness. Formats are
//! those of `docs/FORMATS.md`, "Epochs".

/// Context strings of format 1 (`docs/FORMATS.md`, "Contexts").
pub mod context {
    /// A plan's hash.
    pub const PLAN: &str = "fletch 2026 plan 1";
    /// The key of an epoch's order.
    pub const ORDER: &str = "fletch 2026 order 1";
    /// A plan's hash with the buckets it is cut into.
    pub const BUCKETS: &str = "fletch 2026 buckets 1";
    /// One delivered entry in a receipt.
    pub const RECEIPT: &str = "fletch 2026 receipt 1";
}

pub mod bits;
pub mod bucketed;
pub mod certificate;
pub mod key;
pub mod lease;
pub mod ledger;
pub mod line;
pub mod notes;
pub mod permutation;
pub mod plan;
pub mod receipt;
pub mod replay;
pub mod shape;
pub mod strict;
pub mod substitute;
pub mod turns;

pub use bits::Bits;
pub use bucketed::{Bucketed, Buckets};
pub use key::{Draws, OrderKey};
pub use lease::{Lease, Leases, Request, Room};
pub use ledger::{Event, Ledger};
pub use line::Line;
pub use permutation::Permutation;
pub use plan::{Echo, Fit, Item, Plan, PlanError, Tail};
pub use replay::Replay;
pub use shape::{Laid, Shape};
pub use strict::Strict;
pub use substitute::Flywheel;
pub use turns::Turns;
