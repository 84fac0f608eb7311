//! Credentials that the user of this server hands to it, and whose it has.
//!
//! No error of a request repeats a part of its body, except the name of a key.

use super::{
    error::{ApiError, ApiResult},
    request::read_body,
};
use crate::{
    app::server::Server,
    tenancy::{
        auth::{Peer, Principal},
        credentials::NotYours,
    },
};
use axum::{Json, body::Body, extract::State};
use fletch_api::{
    Code, CredentialsList, GivenCredentials, OriginOptions, Problem, Secrets, credentials::BODY_BYTES_MAX,
};
use fletch_origin::{Credentials, GiveError, Given, OriginConfig, OriginError};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

impl From<NotYours> for ApiError {
    fn from(e: NotYours) -> Self {
        ApiError::new(Code::Forbidden, e.to_string(), e.hint())
    }
}

impl From<GiveError> for ApiError {
    fn from(e: GiveError) -> Self {
        let (code, hint) = match &e {
            GiveError::Configured(_) => (
                Code::Conflict,
                "put the credentials into that [[origin]], or remove the table and restart the server",
            ),
            GiveError::OtherStore { .. } => (
                Code::StoreDiffers,
                "hand them over for the URI with the store's name; or stop the server, which forgets them",
            ),
            GiveError::TooMany(_) => (Code::Overloaded, "restart the server, which forgets all credentials"),
            GiveError::Invalid(_) => (Code::BadRequest, "correct the key that the error names"),
        };
        ApiError::new(code, e.to_string(), hint)
    }
}

/// Gives the server credentials of one origin, in place of older ones.
///
/// Open datasets use them at once. The server keeps them in memory only and forgets them when it stops. Only
/// the user that runs the server and root may hand over credentials, on the unix socket of a server without a
/// TCP listener and without tokens.
#[utoipa::path(
    put, path = "/v1/origins/credentials", tag = "server", request_body = fletch_api::GiveCredentials,
    responses(
        (status = 200, description = "The credentials are in use", body = GivenCredentials),
        (status = 400, description = "A key of the request is not valid", body = Problem,
            content_type = "application/problem+json"),
        (status = 403, description = "The server is not the caller's own", body = Problem,
            content_type = "application/problem+json"),
        (status = 409, description = "The settings name the origin, or its bucket is at another store",
            body = Problem, content_type = "application/problem+json"),
        (status = 429, description = "The server holds credentials of too many origins", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn give(
    State(server): State<Arc<Server>>,
    principal: Principal,
    peer: Peer,
    body: Body,
) -> ApiResult<Json<GivenCredentials>> {
    server.credentials.check(peer)?;
    let hint = "send the credentials of one origin";
    let received = read_body(&server, &principal.tenant, body, BODY_BYTES_MAX, hint).await?;
    let asked = Asked::read(&received.bytes).map_err(|why| {
        ApiError::new(Code::BadRequest, why, "correct the key that the error names; see /v1/openapi.json")
    })?;
    drop(received);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let times = (u64::try_from(now.as_nanos()).unwrap_or(u64::MAX), asked.expires_ns);
    let given = asked.given().map_err(GiveError::from)?;
    let shown = server.credentials.give(&server.origins, given, times)?;
    tracing::info!(
        origin = %shown.origin, identity = %shown.identity, expires_ns = shown.expires_ns,
        "a user handed over credentials"
    );
    Ok(Json(shown))
}

/// Returns whose credentials the server holds, and until when they are valid. No secret is shown.
///
/// For those who may hand them over.
#[utoipa::path(
    get, path = "/v1/origins/credentials", tag = "server",
    responses(
        (status = 200, description = "The credentials, by the order of origins", body = CredentialsList),
        (status = 403, description = "The server is not the caller's own", body = Problem,
            content_type = "application/problem+json"),
    )
)]
pub async fn list(State(server): State<Arc<Server>>, peer: Peer) -> ApiResult<Json<CredentialsList>> {
    server.credentials.check(peer)?;
    Ok(Json(CredentialsList { credentials: server.credentials.list() }))
}

/// The body of [`give`], read key by key.
#[derive(Debug)]
pub(crate) struct Asked {
    origin: String,
    options: OriginOptions,
    secrets: Secrets,
    expires_ns: Option<u64>,
}

impl Asked {
    /// Reads the body. The error names the wrong key and repeats no value.
    pub(crate) fn read(body: &[u8]) -> Result<Self, String> {
        let body: Value = serde_json::from_slice(body)
            .map_err(|e| format!("the body is not valid JSON (line {}, column {})", e.line(), e.column()))?;
        let Value::Object(mut body) = body else { return Err("the body is not a JSON object".to_owned()) };
        let origin = take(&mut body, "", "origin", "a text")?.ok_or("origin: is missing")?;
        let expires_ns = take::<Option<u64>>(&mut body, "", "expires_ns", "nanoseconds since 1970, or null")?;
        let secrets = match take::<Map<String, Value>>(&mut body, "", "secrets", "an object of texts")? {
            None => Secrets::default(),
            Some(mut secrets) => {
                let keys: Vec<String> = secrets.keys().cloned().collect();
                let mut read = Secrets::default();
                for key in keys {
                    if let Some(value) = take(&mut secrets, "secrets.", &key, "a text")? {
                        read.0.insert(key, value);
                    }
                }
                read
            }
        };
        let mut options = OriginOptions::default();
        if let Some(mut given) = take::<Map<String, Value>>(&mut body, "", "options", "an object")? {
            let at = "options.";
            options.endpoint = take(&mut given, at, "endpoint", "a text")?;
            options.region = take(&mut given, at, "region", "a text")?;
            options.virtual_hosted = take(&mut given, at, "virtual_hosted", "true or false")?;
            options.request_payer = take(&mut given, at, "request_payer", "true or false")?.unwrap_or(false);
            options.ca_certificates = take(&mut given, at, "ca_certificates", "a text")?;
            options.account = take(&mut given, at, "account", "a text")?;
            options.credentials = take(&mut given, at, "credentials", "a text")?;
            options.proxy = take(&mut given, at, "proxy", "a text")?;
            options.allow_http = take(&mut given, at, "allow_http", "true or false")?.unwrap_or(false);
            options.allow_link_local =
                take(&mut given, at, "allow_link_local", "true or false")?.unwrap_or(false);
            none_left(&given, at)?;
        }
        none_left(&body, "")?;
        Ok(Asked { origin, options, secrets, expires_ns: expires_ns.flatten() })
    }

    pub(crate) fn given(self) -> Result<Given, OriginError> {
        let OriginOptions {
            endpoint,
            region,
            virtual_hosted,
            request_payer,
            ca_certificates,
            account,
            credentials,
            allow_http,
            allow_link_local,
            proxy,
        } = self.options;
        let credentials = match credentials.as_deref() {
            None => None,
            Some("env") => Some(Credentials::Env),
            Some("chain") => Some(Credentials::Chain),
            Some("anonymous") => Some(Credentials::Anonymous),
            Some(_) => {
                let what = "options.credentials".to_owned();
                return Err(OriginError::Invalid { what, why: "write env, chain or anonymous".to_owned() });
            }
        };
        let config = OriginConfig {
            prefix: self.origin,
            endpoint,
            region,
            virtual_hosted,
            request_payer,
            ca_certificates,
            account,
            credentials,
            allow_http,
            allow_link_local,
            proxy,
            ..OriginConfig::default()
        };
        let expires = self.expires_ns.and_then(|ns| UNIX_EPOCH.checked_add(Duration::from_nanos(ns)));
        Given::new(config, self.secrets.0, expires)
    }
}

/// Takes a value out of an object. `None` if it is absent; `null` is absent for what cannot be null.
fn take<T: DeserializeOwned>(
    from: &mut Map<String, Value>,
    at: &str,
    key: &str,
    what: &str,
) -> Result<Option<T>, String> {
    match from.remove(key) {
        None => Ok(None),
        // The text of the error would repeat the value.
        Some(value) => match serde_json::from_value(value) {
            Ok(value) => Ok(Some(value)),
            Err(_) => Err(format!("{at}{}: must be {what}", named(key))),
        },
    }
}

fn none_left(rest: &Map<String, Value>, at: &str) -> Result<(), String> {
    match rest.keys().next() {
        None => Ok(()),
        Some(key) => Err(format!("{at}{}: there is no such key", named(key))),
    }
}

/// Returns the name of a key, without what a log or a terminal should not see.
fn named(key: &str) -> String {
    key.chars().take(100).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_key_and_repeat_no_value() {
        for (body, begins) in [
            ("hunter2", "the body is not valid JSON"),
            ("\"hunter2\"", "the body is not a JSON object"),
            ("{}", "origin: is missing"),
            (r#"{"origin": 7}"#, "origin: must be a text"),
            (r#"{"origin": "s3://bkt", "secrets": "hunter2"}"#, "secrets: must be an object"),
            (r#"{"origin": "s3://bkt", "secrets": {"token": ["hunter2"]}}"#, "secrets.token: must be a text"),
            (r#"{"origin": "s3://bkt", "expires_ns": "hunter2"}"#, "expires_ns: must be nano"),
            (
                r#"{"origin": "s3://bkt", "options": {"allow_http": "hunter2"}}"#,
                "options.allow_http: must be",
            ),
            (r#"{"origin": "s3://bkt", "options": {"regoin": "hunter2"}}"#, "options.regoin: there is no"),
            (r#"{"origin": "s3://bkt", "secret": "hunter2"}"#, "secret: there is no such key"),
        ] {
            let error = Asked::read(body.as_bytes()).expect_err(body);
            assert!(error.starts_with(begins) && !error.contains("hunter2"), "{body}: {error}");
        }
        let body = br#"{"origin": "s3://bkt", "options": {"credentials": "hunter2"}}"#;
        let error = Asked::read(body).expect("readable").given().expect_err("no source").to_string();
        assert!(error.starts_with("options.credentials: ") && !error.contains("hunter2"), "{error}");
    }

    #[test]
    fn a_right_body_is_read_whole() {
        let body =
            br#"{"origin": "s3://bkt", "expires_ns": null, "options": {"region": "eu", "allow_http": true},
            "secrets": {"aws_access_key_id": "AKIAIOSFODNN7EXAMPLE", "aws_secret_access_key": "hunter2"}}"#;
        let asked = Asked::read(body).expect("readable");
        assert!(!format!("{asked:?}").contains("hunter2"));
        assert_eq!((asked.options.region.as_deref(), asked.expires_ns), (Some("eu"), None));
        let styles =
            br#"{"origin": "s3://bkt", "options": {"virtual_hosted": false, "request_payer": true}}"#;
        let styles = Asked::read(styles).expect("readable").given().expect("right");
        assert_eq!((styles.config().virtual_hosted, styles.config().request_payer), (Some(false), true));
        assert_eq!(asked.given().expect("right").identity(), "AKIA…MPLE");
    }
}
