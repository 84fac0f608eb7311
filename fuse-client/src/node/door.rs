//! The owner's socket, and what comes in by it: HTTP with bounds on everything.
//!
//! I6: at most [`PLACES`] connections are open; more are closed at once, so that no guest waits for another to go. A
//! guest that takes no bytes for [`TAKE_WITHIN`] (a quarter of any read's time, if that is less), or sends none for
//! longer than any answer takes, is dropped. A request has no body, and its head
//! is bounded by the HTTP library.

use super::host::{Guest, Host, NotHere};
use super::place::{Place, socket_path};
use crate::fs::read::Wanted;
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
    node::{CHUNK, FILE, NodeClientVersion, NodeState, STATE},
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
pub const PLACES: usize = 256;
/// How long a guest may take no bytes of an answer.
const TAKE_WITHIN: Duration = Duration::from_secs(30);
/// How much longer than an answer takes a connection may be silent: guests give theirs up before.
const IDLE_SLACK: Duration = Duration::from_secs(120);
/// How long accepting rests when the system has no more descriptors.
const ACCEPT_REST: Duration = Duration::from_millis(100);
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
    pub fn bind(place: &Place) -> io::Result<Self> {
        let dir = place.open()?;
        let path = socket_path(&dir);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let listener = StdListener::bind(&path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(Socket { id: place.socket_id()?, dir, listener })
    }

    /// Whether it lies where guests look for it. A place that cannot be looked at now may be again.
    #[must_use]
    pub fn is_there(&self, place: &Place) -> bool {
        match place.socket_id() {
            Ok(id) => id == self.id,
            Err(e) => !matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
        }
    }

    /// Serves guests until `stop`.
    ///
    /// # Errors
    /// What the system says.
    pub async fn serve(&self, host: Arc<Host>, stop: CancellationToken) -> io::Result<()> {
        let door = Door {
            listener: UnixListener::from_std(self.listener.try_clone()?)?,
            places: host.places(),
            silent_max: host.deadline() + IDLE_SLACK,
            take_within: TAKE_WITHIN.min(host.deadline() / 4),
        };
        axum::serve(door, router(host)).with_graceful_shutdown(stop.cancelled_owned()).await
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

struct Door {
    listener: UnixListener,
    places: Arc<Semaphore>,
    silent_max: Duration,
    take_within: Duration,
}

impl Listener for Door {
    type Io = Caller;
    type Addr = ();

    async fn accept(&mut self) -> (Caller, ()) {
        loop {
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "accepting a guest failed");
                    sleep(ACCEPT_REST).await;
                    continue;
                }
            };
            let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
                tracing::debug!("too many connections: a guest is sent to the server");
                continue;
            };
            let mut stream = TimeoutStream::new(stream);
            stream.set_read_timeout(Some(self.silent_max));
            stream.set_write_timeout(Some(self.take_within));
            return (Caller { stream: Box::pin(stream), _place: place }, ());
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A guest's connection and its place.
struct Caller {
    stream: Pin<Box<TimeoutStream<UnixStream>>>,
    _place: OwnedSemaphorePermit,
}

impl AsyncRead for Caller {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_read(cx, buf)
    }
}

impl AsyncWrite for Caller {
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

fn router(host: Arc<Host>) -> Router {
    Router::new().route(CHUNK, get(chunk)).route(FILE, get(file)).route(STATE, get(state)).with_state(host)
}

impl IntoResponse for NotHere {
    fn into_response(self) -> Response {
        let problem = Problem::new(Code::NotFound, self.0, "ask the server");
        let head = [(header::CONTENT_TYPE, headers::PROBLEM)];
        (axum::http::StatusCode::NOT_FOUND, head, Json(problem)).into_response()
    }
}

type Parts<T> = Result<Path<T>, PathRejection>;

fn parsed<T: FromStr>(text: &str) -> Result<T, NotHere> {
    text.parse().map_err(|_| NotHere("the request cannot be understood"))
}

fn parts<T>(path: Parts<T>) -> Result<T, NotHere> {
    path.map(|p| p.0).map_err(|_| NotHere("the request cannot be understood"))
}

async fn chunk(
    State(host): State<Arc<Host>>,
    path: Parts<(String, String, String)>,
    head: HeaderMap,
) -> Result<Response, NotHere> {
    let (root, hash, len) = parts(path)?;
    let wanted = Wanted::Chunk { hash: parsed::<Hash>(&hash)?, len: parsed(&len)? };
    answer(&host, &root, wanted, &head).await
}

async fn file(
    State(host): State<Arc<Host>>,
    path: Parts<(String, String, String, String)>,
    head: HeaderMap,
) -> Result<Response, NotHere> {
    let (root, hash, len, path) = parts(path)?;
    let wanted = Wanted::File { path: path.into(), hash: parsed::<Hash>(&hash)?, len: parsed(&len)? };
    answer(&host, &root, wanted, &head).await
}

async fn state(
    State(host): State<Arc<Host>>,
    of: Result<Query<NodeClientVersion>, QueryRejection>,
) -> Json<NodeState> {
    // A person who asks reads no version.
    if let Ok(Query(of)) = of {
        host.expect(of);
    }
    Json(host.state())
}

async fn answer(host: &Arc<Host>, root: &str, wanted: Wanted, head: &HeaderMap) -> Result<Response, NotHere> {
    let job = head.get(headers::JOB).and_then(|v| v.to_str().ok()).and_then(|v| JobName::new(v).ok());
    let job = job.ok_or(NotHere("a guest says for which job it reads"))?;
    let served = host.bytes(Guest { root: parsed::<Root>(root)?, job }, wanted).await?;
    let len = served.hit.chunk.bytes().len();
    let tier = served.hit.tier;
    let (mut rest, host) = (served.hit.chunk.bytes().clone(), Arc::clone(host));
    let slices = std::iter::from_fn(move || {
        // It ends with the body.
        let _right = &served.right;
        let slice: Bytes = rest.split_to(rest.len().min(SLICE_BYTES));
        if slice.is_empty() {
            return None;
        }
        host.sent(tier, slice.len() as u64);
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

    fn place(cache: &std::path::Path) -> Place {
        let place = Place::new(cache, Hash::of(b"x"));
        place.make().expect("the directory");
        place
    }

    #[tokio::test]
    async fn i6_a_guest_without_a_place_is_sent_away_at_once() {
        let cache = tempfile::tempdir().expect("tempdir");
        let place = place(cache.path());
        let socket = Socket::bind(&place).expect("bind");
        let path = socket_path(&socket.dir);
        let mut door = Door {
            listener: UnixListener::from_std(socket.listener.try_clone().expect("clone")).expect("listen"),
            places: Arc::new(Semaphore::new(1)),
            silent_max: Duration::from_secs(60),
            take_within: Duration::from_secs(60),
        };
        let _one = UnixStream::connect(&path).await.expect("connect");
        let (first, ()) = door.accept().await;
        let mut two = UnixStream::connect(&path).await.expect("connect");
        let mut answer = Vec::new();
        let end = tokio::select! {
            _ = door.accept() => panic!("there is no place"),
            end = two.read_to_end(&mut answer) => end,
        };
        assert_eq!((end.expect("closed"), answer.len()), (0, 0));
        drop(first);
        let _three = UnixStream::connect(&path).await.expect("connect");
        door.accept().await;
    }

    #[test]
    fn an_owner_that_goes_leaves_its_successors_socket() {
        let cache = tempfile::tempdir().expect("tempdir");
        let place = place(cache.path());
        let old = Socket::bind(&place).expect("bind");
        let new = Socket::bind(&place).expect("bind");
        assert!(!old.is_there(&place) && new.is_there(&place));
        drop(old);
        assert!(new.is_there(&place), "it is not the old one's");
        drop(new);
        assert!(place.socket_id().is_err(), "its own");
    }
}
