//! Writes the tables of a version to the tables location.
//!
//! Tables come first, documents after them, the tag last: a reader that resolves the tag finds all of it.
//! A file with the same bytes is kept. A root names its entries and a layout its placement, but every run
//! has new pins and a new time. So `chunks.parquet` and then `layout.json` are overwritten, in this order:
//! a reader never believes pins for longer than they were true. A manifest of the same root is kept with
//! its time of creation, which a mount shows as the time of every file.

use crate::failure::Failure;
use crate::tables_location::TablesLocation;
use bytes::Bytes;
use fletch_core::Root;
use fletch_origin::{Origin, OriginError, PutMode};
use fletch_tables::{Manifest, WrittenVersion, paths};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Bytes compared at a time.
const PIECE_BYTES: u64 = 4 << 20;

fn cannot_write(tables: &TablesLocation, e: OriginError) -> Failure {
    at_another_place(e.into(), tables)
}

/// Adds to the failure of a tables location that another one can be named.
pub fn at_another_place(failure: Failure, tables: &TablesLocation) -> Failure {
    failure.hint(format!(
        "the tables could not be written to {}; name a location that you may write with --tables URI \
         (files that were read are not read again)",
        tables.uri()
    ))
}

async fn same_bytes(origin: &Origin, path: &str, local: &Path) -> Result<bool, Failure> {
    let file = std::fs::File::open(local);
    let file = file.map_err(|e| Failure::io(format_args!("cannot read {}", local.display()), &e))?;
    let size = file.metadata().map_err(|e| Failure::io(local.display(), &e))?.len();
    match origin.head(path).await {
        Ok(meta) if meta.size == size => {}
        Ok(_) | Err(OriginError::NotFound { .. }) => return Ok(false),
        Err(e) => return Err(e.into()),
    }
    let mut mine = Vec::new();
    let mut at = 0;
    while at < size {
        let end = size.min(at + PIECE_BYTES);
        mine.resize(usize::try_from(end - at).unwrap_or(0), 0);
        let read: io::Result<()> = file.read_exact_at(&mut mine, at);
        read.map_err(|e| Failure::io(local.display(), &e))?;
        if origin.get(path, Some(at..end), None).await?.bytes != mine {
            return Ok(false);
        }
        at = end;
    }
    Ok(true)
}

/// Whether both manifests are equal apart from their time and tool.
fn same_manifest(theirs: &[u8], ours: &[u8], root: Root) -> bool {
    match (Manifest::parse(theirs, root), Manifest::parse(ours, root)) {
        (Ok(a), Ok(b)) => {
            let timeless = |m: Manifest| Manifest { created: String::new(), tool: String::new(), ..m };
            timeless(a) == timeless(b)
        }
        _ => false,
    }
}

/// Writes the tables and documents of a version.
///
/// # Errors
/// [`Failure`] when the location cannot be written, or `stop` was set.
pub async fn publish(
    tables: &TablesLocation,
    written: &WrittenVersion,
    stop: &AtomicBool,
) -> Result<(), Failure> {
    let origin = tables.origin();
    for (path, local) in &written.files {
        Failure::if_stopped(stop)?;
        if *path == paths::manifest(written.root) {
            let ours = std::fs::read(local).map_err(|e| Failure::io(local.display(), &e))?;
            match origin.put(path, Bytes::from(ours.clone()), PutMode::Create).await {
                Ok(()) => {}
                Err(OriginError::AlreadyExists { .. }) => {
                    let theirs = origin.get(path, None, None).await?;
                    if !same_manifest(&theirs.bytes, &ours, written.root) {
                        let put = origin.put(path, ours.into(), PutMode::Overwrite).await;
                        put.map_err(|e| cannot_write(tables, e))?;
                    }
                }
                Err(e) => return Err(cannot_write(tables, e)),
            }
            continue;
        }
        match origin.put_file(path, local, PutMode::Create).await {
            Ok(()) => {}
            Err(OriginError::AlreadyExists { .. }) => {
                if !same_bytes(origin, path, local).await? {
                    let put = origin.put_file(path, local, PutMode::Overwrite).await;
                    put.map_err(|e| cannot_write(tables, e))?;
                }
            }
            Err(e) => return Err(cannot_write(tables, e)),
        }
    }
    Ok(())
}
