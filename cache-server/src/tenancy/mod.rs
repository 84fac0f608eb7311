//! Who may do how much, and what was done for whom.
//!
//! ```text
//! a connection ─▶ connections (how many, how much memory) ─▶ auth (which principal)
//!   └▶ tenants (permits and memory) ─▶ … ─▶ accounting (bytes delivered, read and avoided)
//! ```
//! - `auth` knows tokens and roles. `credentials` holds the secrets for origins that a user handed over.
//! - `connections` bounds connections, and the memory of requests that arrive.
//! - `tenants` divides requests, memory and calls to origins among tenants.
//! - `accounting` counts bytes for jobs and datasets. `mounts` knows the mounts that announced themselves.
//! - `state` keeps registered datasets in the state directory.

pub mod accounting;
pub mod auth;
pub mod connections;
pub mod credentials;
pub mod mounts;
pub mod state;
pub mod tenants;
