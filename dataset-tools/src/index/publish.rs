//! Puts the tables of a version in place: tables first, documents last, the tag at the end.
//!
//! What lies there already is kept when it says the same. A root names its entries and a layout
//! its placement, but the pins of the objects and the time of the run are new with every run:
//! `chunks.parquet` and then `layout.json` are written over (in that order, so that pins are
//! never believed for longer than they were true). An existing manifest of the same root is
//! kept with its time of creation, which is the time the files show in a mount.

use crate::failure::{Exit, Failure};
use crate::place::Place;
use bytes::Bytes;
use fletch_core::{Root, TagName};
use fletch_origin::{Origin, OriginError, PutMode};
use fletch_tables::{Manifest, TagDoc, WrittenVersion, paths};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Compared at a time.
const PIECE_BYTES: u64 = 4 << 20;

fn cannot_write(place: &Place, e: OriginError) -> Failure {
    Failure::from(e).hint(format!(
        "the tables could not be written to {}; name a place you may write with --to URI (what was read is remembered, so running again is quick)",
        place.uri()
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

/// Whether the manifest that is there describes the same as ours, apart from when.
fn same_manifest(theirs: &[u8], ours: &[u8], root: Root) -> bool {
    match (Manifest::parse(theirs, root), Manifest::parse(ours, root)) {
        (Ok(a), Ok(b)) => {
            let timeless = |m: Manifest| Manifest { created: String::new(), tool: String::new(), ..m };
            timeless(a) == timeless(b)
        }
        _ => false,
    }
}

/// Puts everything in place.
///
/// # Errors
/// [`Failure`] when the place cannot be written, or `stop` was set.
pub async fn publish(place: &Place, written: &WrittenVersion, stop: &AtomicBool) -> Result<(), Failure> {
    let origin = place.origin();
    for (path, local) in &written.files {
        if stop.load(Relaxed) {
            return Err(Failure::new("stopped").exit(Exit::Interrupted));
        }
        if *path == paths::manifest(written.root) {
            let ours = std::fs::read(local).map_err(|e| Failure::io(local.display(), &e))?;
            match origin.put(path, Bytes::from(ours.clone()), PutMode::Create).await {
                Ok(()) => {}
                Err(OriginError::AlreadyExists { .. }) => {
                    let theirs = origin.get(path, None, None).await?;
                    if !same_manifest(&theirs.bytes, &ours, written.root) {
                        let put = origin.put(path, ours.into(), PutMode::Overwrite).await;
                        put.map_err(|e| cannot_write(place, e))?;
                    }
                }
                Err(e) => return Err(cannot_write(place, e)),
            }
            continue;
        }
        match origin.put_file(path, local, PutMode::Create).await {
            Ok(()) => {}
            Err(OriginError::AlreadyExists { .. }) => {
                if !same_bytes(origin, path, local).await? {
                    let put = origin.put_file(path, local, PutMode::Overwrite).await;
                    put.map_err(|e| cannot_write(place, e))?;
                }
            }
            Err(e) => return Err(cannot_write(place, e)),
        }
    }
    Ok(())
}

/// Moves a tag to what was written.
///
/// # Errors
/// [`Failure`] when the place cannot be written.
pub async fn tag(place: &Place, tag: &TagName, written: &WrittenVersion, now_ns: u64) -> Result<(), Failure> {
    place.put_tag(tag, &TagDoc::new(written.root, written.layout, now_ns)).await
}
