//! Where the truth lives: directories and blob stores behind one small interface.
//!
//! Owns every byte that is read from or written to an origin, with retries, deadlines, limits
//! on what is in flight and pins of what was indexed. The only user of `object_store`; local
//! trees go through `std::fs` (see `docs/adr/0002-local-origin-by-std-fs.md`). It hashes
//! nothing: what it returns is a claim until `fletch_core::Verified` has seen it.
//!
//! 1. A read gives exactly the bytes that were asked for, or an error.
//! 2. Every call ends within `io_timeout`, retries included; every buffer is at most
//!    `get_bytes_max`; at most `requests_max` calls are under way.
//! 3. A write is whole and durable when it returns, or did not happen.
//! 4. No secret is in a URI, an error, a log line or a `Debug` output.

mod config;
mod credentials;
mod error;
pub mod local;
mod origin;
mod pace;
mod remote;
mod retry;
mod stats;
mod uri;
mod wire;

pub use config::{Credentials, KEYS, OriginConfig, OriginLimits};
pub use error::OriginError;
pub use origin::{Got, ObjectMeta, Origin, Origins, Pin, PutMode};
pub use retry::backoff;
pub use stats::OriginStats;
pub use uri::OriginUri;
