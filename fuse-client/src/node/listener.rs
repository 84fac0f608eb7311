//! The listener of the owner: the unix socket of the node store, and HTTP over it with a bound on everything.
//!
//! I6: at most [`super::node_store::CONNECTIONS_MAX`] connections are open. The owner closes further
//! connections at once, so no client waits until another leaves. The owner drops a client that reads no bytes
//! for [`WRITE_TIMEOUT_MAX`] (or for a quarter of the read deadline, if that is less), and a client that
//! sends nothing for longer than any answer takes. A request has no body, and the HTTP library bounds its
//! head.

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
use fletch_core::{DatasetName, Hash, JobName, Root};
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

/// How long a client may leave an answer unread.
const WRITE_TIMEOUT_MAX: Duration = Duration::from_secs(30);
/// How much longer than the longest answer a connection may be idle. Clients close idle connections sooner.
const IDLE_SLACK: Duration = Duration::from_secs(120);
/// The pause after a failed accept, for example when the process has no descriptors left.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(100);
/// The most bytes handed to a connection at once. They are counted at that moment.
const SLICE_BYTES: usize = 256 << 10;

/// The bound socket of the owner. Removes its file when dropped. Only the holder of the store's lock may bind
/// it.
#[derive(Debug)]
pub struct Socket {
    dir: File,
    id: (u64, u64),
    listener: StdListener,
}

impl Socket {
    /// Binds the socket, and replaces the file that a former owner left.
    ///
    /// # Errors
    /// The error of the system.
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

    /// Returns whether clients still find this socket. True if the path cannot be inspected right now.
    #[must_use]
    pub fn is_in_place(&self, directory: &StoreDirectory) -> bool {
        match directory.socket_id() {
            Ok(id) => id == self.id,
            Err(e) => !matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
        }
    }

    /// Serves clients until `stop`.
    ///
    /// # Errors
    /// The error of the system.
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
        // While this socket is open, no other file has its inode.
        let ours = fs::symlink_metadata(&path).is_ok_and(|m| (m.dev(), m.ino()) == self.id);
        if !ours {
            tracing::debug!("the socket of the node store was gone already");
        } else if let Err(error) = fs::remove_file(&path) {
            tracing::debug!(%error, "cannot remove the socket of the node store");
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
                    tracing::warn!(%error, "cannot accept a node client: it asks the server");
                    sleep(ACCEPT_RETRY_PAUSE).await;
                    continue;
                }
            };
            let Ok(permit) = Arc::clone(&self.connections).try_acquire_owned() else {
                tracing::debug!("all connections are taken: a node client asks the server");
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

/// A client's connection, with its permit.
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
    text.parse().map_err(|_| Declined("the path of the request is malformed"))
}

fn path_parts<T>(path: PathParts<T>) -> Result<T, Declined> {
    path.map(|p| p.0).map_err(|_| Declined("the path of the request is malformed"))
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
    let (hash, len) = (parsed::<Hash>(&hash)?, parsed(&len)?);
    let request = FetchRequest::File { path: path.into(), hash, len, chunk: None };
    serve_bytes(&node_store, &root, request, &head).await
}

async fn state(
    State(node_store): State<Arc<NodeStore>>,
    of: Result<Query<MountedVersion>, QueryRejection>,
) -> Json<NodeState> {
    // A person who asks with curl names no version.
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
    let job = job.ok_or(Declined("the request has no Fletch-Job header"))?;
    let dataset = head.get(headers::DATASET).and_then(|v| DatasetName::new(v.to_str().ok()?).ok());
    let client = NodeClient { root: parsed::<Root>(root)?, job, dataset };
    let served = node_store.serve(client, request).await?;
    let len = served.hit.chunk.bytes().len();
    let tier = served.hit.tier;
    let (mut rest, node_store) = (served.hit.chunk.bytes().clone(), Arc::clone(node_store));
    let slices = std::iter::from_fn(move || {
        // The permits live as long as the body.
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
    async fn i6_a_connection_over_the_bound_is_closed_at_once() {
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
            _ = listener.accept() => panic!("accepted a connection over the bound"),
            end = two.read_to_end(&mut answer) => end,
        };
        assert_eq!((end.expect("closed"), answer.len()), (0, 0));
        drop(first);
        let _three = UnixStream::connect(&path).await.expect("connect");
        listener.accept().await;
    }

    #[test]
    fn a_dropped_socket_leaves_the_socket_of_the_next_owner() {
        let cache = tempfile::tempdir().expect("tempdir");
        let directory = directory(cache.path());
        let old = Socket::bind(&directory).expect("bind");
        let new = Socket::bind(&directory).expect("bind");
        assert!(!old.is_in_place(&directory) && new.is_in_place(&directory));
        drop(old);
        assert!(new.is_in_place(&directory), "the file belongs to the new socket");
        drop(new);
        assert!(directory.socket_id().is_err(), "its own");
    }
}
