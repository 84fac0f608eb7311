//! Tests the windows of hit connections: what lies in them, which memory is taken, and when it is given back.

use crate::{
    common::{Node, Tree, content},
    hits::{Hits, chunk, read, socket},
};
use fletch_api::{
    hits::{
        ANSWER_HEAD_BYTES, HitAnswer, HitRequest, WINDOW_BYTES_MAX, WINDOW_READY, WINDOWS_MAX, window_request,
    },
    routes,
};
use fletch_client::{
    Client, ClientConfig, Endpoint,
    hits::{HitConnection, HitOutcome, Verify, WindowRead},
};
use fletch_core::{Hash, Root};
use fletch_window::{Filled, View};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::{
    fs,
    io::IoSliceMut,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};

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

/// Waits until this process, which is both server and client, maps windows `count` times. Returns how often
/// it does.
async fn mapped(count: usize) -> usize {
    let now = || {
        let maps = fs::read_to_string("/proc/self/maps").expect("the mappings of this process");
        maps.lines().filter(|line| line.contains("memfd:fletch-window")).count()
    };
    for _ in 0..100 {
        if now() == count {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    now()
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
async fn i6_windows_grow_with_asks_and_end_with_whoever_holds_them() {
    let tree = many(20);
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let files: Vec<Vec<u8>> = tree.files.values().cloned().collect();
    for path in tree.files.keys() {
        read(&node, &routes::file(root, path)).await;
    }
    let client = client(socket(&node));
    let (none, outcome, _) = ask(connection(&client, 0), root, files.clone()).await;
    assert_eq!((outcome, mapped(0).await), (HitOutcome::NoWindow, 0));
    let (hits, outcome, few) = ask(connection(&client, 64 * MIB), root, files[..3].to_vec()).await;
    assert_eq!((outcome, few.iter().flatten().count()), (HitOutcome::Here, 3));
    assert_eq!(mapped(2).await, 2, "both sides");
    let (hits, outcome, answers) = ask(hits, root, files.clone()).await;
    assert_eq!((outcome, answers.iter().flatten().count()), (HitOutcome::Here, 20));
    assert_eq!(mapped(3).await, 3, "the longer window on both sides, the first one by this side alone");
    drop(few);
    assert_eq!(mapped(2).await, 2);
    let (hits, outcome, again) = ask(hits, root, files[..3].to_vec()).await;
    assert_eq!((outcome, again.iter().flatten().count(), mapped(2).await), (HitOutcome::Here, 3, 2));
    drop((none, hits, again));
    assert_eq!(mapped(1).await, 1, "what is held outlives the connection");
    assert_eq!(answers[3].as_ref().expect("held").as_ref(), &files[3][..]);
    drop(answers);
    assert_eq!(mapped(0).await, 0);
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

/// Asks for a window of `bytes`. Returns its memory, whose pages are not there yet.
async fn offered(hits: &mut Hits, bytes: u32) -> OwnedFd {
    hits.0.write_all(&window_request(bytes)).await.expect("write");
    let (mut head, mut file) = ([0; ANSWER_HEAD_BYTES], None);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let socket = &hits.0;
    let receive = || {
        let parts = &mut [IoSliceMut::new(&mut head)];
        Ok(rustix::net::recvmsg(socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC)?)
    };
    socket.async_io(Interest::READABLE, receive).await.expect("an answer");
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            file = files.last();
        }
    }
    assert_eq!(HitAnswer::parse(head), Some(HitAnswer::InWindow(bytes)));
    file.expect("a descriptor")
}

/// Says that the pages of the window are there. Returns how the server answers.
async fn ready(hits: &mut Hits) -> HitAnswer {
    hits.0.write_all(&WINDOW_READY).await.expect("write");
    let mut head = [0; ANSWER_HEAD_BYTES];
    hits.0.read_exact(&mut head).await.expect("an answer");
    HitAnswer::parse(head).expect("a head")
}

/// Opens a window of `bytes`.
async fn open_window(hits: &mut Hits, bytes: u32) -> Arc<View> {
    let view = View::accept(offered(hits, bytes).await, bytes).expect("a view");
    assert_eq!(ready(hits).await, HitAnswer::InWindow(bytes));
    view
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
    for (has_window, wrong) in [
        (false, encoded(0)),
        (false, WINDOW_READY.to_vec()),
        (false, window_request(0).to_vec()),
        (false, window_request(WINDOW_BYTES_MAX + 1).to_vec()),
        (true, encoded(MIB - 59_999)),
        (true, encoded(u32::MAX)),
        (true, [encoded(u32::MAX), encoded(0)].concat()),
        (true, WINDOW_READY.to_vec()),
    ] {
        let mut hits = Hits::open(&socket(&node), "").await;
        if has_window {
            drop(open_window(&mut hits, MIB).await);
        }
        hits.0.write_all(&wrong).await.expect("write");
        hits.0.shutdown().await.expect("shut down");
        let mut answer = Vec::new();
        // The connection may end with a reset.
        drop(hits.0.read_to_end(&mut answer).await);
        assert!(answer.is_empty(), "{has_window}: {} bytes", answer.len());
    }
    assert_eq!(mapped(0).await, 0);
    node.running.shutdown().await;
}

#[tokio::test]
async fn i6_memory_that_its_client_did_not_touch_is_no_window_and_the_connection_goes_on() {
    let tree = many(1);
    let root = tree.index().root();
    let node = Node::serving(&tree, &[]).await;
    let bytes = &tree.files["f000"];
    read(&node, &routes::chunk(root, Hash::of(bytes))).await;
    let mut hits = Hits::open(&socket(&node), "").await;
    let view = open_window(&mut hits, MIB).await;
    let untouched = offered(&mut hits, 2 * MIB).await;
    assert_eq!(ready(&mut hits).await, HitAnswer::NotHere);
    assert_eq!(mapped(1).await, 1, "the server let go of the first one, and of the second one");
    assert_eq!(hits.ask(&chunk(root, bytes)).await.as_ref(), Some(bytes), "through the socket");
    drop((view, untouched, open_window(&mut hits, 4 * MIB).await));
    for _ in 3..WINDOWS_MAX {
        offered(&mut hits, MIB).await;
    }
    hits.0.write_all(&window_request(MIB)).await.expect("write");
    assert!(hits.ends().await, "a further window");
    node.running.shutdown().await;
}
