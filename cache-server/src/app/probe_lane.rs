//! The probe lane: connections over a limit get one short answer, 429, or that of a probe.
//!
//! The lane is small, and a connection stays in it for a second at most, or two with the handshake of TLS. So
//! a load balancer can see that a server lives while all of its connections are in use.

use super::{
    App,
    accept::{PeerStream, Wire},
    stream::{BoundedStream, Flow},
};
use crate::{
    http,
    tenancy::connections::{Connection, Refusal},
};
use axum::body::Body;
use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::{Request, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::{convert::Infallible, sync::Arc, time::Duration};
use tokio::{
    io::AsyncWriteExt as _,
    time::{Instant, timeout},
};
use tower::ServiceExt as _;

/// How long a connection stays in the lane.
pub(super) const STAY_MAX: Duration = Duration::from_secs(1);
/// The longest head of a request in the lane.
const HEAD_BYTES_MAX: usize = 4 << 10;
/// hyper's smallest buffer.
const BUFFER_BYTES: usize = 8 << 10;

impl App {
    /// Answers the first request of a newcomer that is not served.
    pub(super) async fn answer_probe(self: Arc<Self>, wire: Wire, connection: Arc<Connection>, why: Refusal) {
        let until = Instant::now() + STAY_MAX;
        // Without memory of its own: the lane is small.
        if let Some(stream) = self.secure(wire, &connection, until).await {
            self.answer_one(stream, Bytes::new(), connection, why).await;
        }
    }

    /// Answers the first request of a connection that is not served. `prefix` was read of it before.
    pub(super) async fn answer_one(
        self: Arc<Self>,
        stream: PeerStream,
        prefix: Bytes,
        connection: Arc<Connection>,
        why: Refusal,
    ) {
        let flow = Arc::new(Flow::default());
        let stream = BoundedStream::new(stream, prefix, Arc::clone(&connection), flow, STAY_MAX);
        let answer = |request: Request<Incoming>| {
            let app = Arc::clone(&self);
            async move {
                if http::is_probe(request.uri().path()) {
                    // Probes have no body.
                    let request = request.map(|_| Body::empty());
                    return app.router.clone().oneshot(request).await;
                }
                Ok::<_, Infallible>((app.refused)(why, &app.server.limits))
            }
        };
        let hyper = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(STAY_MAX)
            .keep_alive(false)
            .max_buf_size(BUFFER_BYTES)
            .max_header_size(HEAD_BYTES_MAX)
            .serve_connection(TokioIo::new(stream), service_fn(answer));
        tokio::select! {
            ended = timeout(STAY_MAX, hyper) => {
                if let Ok(Err(e)) = ended {
                    let source = connection.source();
                    tracing::debug!(error = %e, %source, "a connection in the probe lane sent no request");
                }
            }
            () = connection.closed() => {}
            () = self.abort.cancelled() => {}
        }
    }

    /// Answers 429 to a head that got no memory, whose rest is not read.
    pub(super) async fn refuse_head(&self, mut stream: PeerStream) {
        let (head, body) = (self.refused)(Refusal::Memory, &self.server.limits).into_parts();
        // The answer is always complete.
        let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        let mut text = format!("HTTP/1.1 {}\r\ncontent-length: {}\r\n", head.status, body.len());
        for (name, value) in &head.headers {
            text += &format!("{name}: {}\r\n", value.to_str().unwrap_or_default());
        }
        text += "\r\n";
        let send = async {
            stream.write_all(text.as_bytes()).await?;
            stream.write_all(&body).await?;
            stream.shutdown().await
        };
        if !matches!(timeout(STAY_MAX, send).await, Ok(Ok(()))) {
            tracing::debug!("a client did not take its 429");
        }
    }
}
