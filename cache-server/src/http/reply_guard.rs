//! Ends a reply when the token of its request is revoked.
//!
//! A handler can wait for seconds, and a slow client can take days for a long file. Only the first look at
//! the token would let it read until then.
//!
//! 1. (I7) After other tokens came into force, each wait and each slice of a reply looks the token up again.
//!    The reply goes on only for the same principal.

use super::{
    admission::{authenticate, peer_of},
    error::{ApiError, ApiResult},
    hits::credentials_of,
    response_body::{BodyError, SLICE_BYTES_MAX},
};
use crate::{
    app::server::Server,
    tenancy::auth::{Principal, Unauthenticated},
};
use axum::{
    body::{Body, HttpBody as _},
    extract::Request,
    http::header,
    response::Response,
};
use futures::StreamExt as _;
use std::sync::Arc;

/// The media type of a stream of events.
const EVENTS: &str = "text/event-stream";

/// The caller of a request, as the server knew it when the request arrived.
pub struct ReplyGuard {
    server: Arc<Server>,
    principal: Principal,
    /// Looks the caller up again by its credentials.
    caller: Caller,
    /// The number of the tokens in force when the token was last looked up.
    tokens: u64,
}

/// Returns whom the credentials of a request stand for now; `None` after they were revoked.
type Caller = Box<dyn Fn(&Server) -> Option<Principal> + Send>;

impl ReplyGuard {
    /// Returns the guard of an authenticated request; `None` for one without a token. `tokens` is the number
    /// of the tokens that were in force before the server looked the token up.
    pub fn of_token(server: &Arc<Server>, request: &Request, tokens: u64) -> Option<Self> {
        let principal = request.extensions().get::<Principal>().filter(|_| server.auth.needs_token())?;
        let (credentials, peer) = (credentials_of(request.headers()), peer_of(request.extensions()));
        let caller = move |server: &Server| authenticate(server, &credentials, peer).ok();
        Some(ReplyGuard::new(server, principal.clone(), tokens, caller))
    }

    /// Returns the guard of a request of `principal`, whose credentials `caller` looks up again.
    pub fn new(
        server: &Arc<Server>,
        principal: Principal,
        tokens: u64,
        caller: impl Fn(&Server) -> Option<Principal> + Send + 'static,
    ) -> Self {
        ReplyGuard { server: Arc::clone(server), principal, caller: Box::new(caller), tokens }
    }

    fn check(&mut self) -> ApiResult<()> {
        let tokens = self.server.auth.tokens_number();
        if std::mem::replace(&mut self.tokens, tokens) == tokens {
            return Ok(());
        }
        match (self.caller)(&self.server) {
            Some(principal) if principal == self.principal => Ok(()),
            _ => Err(ApiError::from(Unauthenticated)),
        }
    }

    /// Returns a reply that ends when its token is revoked; an error if it was revoked meanwhile.
    ///
    /// # Errors
    /// [`fletch_api::Code::Unauthorized`].
    pub fn guard(mut self, mut reply: Response) -> ApiResult {
        self.check()?;
        let length = reply.body().size_hint();
        let is_slice = matches!(length.upper(), Some(bytes) if bytes <= SLICE_BYTES_MAX as u64);
        // A stream of events looks the token up itself, and tells the page that it ends.
        if is_slice || matches!(reply.headers().get(header::CONTENT_TYPE), Some(t) if t == EVENTS) {
            return Ok(reply);
        }
        if let Some(bytes) = length.exact() {
            reply.headers_mut().insert(header::CONTENT_LENGTH, bytes.into());
        }
        Ok(reply.map(|body| {
            Body::from_stream(body.into_data_stream().map(move |slice| {
                self.check().map_err(|_| BodyError::from("the token of the request was revoked"))?;
                slice.map_err(BodyError::from)
            }))
        }))
    }
}
