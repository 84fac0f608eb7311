//! What belongs to one request: its id, its span in the log, and its waits.
//!
//! The client may give the id in the header `X-Request-Id`; otherwise the server draws one. The reply has it,
//! and so has each request to another server that this one causes.

use super::is_probe;
use crate::{auth::Principal, connections::Connection, server::Server};
use axum::{
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue},
};
use fletch_api::headers;
use fletch_bounds::{Gate, RecordWait as _, RequestId, Waits};
use std::{sync::Arc, time::Instant};
use tracing::{Span, info_span};

/// One request.
pub struct RequestContext {
    pub started: Instant,
    pub id: RequestId,
    pub waits: Arc<Waits>,
}

impl RequestContext {
    /// Creates the context of a request that arrived now.
    pub fn of(server: &Server, request: &Request) -> Self {
        let given = request.headers().get(headers::REQUEST_ID).and_then(|id| id.to_str().ok());
        let id = given.and_then(RequestId::new).unwrap_or_else(|| RequestId::of_number(rand::random()));
        let waits = server.read_watch.waits_of(id.clone());
        if let Some(connection) = request.extensions().get::<Arc<Connection>>() {
            let waited = connection.take_memory_wait();
            if !waited.is_zero() {
                waits.record_wait(Gate::RequestMemory, waited);
            }
        }
        RequestContext { started: Instant::now(), id, waits }
    }

    /// Returns the span of a request that was authenticated, in which its log lines are written.
    pub fn span(&self, request: &Request, route: &str) -> Span {
        if is_probe(request.uri().path()) {
            return Span::none();
        }
        let tenant = request.extensions().get::<Principal>().map(|principal| &principal.tenant);
        let job = text(request.headers(), headers::JOB);
        match tenant {
            Some(tenant) => info_span!("request", id = %self.id, %tenant, job, route),
            None => info_span!("request", id = %self.id, job, route),
        }
    }

    /// Returns the header of the reply.
    pub fn header(&self) -> Option<(HeaderName, HeaderValue)> {
        // An id consists of characters that a header may have.
        let value = HeaderValue::from_str(self.id.as_str()).ok()?;
        Some((HeaderName::from_static(headers::REQUEST_ID), value))
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}
