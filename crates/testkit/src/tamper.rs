//! A proxy between a client and an HTTP/1.1 server that changes what passes: the lying wire.

use crate::rules::Rules;
use crate::serve::{Body, Server, broken, requests};
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

/// Where a [`TamperProxy`] sends what it receives.
#[derive(Debug, Clone)]
pub enum Upstream {
    /// A loopback port.
    Tcp(SocketAddr),
    /// A unix socket.
    Unix(PathBuf),
}

/// What is done to the body of a response. Offsets count its bytes from 0, headers not included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tamper {
    /// Flips one bit of the byte at `byte`. A body that ends before it passes unchanged.
    FlipBit {
        /// Which byte.
        byte: u64,
        /// Which bit, 0 to 7.
        bit: u8,
    },
    /// Closes the connection after so many bytes.
    Cut {
        /// Bytes that still pass.
        after: u64,
    },
    /// Keeps the connection open after so many bytes and sends nothing more.
    Stall {
        /// Bytes that still pass.
        after: u64,
    },
}

/// The proxy, on a loopback port and with threads of its own. Dropping it stops it.
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
    /// A proxy that, until told otherwise, passes everything unchanged.
    ///
    /// # Panics
    /// When it gets no port or threads.
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
            // One connection upstream for each of ours, made when the first request comes.
            let upstream = Arc::new(Mutex::new(None));
            requests(
                stream,
                Arc::new(move |request| answer(Arc::clone(&shared), Arc::clone(&upstream), request)),
            )
        });
        TamperProxy { server, shared }
    }

    /// Where clients connect.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.server.address)
    }

    /// Tampers from now on with responses to requests whose path and query contain `part`,
    /// `times` times (for ever where `None`).
    pub fn set(&self, part: &str, tamper: Tamper, times: Option<u32>) {
        self.shared.rules.add(part, tamper, times);
    }

    /// From now on everything passes unchanged.
    pub fn clear(&self) {
        self.shared.rules.clear();
    }

    /// Responses that were passed on, changed or not.
    #[must_use]
    pub fn responses(&self) -> u64 {
        self.shared.responses.load(Relaxed)
    }

    /// Responses that were really changed, cut or stalled.
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
        // Ends with its socket, at the latest when this proxy's runtime does.
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

/// How a body ends before its time.
#[derive(Clone, Copy)]
enum End {
    Cut,
    Stall,
}

struct Passing {
    body: BodyStream<Incoming>,
    tampers: Vec<Tamper>,
    shared: Arc<Shared>,
    /// Bytes of the body so far.
    at: u64,
    /// What happens instead of the next frame.
    end: Option<End>,
}

fn tampered(body: Incoming, tampers: Vec<Tamper>, shared: Arc<Shared>) -> Body {
    if tampers.is_empty() {
        return body.map_err(io::Error::other).boxed_unsync();
    }
    let passing = Passing { body: BodyStream::new(body), tampers, shared, at: 0, end: None };
    let frames = futures::stream::unfold(passing, |mut passing| async move {
        let frame = passing.next().await?;
        Some((frame, passing))
    });
    StreamBody::new(frames).boxed_unsync()
}

impl Passing {
    async fn next(&mut self) -> Option<io::Result<Frame<Bytes>>> {
        match self.end {
            Some(End::Cut) => return Some(Err(broken("cut").await)),
            Some(End::Stall) => std::future::pending().await,
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
                Tamper::Cut { after } => (*after, End::Cut),
                Tamper::Stall { after } => (*after, End::Stall),
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
