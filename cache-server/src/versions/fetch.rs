//! Fetches a chunk from an origin. The store calls this when no tier has the chunk.
//!
//! The order of the attempts:
//! 1. the row that located the chunk;
//! 2. other rows of the chunk in the same source;
//! 3. the root's other sources, by the chunk's hash or by the entry that the chunk is part of;
//! 4. the first location once more, if its object seemed unchanged (a bit may have flipped in transit).
//!
//! Only the store hashes the bytes. So a second call says that the bytes of the call before were wrong, and
//! that call decides whether the object changed or is corrupt.

use super::{
    Sources, VersionError, Versions,
    locate::location_in_layout,
    location::{ChunkLocation, LocatedChunk, ObjectPiece},
    source::{PartRow, Source},
};
use bytes::Bytes;
use fletch_core::Hash;
use fletch_origin::{ObjectMeta, Pin};
use fletch_store::{Fetch, FetchError};
use std::sync::{Arc, Mutex, PoisonError, atomic::Ordering::Relaxed};

/// The most rows of one source that are tried.
const ROWS_MAX: usize = 4;
/// The most locations beside the first one.
const OTHERS_MAX: usize = 2 * ROWS_MAX - 1;

/// How often a store calls a fetch, at most: rows of two sources, one repetition, and the final error.
pub const ATTEMPTS: u32 = 2 * ROWS_MAX as u32 + 2;

/// Fetches one chunk.
pub struct ChunkFetch {
    versions: Arc<Versions>,
    sources: Arc<Sources>,
    /// The source that located the chunk.
    source: Arc<Source>,
    hash: Hash,
    len: u32,
    state: Mutex<State>,
}

struct State {
    /// Locations not tried yet, the next one last.
    untried: Vec<ChunkLocation>,
    queued_first: bool,
    queued_others: bool,
    repeated: bool,
    /// The location that the call before read.
    last_try: Option<(ChunkLocation, Vec<ObjectMeta>)>,
    /// The error if no location has the right bytes.
    error: VersionError,
}

impl State {
    /// Keeps an error that a retry may solve, rather than one that it cannot.
    fn set_error(&mut self, e: VersionError) {
        if !self.error.kind().retryable() {
            self.error = e;
        }
    }
}

impl ChunkFetch {
    /// Returns the fetch of a chunk, for [`fletch_store::Store::read`].
    #[must_use]
    pub fn fetch(
        versions: &Arc<Versions>,
        sources: &Arc<Sources>,
        hash: Hash,
        located: &LocatedChunk,
    ) -> Fetch {
        let row = located.row.clone();
        let state = State {
            untried: Vec::new(),
            queued_first: false,
            queued_others: false,
            repeated: false,
            last_try: None,
            error: VersionError::NotFound,
        };
        let fetch = Arc::new(ChunkFetch {
            versions: Arc::clone(versions),
            sources: Arc::clone(sources),
            source: Arc::clone(&located.source),
            hash,
            len: located.len,
            state: Mutex::new(state),
        });
        Arc::new(move |_| {
            let (fetch, row) = (Arc::clone(&fetch), row.clone());
            Box::pin(async move { fetch.fetch_next(row).await.map_err(|e| FetchError::new(e.kind(), e)) })
        })
    }

    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the bytes of the next location that can be read. They are not verified.
    async fn fetch_next(&self, first: PartRow) -> Result<Bytes, VersionError> {
        self.judge_last_try();
        if !self.with(|s| std::mem::replace(&mut s.queued_first, true)) {
            let location = ChunkLocation::of(&self.source, &first).await?;
            self.with(|s| s.untried.push(location));
        }
        loop {
            let Some(next) = self.next_location(&first).await? else {
                return Err(self.with(|s| s.error.clone()));
            };
            match next.read().await {
                Ok((bytes, metas)) => {
                    self.with(|s| s.last_try = Some((next, metas)));
                    return Ok(bytes);
                }
                Err(e) => {
                    let e = VersionError::from(e);
                    self.count(&e);
                    tracing::warn!(chunk = %self.hash, error = %e, "cannot read a chunk from an object");
                    self.with(|s| s.set_error(e));
                }
            }
        }
    }

    /// Notes that the location of the call before had wrong bytes, if there was a call before.
    fn judge_last_try(&self) {
        let Some((wrong, metas)) = self.with(|s| s.last_try.take()) else { return };
        let name = |p: &ObjectPiece| format!("{}/{}", p.object.origin.uri(), p.object.path);
        let changed = wrong.pieces.iter().zip(&metas).find_map(|(p, meta)| {
            difference(&p.object.pin, meta).map(|why| VersionError::Changed { what: name(p), why })
        });
        let first = || wrong.pieces.first().map(name).unwrap_or_default();
        let e = changed.unwrap_or_else(|| VersionError::Corrupt(first()));
        self.count(&e);
        tracing::warn!(chunk = %self.hash, error = %e, "the origin returned wrong bytes");
        self.with(|s| {
            if matches!(e, VersionError::Corrupt(_)) && !s.repeated {
                // At the front: the repetition comes after all other locations.
                s.repeated = true;
                s.untried.insert(0, wrong);
            }
            s.set_error(e);
        });
    }

    fn count(&self, e: &VersionError) {
        let corruption = &self.versions.corruption;
        let counter = match e {
            VersionError::Changed { .. } => &corruption.changed,
            VersionError::Corrupt(_) => &corruption.corrupt,
            VersionError::Missing(_) => &corruption.missing,
            _ => return,
        };
        counter.fetch_add(1, Relaxed);
    }

    /// Returns the next location to try. Looks for others than the first only after the first failed.
    async fn next_location(&self, first: &PartRow) -> Result<Option<ChunkLocation>, VersionError> {
        let (mut next, failed) = self.with(|s| {
            let failed = !matches!(s.error, VersionError::NotFound);
            // A location to repeat waits until the others are queued.
            let next = if failed && !s.queued_others { None } else { s.untried.pop() };
            (next, failed)
        });
        if next.is_none() && failed && !self.with(|s| std::mem::replace(&mut s.queued_others, true)) {
            let others = self.other_locations(first).await;
            next = self.with(|s| {
                s.untried.extend(others);
                s.untried.pop()
            });
        }
        Ok(next)
    }

    async fn other_locations(&self, first: &PartRow) -> Vec<ChunkLocation> {
        let mut found: Vec<ChunkLocation> = Vec::new();
        let others = self.versions.others(&self.sources, true).await;
        let all = [&self.source, &self.sources.first].into_iter().chain(others.iter());
        let mut seen: Vec<&Arc<Source>> = Vec::new();
        for source in all.filter(|s| s.registered.is_registered()) {
            if seen.iter().any(|s| s.is_same(source)) {
                continue;
            }
            seen.push(source);
            if let Err(e) = self.locations_in(source, first, &mut found).await {
                tracing::debug!(error = %e, "cannot look for a chunk in another source");
            }
        }
        // The nearest location goes last, because the last one is tried next.
        found.reverse();
        found
    }

    /// Adds the locations of the chunk, or of its bytes, in one source.
    async fn locations_in(
        &self,
        source: &Arc<Source>,
        first: &PartRow,
        found: &mut Vec<ChunkLocation>,
    ) -> Result<(), VersionError> {
        let own = source.is_same(&self.source);
        for row in source.rows(self.hash, ROWS_MAX).await? {
            let tried = own
                && (row.part, row.row.offset, &row.row.object)
                    == (first.part, first.row.offset, &first.row.object);
            if !tried && row.row.len == self.len && found.len() < OTHERS_MAX {
                match ChunkLocation::of(source, &row).await {
                    Ok(location) => found.push(location),
                    Err(e) => tracing::debug!(error = %e, "cannot use another row of a chunk"),
                }
            }
        }
        if !own
            && found.len() < OTHERS_MAX
            && let Some(location) = location_in_layout(&self.source, first, source).await?
        {
            found.push(location);
        }
        Ok(())
    }
}

/// Returns how an object differs from its pin, or `None` if it seems unchanged.
fn difference(pin: &Pin, meta: &ObjectMeta) -> Option<String> {
    if pin.size != meta.size {
        return Some(format!("it had {} bytes and has {}", pin.size, meta.size));
    }
    match (&pin.etag, &meta.etag) {
        // Etags decide where both exist: a store's listing and its replies give times of different precision.
        (Some(a), Some(b)) => (a != b).then(|| "its etag differs".to_owned()),
        _ => match (pin.mtime_ns, meta.mtime_ns) {
            (Some(a), Some(b)) if a != b => Some("its time of modification differs".to_owned()),
            _ => None,
        },
    }
}
