//! `fletch-server`: a cache node that serves dataset versions by content hash.
//!
//! The rooms, from the top down; each may use only those below it:
//! - `fuzzing` has entrances to parsers, for `tests/fuzz`.
//! - `app` owns every task, and states the order of the stop.
//! - `http` maps requests to calls, and errors to replies.
//! - `overview` reads the state for the admin page.
//! - `metrics` writes what other rooms count. `server` holds the parts of a running server.
//! - `jobs` declares and opens jobs; `warmups` fetches versions before jobs read them.
//! - `epochs` grants, acknowledges and records samples; `sweep` and `prefetch` decide what is fetched for
//!   them.
//! - `versions` opens versions, locates their bytes and fetches them.
//! - `config` reads the settings; `accounting` counts bytes; `auth` knows tokens. `state` keeps
//!   registrations, and `catalog` changes them, in a cluster for all of its servers. `cluster` knows the
//!   other servers.
//! - `connections` bounds connections, and the memory of requests that arrive. `tls` keeps the certificate,
//!   and `credentials` what a user handed over.
//! - `benefit` observes what jobs wait for, `allocation` divides the disk, and `dashboard` keeps the last
//!   hour for the admin page; they, `idle`, `limits`, `read_ahead`, `request_metrics` and `telemetry` use no
//!   other room.

mod accounting;
mod allocation;
pub mod app;
mod auth;
mod benefit;
mod catalog;
mod chunk_reads;
mod cluster;
pub mod config;
mod connections;
mod credentials;
mod dashboard;
mod epochs;
#[doc(hidden)]
pub mod fuzzing;
mod groups;
mod http;
mod idle;
mod jobs;
mod limits;
mod metrics;
mod mounts;
mod overview;
mod prefetch;
mod read_ahead;
mod request_metrics;
mod server;
mod state;
mod sweep;
pub mod telemetry;
mod tenants;
mod tls;
mod versions;
mod warmups;

pub use auth::{Minted, NewToken};
pub use http::openapi_json;
pub use limits::Limits;
