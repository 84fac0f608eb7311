//! The pure core of Fletch: what things *are* and what is *decided*.
//!
//! Nothing here reads a file, a socket, a clock, an environment variable or OS
//! randomness, and nothing spawns: values in, values out. `clippy.toml` beside this
//! crate forbids the standard doors, and `tests/` checks the dependency edges.
//!
//! Words are those of `docs/ARCHITECTURE.md`; formats are those of `docs/FORMATS.md`.

pub mod cluster;
pub mod error;
pub mod hash;
pub mod manifest;
pub mod names;
pub mod order;
pub mod policy;
pub mod record;
pub mod residency;
pub mod verified;

pub use error::Kind;
pub use hash::{Hash, LayoutId, Root};
pub use names::{DatasetName, Domain, JobName, StoreKey, TagName, Tenant};
pub use verified::{Mismatch, Verified};
