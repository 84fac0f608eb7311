//! The server in this process, asked over its sockets: one program, since each one more would link all of the server.

mod common;

mod accounts;
mod auth;
mod buckets;
mod bytes;
mod checkpoints;
mod contract;
mod crowded;
mod datasets;
mod domains;
mod echoes;
mod epochs;
mod ledgers;
mod lies;
mod limits;
mod packs;
mod prefetches;
mod process;
mod refs;
mod registry;
mod replays;
mod selections;
mod shuffles;
mod states;
mod sweeps;
mod traces;
mod warmups;
