//! A proxy between a client and an HTTP/1.1 server that changes, cuts off or stalls responses.

use crate::rules::Rules;
use crate::serve::{Body, Server, cut_off, requests};
use bytes::Bytes;
use futures::StreamExt as _;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, BodyStream, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Mutex;

/// The server to which a [`TamperProxy`] sends requests.
#[derive(Debug, Clone)]
pub enum Upstream {
    /// A loopback port.
    Tcp(SocketAddr),
    /// A unix socket.
    Unix(PathBuf),
}

/// A change of a response's body. Offsets count the body's bytes from 0, without headers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tamper {
    /// Flips one bit of the byte at `byte`. A shorter body passes unchanged.
    FlipBit {
        /// The byte's offset.
        byte: u64,
        /// The bit, 0 to 7.
        bit: u8,
    },
    /// Closes the connection after `after` bytes.
    Cut {
        /// The number of bytes that pass.
        after: u64,
    },
    /// Sends nothing after `after` bytes, and keeps the connection open.
    Stall {
        /// The number of bytes that pass.
        after: u64,
    },
}

/// A proxy on a loopback port, with its own threads. Dropping it stops it.
pub struct TamperProxy {
    server: Server,
    shared: Arc<Shared>,
}

struct Shared {
    upstream: Upstream,
    rules: Rules<Tamper>,
    responses: AtomicU64,
    tampered: AtomicU64,
}

impl TamperProxy {
    /// Starts a proxy that passes every response unchanged until [`Self::set`] is called.
    ///
    /// # Panics
    /// If it gets no port or no threads.
    #[must_use]
    pub fn start(upstream: Upstream) -> Self {
        let shared = Arc::new(Shared {
            upstream,
            rules: Rules::new(),
            responses: AtomicU64::new(0),
            tampered: AtomicU64::new(0),
        });
        let serving = Arc::clone(&shared);
        let server = Server::start(move |stream| {
            let shared = Arc::clone(&serving);
            // Each client connection has its own upstream connection, which the first request opens.
            let upstream = Arc::new(Mutex::new(None));
            requests(
                stream,
                Arc::new(move |request| answer(Arc::clone(&shared), Arc::clone(&upstream), request)),
            )
        });
        TamperProxy { server, shared }
    }

    /// Returns the address to which clients connect.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// Returns `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.server.address)
    }

    /// Changes the responses to the next `times` requests (to all if `None`) whose target contains `part`.
    ///
    /// The target is the path with the query.
    pub fn set(&self, part: &str, tamper: Tamper, times: Option<u32>) {
        self.shared.rules.add(part, tamper, times);
    }

    /// Removes all changes: every response passes unchanged.
    pub fn clear(&self) {
        self.shared.rules.clear();
    }

    /// Returns the number of responses that passed, changed or unchanged.
    #[must_use]
    pub fn responses(&self) -> u64 {
        self.shared.responses.load(Relaxed)
    }

    /// Returns the number of responses that were changed, cut off or stalled.
    #[must_use]
    pub fn tampered(&self) -> u64 {
        self.shared.tampered.load(Relaxed)
    }
}

type Connection = Arc<Mutex<Option<SendRequest<Incoming>>>>;

async fn answer(
    shared: Arc<Shared>,
    connection: Connection,
    request: Request<Incoming>,
) -> Option<Response<Body>> {
    let target = request.uri().to_string();
    match forward(&shared, &connection, request).await {
        Ok(response) => {
            shared.responses.fetch_add(1, Relaxed);
            Some(response.map(|body| {
                let tampers = shared.rules.take(|part, _| target.contains(part));
                tampered(body, tampers, Arc::clone(&shared))
            }))
        }
        Err(why) => {
            let body = Full::new(Bytes::from(format!("proxy: {why}"))).map_err(|e| match e {}).boxed_unsync();
            let mut response = Response::new(body);
            *response.status_mut() = StatusCode::BAD_GATEWAY;
            Some(response)
        }
    }
}

async fn forward(
    shared: &Shared,
    connection: &Connection,
    request: Request<Incoming>,
) -> io::Result<Response<Incoming>> {
    let mut slot = connection.lock().await;
    let mut sender = match slot.take() {
        Some(sender) if !sender.is_closed() => sender,
        _ => connect(&shared.upstream).await?,
    };
    sender.ready().await.map_err(io::Error::other)?;
    let response = sender.send_request(request).await.map_err(io::Error::other)?;
    *slot = Some(sender);
    Ok(response)
}

async fn connect(upstream: &Upstream) -> io::Result<SendRequest<Incoming>> {
    async fn shake<S>(stream: S) -> io::Result<SendRequest<Incoming>>
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        // It ends with its socket, or with the proxy's runtime.
        tokio::runtime::Handle::current().spawn(connection);
        Ok(sender)
    }
    match upstream {
        Upstream::Tcp(address) => {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            shake(stream).await
        }
        Upstream::Unix(path) => shake(UnixStream::connect(path).await?).await,
    }
}

/// The way in which a body ends early.
#[derive(Clone, Copy)]
enum EarlyEnd {
    Cut,
    Stall,
}

struct TamperedBody {
    body: BodyStream<Incoming>,
    tampers: Vec<Tamper>,
    shared: Arc<Shared>,
    /// The number of bytes of the body so far.
    at: u64,
    /// The end that comes in place of the next frame.
    end: Option<EarlyEnd>,
}

fn tampered(body: Incoming, tampers: Vec<Tamper>, shared: Arc<Shared>) -> Body {
    if tampers.is_empty() {
        return body.map_err(io::Error::other).boxed_unsync();
    }
    let passing = TamperedBody { body: BodyStream::new(body), tampers, shared, at: 0, end: None };
    let frames = futures::stream::unfold(passing, |mut passing| async move {
        let frame = passing.next().await?;
        Some((frame, passing))
    });
    StreamBody::new(frames).boxed_unsync()
}

impl TamperedBody {
    async fn next(&mut self) -> Option<io::Result<Frame<Bytes>>> {
        match self.end {
            Some(EarlyEnd::Cut) => return Some(Err(cut_off("cut").await)),
            Some(EarlyEnd::Stall) => std::future::pending().await,
            None => {}
        }
        let bytes = match self.body.next().await?.map(Frame::into_data) {
            Err(error) => return Some(Err(io::Error::other(error))),
            Ok(Err(trailers)) => return Some(Ok(trailers)),
            Ok(Ok(bytes)) => bytes,
        };
        let mut out = bytes.to_vec();
        for tamper in &self.tampers {
            let (after, end) = match tamper {
                Tamper::FlipBit { byte, bit } => {
                    let hit = byte.checked_sub(self.at).and_then(|i| out.get_mut(i as usize));
                    if let Some(hit) = hit {
                        *hit ^= 1 << (bit % 8);
                        self.shared.tampered.fetch_add(1, Relaxed);
                    }
                    continue;
                }
                Tamper::Cut { after } => (*after, EarlyEnd::Cut),
                Tamper::Stall { after } => (*after, EarlyEnd::Stall),
            };
            if self.end.is_none() && self.at + out.len() as u64 > after {
                out.truncate(after.saturating_sub(self.at) as usize);
                self.end = Some(end);
                self.shared.tampered.fetch_add(1, Relaxed);
            }
        }
        self.at += out.len() as u64;
        Some(Ok(Frame::data(Bytes::from(out))))
    }
}

#[cfg(test)]
mod tests;
