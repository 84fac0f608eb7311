//! The `fletch` command: indexes and packs datasets, shows their versions, and talks to a server.
//!
//! Owns the command line, its output and exit codes, and `pack`. Results go to stdout, everything else to
//! stderr. [`fletch_indexer`] lists, reads and indexes datasets.
//!
//! Rooms, from the top down: [`cmd`] → [`pack`] → the indexer. [`target`] reads how people name a dataset.
//! [`status`] turns a server's numbers into text. [`garbage`] finds versions that nobody uses. [`own_server`]
//! starts and stops the server of this user, and [`environment`] knows its credentials.

pub mod cli;
pub mod cmd;
pub mod environment;
pub mod garbage;
pub mod own_server;
pub mod pack;
pub mod status;
pub mod target;

pub use fletch_indexer::{
    default_tables, failure, index, meanings, out, progress, run, source, tables_location,
};
