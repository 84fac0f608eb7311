//! The `fletch` binary from outside: exit codes, output, and what it reads and writes.

mod common;
mod doctor;
mod gc;
mod index_faults;
mod index_keys;
mod index_parent;
mod index_remote;
mod index_resume;
mod index_tables;
mod looks;
mod pack;
mod pack_runs;
mod pack_shards;
mod shards;
mod simulate;
mod verify;
