//! Makes versions of datasets: lists a store or walks a directory, reads and hashes files, writes tables.
//!
//! `fletch index`, `fletch pack` and `fletch mount` use it, and the server to seal drafts. Writes nothing to
//! a dataset except below `fletch/`.
//!
//! Rooms, from the top down: [`index`] → [`run`] (what an index and a pack share) → [`source`] (reading
//! files), [`tables_location`] (tags and versions). [`out`], [`progress`], [`failure`] and [`select`] are for
//! all. [`meanings`] knows which store or folder a URI meant, and [`default_tables`] where tables go.

pub mod default_tables;
pub mod failure;
pub mod index;
pub mod meanings;
pub mod out;
pub mod progress;
pub mod run;
pub mod select;
pub mod source;
pub mod tables_location;
