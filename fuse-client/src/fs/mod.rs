//! The file system without a kernel: names in, bytes and attributes out.

pub mod attr;
pub mod error;
pub mod inode;
pub mod known;
pub mod read;
pub mod sequence;
pub mod tree;
pub mod xattr;
