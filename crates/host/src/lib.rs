//! What several programs need of this machine: its mounts, the memory limit of a cgroup, how much of disk
//! and memory is used, whether a file changed, files that are replaced as a whole, and a clock.
//!
//! Only `replace` writes. Each parser takes the text of the kernel's file, so that a test can pass any text.

pub mod cgroup;
pub mod clock;
pub mod files;
pub mod mounts;
pub mod replace;
pub mod usage;
