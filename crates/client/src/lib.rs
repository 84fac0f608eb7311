//! The HTTP client of a Fletch server: sends requests, waits, retries, and checks the answers.
//!
//! Owns connections (HTTP/1.1 keep-alive over TCP or a unix socket), deadlines, retries, and the translation
//! of answers into [`ClientError`]. Knows no FUSE. Reads an origin only with the feature `fallback`, and only
//! while the server does not answer. [`hits`] is apart from all this: there a thread waits itself.
//!
//! Invariants
//! 1. A call ends within its deadline, whatever the server does.
//! 2. After 429 the client waits, as long as `Retry-After` says, and never goes to another source.
//! 3. Every body has a length limit before its first byte is read.
//! 4. A token file is read again after a 401, at most once a call. No token is ever logged.
//! 5. The server's `code` and `hint` reach the caller unchanged.
//! 6. Until the server has answered once, a refused connection to this machine ends a call at once, and so
//!    does a fault of TLS.
//! 7. Changed files of TLS are used within about a second; broken ones change nothing.
//! 8. With one server that is alone, every call is the requests to that server and no others. With several, a
//!    server that does not answer ends no call while another one does (`route.rs`).
//! 9. An answer for a job counts only by the highest term that was heard of. One to a lease request or an ack
//!    counts only while its server is surely the job's primary (`term.rs`).

#![warn(missing_docs)]

mod admin;
mod backoff;
mod batch;
mod body;
mod call;
mod client;
mod config;
mod endpoint;
pub mod epochs;
mod error;
#[cfg(feature = "fallback")]
pub mod fallback;
pub mod hits;
mod route;
#[cfg(feature = "selection")]
pub mod selection;
mod server;
pub mod server_choice;
mod tables;
mod term;
mod tls;
mod token;

pub use admin::CheckedMember;
pub use batch::{Batch, BatchPiece, PlacedItem};
pub use client::{Client, ClientStats};
pub use config::{ClientConfig, FirstAnswer};
pub use endpoint::{BadEndpoint, Endpoint, Servers};
pub use error::ClientError;
pub use tls::{HttpClient, Settings, TlsFault, TlsOptions};
pub use token::TokenSource;
