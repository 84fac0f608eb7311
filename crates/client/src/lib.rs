//! The client of a Fletch server: one place that knows how to ask, wait, ask again and believe.
//!
//! Owns connections (HTTP/1.1 keep-alive over TCP or a unix socket), deadlines, retries and the
//! translation of answers into [`ClientError`]. Knows no FUSE, and reads an origin only
//! where the feature `fallback` is on and the server is gone.
//!
//! Invariants
//! 1. A call ends within its deadline, whatever the server does.
//! 2. 429 means wait (as long as `Retry-After` says), never ask elsewhere.
//! 3. No body is read past the length the caller can hold: every body has a bound before it begins.
//! 4. A token that a file holds is read again after a 401, once a call; no token is ever logged.
//! 5. The server's `code` and `hint` reach the caller unchanged.

mod batch;
mod body;
mod client;
mod endpoint;
pub mod epochs;
mod error;
#[cfg(feature = "fallback")]
pub mod fallback;
mod manage;
mod node;
mod retry;
#[cfg(feature = "select")]
pub mod select;
mod tables;
mod token;

pub use batch::{Batch, BatchPiece};
pub use client::{Client, ClientConfig, ClientStats};
pub use endpoint::{BadEndpoint, Endpoint};
pub use error::ClientError;
pub use token::TokenSource;
