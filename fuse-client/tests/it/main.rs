//! Tests of the mount: of its file system without a kernel, and of real mounts.

mod access;
mod fs;
mod hits;
mod kernel;
mod lifecycle;
mod semantics;
mod support;
