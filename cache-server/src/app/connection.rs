//! Serves one HTTP/1.1 connection. Bounds how long the client may be silent, and how long it may take no
//! bytes.

use super::App;
use crate::auth::Peer;
use hyper::{Request, body::Incoming, server::conn::http1};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use std::{
    io,
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::OwnedSemaphorePermit,
    time::{Instant, Sleep, sleep},
};
use tower::ServiceExt as _;

/// The bytes of a request's head that hyper buffers.
///
/// Up to this size a header over `limits.header_bytes` gets a problem as its reply; over it hyper sends a
/// 431.
const HEAD_BYTES_MAX: usize = 128 << 10;
/// The most header lines of a request.
const HEADERS_MAX: usize = 128;

impl App {
    /// Serves a connection until it ends, or the server drains or cuts it.
    ///
    /// Each of its requests has the peer among its extensions.
    pub(super) async fn serve<S>(self: Arc<Self>, stream: S, peer: Peer, permit: OwnedSemaphorePermit)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        self.server.connections.fetch_add(1, Relaxed);
        let limits = &self.server.limits;
        let io = TokioIo::new(SendTimeout::new(stream, limits.send_timeout));
        let with_peer = move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(peer);
            request
        };
        let service = TowerToHyperService::new(self.router.clone().map_request(with_peer));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.idle_timeout)
            .max_buf_size(HEAD_BYTES_MAX)
            .max_headers(HEADERS_MAX)
            .serve_connection(io, service);
        tokio::pin!(connection);
        let ended = tokio::select! {
            ended = &mut connection => Some(ended),
            () = self.drain.cancelled() => {
                connection.as_mut().graceful_shutdown();
                tokio::select! {
                    ended = &mut connection => Some(ended),
                    () = self.abort.cancelled() => None,
                }
            }
        };
        if let Some(Err(e)) = ended {
            tracing::debug!(error = %e, "a connection ended with an error");
        }
        self.server.connections.fetch_sub(1, Relaxed);
        drop(permit);
    }
}

/// A stream that fails if the client takes no bytes for `timeout`.
///
/// A reply holds buffers that other requests wait for.
struct SendTimeout<S> {
    stream: S,
    timeout: Duration,
    /// The timer, armed while a write is pending.
    stalled: Pin<Box<Sleep>>,
    armed: bool,
}

impl<S> SendTimeout<S> {
    fn new(stream: S, timeout: Duration) -> Self {
        SendTimeout { stream, timeout, stalled: Box::pin(sleep(timeout)), armed: false }
    }

    /// Returns the result of a write, or an error if writes have been pending for too long.
    fn check_stall<T>(&mut self, cx: &mut Context<'_>, wrote: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if wrote.is_ready() {
            self.armed = false;
            return wrote;
        }
        if !self.armed {
            self.armed = true;
            self.stalled.as_mut().reset(Instant::now() + self.timeout);
        }
        ready!(self.stalled.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client took no bytes for limits.send_timeout",
        )))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for SendTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for SendTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.check_stall(cx, wrote)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.check_stall(cx, wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.check_stall(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.check_stall(cx, shut)
    }
}
