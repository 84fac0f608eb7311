//! Tests slabs that are lent: to whom, what can be done with them, and that reads there are counted.

use crate::{
    common::{Node, Tree, content},
    hits::{chunk, read, socket},
};
use fletch_api::{
    ByteTier,
    hits::{HitRequest, Wanted},
    routes,
};
use fletch_client::{
    Client, ClientConfig, Endpoint, TokenSource,
    hits::{HitOutcome, InSlab},
};
use fletch_core::{Hash, Root};
use std::{
    fs,
    os::unix::fs::FileExt as _,
    path::PathBuf,
    time::{Duration, Instant},
};

/// The bytes of the file `long`, and those of its second chunk.
fn long() -> (Tree, Vec<u8>) {
    let tree = Tree::new([("long", content(7, 9 << 20)), ("short", content(8, 100_000))]);
    let bytes = tree.files["long"][4 << 20..8 << 20].to_vec();
    (tree, bytes)
}

/// Asks on a thread that may wait.
async fn ask<T: Send + 'static>(
    socket: PathBuf,
    token: Option<&'static str>,
    ask: impl FnOnce(&mut fletch_client::hits::HitConnection, Instant) -> T + Send + 'static,
) -> T {
    let asked = move || {
        let endpoint: Endpoint = format!("unix:{}", socket.display()).parse().expect("an address");
        let token = token.map(|token| TokenSource::Text(token.to_owned()));
        let config = ClientConfig { token, ..ClientConfig::new(endpoint, "mount") };
        let client = Client::new(config).expect("a client");
        let mut connection = client.hits().expect("a unix socket").connection(0);
        ask(&mut connection, Instant::now() + Duration::from_secs(20))
    };
    tokio::task::spawn_blocking(asked).await.expect("no panic")
}

async fn slab(node: &Node, request: HitRequest<'static>) -> Option<InSlab> {
    slab_for(node, None, request).await
}

async fn slab_for(node: &Node, token: Option<&'static str>, request: HitRequest<'static>) -> Option<InSlab> {
    let request = HitRequest { wanted: Wanted::Slab, ..request };
    ask(socket(node), token, move |hits, until| hits.ask_for_slab(&request, until)).await
}

/// Reads a chunk by HTTP, and waits until the disk has it.
async fn keep(node: &Node, root: Root, hash: Hash) {
    read(node, &routes::chunk(root, hash)).await;
    for _ in 0..200 {
        if node.metric("fletch_disk_append_queue_bytes").await == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("nothing was written");
}

#[tokio::test]
async fn a_chunk_is_read_in_its_slab_and_what_is_read_is_counted() {
    let (tree, bytes) = long();
    let root = tree.index().root();
    let node = Node::serving(&tree, &["--memory=64MiB", "--cache-size=256MiB"]).await;
    let of = chunk(root, &bytes);
    assert!(slab(&node, of.clone()).await.is_none(), "nothing was read");
    keep(&node, root, of.hash).await;
    let found = slab(&node, of.clone()).await.expect("on disk");
    let mut got = vec![0; found.len as usize];
    found.file.read_exact_at(&mut got, found.offset).expect("read");
    assert!(got == bytes);
    let refused = found.file.write_at(b"x", found.offset).expect_err("it can only be read");
    assert_eq!(refused.raw_os_error(), Some(9), "EBADF");
    for wrong in [
        HitRequest { size: of.size - 1, ..of.clone() },
        HitRequest { hash: Hash::of(b"other"), ..of.clone() },
        HitRequest { hash: Hash::of(&tree.files["short"]), size: 100_000, ..of.clone() },
        HitRequest { root: Root(Hash::of(b"other")), ..of.clone() },
    ] {
        assert!(slab(&node, wrong.clone()).await.is_none(), "{wrong:?}");
    }
    let tell = |root, bytes| HitRequest { wanted: Wanted::Read(bytes), root, size: 0, ..of.clone() };
    let other = Root(Hash::of(b"other"));
    for (of_root, bytes, outcome) in [
        (root, 70_000, HitOutcome::Here),
        (other, 70_000, HitOutcome::NotHere),
        (root, u64::MAX, HitOutcome::NotHere),
    ] {
        let told = tell(of_root, bytes);
        let got = ask(socket(&node), None, move |hits, until| hits.ask(&told, &mut [], until)).await;
        assert_eq!(got, outcome);
    }
    let accounts = node.accounts().await.accounts;
    let counted = accounts.iter().filter(|a| a.key.job.as_str() == "train");
    let counted: Vec<(ByteTier, u64)> = counted.map(|a| (a.key.tier, a.bytes)).collect();
    assert_eq!(counted, [(ByteTier::Disk, 70_000)], "I8");
    node.running.shutdown().await;
}

#[tokio::test]
async fn a_slab_is_lent_as_the_setting_says() {
    let (tree, bytes) = long();
    let root = tree.index().root();
    for flag in ["--cache-short-circuit=never", "--cache-policy=lru"] {
        let node = Node::serving(&tree, &["--cache-size=256MiB", flag]).await;
        keep(&node, root, Hash::of(&bytes)).await;
        assert!(slab(&node, chunk(root, &bytes)).await.is_none(), "{flag}");
        node.running.shutdown().await;
    }
}

#[tokio::test]
async fn i7_with_tokens_nothing_is_lent_unless_the_admin_says_so() {
    let dir = tempfile::tempdir().expect("a directory");
    let (tokens, data) = (dir.path().join("tokens.toml"), dir.path().join("data"));
    let line = |t: &str| format!("[[token]]\nhash = \"{}\"\ntenant = \"{t}\"\n", Hash::of(t.as_bytes()));
    fs::write(&tokens, line("a") + "role = \"admin\"\n" + &line("b")).expect("write");
    fs::create_dir(&data).expect("mkdir");
    let tree = Tree::new_in(&data, [("long", content(1, 1 << 20))]);
    let root = tree.index().root();
    let bytes = &tree.files["long"];
    for (word, lent) in [("auto", false), ("always", true)] {
        let args = [
            format!("--auth-tokens={}", tokens.display()),
            format!("--local-dirs={}=*", data.display()),
            format!("--cache-short-circuit={word}"),
            "--cache-size=256MiB".to_owned(),
        ];
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let mut node = Node::start(&args).await;
        node.sign("a");
        node.register("d", &tree.uri(), None).await;
        keep(&node, root, Hash::of(bytes)).await;
        assert_eq!(slab_for(&node, Some("a"), chunk(root, bytes)).await.is_some(), lent, "{word}");
        assert!(slab_for(&node, Some("b"), chunk(root, bytes)).await.is_none(), "another domain, {word}");
        assert!(slab_for(&node, None, chunk(root, bytes)).await.is_none(), "no token, {word}");
        node.running.shutdown().await;
    }
}
