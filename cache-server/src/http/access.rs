//! The access check (I7): the one way from a principal and a root to bytes.
//!
//! Every request that names a root calls [`access`], which looks only at the registrations of the principal's
//! own domain. So a root of another domain, an absent root and the root of an unregistered dataset look the
//! same: in the reply, in what the server reads for it, and in how long it takes.

use super::{
    admission::{authenticate, named_dataset, peer_of},
    error::ApiResult,
    request::{OnePath, parse_param},
};
use crate::{
    app::server::{Phase, Server},
    data::versions::{Reader, Source, Sources},
    tenancy::auth::Principal,
};
use axum::{
    extract::{Path, Query, State, rejection::QueryRejection},
    http::{Extensions, HeaderMap, StatusCode},
};
use fletch_api::Problem;
use fletch_core::{DatasetName, Root};
use serde::Deserialize;
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, timeout_at};

/// The longest time for which the server holds a reply back.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Returns the sources of a root, if a dataset of the principal's domain has it and its tenant's quota allows
/// it. `dataset` is the one that the reader named.
///
/// The access ends when the dataset is unregistered: check [`Sources::is_registered`] before each later read.
///
/// # Errors
/// [`fletch_api::Code::NotFound`] and [`fletch_api::Code::QuotaExceeded`]; those of the origin.
pub async fn access(
    server: &Server,
    principal: &Principal,
    root: Root,
    dataset: Option<&DatasetName>,
) -> ApiResult<Arc<Sources>> {
    let reader = Reader { domain: &principal.domain, tenant: &principal.tenant, dataset };
    let sources = server.versions.sources(reader, root).await?;
    within_quota(server, &sources.first).await?;
    Ok(sources)
}

/// Charges a version's size to the tenant that registered its dataset, if no version as large was charged
/// before.
///
/// # Errors
/// [`fletch_api::Code::QuotaExceeded`] for a version over the quota. Versions served before stay served.
pub async fn within_quota(server: &Server, source: &Source) -> ApiResult<()> {
    let (handle, bytes) = (Arc::clone(&source.registered), source.version.manifest().bytes);
    if bytes <= handle.bytes() {
        return Ok(());
    }
    let quota = server.auth.quota(&handle.tenant).registered;
    Ok(server.catalog.record_size(handle, bytes, quota).await?)
}

/// Query of [`get`].
#[derive(Debug, Deserialize)]
pub struct AccessQuery {
    #[serde(default)]
    wait_ms: u64,
}

/// Checks that the caller may read a version.
///
/// The reply is 204 while the caller may. With `wait_ms`, the server holds the 204 back for that
/// time and replies at once when access ends. So a client that keeps one request waiting learns of a revoked
/// token or an unregistered dataset within a moment.
#[utoipa::path(
    get, path = "/v1/versions/{root}/access", tag = "bytes",
    params(
        ("root" = String, Path, description = "Root of the version, 64 hex digits"),
        ("wait_ms" = Option<u64>, Query,
            description = "How long to hold the 204 back, in milliseconds. At most 10,000"),
        ("Fletch-Dataset" = Option<String>, Header,
            description = "The dataset through which the client reads"),
    ),
    responses(
        (status = 204, description = "The caller may read the version"),
        (status = 401, description = "The token is not known, or no longer known", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The domain has no dataset with this version, or no longer has one",
            body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn get(
    State(server): State<Arc<Server>>,
    path: OnePath,
    query: Result<Query<AccessQuery>, QueryRejection>,
    extensions: Extensions,
    request: HeaderMap,
) -> ApiResult<StatusCode> {
    let peer = peer_of(&extensions);
    let (Path(root), Query(query)) = (path?, query?);
    let root: Root = parse_param(&root)?;
    let dataset = named_dataset(&request)?;
    let wait = Duration::from_millis(query.wait_ms).min(WAIT_MAX).min(server.limits.io_timeout);
    let until = Instant::now() + wait;
    // Subscribe before the first check, so that no change between the two is missed.
    let mut changes = server.access_changes.subscribe();
    loop {
        let principal = authenticate(&server, &request, peer)?;
        access(&server, &principal, root, dataset.as_ref()).await?;
        let draining = server.phase() == Phase::Draining;
        if draining || timeout_at(until, changes.changed()).await.is_err() {
            return Ok(StatusCode::NO_CONTENT);
        }
    }
}
