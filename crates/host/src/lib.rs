//! Facts about this machine that several programs need: its mounts, the memory limit of a cgroup, and whether
//! a file changed.
//!
//! Only reads. Each parser takes the text of the kernel's file, so that a test can pass any text.

pub mod cgroup;
pub mod files;
pub mod mounts;
