//! `fletch ls` lists a directory of a version; `fletch show` describes a version or an entry.

use super::{Context, OpenVersion, streamed};
use crate::failure::Failure;
use crate::out::{Rows, bytes, count};
use crate::target::Target;
use fletch_core::manifest::{EntryKind, LayoutKind, SampleRef};
use fletch_tables::version::{Found, Resolved};
use fletch_tables::{ChildKind, Fault};
use serde::Serialize;
use std::io;

/// Children read at a time.
const PAGE: usize = 4096;

#[derive(Serialize)]
struct Head<'a> {
    root: String,
    path: &'a str,
}

#[derive(Serialize)]
struct Row<'a> {
    name: &'a str,
    kind: &'static str,
    size: u64,
}

impl Row<'_> {
    fn text(&self, w: &mut dyn io::Write, long: bool) -> io::Result<()> {
        if long {
            write!(w, "{:<8}{:>16}  ", self.kind, self.size)?;
        }
        writeln!(w, "{}{}", self.name, if self.kind == "dir" { "/" } else { "" })
    }
}

fn not_in_version(opened: &OpenVersion, path: &str) -> Failure {
    Failure::new(format!("{path:?} is not in version {} of {}", opened.version.root(), opened.base))
        .hint("`fletch ls` lists the entries; give a path relative to the dataset")
}

pub fn ls(ctx: &Context, target: &Target, path: &str, long: bool) -> Result<(), Failure> {
    let path = path.trim_start_matches("./").trim_end_matches('/');
    let path = if path == "." { "" } else { path };
    let opened = ctx.open(target)?;
    let version = &opened.version;
    let resolved = ctx.rt.block_on(version.resolve(path))?.ok_or_else(|| not_in_version(&opened, path))?;
    // A failure during the stream must still end the command with its exit code.
    let mut failed = None;
    streamed(|w| {
        let head = Head { root: version.root().to_string(), path };
        let mut rows = Rows::begin(w, ctx.out.json, &head, "children")?;
        let mut count = 0u64;
        let mut cookie = 0;
        if let Resolved::Entry(found) = &resolved {
            let entry = found.entry();
            let name = path.rsplit('/').next().unwrap_or(path);
            let row = Row { name, kind: entry.kind.as_str(), size: entry.size };
            rows.push(&row, |row, w| row.text(w, long))?;
            return rows.end("count", &1);
        }
        loop {
            let page = match ctx.rt.block_on(version.list(path, cookie, PAGE)) {
                Ok(page) => page,
                Err(e) => {
                    failed = Some(Failure::from(e));
                    break;
                }
            };
            let Some(last) = page.last() else { break };
            cookie = last.next;
            for child in &page {
                let (kind, size) = match child.kind {
                    ChildKind::Entry { kind, size } => (kind.as_str(), size),
                    ChildKind::Dir(_) => ("dir", 0),
                };
                let row = Row { name: &child.name, kind, size };
                count += 1;
                rows.push(&row, |row, w| row.text(w, long))?;
            }
        }
        rows.end("count", &count)
    })?;
    failed.map_or(Ok(()), Err)
}

#[derive(Serialize)]
struct Version<'a> {
    base: &'a str,
    root: String,
    layout: String,
    entries: u64,
    files: u64,
    file_bytes: u64,
    samples: u64,
    bytes: u64,
    created: &'a str,
    tool: &'a str,
    sample_rule: &'a fletch_core::manifest::SampleRule,
    parts: usize,
    chunks: u64,
    layout_kind: LayoutKind,
    slice_bytes: u32,
    group_bytes: Option<u32>,
    origin: Option<&'a str>,
    indexed_at_ns: u64,
    skipped: &'a [Fault],
}

#[derive(Serialize)]
struct Sample<'a> {
    kind: &'static str,
    key: Option<&'a str>,
}

#[derive(Serialize)]
struct SliceRow {
    chunk: String,
    chunk_offset: u32,
    length: u32,
}

#[derive(Serialize)]
struct Entry<'a> {
    root: String,
    path: &'a str,
    ordinal: u64,
    kind: &'static str,
    size: u64,
    blake3: Option<String>,
    target: Option<&'a str>,
    sample: Sample<'a>,
    slices: Vec<SliceRow>,
}

pub fn show(ctx: &Context, target: &Target, path: Option<&str>) -> Result<(), Failure> {
    let opened = ctx.open(target)?;
    match path {
        Some(path) => show_entry(ctx, &opened, path),
        None => show_version(ctx, &opened),
    }
}

fn show_version(ctx: &Context, opened: &OpenVersion) -> Result<(), Failure> {
    let (m, doc) = (opened.version.manifest(), opened.version.layout_doc());
    let v = Version {
        base: &opened.base,
        root: m.root.to_string(),
        layout: doc.layout.to_string(),
        entries: m.entries,
        samples: m.samples,
        bytes: m.bytes,
        files: m.shown().files,
        file_bytes: m.shown().bytes,
        created: &m.created,
        tool: &m.tool,
        sample_rule: &m.sample_rule,
        parts: m.parts.len(),
        chunks: doc.chunks,
        layout_kind: doc.params.kind,
        slice_bytes: doc.params.slice_bytes,
        group_bytes: doc.params.pack.map(|p| p.group_bytes),
        origin: doc.origin.as_deref(),
        indexed_at_ns: doc.indexed_at_ns,
        skipped: &m.skipped,
    };
    ctx.out.result(&v, |w| {
        writeln!(w, "root      {}", v.root)?;
        let kind = match (v.layout_kind, v.group_bytes) {
            (LayoutKind::Pack, Some(n)) => format!("pack, groups of at most {}", bytes(n.into())),
            (LayoutKind::Draft, _) => "draft: only listed, `fletch seal` reads it".to_owned(),
            _ => "index".to_owned(),
        };
        writeln!(w, "layout    {} ({kind})", v.layout)?;
        writeln!(w, "tables    {}", v.base)?;
        writeln!(w, "objects   {}", v.origin.unwrap_or("beside the tables"))?;
        writeln!(w, "created   {} by {}", v.created, v.tool)?;
        writeln!(w, "files     {}, {} bytes ({})", v.files, v.file_bytes, bytes(v.file_bytes))?;
        writeln!(w, "entries   {} in {}, {}", v.entries, count(v.parts, "part"), count(v.samples, "sample"))?;
        writeln!(w, "bytes     {} ({}) in {}", v.bytes, bytes(v.bytes), count(v.chunks, "chunk"))?;
        for f in v.skipped {
            writeln!(w, "left out  {}: {}", f.path, f.why)?;
        }
        Ok(())
    })
}

fn show_entry(ctx: &Context, opened: &OpenVersion, path: &str) -> Result<(), Failure> {
    let found: Option<Found> = ctx.rt.block_on(async {
        // The path of an empty directory ends in a slash.
        match opened.version.find(path).await? {
            Some(found) => Ok::<_, Failure>(Some(found)),
            None if !path.ends_with('/') => Ok(opened.version.find(&format!("{path}/")).await?),
            None => Ok(None),
        }
    })?;
    let found = found.ok_or_else(|| not_in_version(opened, path))?;
    let e = found.entry();
    let sample = match e.sample {
        SampleRef::None => Sample { kind: "none", key: None },
        SampleRef::Single => Sample { kind: "alone", key: None },
        SampleRef::Keyed(key) => Sample { kind: "keyed", key: Some(key) },
    };
    let row = Entry {
        root: opened.version.root().to_string(),
        path: e.path,
        ordinal: found.ordinal,
        kind: e.kind.as_str(),
        size: e.size,
        blake3: e.hash.map(|h| h.to_string()),
        target: (e.kind == EntryKind::Symlink).then_some(e.target),
        sample,
        slices: found
            .slices()
            .iter()
            .map(|s| SliceRow { chunk: s.chunk.to_string(), chunk_offset: s.chunk_offset, length: s.len })
            .collect(),
    };
    ctx.out.result(&row, |w| {
        writeln!(w, "path      {}", row.path)?;
        writeln!(w, "kind      {}, {}, ordinal {}", row.kind, count(row.size, "byte"), row.ordinal)?;
        if let Some(hash) = &row.blake3 {
            writeln!(w, "blake3    {hash}")?;
        }
        if let Some(target) = row.target {
            writeln!(w, "target    {target}")?;
        }
        writeln!(
            w,
            "sample    {}{}",
            row.sample.kind,
            row.sample.key.map_or(String::new(), |k| format!(" {k}"))
        )?;
        row.slices
            .iter()
            .try_for_each(|s| writeln!(w, "chunk     {} {}+{}", s.chunk, s.chunk_offset, s.length))
    })
}
