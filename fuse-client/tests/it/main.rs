//! The mount, first without and then with a kernel.

mod access;
mod fs;
mod kernel;
mod lifecycle;
mod semantics;
mod support;
