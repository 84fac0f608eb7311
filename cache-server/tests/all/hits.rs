//! Tests hit connections, by their bytes: what is here, what is not, and how they end.

use crate::common::{Indexed, Node, Tree, content};
use fletch_api::{
    hits::{ANSWER_HEAD_BYTES, HitAnswer, HitRequest, PROTOCOL, Wanted},
    routes,
};
use fletch_core::{DatasetName, Hash, JobName, Root, groups::GroupHashes};
use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UnixStream},
    time::timeout,
};

/// Sends the request that begins a hit connection, with further header lines. Returns the head of the reply.
pub async fn upgrade<S>(stream: &mut S, more: &str) -> String
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    let path = routes::HITS;
    let head = format!(
        "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\n\
         fletch-component: mount\r\n{more}\r\n"
    );
    stream.write_all(head.as_bytes()).await.expect("write");
    let mut got = Vec::new();
    while !got.ends_with(b"\r\n\r\n") {
        got.push(stream.read_u8().await.expect("a reply"));
    }
    String::from_utf8(got).expect("text")
}

pub fn protocol() -> String {
    format!("upgrade: {PROTOCOL}\r\n")
}

/// An open hit connection.
pub struct Hits(pub UnixStream);

impl Hits {
    pub async fn open(socket: &Path, more: &str) -> Self {
        let mut stream = UnixStream::connect(socket).await.expect("connect");
        let head = upgrade(&mut stream, &(protocol() + more)).await;
        assert!(head.starts_with("HTTP/1.1 101"), "{head}");
        assert!(head.contains(&format!("upgrade: {PROTOCOL}")), "{head}");
        Hits(stream)
    }

    /// Asks, and returns the bytes if they are here.
    pub async fn ask(&mut self, request: &HitRequest<'_>) -> Option<Vec<u8>> {
        let mut sent = Vec::new();
        request.encode(&mut sent).expect("short enough");
        self.0.write_all(&sent).await.expect("write");
        let mut head = [0; ANSWER_HEAD_BYTES];
        self.0.read_exact(&mut head).await.expect("an answer");
        match HitAnswer::parse(head).expect("a head") {
            HitAnswer::NotHere => None,
            HitAnswer::InWindow(len) | HitAnswer::InSlab(len) => panic!("nobody asked for {len} bytes there"),
            HitAnswer::Here(len) => {
                let mut bytes = vec![0; len as usize];
                self.0.read_exact(&mut bytes).await.expect("bytes");
                Some(bytes)
            }
        }
    }

    /// Whether the server ends the connection soon.
    pub async fn ends(&mut self) -> bool {
        let mut byte = [0];
        let read = timeout(Duration::from_secs(5), self.0.read(&mut byte)).await;
        matches!(read, Ok(Ok(0) | Err(_)))
    }
}

pub fn chunk(root: Root, bytes: &[u8]) -> HitRequest<'static> {
    HitRequest {
        root,
        wanted: Wanted::Chunk,
        hash: Hash::of(bytes),
        size: u32::try_from(bytes.len()).expect("short"),
        place: None,
        job: Some(JobName::new("train").expect("a name")),
        dataset: None,
    }
}

pub fn socket(node: &Node) -> PathBuf {
    node.running.socket.clone().expect("a socket")
}

pub async fn read(node: &Node, path: &str) {
    read_through(node, path, None).await;
}

/// Reads by HTTP, through a dataset if one is named.
async fn read_through(node: &Node, path: &str, dataset: Option<&str>) {
    let ask = node.get(path).header("fletch-job", "first");
    let ask = dataset.into_iter().fold(ask, |ask, name| ask.header("fletch-dataset", name));
    let reply = ask.send().await.expect("a reply");
    assert!(reply.status().is_success(), "{path}: {}", reply.status());
    reply.bytes().await.expect("bytes");
}

#[tokio::test]
async fn what_is_in_memory_is_here_and_counted_and_what_is_not_is_not_fetched() {
    let tree = Tree::usual();
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let mut hits = Hits::open(&socket(&node), "").await;
    let bytes = &tree.files["a.bin"];
    let request = chunk(root, bytes);
    assert!(hits.ask(&request).await.is_none(), "the version is not even open");
    assert_eq!(node.metric("fletch_chunk_reads_total{tier=\"origin\"}").await, 0);
    read(&node, &routes::chunk(root, Hash::of(bytes))).await;
    for _ in 0..3 {
        assert!(hits.ask(&request).await.as_ref() == Some(bytes));
    }
    let dataset = DatasetName::new("d").expect("a name");
    let named = HitRequest { dataset: Some(dataset), ..request.clone() };
    assert!(hits.ask(&named).await.is_none(), "the version is not open through this dataset");
    read_through(&node, &routes::chunk(root, Hash::of(bytes)), Some("d")).await;
    assert!(hits.ask(&named).await.as_ref() == Some(bytes));
    for wrong in [
        HitRequest { size: request.size - 1, ..request.clone() },
        HitRequest { hash: Hash::of(b"other"), ..request.clone() },
        HitRequest { root: Root(Hash::of(b"other")), ..request.clone() },
        HitRequest { wanted: Wanted::File("no/such"), ..request.clone() },
        HitRequest { wanted: Wanted::File("../a.bin"), ..request.clone() },
    ] {
        assert!(hits.ask(&wrong).await.is_none(), "{wrong:?}");
    }
    let of_job = node.accounts().await;
    let mut counted = 0;
    for account in &of_job.accounts {
        if account.key.job.as_str() == "train" {
            assert_eq!(account.key.tier, fletch_api::ByteTier::Memory);
            counted += account.bytes;
        }
    }
    assert_eq!(counted, 4 * bytes.len() as u64, "I8");
    assert_eq!(node.metric("fletch_chunk_reads_total{tier=\"origin\"}").await, 1, "I3");
    assert_eq!(node.metric("fletch_requests_total{route=\"/v1/hits\",status=\"200\"}").await, 4);
    assert_eq!(node.metric("fletch_requests_total{route=\"/v1/hits\",status=\"204\"}").await, 7);
    node.running.shutdown().await;
}

#[tokio::test]
async fn the_disk_is_read_too_and_files_of_a_pack_by_their_path() {
    let mut tree = Tree::new([("long", content(9, 5_000_000))]);
    for i in 0..40 {
        let bytes = content(100 + i, 60_000);
        fs::write(tree.path(&format!("f{i:02}")), &bytes).expect("write");
        tree.files.insert(format!("f{i:02}"), bytes);
    }
    let to = tempfile::tempdir().expect("a directory");
    let (packed, _) = tree.pack_to(to.path(), false);
    let state = tempfile::tempdir().expect("a directory");
    let state_path = state.path().display().to_string();
    let args = [format!("--state-dir={state_path}/state"), format!("--cache-dir={state_path}/cache")];
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let node = Node::start(&args).await;
    node.register("d", &tree.uri(), Some(&to.path().display().to_string())).await;
    let root = packed.root();
    for path in tree.files.keys() {
        read(&node, &routes::file(root, path)).await;
    }
    let fetched = node.metric("fletch_chunk_reads_total{tier=\"origin\"}").await;
    node.running.shutdown().await;
    // The next server has all of it on disk, and nothing in memory.
    let node = Node::start(&args).await;
    let mut hits = Hits::open(&socket(&node), "").await;
    let file =
        |path: &'static str| HitRequest { wanted: Wanted::File(path), ..chunk(root, &tree.files[path]) };
    assert!(hits.ask(&file("f07")).await.is_none(), "the version is not open");
    read(&node, &routes::file(root, "f00")).await;
    for _ in 0..2 {
        for path in ["f07", "f31"] {
            assert!(hits.ask(&file(path)).await.as_ref() == Some(&tree.files[path]), "{path}");
        }
    }
    assert!(hits.ask(&file("long")).await.is_none(), "it lies in several chunks");
    let head = &tree.files["long"][..4 << 20];
    assert!(hits.ask(&chunk(root, head)).await.as_deref() == Some(head), "its first chunk");
    assert_eq!(node.metric("fletch_chunk_reads_total{tier=\"origin\"}").await, 0, "of {fetched} before");
    node.running.shutdown().await;
}

#[tokio::test]
async fn parts_of_a_chunk_are_here_with_the_hashes_that_prove_them() {
    let tree = Tree::new([("long", content(7, 9 << 20)), ("short", content(8, 100_000))]);
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let mut hits = Hits::open(&socket(&node), "").await;
    let bytes = &tree.files["long"][4 << 20..8 << 20];
    let whole = chunk(root, bytes);
    let part = |from: u32, size| HitRequest { wanted: Wanted::Part(from), size, ..whole.clone() };
    let groups = HitRequest { wanted: Wanted::Groups, size: 256 * 32, ..whole.clone() };
    assert!(hits.ask(&part(0, 100)).await.is_none() && hits.ask(&groups).await.is_none(), "nothing was read");
    read(&node, &routes::chunk(root, whole.hash)).await;
    let hashes = hits.ask(&groups).await.expect("learned when the chunk was hashed");
    let known =
        std::sync::Arc::new(GroupHashes::check(whole.hash, 4 << 20, &hashes).expect("they make the name"));
    for range in [0..100, 4095..70_000, (4 << 20) - 1..4 << 20] {
        let run = known.run(&range).expect("inside");
        let at = run.range();
        let from = u32::try_from(at.start).expect("small");
        let got = hits.ask(&part(from, run.len())).await.expect("here");
        assert!(got == bytes[at], "{range:?}");
    }
    for wrong in [
        part(4 << 20, 1),
        part((4 << 20) - 10, 11),
        part(u32::MAX, u32::MAX),
        HitRequest { hash: Hash::of(b"other"), ..part(0, 100) },
        HitRequest { root: Root(Hash::of(b"other")), ..part(0, 100) },
        HitRequest { size: 256 * 32 - 1, ..groups.clone() },
        HitRequest { hash: Hash::of(&tree.files["short"]), ..groups.clone() },
    ] {
        assert!(hits.ask(&wrong).await.is_none(), "{wrong:?}");
    }
    let counted: u64 = node
        .accounts()
        .await
        .accounts
        .iter()
        .filter(|a| a.key.job.as_str() == "train")
        .map(|a| a.bytes)
        .sum();
    assert_eq!(counted, (16 << 10) + (80 << 10) + (16 << 10), "I8: the groups, and no hashes");
    assert_eq!(node.metric("fletch_chunk_reads_total{tier=\"origin\"}").await, 1, "I3");
    node.running.shutdown().await;
}

#[tokio::test]
async fn short_files_of_this_machine_are_here_hashed_counted_and_kept() {
    let mut tree = Tree::new([("long", content(5, 300_000)), ("open", content(6, 10))]);
    for i in 0..20 {
        let bytes = content(100 + i, 60_000);
        fs::write(tree.path(&format!("f{i:02}")), &bytes).expect("write");
        tree.files.insert(format!("f{i:02}"), bytes);
    }
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    read(&node, &routes::file(root, "open")).await;
    let mut hits = Hits::open(&socket(&node), "").await;
    for tier in ["origin", "memory"] {
        let name = format!("fletch_chunk_reads_total{{tier=\"{tier}\"}}");
        let before = node.metric(&name).await;
        for i in 0..20 {
            let bytes = &tree.files[&format!("f{i:02}")];
            assert!(hits.ask(&chunk(root, bytes)).await.as_ref() == Some(bytes), "{i} from {tier}");
        }
        assert_eq!(node.metric(&name).await, before + 20, "{tier}");
    }
    let long = &tree.files["long"];
    assert!(hits.ask(&chunk(root, long)).await.is_none(), "a long one is read by a thread that may wait");
    // A file that changed keeps its size, or not: neither is here, and no wrong byte is sent.
    for (path, now) in [("f00", content(1, 60_000)), ("f01", content(2, 59_999))] {
        fs::write(tree.path(path), now).expect("write");
    }
    fs::remove_file(tree.path("f02")).expect("remove");
    node.running.shutdown().await;
    let node = Node::serving(&tree, &["--cache-size=0"]).await;
    read(&node, &routes::file(root, "open")).await;
    let mut hits = Hits::open(&socket(&node), "").await;
    for path in ["f00", "f01", "f02"] {
        assert!(hits.ask(&chunk(root, &tree.files[path])).await.is_none(), "{path}");
    }
    let bytes = &tree.files["f03"];
    assert!(hits.ask(&chunk(root, bytes)).await.as_ref() == Some(bytes));
    let reply = node.get(&routes::file(root, "f00")).send().await.expect("a reply");
    assert_eq!(reply.status().as_u16(), 502, "by HTTP it says what is wrong");
    node.running.shutdown().await;
}

#[tokio::test]
async fn i7_each_request_is_authenticated_and_foreign_is_absent() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tokens, data) = (dir.path().join("tokens.toml"), dir.path().join("data"));
    let line = |t: &str| format!("[[token]]\nhash = \"{}\"\ntenant = \"{t}\"\n", Hash::of(t.as_bytes()));
    fs::write(&tokens, line("a") + &line("b")).expect("write");
    fs::create_dir(&data).expect("mkdir");
    let tree = Tree::new_in(&data, [("a.bin", content(1, 5000))]);
    let Indexed { written } = tree.index();
    let args = [format!("--auth-tokens={}", tokens.display()), format!("--local-dirs={}=*", data.display())];
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut node = Node::start(&args).await;
    node.sign("a");
    node.register("d", &tree.uri(), None).await;
    let bytes = &tree.files["a.bin"];
    read(&node, &routes::chunk(written.root, Hash::of(bytes))).await;
    let request = chunk(written.root, bytes);
    let mut of_a = Hits::open(&socket(&node), "authorization: Bearer a\r\n").await;
    let mut of_b = Hits::open(&socket(&node), "authorization: Bearer b\r\n").await;
    assert!(of_a.ask(&request).await.as_ref() == Some(bytes));
    assert!(of_b.ask(&request).await.is_none(), "of another domain");
    let mut stranger = UnixStream::connect(socket(&node)).await.expect("connect");
    let head = upgrade(&mut stranger, &protocol()).await;
    assert!(head.starts_with("HTTP/1.1 401"), "{head}");
    // The token is revoked while the connection is open.
    fs::write(&tokens, line("b")).expect("write");
    for _ in 0..100 {
        if of_a.ask(&request).await.is_none() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(of_a.ask(&request).await.is_none());
    node.running.shutdown().await;
}

#[tokio::test]
async fn only_the_unix_socket_and_only_this_protocol() {
    let tree = Tree::usual();
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let mut tcp = TcpStream::connect(node.addr()).await.expect("connect");
    let head = upgrade(&mut tcp, &protocol()).await;
    assert!(head.starts_with("HTTP/1.1 400"), "{head}");
    for older in ["upgrade: fletch-hits/2", "upgrade: fletch-hits/3"] {
        let mut unix = UnixStream::connect(socket(&node)).await.expect("connect");
        let head = upgrade(&mut unix, &format!("{older}\r\n")).await;
        assert!(head.starts_with("HTTP/1.1 101") && head.contains(older), "{head}");
    }
    for other in ["", "upgrade: fletch-hits/1\r\n", "upgrade: websocket\r\n"] {
        let mut unix = UnixStream::connect(socket(&node)).await.expect("connect");
        let head = upgrade(&mut unix, other).await;
        assert!(head.starts_with("HTTP/1.1 400"), "{other}: {head}");
    }
    node.running.shutdown().await;
}

#[tokio::test]
async fn i6_a_client_that_breaks_the_protocol_idles_or_does_not_read_loses_its_connection() {
    let tree = Tree::new([("a.bin", content(1, 3_000_000))]);
    let root = tree.index().root();
    let node = Node::serving(&tree, &["--limits-idle-timeout=1s", "--limits-send-timeout=1s"]).await;
    let bytes = &tree.files["a.bin"];
    read(&node, &routes::chunk(root, Hash::of(bytes))).await;
    let mut sent = Vec::new();
    chunk(root, bytes).encode(&mut sent).expect("short enough");
    let mut ahead = Hits::open(&socket(&node), "").await;
    ahead.0.write_all(&sent.repeat(2)).await.expect("write");
    for _ in 0..2 {
        let mut answer = vec![0; ANSWER_HEAD_BYTES + bytes.len()];
        ahead.0.read_exact(&mut answer).await.expect("an answer to each of two requests");
        assert!(answer[ANSWER_HEAD_BYTES..] == bytes[..]);
    }
    drop(ahead);
    for wrong in [&[255, 255, 1][..], &[0, 0], &[3, 0, 9, 0, 0], &sent[..20]] {
        let mut hits = Hits::open(&socket(&node), "").await;
        hits.0.write_all(wrong).await.expect("write");
        assert!(hits.ends().await, "{wrong:?}");
    }
    let mut idle = Hits::open(&socket(&node), "").await;
    assert!(idle.ends().await);
    let mut slow = Hits::open(&socket(&node), "").await;
    slow.0.write_all(&sent).await.expect("write");
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let mut got = Vec::new();
    // An error here is the end of the connection, too.
    drop(slow.0.read_to_end(&mut got).await);
    assert!(got.len() < bytes.len(), "{} bytes were sent to a client that does not read", got.len());
    assert!(node.metric("fletch_connections_closed_total{reason=\"slow_reader\"}").await >= 1);
    assert!(node.metric("fletch_connections_closed_total{reason=\"idle\"}").await >= 1);
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_stop_ends_hit_connections_at_once() {
    let tree = Tree::usual();
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let mut hits = Hits::open(&socket(&node), "").await;
    let began = std::time::Instant::now();
    node.running.shutdown().await;
    assert!(hits.ends().await);
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
}
