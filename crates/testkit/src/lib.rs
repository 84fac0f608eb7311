//! What tests need: seeds, datasets, an origin that can misbehave, a wire that lies, and a look at
//! the kernel's requests to a mount.
//!
//! Dev-only: no crate depends on this outside its tests. It depends on no other crate of the
//! project, so that what it says is independent of what is tested. It panics with a reason where a
//! test could not go on anyway.

pub mod dataset;
mod emulator;
pub mod fuse_trace;
mod rules;
pub mod seeds;
mod serve;
pub mod servers;
mod tamper;

pub use emulator::{Backing, Counts, EmulatorConfig, Fault, Latency, OriginEmulator};
pub use tamper::{Tamper, TamperProxy, Upstream};
