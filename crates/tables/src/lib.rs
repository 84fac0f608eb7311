//! The tables of a version at rest: reads them over byte ranges and writes them file by file.
//!
//! The format is in `docs/FORMATS.md`, "Tables at rest".
//!
//! Owns: the names of the files, the JSON documents, the parquet tables, the cache of parts in memory
//! ([`PartCache`]), their local form on disk ([`LocalTables`]), and the search for paths, ordinals and
//! directories in a version.
//! Must never: read a socket or an origin by itself (a [`TableSource`] does), or return a row of an entry or
//! of a placement that was not checked against the root or the layout id.
//!
//! Invariants
//! 1. The entries of a [`LoadedPart`] hash to the part's hash in the root, and its placement to the one in
//!    the layout.
//! 2. The manifest's counts and first paths are hints until the part that they describe is checked. An answer
//!    that depends on them waits until the parts at its edge are loaded.
//! 3. Every count and length that comes from a file is checked against a limit before memory is taken for it.

pub mod cache;
mod chunk_index;
mod chunk_leaf;
pub mod chunks;
mod columns;
mod cursor;
mod decode;
pub mod documents;
pub mod error;
mod footer;
mod group_lists;
mod group_table;
mod keys;
mod leaf;
mod links;
mod listing;
mod loaded_part;
mod local;
mod local_reads;
mod new_row;
pub mod parquet_bytes;
pub mod paths;
mod schema;
mod search;
pub mod source;
mod table_files;
mod thrift;
mod untrusted;
pub mod version;
pub mod writer;

pub use cache::PartCache;
pub use chunk_index::ChunkIndex;
pub use chunks::{ChunkRow, ObjectRef, PinRow};
pub use documents::{Fault, FileTotals, LayoutDoc, Manifest, TagDoc};
pub use error::TableError;
pub use group_lists::GroupLists;
pub use keys::{Key, KeyItem, KeyRange, successor};
pub use listing::{Child, ChildKind};
pub use loaded_part::LoadedPart;
pub use local::{LocalStats, LocalTables, PlaceCheck};
pub use new_row::{NewChunk, NewRow};
pub use source::{SourceError, Table, TableRange, TableSource};
pub use version::{Found, Resolved, Version};
pub use writer::{Provenance, TablesWriter, WrittenVersion};
