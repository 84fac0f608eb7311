//! A known tree: on disk, and as a version whose tables and chunks are in memory.

use async_trait::async_trait;
use bytes::Bytes;
use fletch_core::manifest::pack::{Item, Keyer, Packer, Placing};
use fletch_core::manifest::{CHUNK_BYTES_MAX, Entry, LayoutParams, SampleRule, Slice};
use fletch_core::{Hash, Kind, LayoutId, Root};
use fletch_tables::{NewRow, PinRow, Provenance, SourceError, Table, TableRange, TableSource, TablesWriter};
use std::{
    collections::{BTreeMap, HashMap},
    fs,
    os::unix::fs::symlink,
    path::Path,
    sync::Arc,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};
use tempfile::TempDir;

/// The creation time of every version in these tests: 2024-01-02 03:04:05 UTC.
pub const CREATED_NS: u64 = 1_704_164_645_000_000_006;

/// One file, symlink or empty directory of a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    File(Bytes),
    Symlink(String),
    EmptyDir,
}

/// A tree and its version.
pub struct Dataset {
    /// The tree on disk.
    pub src: TempDir,
    pub nodes: BTreeMap<String, Node>,
    pub root: Root,
    pub layout: LayoutId,
    pub tables: HashMap<Table, Bytes>,
    pub chunks: HashMap<Hash, Bytes>,
    /// The number of reads of tables so far.
    pub table_reads: AtomicU64,
    rows: Vec<NewRow>,
}

/// Returns bytes that repeat nowhere, from a cheap generator seeded by `seed`.
pub fn noise(seed: u64, len: usize) -> Bytes {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        out.extend_from_slice(&x.to_le_bytes());
    }
    out.truncate(len);
    out.into()
}

/// `count` files of `len` bytes in directories of 100.
pub fn many(count: usize, len: usize) -> BTreeMap<String, Node> {
    let file = |i: usize| (format!("d{:04}/{i:07}.bin", i / 100), Node::File(noise(i as u64 + 1000, len)));
    (0..count).map(file).collect()
}

impl Dataset {
    /// Returns a tree with names that sort around `/`, empty files and directories, links, and files around
    /// every size boundary.
    pub fn odd() -> Self {
        let mut n = BTreeMap::new();
        for (i, (path, len)) in [
            ("a/b.txt", 10),
            ("a/c/deep/er/x", 4096),
            ("a-b", 1),
            ("a.c", 4097),
            ("a0", 0),
            ("one page and a bit", 5000),
            ("photos/110k.jpg", 110_000),
            ("photos/exactly-128k", 128 << 10),
            ("photos/300k.jpg", 300_000),
            ("photos/übung #1?.png", 70_000),
            ("shards/exactly-4m", 4 << 20),
            ("shards/over-4m", (4 << 20) + 1),
            ("shards/9m.tar", 9_500_000),
        ]
        .into_iter()
        .enumerate()
        {
            n.insert(path.to_owned(), Node::File(noise(i as u64, len)));
        }
        n.insert("links/file".into(), Node::Symlink("../a/b.txt".into()));
        n.insert("links/dangling".into(), Node::Symlink("/nowhere/at all".into()));
        n.insert("links/dir".into(), Node::Symlink("../photos".into()));
        n.insert("empty".into(), Node::EmptyDir);
        n.insert("nested/empty/too".into(), Node::EmptyDir);
        Dataset::build(n)
    }

    /// `count` files of `len` bytes in directories of 100.
    pub fn many(count: usize, len: usize) -> Self {
        Dataset::build(many(count, len))
    }

    pub fn build(nodes: BTreeMap<String, Node>) -> Self {
        let dataset = Dataset::in_memory(nodes);
        for (path, node) in &dataset.nodes {
            let at = dataset.src.path().join(path);
            fs::create_dir_all(at.parent().expect("below src")).expect("mkdir");
            match node {
                Node::File(bytes) => fs::write(&at, bytes).expect("write"),
                Node::Symlink(target) => symlink(target, &at).expect("symlink"),
                Node::EmptyDir => fs::create_dir_all(&at).expect("mkdir"),
            }
        }
        dataset
    }

    /// As [`Dataset::build`], but without the tree on disk, which is slow to write when it is large.
    pub fn in_memory(nodes: BTreeMap<String, Node>) -> Self {
        let src = tempfile::tempdir().expect("tempdir");
        let mut rows: Vec<NewRow> = Vec::new();
        let mut chunks = HashMap::new();
        let pin = |size| PinRow { size, mtime_ns: Some(1), etag: None };
        for (path, node) in &nodes {
            rows.push(match node {
                Node::File(bytes) => {
                    let size = bytes.len() as u64;
                    let mut from = 0;
                    let slices = LayoutParams::INDEX
                        .slice_lengths(size)
                        .map(|len| {
                            assert!(len <= CHUNK_BYTES_MAX);
                            let chunk = bytes.slice(from..from + len as usize);
                            from += len as usize;
                            let hash = Hash::of(&chunk);
                            chunks.insert(hash, chunk);
                            Slice { chunk: hash, chunk_offset: 0, len }
                        })
                        .collect();
                    NewRow::indexed(Entry::file(path, size, Hash::of(bytes)), slices, &pin(size))
                }
                Node::Symlink(target) => NewRow::without_bytes(Entry::symlink(path, target)),
                Node::EmptyDir => NewRow::without_bytes(Entry::empty_dir(path)),
            });
        }
        // Empty directories sort by their path with a slash.
        rows.sort_by(|a, b| a.entry.path.as_bytes().cmp(b.entry.path.as_bytes()));
        let (root, layout, tables) = write(rows.clone(), LayoutParams::INDEX);
        Dataset { src, nodes, root, layout, tables, chunks, table_reads: AtomicU64::new(0), rows }
    }

    /// As [`Dataset::in_memory`], with small files grouped into chunks.
    pub fn packed(nodes: BTreeMap<String, Node>) -> Self {
        let params = LayoutParams::PACK;
        let index = Dataset::in_memory(nodes);
        let mut keyer = Keyer::new(&params);
        let mut items: Vec<Item> = Vec::new();
        for row in &index.rows {
            if let Placing::Group(item) = keyer.next(row.entry.as_ref()) {
                items.push(item);
            }
        }
        items.sort_unstable();
        let mut packer = Packer::new(&params);
        let mut plans: Vec<_> = items.into_iter().flat_map(|i| packer.push(i).expect("in order")).collect();
        plans.extend(packer.finish());
        let (mut rows, mut chunks) = (index.rows.clone(), index.chunks.clone());
        for plan in plans {
            let mut bytes = vec![0; plan.len as usize];
            let row = |ordinal: u64| usize::try_from(ordinal).expect("small");
            for m in &plan.members {
                let content = chunks.remove(&rows[row(m.item.ordinal)].slices[0].chunk);
                let content = content.or_else(|| {
                    let Node::File(b) = &index.nodes[&rows[row(m.item.ordinal)].entry.path] else {
                        return None;
                    };
                    Some(b.clone())
                });
                let (from, content) = (m.offset as usize, content.expect("content"));
                bytes[from..from + content.len()].copy_from_slice(&content);
            }
            let chunk = Hash::of(&bytes);
            for m in &plan.members {
                let row = &mut rows[row(m.item.ordinal)];
                row.slices = vec![Slice { chunk, chunk_offset: m.offset, len: m.item.len }];
                // Which row brings the chunk is nothing that a mount reads.
                row.chunks.clear();
            }
            chunks.insert(chunk, bytes.into());
        }
        let (root, layout, tables) = write(rows, params);
        assert_eq!(root, index.root);
        Dataset { layout, tables, chunks, ..index }
    }
}

fn write(rows: Vec<NewRow>, params: LayoutParams) -> (Root, LayoutId, HashMap<Table, Bytes>) {
    let scratch = tempfile::tempdir().expect("tempdir");
    let mut writer = TablesWriter::create(scratch.path(), SampleRule::file(), params).expect("writer");
    for row in rows {
        writer.push(row).expect("valid row");
    }
    let about = Provenance {
        created_unix_ns: CREATED_NS,
        indexed_at_ns: CREATED_NS,
        tool: "test".into(),
        origin: None,
        faults: vec![],
    };
    let written = writer.finish(about).expect("written");
    let read = |t: Table| {
        let at = t.path(written.root, written.layout);
        let (_, file) = written.files.iter().find(|(p, _)| *p == at).expect("every table is written");
        (t, Bytes::from(fs::read(file).expect("table")))
    };
    (written.root, written.layout, Table::ALL.into_iter().map(read).collect())
}

/// A source of a dataset's tables from memory.
pub struct InMemory(pub Arc<Dataset>);

#[async_trait]
impl TableSource for InMemory {
    async fn read(&self, table: Table, range: TableRange) -> Result<Bytes, SourceError> {
        self.0.table_reads.fetch_add(1, Relaxed);
        // As from a server: never ready at once.
        tokio::task::yield_now().await;
        let whole = &self.0.tables[&table];
        let len = whole.len() as u64;
        let (from, to) = match range {
            TableRange::All => (0, len),
            TableRange::Range(r) => (r.start, r.end),
            TableRange::Suffix(n) => (len.saturating_sub(n), len),
        };
        if to > len {
            return Err(SourceError { kind: Kind::Corrupt, message: "past the end".into() });
        }
        Ok(whole.slice(usize::try_from(from).expect("small")..usize::try_from(to).expect("small")))
    }
}

/// Returns every path below `dir` with its content, read through the file system.
pub fn walk(dir: &Path) -> BTreeMap<String, Node> {
    let mut out = BTreeMap::new();
    walk_into(dir, "", &mut out);
    out
}

fn walk_into(dir: &Path, prefix: &str, out: &mut BTreeMap<String, Node>) {
    let mut any = false;
    for e in fs::read_dir(dir).expect("readable directory") {
        let e = e.expect("entry");
        any = true;
        let name = e.file_name().into_string().expect("utf-8");
        let path = if prefix.is_empty() { name } else { format!("{prefix}/{name}") };
        let kind = e.file_type().expect("type");
        if kind.is_dir() {
            walk_into(&e.path(), &path, out);
        } else if kind.is_symlink() {
            let target = fs::read_link(e.path()).expect("readlink");
            out.insert(path, Node::Symlink(target.to_str().expect("utf-8").to_owned()));
        } else {
            out.insert(path, Node::File(fs::read(e.path()).expect("readable file").into()));
        }
    }
    if !any && !prefix.is_empty() {
        out.insert(prefix.to_owned(), Node::EmptyDir);
    }
}
