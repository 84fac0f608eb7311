//! The harness of the whole-system tests: starts the built programs, and mounts with the real kernel.
//!
//! Must never: look inside a program. It observes programs by tracepoints, `/proc` and their HTTP API.
//!
//! Invariant: a fixture ends by pid in `Drop` every process that it started, and unmounts every mount that it
//! made.

pub mod attacks;
pub mod bins;
pub mod browser;
pub mod calls;
pub mod cgroup;
pub mod cluster;
pub mod cluster_data;
pub mod cluster_ranks;
pub mod commands;
pub mod console;
pub mod fixture;
pub mod kit;
pub mod monitored;
pub mod names;
pub mod namespace;
pub mod prometheus;
pub mod prose;
pub mod python;
pub mod readers;
pub mod require;
mod strace;
pub mod structure;
pub mod syncs;
pub mod tree;
pub mod user;
pub mod watch;
