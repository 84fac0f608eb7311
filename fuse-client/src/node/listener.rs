//! The owner's socket, and what comes in by it: HTTP with bounds on everything.
//!
//! I6: at most [`CONNECTIONS_MAX`] connections are open; more are closed at once, so that no guest waits for another to go. A
//! guest that takes no bytes for [`WRITE_TIMEOUT_MAX`] (a quarter of any read's time, if that is less), or sends none for
//! longer than any answer takes, is dropped. A request has no body, and its head
//! is bounded by the HTTP library.

use super::clients::NodeClient;
use super::directory::{StoreDirectory, socket_path};
use super::node_store::{Declined, NodeStore};
use crate::fs::read::FetchRequest;
use axum::{
    Json, Router,
    body::Body,
    extract::{
        Path, Query, State,
        rejection::{PathRejection, QueryRejection},
    },
    http::{HeaderMap, header},
    response::{IntoResponse, Response},
    routing::get,
    serve::Listener,
};
use bytes::Bytes;
use fletch_api::{
    Code, Problem, headers,
    node::{CHUNK, FILE, MountedVersion, NodeState, STATE},
};
use fletch_core::{Hash, JobName, Root};
use futures::stream;
use std::{
    convert::Infallible,
    fs::{self, File},
    io,
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        net::UnixListener as StdListener,
    },
    pin::Pin,
    str::FromStr,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::sleep,
};
use tokio_io_timeout::TimeoutStream;
use tokio_util::sync::CancellationToken;

/// Connections of guests at once.
pub const CONNECTIONS_MAX: usize = 256;
/// How long a guest may take no bytes of an answer.
const WRITE_TIMEOUT_MAX: Duration = Duration::from_secs(30);
/// How much longer than an answer takes a connection may be silent: guests give theirs up before.
const IDLE_SLACK: Duration = Duration::from_secs(120);
/// How long accepting rests when the system has no more descriptors.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(100);
/// The most bytes handed to a connection at once, and counted then.
const SLICE_BYTES: usize = 256 << 10;

/// A bound socket, removed when dropped. Only who has the store's lock may bind it.
#[derive(Debug)]
pub struct Socket {
    dir: File,
    id: (u64, u64),
    listener: StdListener,
}

impl Socket {
    /// Binds it, over whatever a former owner left.
    ///
    /// # Errors
    /// What the system says.
    pub fn bind(directory: &StoreDirectory) -> io::Result<Self> {
        let dir = directory.open()?;
        let path = socket_path(&dir);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let listener = StdListener::bind(&path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(Socket { id: directory.socket_id()?, dir, listener })
    }

    /// Whether it lies where guests look for it. A directory that cannot be looked at now may be again.
    #[must_use]
    pub fn is_in_place(&self, directory: &StoreDirectory) -> bool {
        match directory.socket_id() {
            Ok(id) => id == self.id,
            Err(e) => !matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
        }
    }

    /// Serves guests until `stop`.
    ///
    /// # Errors
    /// What the system says.
    pub async fn serve(&self, node_store: Arc<NodeStore>, stop: CancellationToken) -> io::Result<()> {
        let listener = NodeListener {
            listener: UnixListener::from_std(self.listener.try_clone()?)?,
            connections: node_store.connections(),
            read_timeout: node_store.deadline() + IDLE_SLACK,
            write_timeout: WRITE_TIMEOUT_MAX.min(node_store.deadline() / 4),
        };
        axum::serve(listener, router(node_store)).with_graceful_shutdown(stop.cancelled_owned()).await
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let path = socket_path(&self.dir);
        // While ours is open, no other socket has its number.
        let ours = fs::symlink_metadata(&path).is_ok_and(|m| (m.dev(), m.ino()) == self.id);
        if !ours {
            tracing::debug!("the node's socket was gone already");
        } else if let Err(error) = fs::remove_file(&path) {
            tracing::debug!(%error, "the node's socket cannot be removed");
        }
    }
}

struct NodeListener {
    listener: UnixListener,
    connections: Arc<Semaphore>,
    read_timeout: Duration,
    write_timeout: Duration,
}

impl Listener for NodeListener {
    type Io = ClientConnection;
    type Addr = ();

    async fn accept(&mut self) -> (ClientConnection, ()) {
        loop {
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "accepting a guest failed");
                    sleep(ACCEPT_RETRY_PAUSE).await;
                    continue;
                }
            };
            let Ok(permit) = Arc::clone(&self.connections).try_acquire_owned() else {
                tracing::debug!("too many connections: a guest is sent to the server");
                continue;
            };
            let mut stream = TimeoutStream::new(stream);
            stream.set_read_timeout(Some(self.read_timeout));
            stream.set_write_timeout(Some(self.write_timeout));
            return (ClientConnection { stream: Box::pin(stream), _permit: permit }, ());
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A guest's connection and its directory.
struct ClientConnection {
    stream: Pin<Box<TimeoutStream<UnixStream>>>,
    _permit: OwnedSemaphorePermit,
}

impl AsyncRead for ClientConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_read(cx, buf)
    }
}

impl AsyncWrite for ClientConnection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.stream.as_mut().poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream.as_mut().poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_shutdown(cx)
    }
}

fn router(node_store: Arc<NodeStore>) -> Router {
    Router::new()
        .route(CHUNK, get(chunk))
        .route(FILE, get(file))
        .route(STATE, get(state))
        .with_state(node_store)
}

impl IntoResponse for Declined {
    fn into_response(self) -> Response {
        let problem = Problem::new(Code::NotFound, self.0, "ask the server");
        let head = [(header::CONTENT_TYPE, headers::PROBLEM)];
        (axum::http::StatusCode::NOT_FOUND, head, Json(problem)).into_response()
    }
}

type PathParts<T> = Result<Path<T>, PathRejection>;

fn parsed<T: FromStr>(text: &str) -> Result<T, Declined> {
    text.parse().map_err(|_| Declined("the request cannot be understood"))
}

fn path_parts<T>(path: PathParts<T>) -> Result<T, Declined> {
    path.map(|p| p.0).map_err(|_| Declined("the request cannot be understood"))
}

async fn chunk(
    State(node_store): State<Arc<NodeStore>>,
    path: PathParts<(String, String, String)>,
    head: HeaderMap,
) -> Result<Response, Declined> {
    let (root, hash, len) = path_parts(path)?;
    let request = FetchRequest::Chunk { hash: parsed::<Hash>(&hash)?, len: parsed(&len)? };
    serve_bytes(&node_store, &root, request, &head).await
}

async fn file(
    State(node_store): State<Arc<NodeStore>>,
    path: PathParts<(String, String, String, String)>,
    head: HeaderMap,
) -> Result<Response, Declined> {
    let (root, hash, len, path) = path_parts(path)?;
    let request = FetchRequest::File { path: path.into(), hash: parsed::<Hash>(&hash)?, len: parsed(&len)? };
    serve_bytes(&node_store, &root, request, &head).await
}

async fn state(
    State(node_store): State<Arc<NodeStore>>,
    of: Result<Query<MountedVersion>, QueryRejection>,
) -> Json<NodeState> {
    // A person who asks reads no version.
    if let Ok(Query(of)) = of {
        node_store.register_version(of);
    }
    Json(node_store.state())
}

async fn serve_bytes(
    node_store: &Arc<NodeStore>,
    root: &str,
    request: FetchRequest,
    head: &HeaderMap,
) -> Result<Response, Declined> {
    let job = head.get(headers::JOB).and_then(|v| v.to_str().ok()).and_then(|v| JobName::new(v).ok());
    let job = job.ok_or(Declined("a guest says for which job it reads"))?;
    let served = node_store.serve(NodeClient { root: parsed::<Root>(root)?, job }, request).await?;
    let len = served.hit.chunk.bytes().len();
    let tier = served.hit.tier;
    let (mut rest, node_store) = (served.hit.chunk.bytes().clone(), Arc::clone(node_store));
    let slices = std::iter::from_fn(move || {
        // It ends with the body.
        let _permits = &served.permits;
        let slice: Bytes = rest.split_to(rest.len().min(SLICE_BYTES));
        if slice.is_empty() {
            return None;
        }
        node_store.count_sent(tier, slice.len() as u64);
        Some(Ok::<_, Infallible>(slice))
    });
    let head = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, len.to_string()),
    ];
    Ok((head, Body::from_stream(stream::iter(slices))).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;

    fn directory(cache: &std::path::Path) -> StoreDirectory {
        let directory = StoreDirectory::new(cache, Hash::of(b"x"));
        directory.make().expect("the directory");
        directory
    }

    #[tokio::test]
    async fn i6_a_guest_without_a_place_is_sent_away_at_once() {
        let cache = tempfile::tempdir().expect("tempdir");
        let directory = directory(cache.path());
        let socket = Socket::bind(&directory).expect("bind");
        let path = socket_path(&socket.dir);
        let mut listener = NodeListener {
            listener: UnixListener::from_std(socket.listener.try_clone().expect("clone")).expect("listen"),
            connections: Arc::new(Semaphore::new(1)),
            read_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
        };
        let _one = UnixStream::connect(&path).await.expect("connect");
        let (first, ()) = listener.accept().await;
        let mut two = UnixStream::connect(&path).await.expect("connect");
        let mut answer = Vec::new();
        let end = tokio::select! {
            _ = listener.accept() => panic!("there is no directory"),
            end = two.read_to_end(&mut answer) => end,
        };
        assert_eq!((end.expect("closed"), answer.len()), (0, 0));
        drop(first);
        let _three = UnixStream::connect(&path).await.expect("connect");
        listener.accept().await;
    }

    #[test]
    fn an_owner_that_goes_leaves_its_successors_socket() {
        let cache = tempfile::tempdir().expect("tempdir");
        let directory = directory(cache.path());
        let old = Socket::bind(&directory).expect("bind");
        let new = Socket::bind(&directory).expect("bind");
        assert!(!old.is_in_place(&directory) && new.is_in_place(&directory));
        drop(old);
        assert!(new.is_in_place(&directory), "it is not the old one's");
        drop(new);
        assert!(directory.socket_id().is_err(), "its own");
    }
}
