//! The pure core of Fletch: what things *are* and what is *decided*.
//!
//! Nothing here reads a file, a socket, a clock, an environment variable or OS
//! randomness, and nothing spawns: values in, values out. `clippy.toml` beside this
//! crate forbids the standard library's ways to do so, and `tests/` checks the dependency edges.
//!
//! The glossary in `docs/ARCHITECTURE.md` defines the words; `docs/FORMATS.md` describes the formats.

pub mod cluster;
pub mod delivery;
pub mod error;
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
pub use names::{DatasetName, Domain, JobName, StoreKey, TagName, Tenant};
pub use verified::{Mismatch, Verified};
