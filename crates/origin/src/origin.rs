//! Origins as their users see them: who may do how much at once, by when, and where it goes.

use crate::local::Within;
use crate::remote::{Reach, Remote};
use crate::stats::Counters;
use crate::uri::{Place, check_path};
use crate::{OriginConfig, OriginError, OriginLimits, OriginStats, OriginUri, local};
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

/// What an origin says about one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectMeta {
    /// Relative to the origin's URI.
    pub path: String,
    /// In bytes.
    pub size: u64,
    /// Last modification, nanoseconds since 1970 (seconds are all that S3 has).
    pub mtime_ns: Option<i64>,
    /// The store's entity tag; for a local file its inode and change time.
    pub etag: Option<String>,
}

impl ObjectMeta {
    /// The pin of this state of the object.
    #[must_use]
    pub fn pin(&self) -> Pin {
        Pin { size: self.size, mtime_ns: self.mtime_ns, etag: self.etag.clone() }
    }
}

/// The state of an object when it was indexed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pin {
    /// In bytes.
    pub size: u64,
    /// As [`ObjectMeta::mtime_ns`].
    pub mtime_ns: Option<i64>,
    /// As [`ObjectMeta::etag`].
    pub etag: Option<String>,
}

/// Bytes as an origin gave them: not verified, but as many as were asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Got {
    /// Exactly the range, or the whole object. Whoever drops the last clone frees the buffer.
    pub bytes: Bytes,
    /// The object's state, seen with these bytes; for a local file after they were read, so that
    /// a change while they were read shows in it.
    pub meta: ObjectMeta,
}

/// Whether a write may replace an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutMode {
    /// Only if there is none: else [`OriginError::AlreadyExists`].
    Create,
    /// Whatever is there.
    Overwrite,
}

/// Everything that was configured, and what it uses together. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Origins(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limits: OriginLimits,
    configs: Vec<(OriginUri, OriginConfig)>,
    counters: Arc<Counters>,
    local_turns: Arc<Semaphore>,
    remote_turns: Arc<Semaphore>,
    /// By place in `configs` and bucket: one connection pool each.
    remotes: Mutex<HashMap<(usize, String), Arc<Remote>>>,
}

impl Origins {
    /// Takes the `[[origin]]` tables and the limits.
    ///
    /// # Errors
    /// [`OriginError::Invalid`], with every fault of every table, or for limits of zero.
    pub fn new(configs: Vec<OriginConfig>, limits: OriginLimits) -> Result<Self, OriginError> {
        if limits.requests_max == 0
            || limits.attempts_max == 0
            || limits.io_timeout.is_zero()
            || limits.get_bytes_max == 0
        {
            return Err(OriginError::invalid("origin limits", "each is at least 1"));
        }
        let mut faults = Vec::new();
        let mut read: Vec<(OriginUri, OriginConfig)> = Vec::new();
        for config in configs {
            match config.check() {
                Ok(prefix) if read.iter().any(|(other, _)| *other == prefix) => {
                    faults.push(format!("{prefix} is configured twice"));
                }
                Ok(prefix) => read.push((prefix, config)),
                Err(error) => faults.push(error.to_string()),
            }
        }
        if !faults.is_empty() {
            return Err(OriginError::invalid("[[origin]]", faults.join("; ")));
        }
        Ok(Origins(Arc::new(Shared {
            limits,
            configs: read,
            counters: Arc::default(),
            local_turns: Arc::new(Semaphore::new(limits.requests_max)),
            remote_turns: Arc::new(Semaphore::new(limits.requests_max)),
            remotes: Mutex::default(),
        })))
    }

    /// Whether `uri` lies under a configured prefix. By names: links are not resolved.
    #[must_use]
    pub fn is_configured(&self, uri: &OriginUri) -> bool {
        self.find(uri).is_some()
    }

    /// For which domains the longest configured prefix of `uri` is (for all when there are none);
    /// `None` when there is no such prefix. By names: links are not resolved.
    #[must_use]
    pub fn domains(&self, uri: &OriginUri) -> Option<&[String]> {
        self.find(uri).map(|index| self.0.configs[index].1.domains.as_slice())
    }

    /// The origin at `uri`. Local directories open always (whether one may be registered is for
    /// the caller to decide, by [`Origins::is_configured`]); stores only under a configured prefix.
    /// Sends no request.
    ///
    /// # Errors
    /// [`OriginError::Invalid`] for a store that is not configured, or credentials that cannot
    /// be read.
    pub fn open(&self, uri: &OriginUri) -> Result<Origin, OriginError> {
        let reach = match uri.place() {
            Place::Local(_) => None,
            Place::Store { scheme, host, path } => {
                let index = self.find(uri).ok_or_else(|| {
                    OriginError::invalid(
                        uri,
                        "lies under no configured origin; add an [[origin]] with this prefix",
                    )
                })?;
                let key = (index, host.clone());
                let mut remotes = self.0.remotes.lock().unwrap_or_else(PoisonError::into_inner);
                let remote = match remotes.get(&key) {
                    Some(remote) => Arc::clone(remote),
                    None => {
                        let config = &self.0.configs[index].1;
                        let turns = &self.0.remote_turns;
                        let remote =
                            Remote::new(config, *scheme, host, self.0.limits, &self.0.counters, turns)?;
                        let remote = Arc::new(remote);
                        remotes.insert(key, Arc::clone(&remote));
                        remote
                    }
                };
                Some(Reach { remote, prefix: path.clone() })
            }
        };
        Ok(Origin {
            uri: Arc::new(uri.clone()),
            shared: Arc::clone(&self.0),
            reach,
            within: Within::default(),
        })
    }

    /// What was asked of all origins so far.
    #[must_use]
    pub fn stats(&self) -> OriginStats {
        self.0.counters.snapshot()
    }

    fn find(&self, uri: &OriginUri) -> Option<usize> {
        let under = self.0.configs.iter().enumerate().filter(|(_, (prefix, _))| prefix.contains(uri));
        under.max_by_key(|(_, (prefix, _))| prefix.length()).map(|(index, _)| index)
    }
}

/// One place at an origin. Cheap to clone. Paths are relative, `/`-separated and UTF-8.
///
/// Every call ends within `io_timeout`; every error is counted in [`Origins::stats`].
#[derive(Debug, Clone)]
pub struct Origin {
    uri: Arc<OriginUri>,
    shared: Arc<Shared>,
    reach: Option<Reach>,
    within: Within,
}

impl Origin {
    /// The same place, of whose files only those are read that really are (all links followed)
    /// where `may` allows it. For directories of this machine.
    #[must_use]
    pub fn confined(self, may: local::MayRead) -> Self {
        Origin { within: Within::only(may), ..self }
    }

    /// Where this is.
    #[must_use]
    pub fn uri(&self) -> &OriginUri {
        &self.uri
    }

    /// The directory, where it is one of this machine.
    #[must_use]
    pub fn local_dir(&self) -> Option<&Path> {
        self.uri.as_local()
    }

    /// Reads `range` (bytes, end exclusive) of the object, or all of it.
    ///
    /// Another size than the pin's is `Changed`; at a store another etag is too. A local file with
    /// the pin's size and another time is read: its bytes are hashed by the caller, who compares
    /// `pin` with `meta` to tell a changed file from a lying disk.
    ///
    /// # Errors
    /// `NotFound`, `Changed`, `Denied`, `Throttled`, `Unavailable`; `Invalid` for a bad path, a
    /// range past the end (of an object that has the pin's size) or longer than `get_bytes_max`;
    /// `Corrupt` for an answer with other bytes than were asked for.
    pub async fn get(
        &self,
        path: &str,
        range: Option<Range<u64>>,
        pin: Option<&Pin>,
    ) -> Result<Got, OriginError> {
        let what = self.what(path);
        let run = async {
            check_path(path)?;
            if let Some(range) = &range {
                if range.start > range.end {
                    return Err(OriginError::invalid(
                        &what,
                        format!("range {range:?} ends before it begins"),
                    ));
                }
                self.check_length(&what, range.end - range.start)?;
            }
            match &self.reach {
                None => {
                    let (path, pin, max) = (path.to_owned(), pin.cloned(), self.shared.limits.get_bytes_max);
                    let (named, within) = (what.clone(), self.within.clone());
                    self.local(&what, move |dir| {
                        local::get(&within, dir, &named, &path, range, pin.as_ref(), max)
                    })
                    .await
                }
                Some(reach) => reach.get(&what, path, range, pin).await,
            }
        };
        self.counted(run.await.inspect(|got| {
            if self.reach.is_none() {
                self.shared.counters.read(got.bytes.len() as u64);
            }
        }))
    }

    /// The state of the object.
    ///
    /// # Errors
    /// As [`Origin::get`].
    pub async fn head(&self, path: &str) -> Result<ObjectMeta, OriginError> {
        let what = self.what(path);
        let run = async {
            check_path(path)?;
            match &self.reach {
                None => {
                    let (path, named) = (path.to_owned(), what.clone());
                    let within = self.within.clone();
                    self.local(&what, move |dir| local::head(&within, dir, &named, &path)).await
                }
                Some(reach) => reach.head(&what, path).await,
            }
        };
        self.counted(run.await)
    }

    /// Writes the object: whole and durable on return; after an error whole or not at all.
    ///
    /// # Errors
    /// `AlreadyExists` in mode `Create`; else as [`Origin::get`]. After `Unavailable` the write may
    /// have happened.
    pub async fn put(&self, path: &str, bytes: Bytes, mode: PutMode) -> Result<(), OriginError> {
        let what = self.what(path);
        let length = bytes.len() as u64;
        let run = async {
            check_path(path)?;
            match &self.reach {
                None => {
                    let (path, named) = (path.to_owned(), what.clone());
                    self.local(&what, move |dir| local::put(dir, &named, &path, &mut &bytes[..], mode)).await
                }
                Some(reach) => reach.put(&what, path, bytes, mode).await,
            }
        };
        self.counted(run.await.inspect(|()| self.shared.counters.wrote(length)))
    }

    /// As [`Origin::put`], from a file of this machine, in bounded memory. `io_timeout` holds for
    /// each 16 MiB. At a store, `Create` of more than 16 MiB is checked before and not atomically:
    /// use it for names that follow from content.
    ///
    /// # Errors
    /// As [`Origin::put`]; also when `file` cannot be read.
    pub async fn put_file(&self, path: &str, file: &Path, mode: PutMode) -> Result<(), OriginError> {
        let what = self.what(path);
        let run = async {
            check_path(path)?;
            match &self.reach {
                None => {
                    let (path, named, file) = (path.to_owned(), what.clone(), file.to_owned());
                    let length = std::fs::metadata(&file)
                        .map_err(|e| OriginError::io(&file.display().to_string(), &e))?
                        .len();
                    let turns = u32::try_from(length / (16 << 20) + 1).unwrap_or(u32::MAX);
                    let deadline = Instant::now() + self.shared.limits.io_timeout.saturating_mul(turns);
                    self.local_by(&what, deadline, move |dir| {
                        local::put_file(dir, &named, &path, &file, mode)
                    })
                    .await
                }
                Some(reach) => reach.put_file(&what, path, file, mode).await,
            }
        };
        self.counted(run.await).map(|length| self.shared.counters.wrote(length))
    }

    /// Removes the object; that there is none is no error.
    ///
    /// # Errors
    /// As [`Origin::get`].
    pub async fn delete(&self, path: &str) -> Result<(), OriginError> {
        let what = self.what(path);
        let run = async {
            check_path(path)?;
            match &self.reach {
                None => {
                    let (path, named) = (path.to_owned(), what.clone());
                    self.local(&what, move |dir| local::delete(dir, &named, &path)).await
                }
                Some(reach) => reach.delete(&what, path).await,
            }
        };
        self.counted(run.await)
    }

    /// Every object below the directory `prefix` (empty for all), in byte order of its path;
    /// none when there is no such directory. Each item comes within `io_timeout`. In a local tree
    /// these are the regular files: links are not followed. What cannot be listed (an unreadable
    /// directory, a name that is not UTF-8) is an `Err` in its place, and a local listing goes on.
    #[must_use]
    pub fn list(&self, prefix: &str) -> BoxStream<'static, Result<ObjectMeta, OriginError>> {
        let what = self.what(prefix);
        let counters = Arc::clone(&self.shared.counters);
        let prefix = prefix.trim_end_matches('/').to_owned();
        if !prefix.is_empty()
            && let Err(error) = check_path(&prefix)
        {
            counters.failed(&error);
            return futures::stream::iter([Err(error)]).boxed();
        }
        let items = match (&self.reach, self.local_dir()) {
            (Some(reach), _) => reach.list(what, prefix),
            (None, Some(dir)) => {
                counters.request();
                local::list(self.within.clone(), dir.to_owned(), what, prefix, self.shared.limits.io_timeout)
            }
            (None, None) => futures::stream::empty().boxed(),
        };
        items
            .inspect(move |item| {
                if let Err(error) = item {
                    counters.failed(error)
                }
            })
            .boxed()
    }

    fn what(&self, path: &str) -> String {
        let shown: String = path.chars().take(4096).collect();
        format!("{}/{}", self.uri, shown.escape_debug())
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.shared.limits.io_timeout
    }

    fn check_length(&self, what: &str, length: u64) -> Result<(), OriginError> {
        let max = self.shared.limits.get_bytes_max;
        if length > max {
            return Err(OriginError::invalid(
                what,
                format!("{length} bytes in one read; at most {max} are held, read by range"),
            ));
        }
        Ok(())
    }

    fn counted<T>(&self, result: Result<T, OriginError>) -> Result<T, OriginError> {
        result.inspect_err(|error| self.shared.counters.failed(error))
    }

    async fn turn(
        &self,
        what: &str,
        turns: &Arc<Semaphore>,
        deadline: Instant,
    ) -> Result<OwnedSemaphorePermit, OriginError> {
        let waited = || OriginError::Unavailable {
            what: what.to_owned(),
            why: format!(
                "{} other calls are under way and none ended within io_timeout",
                self.shared.limits.requests_max
            ),
        };
        timeout_at(deadline, Arc::clone(turns).acquire_owned())
            .await
            .map_err(|_| waited())?
            .map_err(|_| waited())
    }

    async fn local<T: Send + 'static>(
        &self,
        what: &str,
        work: impl FnOnce(&Path) -> Result<T, OriginError> + Send + 'static,
    ) -> Result<T, OriginError> {
        self.local_by(what, self.deadline(), work).await
    }

    /// Runs `work` on a blocking thread. A thread that a dead file system holds keeps its turn
    /// beyond the deadline, so that no more than `requests_max` threads can ever hang.
    async fn local_by<T: Send + 'static>(
        &self,
        what: &str,
        deadline: Instant,
        work: impl FnOnce(&Path) -> Result<T, OriginError> + Send + 'static,
    ) -> Result<T, OriginError> {
        let turn = self.turn(what, &self.shared.local_turns, deadline).await?;
        self.shared.counters.request();
        let dir = self.local_dir().map(Path::to_owned).unwrap_or_default();
        let running = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            work(&dir)
        });
        let unavailable = |why: &str| OriginError::Unavailable { what: what.to_owned(), why: why.to_owned() };
        match timeout_at(deadline, running).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(unavailable("the thread that read it ended before it did")),
            Err(_) => Err(unavailable("the file system did not answer within io_timeout")),
        }
    }
}
