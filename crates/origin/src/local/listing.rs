//! Lists the regular files of a tree in the byte order of their paths.

use super::{Confinement, TEMPORARY, meta_of};
use crate::OriginError;
use crate::object::ObjectMeta;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::mpsc;

/// The most items that wait between the walking thread and the stream.
const QUEUE_ITEMS_MAX: usize = 256;

type Item = Result<ObjectMeta, OriginError>;

/// Lists the files below `prefix`, on a blocking thread that ends when the stream is dropped.
///
/// Holds the names of one directory per level in memory.
pub(crate) fn list(
    confinement: Confinement,
    dir: PathBuf,
    what: String,
    prefix: String,
    io_timeout: Duration,
) -> BoxStream<'static, Item> {
    let (send, receive) = mpsc::channel(QUEUE_ITEMS_MAX);
    // The walk begins when the stream is first polled.
    let start = futures::stream::once(async move {
        let named = what.clone();
        tokio::task::spawn_blocking(move || {
            // The receiver is gone: there is nothing left to do.
            let _ = match confinement.check_dir(&dir.join(&prefix), &named) {
                Ok(()) => walk(&dir, &named, &prefix, &send),
                Err(e) => send.blocking_send(Err(e)).map_err(|_| Closed),
            };
        });
        futures::stream::unfold(Some((receive, what)), move |state| async move {
            let (mut receive, what) = state?;
            match tokio::time::timeout(io_timeout, receive.recv()).await {
                Ok(item) => Some((item?, Some((receive, what)))),
                Err(_) => {
                    let why = "the file system did not answer within io_timeout".to_owned();
                    Some((Err(OriginError::Unavailable { what, why }), None))
                }
            }
        })
    });
    start.flatten().boxed()
}

struct Closed;

fn walk(dir: &Path, what: &str, prefix: &str, send: &mpsc::Sender<Item>) -> Result<(), Closed> {
    let at = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
    match children(&dir.join(prefix)) {
        // A missing directory has no files, as in a store.
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(()),
        read => below(what, &at, read, send),
    }
}

/// One name of a directory. The key sorts like the path; a directory's key is `name/`.
struct Child {
    key: Vec<u8>,
    entry: std::fs::DirEntry,
    is_dir: bool,
}

fn children(dir: &Path) -> io::Result<Vec<io::Result<Child>>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let child = entry.and_then(|entry| {
            let kind = entry.file_type()?;
            let mut key = entry.file_name().as_bytes().to_vec();
            if kind.is_dir() {
                key.push(b'/');
            }
            Ok((kind.is_dir() || kind.is_file()).then_some(Child { key, entry, is_dir: kind.is_dir() }))
        });
        found.extend(child.transpose());
    }
    // Errors first: they have no name to sort by.
    found.sort_by(|a, b| a.as_ref().ok().map(|c| &c.key).cmp(&b.as_ref().ok().map(|c| &c.key)));
    Ok(found)
}

fn below(
    what: &str,
    at: &str,
    read: io::Result<Vec<io::Result<Child>>>,
    send: &mpsc::Sender<Item>,
) -> Result<(), Closed> {
    let give = |item: Item| send.blocking_send(item).map_err(|_| Closed);
    let fault = |e: &io::Error| Err(OriginError::io(&format!("{what} at {at:?}"), e));
    let found = match read {
        Ok(found) => found,
        Err(e) => return give(fault(&e)),
    };
    for child in found {
        let child = match child {
            Ok(child) => child,
            Err(e) => {
                give(fault(&e))?;
                continue;
            }
        };
        let Ok(name) = child.entry.file_name().into_string() else {
            let shown = format!("{what}: {at}{}", child.entry.file_name().to_string_lossy());
            give(Err(OriginError::invalid(shown, "the file name is not UTF-8; rename the file")))?;
            continue;
        };
        let path = format!("{at}{name}");
        if child.is_dir {
            let read = children(&child.entry.path());
            below(what, &format!("{path}/"), read, send)?;
        } else if !name.starts_with(TEMPORARY) {
            match child.entry.metadata() {
                Ok(meta) if meta.is_file() => give(Ok(meta_of(&path, &meta)))?,
                // The file was replaced or removed after the directory was read.
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => give(fault(&e))?,
            }
        }
    }
    Ok(())
}
