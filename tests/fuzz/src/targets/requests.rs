//! Requests to a running server: methods, paths, queries, headers and bodies of every route.

use crate::{plant, scratch};
use fletch_api::{Code, Problem};
use fletch_core::{
    Hash,
    manifest::{Entry, LayoutParams, SampleRule, Slice},
};
use fletch_server::{
    app::{self, Running},
    config::{self, Action, Environment},
};
use fletch_tables::{NewRow, PinRow, Provenance, TablesWriter, TagDoc, paths};
use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::runtime::{Builder, Runtime};

/// How long a reply may take. A request may wait on purpose, and is then given up.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);
/// The dataset is registered again after so many requests, which may have removed it.
const REGISTER_EVERY: u64 = 64;

/// A server with one small dataset.
pub(super) struct Server {
    _runtime: Runtime,
    _running: Running,
    pub socket: PathBuf,
    tree: PathBuf,
    pub root: String,
    layout: String,
    requests: AtomicU64,
}

pub(super) static SERVER: LazyLock<Server> = LazyLock::new(|| {
    let tree = scratch::path("tree");
    let (root, layout) = index(&tree);
    let socket = scratch::path("s.sock");
    let dir = scratch::path("server").display().to_string();
    let args = [
        "fletch-server".to_owned(),
        "--listen=127.0.0.1:0".to_owned(),
        "--memory=192MiB".to_owned(),
        format!("--state-dir={dir}/state"),
        format!("--cache-dir={dir}/cache"),
        "--cache-size=64MiB".to_owned(),
        format!("--socket={}", socket.display()),
    ];
    let config = match config::read(args, &Environment::default()) {
        Ok(Action::Serve(config)) => *config,
        Ok(_) => panic!("another action"),
        Err(e) => panic!("{e}"),
    };
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let running = runtime.block_on(app::start(config)).unwrap_or_else(|e| panic!("the server: {e}"));
    Server { _runtime: runtime, _running: running, socket, tree, root, layout, requests: AtomicU64::new(0) }
});

/// Makes and indexes a small tree. Returns its root and layout.
fn index(tree: &Path) -> (String, String) {
    let files = [("a.txt", &b"hello"[..]), ("b/c.txt", b"world!"), ("empty", b"")];
    let work = scratch::path("tables");
    std::fs::create_dir_all(&work).expect("a directory");
    let mut writer = TablesWriter::create(&work, SampleRule::file(), LayoutParams::INDEX).expect("a writer");
    for (name, bytes) in files {
        let at = tree.join(name);
        std::fs::create_dir_all(at.parent().expect("a parent")).expect("a directory");
        std::fs::write(&at, bytes).expect("a file");
        let pin = fletch_origin::local::pin_of(&std::fs::metadata(&at).expect("metadata"));
        let (hash, len) = (Hash::of(bytes), u32::try_from(bytes.len()).unwrap_or(0));
        let slices =
            if bytes.is_empty() { vec![] } else { vec![Slice { chunk: hash, chunk_offset: 0, len }] };
        let pin = PinRow { size: pin.size, mtime_ns: pin.mtime_ns, etag: pin.etag };
        writer.push(NewRow::indexed(Entry::file(name, len.into(), hash), slices, &pin)).expect("a row");
    }
    let about = Provenance {
        created_unix_ns: 1_700_000_000_000_000_007,
        indexed_at_ns: 1_700_000_000_000_000_000,
        tool: "fletch-fuzz".into(),
        origin: None,
        faults: Vec::new(),
    };
    let written = writer.finish(about).expect("tables");
    let put = |name: &str, bytes: &[u8]| {
        let at = tree.join(name);
        std::fs::create_dir_all(at.parent().expect("a parent")).expect("a directory");
        std::fs::write(at, bytes).expect("a file");
    };
    for (name, from) in &written.files {
        put(name, &std::fs::read(from).expect("a table"));
    }
    let tag = TagDoc::new(written.root, written.layout, 7).to_bytes().expect("a tag");
    put(&paths::tag(&"latest".parse().expect("a name")), &tag);
    (written.root.to_string(), written.layout.to_string())
}

/// Requests for every route. `ROOT`, `LAYOUT` and `TREE` stand for those of the dataset.
const SEEDS: &[&str] = &[
    "GET /v1/datasets\n\n",
    "POST /v1/datasets\n\n{\"name\":\"d\",\"uri\":\"TREE\"}",
    "GET /v1/datasets/d\n\n",
    "GET /v1/datasets/d/versions/latest\n\n",
    "GET /v1/versions/ROOT/files/a.txt\nRange: bytes=1-3\nIf-Range: \"x\"\n\n",
    "GET /v1/versions/ROOT/files/b/c.txt\nIf-None-Match: \"x\"\nIf-Match: \"y\"\n\n",
    "GET /v1/versions/ROOT/manifest.json\n\n",
    "GET /v1/versions/ROOT/entries.parquet\nRange: bytes=-9\n\n",
    "GET /v1/versions/ROOT/layouts/LAYOUT/layout.json\n\n",
    "POST /v1/versions/ROOT/batch\nAccept: application/x-tar\n\n{\"items\":[{\"path\":\"a.txt\"},\
        {\"ordinal\":1}]}",
    "POST /v1/warmups\n\n{\"dataset\":\"d\",\"version\":\"latest\",\"pin_s\":1}",
    "GET /v1/warmups\n\n",
    "POST /v1/jobs\n\n{\"name\":\"j\",\"dataset\":\"d\",\"order\":\"strict\",\"world\":\
        {\"ranks\":1,\"batch\":1,\"tail\":\"keep\"}}",
    "POST /v1/jobs\n\n{\"name\":\"k\",\"dataset\":\"d\",\"plan\":{\"base\":{\"keys\":[\"a.txt\"]}},\
        \"world\":{\"ranks\":1,\"batch\":1,\"tail\":\"keep\"}}",
    "GET /v1/jobs\n\n",
    "POST /v1/jobs/JOB/epochs/0/leases\n\n{\"rank\":0,\"sequence\":0,\"want\":2}",
    "POST /v1/jobs/JOB/epochs/0/acks\n\n{\"rank\":0,\"acks\":[{\"lease\":1,\"upto\":1}]}",
    "GET /v1/jobs/JOB/epochs/0/state\n\n",
    "PUT /v1/jobs/JOB/epochs/0/state\n\nFLETCHLG",
    "POST /v1/jobs/JOB/epochs/0/checkpoint\n\n{\"commit\":1}",
    "POST /v1/jobs/JOB/epochs/0/rollback\n\n{}",
    "GET /v1/jobs/JOB/epochs/0/receipt\n\n",
    "GET /v1/jobs/JOB/epochs/0/ledger\n\n",
    "GET /v1/info\nAuthorization: Bearer x\nFletch-Job: j\n\n",
    "GET /v1/accounts?since=1\n\n",
    "GET /v1/cluster\n\n",
    "GET /metrics\n\n",
];

pub fn seeds() -> Vec<Vec<u8>> {
    SEEDS.iter().map(|s| s.as_bytes().to_vec()).collect()
}

/// A request is answered without a defect: no broken connection, no status 500, and each error is a problem
/// with the status of its code.
pub fn run(input: &[u8]) -> bool {
    let server = &*SERVER;
    if server.requests.fetch_add(1, Ordering::Relaxed).is_multiple_of(REGISTER_EVERY) {
        register(server);
    }
    let Some(bytes) = parsed(input) else { return false };
    let Some(reply) = send(server, &bytes) else { return false };
    let shown = || String::from_utf8_lossy(&reply[..reply.len().min(2000)]).into_owned();
    let asked = || String::from_utf8_lossy(&bytes).into_owned();
    let status = reply.get(9..12).and_then(|s| std::str::from_utf8(s).ok()?.parse::<u16>().ok());
    let status = status.unwrap_or_else(|| panic!("no reply: {}\nto {}", shown(), asked()));
    assert_ne!(status, 500, "{}\nto {}", shown(), asked());
    let at = reply.windows(4).position(|w| w == b"\r\n\r\n").map_or(reply.len(), |at| at + 4);
    if status >= 400 && !asked().starts_with("HEAD") && reply[..at].windows(12).any(|w| w == b"problem+json")
    {
        let problem: Problem = serde_json::from_slice(&reply[at..])
            .unwrap_or_else(|e| panic!("the problem cannot be read: {e}: {}", shown()));
        assert_eq!((problem.status, problem.code.status()), (status, status), "{}", shown());
        assert_ne!(problem.code, Code::Internal, "{}", shown());
    }
    plant::bug(status == 206 && !asked().contains("bytes=-9"));
    status < 400
}

/// Registers the dataset. A request that removes it is among the inputs.
pub(super) fn register(server: &Server) {
    let body = SEEDS[1].split("\n\n").nth(1).unwrap_or("");
    drop(send(server, &request("POST", "/v1/datasets", &[], body)));
}

/// Returns a sound HTTP request with the method, target, headers and body of an input.
fn parsed(input: &[u8]) -> Option<Vec<u8>> {
    let at = input.windows(2).position(|w| w == b"\n\n")?;
    let (head, body) = (std::str::from_utf8(&input[..at]).ok()?, &input[at + 2..]);
    let mut lines = head.lines();
    let (method, target) = lines.next()?.split_once(' ')?;
    let method = http::Method::from_bytes(method.as_bytes()).ok()?;
    // A method without a reply of its own would leave the connection to another protocol.
    if method == http::Method::CONNECT || method == http::Method::HEAD {
        return None;
    }
    let target = fill(target);
    let target =
        target.parse::<http::Uri>().ok().filter(|u| u.path().starts_with('/') && u.host().is_none())?;
    let mut headers = Vec::new();
    for (name, value) in lines.filter_map(|l| l.split_once(": ")) {
        let name = name.parse::<http::HeaderName>().ok()?;
        let framing = ["content-length", "transfer-encoding", "connection", "host", "upgrade", "expect"];
        if !framing.contains(&name.as_str()) {
            headers
                .push((name.to_string(), http::HeaderValue::from_str(value).ok()?.to_str().ok()?.to_owned()));
        }
    }
    let mut out = head_of(method.as_str(), &target.to_string(), &headers, None);
    let body = std::str::from_utf8(body).map(|b| fill(b).into_bytes()).unwrap_or_else(|_| body.to_vec());
    out.extend_from_slice(format!("Content-Length: {}\r\n\r\n", body.len()).as_bytes());
    out.extend_from_slice(&body);
    Some(out)
}

fn fill(text: &str) -> String {
    let job = fletch_core::Hash::of(b"default\0default\0j").to_string();
    let tree = SERVER.tree.display().to_string();
    text.replace("ROOT", &SERVER.root)
        .replace("LAYOUT", &SERVER.layout)
        .replace("TREE", &tree)
        .replace("JOB", &job[..24])
}

fn head_of(method: &str, target: &str, headers: &[(String, String)], kind: Option<&str>) -> Vec<u8> {
    let kind = kind.unwrap_or("application/json");
    let mut out = format!("{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
    if !headers.iter().any(|(n, _)| n == "content-type") {
        out += &format!("Content-Type: {kind}\r\n");
    }
    headers.iter().for_each(|(n, v)| out += &format!("{n}: {v}\r\n"));
    out.into_bytes()
}

pub(super) fn request(method: &str, target: &str, headers: &[(String, String)], body: &str) -> Vec<u8> {
    let mut out = head_of(method, target, headers, None);
    let body = fill(body);
    out.extend_from_slice(format!("Content-Length: {}\r\n\r\n{body}", body.len()).as_bytes());
    out
}

/// Sends a request and returns the whole reply, or `None` if the server still waits.
pub(super) fn send(server: &Server, request: &[u8]) -> Option<Vec<u8>> {
    let mut stream = UnixStream::connect(&server.socket).expect("the server accepts");
    stream.set_read_timeout(Some(REPLY_TIMEOUT)).expect("a timeout");
    // The server may answer and close before it has read everything.
    drop(stream.write_all(request));
    let mut reply = Vec::new();
    match stream.read_to_end(&mut reply) {
        Ok(_) => Some(reply),
        Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => None,
        Err(_) => Some(reply),
    }
}
