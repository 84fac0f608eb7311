//! Whole-system tests of the node store: mounts that share a cache on disk, on a node without a server.

mod common;
mod damage;
mod limits;
mod shared;
mod survival;
mod trust;
