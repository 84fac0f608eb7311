//! What this server says of itself, so that an operator can compare the servers of a cluster.

use super::{admission::forbidden, error::ApiResult};
use crate::{
    admin::overview::disk_info,
    app::{config::short_hash, server::Server},
    cluster::PEER_PROTOCOL,
    tenancy::auth::Principal,
};
use axum::{Json, extract::State};
use fletch_api::{
    Problem,
    cluster::{MemberCheck, PeerCheck},
};
use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The longest wait for the other servers.
const PEERS_WITHIN: Duration = Duration::from_secs(3);

/// Describes this server as a member of its cluster: for `fletch cluster check`.
///
/// Settings are compared by short hashes. The server asks each other member for a sign of life, with its peer
/// token.
#[utoipa::path(
    get, path = "/v1/cluster/check", tag = "server",
    responses(
        (status = 200, description = "The server as a member", body = MemberCheck),
        (status = 403, description = "The caller is no admin", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn check(State(server): State<Arc<Server>>, principal: Principal) -> ApiResult<Json<MemberCheck>> {
    if !principal.role.may_see_all_tenants() {
        return Err(forbidden(&server, principal.role));
    }
    let cluster = &server.cluster;
    let mut settings = server.shared_settings.clone();
    let tokens = server.auth.fingerprint();
    settings.insert("tokens".to_owned(), tokens.map_or_else(|| "none".to_owned(), |hash| short_hash(&hash)));
    let peers = cluster.check_peers(PEERS_WITHIN.min(server.limits.io_timeout)).await;
    let mut problems = cluster.peers().map(|peers| peers.refusals().lasting()).unwrap_or_default();
    for follower in [server.catalog.follower(), server.groups.follower()].into_iter().flatten() {
        if let Some((lasts, why)) = follower.problem() {
            let (of, seconds) = (follower.of(), lasts.as_secs());
            problems.push(format!("it has not followed the cluster's {of} for {seconds} s: {why}"));
        }
    }
    // After the wait for the others: the caller compares it with the time at which the answer comes.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(Json(MemberCheck {
        id: cluster.own_id().to_string(),
        build: env!("CARGO_PKG_VERSION").to_owned(),
        peer_protocol: PEER_PROTOCOL,
        view: cluster.view_number(),
        revision: server.catalog.revision(),
        now_ns: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
        etcd_up: cluster.stats().is_coordinator_up,
        not_ready: cluster.not_ready().map(|why| format!("{}: {}", why.what, why.failure)),
        disk: disk_info(&server, &principal).map(|disk| disk.state.to_string()),
        settings,
        peers: peers.into_iter().map(|(id, problem)| PeerCheck { id: id.to_string(), problem }).collect(),
        problems,
    }))
}
