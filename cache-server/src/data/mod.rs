//! Where the bytes of datasets are, and how they get here.
//!
//! ```text
//! a request, a lease            ─▶ reads ─┐
//! a sweep, a prefetch, a warm-up ─────────┴▶ chunk_reads ─▶ the store: memory, disk, or a fetch
//!                                              └▶ another server of the cluster, or versions ─▶ an origin
//! ```
//! - `reads` reads chunks and entries for requests and leases, checks their access and counts them.
//! - `chunk_reads` decides whom a read asks: this server's store, other servers, the origin.
//! - `versions` opens versions, locates their chunks and fetches them from origins.
//! - `learned` knows the content of what a draft names by its place.
//! - `drafts` lists datasets, and makes versions of drafts: of what was learned, and what it reads for that.
//! - `warmups` fetches versions before jobs read them, and protects them.
//! - `read_ahead` is the memory for what is read ahead of being sent.

pub mod chunk_reads;
pub mod drafts;
pub mod learned;
pub mod read_ahead;
pub mod reads;
pub mod versions;
pub mod warmups;
