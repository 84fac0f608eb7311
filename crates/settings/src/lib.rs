//! Settings files: TOML in, plain structs out, every fault named with its file and line.
//!
//! Owns the units people write ([`ByteSize`], [`Span`]), the reading of a settings file ([`load`],
//! [`parse`]) and the default [`state_dir`]. Knows nothing about what a setting means: relations between values are
//! checked by whoever owns them.
//!
//! 1. A key that nobody knows is an error that names the nearest known key, never ignored.
//! 2. All faults are reported at once, in the order of the file.

mod dirs;
mod load;
mod units;

pub use dirs::{cache_dir, state_dir};
pub use load::{Fault, SettingsError, load, parse};
pub use units::{Amount, ByteSize, Span, UnitError};
