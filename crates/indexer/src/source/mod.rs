//! Reading a dataset: which files and objects it has, how each looks, and what its bytes hash to.
//!
//! Owns the walk of a local tree, the listing of a store, the pins and the hashing of files. Knows neither
//! versions nor layouts, and writes nothing but one unnamed temporary file.

pub mod content;
pub mod count;
pub mod dir_names;
pub mod draft;
pub mod listing;
pub mod name_list;
pub mod outage;
pub mod pin;
pub mod sampler;
pub mod shard_dirs;
pub mod spill;
pub mod walk;
