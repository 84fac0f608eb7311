//! Filling: what a store's flight calls to bring a chunk from an origin.
//!
//! Every row that is said to hold the chunk is tried, at first in the source at hand, then in the
//! root's others, under this name or, of an entry, in that layout's chunks; then the first once
//! more, if it seemed unchanged (a flipped bit in transit).
//! What is wrong with an object is only known once its bytes were hashed, by the store: that is
//! why a call with `attempt > 0` judges the row of the call before.

use super::{
    Sources, VersionError, Versions,
    locate::spot_of,
    source::{At, Row, Source},
};
use bytes::{Bytes, BytesMut};
use fletch_core::Hash;
use fletch_origin::{ObjectMeta, OriginError, Pin};
use fletch_store::{DatasetId, Fetch, FetchError};
use fletch_tables::ChunkRow;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, atomic::Ordering::Relaxed};

/// Rows of one source that are tried.
const ROWS_MAX: usize = 4;

/// How often a store calls a fetch at most: rows of two sources, one repetition, the verdict.
pub const ATTEMPTS: u32 = 2 * ROWS_MAX as u32 + 2;

/// A chunk that a version has.
pub struct Located {
    /// Its length in bytes.
    pub len: u32,
    source: Arc<Source>,
    row: Row,
}

impl Located {
    pub(super) fn new(source: &Arc<Source>, row: Row) -> Self {
        Located { len: row.row.len, source: Arc::clone(source), row }
    }

    /// The chunk of a row of the source's own table.
    #[must_use]
    pub fn at(source: &Arc<Source>, part: usize, row: ChunkRow) -> Self {
        Located::new(source, Row { part, row })
    }

    /// Bytes of all chunks of its layout, as that says.
    #[must_use]
    pub fn among(&self) -> u64 {
        self.source.version.layout_doc().bytes
    }

    /// A range of it, to be fetched under its own hash; `None` when it reaches past the end.
    #[must_use]
    pub fn part(&self, range: &Range<usize>) -> Option<Self> {
        let (from, len) = (u64::try_from(range.start).ok()?, u32::try_from(range.len()).ok()?);
        if range.end > self.len as usize {
            return None;
        }
        let mut row = self.row.clone();
        row.row.offset += from;
        row.row.len = len;
        Some(Located { len, source: Arc::clone(&self.source), row })
    }
}

/// Brings one chunk.
pub struct ChunkFetch {
    versions: Arc<Versions>,
    sources: Arc<Sources>,
    /// The source at hand.
    source: Arc<Source>,
    hash: Hash,
    len: u32,
    state: Mutex<State>,
}

struct State {
    /// Rows found and not yet tried, the next one last.
    ahead: Vec<ChunkLocation>,
    found_here: bool,
    found_elsewhere: bool,
    repeated: bool,
    /// What the call before read.
    tried: Option<(ChunkLocation, Vec<ObjectMeta>)>,
    /// What to tell if nothing helps.
    blame: VersionError,
}

/// Where the chunk's bytes are said to be: pieces that, in order, are it.
#[derive(Clone)]
pub(super) struct ChunkLocation {
    pub pieces: Vec<Piece>,
}

/// Bytes of an object.
#[derive(Clone)]
pub(super) struct Piece {
    pub at: At,
    pub offset: u64,
    pub len: u64,
}

impl ChunkLocation {
    async fn of(source: &Source, row: &Row) -> Result<Self, VersionError> {
        let at = source.at(row).await?;
        Ok(ChunkLocation { pieces: vec![Piece { at, offset: row.row.offset, len: row.row.len.into() }] })
    }

    async fn read(&self) -> Result<(Bytes, Vec<ObjectMeta>), OriginError> {
        let (mut all, mut metas) = (Vec::new(), Vec::new());
        for p in &self.pieces {
            let range = p.offset..p.offset + p.len;
            let got = p.at.origin.get(&p.at.path, Some(range), Some(&p.at.pin)).await?;
            metas.push(got.meta);
            all.push(got.bytes);
        }
        let bytes = match all.len() {
            1 => all.swap_remove(0),
            _ => {
                let mut whole = BytesMut::with_capacity(all.iter().map(Bytes::len).sum());
                all.iter().for_each(|b| whole.extend_from_slice(b));
                whole.freeze()
            }
        };
        Ok((bytes, metas))
    }
}

impl Sources {
    /// The number of the dataset through which it is read, for the disk tier.
    #[must_use]
    pub fn number(&self) -> DatasetId {
        self.number
    }

    /// The length of a chunk of this version, if that can be said from memory: the outer `None`
    /// means that [`Sources::locate`] must be awaited.
    #[must_use]
    pub fn try_len(&self, hash: Hash) -> Option<Option<u32>> {
        self.first.try_len(hash)
    }
}

impl ChunkFetch {
    /// The fetch of a chunk, for [`fletch_store::Store::read`].
    #[must_use]
    pub fn fetch(versions: &Arc<Versions>, sources: &Arc<Sources>, hash: Hash, located: &Located) -> Fetch {
        let row = located.row.clone();
        let state = State {
            ahead: Vec::new(),
            found_here: false,
            found_elsewhere: false,
            repeated: false,
            tried: None,
            blame: VersionError::NotFound,
        };
        let filler = Arc::new(ChunkFetch {
            versions: Arc::clone(versions),
            sources: Arc::clone(sources),
            source: Arc::clone(&located.source),
            hash,
            len: located.len,
            state: Mutex::new(state),
        });
        Arc::new(move |_| {
            let (filler, row) = (Arc::clone(&filler), row.clone());
            Box::pin(async move { filler.bring(row).await.map_err(|e| FetchError::new(e.kind(), e)) })
        })
    }

    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The bytes of the next row that can be read.
    async fn bring(&self, first: Row) -> Result<Bytes, VersionError> {
        self.judge();
        if !self.with(|s| std::mem::replace(&mut s.found_here, true)) {
            let here = ChunkLocation::of(&self.source, &first).await?;
            self.with(|s| s.ahead.push(here));
        }
        loop {
            let Some(next) = self.next(&first).await? else {
                return Err(self.with(|s| s.blame.clone()));
            };
            match next.read().await {
                Ok((bytes, metas)) => {
                    self.with(|s| s.tried = Some((next, metas)));
                    return Ok(bytes);
                }
                Err(e) => {
                    let e = VersionError::from(e);
                    self.count(&e);
                    tracing::warn!(chunk = %self.hash, error = %e, "an object cannot be read as indexed");
                    // What may help if asked again is the better word than what will not.
                    self.with(|s| {
                        if !s.blame.kind().retryable() {
                            s.blame = e;
                        }
                    });
                }
            }
        }
    }

    /// Being called again says that the row tried last had wrong bytes.
    fn judge(&self) {
        let Some((wrong, metas)) = self.with(|s| s.tried.take()) else { return };
        let what = |p: &Piece| format!("{}/{}", p.at.origin.uri(), p.at.path);
        let changed = wrong.pieces.iter().zip(&metas).find_map(|(p, meta)| {
            differs(&p.at.pin, meta).map(|why| VersionError::Changed { what: what(p), why })
        });
        let first = || wrong.pieces.first().map(what).unwrap_or_default();
        let e = changed.unwrap_or_else(|| VersionError::Corrupt(first()));
        self.count(&e);
        tracing::warn!(chunk = %self.hash, error = %e, "wrong bytes from the origin");
        self.with(|s| {
            if matches!(e, VersionError::Corrupt(_)) && !s.repeated {
                // Once more, after all others.
                s.repeated = true;
                s.ahead.insert(0, wrong);
            }
            if !s.blame.kind().retryable() {
                s.blame = e;
            }
        });
    }

    fn count(&self, e: &VersionError) {
        let wrong = &self.versions.wrong;
        let counter = match e {
            VersionError::Changed { .. } => &wrong.changed,
            VersionError::Corrupt(_) => &wrong.corrupt,
            VersionError::Missing(_) => &wrong.missing,
            _ => return,
        };
        counter.fetch_add(1, Relaxed);
    }

    /// The next row to try. Others than the first are looked for only when it failed.
    async fn next(&self, first: &Row) -> Result<Option<ChunkLocation>, VersionError> {
        let (mut next, failed) = self.with(|s| {
            let failed = !matches!(s.blame, VersionError::NotFound);
            // A row to be repeated waits until the others were found.
            let next = if failed && !s.found_elsewhere { None } else { s.ahead.pop() };
            (next, failed)
        });
        if next.is_none() && failed && !self.with(|s| std::mem::replace(&mut s.found_elsewhere, true)) {
            let others = self.others(first).await;
            next = self.with(|s| {
                s.ahead.extend(others);
                s.ahead.pop()
            });
        }
        Ok(next)
    }

    async fn others(&self, first: &Row) -> Vec<ChunkLocation> {
        let mut found: Vec<ChunkLocation> = Vec::new();
        let others = self.versions.others(&self.sources, true).await;
        let all = [&self.source, &self.sources.first].into_iter().chain(others.iter());
        let mut seen: Vec<&Arc<Source>> = Vec::new();
        for source in all.filter(|s| s.registered.stands()) {
            if seen.iter().any(|s| s.is_same(source)) {
                continue;
            }
            seen.push(source);
            if let Err(e) = self.spots(source, first, &mut found).await {
                tracing::debug!(error = %e, "another source cannot be looked into");
            }
        }
        // The nearest last, where it is taken from.
        found.reverse();
        found
    }
}

impl ChunkFetch {
    /// Where a source has the chunk, or its bytes.
    async fn spots(
        &self,
        source: &Arc<Source>,
        first: &Row,
        found: &mut Vec<ChunkLocation>,
    ) -> Result<(), VersionError> {
        let own = source.is_same(&self.source);
        for row in source.rows(self.hash, ROWS_MAX).await? {
            let tried = own
                && (row.part, row.row.offset, &row.row.object)
                    == (first.part, first.row.offset, &first.row.object);
            if !tried && row.row.len == self.len && found.len() < 2 * ROWS_MAX - 1 {
                match ChunkLocation::of(source, &row).await {
                    Ok(spot) => found.push(spot),
                    Err(e) => tracing::debug!(error = %e, "another row cannot be used"),
                }
            }
        }
        if !own
            && found.len() < 2 * ROWS_MAX - 1
            && let Some(spot) = spot_of(&self.source, first, source).await?
        {
            found.push(spot);
        }
        Ok(())
    }
}

/// How an object differs from its pin; `None` when it seems to be the same.
fn differs(pin: &Pin, meta: &ObjectMeta) -> Option<String> {
    if pin.size != meta.size {
        return Some(format!("it had {} bytes and has {}", pin.size, meta.size));
    }
    match (&pin.etag, &meta.etag) {
        // Where there are etags they decide: a store's listing and its answers give times of
        // different precision.
        (Some(a), Some(b)) => (a != b).then(|| "its etag differs".to_owned()),
        _ => match (pin.mtime_ns, meta.mtime_ns) {
            (Some(a), Some(b)) if a != b => Some("its time of modification differs".to_owned()),
            _ => None,
        },
    }
}
