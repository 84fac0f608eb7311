//! Checks the chunks of a pack: reads each object once, and hashes the chunk and every entry in it.
//!
//! The hash of an entry shows whether its placement points to the right bytes.

use super::{CHUNK_BYTES_MAX, FaultSink, VerifyFault, fault_of};
use crate::failure::Failure;
use crate::out::count;
use crate::pack::sorter::Sorter;
use fletch_core::Hash;
use fletch_core::manifest::Slice;
use fletch_origin::Origin;
use fletch_tables::{ChunkIndex, ObjectRef, Version};
use futures::{StreamExt, stream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use tokio::runtime::Handle;

/// The bytes of a row: chunk 32 · offset u32 · length u32 · ordinal u64 · BLAKE3 of the entry 32.
const ROW_BYTES: usize = 80;
/// The memory for sorting, in bytes. Rows beyond it are written out and merged.
const SORT_BYTES: usize = 64 << 20;
/// Chunks that are read together.
const BATCH: usize = 256;

/// The entries in chunks of a pack.
pub struct Packed {
    rows: Sorter<ROW_BYTES>,
}

/// An entry in a chunk.
struct Member {
    offset: u32,
    len: u32,
    ordinal: u64,
    hash: Hash,
}

/// A chunk and the entries in it.
struct Chunk {
    hash: Hash,
    members: Vec<Member>,
}

fn scratch_failed(e: &std::io::Error) -> Failure {
    Failure::io("cannot write temporary files", e).hint("free some space, or set TMPDIR")
}

fn u32_of(b: &[u8]) -> u32 {
    b.iter().fold(0, |n, &byte| n << 8 | u32::from(byte))
}

fn member(row: &[u8; ROW_BYTES]) -> Option<(Hash, Member)> {
    let ordinal = row[40..48].iter().fold(0, |n, &byte| n << 8 | u64::from(byte));
    let hash = Hash::try_from(&row[48..]).ok()?;
    let m = Member { offset: u32_of(&row[32..36]), len: u32_of(&row[36..40]), ordinal, hash };
    Some((Hash::try_from(&row[..32]).ok()?, m))
}

impl Packed {
    /// Starts with no entry.
    pub fn new(dir: &Path) -> Result<Self, Failure> {
        Ok(Packed { rows: Sorter::new(dir, SORT_BYTES).map_err(|e| scratch_failed(&e))? })
    }

    /// Adds an entry with one slice.
    pub fn push(&mut self, ordinal: u64, slice: &Slice, hash: Hash) -> Result<(), Failure> {
        let mut row = [0; ROW_BYTES];
        row[..32].copy_from_slice(slice.chunk.as_bytes());
        row[32..36].copy_from_slice(&slice.chunk_offset.to_be_bytes());
        row[36..40].copy_from_slice(&slice.len.to_be_bytes());
        row[40..48].copy_from_slice(&ordinal.to_be_bytes());
        row[48..].copy_from_slice(hash.as_bytes());
        self.rows.push(row).map_err(|e| scratch_failed(&e))
    }

    /// Reads and checks every chunk, `at_once` at a time.
    pub fn check(
        self,
        rt: &Handle,
        version: &Version,
        tables: &Origin,
        read: &AtomicU64,
        at_once: usize,
        sink: &mut FaultSink<'_>,
    ) -> Result<(), Failure> {
        let sorted = self.rows.finish().map_err(|e| scratch_failed(&e))?;
        let mut rows = sorted.merge();
        let index = rt.block_on(version.chunk_index())?;
        let mut batch: Vec<Chunk> = Vec::new();
        loop {
            let next = rows.next_row().map_err(|e| scratch_failed(&e))?.as_ref().and_then(member);
            let new = match (&next, batch.last()) {
                (Some((hash, _)), Some(last)) => *hash != last.hash,
                _ => true,
            };
            if new && (batch.len() >= BATCH || next.is_none()) {
                let faults = rt.block_on(async {
                    let checks = batch.drain(..).map(|chunk| check(version, &index, tables, read, chunk));
                    stream::iter(checks).buffered(at_once).collect::<Vec<_>>().await
                });
                for fault in faults {
                    if let Some(found) = fault? {
                        sink.push(&found)?;
                    }
                }
            }
            let Some((hash, member)) = next else { return Ok(()) };
            if new {
                batch.push(Chunk { hash, members: Vec::new() });
            }
            if let Some(chunk) = batch.last_mut() {
                chunk.members.push(member);
            }
        }
    }
}

/// Checks a chunk. Returns one fault for all its entries.
async fn check(
    version: &Version,
    index: &ChunkIndex,
    tables: &Origin,
    read: &AtomicU64,
    chunk: Chunk,
) -> Result<Option<VerifyFault>, Failure> {
    let Chunk { hash, members } = chunk;
    let first = version.entry(members.first().map_or(0, |m| m.ordinal)).await?;
    let first = first.map_or_else(String::new, |f| f.entry().path.to_owned());
    let held = format!("the chunk has {}, the first is {first}", count(members.len(), "entry"));
    let mut object = None;
    for (part, row) in index.find(hash) {
        let rows = version.chunk_rows(part).await?;
        if let Some(row) = rows.get(row).filter(|r| r.chunk == hash)
            && let ObjectRef::Key(key) = &row.object
        {
            object = Some((key.clone(), row.offset, row.len));
            break;
        }
    }
    let found = |path: &str, fault, why: String| Ok(Some(VerifyFault { path: path.to_owned(), fault, why }));
    let Some((key, offset, len)) = object else {
        return found(
            &hash.to_string(),
            "tables",
            format!("chunks.parquet has no object for this chunk; pack again; {held}"),
        );
    };
    if u64::from(len) > CHUNK_BYTES_MAX {
        return found(
            &key,
            "tables",
            format!("a chunk of {len} bytes is longer than the limit; pack again; {held}"),
        );
    }
    let got = match tables.get(&key, Some(offset..offset + u64::from(len)), None).await {
        Ok(got) => got,
        // The object is shorter than the chunk.
        Err(e @ fletch_origin::OriginError::Invalid { .. }) => {
            return found(&key, "changed", format!("{e}; {held}"));
        }
        Err(e) => {
            let fault = fault_of(&key, &e)?;
            return Ok(fault.map(|f| VerifyFault { why: format!("{}; {held}", f.why), ..f }));
        }
    };
    read.fetch_add(got.bytes.len() as u64, Relaxed);
    let judged = tokio::task::spawn_blocking(move || {
        if Hash::of(&got.bytes) != hash {
            return Some(None);
        }
        let differs = members.iter().find(|m| {
            let (from, to) = (m.offset as usize, m.offset as usize + m.len as usize);
            got.bytes.get(from..to).is_none_or(|bytes| Hash::of(bytes) != m.hash)
        });
        differs.map(|m| Some(m.ordinal))
    })
    .await;
    match judged.map_err(|e| Failure::new(format!("hashing {key} failed: {e}")))? {
        None => Ok(None),
        Some(None) => {
            let why = format!(
                "its bytes do not hash to its name: the storage is damaged; delete it and pack again; {held}"
            );
            found(&key, "corrupt", why)
        }
        Some(Some(ordinal)) => {
            let entry = version.entry(ordinal).await?;
            let path = entry.map_or_else(|| key.clone(), |f| f.entry().path.to_owned());
            found(&path, "tables", format!("its placement points to other bytes of chunk {hash}; pack again"))
        }
    }
}
