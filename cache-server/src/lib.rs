//! `fletch-server`: a cache node that serves dataset versions by content hash.
//!
//! ```text
//! app        starts and stops everything; settings, limits, TLS, log, and the parts that all requests share
//! http       maps requests to calls, and errors to replies
//! s3         the same for clients of object stores, on a port of its own
//! admin      what an administrator sees: metrics, and the state and the last hour for the admin page
//! training   jobs and their epochs; what is fetched for them; what cache is worth to them
//! data       where bytes are: open versions, reads of chunks, warm-ups
//! cluster    the other servers: membership, reads from them, what all of them know
//! tenancy    who may do how much: tokens, connections, accounts, registered datasets
//! fuzzing    entrances to parsers, for `tests/fuzz`
//! ```
//! The head of each folder names its rooms. Which room may use which one is a rule that a test checks:
//! `SERVER_LAYERS` in `tests/harness/structure.rs`, drawn in `docs/ARCHITECTURE.md`.

mod admin;
pub mod app;
mod cluster;
mod data;
#[doc(hidden)]
pub mod fuzzing;
mod http;
mod s3;
mod tenancy;
mod training;

pub use app::{config, limits::Limits, telemetry};
pub use http::openapi_json;
pub use tenancy::auth::{Minted, NewToken};
