//! `fletch-mount`: one version of a dataset as a read-only directory.
//!
//! This crate owns the FUSE session, the tree that a mount shows, and the reads of unmodified programs. It
//! must never: touch its own mount (a process that serves a mount and waits for it deadlocks), hold a FUSE
//! thread while it waits for a server, or return a byte that was not hashed (I1).
//!
//! ```text
//! kernel ── fuse (adapter) ─┬─ fs/tree ── tables (parts, loaded on demand)
//!                           └─ fs/read ── store (memory, flights, disk) ── chunk_sources
//! chunk_sources ─┬─ node: the owner of the node store, if this mount is its client
//!                └─ fletch_client ── the server, or the origin while the server is gone
//! ```

pub mod access;
pub mod announce;
pub mod chunk_sources;
pub mod cli;
pub mod daemon;
pub mod error_cache;
pub mod faults;
pub mod fs;
pub mod fuse;
pub mod metrics;
pub mod mount;
pub mod mount_dir;
pub mod mount_helper;
pub mod node;
pub mod open_version;
pub mod push;
pub mod server_breaker;
pub mod server_watch;
pub mod unmount;
