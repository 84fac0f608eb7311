//! The pure core of Fletch: its formats and its decisions.
//!
//! No code here reads a file, a socket, a clock, an environment variable or OS randomness, and none spawns a
//! thread or task: values in, values out. `clippy.toml` of this crate forbids the standard library's
//! functions for these, and `tests/integration/structure.rs` checks the dependencies.
//!
//! The glossary in `docs/ARCHITECTURE.md` defines the words; `docs/FORMATS.md` describes the formats.

#![warn(missing_docs)]

pub mod benefit;
pub mod capacity;
pub mod cluster;
pub mod delivery;
pub mod error;
pub mod groups;
pub mod hash;
pub mod manifest;
pub mod names;
pub mod order;
pub mod plan;
pub mod prefetch;
pub mod record;
pub mod residency;
mod varint;
pub mod verified;

pub use error::Kind;
pub use hash::{Hash, LayoutId, Root};
pub use names::{DatasetName, Domain, JobName, MemberId, MountId, StoreKey, TagName, Tenant};
pub use verified::{Expected, Mismatch, Verified};
