//! What several programs need of this machine: its mounts, the memory limit of a cgroup, how much of disk
//! and memory is used, whether a file changed, and files that are replaced as a whole.
//!
//! Only `replace` writes. Each parser takes the text of the kernel's file, so that a test can pass any text.

pub mod cgroup;
pub mod files;
pub mod mounts;
pub mod replace;
pub mod usage;
