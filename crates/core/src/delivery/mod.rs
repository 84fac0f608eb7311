//! Delivery: what an epoch granted, what was acknowledged, and the proof of it.
//!
//! [`lease`] grants a plan's entries to ranks exactly once (I2), and [`ledger`] is the durable log of that.
//! At the end of an epoch the [`receipt`] states what was delivered, the [`certificate`] says how well it was
//! shuffled, and [`consumption_log`] compares the samples that consumers recorded with the receipt. If a
//! ledger is lost, [`reclaim`] restores it from what the processes of the ranks know.
//!
//! Everything here is a value or a state machine: no clock, no IO, no OS randomness. `docs/FORMATS-epochs.md`
//! describes the formats.

pub mod certificate;
pub mod consumption_log;
pub mod event;
pub mod lease;
pub mod ledger;
pub mod receipt;
pub mod reclaim;

pub use event::{Event, Loss, Request};
pub use lease::{Lease, Leases, Room};
pub use ledger::Ledger;
