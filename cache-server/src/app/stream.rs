//! A stream that bounds how fast a head grows, and how slowly a client takes a reply.

use crate::{app::limits::SEND_BYTES_MIN, tenancy::connections::Connection};
use bytes::Bytes;
use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf, Take},
    time::{Instant, Sleep, sleep},
};

/// The most bytes of a head that are read at once. hyper's buffer grows only if a read fills it.
const HEAD_READ_MAX: u64 = 4 << 10;
/// The most bytes of a body that are read at once.
const BODY_READ_MAX: u64 = 64 << 10;

/// What the owner of a connection knows of its stream.
#[derive(Debug, Default)]
pub(super) struct Flow {
    /// Bytes that arrived since the last request was answered or began.
    head: AtomicU64,
    /// Whether the client keeps a reply waiting.
    waiting: AtomicBool,
    /// Whether a long head got no memory.
    pub no_memory: AtomicBool,
    /// Whether the client took a reply too slowly.
    pub slow: AtomicBool,
    /// Whether the client sent its end.
    pub ended: AtomicBool,
}

impl Flow {
    /// Whether no byte waits in either direction.
    pub fn is_quiet(&self) -> bool {
        self.head.load(Relaxed) == 0 && !self.waiting.load(Relaxed) && !self.ended.load(Relaxed)
    }

    /// Notes that a head ended, or that the next one may begin.
    pub fn begin(&self) {
        self.head.store(0, Relaxed);
    }
}

/// The stream of a connection.
pub(super) struct BoundedStream<S> {
    stream: Take<S>,
    /// Bytes that were read before.
    prefix: Bytes,
    connection: Arc<Connection>,
    flow: Arc<Flow>,
    timeout: Duration,
    /// Ends the time in which the client must take [`SEND_BYTES_MIN`], armed while a reply waits.
    stalled: Pin<Box<Sleep>>,
    armed: bool,
    taken: u64,
}

impl<S: AsyncRead> BoundedStream<S> {
    pub fn new(
        stream: S,
        prefix: Bytes,
        connection: Arc<Connection>,
        flow: Arc<Flow>,
        timeout: Duration,
    ) -> Self {
        BoundedStream {
            stream: stream.take(0),
            prefix,
            connection,
            flow,
            timeout,
            stalled: Box::pin(sleep(timeout)),
            armed: false,
            taken: 0,
        }
    }

    /// Returns the inner stream, and the bytes that were read before and not used.
    pub fn into_parts(self) -> (S, Bytes) {
        (self.stream.into_inner(), self.prefix)
    }

    fn arm(&mut self, armed: bool) {
        self.armed = armed;
        self.taken = 0;
        self.flow.waiting.store(armed, Relaxed);
    }

    /// Returns the result of a write, or an error if the client takes bytes too slowly.
    fn check_pace(
        &mut self,
        cx: &mut Context<'_>,
        wrote: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if let Poll::Ready(wrote) = wrote {
            self.taken += *wrote.as_ref().unwrap_or(&0) as u64;
            if self.armed && self.taken >= SEND_BYTES_MIN {
                self.arm(false);
            }
            return Poll::Ready(wrote);
        }
        if !self.armed {
            self.arm(true);
            self.stalled.as_mut().reset(Instant::now() + self.timeout);
        }
        if self.stalled.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.flow.slow.store(true, Relaxed);
        let what = format!("the client took {} bytes in limits.send_timeout", self.taken);
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, what)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for BoundedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let begun = this.prefix.len().min(buf.remaining());
        if begun > 0 {
            buf.put_slice(&this.prefix.split_to(begun));
            this.flow.head.fetch_add(begun as u64, Relaxed);
            if buf.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
        }
        let in_head = !this.connection.is_busy();
        this.stream.set_limit(if in_head { HEAD_READ_MAX } else { BODY_READ_MAX });
        let before = buf.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buf);
        if let Poll::Ready(Ok(())) = read {
            let n = (buf.filled().len() - before) as u64;
            if n == 0 {
                this.flow.ended.store(true, Relaxed);
            } else if in_head {
                let head = this.flow.head.fetch_add(n, Relaxed) + n;
                if let Err(e) = this.connection.grow_head(head) {
                    this.flow.no_memory.store(true, Relaxed);
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::OutOfMemory, e)));
                }
            }
        }
        if begun > 0 && read.is_pending() { Poll::Ready(Ok(())) } else { read }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for BoundedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(self.stream.get_mut()).poll_write(cx, buf);
        self.check_pace(cx, wrote)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(self.stream.get_mut()).poll_write_vectored(cx, bufs);
        self.check_pace(cx, wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.get_ref().is_write_vectored()
    }

    /// hyper flushes when it has written everything. TLS then still has bytes that wait for the client.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(self.stream.get_mut()).poll_flush(cx);
        if flushed.is_pending() {
            return self.check_pace(cx, Poll::Pending).map_ok(|_| ());
        }
        if self.armed {
            self.arm(false);
        }
        flushed
    }

    /// TLS sends its end, which may wait for the client.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ended = Pin::new(self.stream.get_mut()).poll_shutdown(cx);
        if ended.is_pending() {
            return self.check_pace(cx, Poll::Pending).map_ok(|_| ());
        }
        ended
    }
}
