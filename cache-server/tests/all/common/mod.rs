//! Makes trees, indexes and packs them, and runs a server in this process, for tests.

pub mod epochs;

use bytes::Bytes;
use fletch_api::{Accounts, Code, Problem, ResolvedVersion};
use fletch_core::manifest::pack::{Item, Keyer, Packer, Placing};
use fletch_core::{
    Hash, Root, Verified,
    manifest::{Entry, LayoutParams, SampleRule, Slice},
};
use fletch_origin::local;
use fletch_server::{
    app::{self, Running},
    config::{self, Action, Environment},
};
use fletch_tables::{
    GroupLists, NewChunk, NewRow, PinRow, Provenance, TablesWriter, TagDoc, WrittenVersion, paths,
};
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Returns bytes that no two files share.
pub fn content(seed: u64, len: usize) -> Vec<u8> {
    fletch_testkit::dataset::content(seed, 0, len as u64)
}

/// A directory with files, and their contents.
pub struct Tree {
    pub dir: TempDir,
    pub files: BTreeMap<String, Vec<u8>>,
}

impl Tree {
    pub fn new(files: impl IntoIterator<Item = (&'static str, Vec<u8>)>) -> Self {
        Tree::new_in(&std::env::temp_dir(), files)
    }

    /// Creates a tree in a directory of its own below this one.
    pub fn new_in(above: &Path, files: impl IntoIterator<Item = (&'static str, Vec<u8>)>) -> Self {
        let tree = Tree {
            dir: TempDir::with_prefix_in("tree-", above).expect("tempdir"),
            files: files.into_iter().map(|(p, b)| (p.to_owned(), b)).collect(),
        };
        for (path, bytes) in &tree.files {
            let at = tree.path(path);
            std::fs::create_dir_all(at.parent().expect("parent")).expect("mkdir");
            std::fs::write(at, bytes).expect("write");
        }
        tree
    }

    /// Creates small files, a file of several slices, an empty file, and one in a directory with an unusual
    /// name.
    pub fn usual() -> Self {
        Tree::new([
            ("a.bin", content(1, 5000)),
            ("big.bin", content(2, (9 << 20) + 17)),
            ("empty", Vec::new()),
            ("train/0001 ü#1.jpg", content(3, 110_000)),
            ("train/0002.jpg", content(4, 90_000)),
            ("z", content(5, 1)),
        ])
    }

    pub fn path(&self, rel: &str) -> PathBuf {
        self.dir.path().join(rel)
    }

    pub fn uri(&self) -> String {
        self.dir.path().display().to_string()
    }

    /// Indexes the tree, writes the tables into it, and tags it.
    pub fn index(&self) -> Indexed {
        self.index_to(self.dir.path(), LayoutParams::INDEX)
    }

    pub fn index_to(&self, to: &Path, params: LayoutParams) -> Indexed {
        let pin_of = |path: &str| {
            let pin = local::pin_of(&std::fs::metadata(self.path(path)).expect("metadata"));
            PinRow { size: pin.size, mtime_ns: pin.mtime_ns, etag: pin.etag }
        };
        let rows = self.files.iter().map(|(path, bytes)| {
            let entry = Entry::file(path.as_str(), bytes.len() as u64, Hash::of(bytes));
            (entry, slices(bytes, params), pin_of(path))
        });
        let mut rows: Vec<_> = rows.collect();
        let link = Entry::symlink("link", "a.bin");
        rows.push((link, Vec::new(), PinRow { size: 0, mtime_ns: None, etag: None }));
        rows.sort_by(|a, b| a.0.path.as_bytes().cmp(b.0.path.as_bytes()));
        write(to, rows, params)
    }
}

impl Tree {
    /// Indexes the tree into `to` without the link that [`Tree::index_to`] adds.
    pub fn index_plain(&self, to: &Path) -> Indexed {
        let rows = self.files.iter().map(|(path, bytes)| {
            let pin = local::pin_of(&std::fs::metadata(self.path(path)).expect("metadata"));
            let pin = PinRow { size: pin.size, mtime_ns: pin.mtime_ns, etag: pin.etag };
            let entry = Entry::file(path.as_str(), bytes.len() as u64, Hash::of(bytes));
            NewRow::indexed(entry, slices(bytes, LayoutParams::INDEX), &pin)
        });
        write_rows(to, rows.collect(), LayoutParams::INDEX)
    }

    /// Indexes the tree into itself, with the hashes of the groups of long chunks, and tags it.
    pub fn index_grouped(&self) -> Indexed {
        let scratch = tempfile::tempdir().expect("scratch");
        let lists = Arc::new(GroupLists::open(&scratch.path().join("lists")).expect("opened"));
        let mut rows = Vec::new();
        for (path, bytes) in &self.files {
            let pin = local::pin_of(&std::fs::metadata(self.path(path)).expect("metadata"));
            let pin = PinRow { size: pin.size, mtime_ns: pin.mtime_ns, etag: pin.etag };
            let entry = Entry::file(path.as_str(), bytes.len() as u64, Hash::of(bytes));
            let slices = slices(bytes, LayoutParams::INDEX);
            let mut at = 0;
            for slice in &slices {
                let chunk = Bytes::copy_from_slice(&bytes[at..at + slice.len as usize]);
                let checked = Verified::check_grouped(slice.chunk, chunk).expect("right");
                checked.1.iter().for_each(|groups| lists.add(groups));
                at += slice.len as usize;
            }
            rows.push(NewRow::indexed(entry, slices, &pin));
        }
        write_rows_with(self.dir.path(), rows, LayoutParams::INDEX, Some(&lists))
    }

    /// Packs the tree into `to`, and tags it there. Returns the names of the chunks' objects.
    pub fn pack_to(&self, to: &Path, wrong: bool) -> (Indexed, Vec<String>) {
        let (indexed, chunks) = self.pack_with(to, LayoutParams::PACK, wrong);
        (indexed, chunks.into_iter().map(|c| c.0).collect())
    }

    /// Does the same with other parameters. Returns each chunk's object and the ordinals of its files.
    pub fn pack_with(
        &self,
        to: &Path,
        params: LayoutParams,
        wrong: bool,
    ) -> (Indexed, Vec<(String, Vec<u64>)>) {
        let mut keyer = Keyer::new(&params);
        let mut rows: Vec<NewRow> = Vec::new();
        let mut items: Vec<Item> = Vec::new();
        for (path, bytes) in &self.files {
            let pin = local::pin_of(&std::fs::metadata(self.path(path)).expect("metadata"));
            let pin = PinRow { size: pin.size, mtime_ns: pin.mtime_ns, etag: pin.etag };
            let entry = Entry::file(path.as_str(), bytes.len() as u64, Hash::of(bytes));
            let place = keyer.next(entry.as_ref());
            rows.push(NewRow::indexed(entry, slices(bytes, params), &pin));
            if let Placing::Group(item) = place {
                items.push(item);
            }
        }
        items.sort_unstable();
        let mut packer = Packer::new(&params);
        let mut plans: Vec<_> = items.into_iter().flat_map(|i| packer.push(i).expect("in order")).collect();
        plans.extend(packer.finish());
        let mut chunks = Vec::new();
        for plan in plans {
            let mut bytes = vec![0; plan.len as usize];
            let number = |ordinal: u64| usize::try_from(ordinal).expect("small");
            for m in &plan.members {
                let content = &self.files[&rows[number(m.item.ordinal)].entry.path];
                bytes[m.offset as usize..][..content.len()].copy_from_slice(content);
            }
            let chunk = Hash::of(&bytes);
            let key = paths::chunk(chunk);
            let first = plan.members.iter().map(|m| m.item.ordinal).min().expect("a member");
            for m in &plan.members {
                let row = &mut rows[number(m.item.ordinal)];
                // A wrong placement begins a little too early.
                let chunk_offset = if wrong { m.offset.saturating_sub(1) } else { m.offset };
                row.slices = vec![Slice { chunk, chunk_offset, len: m.item.len }];
                row.chunks.clear();
            }
            let pin = PinRow { size: plan.len.into(), mtime_ns: None, etag: None };
            let object = Some(key.clone());
            rows[number(first)].chunks = vec![NewChunk { chunk, len: plan.len, object, offset: 0, pin }];
            let at = to.join(&key);
            std::fs::create_dir_all(at.parent().expect("parent")).expect("mkdir");
            std::fs::write(at, bytes).expect("chunk");
            chunks.push((key, plan.members.iter().map(|m| m.item.ordinal).collect()));
        }
        (write_rows(to, rows, params), chunks)
    }
}

pub fn slices(bytes: &[u8], params: LayoutParams) -> Vec<Slice> {
    let mut at = 0;
    let cut = |len: u32| {
        let piece = &bytes[at..at + len as usize];
        at += len as usize;
        Slice { chunk: Hash::of(piece), chunk_offset: 0, len }
    };
    params.slice_lengths(bytes.len() as u64).map(cut).collect()
}

/// Writes the tables of rows into a directory, and the tag `latest`.
pub fn write(to: &Path, rows: Vec<(Entry, Vec<Slice>, PinRow)>, params: LayoutParams) -> Indexed {
    let rows = rows.into_iter().map(|(entry, slices, pin)| NewRow::indexed(entry, slices, &pin));
    write_rows(to, rows.collect(), params)
}

fn write_rows(to: &Path, rows: Vec<NewRow>, params: LayoutParams) -> Indexed {
    write_rows_with(to, rows, params, None)
}

fn write_rows_with(
    to: &Path,
    rows: Vec<NewRow>,
    params: LayoutParams,
    groups: Option<&Arc<GroupLists>>,
) -> Indexed {
    let scratch = tempfile::tempdir().expect("scratch");
    let mut writer = TablesWriter::create(scratch.path(), SampleRule::file(), params).expect("writer");
    if let Some(groups) = groups {
        writer.keep_groups(groups);
    }
    for row in rows {
        writer.push(row).expect("a good row");
    }
    let about = Provenance {
        created_unix_ns: 1_700_000_000_000_000_007,
        indexed_at_ns: 1_700_000_000_000_000_000,
        tool: "tests".into(),
        origin: None,
        faults: Vec::new(),
    };
    let written = writer.finish(about).expect("written");
    for (rel, file) in &written.files {
        let at = to.join(rel);
        std::fs::create_dir_all(at.parent().expect("parent")).expect("mkdir");
        std::fs::copy(file, at).expect("copy");
    }
    tag(to, "latest", &written);
    Indexed { written }
}

pub fn tag(to: &Path, name: &str, written: &WrittenVersion) {
    let doc = TagDoc::new(written.root, written.layout, 7).to_bytes().expect("tag");
    let at = to.join(paths::tag(&name.parse().expect("tag name")));
    std::fs::create_dir_all(at.parent().expect("parent")).expect("mkdir");
    std::fs::write(at, doc).expect("write");
}

pub struct Indexed {
    pub written: WrittenVersion,
}

impl Indexed {
    pub fn root(&self) -> Root {
        self.written.root
    }
}

/// A server in this process.
pub struct Node {
    pub state: TempDir,
    pub running: Running,
    pub http: reqwest::Client,
}

pub fn settings(state: &Path, more: &[&str]) -> Result<config::Config, String> {
    let state = state.display().to_string();
    let usual = [
        "--listen=127.0.0.1:0".to_owned(),
        "--memory=256MiB".to_owned(),
        format!("--state-dir={state}/state"),
        format!("--cache-dir={state}/cache"),
        format!("--socket={state}/s.sock"),
    ];
    let flag = |s: &str| s.split('=').next().map(str::to_owned);
    let given: Vec<_> = more.iter().map(|s| flag(s)).collect();
    let usual = usual.into_iter().filter(|s| !given.contains(&flag(s)));
    let args: Vec<String> = std::iter::once("fletch-server".to_owned())
        .chain(usual)
        .chain(more.iter().map(|s| (*s).to_owned()))
        .collect();
    match config::read(args, &Environment::default()) {
        Ok(Action::Serve(c)) => Ok(*c),
        Ok(_) => Err("not to be served".into()),
        Err(e) => Err(e.to_string()),
    }
}

impl Node {
    pub async fn start(more: &[&str]) -> Self {
        Node::start_in(tempfile::tempdir().expect("tempdir"), more).await
    }

    pub async fn start_in(state: TempDir, more: &[&str]) -> Self {
        let running = app::start(settings(state.path(), more).expect("settings")).await.expect("started");
        Node { state, running, http: reqwest::Client::new() }
    }

    /// Starts a server with the tree registered as `d`.
    pub async fn serving(tree: &Tree, more: &[&str]) -> Self {
        let node = Node::start(more).await;
        node.register("d", &tree.uri(), None).await;
        node
    }

    /// Sends this token with later requests.
    pub fn sign(&mut self, token: &str) {
        let value = format!("Bearer {token}").parse().expect("a header's value");
        let headers = [(reqwest::header::AUTHORIZATION, value)].into_iter().collect();
        self.http = reqwest::Client::builder().default_headers(headers).build().expect("client");
    }

    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.running.url())
    }

    pub fn addr(&self) -> std::net::SocketAddr {
        self.running.addr.expect("a TCP address")
    }

    pub fn ask(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, self.url(path))
    }

    pub fn get(&self, path: &str) -> RequestBuilder {
        self.ask(Method::GET, path)
    }

    pub fn post(&self, path: &str, body: impl Into<String>) -> RequestBuilder {
        self.json(Method::POST, path, body)
    }

    pub fn json(&self, method: Method, path: &str, body: impl Into<String>) -> RequestBuilder {
        self.ask(method, path).header("content-type", "application/json").body(body.into())
    }

    pub async fn register(&self, name: &str, uri: &str, tables: Option<&str>) {
        let r = self.try_register(name, uri, tables).await;
        assert_eq!(r.status(), 201, "{}", r.text().await.expect("text"));
    }

    pub async fn try_register(&self, name: &str, uri: &str, tables: Option<&str>) -> Response {
        let mut body = serde_json::json!({"name": name, "uri": uri});
        if let Some(t) = tables {
            body["tables"] = t.into();
        }
        self.post("/v1/datasets", body.to_string()).send().await.expect("answer")
    }

    pub async fn resolve(&self, name: &str, version: &str) -> ResolvedVersion {
        let r = self.get(&format!("/v1/datasets/{name}/versions/{version}")).send().await.expect("answer");
        let status = r.status();
        let text = r.text().await.expect("text");
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).expect("a version")
    }

    pub async fn accounts(&self) -> Accounts {
        let text = self.get("/v1/accounts").send().await.expect("answer").text().await.expect("text");
        serde_json::from_str(&text).expect("accounts")
    }

    /// Returns a value of `/metrics`, by the beginning of its line.
    pub async fn metric(&self, begins: &str) -> u64 {
        let text = self.get("/metrics").send().await.expect("answer").text().await.expect("text");
        let line =
            text.lines().find(|l| l.starts_with(begins)).unwrap_or_else(|| panic!("{begins} in {text}"));
        line.rsplit(' ').next().expect("value").parse().expect("a number")
    }

    /// Waits until the disk tier is in this state.
    pub async fn disk_is(&self, state: &str) {
        let until = Instant::now() + Duration::from_secs(60);
        while self.metric(&format!("fletch_disk_state{{state=\"{state}\"}}")).await != 1 {
            assert!(Instant::now() < until, "the disk is never {state}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The sum of all series of one metric.
    pub async fn metric_sum(&self, name: &str) -> u64 {
        let text = self.get("/metrics").send().await.expect("answer").text().await.expect("text");
        let series = text.lines().filter(|l| l.split(['{', ' ']).next() == Some(name));
        series.map(|l| l.rsplit(' ').next().expect("value").parse::<u64>().expect("a number")).sum()
    }
}

/// Asserts that a reply is a problem with this code and with every field of a problem.
pub async fn problem(r: Response, code: Code) -> Problem {
    let status = r.status();
    let kind = r.headers().get("content-type").cloned();
    let text = r.text().await.expect("text");
    let p: Problem = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {status} {text}"));
    assert_eq!((p.code, status.as_u16(), p.status), (code, code.status(), code.status()), "{text}");
    assert_eq!(kind.expect("content-type"), "application/problem+json");
    assert_eq!(p.retryable, code.retryable());
    assert!(!p.detail.is_empty() && !p.hint.is_empty(), "{text}");
    p
}

pub async fn body(r: Response, status: StatusCode) -> Vec<u8> {
    let got = r.status();
    let bytes = r.bytes().await.expect("body").to_vec();
    assert_eq!(got, status, "{}", String::from_utf8_lossy(&bytes[..bytes.len().min(500)]));
    bytes
}

/// Indexes the tree with the etags of the bucket, and writes the tables into the tree.
pub async fn index_bucket(tree: &Tree, emulator: &fletch_testkit::OriginEmulator) -> Root {
    index_below(tree, emulator, &emulator.uri()).await
}

/// As [`index_bucket`], for a tree that lies below a prefix of the bucket.
pub async fn index_below(tree: &Tree, emulator: &fletch_testkit::OriginEmulator, uri: &str) -> Root {
    let config = fletch_origin::OriginConfig {
        prefix: emulator.uri(),
        endpoint: Some(emulator.endpoint()),
        region: Some("us-east-1".into()),
        credentials: Some(fletch_origin::Credentials::Anonymous),
        allow_http: true,
        ..fletch_origin::OriginConfig::default()
    };
    let origins =
        fletch_origin::Origins::new(vec![config], fletch_origin::OriginLimits::default()).expect("origins");
    let uri = fletch_origin::OriginUri::parse(uri).expect("uri");
    let bucket = origins.open(&uri).expect("origin");
    let mut rows = Vec::new();
    for (path, bytes) in &tree.files {
        let meta = bucket.head(path).await.expect("head");
        let pin = PinRow { size: meta.size, mtime_ns: meta.mtime_ns, etag: meta.etag };
        let entry = Entry::file(path.as_str(), bytes.len() as u64, Hash::of(bytes));
        rows.push((entry, slices(bytes, LayoutParams::INDEX), pin));
    }
    write(tree.dir.path(), rows, LayoutParams::INDEX).root()
}
