//! The harness of the whole-system tests: it starts the *built programs*, mounts with the
//! real kernel, and watches them from outside (tracepoints, `/proc`), never from inside.
//!
//! Everything a fixture starts it ends by pid in `Drop`, and everything it mounts it unmounts.

pub mod bins;
pub mod cgroup;
pub mod console;
pub mod fixture;
pub mod kit;
pub mod names;
pub mod prose;
pub mod python;
pub mod readers;
pub mod require;
pub mod structure;
pub mod syncs;
pub mod tree;
pub mod watch;
