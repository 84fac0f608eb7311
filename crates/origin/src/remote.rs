//! Blob stores and plain servers, through `object_store`. Translates calls and errors; decides
//! whether an answer is the one that was asked for, and when credentials are read again.
//!
//! Credentials: a file is looked at once a second while it is used, and at once after a 401 or 403,
//! which is then tried again once if the file had changed. Whatever cannot be read leaves what was
//! read before in use.

use crate::credentials::{self, Source, Stamp};
use crate::origin::{Got, ObjectMeta, Pin};
use crate::pace::Pace;
use crate::retry::retrying;
use crate::stats::Counters;
use crate::uri::Scheme;
use crate::wire::Answer;
use crate::{OriginConfig, OriginError, OriginLimits};
use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use object_store::path::Path as Key;
use object_store::{GetOptions, GetRange, GetResult, ObjectStoreExt as _};
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use store::{Recipe, Store};
use tokio::sync::{OnceCell, Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout, timeout_at};
use translate::{cause, changed, corrupt, translate, unavailable};

mod create;
mod large;
mod pages;
mod store;
mod translate;
mod write;

/// How often a credentials file is looked at.
const WATCH: Duration = Duration::from_secs(1);

/// The longest object that is read whole for a part of it, where a server knows no ranges.
const WHOLE_BYTES_MAX: u64 = 16 << 20;

/// One bucket, container or server and how to reach it.
pub(crate) struct Remote {
    config: OriginConfig,
    scheme: Scheme,
    host: String,
    limits: OriginLimits,
    counters: Arc<Counters>,
    /// Of the whole process, for each request; and of this origin, for each call.
    turns: Arc<Semaphore>,
    own_turns: Semaphore,
    pace: Pace,
    /// Whether it keeps `PutMode::Create`, once that is known.
    creates: OnceCell<bool>,
    watched: Mutex<Watched>,
    /// A plain server that has answered a range with everything.
    whole_only: AtomicBool,
}

/// The client in use.
pub(super) struct Current {
    store: Store,
    generation: u64,
}

struct Watched {
    current: Arc<Current>,
    file: Option<PathBuf>,
    /// The state of the file that was read last, also if it was of no use.
    stamp: Option<Stamp>,
    looked: Instant,
}

impl fmt::Debug for Remote {
    /// Not derived: a client shows the id of its key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Remote(..)")
    }
}

/// A prefix of a bucket.
#[derive(Debug, Clone)]
pub(crate) struct Reach {
    pub remote: Arc<Remote>,
    /// Empty, or a clean path.
    pub prefix: String,
}

impl Remote {
    pub fn new(
        config: &OriginConfig,
        scheme: Scheme,
        host: &str,
        limits: OriginLimits,
        counters: &Arc<Counters>,
        turns: &Arc<Semaphore>,
    ) -> Result<Self, OriginError> {
        let source = credentials::source(config.credentials.as_ref(), scheme);
        let file = match &source {
            Source::File { path, .. } => Some(path.clone()),
            _ => None,
        };
        // Before it is read: a change in between is seen as one.
        let stamp = file.as_deref().and_then(Stamp::of);
        let own = config.concurrency.map_or(limits.requests_max, |n| n as usize);
        let recipe = Recipe {
            config,
            scheme,
            host,
            source: &source,
            connect_timeout: connect_timeout(limits),
            counters,
        };
        let current = Arc::new(Current { store: Store::make(&recipe)?, generation: 0 });
        Ok(Remote {
            config: config.clone(),
            scheme,
            host: host.to_owned(),
            limits,
            counters: Arc::clone(counters),
            turns: Arc::clone(turns),
            own_turns: Semaphore::new(own),
            pace: Pace::new(config.requests_per_second, config.bytes_per_second, Instant::now()),
            creates: OnceCell::new(),
            watched: Mutex::new(Watched { current, file, stamp, looked: Instant::now() }),
            whole_only: AtomicBool::new(false),
        })
    }

    /// The client to use now, made anew if its credentials have changed.
    fn current(&self) -> Arc<Current> {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if watched.file.is_some() && watched.looked.elapsed() >= WATCH {
            self.look(&mut watched);
        }
        Arc::clone(&watched.current)
    }

    /// After a refusal: whether there are other credentials than those of generation `used`.
    fn renewed(&self, used: u64) -> bool {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if watched.current.generation == used {
            self.look(&mut watched);
        }
        watched.current.generation != used
    }

    fn look(&self, watched: &mut Watched) {
        watched.looked = Instant::now();
        let Some(stamp) = watched.file.as_deref().and_then(Stamp::of) else { return };
        if watched.stamp == Some(stamp) {
            return;
        }
        watched.stamp = Some(stamp);
        let source = credentials::source(self.config.credentials.as_ref(), self.scheme);
        let recipe = Recipe {
            config: &self.config,
            scheme: self.scheme,
            host: &self.host,
            source: &source,
            connect_timeout: connect_timeout(self.limits),
            counters: &self.counters,
        };
        match Store::make(&recipe) {
            Ok(store) => {
                let generation = watched.current.generation + 1;
                watched.current = Arc::new(Current { store, generation });
                self.counters.credentials_read.fetch_add(1, Relaxed);
                tracing::info!(origin = %self.config.prefix, "its credentials changed and were read again");
            }
            Err(error) => tracing::warn!(%error, "changed credentials are of no use; the old ones stay"),
        }
    }

    /// The longest wait for one answer or one more piece of it: a stalled connection leaves time
    /// for another within the call's deadline.
    fn patience(&self) -> Duration {
        self.limits.io_timeout / 3
    }

    async fn patiently<T>(
        &self,
        what: &str,
        answer: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, OriginError> {
        match timeout(self.patience(), answer).await {
            Ok(result) => result.map_err(|e| translate(what, &e)),
            Err(_) => Err(unavailable(what, "no answer in a third of io_timeout")),
        }
    }

    async fn turn<'a>(
        &self,
        what: &str,
        turns: &'a Semaphore,
        deadline: Instant,
    ) -> Result<SemaphorePermit<'a>, OriginError> {
        let waited = || {
            unavailable(what, "as many calls as are allowed are under way and none ended within io_timeout")
        };
        timeout_at(deadline, turns.acquire()).await.map_err(|_| waited())?.map_err(|_| waited())
    }

    /// One call that is expected to move so many bytes: its turn, its pace, its attempts, and one
    /// more where credentials were replaced meanwhile. Everything that is sent goes through here.
    async fn tried<T, F: Future<Output = Result<T, OriginError>>>(
        &self,
        what: &str,
        bytes: u64,
        once: impl Fn(u32, Arc<Current>) -> F,
    ) -> Result<T, OriginError> {
        let deadline = Instant::now() + self.limits.io_timeout;
        let _own = self.turn(what, &self.own_turns, deadline).await?;
        let once = &once;
        retrying(what, deadline, self.limits.attempts_max, &self.counters, |attempt| async move {
            let ticket = self.pace.admit(what, bytes, deadline).await?;
            let _turn = self.turn(what, &self.turns, deadline).await?;
            let current = self.current();
            let used = current.generation;
            let result = match once(attempt, current).await {
                Err(OriginError::Denied { .. }) if self.renewed(used) => {
                    self.counters.retries.fetch_add(1, Relaxed);
                    once(attempt, self.current()).await
                }
                other => other,
            };
            match &result {
                Err(OriginError::Throttled { retry_after, .. }) => {
                    if self.pace.refused(ticket, *retry_after, rand::random()) {
                        self.counters.pauses.fetch_add(1, Relaxed);
                        tracing::debug!(origin = %self.config.prefix, ?retry_after, "the origin asks to slow down");
                    }
                }
                // Nobody answered: that says nothing about how fast it may be asked.
                Err(OriginError::Unavailable { .. }) => {}
                _ => self.pace.answered(ticket),
            }
            result
        })
        .await
    }

    fn meta_of(&self, path: &str, meta: &object_store::ObjectMeta) -> ObjectMeta {
        let mtime_ns = meta.last_modified.timestamp_nanos_opt();
        let etag = meta.e_tag.clone().map(|etag| match self.scheme {
            // Azure's listings leave the quotes out, its headers do not.
            Scheme::Azure if !etag.starts_with('"') => format!("\"{etag}\""),
            _ => etag,
        });
        ObjectMeta {
            path: path.to_owned(),
            size: meta.size,
            // A plain server may say nothing, which the library tells as the epoch.
            mtime_ns: mtime_ns.filter(|t| *t != 0 || !self.scheme.is_plain()),
            etag,
        }
    }
}

fn connect_timeout(limits: OriginLimits) -> Duration {
    limits.io_timeout.min(Duration::from_secs(5))
}

impl Reach {
    fn key(&self, what: &str, path: &str) -> Result<Key, OriginError> {
        let full = if self.prefix.is_empty() { path.to_owned() } else { format!("{}/{path}", self.prefix) };
        // Not `Key::from`, which would encode the name instead of keeping it.
        Key::parse(full).map_err(|e| OriginError::invalid(what, e))
    }

    pub async fn get(
        &self,
        what: &str,
        path: &str,
        range: Option<Range<u64>>,
        pin: Option<&Pin>,
    ) -> Result<Got, OriginError> {
        let key = &self.key(what, path)?;
        let range = &range;
        let expected = range.as_ref().map_or(pin.map_or(0, |p| p.size), |r| r.end - r.start);
        self.remote
            .tried(what, expected, |_, at| async move {
                self.get_once(&at, what, path, key, range.clone(), pin).await
            })
            .await
            .inspect(|got| self.remote.pace.brought((got.bytes.len() as u64).saturating_sub(expected)))
    }

    async fn ask(
        &self,
        at: &Current,
        what: &str,
        key: &Key,
        options: GetOptions,
    ) -> Result<object_store::Result<GetResult>, OriginError> {
        timeout(self.remote.patience(), at.store.objects().get_opts(key, options))
            .await
            .map_err(|_| unavailable(what, "no answer in a third of io_timeout"))
    }

    async fn get_once(
        &self,
        at: &Current,
        what: &str,
        path: &str,
        key: &Key,
        range: Option<Range<u64>>,
        pin: Option<&Pin>,
    ) -> Result<Got, OriginError> {
        let remote = &self.remote;
        let plain = remote.scheme.is_plain();
        // There is no request for zero bytes, but the object has to be there.
        let head = range.as_ref().is_some_and(Range::is_empty);
        // A weak tag matches nothing; it is compared with that of the answer.
        let if_match = pin.and_then(|p| p.etag.clone()).filter(|tag| !tag.starts_with("W/"));
        let options = |range: Option<Range<u64>>| GetOptions {
            if_match: if_match.clone(),
            range: range.map(GetRange::Bounded),
            head,
            ..GetOptions::default()
        };
        let all = |r: &Range<u64>| r.start == 0 && pin.is_some_and(|p| p.size == r.end);
        let mut sent =
            range.clone().filter(|r| !head && !(plain && (all(r) || remote.whole_only.load(Relaxed))));
        let mut answer = self.ask(at, what, key, options(sent.clone())).await?;
        if plain && matches!(&answer, Err(e) if cause(e) == Some(&Answer::RangeIgnored)) {
            // It may: ranges are optional in HTTP. From now on it is asked for whole objects.
            if !remote.whole_only.swap(true, Relaxed) {
                tracing::warn!(origin = %remote.config.prefix, "the server knows no ranges: objects over 16 MiB cannot be read from it");
            }
            sent = None;
            answer = self.ask(at, what, key, options(None)).await?;
        }
        let result = match answer {
            Ok(result) => result,
            Err(error) => {
                let fitted = pin.is_some_and(|p| range.as_ref().is_some_and(|r| r.end <= p.size));
                if fitted && cause(&error) == Some(&Answer::PastEnd) {
                    return Err(changed(what, "the range lies past its end now"));
                }
                let told = translate(what, &error);
                if remote.scheme == Scheme::Azure && matches!(told, OriginError::Changed { .. }) {
                    // A condition on a blob that is gone fails too, and gone is not changed.
                    remote.patiently(what, at.store.objects().head(key)).await?;
                }
                return Err(told);
            }
        };
        let meta = remote.meta_of(path, &result.meta);
        check_pin(what, pin, &meta)?;
        let asked = range.unwrap_or(0..meta.size);
        if asked.end > meta.size {
            return Err(OriginError::invalid(what, format!("range {asked:?} of {} bytes", meta.size)));
        }
        if head {
            return Ok(Got { bytes: Bytes::new(), meta });
        }
        let coming = sent.unwrap_or(0..meta.size);
        if result.range != coming {
            return Err(corrupt(what, format!("bytes {:?} for bytes {coming:?}", result.range)));
        }
        let part = coming != asked;
        if part && meta.size > WHOLE_BYTES_MAX {
            return Err(OriginError::invalid(
                what,
                format!(
                    "the server knows no ranges and this has {} bytes; up to 16 MiB are read whole for a \
                     part: serve it by a server with ranges, such as nginx",
                    meta.size
                ),
            ));
        }
        let bytes = self.collect(what, result, coming.end - coming.start).await?;
        if part {
            let at = |n: u64| usize::try_from(n).map_err(|e| OriginError::invalid(what, e));
            // Copied, so that a part does not keep the whole in memory.
            let bytes = Bytes::copy_from_slice(&bytes[at(asked.start)?..at(asked.end)?]);
            return Ok(Got { bytes, meta });
        }
        Ok(Got { bytes, meta })
    }

    async fn collect(&self, what: &str, result: GetResult, length: u64) -> Result<Bytes, OriginError> {
        let max = self.remote.limits.get_bytes_max;
        if length > max {
            return Err(OriginError::invalid(
                what,
                format!("{length} bytes in one read; at most {max} are held, read by range"),
            ));
        }
        let length = usize::try_from(length).map_err(|e| OriginError::invalid(what, e))?;
        let mut stream = result.into_stream();
        let mut bytes = BytesMut::with_capacity(length);
        loop {
            let piece = match timeout(self.remote.patience(), stream.next()).await {
                Ok(None) => break,
                Ok(Some(piece)) => piece.map_err(|e| translate(what, &e))?,
                Err(_) => {
                    let why = format!("stalled after {} of {length} bytes", bytes.len());
                    return Err(unavailable(what, &why));
                }
            };
            self.remote.counters.read(piece.len() as u64);
            if piece.len() > length - bytes.len() {
                return Err(corrupt(what, format!("more than the {length} bytes that were asked for")));
            }
            bytes.extend_from_slice(&piece);
        }
        if bytes.len() < length {
            return Err(corrupt(what, format!("{} bytes of {length}", bytes.len())));
        }
        Ok(bytes.freeze())
    }

    pub async fn head(&self, what: &str, path: &str) -> Result<ObjectMeta, OriginError> {
        let key = &self.key(what, path)?;
        let remote = &self.remote;
        remote
            .tried(what, 0, |_, at| async move {
                let meta = remote.patiently(what, at.store.objects().head(key)).await?;
                Ok(remote.meta_of(path, &meta))
            })
            .await
    }
}

/// A store may ignore `If-Match`, and an object may have been pinned without an etag.
fn check_pin(what: &str, pin: Option<&Pin>, meta: &ObjectMeta) -> Result<(), OriginError> {
    let Some(pin) = pin else { return Ok(()) };
    if pin.size != meta.size {
        return Err(changed(what, &format!("{} bytes then, {} now", pin.size, meta.size)));
    }
    match (&pin.etag, &meta.etag) {
        (Some(then), Some(now)) if then != now => Err(changed(what, &format!("etag {then} then, {now} now"))),
        (Some(then), None) => Err(changed(what, &format!("etag {then} then, none now"))),
        (None, _) if pin.mtime_ns.is_some() && pin.mtime_ns != meta.mtime_ns => {
            Err(changed(what, "modified at another time"))
        }
        _ => Ok(()),
    }
}
