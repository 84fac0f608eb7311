//! The file system of a mount, without the kernel: takes names and inodes, returns attributes and bytes.

pub mod attr;
pub mod error;
pub mod file_runs;
pub mod inode;
pub mod kernel_state;
mod lent;
mod parts;
pub mod read;
pub mod sequential;
pub mod tree;
