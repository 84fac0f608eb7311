//! The one way from a principal and a root to bytes (I7).
//!
//! Every request that names a root comes through [`grant`]. It looks only at what is registered in
//! the principal's own domain, so a root of another domain, one that exists nowhere and one whose
//! dataset was unregistered are not told apart here, and cannot be told apart by the answer, by
//! what is read for it, or by the time that takes.

use super::{
    admit::who,
    datasets::blocking,
    parsed,
    problem::{Answer, Fault},
};
use crate::{
    auth::Principal,
    server::{Phase, Server},
    versions::{Source, Sources},
};
use axum::{
    extract::{
        Path, Query, State,
        rejection::{PathRejection, QueryRejection},
    },
    http::{HeaderMap, StatusCode},
};
use fletch_api::Problem;
use fletch_core::Root;
use serde::Deserialize;
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, timeout_at};

/// The longest an answer is held back.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// The ways to a root's bytes, for a principal to whose domain a dataset with it is registered.
/// They hold as long as they [`Sources::stand`].
pub async fn grant(server: &Server, who: &Principal, root: Root) -> Answer<Arc<Sources>> {
    let sources = server.versions.sources(&who.domain, root).await?;
    within_quota(server, &sources.first).await?;
    Ok(sources)
}

/// Charges a version to the tenant that registered its dataset, unless one as large was before. A version
/// over the quota is not served; those that were served before it still are.
pub async fn within_quota(server: &Server, source: &Source) -> Answer<()> {
    let (of, bytes) = (Arc::clone(&source.registered), source.version.manifest().bytes);
    if bytes <= of.bytes() {
        return Ok(());
    }
    let quota = server.auth.quota(&of.tenant).registered;
    let registrations = Arc::clone(&server.registrations);
    Ok(blocking(move || registrations.grow(&of, bytes, quota)).await??)
}

/// How long to hold the answer back.
#[derive(Debug, Deserialize)]
pub struct Patience {
    #[serde(default)]
    wait_ms: u64,
}

/// Whether a version is granted. While it is, the answer is held back for as long as was asked:
/// whoever keeps asking knows within a moment that a grant ended, for few requests.
#[utoipa::path(
    get, path = "/v1/versions/{root}/access", tag = "bytes",
    params(
        ("root" = String, Path, description = "Root of the version, 64 hex digits"),
        ("wait_ms" = Option<u64>, Query, description = "Milliseconds to hold the answer back while the version stays granted, at most 10,000"),
    ),
    responses(
        (status = 204, description = "It is granted"),
        (status = 401, description = "The token is not known any more", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "Not a version of this domain, or not any more", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn get(
    State(server): State<Arc<Server>>,
    path: Result<Path<String>, PathRejection>,
    patience: Result<Query<Patience>, QueryRejection>,
    request: HeaderMap,
) -> Answer<StatusCode> {
    let Path(root) = path.map_err(|e| Fault::bad(e.body_text()))?;
    let Query(patience) = patience.map_err(|e| Fault::bad(e.body_text()))?;
    let root: Root = parsed(&root)?;
    let wait = Duration::from_millis(patience.wait_ms).min(WAIT_MAX).min(server.limits.io_timeout);
    let until = Instant::now() + wait;
    // Before the first look, so that nothing happens unseen between the two.
    let mut changes = server.changes.subscribe();
    loop {
        grant(&server, &who(&server, &request)?, root).await?;
        let over = server.phase() == Phase::Draining;
        if over || timeout_at(until, changes.changed()).await.is_err() {
            return Ok(StatusCode::NO_CONTENT);
        }
    }
}
