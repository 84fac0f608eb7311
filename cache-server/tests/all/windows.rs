//! Tests the windows of hit connections: what lies in them, who may write, and when they are given back.

use crate::{
    common::{Node, Tree, content},
    hits::{Hits, chunk, protocol, read, socket, upgrade},
};
use fletch_api::{hits::HitRequest, routes};
use fletch_client::{
    Client, ClientConfig, Endpoint,
    hits::{HitConnection, HitOutcome, Verify, WindowRead},
};
use fletch_core::{Hash, Root};
use fletch_window::Filled;
use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};
use tokio::{io::AsyncWriteExt as _, net::UnixStream};

const MIB: u32 = 1 << 20;

fn client(socket: PathBuf) -> Client {
    let endpoint: Endpoint = format!("unix:{}", socket.display()).parse().expect("an address");
    Client::new(ClientConfig::new(endpoint, "loader")).expect("a client")
}

fn connection(client: &Client, window_bytes: u32) -> HitConnection {
    client.hits().expect("a unix socket").connection(window_bytes)
}

/// Asks for whole files as chunks; a thread waits for it.
async fn ask(
    mut connection: HitConnection,
    root: Root,
    files: Vec<Vec<u8>>,
) -> (HitConnection, HitOutcome, Vec<Option<Filled>>) {
    let asked = move || {
        let mut requests: Vec<HitRequest<'static>> = files.iter().map(|f| chunk(root, f)).collect();
        let mut answers = Vec::new();
        let until = Instant::now() + Duration::from_secs(20);
        let outcome = connection.ask_in_window(&mut requests, &mut answers, until);
        (connection, outcome, answers)
    };
    tokio::task::spawn_blocking(asked).await.expect("no panic")
}

/// Waits until the windows of all connections occupy `bytes`.
async fn occupied(node: &Node, bytes: u64) -> u64 {
    let name = "fletch_memory_bytes{of=\"windows\"}";
    for _ in 0..100 {
        if node.metric(name).await == bytes {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    node.metric(name).await
}

fn many(count: u64) -> Tree {
    let mut tree = Tree::new([("f000", content(100, 60_000))]);
    for i in 1..count {
        let bytes = content(100 + i, 60_000);
        fs::write(tree.path(&format!("f{i:03}")), &bytes).expect("write");
        tree.files.insert(format!("f{i:03}"), bytes);
    }
    tree
}

#[tokio::test]
async fn many_chunks_come_at_once_and_stay_as_they_are_after_the_server_ended() {
    let tree = many(200);
    let root = tree.index().root();
    let node = Node::serving(&tree, &["--memory=1GiB"]).await;
    for path in tree.files.keys() {
        read(&node, &routes::file(root, path)).await;
    }
    let client = client(socket(&node));
    let files: Vec<Vec<u8>> = tree.files.values().cloned().collect();
    let (hits, outcome, answers) = ask(connection(&client, 16 * MIB), root, files.clone()).await;
    assert_eq!(outcome, HitOutcome::Here);
    assert_eq!(occupied(&node, 16 << 20).await, 16 << 20);
    let right = |answers: &[Option<Filled>], files: &[Vec<u8>]| {
        let pairs = answers.iter().zip(files);
        pairs.filter(|(got, want)| got.as_ref().is_some_and(|g| g.as_ref() == &want[..])).count()
    };
    assert_eq!(right(&answers, &files), 200);
    let counted: u64 = node.accounts().await.accounts.iter().map(|a| a.bytes).sum();
    assert_eq!(counted, 2 * 200 * 60_000, "I8: each byte by HTTP, and each byte in the window");
    // The window has room for the first 69 again, while the others are held.
    let (again, asked) = (answers, files.clone());
    let (hits, outcome, more) = ask(hits, root, asked).await;
    assert_eq!(outcome, HitOutcome::Here);
    let here = more.iter().flatten().count();
    assert!((70..=79).contains(&here), "{here} of 60,000 bytes fit into the rest of 16 MiB");
    assert_eq!(right(&more[..here], &files[..here]), here);
    let (hits, outcome, none) = ask(hits, root, files.clone()).await;
    assert_eq!((outcome, none.iter().flatten().count()), (HitOutcome::NotAsked, 0), "the window is full");
    node.running.shutdown().await;
    let (_, outcome, none) = ask(hits, root, files.clone()).await;
    assert!(matches!(outcome, HitOutcome::Failed | HitOutcome::NotAsked), "{outcome:?}");
    assert_eq!(none.iter().flatten().count(), 0);
    assert_eq!(right(&again, &files), 200, "what is held outlives connection and server");
}

#[tokio::test]
async fn i6_windows_are_limited_and_come_back_when_clients_leave() {
    let tree = many(20);
    let root = tree.index().root();
    let node = Node::serving(&tree, &["--memory=192MiB"]).await;
    let files: Vec<Vec<u8>> = tree.files.values().cloned().collect();
    for path in tree.files.keys() {
        read(&node, &routes::file(root, path)).await;
    }
    let client = client(socket(&node));
    let (first, outcome, answers) = ask(connection(&client, 64 * MIB), root, files.clone()).await;
    assert_eq!((outcome, answers.iter().flatten().count()), (HitOutcome::Here, 20));
    let (second, outcome, _) = ask(connection(&client, 2 * MIB), root, files.clone()).await;
    assert_eq!((outcome, occupied(&node, 4 << 20).await), (HitOutcome::Here, 4 << 20), "2 MiB each");
    let (mut third, outcome, none) = ask(connection(&client, MIB), root, files.clone()).await;
    assert_eq!((outcome, none.iter().flatten().count()), (HitOutcome::NoWindow, 0));
    let mut buffer = vec![0; files[0].len()];
    let of_file = chunk(root, &files[0]);
    let asked = move || (third.ask(&of_file, &mut buffer, Instant::now() + Duration::from_secs(20)), buffer);
    let (outcome, buffer) = tokio::task::spawn_blocking(asked).await.expect("no panic");
    assert!(outcome == HitOutcome::Here && buffer == files[0], "through the socket it goes on");
    drop((first, second));
    assert_eq!(occupied(&node, 0).await, 0);
    assert_eq!(answers[3].as_ref().expect("held").as_ref(), &files[3][..]);
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_client_reads_chunks_and_files_of_packs_and_checks_them_itself() {
    let tree = many(40);
    let to = tempfile::tempdir().expect("a directory");
    let (packed, _) = tree.pack_to(to.path(), false);
    let node = Node::start(&[]).await;
    node.register("d", &tree.uri(), Some(&to.path().display().to_string())).await;
    let root = packed.root();
    for path in tree.files.keys() {
        read(&node, &routes::file(root, path)).await;
    }
    let client = client(socket(&node));
    let reads: Vec<WindowRead> = tree.files.iter().map(|(path, bytes)| of_file(path, bytes)).collect();
    for verify in [Verify::Client, Verify::Server] {
        let got = client.read_in_window(root, reads.clone(), verify).await;
        let right = got.iter().zip(tree.files.values()).filter(|(g, f)| g.as_deref() == Some(&f[..]));
        assert_eq!(right.count(), 40, "{verify:?}");
    }
    let mut absent = reads[..3].to_vec();
    absent[1].path = Some("no/such".to_owned());
    absent[2].size = 0;
    let got = client.read_in_window(root, absent, Verify::Client).await;
    assert_eq!(got.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false, false]);
    let endpoint: Endpoint = format!("http://{}", node.addr()).parse().expect("an address");
    let by_tcp = Client::new(ClientConfig::new(endpoint, "loader")).expect("a client");
    assert_eq!(by_tcp.read_in_window(root, reads[..2].to_vec(), Verify::Client).await, [None, None]);
    node.running.shutdown().await;
    assert_eq!(client.read_in_window(root, reads[..2].to_vec(), Verify::Client).await, [None, None]);
}

fn of_file(path: &str, bytes: &[u8]) -> WindowRead {
    let size = u32::try_from(bytes.len()).expect("short");
    WindowRead { path: Some(path.to_owned()), hash: Hash::of(bytes), size }
}

#[tokio::test]
async fn a_client_that_names_a_place_outside_of_its_window_loses_its_connection() {
    let tree = many(1);
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let bytes = &tree.files["f000"];
    read(&node, &routes::chunk(root, Hash::of(bytes))).await;
    let encoded = |place| {
        let mut sent = Vec::new();
        HitRequest { place: Some(place), ..chunk(root, bytes) }.encode(&mut sent).expect("short");
        sent
    };
    let window = "fletch-window: 1048576\r\n";
    for (more, wrong) in [
        ("", encoded(0)),
        (window, encoded(MIB - 59_999)),
        (window, encoded(u32::MAX)),
        (window, vec![0, 0, 0, 0]),
        ("fletch-window: 0\r\n", vec![0, 0]),
        ("fletch-window: -1\r\n", vec![0, 0]),
        ("fletch-window: 99999999999\r\n", vec![0, 0]),
    ] {
        let mut hits = Hits::open(&socket(&node), more).await;
        hits.0.write_all(&wrong).await.expect("write");
        hits.0.shutdown().await.expect("shut down");
        let mut answer = Vec::new();
        // The connection may end with a reset.
        drop(tokio::io::AsyncReadExt::read_to_end(&mut hits.0, &mut answer).await);
        assert!(answer.len() <= 1, "{more}: {} bytes", answer.len());
    }
    let mut stream = UnixStream::connect(socket(&node)).await.expect("connect");
    let head = upgrade(&mut stream, &(protocol() + window)).await;
    assert!(head.to_ascii_lowercase().contains("fletch-window: 1048576"), "{head}");
    drop(stream);
    assert_eq!(occupied(&node, 0).await, 0);
    node.running.shutdown().await;
}
