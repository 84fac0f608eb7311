//! Tests a server in this process, over its sockets. All tests are one program, so that the server is linked
//! once.

mod common;

mod accounts;
mod auth;
mod browser;
mod buckets;
mod bytes;
mod checkpoints;
mod connections;
mod contract;
mod crowded;
mod datasets;
mod domains;
mod echoes;
mod epochs;
mod ledgers;
mod lies;
mod limits;
mod mounts;
mod neighbours;
mod origins;
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
mod tenants;
mod traces;
mod unmounted;
mod warmups;
