//! A client and a cluster of three servers in this process: who is asked, how often, and in which order.

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
    routing::{any, get, post},
};
use bytes::{BufMut, Bytes, BytesMut};
use fletch_api::frames::{FrameHeader, FrameKind, PREFACE, WHOLE};
use fletch_api::{BatchItem, BatchRequest, ChunkSpan, Cluster, Code, Member, Problem, headers, routes};
use fletch_client::{Client, ClientConfig, ClientError, Servers};
use fletch_core::cluster::{Member as Placed, Placement};
use fletch_core::{Domain, Hash, Root, StoreKey};
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::net::TcpListener;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

const CHUNKS: u64 = 60;

fn content(i: u64) -> Bytes {
    Bytes::from(i.to_le_bytes().repeat(64))
}

fn hash(i: u64) -> Hash {
    Hash::of(&content(i))
}

fn root() -> Root {
    Root(Hash::of(b"root"))
}

/// What a server does with requests for bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Does {
    Serves,
    /// 429 for so many requests.
    IsBusy(u64),
    IsNotReady,
    KnowsNothing,
    /// Does not know the token.
    RefusesToken,
    SendsWrongBytes,
    /// Sends two items of a batch, and breaks off.
    BreaksOff,
    NeverAnswers,
}

struct Shared {
    id: &'static str,
    view: AtomicU64,
    cluster: Mutex<Option<Cluster>>,
    does: Mutex<Does>,
    /// The requests: method and path, with the number of the view that the client sent.
    seen: Mutex<Vec<(String, Option<String>)>>,
}

impl Shared {
    fn count(&self, part: &str) -> usize {
        self.seen.lock().iter().filter(|(what, _)| what.contains(part)).count()
    }

    fn does(&self) -> Does {
        *self.does.lock()
    }

    fn set(&self, does: Does) {
        *self.does.lock() = does;
    }
}

struct TestServer {
    shared: Arc<Shared>,
    url: String,
    running: Option<AbortOnDropHandle<()>>,
}

type Served = State<Arc<Shared>>;

fn problem(code: Code) -> Response {
    let p = Problem::new(code, "what happened", "what to do");
    let retry = [(header::RETRY_AFTER, HeaderValue::from(0))];
    (StatusCode::from_u16(p.status).expect("status"), retry, Json(p)).into_response()
}

async fn refusal(shared: &Shared) -> Option<Response> {
    let does = shared.does();
    match does {
        Does::IsBusy(0) | Does::Serves | Does::SendsWrongBytes | Does::BreaksOff => None,
        Does::IsBusy(n) => {
            shared.set(Does::IsBusy(n - 1));
            Some(problem(Code::Overloaded))
        }
        Does::IsNotReady => Some(problem(Code::NotReady)),
        Does::KnowsNothing => Some(problem(Code::NotFound)),
        Does::RefusesToken => Some(problem(Code::Unauthorized)),
        Does::NeverAnswers => std::future::pending().await,
    }
}

async fn chunk(State(shared): Served, Path((_, wanted)): Path<(String, String)>) -> Response {
    if let Some(refusal) = refusal(&shared).await {
        return refusal;
    }
    let found = (0..CHUNKS).find(|i| hash(*i).to_string() == wanted).expect("a chunk");
    let wrong = shared.does() == Does::SendsWrongBytes;
    content(found + u64::from(wrong)).into_response()
}

async fn batch(State(shared): Served, Json(request): Json<BatchRequest>) -> Response {
    if let Some(refusal) = refusal(&shared).await {
        return refusal;
    }
    let mut out = BytesMut::new();
    out.extend_from_slice(&PREFACE);
    for (i, item) in request.items.iter().enumerate() {
        if shared.does() == Does::BreaksOff && i == 2 {
            // One more byte, which no frame begins with alone.
            let cut = futures::stream::iter([Ok(out.freeze()), Err(std::io::Error::other("cut"))]);
            return Body::from_stream(cut).into_response();
        }
        let bytes = match item {
            BatchItem::Chunk(span) => content((0..CHUNKS).find(|i| hash(*i) == span.hash).expect("a chunk")),
            BatchItem::Ordinal(n) => Bytes::from(n.to_string()),
            BatchItem::Path(path) => Bytes::from(path.clone()),
        };
        let index = u32::try_from(i).expect("small");
        out.extend_from_slice(&FrameHeader::new(FrameKind::Data, WHOLE, index, bytes.len() as u64).encode());
        out.put_slice(&bytes);
    }
    let items = u32::try_from(request.items.len()).expect("small");
    out.extend_from_slice(&FrameHeader::new(FrameKind::End, 0, items, 0).encode());
    out.freeze().into_response()
}

async fn view(State(shared): Served) -> Response {
    match &*shared.cluster.lock() {
        Some(cluster) => ([(header::ETAG, format!("\"{}\"", cluster.view))], Json(cluster)).into_response(),
        None => problem(Code::Internal),
    }
}

async fn noted(
    State(shared): Served,
    method: Method,
    uri: Uri,
    sent: HeaderMap,
    request: axum::extract::Request,
    next: axum::middleware::Next,
) -> Response {
    let seen = sent.get(headers::VIEW).map(|v| v.to_str().expect("ascii").to_owned());
    shared.seen.lock().push((format!("{method} {}", uri.path()), seen));
    let mut response = next.run(request).await;
    let number = shared.view.load(Relaxed);
    if number > 0 {
        response.headers_mut().insert(headers::VIEW, number.into());
    }
    response
}

async fn serve(shared: &Arc<Shared>, listener: TcpListener) -> AbortOnDropHandle<()> {
    let app = Router::new()
        .route(routes::CHUNK, get(chunk))
        .route(routes::BATCH, post(batch))
        .route(routes::CLUSTER, get(view))
        .route(
            routes::LIVEZ,
            any(|State(s): Served| async move {
                if s.does() == Does::NeverAnswers {
                    std::future::pending::<()>().await;
                }
            }),
        )
        .route(
            routes::ACCOUNTS,
            get(|State(s): Served| async move {
                match refusal(&s).await {
                    Some(refusal) => refusal,
                    None => {
                        Json(serde_json::json!({"accounts": [], "table_bytes": s.id.len()})).into_response()
                    }
                }
            }),
        )
        .layer(axum::middleware::from_fn_with_state(Arc::clone(shared), noted))
        .with_state(Arc::clone(shared));
    let serving = async move { axum::serve(listener, app).await.expect("serves") };
    AbortOnDropHandle::new(TaskTracker::new().spawn(serving))
}

impl TestServer {
    async fn start(id: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let url = format!("http://{}", listener.local_addr().expect("addr"));
        let shared = Arc::new(Shared {
            id,
            view: AtomicU64::new(1),
            cluster: Mutex::default(),
            does: Mutex::new(Does::Serves),
            seen: Mutex::default(),
        });
        let running = Some(serve(&shared, listener).await);
        TestServer { shared, url, running }
    }

    /// Ends the server: new connections are refused.
    async fn end(&mut self) {
        self.running = None;
        let address = self.url.trim_start_matches("http://").to_owned();
        while tokio::net::TcpStream::connect(&address).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Three servers that know each other.
async fn three() -> [TestServer; 3] {
    let all = [TestServer::start("a").await, TestServer::start("b").await, TestServer::start("c").await];
    let member = |s: &TestServer| Member {
        id: s.shared.id.to_owned(),
        url: s.url.clone(),
        weight: 1,
        zone: None,
        up: true,
        state: None,
    };
    let cluster = Cluster {
        view: 7,
        domain: Some(Domain::default_domain()),
        members: all.iter().map(member).collect(),
    };
    for server in &all {
        server.shared.view.store(7, Relaxed);
        *server.shared.cluster.lock() = Some(cluster.clone());
    }
    all
}

/// Returns the chunks, by the id of their owner.
fn owned() -> BTreeMap<String, Vec<u64>> {
    let placement = Placement::new(["a", "b", "c"].map(|id| Placed { id: id.to_owned(), weight: 1.0 }));
    let mut owned: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for i in 0..CHUNKS {
        let key = StoreKey { domain: Domain::default_domain(), hash: hash(i) };
        owned.entry(placement.owner(&key).expect("one").id.clone()).or_default().push(i);
    }
    owned
}

fn client(servers: &str) -> Client {
    let servers: Servers = servers.parse().expect("addresses");
    Client::new(ClientConfig { io_timeout: Duration::from_secs(8), ..ClientConfig::of(servers, "mount") })
        .expect("client")
}

async fn read(client: &Client, i: u64) -> Result<(), ClientError> {
    let bytes = client.chunk(root(), hash(i), 512).await?;
    assert_eq!(bytes.bytes(), &content(i));
    Ok(())
}

#[tokio::test]
async fn a_server_that_is_alone_is_asked_for_nothing_else() {
    for (view, header) in [(1, true), (0, false)] {
        let server = TestServer::start("a").await;
        server.shared.view.store(view, Relaxed);
        let client = client(&server.url);
        for i in 0..20 {
            read(&client, i).await.expect("a chunk");
        }
        client.accounts().await.expect("accounts");
        let items = (0..5).map(BatchItem::Ordinal);
        let mut batch = client.batch(root(), items, 100).await.expect("begins");
        while batch.next().await.expect("an item").is_some() {}
        let seen = server.shared.seen.lock();
        assert_eq!(seen.len(), 22, "{header}: {seen:?}");
        assert!(seen.iter().all(|(_, view)| view.is_none()), "no header that was not sent before");
        assert_eq!(client.stats().requests, 22);
    }
}

#[tokio::test]
async fn chunks_are_read_at_their_owners_after_one_fetch_of_the_view() {
    let [a, b, c] = three().await;
    let client = client(&b.url);
    client.accounts().await.expect("accounts");
    for i in 0..CHUNKS {
        read(&client, i).await.expect("a chunk");
    }
    for server in [&a, &b, &c] {
        assert_eq!(server.shared.count("/chunks/"), owned()[server.shared.id].len(), "{}", server.shared.id);
    }
    let views: usize = [&a, &b, &c].iter().map(|s| s.shared.count("/v1/cluster")).sum();
    assert_eq!(views, 1);
    assert!(a.shared.seen.lock().iter().all(|(_, view)| view.as_deref() == Some("7")));
    assert_eq!(client.members().len(), 3);
}

#[tokio::test]
async fn a_dead_owner_is_passed_by_and_a_silent_one_soon() {
    let [mut a, b, c] = three().await;
    let client = client(&b.url);
    client.accounts().await.expect("accounts");
    a.end().await;
    for i in 0..CHUNKS {
        read(&client, i).await.expect("a chunk");
    }
    c.shared.set(Does::NeverAnswers);
    let begun = tokio::time::Instant::now();
    for i in 0..CHUNKS {
        read(&client, i).await.expect("a chunk");
    }
    assert!(begun.elapsed() < Duration::from_secs(6), "{:?}", begun.elapsed());
    let errors = client.stats().errors;
    assert_eq!(errors, 0);
    // Nobody is left.
    b.shared.set(Does::NeverAnswers);
    let e = read(&client.within(Duration::from_secs(2)), 0).await.expect_err("nobody");
    assert!(e.is_unreachable(), "{e}");
}

/// A changed token reaches the servers one after the other.
#[tokio::test]
async fn a_server_that_does_not_know_the_token_yet_is_passed_by() {
    let [a, b, c] = three().await;
    let client = client(&b.url);
    client.accounts().await.expect("accounts");
    for refuses in [&a, &b] {
        refuses.shared.set(Does::RefusesToken);
        for i in 0..CHUNKS {
            read(&client, i).await.expect("a chunk of another server");
        }
    }
    assert_eq!(client.stats().errors, 0);
    // Nobody accepts it: the first one of the chunk's ranking is named, and nothing is waited for.
    c.shared.set(Does::RefusesToken);
    let begun = tokio::time::Instant::now();
    let e = read(&client, 0).await.expect_err("refused");
    assert!(e.is_denied() && begun.elapsed() < Duration::from_secs(2), "{e}");
    assert!([&a, &b, &c].iter().any(|s| e.to_string().contains(&s.url)), "the server is named: {e}");
    // One is silent, so it is waited for: it may accept the token.
    a.shared.set(Does::NeverAnswers);
    let begun = tokio::time::Instant::now();
    let e = read(&client.within(Duration::from_secs(2)), 0).await.expect_err("nobody");
    assert!(begun.elapsed() > Duration::from_secs(1), "{e}, {:?}", begun.elapsed());
}

#[tokio::test]
async fn a_server_at_its_limit_is_waited_for() {
    let [a, b, c] = three().await;
    let client = client(&b.url);
    client.accounts().await.expect("accounts");
    let of_a = owned()["a"][0];
    a.shared.set(Does::IsBusy(3));
    read(&client, of_a).await.expect("a chunk");
    assert_eq!([&a, &b, &c].map(|s| s.shared.count("/chunks/")), [4, 0, 0]);
    // One that is not ready is passed by; one that does not know the version may be late.
    a.shared.set(Does::IsNotReady);
    read(&client, of_a).await.expect("a chunk");
    tokio::time::sleep(Duration::from_millis(2100)).await;
    a.shared.set(Does::KnowsNothing);
    read(&client, of_a).await.expect("a chunk of the server that the user named");
    b.shared.set(Does::KnowsNothing);
    let e = read(&client, of_a).await.expect_err("both say no");
    assert_eq!(e.code(), Some(Code::NotFound), "{e}");
    assert_eq!(c.shared.count("/chunks/") + b.shared.count("/chunks/"), 3, "nobody else is asked");
}

#[tokio::test]
async fn after_wrong_bytes_another_server_is_asked() {
    let [a, b, c] = three().await;
    let client = client(&b.url);
    client.accounts().await.expect("accounts");
    a.shared.set(Does::SendsWrongBytes);
    let of_a = owned()["a"][0];
    let e = read(&client, of_a).await.expect_err("wrong bytes");
    assert!(matches!(&e, ClientError::Corrupt { endpoint, .. } if *endpoint == a.url), "{e}");
    read(&client.after_wrong_bytes(1), of_a).await.expect("a chunk");
    assert_eq!(a.shared.count("/chunks/"), 1);
    assert_eq!(b.shared.count("/chunks/") + c.shared.count("/chunks/"), 1);
}

#[tokio::test]
async fn a_batch_is_divided_among_owners_and_keeps_its_order() {
    let [a, b, c] = three().await;
    let client = client(&b.url);
    client.accounts().await.expect("accounts");
    let span = |i| BatchItem::Chunk(ChunkSpan { hash: hash(i), offset: 0, length: None });
    let items = || (0..CHUNKS).map(span);
    let all = async |client: &Client| {
        let mut batch = client.batch(root(), items(), 1000).await.expect("begins");
        for i in 0..CHUNKS {
            let piece = batch.next().await.expect("an item").expect("not the end");
            assert_eq!((piece.index as u64, piece.outcome.expect("bytes")), (i, content(i)));
        }
        assert!(batch.next().await.expect("the end").is_none());
    };
    all(&client).await;
    let posts = || [&a, &b, &c].map(|s| s.shared.count("/batch"));
    assert_eq!(posts(), [1, 1, 1]);
    // Another server sends what one left out.
    c.shared.set(Does::BreaksOff);
    all(&client).await;
    let [_, _, of_c] = posts();
    assert_eq!((posts().iter().sum::<usize>(), of_c), (7, 2), "three parts, and the rest of one");
    // Items whose chunk is not known go to one server.
    c.shared.set(Does::Serves);
    let mut batch = client.batch(root(), (0..9).map(BatchItem::Ordinal), 10).await.expect("begins");
    while batch.next().await.expect("an item").is_some() {}
    assert_eq!(posts().iter().sum::<usize>(), 8);
}

#[tokio::test]
async fn the_next_of_a_list_answers_and_errors_count_the_others() {
    let [mut a, b, c] = three().await;
    let listed = client(&format!("{},{}", a.url, b.url));
    a.end().await;
    listed.accounts().await.expect("accounts of b");
    assert_eq!((b.shared.count("accounts"), c.shared.count("accounts")), (1, 0));
    let nobody = client("http://127.0.0.1:1,http://127.0.0.1:2,http://127.0.0.1:3");
    let e = nobody.accounts().await.expect_err("nobody");
    assert!(
        e.is_refused() && e.to_string().contains("127.0.0.1:1 ") && e.to_string().contains("2 other"),
        "{e}"
    );
    // A name may have several addresses, of which only one has a server.
    let named = client(&b.url.replace("127.0.0.1", "localhost"));
    named.accounts().await.expect("accounts of b");
    // A pinned client waits for its server.
    let pinned = listed.at(&c.url);
    pinned.accounts().await.expect("accounts of c");
    c.shared.set(Does::IsNotReady);
    assert!(pinned.within(Duration::from_millis(300)).accounts().await.is_err());
    assert_eq!(b.shared.count("accounts"), 2);
}
