//! Writes a packed dataset of N files of 16 bytes, a thousand in a directory, without the files.
//!
//! Run `cargo run --release -p fletch-tables --example generate DIR N`, then
//! `fletch register NAME DIR --tables DIR`. File i is `{i / 1000:06}/{i:09}.bin` and has the 16 digits of i.
//! A chunk has 4,096 files. The bytes are few, so a measurement of it shows what names cost.

use fletch_core::Hash;
use fletch_core::manifest::{Entry, LayoutParams, SampleRule, Slice};
use fletch_tables::{NewChunk, NewRow, PinRow, Provenance, TablesWriter, TagDoc, paths};
use std::path::Path;

type Any = Box<dyn std::error::Error>;

const IN_A_DIRECTORY: u64 = 1000;
const IN_A_CHUNK: u64 = 4096;
const BYTES: u32 = 16;

/// Writes the chunk whose first file is `first`. Returns it.
fn write_chunk(dir: &Path, first: u64, n: u64) -> Result<NewChunk, Any> {
    let files = first..n.min(first + IN_A_CHUNK);
    let bytes: String = files.map(|i| format!("{i:016}")).collect();
    let chunk = Hash::of(bytes.as_bytes());
    let at = dir.join(paths::chunk(chunk));
    std::fs::create_dir_all(at.parent().ok_or("a chunk lies in a folder")?)?;
    std::fs::write(at, &bytes)?;
    let len = u32::try_from(bytes.len())?;
    let pin = PinRow { size: len.into(), mtime_ns: None, etag: None };
    Ok(NewChunk { chunk, len, object: Some(paths::chunk(chunk)), offset: 0, pin })
}

fn generate(dir: &Path, n: u64) -> Result<(), Any> {
    let mut tables = TablesWriter::create(dir, SampleRule::file(), LayoutParams::PACK)?;
    let mut chunk = None;
    for i in 0..n {
        let new = if i.is_multiple_of(IN_A_CHUNK) { Some(write_chunk(dir, i, n)?) } else { None };
        chunk = new.as_ref().map_or(chunk, |new| Some(new.chunk));
        let hash = Hash::of(format!("{i:016}").as_bytes());
        let path = format!("{:06}/{i:09}.bin", i / IN_A_DIRECTORY);
        let entry = Entry::file(path, BYTES.into(), hash);
        let chunk_offset = u32::try_from(i % IN_A_CHUNK)? * BYTES;
        let slices =
            vec![Slice { chunk: chunk.ok_or("the first file begins a chunk")?, chunk_offset, len: BYTES }];
        tables.push(NewRow { entry, slices, chunks: new.into_iter().collect() })?;
    }
    let created = Provenance {
        created_unix_ns: 1,
        indexed_at_ns: 1,
        tool: "generate".into(),
        origin: None,
        faults: Vec::new(),
    };
    let written = tables.finish(created)?;
    for (path, file) in &written.files {
        let at = dir.join(path);
        std::fs::create_dir_all(at.parent().ok_or("a table lies in a folder")?)?;
        std::fs::rename(file, at)?;
    }
    let tag = dir.join(paths::tag(&"latest".parse()?));
    std::fs::create_dir_all(tag.parent().ok_or("a tag lies in a folder")?)?;
    std::fs::write(tag, TagDoc::new(written.root, written.layout, 1).to_bytes()?)?;
    println!("{n} files, root {}, layout {}", written.root, written.layout);
    Ok(())
}

fn main() -> Result<(), Any> {
    let mut args = std::env::args().skip(1);
    let (Some(dir), Some(n)) = (args.next(), args.next()) else {
        return Err("generate DIR N".into());
    };
    std::fs::create_dir_all(&dir)?;
    generate(Path::new(&dir), n.parse()?)
}
