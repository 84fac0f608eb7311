//! Credentials of the S3 door, derived from the caller's token.

use super::{
    error::{ApiError, ApiResult},
    request::read_json,
};
use crate::{
    app::server::Server,
    tenancy::auth::{AccessId, Principal},
};
use axum::{
    Json,
    body::Body,
    extract::State,
    http::{HeaderMap, HeaderValue, header},
};
use fletch_api::{
    Code, Problem,
    s3::{GetS3Credentials, S3Credentials, S3Door, TTL_DEFAULT_S, TTL_MAX_S, TTL_MIN_S},
};
use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

/// What stands for credentials on a server without tokens, whose S3 door checks no signature.
const ANY: &str = "anonymous";

/// Returns where the S3 door is; `None` if it is off.
pub fn door(server: &Server) -> Option<S3Door> {
    let door = server.s3.as_ref()?;
    Some(S3Door { listen: door.listen.to_string(), tls: server.tls.is_some(), bucket: door.bucket.clone() })
}

/// Derives credentials for the S3 door from the caller's token.
///
/// The server stores nothing. The credentials read what the token may read, and change nothing. They end at
/// their time, when the token is removed, and when the key of the server changes.
#[utoipa::path(
    post, path = "/v1/s3/credentials", tag = "server", request_body = GetS3Credentials,
    responses(
        (status = 200, description = "The credentials", body = S3Credentials),
        (status = 400, description = "The life is too short or too long", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The server has no S3 door", body = Problem,
            content_type = "application/problem+json"),
        (status = 409, description = "The hash of another token begins like that of this one", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn post(
    State(server): State<Arc<Server>>,
    principal: Principal,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Json<S3Credentials>> {
    let Some(door) = door(&server) else {
        let hint = "set s3.listen in the server's settings, such as \"127.0.0.1:7381\"";
        return Err(ApiError::new(Code::NotFound, "this server has no S3 door", hint));
    };
    let asked: GetS3Credentials = read_json(&server, &principal.tenant, body).await?;
    let ttl_s = asked.ttl_s.unwrap_or(TTL_DEFAULT_S);
    if !(TTL_MIN_S..=TTL_MAX_S).contains(&ttl_s) {
        let detail = format!("ttl_s is {ttl_s}; it must be within {TTL_MIN_S} and {TTL_MAX_S}");
        return Err(ApiError::new(Code::BadRequest, detail, "ask for 1 minute to 90 days"));
    }
    let Some(keys) = server.s3.as_ref().and_then(|door| door.keys.as_ref()) else {
        let (access_key_id, secret_access_key) = (ANY.to_owned(), ANY.to_owned());
        return Ok(Json(S3Credentials { access_key_id, secret_access_key, expires_ns: None, door }));
    };
    let token = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    let (prefix, _) = server.auth.token_prefix(token)?;
    if server.auth.of_prefix(prefix).is_none() {
        let detail = "the hash of another token of this server begins like that of this token";
        return Err(ApiError::new(Code::Conflict, detail, "ask the administrator for a new token"));
    }
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let id = AccessId { prefix, ends_s: now_s.saturating_add(ttl_s) };
    let access_key_id = id.to_string();
    let secret_access_key = keys.secret(&access_key_id).as_str().to_owned();
    tracing::info!(id = %access_key_id, tenant = %principal.tenant, "credentials of the S3 door were given");
    let expires_ns = Some(id.ends_s.saturating_mul(1_000_000_000));
    Ok(Json(S3Credentials { access_key_id, secret_access_key, expires_ns, door }))
}
