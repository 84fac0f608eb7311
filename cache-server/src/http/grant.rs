//! The one way from a principal and a root to bytes (I7).
//!
//! Every request that names a root comes through [`grant`]. It looks only at what is registered in
//! the principal's own domain, so a root of another domain, one that exists nowhere and one whose
//! dataset was unregistered are not told apart here, and cannot be told apart by the answer, by
//! what is read for it, or by the time that takes.

use super::problem::Answer;
use crate::{auth::Principal, server::Server, versions::Sources};
use fletch_core::Root;
use std::sync::Arc;

/// The ways to a root's bytes, for a principal to whose domain a dataset with it is registered.
/// They hold as long as they [`Sources::stand`].
pub async fn grant(server: &Server, who: &Principal, root: Root) -> Answer<Arc<Sources>> {
    Ok(server.versions.sources(&who.domain, root).await?)
}
