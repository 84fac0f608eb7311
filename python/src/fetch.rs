//! Reading: many whole files of a version over few requests, each checked by its own hash.
//!
//! Invariants
//! 1. Every file's bytes hash to what the version's tables say (I1), whoever sent them.
//! 2. Memory in flight is bounded: [`REQUESTS`] requests of [`REQUEST_BYTES`], and the result.
//! 3. A view of a small file keeps nothing but that file alive.

use crate::errors::Failure;
use crate::version::Open;
use bytes::{Bytes, BytesMut};
use fletch_api::{BATCH_ITEMS_MAX, BatchItem, ChunkSpan};
use fletch_client::ClientError;
use fletch_core::Verified;
use fletch_core::manifest::EntryKind;
use fletch_tables::Found;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use pyo3::prelude::*;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Content bytes of one request; a longer file is read by several.
const REQUEST_BYTES: u64 = 16 << 20;
/// Files of one request: more bring no more.
const REQUEST_ITEMS: usize = if BATCH_ITEMS_MAX < 256 { BATCH_ITEMS_MAX } else { 256 };
/// Requests at once.
const REQUESTS: usize = 2;
/// No longer file is read whole.
const READ_BYTES_MAX: u64 = 4 << 30;
/// Files up to this many bytes are copied out of what they came in, which others may share.
const COPY_BYTES_MAX: usize = 16 << 10;
/// Above this many bytes a file is hashed on a blocking thread.
const INLINE_HASH_BYTES: usize = 1 << 20;
/// Wrong bytes are asked for again this often.
const WRONG_MAX: u32 = 1;
/// Waits between attempts: doubled from the first to the last.
const WAITS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// What is asked for.
#[derive(Debug, Clone, FromPyObject)]
pub enum Item {
    /// An entry's position.
    Ordinal(u64),
    /// An entry's path; a member's is its shard's path, `/`, and the member's name.
    Path(String),
}

/// The entry that an item names.
pub async fn find(open: &Open, item: &Item) -> Result<Found, Failure> {
    let version = &open.version;
    let absent = || match item {
        Item::Ordinal(n) => {
            Failure::Absent(format!("there is no entry {n}; the version has {}", version.manifest().entries))
        }
        Item::Path(p) => Failure::Absent(format!("there is no entry {p:?} in the version")),
    };
    match item {
        Item::Ordinal(n) => version.entry(*n).await?.ok_or_else(absent),
        Item::Path(path) => {
            if let Some(found) = version.find(path).await? {
                return Ok(found);
            }
            for (slash, _) in path.match_indices('/') {
                let member = format!("{}\0{}", &path[..slash], &path[slash + 1..]);
                if let Some(found) = version.find(&member).await? {
                    return Ok(found);
                }
            }
            Err(absent())
        }
    }
}

/// A file to read.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Which of the items it is.
    at: usize,
    found: Found,
}

impl Wanted {
    fn path(&self) -> String {
        crate::entry::shown(self.found.entry().path)
    }

    fn size(&self) -> u64 {
        self.found.entry().size
    }

    /// The bytes, if they are this file's.
    async fn checked(&self, bytes: Bytes) -> Result<Bytes, Failure> {
        let Some(hash) = self.found.entry().hash else {
            return Err(Failure::Protocol { path: self.path(), why: "its tables have no hash".into() });
        };
        let check = move || Verified::check(hash, bytes);
        let checked = if self.size() <= INLINE_HASH_BYTES as u64 {
            check()
        } else {
            let lost = |_| Failure::Client(ClientError::Config("the runtime is going down".into()));
            tokio::task::spawn_blocking(check).await.map_err(lost)?
        };
        let verified = checked.map_err(|mismatch| Failure::Corrupt { path: self.path(), mismatch })?;
        let bytes = verified.bytes();
        Ok(if bytes.len() <= COPY_BYTES_MAX { Bytes::copy_from_slice(bytes) } else { bytes.clone() })
    }
}

/// Whole files, in the order asked.
///
/// # Errors
/// The first item that cannot be read; the others' bytes are dropped.
pub async fn read_many(open: &Open, items: &[Item]) -> Result<Vec<Bytes>, Failure> {
    let until = Instant::now() + open.client.io_timeout();
    read_all(open, wanted(open, items).await?, until).await
}

/// Which files items name.
///
/// # Errors
/// The first item that is none.
pub async fn wanted(open: &Open, items: &[Item]) -> Result<Vec<Wanted>, Failure> {
    let mut wanted = Vec::with_capacity(items.len());
    for (at, item) in items.iter().enumerate() {
        let found = find(open, item).await?;
        readable(&found)?;
        wanted.push(Wanted { at, found });
    }
    Ok(wanted)
}

/// Bytes of all of them.
pub fn bytes_of(wanted: &[Wanted]) -> u64 {
    wanted.iter().map(Wanted::size).sum()
}

/// Files, in the order in which they were asked for.
///
/// # Errors
/// The first that cannot be read until then.
pub async fn read_all(open: &Open, wanted: Vec<Wanted>, until: Instant) -> Result<Vec<Bytes>, Failure> {
    let mut out = vec![Bytes::new(); wanted.len()];
    let mut reads =
        stream::iter(requests(wanted)).map(|r| request(open, r, until)).buffer_unordered(REQUESTS);
    while let Some(read) = reads.try_next().await? {
        for (at, bytes) in read {
            out[at] = bytes;
        }
    }
    Ok(out)
}

fn readable(found: &Found) -> Result<(), Failure> {
    let entry = found.entry();
    let path = crate::entry::shown(entry.path);
    match entry.kind {
        EntryKind::File | EntryKind::Member if entry.size > READ_BYTES_MAX => Err(Failure::Invalid(format!(
            "{path:?} has {} bytes and is read whole, at most {READ_BYTES_MAX}; read it through a mount",
            entry.size
        ))),
        EntryKind::File | EntryKind::Member => Ok(()),
        EntryKind::Symlink => {
            Err(Failure::Invalid(format!("{path:?} is a link to {:?}; read what it names", entry.target)))
        }
        EntryKind::EmptyDir => Err(Failure::Invalid(format!("{path:?} is an empty directory"))),
    }
}

/// Files in requests: neighbours together, a long file alone.
fn requests(wanted: Vec<Wanted>) -> Vec<Vec<Wanted>> {
    let mut out: Vec<Vec<Wanted>> = Vec::new();
    let mut bytes = 0;
    for w in wanted {
        match out.last_mut() {
            Some(last) if last.len() < REQUEST_ITEMS && bytes + w.size() <= REQUEST_BYTES => {
                bytes += w.size();
                last.push(w);
            }
            _ => {
                bytes = w.size();
                out.push(vec![w]);
            }
        }
    }
    out
}

async fn request(
    open: &Open,
    mut wanted: Vec<Wanted>,
    until: Instant,
) -> Result<Vec<(usize, Bytes)>, Failure> {
    let mut done = Vec::with_capacity(wanted.len());
    let (mut pause, mut wrong) = (WAITS.0, 0);
    loop {
        let attempt = match wanted.as_slice() {
            [one] if one.size() > REQUEST_BYTES => match long(open, one, until).await {
                Ok(bytes) => return Ok(vec![(one.at, bytes)]),
                Err(e) => Err(e),
            },
            _ => batch(open, &mut wanted, &mut done, until).await,
        };
        let error = match attempt {
            Ok(None) if wanted.is_empty() => return Ok(done),
            // What did not come was not hashed.
            Ok(None) => {
                let why = format!("{} files were not answered", wanted.len());
                Failure::Protocol { path: "batch".into(), why }
            }
            Ok(Some(e)) | Err(e) => e,
        };
        match error {
            Failure::Corrupt { .. } if wrong < WRONG_MAX => wrong += 1,
            e if !e.kind().retryable() => return Err(e),
            e if Instant::now() + pause >= until => return Err(e),
            _ => sleep(pause).await,
        }
        pause = (pause * 2).min(WAITS.1);
    }
}

/// One attempt at several files: those that came leave `wanted`. What is wrong with the first that
/// did not come, if any.
async fn batch(
    open: &Open,
    wanted: &mut Vec<Wanted>,
    done: &mut Vec<(usize, Bytes)>,
    until: Instant,
) -> Result<Option<Failure>, Failure> {
    let items = wanted.iter().map(|w| BatchItem::Ordinal(w.found.ordinal)).collect();
    let longest = wanted.iter().map(Wanted::size).max().unwrap_or(0);
    let client = open.client.within(until.saturating_duration_since(Instant::now()));
    let mut batch = client.batch(open.version.root(), items, longest).await?;
    let mut left = Vec::new();
    let (mut seen, mut fault) = (0, None);
    let ended = loop {
        let piece = match batch.next().await {
            Ok(Some(piece)) => piece,
            Ok(None) => break None,
            Err(e) => break Some(Failure::from(e)),
        };
        let Some(w) = wanted.get(piece.index).filter(|_| piece.index == seen) else {
            let why = format!("item {} was answered, {seen} is next", piece.index);
            return Err(Failure::Protocol { path: "batch".into(), why });
        };
        seen += 1;
        let read = match piece.outcome {
            Ok(bytes) => w.checked(bytes).await,
            Err(problem) => Err(Failure::Item { path: w.path(), problem }),
        };
        match read {
            Ok(bytes) => done.push((w.at, bytes)),
            Err(e) => {
                left.push(w.clone());
                // What cannot be repaired by asking again is what the caller should hear of.
                if fault.as_ref().is_none_or(|f: &Failure| f.kind().retryable()) {
                    fault = Some(e);
                }
            }
        }
    };
    left.extend(wanted.drain(..).skip(seen));
    *wanted = left;
    Ok(fault.or(ended).filter(|_| !wanted.is_empty()))
}

/// A file longer than a request, slice by slice.
async fn long(open: &Open, one: &Wanted, until: Instant) -> Result<Bytes, Failure> {
    let slices = one.found.slices();
    let mut parts = stream::iter(slices.iter().copied().map(|s| async move {
        let span =
            ChunkSpan { hash: s.chunk, offset: u64::from(s.chunk_offset), length: Some(u64::from(s.len)) };
        let client = open.client.within(until.saturating_duration_since(Instant::now()));
        let items = vec![BatchItem::Chunk(span)];
        let mut batch = client.batch(open.version.root(), items, u64::from(s.len)).await?;
        let Some(piece) = batch.next().await? else {
            return Err(Failure::Protocol { path: one.path(), why: "no answer for a chunk of it".into() });
        };
        piece.outcome.map_err(|problem| Failure::Item { path: one.path(), problem })
    }))
    .buffered(REQUESTS);
    let mut out = BytesMut::with_capacity(usize::try_from(one.size()).unwrap_or(0));
    while let Some(part) = parts.try_next().await? {
        out.extend_from_slice(&part);
    }
    one.checked(out.freeze()).await
}
