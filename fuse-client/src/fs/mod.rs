//! The file system without a kernel: names in, bytes and attributes out.

pub mod attr;
pub mod error;
pub mod inode;
pub mod kernel_state;
pub mod read;
pub mod sequential;
pub mod tree;
