//! Tests the choice between server and origin: only a server that does not answer leads to the origin.

use axum::{Json, Router, http::StatusCode, http::header, response::IntoResponse, routing::get};
use bytes::Bytes;
use fletch_api::{API_MAJOR, Code, Problem, routes};
use fletch_client::fallback::{Fallback, OriginLocation, OriginTables, resolve};
use fletch_client::{Client, ClientConfig, ClientError};
use fletch_core::manifest::FORMAT_MAJOR;
use fletch_core::{Hash, Kind, LayoutId, Root};
use fletch_origin::{OriginLimits, OriginUri, Origins};
use fletch_tables::{Table, TableRange, TableSource};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn root() -> Root {
    Root(Hash::of(b"root"))
}

/// Returns a directory with one object, and a fallback from the server at `url` to it.
fn fallback(url: &str, io_timeout: Duration) -> (TempDir, Fallback) {
    let dir = TempDir::new().expect("tempdir");
    std::fs::write(dir.path().join("object"), b"0123456789").expect("write");
    let origins = Origins::new(Vec::new(), OriginLimits::default()).expect("limits");
    let uri = OriginUri::parse(dir.path().to_str().expect("utf-8")).expect("uri");
    let data = origins.open(&uri).expect("local");
    let config = ClientConfig { io_timeout, ..ClientConfig::new(url.parse().expect("url"), "mount") };
    let client = Client::new(config).expect("client");
    (dir, Fallback::new(Some(client), origins, data.clone(), data))
}

async fn read(fallback: &Fallback, location: &OriginLocation) -> Result<Bytes, ClientError> {
    let ask = async |client: Client| client.chunk_unchecked(root(), Hash::of(b"x"), 4).await;
    fallback.bytes_unchecked(location, 4, ask).await
}

fn location(offset: u64) -> OriginLocation {
    OriginLocation::DatasetObject { path: "object".into(), offset }
}

/// Starts a server that gives the same answer to every request and counts requests.
async fn serve(code: Code, retry_after: u64) -> (String, Arc<AtomicU64>) {
    let asked = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&asked);
    let answer = move || {
        counter.fetch_add(1, Relaxed);
        async move {
            let p = Problem::new(code, "what happened", "what to do");
            let status = StatusCode::from_u16(p.status).expect("status");
            (status, [(header::RETRY_AFTER, retry_after.to_string())], Json(p)).into_response()
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let url = format!("http://{}", listener.local_addr().expect("addr"));
    let app = Router::new().fallback(get(answer));
    tokio_util::task::TaskTracker::new().spawn(async move { axum::serve(listener, app).await });
    (url, asked)
}

#[tokio::test(flavor = "multi_thread")]
async fn no_answer_of_the_server_leads_to_the_origin() {
    for (code, retry_after) in [
        (Code::Overloaded, 3600),
        (Code::NotFound, 0),
        (Code::OriginChanged, 0),
        (Code::OriginUnavailable, 3600),
    ] {
        let (url, asked) = serve(code, retry_after).await;
        let (_dir, fallback) = fallback(&url, Duration::from_millis(400));
        let got = read(&fallback, &location(0)).await;
        assert!(matches!(&got, Err(ClientError::Problem { problem, .. }) if problem.code == code), "{got:?}");
        let tables = fallback.tables(root(), LayoutId(Hash::of(b"l")));
        assert!(tables.read(Table::Manifest, TableRange::All).await.is_err());
        assert!(!fallback.is_away() && asked.load(Relaxed) >= 2, "{code:?}");
        assert_eq!(fallback.origin_stats().requests, 0, "{code:?} fell through");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_connection_reads_the_origin_and_later_reads_do_not_wait() {
    // A port that was bound and closed: no server listens there.
    let free = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind").local_addr().expect("addr");
    let (_dir, fallback) = fallback(&format!("http://{free}"), Duration::from_secs(30));
    let begun = Instant::now();
    let got = read(&fallback, &location(3)).await.expect("from the origin");
    assert_eq!(&got[..], b"3456");
    assert!(begun.elapsed() < Duration::from_secs(10), "it did not wait for its deadline");
    assert!(fallback.is_away());
    read(&fallback, &location(0)).await.expect("from the origin");
    assert_eq!((fallback.losses(), fallback.origin_stats().bytes_read), (1, 8));
    // If the origin lacks the object too, the error names the server and the origin.
    let gone = OriginLocation::TablesObject { key: "fletch/chunks/aa/aa".into(), offset: 0 };
    let e = read(&fallback, &gone).await.expect_err("nobody has it");
    assert_eq!(e.kind(), Kind::NotFound);
    assert!(e.to_string().contains("does not answer") && e.to_string().contains("not found"), "{e}");
    let past = read(&fallback, &location(8)).await;
    assert!(past.is_err(), "a short object is an error, not a short chunk");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_is_used_again() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("addr");
    drop(listener);
    let (_dir, fallback) = fallback(&format!("http://{addr}"), Duration::from_secs(5));
    let _ = read(&fallback, &location(0)).await.expect("from the origin");
    let watching = {
        let f = fallback.clone();
        async move { f.watch().await }
    };
    let info = || async {
        Json(serde_json::json!({
            "name": "fletch-server",
            "version": "0",
            "formats": {"api": [API_MAJOR], "versions": [FORMAT_MAJOR], "frames": [1]},
            "limits": {"batch_items": 1, "batch_bytes": 1, "chunk_bytes": 1}
        }))
    };
    let listener = tokio::net::TcpListener::bind(addr).await.expect("the same address");
    let app = Router::new().route(routes::INFO, get(info));
    let served = async move { axum::serve(listener, app).await };
    let back = async {
        while fallback.is_away() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        () = watching => unreachable!("it watches for ever"),
        e = served => panic!("{e:?}"),
        () = back => {}
        () = tokio::time::sleep(Duration::from_secs(20)) => panic!("still away"),
    }
}

#[tokio::test]
async fn an_origin_says_what_a_tag_is() {
    let (dir, _) = fallback("http://127.0.0.1:9", Duration::from_secs(1));
    let origins = Origins::new(Vec::new(), OriginLimits::default()).expect("limits");
    let origin =
        origins.open(&OriginUri::parse(dir.path().to_str().expect("utf-8")).expect("uri")).expect("open");
    for (version, kind) in
        [("latest", Kind::NotFound), (&root().to_string(), Kind::NotFound), ("..", Kind::Invalid)]
    {
        assert_eq!(resolve(&origin, version).await.expect_err("nothing there").kind(), kind, "{version}");
    }
    let tags = dir.path().join("fletch/tags");
    std::fs::create_dir_all(&tags).expect("mkdir");
    std::fs::write(tags.join("latest"), vec![b' '; 70_000]).expect("write");
    assert_eq!(resolve(&origin, "latest").await.expect_err("too long").kind(), Kind::Corrupt);
    let tables = OriginTables::new(origin, root(), LayoutId(Hash::of(b"l")));
    let e = tables.read(Table::Entries, TableRange::Suffix(8)).await.expect_err("no table");
    assert_eq!(e.kind, Kind::NotFound);
}
