//! The second pass of a pack: reads each file once, assembles chunks, and writes each chunk as one object.
//!
//! Invariants
//! 1. A chunk holds bytes that were read under the pins of the first pass. An object that has changed since
//!    then is a fault that names it, never a wrong chunk.
//! 2. The object of a chunk appears whole or not at all, under the hash of its bytes.
//! 3. At most [`BYTES_MAX`] bytes of contents are in memory, for any number of chunks under way.

use super::catalogue::{Catalogue, Row};
use crate::failure::Failure;
use crate::run::Counters;
use crate::run::groups::RunGroups;
use crate::run::journal::chunks::{ChunkJournal, Fingerprint, Made};
use crate::run::journal::write_failed;
use crate::source::content::{Content, SliceHash, fold, hash_slice, slice_at, slice_count};
use crate::source::outage::OutageJudge;
use crate::source::pin::{origin_pin, pin_row};
use bytes::Bytes;
use fletch_core::Hash;
use fletch_core::manifest::pack::{ChunkPlan, PackParams};
use fletch_core::manifest::tar::shard::is_shard;
use fletch_origin::{Origin, OriginError, PutMode};
use fletch_tables::{Fault, PinRow, paths};
use futures::{StreamExt, stream};
use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering::Relaxed;
use tokio::sync::Semaphore;

/// The most bytes of contents in memory. During assembly the members of a chunk are in memory twice.
pub const BYTES_MAX: u32 = 128 << 20;
/// The most members of one chunk that are read at once from a store.
const MEMBERS_MAX: usize = 8;
/// The most slices of one long file that are read at once.
const SLICES_MAX: usize = 8;

/// Assembles and writes chunks.
pub struct Assembler<'a> {
    /// Where the dataset is.
    pub source: &'a Origin,
    /// Where the chunks go.
    pub tables: &'a Origin,
    /// The entries of the dataset.
    pub catalogue: &'a Catalogue,
    /// How members are aligned.
    pub params: PackParams,
    /// The results of stopped runs, and of this run.
    pub journal: RefCell<ChunkJournal>,
    /// Where the hashes of groups go.
    pub groups: RunGroups,
    /// The numbers of the run.
    pub counters: &'a Counters,
    /// Tells faults from outages.
    pub judge: &'a OutageJudge<'a>,
    /// The bytes of contents that may still be read into memory.
    pub memory: Semaphore,
    /// Whether files are only read for their faults, and no chunk is written (`--keep-going` after a fault).
    pub report_only: Cell<bool>,
}

/// Whether a chunk had to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkWrite {
    /// The run wrote it.
    Written,
    /// It existed already.
    Existed,
    /// The run only looks for faults and wrote no chunk.
    Unwritten,
}

/// A chunk and its members.
#[derive(Debug)]
pub struct Chunk {
    /// BLAKE3 of its bytes.
    pub hash: Hash,
    /// Its length in bytes.
    pub len: u32,
    /// Its members: row of the catalogue, BLAKE3 of the bytes, offset in the chunk.
    pub members: Vec<(u64, Hash, u32)>,
    /// Whether it had to be written.
    pub write: ChunkWrite,
}

/// The result of one piece of work.
#[derive(Debug)]
pub enum Done {
    /// A group: its chunk, unless every member is at fault, and the faults.
    Group(Option<Chunk>, Vec<Fault>),
    /// A long file: its row of the catalogue, and its hashes or its fault.
    Sliced(u64, Result<Content, Fault>),
}

/// Where the bytes of a member are at the dataset.
struct MemberSource {
    /// The path of the entry.
    path: String,
    /// The object: the file itself, or the shard of a tar member.
    object: String,
    pin: PinRow,
    offset: u64,
    len: u32,
    /// BLAKE3 of the bytes, if an earlier pass has read them.
    expected: Option<Hash>,
}

/// An assembled chunk: its bytes, its hash, and the hash and offset of each member.
struct AssembledChunk {
    bytes: Bytes,
    hash: Hash,
    members: Vec<(Hash, u32)>,
}

fn assemble(contents: &[Bytes], params: PackParams) -> AssembledChunk {
    let mut out: Vec<u8> = Vec::with_capacity(contents.iter().map(|b| b.len() + params.align as usize).sum());
    let mut members = Vec::with_capacity(contents.len());
    for bytes in contents {
        out.resize(out.len().next_multiple_of(params.align.max(1) as usize), 0);
        // A group has at most 16 MiB.
        members.push((Hash::of(bytes), u32::try_from(out.len()).unwrap_or(u32::MAX)));
        out.extend_from_slice(bytes);
    }
    let hash = Hash::of(&out);
    AssembledChunk { bytes: out.into(), hash, members }
}

fn lost(e: impl std::fmt::Display) -> Failure {
    Failure::new(format!("a chunk could not be assembled: {e}"))
}

fn changed() -> String {
    "it changed during the run; stop the program that writes to it and run again".into()
}

impl Assembler<'_> {
    fn row(&self, number: u64) -> Result<Row, Failure> {
        self.catalogue.row(number).map_err(|e| Failure::scratch(&e))
    }

    fn member(&self, number: u64, len: u32) -> Result<MemberSource, Failure> {
        let missing = || Failure::new(format!("row {number} of the catalogue has no bytes"));
        match self.row(number)? {
            Row::File { path, pin, .. } => {
                Ok(MemberSource { object: path.clone(), path, pin, offset: 0, len, expected: None })
            }
            Row::Member { path, shard, offset, hash, .. } => match self.row(shard)? {
                Row::File { path: object, pin, .. } => {
                    Ok(MemberSource { path, object, pin, offset, len, expected: Some(hash) })
                }
                _ => Err(missing()),
            },
            _ => Err(missing()),
        }
    }

    /// Reads bytes of an object, as it was in the first pass. The inner error is a fault of the object.
    async fn read(
        &self,
        object: &str,
        pin: &PinRow,
        offset: u64,
        len: u32,
    ) -> Result<Result<Bytes, String>, Failure> {
        let whole = offset == 0 && u64::from(len) == pin.size;
        let range = (!whole).then(|| offset..offset + u64::from(len));
        let got = match self.source.get(object, range, Some(&origin_pin(pin))).await {
            Ok(got) => got,
            Err(e) => return Ok(Err(self.judge.judge(e).await?)),
        };
        self.judge.read(object, pin.size);
        // A store checks the etag itself. The pin of a local file must be compared after the read.
        if self.source.local_dir().is_some() && pin_row(got.meta.pin()) != *pin {
            return Ok(Err(changed()));
        }
        self.counters.bytes_read.fetch_add(got.bytes.len() as u64, Relaxed);
        Ok(Ok(got.bytes))
    }

    async fn read_member(&self, member: &MemberSource) -> Result<Result<Bytes, Fault>, Failure> {
        let fault = |why| Ok(Err(Fault { path: member.path.replace('\0', "\\0"), why }));
        let bytes = match self.read(&member.object, &member.pin, member.offset, member.len).await? {
            Ok(bytes) => bytes,
            Err(why) => return fault(why),
        };
        if member.expected.is_some_and(|hash| Hash::of(&bytes) != hash) {
            return fault(changed());
        }
        self.counters.files_read.fetch_add(1, Relaxed);
        Ok(Ok(bytes))
    }

    async fn permit(&self, bytes: u32) -> Result<tokio::sync::SemaphorePermit<'_>, Failure> {
        self.memory.acquire_many(bytes.clamp(1, BYTES_MAX)).await.map_err(lost)
    }

    /// Makes the chunk of a group.
    ///
    /// # Errors
    /// [`Failure`] when the run cannot go on. An error of one member is a fault, not an error of this call.
    pub async fn group(&self, plan: ChunkPlan) -> Result<Done, Failure> {
        let sources: Vec<MemberSource> =
            plan.members.iter().map(|m| self.member(m.item.ordinal, m.item.len)).collect::<Result<_, _>>()?;
        let mut fingerprint = Fingerprint::default();
        for (m, p) in plan.members.iter().zip(&sources) {
            fingerprint.add(&p.object, &p.pin, (p.offset, p.len.into()), m.offset);
        }
        let fingerprint = fingerprint.finish();
        if let Some(chunk) = self.journalled(&plan, &sources, fingerprint).await? {
            return Ok(Done::Group(Some(chunk), Vec::new()));
        }
        let _memory = self.permit(plan.len.saturating_mul(2)).await?;
        let at_once = if self.source.local_dir().is_some() { 1 } else { MEMBERS_MAX };
        let (mut rows, mut contents, mut faults) = (Vec::new(), Vec::new(), Vec::new());
        let mut reads = stream::iter(&sources).map(|s| self.read_member(s)).buffered(at_once);
        let mut number = plan.members.iter().map(|m| m.item.ordinal);
        while let Some(read) = reads.next().await {
            let row = number.next();
            match read? {
                Ok(bytes) => {
                    rows.extend(row);
                    contents.push(bytes);
                }
                Err(fault) => faults.push(fault),
            }
        }
        drop(reads);
        if contents.is_empty() {
            return Ok(Done::Group(None, faults));
        }
        let params = self.params;
        let assembled =
            tokio::task::spawn_blocking(move || assemble(&contents, params)).await.map_err(lost)?;
        let (hash, len) = (assembled.hash, u32::try_from(assembled.bytes.len()).map_err(lost)?);
        let write = self.put(hash, assembled.bytes).await?;
        if faults.is_empty() && write != ChunkWrite::Unwritten {
            let members = assembled.members.iter().map(|m| m.0).collect();
            self.record(fingerprint, Made::Group { chunk: hash, len, members })?;
        }
        let members =
            rows.into_iter().zip(assembled.members).map(|(row, (hash, offset))| (row, hash, offset));
        Ok(Done::Group(Some(Chunk { hash, len, members: members.collect(), write }), faults))
    }

    /// Adds a result to the journal.
    fn record(&self, fingerprint: Hash, made: Made) -> Result<(), Failure> {
        self.journal.borrow_mut().push(fingerprint, made).map_err(|e| write_failed(&e))
    }

    /// Returns the chunk if a stopped run has made it and its object still exists.
    async fn journalled(
        &self,
        plan: &ChunkPlan,
        sources: &[MemberSource],
        fingerprint: Hash,
    ) -> Result<Option<Chunk>, Failure> {
        let local = self.source.local_dir().is_some();
        let made = self.journal.borrow().find(fingerprint, sources.iter().map(|s| &s.pin), local);
        let Some(Made::Group { chunk, len, members }) = made else { return Ok(None) };
        if members.len() != plan.members.len() || !self.exists(chunk, len.into()).await? {
            return Ok(None);
        }
        self.counters.reuse(sources.len() as u64, sources.iter().map(|s| u64::from(s.len)).sum());
        let members = plan.members.iter().zip(members).map(|(m, hash)| (m.item.ordinal, hash, m.offset));
        let write = ChunkWrite::Existed;
        Ok(Some(Chunk { hash: chunk, len, members: members.collect(), write }))
    }

    /// Whether the object of a chunk exists, with the right length.
    async fn exists(&self, chunk: Hash, len: u64) -> Result<bool, Failure> {
        match self.tables.head(&paths::chunk(chunk)).await {
            Ok(meta) => Ok(meta.size == len),
            Err(OriginError::NotFound { .. }) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Writes the object of a chunk, if it does not exist.
    async fn put(&self, chunk: Hash, bytes: Bytes) -> Result<ChunkWrite, Failure> {
        if self.report_only.get() {
            return Ok(ChunkWrite::Unwritten);
        }
        let (path, len) = (paths::chunk(chunk), bytes.len() as u64);
        if self.exists(chunk, len).await? {
            return Ok(ChunkWrite::Existed);
        }
        let put = match self.tables.put(&path, bytes.clone(), PutMode::Create).await {
            // Another run may have written the chunk just now. Any other object has the wrong length.
            Err(OriginError::AlreadyExists { .. }) if self.exists(chunk, len).await? => {
                return Ok(ChunkWrite::Existed);
            }
            Err(OriginError::AlreadyExists { .. }) => self.tables.put(&path, bytes, PutMode::Overwrite).await,
            put => put,
        };
        put.map_err(|e| {
            Failure::from(e).hint(format!(
                "cannot write the chunks to {}; name one with enough space and access with --tables URI",
                self.tables.uri()
            ))
        })?;
        Ok(ChunkWrite::Written)
    }

    /// Hashes the slices of a long file. Its bytes stay at the dataset.
    ///
    /// # Errors
    /// [`Failure`] when the run cannot go on. An error of the file is a fault, not an error of this call.
    pub async fn sliced(&self, number: u64) -> Result<Done, Failure> {
        let Row::File { path, pin, known } = self.row(number)? else {
            return Err(Failure::new(format!("row {number} of the catalogue is not a file")));
        };
        if let Some(content) = known {
            // The first pass has read the shard, so it counts as read.
            if !is_shard(&path) {
                self.counters.reuse(1, pin.size);
            }
            return Ok(Done::Sliced(number, Ok(content)));
        }
        let mut fingerprint = Fingerprint::default();
        fingerprint.add(&path, &pin, (0, pin.size), 0);
        let fingerprint = fingerprint.finish();
        let local = self.source.local_dir().is_some();
        let made = self.journal.borrow().find(fingerprint, std::iter::once(&pin), local);
        if let Some(Made::Sliced(content)) = made {
            self.counters.reuse(1, pin.size);
            return Ok(Done::Sliced(number, Ok(content)));
        }
        let (object, pinned) = (&path, &pin);
        let mut reads = stream::iter(0..slice_count(pin.size))
            .map(|i| async move {
                let (offset, len) = slice_at(pinned.size, i);
                let _memory = self.permit(len).await?;
                let bytes = match self.read(object, pinned, offset, len).await? {
                    Ok(bytes) => bytes,
                    Err(why) => return Ok(Err(why)),
                };
                let groups = self.groups.clone();
                let hashed = tokio::task::spawn_blocking(move || {
                    hash_slice(offset, &bytes, groups.lists().map(|lists| &**lists))
                });
                Ok::<_, Failure>(Ok(hashed.await.map_err(lost)?))
            })
            .buffered(SLICES_MAX);
        let mut slices: Vec<SliceHash> = Vec::new();
        while let Some(read) = reads.next().await {
            match read? {
                Ok(slice) => slices.push(slice),
                Err(why) => return Ok(Done::Sliced(number, Err(Fault { path: path.clone(), why }))),
            }
        }
        drop(reads);
        self.counters.files_read.fetch_add(1, Relaxed);
        let content = fold(pin.size, &slices);
        self.record(fingerprint, Made::Sliced(content.clone()))?;
        Ok(Done::Sliced(number, Ok(content)))
    }
}
