//! A stub server that serves the routes of a mount over a [`Dataset`], and misbehaves as a test demands.

use super::dataset::Dataset;
use axum::{
    Json, Router,
    body::Body,
    extract::{Path, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use bytes::Bytes;
use fletch_api::{Code, Formats, Info, InfoLimits, Problem, ResolvedVersion, routes};
use fletch_core::{DatasetName, Hash, TagName};
use fletch_tables::Table;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::Arc,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

/// How the stub replies to a request for a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum ChunkReply {
    /// The chunk.
    Honest,
    /// No reply, ever.
    Hang,
    /// The chunk with one bit flipped, every time.
    Flip,
    /// The chunk with one bit flipped, the first time each is asked for.
    FlipOnce,
    /// Half of the chunk, then the connection ends.
    Cut,
    /// 404, as for a dataset that is no longer registered.
    Gone,
    /// `origin_changed`.
    Changed,
    /// 403.
    Denied,
    /// 429 the first two times each chunk is asked for.
    Busy,
}

const CHUNK_REPLIES: [ChunkReply; 9] = [
    ChunkReply::Honest,
    ChunkReply::Hang,
    ChunkReply::Flip,
    ChunkReply::FlipOnce,
    ChunkReply::Cut,
    ChunkReply::Gone,
    ChunkReply::Changed,
    ChunkReply::Denied,
    ChunkReply::Busy,
];

struct Shared {
    dataset: Arc<Dataset>,
    reply: AtomicUsize,
    asked: Mutex<HashMap<Hash, u64>>,
    chunks: AtomicU64,
    /// The answer to the access check: the code of the refusal, or `None` to allow access.
    refusal: tokio::sync::watch::Sender<Option<Code>>,
}

/// The stub server, on a runtime of its own until it is killed or dropped.
pub struct Stub {
    shared: Arc<Shared>,
    addr: SocketAddr,
    /// Bound to the address but never listening, so that no other process gets the port while the stub is
    /// killed.
    _port: tokio::net::TcpSocket,
    runtime: Option<tokio::runtime::Runtime>,
}

fn bound(addr: SocketAddr) -> tokio::net::TcpSocket {
    let socket = tokio::net::TcpSocket::new_v4().expect("socket");
    socket.set_reuseaddr(true).expect("reuseaddr");
    socket.bind(addr).expect("bind");
    socket
}

impl Stub {
    pub fn start(dataset: Arc<Dataset>) -> Self {
        let shared = Arc::new(Shared {
            dataset,
            reply: AtomicUsize::new(0),
            asked: Mutex::default(),
            chunks: AtomicU64::new(0),
            refusal: tokio::sync::watch::Sender::new(None),
        });
        let port = bound(([127, 0, 0, 1], 0).into());
        let addr = port.local_addr().expect("bound");
        let mut stub = Stub { shared, addr, _port: port, runtime: None };
        stub.restart();
        stub
    }

    /// Starts serving, at the same address as before.
    pub fn restart(&mut self) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("runtime");
        let app = Router::new()
            .route(routes::INFO, get(info))
            .route(routes::DATASET_VERSION, get(resolve))
            .route(routes::MANIFEST, get(manifest))
            .route(routes::ENTRIES, get(entries))
            .route(routes::LAYOUT, get(layout))
            .route(routes::PLACEMENT, get(placement))
            .route(routes::ACCESS, get(access))
            .route(routes::CHUNK, get(chunk))
            .with_state(Arc::clone(&self.shared));
        let addr = self.addr;
        let socket = runtime.block_on(async move { bound(addr).listen(64).expect("listen") });
        runtime.handle().spawn(async move { axum::serve(socket, app).await });
        self.runtime = Some(runtime);
    }

    /// Stops as a killed server does: cuts every connection and stops listening.
    pub fn kill(&mut self) {
        if let Some(r) = self.runtime.take() {
            r.shutdown_timeout(Duration::from_secs(2));
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub fn address(&self) -> String {
        self.addr.to_string()
    }

    pub fn set(&self, reply: ChunkReply) {
        self.shared.reply.store(reply as usize, Relaxed);
    }

    /// Refuses access to the version with this code, or allows it.
    pub fn refuse(&self, with: Option<Code>) {
        self.shared.refusal.send_replace(with);
    }

    /// Returns the number of requests for chunks so far.
    pub fn chunks(&self) -> u64 {
        self.shared.chunks.load(Relaxed)
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        self.kill();
    }
}

type Served = State<Arc<Shared>>;

async fn info() -> Json<Info> {
    Json(Info {
        name: "stub".into(),
        version: "0".into(),
        formats: Formats { api: vec![1], versions: vec![1], frames: vec![1] },
        limits: InfoLimits { batch_items: 1, batch_bytes: 1, chunk_bytes: 16 << 20 },
        disk: None,
        publish: None,
        s3: None,
        uptime_s: 1,
    })
}

fn problem(code: Code, detail: &str) -> Response {
    let p = Problem::new(code, detail, "a hint from the stub");
    let status = StatusCode::from_u16(p.status).expect("status");
    (status, [(header::CONTENT_TYPE, "application/problem+json")], Json(p)).into_response()
}

/// Answers the access check. Holds the answer back for a second while nothing changes.
async fn access(State(s): Served) -> Response {
    let mut refusal = s.refusal.subscribe();
    loop {
        if let Some(code) = *refusal.borrow_and_update() {
            return problem(code, "access refused");
        }
        if tokio::time::timeout(Duration::from_secs(1), refusal.changed()).await.is_err() {
            return StatusCode::NO_CONTENT.into_response();
        }
    }
}

async fn resolve(State(s): Served, Path((name, version)): Path<(String, String)>) -> Response {
    let d = &s.dataset;
    if name != "d" || (version != "latest" && version != d.root.to_string()) {
        return problem(Code::NotFound, "no such dataset or version");
    }
    Json(ResolvedVersion {
        dataset: DatasetName::new("d").expect("name"),
        root: d.root,
        layout: d.layout,
        tag: Some(TagName::latest()),
        entries: d.nodes.len() as u64,
        files: None,
        bytes: 0,
        created_ns: 0,
        draft: false,
    })
    .into_response()
}

fn table(s: &Shared, t: Table, headers: &HeaderMap) -> Response {
    let whole = s.dataset.tables[&t].clone();
    let Some(range) = headers.get(header::RANGE) else { return whole.into_response() };
    let spec = range.to_str().expect("ascii").strip_prefix("bytes=").expect("bytes").to_owned();
    let (from, to) = spec.split_once('-').expect("range");
    let len = whole.len();
    let (from, to) = match (from, to) {
        ("", n) => (len - n.parse::<usize>().expect("number").min(len), len),
        (a, b) => (a.parse().expect("number"), (b.parse::<usize>().expect("number") + 1).min(len)),
    };
    let content_range = format!("bytes {from}-{}/{len}", to - 1);
    (StatusCode::PARTIAL_CONTENT, [(header::CONTENT_RANGE, content_range)], whole.slice(from..to))
        .into_response()
}

async fn manifest(State(s): Served, h: HeaderMap) -> Response {
    table(&s, Table::Manifest, &h)
}

async fn entries(State(s): Served, h: HeaderMap) -> Response {
    table(&s, Table::Entries, &h)
}

async fn layout(State(s): Served, h: HeaderMap) -> Response {
    table(&s, Table::Layout, &h)
}

async fn placement(State(s): Served, h: HeaderMap) -> Response {
    table(&s, Table::Placement, &h)
}

async fn chunk(State(s): Served, Path((_, hash)): Path<(String, String)>) -> Response {
    s.chunks.fetch_add(1, Relaxed);
    let hash: Hash = hash.parse().expect("hash");
    let times = {
        let mut asked = s.asked.lock();
        let n = asked.entry(hash).or_insert(0);
        *n += 1;
        *n
    };
    let bytes = s.dataset.chunks[&hash].clone();
    match CHUNK_REPLIES[s.reply.load(Relaxed)] {
        ChunkReply::Honest => bytes.into_response(),
        ChunkReply::Hang => std::future::pending().await,
        ChunkReply::FlipOnce if times > 1 => bytes.into_response(),
        ChunkReply::Flip | ChunkReply::FlipOnce => {
            let mut wrong = bytes.to_vec();
            let at = wrong.len() / 2;
            wrong[at] ^= 1;
            Bytes::from(wrong).into_response()
        }
        ChunkReply::Cut => {
            let half = bytes.slice(..bytes.len() / 2);
            let broken = futures::stream::iter([Ok(half), Err(std::io::Error::other("cut"))]);
            ([(header::CONTENT_LENGTH, bytes.len())], Body::from_stream(broken)).into_response()
        }
        ChunkReply::Gone => problem(Code::NotFound, "no such version"),
        ChunkReply::Changed => problem(Code::OriginChanged, "x.jpg has another size"),
        ChunkReply::Denied => problem(Code::UriNotAllowed, "not for you"),
        ChunkReply::Busy if times > 2 => bytes.into_response(),
        ChunkReply::Busy => {
            let mut r = problem(Code::Overloaded, "busy");
            r.headers_mut().insert(header::RETRY_AFTER, 0.into());
            r
        }
    }
}
