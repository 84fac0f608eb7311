//! The `fletch` command: indexes and packs datasets, shows their versions, and talks to a server.
//!
//! Owns the command line, its output and exit codes, and the reading of a dataset for `index` and `pack`.
//! Results go to stdout, everything else to stderr. Writes nothing to a dataset except below `fletch/`.
//!
//! Rooms, from the top down: [`cmd`] → [`index`], [`pack`] → [`run`] (what the two share) → [`source`]
//! (reading files), [`tables_location`] (tags and versions). [`out`], [`progress`], [`failure`] and
//! [`target`] are for all. [`status`] turns a server's numbers into text. [`own_server`] starts and stops the
//! server of this user, [`environment`] knows its credentials, [`default_tables`] where tables go, and
//! [`meanings`] which store or folder a URI meant.

pub mod cli;
pub mod cmd;
pub mod default_tables;
pub mod environment;
pub mod own_server;
pub mod pack;
pub mod status;
pub mod target;

pub use fletch_indexer::{failure, index, meanings, out, progress, run, source, tables_location};
