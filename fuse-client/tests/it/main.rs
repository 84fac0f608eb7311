//! The mount, first without and then with a kernel.

mod fs;
mod grant;
mod kernel;
mod life;
mod semantics;
mod support;
