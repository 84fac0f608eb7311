//! A request as the emulator reads it: which bucket, which key, which query.

use super::manners::{HostStyle, Manners};
use super::pages::Asked;
use http::header::HOST;
use http::{Method, Request};
use percent_encoding::percent_decode_str;
use std::collections::HashMap;

/// A request's method, bucket, key and query.
pub(super) struct S3Request {
    pub method: Method,
    pub bucket: String,
    /// `None` if the request names only the bucket.
    pub key: Option<String>,
    query: HashMap<String, String>,
}

impl S3Request {
    /// Parses a request to a store whose bucket is `bucket`.
    pub fn parse<B>(request: &Request<B>, bucket: &str, manners: &Manners) -> Self {
        let text = |s: &str| percent_decode_str(s).decode_utf8_lossy().into_owned();
        let path = request.uri().path();
        let host = request.headers().get(HOST).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let in_host = host.strip_prefix(bucket).is_some_and(|rest| rest.starts_with('.'));
        let (named, key) = match manners.host {
            HostStyle::Either | HostStyle::VirtualOnly if in_host => {
                (bucket, Some(path.strip_prefix('/').unwrap_or(path)))
            }
            HostStyle::VirtualOnly => ("", None),
            HostStyle::Either | HostStyle::PathOnly => {
                let path = path.trim_start_matches('/');
                path.split_once('/').map_or((path, None), |(bucket, key)| (bucket, Some(key)))
            }
        };
        let query = url::form_urlencoded::parse(request.uri().query().unwrap_or_default().as_bytes());
        S3Request {
            method: request.method().clone(),
            bucket: text(named),
            key: key.map(text).filter(|key| !key.is_empty()),
            query: query.into_owned().collect(),
        }
    }

    /// Returns the value of a query key; empty if there is none.
    pub fn query(&self, key: &str) -> &str {
        self.query.get(key).map(String::as_str).unwrap_or_default()
    }

    /// Whether the query has a key.
    pub fn has(&self, key: &str) -> bool {
        self.query.contains_key(key)
    }

    /// Returns what a listing is asked for; `None` if `max-keys` is no number.
    pub fn listing(&self) -> Option<Asked> {
        let value = |key: &str| self.query.get(key).cloned();
        Some(Asked {
            prefix: self.query("prefix").to_owned(),
            is_delimited: self.query("delimiter") == "/",
            max_keys: value("max-keys").map_or(Some(1000), |n| n.parse().ok())?.min(1000),
            version_2: self.query("list-type") == "2",
            token: value("continuation-token"),
            start_after: value("start-after"),
            marker: value("marker"),
            encoded: self.query("encoding-type") == "url",
        })
    }
}
