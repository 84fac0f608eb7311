//! Measures the time and memory of tables with N entries, whose paths have 200 bytes.
//!
//! It writes the tables, opens the version, and reads it. Each phase runs in a process of its own, so that
//! its peak of memory (`VmHWM`) is measured alone. Run `cargo run --release -p fletch-tables --example scale
//! [N]`. N is 1,280,000 by default. The temporary directory needs about 200 bytes for each entry.

use async_trait::async_trait;
use bytes::Bytes;
use fletch_core::manifest::{Entry, LayoutParams, SampleRule, Slice};
use fletch_core::{Hash, Kind, LayoutId, Root};
use fletch_tables::{
    NewRow, PartCache, PinRow, Provenance, SourceError, Table, TableRange, TableSource, TablesWriter, Version,
};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

type Any = Box<dyn std::error::Error>;

fn peak_mb() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmHWM")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kb| kb.parse::<f64>().ok()).unwrap_or(f64::NAN) / 1024.0
}

fn path(i: u64) -> String {
    let deep = "a-directory-with-quite-a-long-name-for-one";
    let head = format!("train/{deep}/{deep}-2/{deep}-3/class-{:04}/", i / 1300);
    let name = format!("{i:09}.JPEG");
    let pad = 200 - head.len() - name.len();
    format!("{head}{}{name}", "x".repeat(pad))
}

fn write(dir: &Path, n: u64) -> Result<(), Any> {
    let begin = Instant::now();
    let mut w = TablesWriter::create(dir, SampleRule::file(), LayoutParams::INDEX)?;
    for i in 0..n {
        let hash = Hash::of(&i.to_le_bytes());
        let entry = Entry::file(path(i), 110_000, hash);
        let slices = vec![Slice { chunk: hash, chunk_offset: 0, len: 110_000 }];
        let pin = PinRow {
            size: 110_000,
            mtime_ns: Some(1_700_000_000_000_000_000 + i as i64),
            etag: Some(format!("\"{i:x}-17a3b2c4d5e6f\"")),
        };
        w.push(NewRow::indexed(entry, slices, &pin))?;
    }
    let written = w.finish(Provenance {
        created_unix_ns: 1,
        indexed_at_ns: 1,
        tool: "scale".into(),
        origin: None,
        faults: Vec::new(),
    })?;
    println!("write      {n} entries in {:.2} s, peak {:.0} MB", begin.elapsed().as_secs_f64(), peak_mb());
    for (_, file) in &written.files {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        println!("           {name:18} {:8.1} MB", std::fs::metadata(file)?.len() as f64 / 1e6);
    }
    std::fs::write(dir.join("ids"), format!("{} {}", written.root, written.layout))?;
    Ok(())
}

struct Dir(PathBuf);

#[async_trait]
impl TableSource for Dir {
    async fn read(&self, table: Table, range: TableRange) -> Result<Bytes, SourceError> {
        let read = || -> std::io::Result<Bytes> {
            let mut file = std::fs::File::open(self.0.join(table.file_name()))?;
            let len = file.metadata()?.len();
            let range = match range {
                TableRange::All => 0..len,
                TableRange::Range(r) => r,
                TableRange::Suffix(n) => len.saturating_sub(n)..len,
            };
            file.seek(SeekFrom::Start(range.start))?;
            let mut out = vec![0; (range.end - range.start) as usize];
            file.read_exact(&mut out)?;
            Ok(out.into())
        };
        read().map_err(|e| SourceError { kind: Kind::Unavailable, message: e.to_string() })
    }
}

async fn open(dir: &Path) -> Result<(Version, u64), Any> {
    let ids = std::fs::read_to_string(dir.join("ids"))?;
    let (root, layout) = ids.split_once(' ').ok_or("ids")?;
    let (root, layout): (Root, LayoutId) = (root.parse()?, layout.parse()?);
    let begin = Instant::now();
    let v = Version::open(Arc::new(Dir(dir.to_owned())), root, layout, PartCache::new(64 << 20)).await?;
    let parts = v.index().parts().len();
    println!("open       {parts} parts in {:.3} s, peak {:.0} MB", begin.elapsed().as_secs_f64(), peak_mb());
    let n = v.manifest().entries;
    Ok((v, n))
}

async fn touch(dir: &Path) -> Result<(), Any> {
    let (v, n) = open(dir).await?;
    let begin = Instant::now();
    for i in [0, n / 2, n - 1] {
        let found = v.find(&path(i)).await?.ok_or("an entry is missing")?;
        if found.ordinal != i {
            return Err("an entry moved".into());
        }
    }
    println!("touch      3 parts in {:.3} s, peak {:.0} MB", begin.elapsed().as_secs_f64(), peak_mb());
    Ok(())
}

async fn walk(dir: &Path) -> Result<(), Any> {
    let (v, n) = open(dir).await?;
    let begin = Instant::now();
    let mut dirs = vec![String::new()];
    let mut files = 0;
    while let Some(dir) = dirs.pop() {
        let mut cookie = 0;
        loop {
            let page = v.list(&dir, cookie, 1000).await?;
            let Some(last) = page.last() else { break };
            cookie = last.next;
            for child in page {
                match child.kind {
                    fletch_tables::ChildKind::Entry { .. } => files += 1,
                    fletch_tables::ChildKind::Dir(_) => {
                        let slash = if dir.is_empty() { "" } else { "/" };
                        dirs.push(format!("{dir}{slash}{}", child.name));
                    }
                }
            }
        }
    }
    let t = begin.elapsed().as_secs_f64();
    println!("walk       {files} of {n} files in {t:.2} s, peak {:.0} MB", peak_mb());
    Ok(())
}

async fn index(dir: &Path) -> Result<(), Any> {
    let (v, _) = open(dir).await?;
    let begin = Instant::now();
    let index = v.chunk_index().await?;
    let t = begin.elapsed().as_secs_f64();
    let mb = index.footprint() as f64 / 1e6;
    println!("index      {} chunks, {mb:.1} MB in {t:.2} s, peak {:.0} MB", index.len(), peak_mb());
    Ok(())
}

fn main() -> Result<(), Any> {
    let args: Vec<String> = std::env::args().collect();
    if let [_, phase, dir, n] = args.as_slice() {
        let dir = Path::new(dir);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        return match phase.as_str() {
            "write" => write(dir, n.parse()?),
            "touch" => runtime.block_on(touch(dir)),
            "walk" => runtime.block_on(walk(dir)),
            "index" => runtime.block_on(index(dir)),
            other => Err(format!("no phase {other}").into()),
        };
    }
    let n = args.get(1).map_or("1280000", |s| s.as_str());
    let dir = tempfile::tempdir()?;
    for phase in ["write", "touch", "walk", "index"] {
        let mut child = std::process::Command::new(std::env::current_exe()?);
        let status = child.arg(phase).arg(dir.path()).arg(n).status()?;
        if !status.success() {
            return Err(format!("{phase}: {status}").into());
        }
    }
    Ok(())
}
