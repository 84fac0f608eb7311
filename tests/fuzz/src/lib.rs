//! Fuzz targets: one for each parser of foreign bytes.
//!
//! A [`Target`] has seeds, and a function that parses an input and checks what the parser promises: a value
//! that was written is read again, a second implementation agrees, a range lies within its file. [`check`]
//! adds the bounds of every target: memory and time.
//!
//! Two drivers call [`check`]. libFuzzer (`src/main.rs`, `make fuzz`) is guided by coverage. [`mutate`] is
//! not, and runs within `make test` without a special build. ADR 50 says why.
//!
//! Formats with checksums refuse nearly every changed byte. Their targets repair the checksums of an input
//! first ([`repair`]), so that the changes reach the parser behind the checks.

pub mod bounds;
pub mod mutate;
pub mod plant;
pub mod repair;
pub mod scratch;
pub mod target;
mod targets;

pub use bounds::check;
pub use target::{TARGETS, Target, target};
