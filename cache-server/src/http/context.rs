//! What belongs to one request: its id, its span in the log, and its waits.
//!
//! The client may give the id in the header `X-Request-Id`; otherwise the server draws one. The reply has it,
//! and so has each request to another server that this one causes.

use crate::{
    app::server::Server,
    tenancy::{auth::Principal, connections::Connection},
};
use axum::{
    extract::{MatchedPath, Request},
    http::{HeaderName, HeaderValue},
};
use fletch_api::headers;
use fletch_bounds::{Gate, RecordWait as _, RequestId, Waits};
use std::{sync::Arc, time::Instant};
use tracing::{field, info_span};

pub struct RequestContext {
    pub started: Instant,
    id: RequestId,
}

impl RequestContext {
    /// Creates the context of a request that arrived now.
    pub fn of(request: &Request) -> Self {
        let given = request.headers().get(headers::REQUEST_ID).and_then(|id| id.to_str().ok());
        let id = given.and_then(RequestId::new).unwrap_or_else(|| RequestId::of_number(rand::random()));
        RequestContext { started: Instant::now(), id }
    }

    /// Returns the id of the request.
    pub fn id(&self) -> &RequestId {
        &self.id
    }

    /// Creates the waits of a request that was authenticated.
    pub fn waits(&self, server: &Server, request: &Request) -> Arc<Waits> {
        let extensions = request.extensions();
        let route = extensions.get::<MatchedPath>().cloned();
        let tenant = extensions.get::<Principal>().map(|principal| principal.tenant.clone());
        let job = request.headers().get(headers::JOB).cloned();
        let id = self.id.clone();
        let make = move || {
            let span = info_span!(
                "request", %id, tenant = field::Empty, job = field::Empty, route = field::Empty
            );
            if let Some(route) = &route {
                span.record("route", route.as_str());
            }
            if let Some(tenant) = &tenant {
                span.record("tenant", field::display(tenant));
            }
            if let Some(Ok(job)) = job.as_ref().map(HeaderValue::to_str) {
                span.record("job", job);
            }
            span
        };
        let waits = server.read_watch.waits_of(self.id.clone(), Box::new(make));
        if let Some(connection) = extensions.get::<Arc<Connection>>() {
            let waited = connection.take_memory_wait();
            if !waited.is_zero() {
                waits.record_wait(Gate::RequestMemory, waited);
            }
        }
        waits
    }

    /// Returns the header of the reply.
    pub fn header(&self) -> Option<(HeaderName, HeaderValue)> {
        // An id consists of characters that a header may have.
        let value = HeaderValue::try_from(self.id.to_string()).ok()?;
        Some((HeaderName::from_static(headers::REQUEST_ID), value))
    }
}
