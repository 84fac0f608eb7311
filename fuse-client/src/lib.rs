//! `fletch-mount`: one version of a dataset, or all datasets of a server, as read-only directories.
//!
//! This crate owns the FUSE session, the tree that a mount shows, and the reads of unmodified programs. It
//! must never: touch its own mount (a process that serves a mount and waits for it deadlocks), hold a FUSE
//! thread for longer than `fletch_client::hits::ANSWER_TIMEOUT` while it waits for a server, or return a byte
//! that was not hashed (I1).
//!
//! ```text
//! kernel ── session (receives, replies) ── requests ─┬─ fs/tree ── tables (parts, loaded on demand)
//!                                                    └─ fs/read ── store ── chunk_sources
//! fuse ── begins a session (kernel_mount, fusermount, handshake); tells the kernel what to forget or keep
//! keeper ── holds the mount in another process, so that the death of this one ends nothing
//! datasets ── lists the server's datasets, and mounts their versions
//! chunk_sources ─┬─ hit_connections: a FUSE thread asks the server of this machine itself
//!                ├─ short_circuit: or reads the files of that server's disk tier
//!                ├─ node: the owner of the node store, if this mount is its client
//!                └─ fletch_client ── the server, or the origin while the server is gone
//! ```

pub mod access;
pub mod announce;
pub mod chunk_sources;
pub mod cli;
pub mod daemon;
pub mod datasets;
pub mod draft_places;
pub mod error_cache;
pub mod faults;
pub mod fs;
pub mod fuse;
pub mod fuse_wire;
mod fusermount;
pub mod handshake;
pub mod hit_connections;
pub mod keeper;
mod kernel_mount;
mod kernel_timeout;
pub mod leaving;
pub mod mapped_reads;
pub mod metrics;
pub mod mount;
pub mod mount_dir;
pub mod mount_helper;
pub mod node;
pub mod open_version;
mod passed_device;
pub mod push;
pub mod read_clock;
mod request_memory;
pub mod requests;
pub mod restart;
pub mod server_breaker;
pub mod server_watch;
mod service_manager;
pub mod session;
pub mod shared_parts;
pub mod short_circuit;
pub mod status;
pub mod unmount;
