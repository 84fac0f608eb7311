//! Whole-system tests of the store of a node without a server: mounts that share a cache on disk.

mod common;
mod damage;
mod limits;
mod shared;
mod survival;
mod trust;
