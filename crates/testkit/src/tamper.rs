//! A proxy between a client and an HTTP/1.1 server that changes what passes: the lying wire.

use crate::rules::Rules;
use crate::serve::{Body, Server, requests};
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
            requests(stream, Arc::new(move |request| answer(Arc::clone(&shared), Arc::clone(&upstream), request)))
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

async fn answer(shared: Arc<Shared>, connection: Connection, request: Request<Incoming>) -> Option<Response<Body>> {
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
            let body = Full::new(Bytes::from(format!("proxy: {why}"))).map_err(|e| match e {}).boxed();
            let mut response = Response::new(body);
            *response.status_mut() = StatusCode::BAD_GATEWAY;
            Some(response)
        }
    }
}

async fn forward(shared: &Shared, connection: &Connection, request: Request<Incoming>) -> io::Result<Response<Incoming>> {
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

fn tampered(body: Incoming, tampers: Vec<Tamper>, shared: Arc<Shared>) -> Body {
    if tampers.is_empty() {
        return body.map_err(io::Error::other).boxed();
    }
    let state = (BodyStream::new(body), tampers, shared, 0u64, false);
    let frames = futures::stream::unfold(state, |(mut body, tampers, shared, at, ended)| async move {
        if ended {
            return None;
        }
        let bytes = match body.next().await? {
            Err(error) => return Some((Err(io::Error::other(error)), (body, tampers, shared, at, true))),
            Ok(frame) => match frame.into_data() {
                Ok(bytes) => bytes,
                Err(trailers) => return Some((Ok(trailers), (body, tampers, shared, at, false))),
            },
        };
        let end = at + bytes.len() as u64;
        let mut out = bytes.to_vec();
        for tamper in &tampers {
            match tamper {
                Tamper::FlipBit { byte, bit } if (at..end).contains(byte) => {
                    out[(byte - at) as usize] ^= 1 << (bit % 8);
                    shared.tampered.fetch_add(1, Relaxed);
                }
                Tamper::FlipBit { .. } => {}
                Tamper::Cut { after } | Tamper::Stall { after } if end > *after => {
                    let stall = matches!(tamper, Tamper::Stall { .. });
                    out.truncate(after.saturating_sub(at) as usize);
                    shared.tampered.fetch_add(1, Relaxed);
                    if out.is_empty() && stall {
                        std::future::pending::<()>().await;
                    }
                    if out.is_empty() {
                        return Some((Err(io::Error::other("cut")), (body, tampers, shared, at, true)));
                    }
                    // What still passes goes out; the next turn starts at the limit and stops there.
                    shared.tampered.fetch_sub(1, Relaxed);
                    let next = at + out.len() as u64;
                    return Some((Ok(Frame::data(Bytes::from(out))), (body, tampers, shared, next, false)));
                }
                Tamper::Cut { .. } | Tamper::Stall { .. } => {}
            }
        }
        Some((Ok(Frame::data(Bytes::from(out))), (body, tampers, shared, end, false)))
    });
    // The frames are not `Sync`; a boxed body has to be.
    StreamBody::new(SyncStream::new(frames)).boxed()
}
