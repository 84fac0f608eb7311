//! Reads of a version's bytes in the slabs of a server of this machine ([`crate::short_circuit`]).
//!
//! | what | when |
//! |---|---|
//! | groups of a long chunk | always |
//! | a file of a pack, alone in its chunk | if all of it is read |
//! | another short chunk | if the server does not have it at hand: its disk has to be read |
//!
//! What the page cache lacks is read on a thread that may wait for the disk. (I1) All is verified after it
//! was read. Where that fails, the bytes are read another way.

use super::read::Reader;
use crate::short_circuit::{LentChunk, ShortCircuit, on_disk_thread};
use bytes::Bytes;
use fletch_core::{
    Expected, Hash, Verified,
    groups::{GROUPED_BYTES_MIN, GroupRun},
    manifest::locate::ChunkRange,
};
use fletch_store::{Fetch, PartHit, Store};
use fletch_tables::version::Found;
use futures::FutureExt as _;
use std::{
    io,
    sync::{Arc, OnceLock},
};

/// Bytes that a server of this machine has on its disk.
pub(super) enum Lent {
    /// They are read.
    Here(PartHit),
    /// The disk has to be read.
    OnDisk(Box<LentBytes<'static>>),
}

/// Bytes of a chunk in its slab.
pub(super) struct LentBytes<'a> {
    source: ShortCircuit<'a>,
    chunk: LentChunk,
    /// The name of the chunk.
    of: Hash,
    /// Where they begin in the chunk.
    from: usize,
    len: u32,
    expected: Expected,
    /// Where they begin in what the reader asked for.
    begins: usize,
}

/// Where a chunk lies that is to be fetched, once that is known.
pub(super) type LentPlace = Arc<OnceLock<(ShortCircuit<'static>, LentChunk)>>;

impl<'a> LentBytes<'a> {
    fn of_run(source: ShortCircuit<'a>, chunk: LentChunk, run: GroupRun) -> Self {
        let (of, begins, len) = (run.of().chunk(), run.range().start, run.len());
        LentBytes { source, chunk, of, from: begins, len, expected: run.into(), begins }
    }

    fn into_owned(self) -> LentBytes<'static> {
        LentBytes { source: self.source.into_owned(), ..self }
    }

    fn fill(
        &self,
        store: &Store,
        read: impl Fn(&LentChunk, usize, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<Option<PartHit>> {
        let piece = |at, piece: &mut [u8]| read(&self.chunk, self.from + at, piece);
        let filled = store.fill_now(self.expected.clone(), self.len, piece)?;
        Ok(filled.map(|hit| PartHit { hit, begins: self.begins }))
    }
}

impl Reader {
    /// Returns bytes that have a range of a chunk, or of a file of a pack if `is_shared`, and go on until
    /// `until` in the file. Blocks for a very short time only.
    pub(super) fn lent(&self, found: &Found, of: &ChunkRange, is_shared: bool, until: u64) -> Option<Lent> {
        if is_shared { self.lent_file(found, of, until) } else { self.lent_groups(of, until) }
    }

    fn lent_groups(&self, of: &ChunkRange, until: u64) -> Option<Lent> {
        let (chunk, len) = (of.slice.chunk, of.slice.chunk_offset + of.slice.len);
        if len < GROUPED_BYTES_MIN {
            return None;
        }
        let source = self.source.short_circuit()?;
        let lent = source.chunk(chunk, Some(len))?;
        let (store, key) = (&self.reads.store, self.key(chunk));
        let groups = store.groups(chunk).or_else(|| self.groups_at_hand(chunk, len));
        let groups = groups.filter(|groups| groups.chunk_len() == len)?;
        let pushed = usize::try_from(until.saturating_sub(of.begin)).ok()?.min(len as usize);
        let run = groups.run(&(of.range.start..of.range.end.max(pushed)))?;
        if let Some(hit) = store.run_in_memory(&key, &run) {
            return Some(Lent::Here(hit));
        }
        self.read_cached(LentBytes::of_run(source, lent, run))
    }

    /// A file of which only a part is read would be hashed for each part.
    fn lent_file(&self, found: &Found, of: &ChunkRange, until: u64) -> Option<Lent> {
        let (file, len) = (of.slice.chunk, of.slice.len);
        let [slice] = found.slices() else { return None };
        if of.range.start > 0 || (of.range.end as u64).max(until) < u64::from(len) {
            return None;
        }
        let source = self.source.short_circuit()?;
        let chunk = source.chunk(slice.chunk, None)?;
        let (from, expected) = (slice.chunk_offset as usize, Expected::Whole(file));
        self.read_cached(LentBytes { source, chunk, of: slice.chunk, from, len, expected, begins: 0 })
    }

    fn read_cached(&self, lent: LentBytes<'_>) -> Option<Lent> {
        let filled = lent.fill(&self.reads.store, LentChunk::read_cached_at);
        if filled.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            return Some(Lent::OnDisk(Box::new(lent.into_owned())));
        }
        self.note_lent(&lent, filled).map(Lent::Here)
    }

    /// Reads bytes from the disk.
    pub(super) async fn read_lent(&self, lent: Box<LentBytes<'static>>) -> Option<PartHit> {
        let store = Arc::clone(&self.reads.store);
        let read = move || {
            let filled = lent.fill(&store, LentChunk::read_at);
            (lent, filled)
        };
        let (lent, filled) = on_disk_thread(read).await?;
        self.note_lent(&lent, filled)
    }

    /// Counts what was read of a chunk, or forgets where it lies if it is there no more.
    fn note_lent(&self, lent: &LentBytes<'_>, filled: io::Result<Option<PartHit>>) -> Option<PartHit> {
        match filled {
            Ok(Some(part)) => {
                lent.source.note(lent.len.into(), &self.tasks);
                Some(part)
            }
            // No memory is free now.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Ok(None) | Err(_) => {
                lent.source.forget(lent.of);
                None
            }
        }
    }

    /// Asks where a chunk of `len` bytes lies that the server does not have at hand.
    pub(super) fn find_place(&self, chunk: Hash, len: u32, place: &LentPlace) {
        let Some(source) = self.source.short_circuit() else { return };
        if let Some(chunk) = source.chunk(chunk, Some(len)) {
            place.get_or_init(|| (source.into_owned(), chunk));
        }
    }

    /// Returns a fetch that reads a chunk in its slab, if `place` is known by then, and else is as `fetch`.
    pub(super) fn fetch_at(&self, place: &LentPlace, of: Hash, fetch: Fetch) -> Fetch {
        let (place, tasks) = (Arc::clone(place), self.tasks.clone());
        Arc::new(move |attempt| {
            let (place, tasks, fetch) = (Arc::clone(&place), tasks.clone(), Arc::clone(&fetch));
            let fetched = async move {
                if let Some((source, chunk)) = place.get().filter(|_| attempt == 0) {
                    match read_whole(chunk.clone(), of).await {
                        Some(Some(bytes)) => {
                            source.note(bytes.len() as u64, &tasks);
                            return Ok(bytes);
                        }
                        Some(None) => source.forget(of),
                        None => {}
                    }
                }
                fetch(attempt).await
            };
            fetched.boxed()
        })
    }
}

/// Reads a chunk from the disk. `Some(None)`: it is there no more.
async fn read_whole(chunk: LentChunk, of: Hash) -> Option<Option<Bytes>> {
    let read = move || Verified::check(of, Bytes::from(chunk.read().ok()?)).ok();
    Some(on_disk_thread(read).await?.map(|chunk| chunk.bytes().clone()))
}
