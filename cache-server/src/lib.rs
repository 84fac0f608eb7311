//! `fletch-server`: one node that serves versions by content hash.
//!
//! `app` owns every task and states the stop order; `http` translates requests and answers;
//! `versions` knows where a version's bytes are and brings them; `jobs` keeps accounts; `state`
//! keeps what must survive; `auth` says who asks; `read_ahead` is the memory of what waits to be sent. Dependencies point one way: `app → http → {jobs, versions} → store`.

mod accounting;
pub mod app;
mod auth;
pub mod cgroup;
pub mod config;
mod epochs;
mod http;
mod jobs;
mod limits;
mod metrics;
mod prefetch;
mod read_ahead;
mod request_metrics;
mod server;
mod state;
mod sweep;
pub mod telemetry;
mod versions;
mod warmups;

pub use auth::{Minted, NewToken};
pub use http::openapi_json;
pub use limits::Limits;
