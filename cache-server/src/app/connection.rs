//! Serves one HTTP/1.1 connection.
//!
//! ```text
//! waiting: no buffer ──first byte──▶ takes memory ─▶ hyper: head, body, reply, …
//!    ▲                                                  │
//!    └────────── idle for a second: buffers are freed ──┘
//! ```
//! A hit connection (`hit_thread`) begins as such a connection, too.
//! The handshake of TLS comes before (`handshake`). An idle TLS connection keeps its session, about 10 KiB.
//! Bounds: the time until its first request is authenticated, and until each later head is complete
//! (`limits.head_timeout`); the time between requests (`limits.idle_timeout`); how slowly a reply is taken
//! (`limits.send_timeout`); the memory of its head.

use super::{
    App,
    accept::{PeerStream, Wire},
    local_stream::LocalStream,
    stream::{BoundedStream, Flow},
};
use crate::{
    http::HitSession,
    tenancy::{
        auth::Peer,
        connections::{Closed, Connection},
    },
};
use axum::{Router, body::Body, extract::Request, response::Response};
use bytes::Bytes;
use futures::future::BoxFuture;
use http_body::{Frame, SizeHint};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::{
    convert::Infallible,
    future::poll_fn,
    io,
    pin::Pin,
    sync::{Arc, OnceLock, atomic::Ordering::Relaxed},
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::AsyncReadExt as _,
    time::{Instant, interval, timeout_at},
};
use tokio_util::either::Either;
use tower::ServiceExt as _;

/// The bytes that hyper buffers of a reply, or of a body that arrives.
const BUFFER_BYTES_MAX: usize = 128 << 10;
/// The most header lines of a request.
const HEADERS_MAX: usize = 128;
/// A connection that waits for a request for this long frees its buffers.
const REST_AFTER: Duration = Duration::from_secs(1);

/// Waits for the first byte of a request, and returns it. Returns no byte at the end of the stream.
///
/// A socket can be reported as readable without a byte, so only reading tells.
async fn first_byte(stream: &mut PeerStream) -> io::Result<Bytes> {
    loop {
        let mut byte = [0];
        let read = match stream {
            Either::Left(Wire::Left(tcp)) => {
                tcp.readable().await?;
                tcp.try_read(&mut byte)
            }
            Either::Left(Wire::Right(unix)) => {
                unix.readable().await?;
                unix.try_read(&mut byte)
            }
            Either::Right(tls) => tls.read(&mut byte).await,
        };
        match read {
            Ok(n) => return Ok(Bytes::copy_from_slice(&byte[..n])),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
    }
}

impl App {
    /// Serves a connection until it ends, or the server closes, drains or cuts it.
    ///
    /// Each of its requests has the peer among its extensions.
    pub(super) async fn serve(self: Arc<Self>, wire: Wire, peer: Peer, connection: Arc<Connection>) {
        let limits = &self.server.limits;
        let first_until = Instant::now() + limits.first_request_timeout();
        let Some(mut stream) = self.open(wire, &connection, first_until).await else { return };
        let mut prefix = Bytes::new();
        loop {
            if prefix.is_empty() {
                let proven = connection.is_proven();
                let until = if proven { Instant::now() + limits.idle_timeout } else { first_until };
                let arrived = tokio::select! {
                    () = connection.closed() => return,
                    () = self.drain.cancelled() => return,
                    arrived = timeout_at(until, first_byte(&mut stream)) => arrived,
                };
                match arrived {
                    Ok(Ok(byte)) if !byte.is_empty() => prefix = byte,
                    Ok(_) => return,
                    Err(_) => {
                        return connection.count_closed(if proven {
                            Closed::Idle
                        } else {
                            Closed::NotProven
                        });
                    }
                }
            }
            if let Err(why) = connection.take_memory().await {
                connection.divert();
                return self.answer_one(stream, prefix, connection, why).await;
            }
            // Boxed, so that a waiting connection has no room for hyper's state.
            let went_on = Box::pin(self.converse((stream, prefix), peer, &connection, first_until)).await;
            connection.give_memory_back();
            match went_on {
                GoesOn::No => return,
                GoesOn::WithHttp(rest) => (stream, prefix) = rest,
                GoesOn::WithHits(stream, session) => {
                    return self.serve_hits(stream, session, &connection).await;
                }
            }
        }
    }

    /// Serves requests until the connection ends, rests, or speaks another protocol.
    async fn converse(
        self: &Arc<Self>,
        (stream, prefix): (PeerStream, Bytes),
        peer: Peer,
        connection: &Arc<Connection>,
        first_until: Instant,
    ) -> GoesOn {
        let limits = &self.server.limits;
        let flow = Arc::new(Flow::default());
        let accepted = Arc::new(OnceLock::new());
        let stream = BoundedStream::new(
            stream,
            prefix,
            Arc::clone(connection),
            Arc::clone(&flow),
            limits.send_timeout,
        );
        let service = {
            let (router, connection, flow) = (self.router.clone(), Arc::clone(connection), Arc::clone(&flow));
            let accepted = Arc::clone(&accepted);
            service_fn(move |request| answer(&router, &connection, (&flow, &accepted), peer, request))
        };
        let mut hyper = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.first_request_timeout())
            .max_buf_size(BUFFER_BYTES_MAX)
            .max_header_size(limits.head_bytes_max())
            .max_headers(HEADERS_MAX)
            .serve_connection(TokioIo::new(stream), service);
        let mut ticks = interval(REST_AFTER / 2);
        let (mut rests, mut drains) = (false, false);
        let ended = loop {
            let next = poll_fn(|cx| {
                // Without a shutdown, so that the stream can be used further.
                if rests { hyper.poll_without_shutdown(cx) } else { Pin::new(&mut hyper).poll(cx) }
            });
            tokio::select! {
                ended = next => break ended,
                () = connection.closed() => return GoesOn::No,
                () = self.abort.cancelled() => return GoesOn::No,
                () = tokio::time::sleep_until(first_until), if !connection.is_proven() => {
                    if !connection.is_proven() {
                        connection.count_closed(Closed::NotProven);
                        return GoesOn::No;
                    }
                }
                () = self.drain.cancelled(), if !drains => {
                    drains = true;
                    Pin::new(&mut hyper).graceful_shutdown();
                }
                _ = ticks.tick(), if !rests && !drains => {
                    if connection.idle_for().is_some_and(|time| time >= REST_AFTER) && flow.is_quiet() {
                        rests = true;
                        Pin::new(&mut hyper).graceful_shutdown();
                    }
                }
            }
        };
        if let Err(e) = &ended {
            tracing::debug!(error = %e, source = %connection.source(), "a connection ended with an error");
            if e.is_timeout() {
                connection.count_closed(if connection.is_proven() {
                    Closed::Idle
                } else {
                    Closed::NotProven
                });
            }
        }
        if flow.slow.load(Relaxed) {
            connection.count_closed(Closed::SlowReader);
        }
        let parts = hyper.into_parts();
        let (stream, unread) = parts.io.into_inner().into_parts();
        if flow.no_memory.load(Relaxed) {
            self.refuse_head(stream).await;
            return GoesOn::No;
        }
        if ended.is_err() || flow.ended.load(Relaxed) {
            return GoesOn::No;
        }
        let unread = if parts.read_buf.is_empty() { unread } else { parts.read_buf };
        match (accepted.get(), stream) {
            // Its client sends nothing before it has the reply.
            (Some(session), Either::Left(Wire::Right(unix))) if unread.is_empty() => {
                GoesOn::WithHits(unix, Arc::clone(session))
            }
            (None, stream) if rests => GoesOn::WithHttp((stream, unread)),
            _ => GoesOn::No,
        }
    }
}

/// How a connection goes on after some requests.
enum GoesOn {
    /// It ends.
    No,
    /// It rests, with what was read of the next request.
    WithHttp((PeerStream, Bytes)),
    /// It is a hit connection from here on.
    WithHits(LocalStream, Arc<HitSession>),
}

/// The session of a hit connection, once a reply accepted it.
type Accepted = OnceLock<Arc<HitSession>>;

/// Answers a request, and notes while it runs.
fn answer(
    router: &Router,
    connection: &Arc<Connection>,
    (flow, accepted): (&Arc<Flow>, &Arc<Accepted>),
    peer: Peer,
    request: Request<Incoming>,
) -> BoxFuture<'static, Result<Response<ReplyBody>, Infallible>> {
    connection.set_busy(true);
    connection.head_was_parsed();
    flow.begin();
    let running = RunningRequest { connection: Arc::clone(connection), flow: Arc::clone(flow) };
    let mut request = request.map(Body::new);
    request.extensions_mut().insert(Arc::clone(connection));
    request.extensions_mut().insert(peer);
    let (router, accepted) = (router.clone(), Arc::clone(accepted));
    Box::pin(async move {
        let response = router.oneshot(request).await?;
        if let Some(session) = response.extensions().get::<Arc<HitSession>>() {
            accepted.get_or_init(|| Arc::clone(session));
        }
        Ok(response.map(|body| ReplyBody { body, _running: running }))
    })
}

/// Notes the end of a request when it is dropped.
struct RunningRequest {
    connection: Arc<Connection>,
    flow: Arc<Flow>,
}

impl Drop for RunningRequest {
    fn drop(&mut self) {
        self.flow.begin();
        self.connection.set_busy(false);
    }
}

/// The body of a reply, which hyper drops when it was sent.
struct ReplyBody {
    body: Body,
    _running: RunningRequest,
}

impl http_body::Body for ReplyBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
