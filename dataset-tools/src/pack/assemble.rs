//! The second pass of a pack: reads each file once, makes chunks of them, and writes each chunk
//! as an object of its own.
//!
//! Invariants
//! 1. A chunk holds bytes that were read under the pins of the first pass: an object that changed
//!    since is a fault that names it, never a wrong chunk.
//! 2. An object of a chunk appears whole or not at all, under the hash of its bytes.
//! 3. At most [`BYTES_MAX`] bytes of contents are in memory, however much is under way.

use super::catalogue::{Catalogue, Row};
use super::journal::{Fingerprint, Journal, Made};
use crate::failure::Failure;
use crate::index::content::{Content, SliceHash, SliceHasher, fold, slice_at, slice_count};
use crate::index::known::{pin_from, row_of};
use crate::index::outcome::Counters;
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

/// Bytes of contents in memory. Members of a chunk are held twice while it is put together.
pub const BYTES_MAX: u32 = 128 << 20;
/// Members of one chunk that are read at once from a store.
const MEMBERS_MAX: usize = 8;
/// Slices of one long file that are read at once.
const SLICES_MAX: usize = 8;

/// Makes chunks.
pub struct Assembler<'a> {
    /// Where the dataset is.
    pub source: &'a Origin,
    /// Where chunks go.
    pub place: &'a Origin,
    /// What was found.
    pub catalogue: &'a Catalogue,
    /// How members are aligned.
    pub params: PackParams,
    /// What earlier runs made.
    pub journal: RefCell<Journal>,
    /// What was read.
    pub counters: &'a Counters,
    /// Bytes of contents that may still be taken into memory.
    pub memory: Semaphore,
    /// Nothing will be published any more: what is read is read for its faults.
    pub in_vain: Cell<bool>,
}

/// How a chunk came to be where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// It was written now.
    Written,
    /// It was there.
    Found,
    /// It is not there, because nothing will be published.
    Unwritten,
}

/// A chunk and what it holds.
#[derive(Debug)]
pub struct Chunk {
    /// Its name.
    pub hash: Hash,
    /// Its length in bytes.
    pub len: u32,
    /// Its members: row, content, offset.
    pub members: Vec<(u64, Hash, u32)>,
    /// How it came to be where it is.
    pub how: How,
}

/// What became of one piece of work.
#[derive(Debug)]
pub enum Done {
    /// Members of a group: in a chunk, or at fault.
    Group(Option<Chunk>, Vec<Fault>),
    /// A long file.
    Sliced(u64, Result<Content, Fault>),
}

/// Where an entry's bytes are.
struct Piece {
    /// The entry.
    path: String,
    /// The object.
    object: String,
    pin: PinRow,
    offset: u64,
    len: u32,
    /// What they hash to, where that is known.
    expected: Option<Hash>,
}

/// A chunk put together: its bytes and name, and content and offset of each member.
struct PlanUnits {
    bytes: Bytes,
    hash: Hash,
    members: Vec<(Hash, u32)>,
}

fn lay(contents: &[Bytes], params: PackParams) -> PlanUnits {
    let mut out: Vec<u8> = Vec::with_capacity(contents.iter().map(|b| b.len() + params.align as usize).sum());
    let mut members = Vec::with_capacity(contents.len());
    for bytes in contents {
        out.resize(out.len().next_multiple_of(params.align.max(1) as usize), 0);
        // A group takes at most 16 MiB.
        members.push((Hash::of(bytes), u32::try_from(out.len()).unwrap_or(u32::MAX)));
        out.extend_from_slice(bytes);
    }
    let hash = Hash::of(&out);
    PlanUnits { bytes: out.into(), hash, members }
}

fn lost(e: impl std::fmt::Display) -> Failure {
    Failure::new(format!("a chunk could not be put together: {e}"))
}

fn changed() -> String {
    "it changed after it was found; stop what writes to it and run again".into()
}

impl Assembler<'_> {
    fn row(&self, number: u64) -> Result<Row, Failure> {
        self.catalogue.row(number).map_err(|e| Failure::io("the list of files", &e))
    }

    fn piece(&self, number: u64, len: u32) -> Result<Piece, Failure> {
        let missing = || Failure::new(format!("row {number} of the list of files has no bytes"));
        match self.row(number)? {
            Row::File { path, pin, .. } => {
                Ok(Piece { object: path.clone(), path, pin, offset: 0, len, expected: None })
            }
            Row::Member { path, shard, offset, hash, .. } => match self.row(shard)? {
                Row::File { path: object, pin, .. } => {
                    Ok(Piece { path, object, pin, offset, len, expected: Some(hash) })
                }
                _ => Err(missing()),
            },
            _ => Err(missing()),
        }
    }

    /// Reads bytes of an object as it was when it was found. The inner error is a fault of it.
    async fn read(
        &self,
        object: &str,
        pin: &PinRow,
        offset: u64,
        len: u32,
    ) -> Result<Result<Bytes, String>, Failure> {
        let whole = offset == 0 && u64::from(len) == pin.size;
        let range = (!whole).then(|| offset..offset + u64::from(len));
        let got = match self.source.get(object, range, Some(&pin_from(pin))).await {
            Ok(got) => got,
            // An origin that is away is no fault of this object, which must not be left out for it.
            Err(e) if e.transient() => return Err(e.into()),
            Err(OriginError::Changed { .. }) => return Ok(Err(changed())),
            Err(e) => return Ok(Err(e.to_string())),
        };
        // A store was asked for this etag; a file of this machine tells its own after it was read.
        if self.source.local_dir().is_some() && row_of(got.meta.pin()) != *pin {
            return Ok(Err(changed()));
        }
        self.counters.bytes_read.fetch_add(got.bytes.len() as u64, Relaxed);
        Ok(Ok(got.bytes))
    }

    async fn piece_bytes(&self, piece: &Piece) -> Result<Result<Bytes, Fault>, Failure> {
        let fault = |why| Ok(Err(Fault { path: piece.path.replace('\0', "\\0"), why }));
        let bytes = match self.read(&piece.object, &piece.pin, piece.offset, piece.len).await? {
            Ok(bytes) => bytes,
            Err(why) => return fault(why),
        };
        if piece.expected.is_some_and(|hash| Hash::of(&bytes) != hash) {
            return fault(changed());
        }
        self.counters.files_read.fetch_add(1, Relaxed);
        Ok(Ok(bytes))
    }

    async fn permit(&self, bytes: u32) -> Result<tokio::sync::SemaphorePermit<'_>, Failure> {
        self.memory.acquire_many(bytes.clamp(1, BYTES_MAX)).await.map_err(lost)
    }

    /// Makes a chunk of a group.
    ///
    /// # Errors
    /// [`Failure`] when the run cannot go on; what is wrong with a member is a fault.
    pub async fn group(&self, plan: ChunkPlan) -> Result<Done, Failure> {
        let pieces: Vec<Piece> =
            plan.members.iter().map(|m| self.piece(m.item.ordinal, m.item.len)).collect::<Result<_, _>>()?;
        let mut fingerprint = Fingerprint::default();
        for (m, p) in plan.members.iter().zip(&pieces) {
            fingerprint.add(&p.object, &p.pin, (p.offset, p.len.into()), m.offset);
        }
        let fingerprint = fingerprint.finish();
        if let Some(chunk) = self.made(&plan, &pieces, fingerprint).await? {
            return Ok(Done::Group(Some(chunk), Vec::new()));
        }
        let _memory = self.permit(plan.len.saturating_mul(2)).await?;
        let at_once = if self.source.local_dir().is_some() { 1 } else { MEMBERS_MAX };
        let (mut rows, mut contents, mut faults) = (Vec::new(), Vec::new(), Vec::new());
        let mut reads = stream::iter(&pieces).map(|p| self.piece_bytes(p)).buffered(at_once);
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
        let laid = tokio::task::spawn_blocking(move || lay(&contents, params)).await.map_err(lost)?;
        let len = u32::try_from(laid.bytes.len()).map_err(lost)?;
        let how = self.put(laid.hash, laid.bytes).await?;
        if faults.is_empty() && how != How::Unwritten {
            let members = laid.members.iter().map(|m| m.0).collect();
            let made = Made::Group { chunk: laid.hash, len, members };
            self.remember(fingerprint, made)?;
        }
        let members = rows.into_iter().zip(laid.members).map(|(row, (hash, offset))| (row, hash, offset));
        Ok(Done::Group(Some(Chunk { hash: laid.hash, len, members: members.collect(), how }), faults))
    }

    fn remember(&self, fingerprint: Hash, made: Made) -> Result<(), Failure> {
        self.journal.borrow_mut().push(fingerprint, made).map_err(|e| {
            Failure::io("cannot write the journal", &e).hint("free some space, or give another --state-dir")
        })
    }

    fn reused(&self, files: usize, bytes: u64) {
        self.counters.files_reused.fetch_add(files as u64, Relaxed);
        self.counters.bytes_reused.fetch_add(bytes, Relaxed);
    }

    /// The chunk, if a run that was stopped made it and it is still there.
    async fn made(
        &self,
        plan: &ChunkPlan,
        pieces: &[Piece],
        fingerprint: Hash,
    ) -> Result<Option<Chunk>, Failure> {
        let local = self.source.local_dir().is_some();
        let made = self.journal.borrow().find(fingerprint, pieces.iter().map(|p| &p.pin), local);
        let Some(Made::Group { chunk, len, members }) = made else { return Ok(None) };
        if members.len() != plan.members.len() || !self.is_there(chunk, len.into()).await? {
            return Ok(None);
        }
        self.reused(pieces.len(), pieces.iter().map(|p| u64::from(p.len)).sum());
        let members = plan.members.iter().zip(members).map(|(m, hash)| (m.item.ordinal, hash, m.offset));
        Ok(Some(Chunk { hash: chunk, len, members: members.collect(), how: How::Found }))
    }

    /// Whether a chunk's object is there, with the right length.
    async fn is_there(&self, chunk: Hash, len: u64) -> Result<bool, Failure> {
        match self.place.head(&paths::chunk(chunk)).await {
            Ok(meta) => Ok(meta.size == len),
            Err(OriginError::NotFound { .. }) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    async fn put(&self, chunk: Hash, bytes: Bytes) -> Result<How, Failure> {
        if self.in_vain.get() {
            return Ok(How::Unwritten);
        }
        let (path, len) = (paths::chunk(chunk), bytes.len() as u64);
        if self.is_there(chunk, len).await? {
            return Ok(How::Found);
        }
        let put = match self.place.put(&path, bytes.clone(), PutMode::Create).await {
            // Another run may just have written it; anything else there has the wrong length.
            Err(OriginError::AlreadyExists { .. }) if self.is_there(chunk, len).await? => {
                return Ok(How::Found);
            }
            Err(OriginError::AlreadyExists { .. }) => self.place.put(&path, bytes, PutMode::Overwrite).await,
            put => put,
        };
        put.map_err(|e| {
            Failure::from(e).hint(format!(
                "chunks could not be written to {}; name a place you may write with --to URI, with room for them",
                self.place.uri()
            ))
        })?;
        Ok(How::Written)
    }

    /// Names the slices of a long file, which stay where they are.
    ///
    /// # Errors
    /// [`Failure`] when the run cannot go on; what is wrong with the file is a fault.
    pub async fn sliced(&self, number: u64) -> Result<Done, Failure> {
        let Row::File { path, pin, known } = self.row(number)? else {
            return Err(Failure::new(format!("row {number} of the list of files is no file")));
        };
        if let Some(content) = known {
            // A shard was read for its members.
            if !is_shard(&path) {
                self.reused(1, pin.size);
            }
            return Ok(Done::Sliced(number, Ok(content)));
        }
        let mut fingerprint = Fingerprint::default();
        fingerprint.add(&path, &pin, (0, pin.size), 0);
        let fingerprint = fingerprint.finish();
        let local = self.source.local_dir().is_some();
        let made = self.journal.borrow().find(fingerprint, std::iter::once(&pin), local);
        if let Some(Made::Sliced(content)) = made {
            self.reused(1, pin.size);
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
                let hashed = tokio::task::spawn_blocking(move || {
                    let mut hasher = SliceHasher::new(offset);
                    hasher.update(&bytes);
                    hasher.finish()
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
        self.remember(fingerprint, Made::Sliced(content.clone()))?;
        Ok(Done::Sliced(number, Ok(content)))
    }
}
