//! Versions at rest: the tables that describe one version and one layout of it, read over
//! byte ranges and written file by file (`docs/FORMATS.md`, "Tables at rest").
//!
//! Owns: the names of the files, the JSON documents, the parquet tables, what of a version is
//! in memory ([`PartCache`]) and how paths, ordinals and directories are found in it.
//! Must never: read a socket or an origin by itself (a [`TableSource`] does), or hand out a row
//! that was not checked against the root or the layout id.
//!
//! Invariants
//! 1. A [`LoadedPart`] hashed to what the root names, and its placement to what the layout names.
//! 2. The manifest's counts and first paths are hints until the part they describe was checked;
//!    an answer that depends on them is given only after the parts at its edge were loaded.
//! 3. Every count and length that comes from a file is bounded before memory is taken for it.

pub mod cache;
pub mod chunks;
mod columns;
mod decode;
pub mod documents;
pub mod error;
mod footer;
mod listing;
pub mod paths;
mod rows;
mod schema;
pub mod source;
pub mod version;
pub mod writer;

pub use cache::{LoadedPart, PartCache};
pub use chunks::{ChunkIndex, ChunkRow, ObjectRef, PinRow};
pub use documents::{Fault, LayoutDoc, Manifest, TagDoc};
pub use error::TableError;
pub use listing::{Child, ChildKind};
pub use source::{SourceError, Table, TableRange, TableSource};
pub use version::{Found, Resolved, Version};
pub use writer::{Created, NewChunk, NewRow, TablesWriter, Written};
