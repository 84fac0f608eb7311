//! Facts about this machine that several programs need: its mounts, and the memory limit of a cgroup.
//!
//! Only reads. Each parser takes the text of the kernel's file, so that a test can pass any text.

pub mod cgroup;
pub mod mounts;
