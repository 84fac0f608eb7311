//! Mounts whose process is killed again and again: programs that read wait, and see no error.

mod common;
mod failures;
mod many_mounts;
mod one_mount;
