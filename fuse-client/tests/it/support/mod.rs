//! Shared parts of the mount's tests: a known tree with its version in memory, a stub server that can
//! misbehave, a unix socket in front of it, and a real mount.

pub mod dataset;
pub mod kernel;
pub mod stub;
pub mod unix_socket;
