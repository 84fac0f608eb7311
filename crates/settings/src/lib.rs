//! Settings files: reads TOML into plain structs, and names every fault with its file and line.
//!
//! Owns: the units that people write ([`ByteSize`], [`Amount`], [`Span`]), the reading of a settings file
//! ([`load`], [`parse`]), and the default directories ([`state_dir`], [`cache_dir`]).
//! Must never: know what a setting means. The program that owns a setting checks its relation to other
//! settings.
//!
//! Invariants
//! 1. An unknown key is an error that names the nearest known key. It is never ignored.
//! 2. One error reports all faults, in the order of the file.

mod dirs;
mod load;
mod units;

pub use dirs::{cache_dir, state_dir};
pub use load::{Fault, SettingsError, load, parse};
pub use units::{Amount, ByteSize, Span, UnitError};
