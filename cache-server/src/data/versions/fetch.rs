//! Fetches a chunk from an origin. The store calls this when no tier has the chunk.
//!
//! The order of the locations:
//! 1. the row that located the chunk;
//! 2. other rows of the chunk in the same source;
//! 3. the root's other sources, by the chunk's hash or by the entry that the chunk is part of;
//! 4. the first location once more, if its object seemed unchanged (a bit may have flipped in transit).
//!
//! `race.rs` decides when the next location is asked, and leaves out homes that do not answer.
//!
//! The store hashes the bytes. So a second call says that the bytes of the call before were wrong, and that
//! call decides whether the object changed or is corrupt. Bytes of an object whose tag is another one than in
//! the tables are hashed here, too: if they are right, `renewed_pins.rs` remembers the tag.

use super::{
    Sources, VersionError, Versions,
    home::Home,
    locate::location_in_layout,
    location::{ChunkLocation, LocatedChunk},
    race::{Candidate, Choices, Finish, Found, race},
    source::{PartRow, Source},
};
use crate::tenancy::accounting::JobCosts;
use bytes::Bytes;
use fletch_core::{Expected, Hash, Verified};
use fletch_origin::{Meter, ObjectMeta};
use fletch_store::{Fetch, FetchError};
use futures::{
    StreamExt as _,
    future::{BoxFuture, FutureExt as _},
    stream::FuturesUnordered,
};
use parking_lot::Mutex;
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::time::{Instant, timeout_at};

/// The most rows of one source that are tried.
const ROWS_MAX: usize = 4;
/// The most locations beside the first one.
const OTHERS_MAX: usize = 2 * ROWS_MAX - 1;
/// How long a reader with a location waits for locations in further sources.
const MORE_WITHIN: Duration = Duration::from_millis(300);
/// Bytes of this length or more are hashed on a blocking thread.
const BLOCKING_BYTES: usize = 64 << 10;

/// How often a store calls a fetch, at most: rows of two sources, one repetition, and the final error.
pub const ATTEMPTS: u32 = 2 * ROWS_MAX as u32 + 2;

pub struct ChunkFetch {
    versions: Arc<Versions>,
    sources: Arc<Sources>,
    /// Counts what the job that asked makes the server read.
    meter: Meter,
    /// The source that located the chunk.
    source: Arc<Source>,
    /// The row that located it.
    first: PartRow,
    hash: Hash,
    expected: Expected,
    len: u32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// When every call of this fetch ends. `None` before the first call.
    deadline: Option<Instant>,
    /// Locations not tried yet.
    untried: Vec<Candidate<ChunkLocation>>,
    /// The sources whose locations were tried or are untried.
    seen: Vec<Arc<Source>>,
    /// How many locations beside the first one were found.
    others: usize,
    /// The location to try again after all others.
    again: Option<Candidate<ChunkLocation>>,
    repeated: bool,
    /// The location that the call before read.
    last_try: Option<(ChunkLocation, Vec<ObjectMeta>)>,
    /// The errors of homes that did not answer.
    outages: Vec<(Arc<Home>, VersionError)>,
    /// The error if no location has the right bytes, although every home answered.
    damage: Option<VersionError>,
}

impl State {
    /// Returns the error of the whole fetch: one that a retry may solve, rather than one that it cannot.
    fn error(&self) -> VersionError {
        let outage = VersionError::of_outages(&self.outages);
        outage.or_else(|| self.damage.clone()).unwrap_or(VersionError::NotFound)
    }
}

impl ChunkFetch {
    /// Returns the fetch of a chunk, for [`fletch_store::Store::read`].
    ///
    /// `costs` are those of the job that asks.
    #[must_use]
    pub fn fetch(
        versions: &Arc<Versions>,
        (sources, costs): (&Arc<Sources>, &JobCosts),
        expected: Expected,
        located: &LocatedChunk,
    ) -> Fetch {
        let fetch = Arc::new(ChunkFetch {
            versions: Arc::clone(versions),
            sources: Arc::clone(sources),
            meter: costs.content_meter(),
            source: Arc::clone(&located.source),
            first: located.row.clone(),
            hash: expected.name(),
            expected,
            len: located.len,
            state: Mutex::default(),
        });
        Arc::new(move |_| {
            let fetch = Arc::clone(&fetch);
            Box::pin(async move { fetch.fetch_next().await.map_err(|e| FetchError::new(e.kind(), e)) })
        })
    }

    /// Returns the first fetch of bytes that a draft names by their place, for
    /// [`fletch_store::Store::learn`].
    ///
    /// It asks one place once, because nothing could tell which of two answers is right.
    #[must_use]
    pub fn of_name(versions: &Arc<Versions>, costs: &JobCosts, located: &LocatedChunk) -> Fetch {
        let (versions, meter, located) = (Arc::clone(versions), costs.content_meter(), located.clone());
        Arc::new(move |_| {
            let (versions, meter, located) = (Arc::clone(&versions), meter.clone(), located.clone());
            Box::pin(async move {
                let read = async {
                    located.check_name().await?;
                    let location = ChunkLocation::of(&located.source, &located.row).await?;
                    location.read_as_listed(&meter).await
                };
                read.await.map_err(|e| {
                    versions.count_corruption(&e);
                    if !e.is_outage() {
                        tracing::warn!(name = %located.row.row.chunk, error = %e, "cannot read an object");
                    }
                    FetchError::new(e.kind(), e)
                })
            })
        })
    }

    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.lock())
    }

    /// Returns the bytes of the next location that can be read. They are not verified.
    async fn fetch_next(&self) -> Result<Bytes, VersionError> {
        self.judge_last_try();
        let begins = self.with(|s| s.deadline.is_none());
        let deadline = self.with(|s| *s.deadline.get_or_insert_with(|| self.versions.call_deadline()));
        if begins {
            let location = ChunkLocation::of(&self.source, &self.first).await?;
            self.with(|s| s.untried.extend(location.candidate()));
        }
        loop {
            let ready = self.with(|s| std::mem::take(&mut s.untried));
            let Finish { won, left, failed } =
                race(&self.versions.homes, &self.versions.tasks, self, ready, deadline).await;
            self.with(|s| s.untried = left);
            for (home, e) in failed {
                self.failed(home, e);
            }
            if let Some((location, (bytes, metas))) = won {
                if location.is_news(&metas) && self.is_right(&bytes).await {
                    location.note_right(&metas);
                }
                self.with(|s| s.last_try = Some((location, metas)));
                return Ok(bytes);
            }
            let again = self.with(|s| s.again.take()).filter(|_| Instant::now() < deadline);
            let Some(again) = again else { return Err(self.with(|s| s.error())) };
            self.with(|s| s.untried = vec![again]);
        }
    }

    /// Hashes the bytes of an answer.
    async fn is_right(&self, bytes: &Bytes) -> bool {
        if bytes.len() < BLOCKING_BYTES {
            return Verified::check(self.expected.clone(), bytes.clone()).is_ok();
        }
        let (bytes, expected) = (bytes.clone(), self.expected.clone());
        let hashed = tokio::task::spawn_blocking(move || Verified::check(expected, bytes).is_ok()).await;
        hashed.unwrap_or_else(|error| {
            tracing::debug!(%error, chunk = %self.hash, "a chunk under a new tag was not hashed");
            false
        })
    }

    fn failed(&self, home: Arc<Home>, e: VersionError) {
        self.versions.count_corruption(&e);
        if e.is_outage() {
            // The home's health logs the outage once, for all chunks.
            tracing::debug!(chunk = %self.hash, error = %e, "cannot read a chunk from its home");
            self.with(|s| s.outages.push((home, e)));
        } else {
            tracing::warn!(chunk = %self.hash, error = %e, "cannot read a chunk from an object");
            self.with(|s| s.damage = Some(e));
        }
    }

    /// Notes that the location of the call before had wrong bytes, if there was a call before.
    fn judge_last_try(&self) {
        let Some((wrong, metas)) = self.with(|s| s.last_try.take()) else { return };
        let changed = wrong.pieces.iter().zip(&metas).find_map(|(p, meta)| {
            let why = wrong.difference(p, meta)?;
            wrong.note_changed(p);
            Some(VersionError::Changed { what: p.object.name(), why })
        });
        let first = || wrong.pieces.first().map(|p| p.object.name()).unwrap_or_default();
        let e = changed.unwrap_or_else(|| VersionError::Corrupt(first()));
        self.versions.count_corruption(&e);
        tracing::warn!(chunk = %self.hash, error = %e, "the origin returned wrong bytes");
        self.with(|s| {
            if matches!(e, VersionError::Corrupt(_)) && !s.repeated {
                s.repeated = true;
                s.again = wrong.candidate();
            }
            s.damage = Some(e);
        });
    }

    /// Returns the locations in sources that were not seen before.
    ///
    /// A source that is slow to locate the chunk is left for the next call, if another one has it.
    async fn other_locations(&self, fresh: bool) -> Found<ChunkLocation> {
        let mut seen = self.with(|s| s.seen.clone());
        let mut asking = FuturesUnordered::new();
        // The source that located the chunk may have further rows of it.
        if !seen.iter().any(|s| s.is_same(&self.source)) {
            asking.push(self.located_in(Arc::clone(&self.source)));
            seen.push(Arc::clone(&self.source));
        }
        let new = self.versions.new_sources(&self.sources, fresh, &seen).await;
        for source in new.sources {
            seen.push(Arc::clone(&source));
            asking.push(self.located_in(source));
        }
        let first = &self.sources.first;
        if !seen.iter().any(|s| s.is_same(first)) {
            asking.push(self.located_in(Arc::clone(first)));
        }
        let (mut candidates, begun) = (Vec::new(), Instant::now());
        loop {
            let until = begun + MORE_WITHIN;
            let next = match candidates.is_empty() {
                true => Ok(asking.next().await),
                false => timeout_at(until, asking.next()).await,
            };
            match next {
                Ok(Some((source, found))) => {
                    match found {
                        Ok(found) => candidates.extend(found.iter().filter_map(ChunkLocation::candidate)),
                        Err(e) => tracing::debug!(error = %e, "cannot look for a chunk in another source"),
                    }
                    self.with(|s| s.seen.push(source));
                }
                Ok(None) | Err(_) => break,
            }
        }
        let room = OTHERS_MAX.saturating_sub(self.with(|s| s.others));
        candidates.truncate(room);
        self.with(|s| s.others += candidates.len());
        Found { all: (new.all && asking.is_empty()) || room == 0, candidates }
    }

    /// Returns the locations of the chunk, or of its bytes, in one source.
    async fn located_in(
        &self,
        source: Arc<Source>,
    ) -> (Arc<Source>, Result<Vec<ChunkLocation>, VersionError>) {
        let found = self.locations_in(&source).await;
        (source, found)
    }

    async fn locations_in(&self, source: &Arc<Source>) -> Result<Vec<ChunkLocation>, VersionError> {
        let (first, mut found) = (&self.first, Vec::new());
        let own = source.is_same(&self.source);
        for row in source.rows(self.hash, ROWS_MAX).await? {
            let tried = own
                && (row.part, row.row.offset, &row.row.object)
                    == (first.part, first.row.offset, &first.row.object);
            if !tried && row.row.len == self.len {
                match ChunkLocation::of(source, &row).await {
                    Ok(location) => found.push(location),
                    Err(e) => tracing::debug!(error = %e, "cannot use another row of a chunk"),
                }
            }
        }
        if !own && let Some(location) = location_in_layout(&self.source, first, source).await? {
            found.push(location);
        }
        Ok(found)
    }
}

impl Versions {
    /// Counts bytes that are not those of the tables.
    fn count_corruption(&self, e: &VersionError) {
        let counter = match e {
            VersionError::Changed { .. } => &self.corruption.changed,
            VersionError::Corrupt(_) => &self.corruption.corrupt,
            VersionError::Missing(_) => &self.corruption.missing,
            _ => return,
        };
        counter.fetch_add(1, Relaxed);
    }
}

impl Choices for ChunkFetch {
    type Key = ChunkLocation;
    type Value = (Bytes, Vec<ObjectMeta>);

    fn ask(&self, location: &ChunkLocation) -> BoxFuture<'static, Result<Self::Value, VersionError>> {
        let (location, meter) = (location.clone(), self.meter.clone());
        async move { Ok(location.read(&meter).await?) }.boxed()
    }

    fn probe(&self, location: &ChunkLocation) -> BoxFuture<'static, ()> {
        let location = location.clone();
        async move { location.probe().await }.boxed()
    }

    fn more(&self, fresh: bool) -> BoxFuture<'_, Found<ChunkLocation>> {
        self.other_locations(fresh).boxed()
    }
}
