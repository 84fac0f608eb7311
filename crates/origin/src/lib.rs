//! Reads and writes origins: directories, blob stores and plain HTTP servers, behind one small interface.
//!
//! Owns every byte that is read from or written to an origin: retries, deadlines, concurrency limits, and the
//! pins of indexed objects. The only user of `object_store`; local trees go through `std::fs`
//! (`docs/adr/0002-local-origin-by-std-fs.md`). Hashes nothing: the caller verifies the bytes with
//! `fletch_core::Verified`.
//!
//! 1. A read returns exactly the requested bytes, or an error.
//! 2. Every call ends within `io_timeout`, retries included. Every buffer has at most `get_bytes_max` bytes.
//!    At most `requests_max` calls are in flight.
//! 3. A write that succeeds is whole and durable. A write that fails leaves a whole object or none.
//! 4. No secret is in a URI, an error, a log line or a `Debug` output. No body or header of a server is.
//! 5. No client follows a redirect. A client of data connects only to addresses that its `[[origin]]` allows.

#![warn(missing_docs)]

mod address;
mod authorities;
mod aws_profile;
mod backend;
mod config;
mod credentials;
mod entity_tag;
mod error;
mod given;
pub mod local;
mod meter;
mod object;
mod origin;
mod pace;
mod regular_file;
mod remote;
mod retry;
mod shared_permits;
mod stalls;
mod stats;
mod store_name;
mod transport;
mod uri;

pub use authorities::{AUTHORITIES_BYTES_MAX, read_authorities};
pub use aws_profile::{AwsKeys, AwsProfile, Variables, aws_keys};
pub use backend::Backend;
pub use config::{ConfiguredBy, Credentials, KEYS, OriginConfig, OriginLimits, OriginPace};
pub use credentials::keys_of_file;
pub use entity_tag::{EntityTag, TagMatch};
pub use error::OriginError;
pub use given::{GiveError, Given};
pub use meter::Meter;
pub use object::{ObjectBytes, ObjectMeta, Pin, PutMode};
pub use origin::{Origin, Origins};
pub use retry::backoff;
pub use shared_permits::{SharedPermit, SharedPermits};
pub use stats::OriginStats;
pub use uri::{OriginUri, is_path};
