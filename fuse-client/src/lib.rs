//! `fletch-mount`: one version of a dataset as a read-only directory.
//!
//! Owns the FUSE session, the tree that is shown and the reads of unmodified programs. Must never
//! touch its own mount (a process that holds the session and waits for it deadlocks), hold a FUSE
//! thread while it waits for a server, or hand out a byte that nobody hashed (I1).
//!
//! ```text
//! kernel ── fuse (adapter) ── fs/tree ── tables (parts, lazily)
//!                          └─ fs/read ── store (memory, flights, disk) ── source ── client ── server (or origin)
//!                                                          └─ node: the store's owner on this node, or its guest
//! ```

pub mod access;
pub mod chunk_sources;
pub mod cli;
pub mod daemon;
pub mod error_cache;
pub mod faults;
pub mod fs;
pub mod fuse;
pub mod metrics;
pub mod mount;
pub mod mountinfo;
pub mod node;
pub mod open_version;
pub mod push;
pub mod unmount;
