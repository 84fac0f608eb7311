//! Tests the client against a server that answers correctly, wrongly, slowly or not at all.

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{any, get, post},
};
use bytes::{BufMut, Bytes, BytesMut};
use fletch_api::frames::{FrameHeader, FrameKind, MORE, PREFACE, WHOLE};
use fletch_api::{BatchItem, BatchRequest, Code, Problem, headers, routes};
use fletch_client::{Client, ClientConfig, ClientError, Endpoint, FirstAnswer, TokenSource};
use fletch_core::{DatasetName, Hash, JobName, Kind, LayoutId, Root};
use fletch_tables::{Table, TableRange};
use parking_lot::Mutex;
use std::{
    sync::Arc,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

#[derive(Default)]
struct Seen {
    requests: AtomicU64,
    headers: Mutex<Vec<HeaderMap>>,
}

type Served = State<Arc<Seen>>;

fn problem(code: Code, retry_after: Option<u64>) -> Response {
    let p = Problem::new(code, "what happened", "what to do");
    let mut r = (StatusCode::from_u16(p.status).expect("status"), Json(p)).into_response();
    if let Some(s) = retry_after {
        r.headers_mut().insert(header::RETRY_AFTER, s.into());
    }
    r
}

fn body(len: usize) -> Bytes {
    (0..len).map(|i| (i * 31 % 251) as u8).collect::<Vec<u8>>().into()
}

/// Serves a chunk. The first byte of the chunk's hash selects the server's behaviour.
async fn chunk(State(seen): Served, Path((_, hash)): Path<(String, String)>, h: HeaderMap) -> Response {
    let n = seen.requests.fetch_add(1, Relaxed);
    seen.headers.lock().push(h);
    let wrong = |len: usize| Body::from(body(len));
    match &hash[..2] {
        "01" => wrong(99).into_response(),
        "02" => ([(header::CONTENT_LENGTH, "1000")], wrong(1000)).into_response(),
        "03" if n < 2 => problem(Code::Overloaded, Some(0)),
        "04" if n < 2 => problem(Code::NotReady, None),
        "05" => problem(Code::OriginChanged, None),
        "06" => problem(Code::NotFound, None),
        "07" => std::future::pending().await,
        "08" if n < 2 => (StatusCode::BAD_GATEWAY, "<html>proxy</html>").into_response(),
        "0d" => {
            // A problem of a newer server, with a code that this build does not know.
            let p = serde_json::json!({"type": "urn:fletch:problem:novel", "title": "t", "status": 502,
                "detail": "d", "code": "novel", "retryable": false});
            (StatusCode::BAD_GATEWAY, Json(p)).into_response()
        }
        "09" => problem(Code::Overloaded, Some(3600)),
        "0a" => {
            // A body that is longer than expected, without a Content-Length.
            let pieces = futures::stream::iter((0..100).map(|_| Ok::<_, std::io::Error>(body(1000))));
            Body::from_stream(pieces).into_response()
        }
        "0b" => (StatusCode::FOUND, [(header::LOCATION, "http://127.0.0.1:1/")]).into_response(),
        "0c" if n < 1 => {
            let cut = futures::stream::iter([Ok(body(50)), Err(std::io::Error::other("cut"))]);
            ([(header::CONTENT_LENGTH, "100")], Body::from_stream(cut)).into_response()
        }
        _ => wrong(100).into_response(),
    }
}

async fn table(h: HeaderMap) -> Response {
    match h.get(header::RANGE).map(|v| v.to_str().expect("ascii")) {
        None => body(500).into_response(),
        Some("bytes=10-19") => (StatusCode::PARTIAL_CONTENT, body(500).slice(10..20)).into_response(),
        Some("bytes=-8") => (StatusCode::PARTIAL_CONTENT, body(500).slice(492..)).into_response(),
        // One server ignores ranges, one sends too few bytes.
        Some("bytes=30-39") => body(500).into_response(),
        Some(_) => (StatusCode::PARTIAL_CONTENT, body(3)).into_response(),
    }
}

async fn batch(Json(request): Json<BatchRequest>) -> Response {
    let mut out = BytesMut::new();
    out.extend_from_slice(&PREFACE);
    let frame = |out: &mut BytesMut, kind: FrameKind, status: u16, index: usize, b: &[u8]| {
        let index = u32::try_from(index).expect("small");
        out.extend_from_slice(&FrameHeader::new(kind, status, index, b.len() as u64).encode());
        out.put_slice(b);
    };
    for (i, item) in request.items.iter().enumerate() {
        match item {
            BatchItem::Ordinal(7) => {
                let p = serde_json::to_vec(&Problem::new(Code::NotFound, "7", "")).expect("json");
                frame(&mut out, FrameKind::Data, MORE, i, b"void");
                frame(&mut out, FrameKind::Error, 404, i, &p);
            }
            BatchItem::Ordinal(n) => {
                frame(&mut out, FrameKind::Data, MORE, i, b"ordinal ");
                frame(&mut out, FrameKind::Data, WHOLE, i, n.to_string().as_bytes());
            }
            BatchItem::Path(p) if p == "cut" => return cut(out),
            BatchItem::Path(p) if p == "none" => {}
            BatchItem::Path(p) if p == "skipped" => frame(&mut out, FrameKind::Sample, 0, i, b"{}"),
            _ => frame(&mut out, FrameKind::Data, WHOLE, i, &[b'x'; 5000]),
        }
    }
    frame(&mut out, FrameKind::End, 0, request.items.len(), b"");
    out.freeze().into_response()
}

fn cut(begun: BytesMut) -> Response {
    begun.freeze().into_response()
}

fn app(seen: Arc<Seen>) -> Router {
    Router::new()
        .route(routes::CHUNK, get(chunk))
        .route(routes::ENTRIES, get(table))
        .route(routes::BATCH, post(batch))
        .route(
            routes::INFO,
            any(|| async {
                Json(serde_json::json!({"name": "x", "version": "1",
            "formats": {"api": [2], "versions": [1], "frames": [1]},
            "limits": {"batch_items": 1, "batch_bytes": 1, "chunk_bytes": 1}}))
            }),
        )
        .route(routes::CLUSTER, get(|| async { "not json" }))
        .route(
            routes::ACCOUNTS,
            get(|sent: HeaderMap| async move {
                if sent.get(header::AUTHORIZATION).is_some_and(|v| v == "Bearer new") {
                    return Json(serde_json::json!({"accounts": [], "table_bytes": 7})).into_response();
                }
                problem(Code::Unauthorized, None)
            }),
        )
        .with_state(seen)
}

async fn serve() -> (Client, Arc<Seen>) {
    let seen = Arc::<Seen>::default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let endpoint: Endpoint = format!("http://{}", listener.local_addr().expect("addr")).parse().expect("url");
    let app = app(Arc::clone(&seen));
    tokio_util::task::TaskTracker::new().spawn(async move { axum::serve(listener, app).await });
    let config = ClientConfig {
        token: Some(TokenSource::Text("secret-token".into())),
        job: Some(JobName::new("train-7").expect("job")),
        io_timeout: Duration::from_secs(2),
        ..ClientConfig::new(endpoint, "mount")
    };
    assert!(!format!("{config:?}").contains("secret"), "tokens are not printed");
    (Client::new(config).expect("client"), seen)
}

fn hash(behaviour: u8) -> Hash {
    let mut h = Hash::of(&body(100));
    h.0[0] = behaviour;
    h
}

fn root() -> Root {
    Root(Hash::of(b"root"))
}

#[tokio::test]
async fn a_chunk_is_verified_and_its_request_carries_job_and_token() {
    let (client, seen) = serve().await;
    let h = Hash::of(&body(100));
    let chunk = client.chunk(root(), h, 100).await.expect("chunk");
    assert_eq!((chunk.hash(), chunk.bytes()), (h, &body(100)));
    let sent = seen.headers.lock()[0].clone();
    assert_eq!(sent[headers::JOB], "train-7");
    assert_eq!(sent[headers::COMPONENT], "mount");
    assert_eq!(sent[header::AUTHORIZATION], "Bearer secret-token");
    let e = client.chunk(root(), hash(0xff), 100).await.expect_err("other bytes than its name");
    assert!(matches!(&e, ClientError::Corrupt { .. }) && e.kind() == Kind::Corrupt, "{e}");
    assert_eq!(client.chunk_unchecked(root(), hash(0xff), 100).await.expect("unchecked"), body(100));
}

#[tokio::test]
async fn bodies_of_a_wrong_length_are_rejected() {
    let (client, seen) = serve().await;
    for behaviour in [1, 2, 0x0a] {
        let e = client.chunk_unchecked(root(), hash(behaviour), 100).await.expect_err("wrong length");
        assert!(matches!(e, ClientError::Protocol { .. }), "{behaviour}: {e}");
    }
    assert_eq!(seen.requests.load(Relaxed), 3, "a broken contract is not retried");
    for len in [0, (16 << 20) + 1] {
        assert!(matches!(client.chunk_unchecked(root(), hash(1), len).await, Err(ClientError::Config(_))));
    }
}

#[tokio::test]
async fn only_transient_errors_are_retried() {
    let (client, seen) = serve().await;
    for behaviour in [3, 4, 8] {
        seen.requests.store(0, Relaxed);
        client.chunk_unchecked(root(), hash(behaviour), 100).await.expect("after two refusals");
        assert_eq!(seen.requests.load(Relaxed), 3, "{behaviour}");
    }
    seen.requests.store(0, Relaxed);
    client.chunk_unchecked(root(), hash(0x0c), 100).await.expect("a cut body is retried");
    for (behaviour, code, kind) in [
        (5, Some(Code::OriginChanged), Kind::Corrupt),
        (6, Some(Code::NotFound), Kind::NotFound),
        (0x0d, Some(Code::Unknown), Kind::Corrupt),
        (0x0b, None, Kind::Corrupt),
    ] {
        seen.requests.store(0, Relaxed);
        let e = client.chunk_unchecked(root(), hash(behaviour), 100).await.expect_err("final");
        assert_eq!((e.code(), e.kind(), seen.requests.load(Relaxed)), (code, kind, 1), "{e}");
    }
    let e = client.chunk_unchecked(root(), hash(5), 100).await.expect_err("final");
    assert_eq!(e.hint(), Some("what to do"));
    assert!(e.to_string().contains("origin_changed"), "{e}");
    assert!(client.stats().retries >= 5 && client.stats().errors >= 5, "{:?}", client.stats());
}

#[tokio::test]
async fn every_call_ends_within_its_deadline() {
    let (client, _) = serve().await;
    let client = client.within(Duration::from_millis(600));
    for (behaviour, says) in [(7, "no answer within"), (9, "at its limit")] {
        let begun = Instant::now();
        let e = client.chunk_unchecked(root(), hash(behaviour), 100).await.expect_err("late");
        assert!(begun.elapsed() < Duration::from_millis(1500), "{:?}", begun.elapsed());
        assert!(e.to_string().contains(says), "{e}");
    }
    let closed = ClientConfig {
        io_timeout: Duration::from_millis(600),
        ..ClientConfig::new("http://127.0.0.1:1".parse().expect("url"), "cli")
    };
    let begun = Instant::now();
    let e = Client::new(closed).expect("client").cluster().await.expect_err("no server listens");
    assert!(e.is_unreachable() && e.kind() == Kind::Unavailable, "{e}");
    assert!(e.to_string().contains("http://127.0.0.1:1") && e.to_string().contains("refused"), "{e}");
    assert!(begun.elapsed() < Duration::from_millis(1500));
}

#[tokio::test]
async fn a_refused_connection_is_said_at_once_until_a_server_has_answered() {
    let patience = Duration::from_secs(20);
    for address in ["http://127.0.0.1:1", "http://localhost:1", "unix:/no/such/socket"] {
        let config = ClientConfig {
            io_timeout: patience,
            ..ClientConfig::new(address.parse().expect("address"), "cli")
        };
        let begun = Instant::now();
        let e = Client::new(config).expect("client").cluster().await.expect_err("no server listens");
        assert!(e.is_refused() && begun.elapsed() < patience / 2, "{address}: {e}, {:?}", begun.elapsed());
        let (what, advice) = e.parts();
        assert!(
            !what.contains("check that") && advice.is_some_and(|a| a.contains("fletch-server")),
            "{what}"
        );
    }
    // After an answer, a refused connection means that the server restarts: the call waits for it.
    let config = ClientConfig {
        io_timeout: Duration::from_millis(600),
        first_answer: FirstAnswer::received(),
        ..ClientConfig::new("http://127.0.0.1:1".parse().expect("address"), "loader")
    };
    let client = Client::new(config).expect("client");
    client.cluster().await.expect_err("no server listens");
    assert!(client.stats().retries > 0);
}

#[tokio::test]
async fn an_answer_of_another_program_or_release_is_reported() {
    let (client, _) = serve().await;
    let e = client.info().await.expect_err("another major");
    assert!(matches!(e, ClientError::Version { .. }) && e.to_string().contains("[2]"), "{e}");
    assert!(matches!(client.cluster().await.expect_err("no JSON"), ClientError::Protocol { .. }));
    let e = client.dataset(&DatasetName::new("d").expect("name")).await.expect_err("no such route");
    assert_eq!(e.kind(), Kind::NotFound);
}

#[tokio::test]
async fn tables_are_read_by_range_and_never_short() {
    let (client, _) = serve().await;
    let tables = client.tables(root(), LayoutId(Hash::of(b"layout")));
    let read = async |r| tables.read(Table::Entries, r).await;
    assert_eq!(read(TableRange::All).await.expect("all"), body(500));
    assert_eq!(read(TableRange::Range(10..20)).await.expect("range"), body(500).slice(10..20));
    assert_eq!(read(TableRange::Suffix(8)).await.expect("suffix"), body(500).slice(492..));
    assert_eq!(read(TableRange::Range(5..5)).await.expect("nothing"), Bytes::new());
    for r in [30..40, 50..60] {
        let e = read(TableRange::Range(r)).await.expect_err("not those bytes");
        assert!(e.message.starts_with("entries.parquet"), "{e}");
    }
    assert_eq!(
        tables.read(Table::Chunks, TableRange::All).await.expect_err("not served").kind,
        Kind::Invalid
    );
}

#[tokio::test]
async fn batches_give_each_item_its_own_outcome() {
    let (client, _) = serve().await;
    let items = vec![BatchItem::Ordinal(3), BatchItem::Ordinal(7), BatchItem::Path("a".into())];
    let mut batch = client.batch(root(), items, 10_000).await.expect("begins");
    let mut got = Vec::new();
    while let Some(piece) = batch.next().await.expect("the next item") {
        got.push((piece.index, piece.outcome.map_err(|p| p.code)));
    }
    assert_eq!(got[0], (0, Ok(Bytes::from_static(b"ordinal 3"))));
    assert_eq!(got[1], (1, Err(Code::NotFound)), "what came before an error is void");
    assert_eq!((got[2].0, got.len()), (2, 3));
    let long = client.batch(root(), vec![BatchItem::Path("a".into())], 4999).await;
    assert!(long.expect("begins").next().await.is_err(), "an item past the bound");
    let cut = vec![BatchItem::Ordinal(1), BatchItem::Path("cut".into())];
    let mut batch = client.batch(root(), cut, 10_000).await.expect("begins");
    assert!(batch.next().await.expect("first").is_some());
    assert!(batch.next().await.expect_err("cut off").is_unreachable());
    for unanswered in ["none", "skipped"] {
        let items = vec![BatchItem::Ordinal(1), BatchItem::Path(unanswered.into())];
        let mut batch = client.batch(root(), items, 10_000).await.expect("begins");
        assert!(batch.next().await.expect("first").is_some());
        for _ in 0..2 {
            let e = batch.next().await.expect_err("an end before all items");
            assert!(matches!(&e, ClientError::Protocol { .. }) && e.to_string().contains("1 items"), "{e}");
        }
    }
}

#[tokio::test]
async fn a_unix_socket_works_as_tcp_does() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("s");
    let listener = tokio::net::UnixListener::bind(&path).expect("bind");
    let app = app(Arc::default());
    tokio_util::task::TaskTracker::new().spawn(async move { axum::serve(listener, app).await });
    let endpoint: Endpoint = format!("unix:{}", path.display()).parse().expect("endpoint");
    let client = Client::new(ClientConfig::new(endpoint, "mount")).expect("client");
    let h = Hash::of(&body(100));
    assert_eq!(client.chunk(root(), h, 100).await.expect("chunk").hash(), h);
}

#[tokio::test]
async fn a_rotated_token_file_is_read_again_after_a_401_once() {
    let (plain, _) = serve().await;
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("token");
    std::fs::write(&path, "old").expect("write");
    let config = ClientConfig {
        token: Some(TokenSource::File(path.clone())),
        ..ClientConfig::of(plain.servers().clone(), "cli")
    };
    let client = Client::new(config).expect("client");
    let e = client.accounts().await.expect_err("refused");
    assert!(e.is_denied() && e.code() == Some(Code::Unauthorized), "{e}");
    assert_eq!(client.stats().requests, 1, "the same token is not sent again");
    std::fs::write(&path, "other").expect("write");
    assert!(client.accounts().await.expect_err("refused").is_denied());
    assert_eq!(client.stats().requests, 3);
    std::fs::write(&path, "new").expect("write");
    assert_eq!(client.accounts().await.expect("known").table_bytes, 7);
    client.accounts().await.expect("known from now on");
    assert_eq!((client.stats().requests, client.stats().retries), (6, 0));
}
