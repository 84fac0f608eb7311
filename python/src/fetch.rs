//! Fetches many whole files of a version in few requests, and checks each one by its own hash.
//!
//! A server of this node puts what it has at hand into memory that it shares with this process. The rest
//! comes by HTTP.
//!
//! Invariants
//! 1. The bytes of every file and chunk match the hash in the version's tables (I1), whichever server sent
//!    them. With `verify="server"`, a server of this node alone compares what it puts into shared memory.
//!    Of a [`Portion::Span`] the server alone compares the bytes.
//! 2. Memory in flight is bounded: [`REQUESTS`] requests of [`REQUEST_BYTES`], and the result. Shared memory
//!    is the server's; what of it views hold is not used again until they are dropped.
//! 3. A view of a small file keeps only that file's bytes alive.

use crate::errors::Failure;
use bytes::{Bytes, BytesMut};
use fletch_api::{BATCH_ITEMS_MAX, BatchItem, ChunkSpan};
use fletch_client::{
    ClientError, PlacedItem,
    hits::{Verify, WindowRead},
};
use fletch_core::groups::GroupRun;
use fletch_core::manifest::{CHUNK_BYTES_MAX, EntryKind, Slice, locate::ChunkRange};
use fletch_core::{Expected, Hash, Verified};
use fletch_tables::Found;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use pyo3::prelude::*;
use std::ops::Range;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// The most content bytes of one request. A longer file is read in several requests.
const REQUEST_BYTES: u64 = 16 << 20;
/// The most files of one request. More files do not raise the throughput.
const REQUEST_ITEMS: usize = if BATCH_ITEMS_MAX < 256 { BATCH_ITEMS_MAX } else { 256 };
/// The number of concurrent requests.
const REQUESTS: usize = 2;
/// The longest file that is read whole.
const READ_BYTES_MAX: u64 = 4 << 30;
/// A file of at most this many bytes is copied out of its response, which other files share.
const COPY_BYTES_MAX: usize = 16 << 10;
/// A file above this many bytes is hashed on a blocking thread.
const INLINE_HASH_BYTES: usize = 1 << 20;
/// The number of retries after wrong bytes.
const WRONG_MAX: u32 = 1;
/// The first and the longest pause between attempts. Each pause is twice the one before.
const WAITS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// An entry that a caller names.
#[derive(Debug, Clone, FromPyObject)]
pub enum Item {
    /// The entry's position in the version.
    Ordinal(u64),
    /// The entry's path. A member's path is its shard's path, `/`, and the member's name.
    Path(String),
}

/// The open tables of a version, and the client that reads its bytes.
#[derive(Debug, Clone)]
pub struct OpenVersion {
    pub client: fletch_client::Client,
    pub version: fletch_tables::Version,
    /// Who hashes what a server of this node puts into the memory that it shares.
    pub verify: Verify,
}

/// Returns the entry that an item names.
///
/// # Errors
/// [`Failure::Absent`] if the version has no such entry, or an error of the tables.
pub async fn find(open: &OpenVersion, item: &Item) -> Result<Found, Failure> {
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

/// What is read of a file.
#[derive(Debug, Clone)]
pub enum Portion {
    /// All of it, checked by its own hash.
    Whole,
    /// The whole chunk of one of its slices, checked by the chunk's hash.
    Chunk(Slice),
    /// Groups of a chunk, checked by hashes that make the chunk's name.
    Groups(GroupRun),
    /// A range of a chunk, of which only the length is checked.
    Span(ChunkRange),
}

fn span(hash: Hash, range: &Range<usize>) -> PlacedItem {
    let (offset, length) = (range.start as u64, Some(range.len() as u64));
    BatchItem::Chunk(ChunkSpan { hash, offset, length }).into()
}

/// A file, or a part of it, to read.
#[derive(Debug, Clone)]
pub struct FileRequest {
    /// The position in the result.
    pub at: usize,
    /// The file.
    pub found: Found,
    /// What of it is read.
    pub portion: Portion,
}

impl FileRequest {
    fn path(&self) -> String {
        crate::entry::shown(self.found.entry().path)
    }

    /// Returns the number of bytes; for a chunk, at least so many.
    pub fn size(&self) -> u64 {
        match &self.portion {
            Portion::Whole => self.found.entry().size,
            Portion::Chunk(slice) => u64::from(slice.chunk_offset) + u64::from(slice.len),
            Portion::Groups(run) => u64::from(run.len()),
            Portion::Span(span) => span.range.len() as u64,
        }
    }

    fn size_max(&self) -> u64 {
        match &self.portion {
            Portion::Chunk(_) => u64::from(CHUNK_BYTES_MAX),
            Portion::Whole | Portion::Groups(_) | Portion::Span(_) => self.size(),
        }
    }

    /// Returns the item of a batch, with the chunk by which its server is chosen.
    fn item(&self) -> PlacedItem {
        match &self.portion {
            Portion::Whole => {
                let chunk = self.found.slices().first().map(|slice| slice.chunk);
                PlacedItem { item: BatchItem::Ordinal(self.found.ordinal), chunk }
            }
            Portion::Chunk(slice) => {
                BatchItem::Chunk(ChunkSpan { hash: slice.chunk, offset: 0, length: None }).into()
            }
            Portion::Groups(run) => span(run.of().chunk(), &run.range()),
            Portion::Span(ChunkRange { slice, range, .. }) => span(slice.chunk, range),
        }
    }

    /// Returns how a server of this node is asked for the file: as a chunk of its own, or by its path. `None`
    /// if it lies in several chunks, and for a part of a chunk.
    fn window_read(&self) -> Option<WindowRead> {
        let entry = self.found.entry();
        match &self.portion {
            Portion::Whole => {
                let (hash, [slice]) = (entry.hash?, self.found.slices()) else { return None };
                let path = (slice.chunk != hash).then(|| entry.path.to_owned());
                Some(WindowRead { path, hash, size: u32::try_from(entry.size).ok()? })
            }
            // A chunk of a file ends where the file's slice ends. That of a shard may have more members.
            Portion::Chunk(slice) if entry.kind == EntryKind::File => {
                Some(WindowRead { path: None, hash: slice.chunk, size: slice.chunk_offset + slice.len })
            }
            Portion::Chunk(_) | Portion::Groups(_) | Portion::Span(_) => None,
        }
    }

    /// Returns the bytes if they match the hash of the file or chunk. Those of a span must have its length.
    async fn checked(&self, bytes: Bytes) -> Result<Bytes, Failure> {
        let expected = match &self.portion {
            Portion::Whole => self.found.entry().hash.map(Expected::Whole),
            Portion::Chunk(slice) => Some(Expected::Whole(slice.chunk)),
            Portion::Groups(run) => Some(Expected::Run(run.clone())),
            Portion::Span(span) if span.range.len() == bytes.len() => return Ok(bytes),
            Portion::Span(span) => {
                let why = format!("{} bytes came, and {} were asked for", bytes.len(), span.range.len());
                return Err(Failure::Protocol { path: self.path(), why });
            }
        };
        let Some(expected) = expected else {
            return Err(Failure::Protocol {
                path: self.path(),
                why: "its row in the tables has no hash".into(),
            });
        };
        let inline = bytes.len() <= INLINE_HASH_BYTES;
        let check = move || Verified::check(expected, bytes);
        let checked = if inline {
            check()
        } else {
            let lost = |_| Failure::Client(ClientError::Config("the runtime ended during the read".into()));
            tokio::task::spawn_blocking(check).await.map_err(lost)?
        };
        let verified = checked.map_err(|mismatch| Failure::Corrupt { path: self.path(), mismatch })?;
        let bytes = verified.bytes();
        Ok(if bytes.len() <= COPY_BYTES_MAX { Bytes::copy_from_slice(bytes) } else { bytes.clone() })
    }
}

/// Reads whole files, within the client's timeout. Returns them in the order of `items`.
///
/// # Errors
/// The error of the first item that cannot be read. The bytes of the other items are dropped.
pub async fn read_many(open: &OpenVersion, items: &[Item]) -> Result<Vec<Bytes>, Failure> {
    let until = Instant::now() + open.client.io_timeout();
    read_all(open, file_requests(open, items).await?, until).await
}

/// Finds the files that items name.
///
/// # Errors
/// The error of the first item that is not a readable file.
pub async fn file_requests(open: &OpenVersion, items: &[Item]) -> Result<Vec<FileRequest>, Failure> {
    let mut wanted = Vec::with_capacity(items.len());
    for (at, item) in items.iter().enumerate() {
        let found = find(open, item).await?;
        readable(&found)?;
        let entry = found.entry();
        if entry.size > READ_BYTES_MAX {
            let (path, size) = (crate::entry::shown(entry.path), entry.size);
            return Err(Failure::Invalid(format!(
                "{path:?} has {size} bytes, the limit of a whole file is {READ_BYTES_MAX}; read ranges of it"
            )));
        }
        wanted.push(FileRequest { at, found, portion: Portion::Whole });
    }
    Ok(wanted)
}

/// Returns the bytes of all files together.
pub fn bytes_of(wanted: &[FileRequest]) -> u64 {
    wanted.iter().map(FileRequest::size).sum()
}

/// Reads files, or parts of them, until a deadline. Returns each at its position.
///
/// # Errors
/// The error of the first file that cannot be read in time.
pub async fn read_all(
    open: &OpenVersion,
    wanted: Vec<FileRequest>,
    until: Instant,
) -> Result<Vec<Bytes>, Failure> {
    let mut out = vec![Bytes::new(); wanted.len()];
    let wanted = read_in_window(open, wanted, &mut out).await;
    let mut reads =
        stream::iter(grouped(wanted)).map(|r| read_group(open, r, until)).buffer_unordered(REQUESTS);
    while let Some(read) = reads.try_next().await? {
        for (at, bytes) in read {
            out[at] = bytes;
        }
    }
    Ok(out)
}

/// Reads what a server of this node has at hand into `out`, and returns the files that are left.
async fn read_in_window(open: &OpenVersion, wanted: Vec<FileRequest>, out: &mut [Bytes]) -> Vec<FileRequest> {
    if open.client.hits().is_none() {
        return wanted;
    }
    let (mut one, mut reads, mut left) = (Vec::with_capacity(wanted.len()), Vec::new(), Vec::new());
    for file in wanted {
        match file.window_read() {
            Some(read) => {
                reads.push(read);
                one.push(file);
            }
            None => left.push(file),
        }
    }
    let got = open.client.read_in_window(open.version.root(), reads, open.verify).await;
    for (file, bytes) in one.into_iter().zip(got) {
        match bytes {
            Some(bytes) => out[file.at] = bytes,
            None => left.push(file),
        }
    }
    left
}

/// Checks that an entry has bytes.
///
/// # Errors
/// [`Failure::Invalid`] for a link or an empty directory.
pub fn readable(found: &Found) -> Result<(), Failure> {
    let entry = found.entry();
    let path = crate::entry::shown(entry.path);
    match entry.kind {
        EntryKind::File | EntryKind::Member => Ok(()),
        EntryKind::Symlink => {
            Err(Failure::Invalid(format!("{path:?} is a link to {:?}; read its target", entry.target)))
        }
        EntryKind::EmptyDir => {
            Err(Failure::Invalid(format!("{path:?} is an empty directory, which has no bytes to read")))
        }
    }
}

/// Groups files into requests: neighbours together, a long file alone.
fn grouped(wanted: Vec<FileRequest>) -> Vec<Vec<FileRequest>> {
    let mut out: Vec<Vec<FileRequest>> = Vec::new();
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

/// Reads the files of one request, and retries until the deadline.
async fn read_group(
    open: &OpenVersion,
    mut wanted: Vec<FileRequest>,
    until: Instant,
) -> Result<Vec<(usize, Bytes)>, Failure> {
    let mut done = Vec::with_capacity(wanted.len());
    let (mut pause, mut wrong) = (WAITS.0, 0);
    loop {
        let attempt = match wanted.as_slice() {
            [one @ FileRequest { portion: Portion::Whole, .. }] if one.size() > REQUEST_BYTES => {
                match read_long_file(open, one, until).await {
                    Ok(bytes) => return Ok(vec![(one.at, bytes)]),
                    Err(e) => Err(e),
                }
            }
            _ => try_batch(open, &mut wanted, &mut done, until).await,
        };
        let error = match attempt {
            Ok(None) if wanted.is_empty() => return Ok(done),
            // A missing file was not hashed, so it must not count as read.
            Ok(None) => {
                let why = format!("the server did not answer {} files", wanted.len());
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

/// Tries once to read several files, and moves those that arrive from `wanted` to `done`.
///
/// Returns the error of a file that did not arrive, if there is one. An error that a retry cannot repair
/// comes first.
async fn try_batch(
    open: &OpenVersion,
    wanted: &mut Vec<FileRequest>,
    done: &mut Vec<(usize, Bytes)>,
    until: Instant,
) -> Result<Option<Failure>, Failure> {
    let items: Vec<PlacedItem> = wanted.iter().map(FileRequest::item).collect();
    let longest = wanted.iter().map(FileRequest::size_max).max().unwrap_or(0);
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
            let why = format!("the server answered item {}, expected item {seen}", piece.index);
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
                // Prefer the error that a retry cannot repair: the caller must act on it.
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

/// Reads a file that is longer than a request, slice by slice.
async fn read_long_file(open: &OpenVersion, one: &FileRequest, until: Instant) -> Result<Bytes, Failure> {
    let slices = one.found.slices();
    let mut parts = stream::iter(slices.iter().copied().map(|s| async move {
        let span =
            ChunkSpan { hash: s.chunk, offset: u64::from(s.chunk_offset), length: Some(u64::from(s.len)) };
        let client = open.client.within(until.saturating_duration_since(Instant::now()));
        let items = vec![BatchItem::Chunk(span)];
        let mut batch = client.batch(open.version.root(), items, u64::from(s.len)).await?;
        let Some(piece) = batch.next().await? else {
            return Err(Failure::Protocol {
                path: one.path(),
                why: "the server did not answer one of its chunks".into(),
            });
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
