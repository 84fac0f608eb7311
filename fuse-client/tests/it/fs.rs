//! The file system without a kernel: tree and reads over tables in memory.

use crate::support::dataset::{Dataset, InMemory, Node, many};
use bytes::Bytes;
use fletch_client::fallback::OriginLocation;
use fletch_client::{Client, ClientConfig, Endpoint};
use fletch_core::Kind;
use fletch_core::{Hash, Verified};
use fletch_mount::fs::attr::InodeKind;
use fletch_mount::fs::error::FsError;
use fletch_mount::fs::read::{ChunkSource, FetchRequest, Reader};
use fletch_mount::fs::tree::{self, DirEntry, Tree};
use fletch_mount::hit_connections;
use fletch_mount::metrics::Op;
use fletch_mount::requests::{ReadParts, RequestContext, Timeouts};
use fletch_store::{FetchError, Store, StoreLimits};
use fletch_tables::{PartCache, Version};
use futures::future::{BoxFuture, FutureExt};
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    sync::Arc,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::Duration,
};
use tokio_util::task::TaskTracker;

async fn tree(dataset: &Arc<Dataset>) -> Tree {
    let source = Arc::new(InMemory(Arc::clone(dataset)));
    let version = Version::open(source, dataset.root, dataset.layout, PartCache::new(1 << 20)).await;
    Tree::new(version.expect("opens"))
}

/// Returns all entries of a directory, listed `page` at a time.
async fn lines(tree: &Tree, ino: u64, page: usize) -> Vec<DirEntry> {
    let mut all: Vec<DirEntry> = Vec::new();
    loop {
        let (mut got, mut full) = (Vec::new(), 0);
        let offset = all.last().map_or(0, |l| l.offset);
        tree.list(ino, offset, |l| {
            full += 1;
            if full > page {
                return true;
            }
            got.push(l);
            false
        })
        .await
        .expect("listed");
        if got.is_empty() {
            return all;
        }
        all.extend(got);
    }
}

async fn walk(tree: &Tree, ino: u64, prefix: &str, out: &mut BTreeMap<String, DirEntry>) {
    for line in lines(tree, ino, 3).await.into_iter().skip(2) {
        let path = format!("{prefix}{}", line.name);
        if line.attr.kind == InodeKind::Directory {
            Box::pin(walk(tree, line.attr.ino, &format!("{path}/"), out)).await;
        }
        assert_eq!(out.insert(path.clone(), line), None, "{path} twice");
    }
}

async fn lookup(tree: &Tree, path: &str) -> Option<fletch_mount::fs::attr::Attr> {
    let mut ino = 1;
    let mut attr = None;
    for name in path.split('/') {
        attr = tree.lookup(ino, name.as_bytes()).await.expect("looked up");
        ino = attr.as_ref()?.ino;
    }
    attr
}

#[tokio::test]
async fn the_tree_is_the_source_tree() {
    let dataset = Arc::new(Dataset::odd());
    let tree = tree(&dataset).await;
    let mut seen = BTreeMap::new();
    walk(&tree, 1, "", &mut seen).await;
    let mut expected: BTreeMap<String, (InodeKind, Option<u64>)> = BTreeMap::new();
    for (path, node) in &dataset.nodes {
        for (i, _) in path.match_indices('/') {
            expected.insert(path[..i].to_owned(), (InodeKind::Directory, None));
        }
        let what = match node {
            Node::File(b) => (InodeKind::File, Some(b.len() as u64)),
            Node::Symlink(t) => (InodeKind::Symlink, Some(t.len() as u64)),
            Node::EmptyDir => (InodeKind::Directory, None),
        };
        expected.insert(path.clone(), what);
    }
    assert_eq!(seen.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    let mut inodes = BTreeMap::new();
    for (path, (kind, size)) in &expected {
        let line = &seen[path];
        assert_eq!(line.attr.kind, *kind, "{path}");
        assert!(size.is_none_or(|s| s == line.attr.size), "{path}");
        assert_eq!(lookup(&tree, path).await, Some(line.attr), "lookup and listing agree on {path}");
        assert_eq!(tree.attr(line.attr.ino).await.expect("attr"), line.attr, "{path}");
        assert_eq!(inodes.insert(line.attr.ino, path), None, "{path} shares an inode");
    }
}

#[tokio::test]
async fn listings_page_anywhere_and_dots_are_right() {
    let dataset = Arc::new(Dataset::many(950, 1));
    let tree = tree(&dataset).await;
    let whole = lines(&tree, 1, usize::MAX).await;
    for page in [1, 2, 7, 127, 128, 129] {
        assert_eq!(lines(&tree, 1, page).await, whole, "pages of {page}");
    }
    assert_eq!(whole.iter().map(|l| l.name.as_str()).take(3).collect::<Vec<_>>(), [".", "..", "d0000"]);
    assert!(whole.windows(2).all(|w| w[0].offset < w[1].offset), "offsets ascend");
    let odd = Arc::new(Dataset::odd());
    let tree = self::tree(&odd).await;
    let deep = lookup(&tree, "a/c/deep").await.expect("directory");
    let parent = lookup(&tree, "a/c").await.expect("directory");
    let dots = lines(&tree, deep.ino, 10).await;
    assert_eq!((dots[0].attr.ino, dots[1].attr.ino), (deep.ino, parent.ino));
    let empty = lookup(&tree, "empty").await.expect("empty directory");
    assert_eq!(lines(&tree, empty.ino, 10).await.len(), 2, "only dots");
}

#[tokio::test]
async fn missing_names_are_not_found() {
    let dataset = Arc::new(Dataset::odd());
    let tree = tree(&dataset).await;
    for path in ["b", "a/b", "a/b.txt2", "a/c/deep/er/x/y", "photos/300k.jp", "zzz", "empty/x"] {
        let found = async {
            let mut ino = 1;
            for name in path.split('/') {
                match tree.lookup(ino, name.as_bytes()).await {
                    Ok(Some(a)) => ino = a.ino,
                    Ok(None) => return None,
                    Err(FsError::NotDirectory) => return None,
                    Err(e) => panic!("{path}: {e}"),
                }
            }
            Some(ino)
        };
        assert_eq!(found.await, None, "{path}");
    }
    for name in [&b""[..], b".", b"..", b"a/b.txt", b"\xff\xfe", b"a\0b"] {
        assert_eq!(tree.lookup(1, name).await.expect("no error"), None, "{name:?}");
    }
    for ino in [0, 999_999, (1 << 63) | (3 << 48) | 999_999] {
        assert!(matches!(tree.list(ino, 5, |_| true).await, Err(FsError::NotFound | FsError::NotDirectory)));
        assert!(tree.file(ino).await.is_err());
    }
    let dir = lookup(&tree, "photos").await.expect("dir");
    assert!(matches!(tree.file(dir.ino).await, Err(FsError::IsDirectory)));
    let file = lookup(&tree, "a0").await.expect("file");
    assert!(matches!(tree.list(file.ino, 0, |_| true).await, Err(FsError::NotDirectory)));
    assert!(matches!(tree.target(file.ino).await, Err(FsError::Invalid)));
}

#[tokio::test]
async fn xattrs_and_link_targets_are_those_of_the_version() {
    let dataset = Arc::new(Dataset::odd());
    let tree = tree(&dataset).await;
    let root = dataset.root.to_string().into_bytes();
    let file = lookup(&tree, "photos/110k.jpg").await.expect("file").ino;
    let Node::File(bytes) = &dataset.nodes["photos/110k.jpg"] else { panic!("a file") };
    assert_eq!(tree.xattr(file, tree::XATTR_ROOT.as_bytes()).await.expect("root"), root);
    let hash = Hash::of(bytes).to_string().into_bytes();
    assert_eq!(tree.xattr(file, tree::XATTR_BLAKE3.as_bytes()).await.expect("hash"), hash);
    assert_eq!(tree.xattr_names(file).await.expect("names"), b"user.fletch.root\0user.fletch.blake3\0");
    assert_eq!(tree.xattr_names(1).await.expect("names"), b"user.fletch.root\0");
    assert!(matches!(tree.xattr(1, tree::XATTR_BLAKE3.as_bytes()).await, Err(FsError::NoAttribute)));
    assert!(matches!(tree.xattr(file, b"user.other").await, Err(FsError::NoAttribute)));
    for name in ["security.selinux", "system.posix_acl_access", "trusted.overlay.opaque", "user"] {
        assert!(!tree::has_namespace(name.as_bytes()), "{name}");
    }
    assert!(tree::has_namespace(tree::XATTR_ROOT.as_bytes()) && tree::has_namespace(b"user.other"));
    let link = lookup(&tree, "links/dangling").await.expect("link").ino;
    assert_eq!(tree.target(link).await.expect("target"), "/nowhere/at all");
    assert_eq!(tree.totals().entries, dataset.nodes.len() as u64);
}

#[tokio::test]
async fn tables_are_loaded_on_demand() {
    let dataset = Arc::new(Dataset::in_memory(many(60_000, 1)));
    let tree = tree(&dataset).await;
    let opened = dataset.table_reads.load(Relaxed);
    assert!(opened <= 6, "{opened} reads to open");
    assert!(tree.version().index().parts().len() > 4, "several parts");
    lookup(&tree, "d0300/0030000.bin").await.expect("file");
    let touched = dataset.table_reads.load(Relaxed) - opened;
    assert!(touched <= 8, "{touched} reads for one lookup");
    tree.attr(1).await.expect("root");
    assert_eq!(dataset.table_reads.load(Relaxed) - opened, touched);
}

/// A chunk source over memory that counts fetches and can return wrong bytes.
struct Chunks {
    dataset: Arc<Dataset>,
    fetched: AtomicU64,
    lie: AtomicU64,
    log: Mutex<Vec<Hash>>,
    /// Whether it has parts of chunks.
    parts: AtomicBool,
    /// What was asked for of parts and hashes.
    parts_log: Mutex<Vec<FetchRequest>>,
}

impl ChunkSource for Chunks {
    fn has_parts(&self) -> bool {
        self.parts.load(Relaxed)
    }

    fn fetch(
        &self,
        wanted: FetchRequest,
        _: &OriginLocation,
        _: u32,
    ) -> BoxFuture<'static, Result<Bytes, FetchError>> {
        let (hash, len) = wanted.hash_and_len();
        self.fetched.fetch_add(1, Relaxed);
        self.log.lock().push(hash);
        let mut bytes = match &wanted {
            FetchRequest::Chunk { hash, .. } => self.dataset.chunks[hash].clone(),
            FetchRequest::File { path, .. } => match &self.dataset.nodes[&**path] {
                Node::File(bytes) => bytes.clone(),
                other => panic!("{path} is {other:?}"),
            },
            FetchRequest::Part { chunk, from, len } => {
                self.parts_log.lock().push(wanted.clone());
                self.dataset.chunks[chunk].slice(*from as usize..(*from + *len) as usize)
            }
            FetchRequest::Groups { chunk, .. } => {
                self.parts_log.lock().push(wanted.clone());
                let checked = Verified::check_grouped(*chunk, self.dataset.chunks[chunk].clone());
                let groups = checked.expect("the right chunk").1.expect("a long chunk");
                Bytes::copy_from_slice(groups.as_bytes())
            }
        };
        assert_eq!(bytes.len(), len as usize);
        if self.lie.load(Relaxed) > 0 {
            self.lie.fetch_sub(1, Relaxed);
            let mut wrong = bytes.to_vec();
            wrong[0] ^= 0x80;
            bytes = wrong.into();
        }
        async move {
            tokio::task::yield_now().await;
            Ok(bytes)
        }
        .boxed()
    }
}

async fn reader(dataset: &Arc<Dataset>) -> (Tree, Reader, Arc<Chunks>, TaskTracker) {
    let tree = tree(dataset).await;
    let tasks = TaskTracker::new();
    let limits = StoreLimits { memory_bytes: 64 << 20, deadline: Duration::from_secs(5), attempts: 2 };
    let source = Arc::new(Chunks {
        dataset: Arc::clone(dataset),
        fetched: AtomicU64::new(0),
        lie: AtomicU64::new(0),
        log: Mutex::default(),
        parts: AtomicBool::new(false),
        parts_log: Mutex::default(),
    });
    let store = Store::new(limits, None, tasks.clone());
    let reader = Reader::new(tree.clone(), store, source.clone(), tasks.clone());
    (tree, reader, source, tasks)
}

#[tokio::test]
async fn every_range_of_every_file_has_the_right_bytes() {
    ranges_are_bytes(Arc::new(Dataset::odd())).await;
}

#[tokio::test]
async fn a_small_part_of_a_long_chunk_is_read_without_the_chunk() {
    let dataset = Arc::new(Dataset::odd());
    let (tree, reader, source, _) = reader(&dataset).await;
    source.parts.store(true, Relaxed);
    let path = "shards/9m.tar";
    let Node::File(bytes) = &dataset.nodes[path] else { panic!("a file") };
    let ino = lookup(&tree, path).await.expect("file").ino;
    let read = async |offset: u64, size: u32| {
        let got = reader.read(ino, offset, size).await.expect("read").bytes;
        assert_eq!(got, bytes.slice(offset as usize..offset as usize + size as usize));
    };
    let kib = 1 << 10;
    let asked = || std::mem::take(&mut *source.parts_log.lock());
    let part = |asked: &FetchRequest| match asked {
        FetchRequest::Part { from, len, .. } => Some((*from / kib, *len / kib)),
        _ => None,
    };
    read(5000 * 1024, 4096).await;
    let [groups, one] = &asked()[..] else { panic!("the hashes and a part") };
    assert!(matches!(groups, FetchRequest::Groups { .. }));
    assert_eq!(part(one), Some((5000 - 4096 - 8, 16)), "one group of the second chunk");
    read(5000 * 1024 + 4096, 4096).await;
    assert_eq!(asked(), [], "the group is in memory");
    read(8000 * 1024, 100_000).await;
    assert_eq!(asked().iter().map(part).collect::<Vec<_>>(), [Some((3904, 112))], "no hashes again");
    read(2000 * 1024, 4096).await;
    assert_eq!(asked().len(), 2, "another chunk has other hashes");
    assert_eq!(source.log.lock().len(), 5, "and nothing else was asked for");
    read(0, 4096).await;
    assert_eq!(asked(), [], "whoever begins at the front gets whole chunks");
    // Lies about a part, then about hashes: the whole chunk is read.
    for lies in [2, 1] {
        let (tree, reader, source, _) = self::reader(&dataset).await;
        source.parts.store(true, Relaxed);
        let ino = lookup(&tree, path).await.expect("file").ino;
        if lies == 2 {
            assert_eq!(reader.read(ino, 5_000_000, 10).await.expect("read").bytes.len(), 10);
        }
        source.lie.store(lies, Relaxed);
        let got = reader.read(ino, 6_000_000, 4096).await.expect("read").bytes;
        assert_eq!(got, bytes.slice(6_000_000..6_004_096));
        assert_eq!(source.lie.load(Relaxed), 0);
    }
}

#[tokio::test]
async fn every_range_of_every_file_of_a_pack_has_the_right_bytes() {
    ranges_are_bytes(Arc::new(Dataset::packed(Dataset::odd().nodes))).await;
}

/// A file that shares a chunk with others is fetched alone, once, and checked by its own hash.
#[tokio::test]
async fn a_file_of_a_pack_is_fetched_and_checked_alone() {
    let dataset = Arc::new(Dataset::packed(many(300, 30_000)));
    assert!(dataset.chunks.len() < 10, "{} chunks", dataset.chunks.len());
    let (tree, reader, source, _) = reader(&dataset).await;
    let (path, node) = dataset.nodes.iter().nth(17).expect("file");
    let Node::File(bytes) = node else { panic!("a file") };
    let ino = lookup(&tree, path).await.expect("file").ino;
    source.lie.store(1, Relaxed);
    for _ in 0..3 {
        assert_eq!(reader.read(ino, 100, 20_000).await.expect("read").bytes, bytes.slice(100..20_100));
    }
    assert_eq!(*source.log.lock(), [Hash::of(bytes); 2], "one lie, one repetition");
    source.lie.store(2, Relaxed);
    let other = lookup(&tree, dataset.nodes.keys().nth(18).expect("file")).await.expect("file").ino;
    let e = reader.read(other, 0, 10).await.expect_err("lies");
    assert_eq!(e.errno(), libc::EIO, "{e}");
}

async fn ranges_are_bytes(dataset: Arc<Dataset>) {
    for parts in [false, true] {
        ranges_of_files(&dataset, parts).await;
    }
}

async fn ranges_of_files(dataset: &Arc<Dataset>, parts: bool) {
    let (tree, reader, source, _) = reader(dataset).await;
    source.parts.store(parts, Relaxed);
    for (path, node) in &dataset.nodes {
        let Node::File(bytes) = node else { continue };
        let ino = lookup(&tree, path).await.expect("file").ino;
        let len = bytes.len() as u64;
        let m4 = 4u64 << 20;
        for offset in
            [0, 1, 4095, 4096, 65_536, m4 - 1, m4, m4 + 1, 2 * m4 - 70_000, len.saturating_sub(1), len]
        {
            for size in [1u32, 4096, 32 << 10, 128 << 10, 1 << 20] {
                let a = reader.read(ino, offset, size).await.expect("read");
                let to = (offset + u64::from(size)).min(len);
                let want = bytes.slice(offset.min(to) as usize..to as usize);
                assert_eq!(a.bytes, want, "{path} {offset}+{size}");
                if let Some(push) = a.push {
                    let at = push.offset as usize;
                    assert_eq!(offset, 0, "only the first READ of a file pushes");
                    assert_eq!(push.offset, u64::from(size), "only pages outside the request");
                    assert_eq!(push.bytes, bytes.slice(at..at + push.bytes.len()), "{path}");
                    let end = push.offset + push.bytes.len() as u64;
                    assert!(end == len || end.is_multiple_of(65_536), "{path}: no page in part");
                }
            }
        }
    }
}

#[tokio::test]
async fn small_blocks_are_pushed_and_whole_reads_are_not() {
    let dataset = Arc::new(Dataset::odd());
    let (tree, reader, _, _) = reader(&dataset).await;
    let pushed = async |path: &str, offset, size| {
        let ino = lookup(&tree, path).await.expect("file").ino;
        reader.read(ino, offset, size).await.expect("read").push.map(|p| (p.offset, p.bytes.len()))
    };
    assert_eq!(pushed("photos/110k.jpg", 0, 32 << 10).await, Some((32 << 10, 110_000 - (32 << 10))));
    assert_eq!(pushed("photos/110k.jpg", 0, 128 << 10).await, None, "it was all asked for");
    assert_eq!(pushed("photos/110k.jpg", 32 << 10, 32 << 10).await, None, "not the first");
    assert_eq!(pushed("photos/300k.jpg", 0, 128 << 10).await, None, "a full READ");
    assert_eq!(pushed("photos/300k.jpg", 0, 16 << 10).await, Some((16 << 10, 300_000 - (16 << 10))));
    assert_eq!(pushed("shards/9m.tar", 0, 32 << 10).await, Some((32 << 10, (512 << 10) - (32 << 10))));
    assert_eq!(pushed("photos/110k.jpg", 0, 1000).await, None, "not whole pages");
}

#[tokio::test]
async fn i1_wrong_bytes_never_leave() {
    let dataset = Arc::new(Dataset::odd());
    let (tree, reader, source, _) = reader(&dataset).await;
    let ino = lookup(&tree, "photos/110k.jpg").await.expect("file").ino;
    source.lie.store(2, Relaxed);
    let e = reader.read(ino, 0, 4096).await.expect_err("both attempts lied");
    assert_eq!((e.errno(), e.fault().map(|f| f.word())), (libc::EIO, Some("corrupt")));
    assert!(e.to_string().contains("photos/110k.jpg"), "{e}");
    source.lie.store(1, Relaxed);
    let Node::File(bytes) = &dataset.nodes["photos/110k.jpg"] else { panic!("a file") };
    assert_eq!(
        reader.read(ino, 0, 4096).await.expect("the second attempt was honest").bytes,
        bytes.slice(..4096)
    );
}

#[tokio::test]
async fn slices_are_prefetched_for_sequential_readers() {
    let dataset = Arc::new(Dataset::odd());
    let (tree, reader, source, tasks) = reader(&dataset).await;
    let ino = lookup(&tree, "shards/9m.tar").await.expect("file").ino;
    reader.read(ino, 0, 128 << 10).await.expect("read");
    assert_eq!(source.fetched.load(Relaxed), 1, "one READ is no sequence");
    reader.read(ino, 128 << 10, 128 << 10).await.expect("read");
    tasks.close();
    tasks.wait().await;
    assert_eq!(source.fetched.load(Relaxed), 3, "both slices ahead");
    assert_eq!(reader.counters().prefetched.load(Relaxed), 2);
    let (_, random, source, tasks) = self::reader(&dataset).await;
    for at in [5u64 << 20, 100 << 10, 9 << 20] {
        random.read(ino, at, 4096).await.expect("read");
    }
    tasks.close();
    tasks.wait().await;
    assert_eq!(source.fetched.load(Relaxed), 3, "random readers bring what they ask for");
}

/// A source that has all chunks at hand, and fetches nothing.
struct AtHand(Arc<Dataset>, AtomicU64);

impl ChunkSource for AtHand {
    fn fetch(
        &self,
        _: FetchRequest,
        _: &OriginLocation,
        _: u32,
    ) -> BoxFuture<'static, Result<Bytes, FetchError>> {
        async { Err(FetchError::new(Kind::Unavailable, "nothing is fetched")) }.boxed()
    }

    fn has_hits(&self) -> bool {
        true
    }

    fn hit(&self, wanted: &FetchRequest, buffer: &mut [u8]) -> bool {
        self.1.fetch_add(1, Relaxed);
        let (hash, _) = wanted.hash_and_len();
        self.0.chunks.get(&hash).inspect(|bytes| buffer.copy_from_slice(bytes)).is_some()
    }
}

#[tokio::test]
async fn chunks_at_hand_are_kept_unless_the_kernel_keeps_them() {
    let dataset = Arc::new(Dataset::odd());
    let tree = tree(&dataset).await;
    let limits = StoreLimits { memory_bytes: 64 << 20, deadline: Duration::from_secs(5), attempts: 2 };
    let tasks = TaskTracker::new();
    let (store, source) =
        (Store::new(limits, None, tasks.clone()), Arc::new(AtHand(dataset.clone(), 0.into())));
    let reader = Reader::new(tree.clone(), store, source.clone(), tasks.clone());
    let ino = lookup(&tree, "photos/110k.jpg").await.expect("file").ino;
    let Node::File(bytes) = &dataset.nodes["photos/110k.jpg"] else { panic!("a file") };
    for asked in 1..=3 {
        assert_eq!(reader.read(ino, 0, 128 << 10).await.expect("at hand").bytes, bytes);
        assert_eq!(source.1.load(Relaxed), asked, "the kernel keeps the whole chunk");
    }
    assert_eq!(reader.read_direct(ino, 0, 128 << 10).await.expect("at hand").bytes, bytes);
    assert_eq!(reader.read(ino, 0, 128 << 10).await.expect("in memory").bytes, bytes);
    assert_eq!(source.1.load(Relaxed), 4, "the kernel keeps nothing of a direct READ");
    let long = lookup(&tree, "shards/9m.tar").await.expect("file").ino;
    for offset in [5000, 3 << 20] {
        reader.read(long, offset, 4096).await.expect("at hand");
    }
    assert_eq!(source.1.load(Relaxed), 5, "a part was asked for");
    assert_eq!((tasks.len(), reader.counters().reads.load(Relaxed)), (0, 7));
}

#[test]
fn only_the_first_poll_of_a_request_may_ask_the_server_of_this_machine() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().expect("a runtime");
    let dataset = Arc::new(Dataset::odd());
    let tree = runtime.block_on(tree(&dataset));
    let tasks = TaskTracker::new();
    let limits = StoreLimits { memory_bytes: 64 << 20, deadline: Duration::from_secs(5), attempts: 2 };
    let parts = ReadParts {
        store: Store::new(limits, None, tasks.clone()),
        source: Arc::new(AtHand(dataset, 0.into())),
        counters: Arc::default(),
        access: Arc::default(),
        dataset: None,
    };
    let timeouts = Timeouts { io: Duration::from_secs(5), mapped: Duration::from_secs(5) };
    let context = RequestContext::new(tree.version(), parts, timeouts, tasks);
    let endpoint: Endpoint = "unix:/nowhere".parse().expect("an address");
    let client = Client::new(ClientConfig::new(endpoint, "mount")).expect("a client");
    let (sender, receiver) = std::sync::mpsc::channel();
    let asks = client.clone();
    context.dispatch(Op::Read, runtime.handle(), |_| async move {
        sender.send(hit_connections::may_ask(&asks)).expect("the test listens");
        tokio::task::yield_now().await;
        sender.send(hit_connections::may_ask(&asks)).expect("the test listens");
    });
    assert_eq!(receiver.recv(), Ok(true), "on the thread of the request");
    assert_eq!(receiver.recv(), Ok(false), "on the runtime");
    assert!(!hit_connections::may_ask(&client), "after the request");
}

#[tokio::test]
async fn a_failed_fetch_is_an_errno() {
    struct Fails(Kind);
    impl ChunkSource for Fails {
        fn fetch(
            &self,
            _: FetchRequest,
            _: &OriginLocation,
            _: u32,
        ) -> BoxFuture<'static, Result<Bytes, FetchError>> {
            let e = FetchError::new(self.0, "as told");
            async move { Err(e) }.boxed()
        }
    }
    let dataset = Arc::new(Dataset::odd());
    for (kind, errno) in
        [(Kind::NotFound, libc::ESTALE), (Kind::Unavailable, libc::EIO), (Kind::Overloaded, libc::EIO)]
    {
        let tree = tree(&dataset).await;
        let tasks = TaskTracker::new();
        let limits = StoreLimits { memory_bytes: 64 << 20, deadline: Duration::from_secs(5), attempts: 2 };
        let store = Store::new(limits, None, tasks.clone());
        let reader = Reader::new(tree.clone(), store, Arc::new(Fails(kind)), tasks);
        let ino = lookup(&tree, "a/b.txt").await.expect("file").ino;
        let e = reader.read(ino, 0, 10).await.expect_err("fails");
        assert_eq!(e.errno(), errno, "{kind:?}");
    }
}
