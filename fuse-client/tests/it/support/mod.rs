//! What the tests of the mount share: a known tree with its version in memory, a stub server
//! that can misbehave, a real mount, and a count of the kernel's requests from outside.

pub mod dataset;
pub mod kernel;
pub mod stub;
