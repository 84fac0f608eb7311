//! `fletch`: indexes datasets, looks into their versions, and talks to a server.
//!
//! Owns the command line, its output and exit codes, and the reading of a dataset for
//! `index`. Results go to stdout, everything else to stderr. Nothing is written to a dataset
//! but its tables under `fletch/`.

pub mod cli;
pub mod cmd;
pub mod failure;
pub mod index;
pub mod out;
pub mod pack;
pub mod place;
pub mod progress;
pub mod target;
