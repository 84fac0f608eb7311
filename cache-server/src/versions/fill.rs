//! Filling: what a store's flight calls to bring a chunk from an origin.
//!
//! Every row that is said to hold the chunk is tried, at first in the source at hand, then in the
//! root's others; then the first once more, if it seemed unchanged (a flipped bit in transit).
//! What is wrong with an object is only known once its bytes were hashed, by the store: that is
//! why a call with `attempt > 0` judges the row of the call before.

use super::{
    Sources, VersionError, Versions,
    source::{At, Row},
};
use bytes::Bytes;
use fletch_core::Hash;
use fletch_origin::{ObjectMeta, Pin};
use fletch_store::{DatasetId, Fetch, FetchError};
use std::sync::{Arc, Mutex, PoisonError, atomic::Ordering::Relaxed};

/// Rows of one source that are tried.
const ROWS_MAX: usize = 4;

/// How often a store calls a fetch at most: rows of two sources, one repetition, the verdict.
pub const ATTEMPTS: u32 = 2 * ROWS_MAX as u32 + 2;

/// A chunk that a version has.
pub struct Located {
    /// Its length in bytes.
    pub len: u32,
    row: Row,
}

/// Brings one chunk.
pub struct Filler {
    versions: Arc<Versions>,
    sources: Arc<Sources>,
    hash: Hash,
    len: u32,
    state: Mutex<State>,
}

struct State {
    /// Rows found and not yet tried, the next one last.
    ahead: Vec<Spot>,
    found_here: bool,
    found_elsewhere: bool,
    repeated: bool,
    /// What the call before read.
    tried: Option<(Spot, ObjectMeta)>,
    /// What to tell if nothing helps.
    blame: VersionError,
}

/// A row and the object it names.
#[derive(Clone)]
struct Spot {
    at: At,
    offset: u64,
}

impl Sources {
    /// Where a chunk of this version is.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] when it is none of this version's, and others.
    pub async fn locate(&self, hash: Hash) -> Result<Located, VersionError> {
        let row = self.first.rows(hash, 1).await?.into_iter().next().ok_or(VersionError::NotFound)?;
        Ok(Located { len: row.row.len, row })
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

impl Filler {
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
        let filler = Arc::new(Filler {
            versions: Arc::clone(versions),
            sources: Arc::clone(sources),
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
            let here = Spot { at: self.sources.first.at(&first).await?, offset: first.row.offset };
            self.with(|s| s.ahead.push(here));
        }
        loop {
            let Some(next) = self.next(&first).await? else {
                return Err(self.with(|s| s.blame.clone()));
            };
            let range = next.offset..next.offset + u64::from(self.len);
            match next.at.origin.get(&next.at.path, Some(range), Some(&next.at.pin)).await {
                Ok(got) => {
                    self.with(|s| s.tried = Some((next, got.meta)));
                    return Ok(got.bytes);
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
        let Some((wrong, meta)) = self.with(|s| s.tried.take()) else { return };
        let what = format!("{}/{}", wrong.at.origin.uri(), wrong.at.path);
        let e = match differs(&wrong.at.pin, &meta) {
            Some(why) => VersionError::Changed { what, why },
            None => VersionError::Corrupt(what),
        };
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
    async fn next(&self, first: &Row) -> Result<Option<Spot>, VersionError> {
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

    async fn others(&self, first: &Row) -> Vec<Spot> {
        let mut found: Vec<Spot> = Vec::new();
        let elsewhere = self.versions.others(&self.sources).await;
        let all = std::iter::once(&self.sources.first).chain(elsewhere);
        for source in all.filter(|s| s.registered.stands()) {
            let rows = match source.rows(self.hash, ROWS_MAX).await {
                Ok(rows) => rows,
                Err(e) => {
                    tracing::debug!(error = %e, "another source cannot be looked into");
                    continue;
                }
            };
            for row in rows {
                let tried = source.is_same(&self.sources.first)
                    && (row.part, row.row.offset, &row.row.object)
                        == (first.part, first.row.offset, &first.row.object);
                if tried || row.row.len != self.len || found.len() >= 2 * ROWS_MAX - 1 {
                    continue;
                }
                match source.at(&row).await {
                    Ok(at) => found.push(Spot { at, offset: row.row.offset }),
                    Err(e) => tracing::debug!(error = %e, "another row cannot be used"),
                }
            }
        }
        // The nearest last, where it is taken from.
        found.reverse();
        found
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
