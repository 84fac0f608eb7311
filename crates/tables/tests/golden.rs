//! The golden files of `tests/golden/`, which fix the formats.
//!
//! A difference is a change of a format. Only `FLETCH_GOLDEN_WRITE=1` writes the files again. No hash depends
//! on the encoding of parquet: the reader must read the old tables, and the writer's tables must read back
//! equal, but their bytes may differ.

mod support;

use fletch_core::manifest::parts::ends_part;
use fletch_core::manifest::{
    Entry, EntryKind, KeyRule, LayoutParams, PartCutter, PartSummary, Placed, Sample, SampleRule, Slice,
    layout::layout_id, root,
};
use fletch_core::{Hash, LayoutId, Root, record};
use fletch_tables::{
    Fault, FileTotals, Manifest, NewRow, ObjectRef, PartCache, PinRow, Provenance, Table, TablesWriter,
    TagDoc, Version, WrittenVersion,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use support::{Files, read_all, runtime};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

fn regenerate() -> bool {
    std::env::var("FLETCH_GOLDEN_WRITE").is_ok_and(|v| v == "1")
}

fn compare_bytes(name: &str, now: &[u8]) {
    let at = golden(name);
    if regenerate() {
        std::fs::write(&at, now).expect("golden file");
    }
    let then = std::fs::read(&at).expect("a golden file; FLETCH_GOLDEN_WRITE=1 writes it");
    assert!(then == now, "{name} differs: the format changed");
}

fn compare<T: Serialize>(name: &str, now: &T) {
    let mut text = serde_json::to_vec_pretty(now).expect("json");
    text.push(b'\n');
    compare_bytes(name, &text);
}

fn load<T: DeserializeOwned>(name: &str) -> T {
    let text = std::fs::read(golden(name)).expect("a golden file; FLETCH_GOLDEN_WRITE=1 writes it");
    serde_json::from_slice(&text).expect("golden json")
}

/// The description of a version: `entries.json`.
#[derive(Serialize, Deserialize)]
struct Described {
    sample_rule: SampleRule,
    params: LayoutParams,
    entries: Vec<DescribedEntry>,
}

#[derive(Serialize, Deserialize)]
struct DescribedEntry {
    path: String,
    kind: EntryKind,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    blake3: Option<Hash>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    target: String,
    sample_kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    sample: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    slices: Vec<DescribedSlice>,
}

#[derive(Serialize, Deserialize)]
struct DescribedSlice {
    chunk: Hash,
    chunk_offset: u32,
    length: u32,
}

/// The expected hashes of the version: `small.json`.
#[derive(Serialize)]
struct Outcome {
    encodings: Vec<String>,
    sample_rule_encoding: String,
    parts: Vec<PartSummary>,
    root: Root,
    placements: Vec<Hash>,
    layout: LayoutId,
}

fn describe(e: &Entry, slices: &[Slice]) -> DescribedEntry {
    let (sample_kind, sample) = match &e.sample {
        Sample::None => ("none", None),
        Sample::Single => ("alone", None),
        Sample::Keyed(k) => ("keyed", Some(k.clone())),
    };
    DescribedEntry {
        path: e.path.clone(),
        kind: e.kind,
        size: e.size,
        blake3: e.hash,
        target: e.target.clone(),
        sample_kind: sample_kind.to_owned(),
        sample,
        slices: slices
            .iter()
            .map(|s| DescribedSlice { chunk: s.chunk, chunk_offset: s.chunk_offset, length: s.len })
            .collect(),
    }
}

impl DescribedEntry {
    fn entry(&self) -> Entry {
        Entry {
            path: self.path.clone(),
            kind: self.kind,
            size: self.size,
            hash: self.blake3,
            target: self.target.clone(),
            sample: match (self.sample_kind.as_str(), &self.sample) {
                ("keyed", Some(k)) => Sample::Keyed(k.clone()),
                ("alone", None) => Sample::Single,
                _ => Sample::None,
            },
        }
    }

    fn slices(&self) -> Vec<Slice> {
        let slice =
            |s: &DescribedSlice| Slice { chunk: s.chunk, chunk_offset: s.chunk_offset, len: s.length };
        self.slices.iter().map(slice).collect()
    }
}

/// A version with an entry of each kind, in several parts. The content of a file is its path.
fn small() -> Described {
    let rule = SampleRule::new(KeyRule::Stem, vec!["**/*.jpg".into(), "**/*.cls".into(), "*.cls".into()]);
    let params = LayoutParams { slice_bytes: 1 << 20, ..LayoutParams::INDEX };
    let matcher = rule.matcher().expect("globs");
    let h = |s: &str| Hash::of(s.as_bytes());
    let file = |path: &str, size| Entry::file(path, size, h(path));
    let mut entries = vec![
        file("README", 6),
        file("a-b.jpg", 7),
        file("a/0001.cls", 1),
        file("a/0001.jpg", 1 << 20),
        file("a/0002.seg.jpg", (1 << 20) + 1),
        Entry { hash: Some(h("")), size: 0, ..file("empty", 0) },
        Entry::empty_dir("none/here"),
        Entry::symlink("link", "../outside the tree"),
        file("s.tar", 5_000_000),
        Entry { path: "s.tar\0d/1.jpg".into(), kind: EntryKind::Member, ..file("s.tar", 3_000_000) },
        file("zażółć/gęślą 🎉.jpg", 9),
    ];
    // Two paths that end their parts.
    let ending = (0u32..).map(|i| format!("m{i:05}.cls")).filter(|p| ends_part(p));
    entries.extend(ending.take(2).map(|p| file(&p, 11)));
    entries.sort_by(|a, b| a.path.cmp(&b.path));
    let shard = h("s.tar");
    let described = entries.into_iter().map(|mut e| {
        e.sample = matcher.sample(&e.path, e.kind);
        let slices = if e.kind == EntryKind::Member {
            // The shard's second to fourth slice, from byte 512 of the second.
            let part =
                |i: u32, chunk_offset, len| Slice { chunk: h(&format!("{shard}{i}")), chunk_offset, len };
            vec![part(1, 512, (1 << 20) - 512), part(2, 0, 1 << 20), part(3, 0, 3_000_000 - (2 << 20) + 512)]
        } else {
            support::slices(&e, params)
        };
        describe(&e, &slices)
    });
    Described { sample_rule: rule.clone(), params, entries: described.collect() }
}

fn outcome(d: &Described) -> Outcome {
    let mut encodings = Vec::new();
    let (mut parts, mut placements) = (Vec::new(), Vec::new());
    let mut cutter = PartCutter::new();
    let mut placed = Placed::default();
    for e in &d.entries {
        let mut out = Vec::new();
        e.entry().as_ref().encode(&mut out);
        encodings.push(hex::encode(out));
        placed.push(e.slices());
        if let Some(part) = cutter.push(e.entry().as_ref()).expect("a good entry") {
            parts.push(part);
            placements.push(std::mem::take(&mut placed).hash());
        }
    }
    if let Some(part) = cutter.finish() {
        parts.push(part);
        placements.push(placed.hash());
    }
    let hashes: Vec<Hash> = parts.iter().map(|p| p.hash).collect();
    let root = root(&d.sample_rule, &hashes);
    let mut rule = Vec::new();
    d.sample_rule.encode(&mut rule);
    let layout = layout_id(&d.params, root, &placements);
    Outcome { encodings, sample_rule_encoding: hex::encode(rule), parts, root, placements, layout }
}

#[test]
fn a_small_version() {
    if regenerate() {
        compare("entries.json", &small());
    }
    let described: Described = load("entries.json");
    let got = outcome(&described);
    assert_eq!(got.parts.len(), 3);
    compare("small.json", &got);
}

#[derive(Serialize)]
struct Big {
    paths: &'static str,
    content: &'static str,
    size: u64,
    sample_rule: SampleRule,
    entries: u64,
    parts: Vec<PartSummary>,
    root: Root,
}

#[test]
fn a_big_version_cuts_where_it_did() {
    let mut paths: Vec<String> =
        (0..20_000u64).map(|i| format!("{:08x}/{i:06}.jpg", i * 2_654_435_761 % (1 << 32))).collect();
    paths.sort();
    let mut cutter = PartCutter::new();
    let mut parts = Vec::new();
    for p in &paths {
        let e = Entry::file(p.as_str(), 4, Hash::of(p.as_bytes()));
        parts.extend(cutter.push(e.as_ref()).expect("a good entry"));
    }
    parts.extend(cutter.finish());
    assert!(parts.len() > 2, "the example must cut");
    let hashes: Vec<Hash> = parts.iter().map(|p| p.hash).collect();
    let rule = SampleRule::file();
    let root = root(&rule, &hashes);
    compare(
        "big.json",
        &Big {
            paths: "sorted f\"{i*2654435761 % 2**32:08x}/{i:06d}.jpg\" for i in range(entries)",
            content: "blake3 of the path's bytes; every entry is a file, a sample alone",
            size: 4,
            sample_rule: rule,
            entries: paths.len() as u64,
            parts,
            root,
        },
    );
}

#[test]
fn log_bytes() {
    let mut log = record::file_header().to_vec();
    record::append(&mut log, 1, b"first");
    record::append(&mut log, 200, b"");
    record::append(&mut log, 2, &[0xff; 300]);
    compare_bytes("log.bin", &log);
    let (records, len) = record::read(&log).expect("whole");
    assert_eq!((records.len(), len), (3, log.len()));
}

/// The example of `docs/FORMATS.md`, "Frames". `fletch-api` writes and reads the same bytes.
#[test]
fn frame_bytes() {
    let frames = concat!(
        "464c5446524d0100",
        "0101c800000000000300000000000000616263",
        "63010700000000000f0000000000000066726f6d2074686520667574757265",
        "0101ce000100000002000000000000006465",
        "0101c800010000000000000000000000",
        "020194010200000002000000000000007b7d",
        "0301c800030000000000000000000000",
    );
    compare_bytes("frames.bin", &hex::decode(frames).expect("hex"));
}

fn about() -> Provenance {
    Provenance {
        created_unix_ns: 1_767_225_600_123_456_789,
        indexed_at_ns: 1_767_225_599_000_000_000,
        tool: "fletch 0.1.0".into(),
        origin: Some("s3://bucket/data".into()),
        faults: vec![Fault { path: "unreadable".into(), why: "permission denied".into() }],
    }
}

fn pin(e: &Entry) -> PinRow {
    PinRow {
        size: e.size,
        mtime_ns: e.size.is_multiple_of(2).then_some(1_600_000_000_000_000_007),
        etag: e.size.is_multiple_of(3).then(|| "\"5f-1\"".to_owned()),
    }
}

fn write(scratch: &Path, d: &Described) -> WrittenVersion {
    let mut w = TablesWriter::create(scratch, d.sample_rule.clone(), d.params).expect("scratch");
    for d in &d.entries {
        let e = d.entry();
        let mut row = NewRow::indexed(e.clone(), d.slices(), &pin(&e));
        if e.kind == EntryKind::Member {
            row.chunks.clear();
        }
        w.push(row).expect("a good entry");
    }
    w.finish(about()).expect("written")
}

async fn check(d: &Described, files: Files, root: Root, layout: LayoutId) {
    let v = Version::open(Arc::new(files), root, layout, PartCache::new(1 << 20)).await.expect("good");
    let want: Vec<_> = d.entries.iter().map(|e| (e.entry(), e.slices())).collect();
    assert_eq!(read_all(&v).await.expect("good"), want);
    let m = v.manifest();
    assert_eq!((m.entries, m.samples, m.bytes), (13, 7, 10_097_198));
    let files = d.entries.iter().filter(|e| e.kind == EntryKind::File);
    let (number, bytes) = files.fold((0, 0), |(n, bytes), e| (n + 1, bytes + e.size));
    assert_eq!(m.shown(), FileTotals { files: number, bytes });
    assert_eq!(m.created, "2026-01-01T00:00:00.123456789Z");
    assert_eq!(m.created_ns(), about().created_unix_ns);
    assert_eq!((&m.tool, &m.skipped), (&about().tool, &about().faults));
    let l = v.layout_doc();
    assert_eq!((&l.origin, l.indexed_at_ns), (&about().origin, about().indexed_at_ns));
    let mut rows = Vec::new();
    for part in 0..m.parts.len() {
        for r in v.chunk_rows(part).await.expect("good").iter() {
            let ObjectRef::Entry { row } = r.object else { panic!("an index has no keys") };
            let e = v.part(part).await.expect("good").entry(row as usize).to_owned();
            assert_eq!(r.pin, pin(&e));
            rows.push((e.path, r.chunk, r.offset, r.len));
        }
    }
    let mut want = Vec::new();
    for e in d.entries.iter().filter(|e| e.kind != EntryKind::Member) {
        let mut offset = 0;
        for s in e.slices() {
            want.push((e.path.clone(), s.chunk, offset, s.len));
            offset += u64::from(s.len);
        }
    }
    assert_eq!(rows, want);
    assert_eq!(v.chunk_index().await.expect("good").len() as u64, l.chunks);
}

#[test]
fn tables_at_rest() {
    let described: Described = load("entries.json");
    let expected = outcome(&described);
    let scratch = tempfile::tempdir().expect("scratch");
    let written = write(scratch.path(), &described);
    assert_eq!((written.root, written.layout), (expected.root, expected.layout));
    if regenerate() {
        for (_, file) in &written.files {
            let name = file.file_name().expect("a name");
            std::fs::copy(file, golden("tables").join(name)).expect("golden file");
        }
    }
    // What today's writer makes...
    runtime().block_on(check(&described, Files::load(&written), written.root, written.layout));
    // ...and what was written then, and keeps its JSON to the byte.
    let then = Table::ALL.map(|t| {
        let bytes = std::fs::read(golden("tables").join(t.file_name())).expect("a golden file");
        (t, bytes.into())
    });
    let then = Files { files: std::collections::HashMap::from(then), ..Files::default() };
    for table in [Table::Manifest, Table::Layout] {
        let now = std::fs::read(scratch.path().join(table.file_name())).expect("a document");
        assert!(then.files[&table] == now, "{table} differs: the format changed");
    }
    runtime().block_on(check(&described, then, expected.root, expected.layout));
}

/// Tables of builds before 0.1.0 do not count their files.
#[test]
fn a_manifest_without_counts_of_files_is_read() {
    let bytes = std::fs::read(golden("tables/manifest.json")).expect("a golden file");
    let mut document: serde_json::Value = serde_json::from_slice(&bytes).expect("JSON");
    let root = document["root"].as_str().expect("a root").parse().expect("a root");
    let fields = document.as_object_mut().expect("an object");
    assert!(fields.remove("files").is_some() && fields.remove("file_bytes").is_some());
    let m = Manifest::parse(document.to_string().as_bytes(), root).expect("valid");
    assert_eq!(m.shown(), FileTotals { files: 13, bytes: 10_097_198 }, "all entries count");
}

#[test]
fn a_tag() {
    let described: Described = load("entries.json");
    let d = outcome(&described);
    let tag = TagDoc::new(d.root, d.layout, about().created_unix_ns);
    compare_bytes("tag.json", &tag.to_bytes().expect("json"));
}
