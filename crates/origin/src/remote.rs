//! Reads and writes blob stores and plain servers through `object_store`.
//!
//! Checks that each answer is the one that was requested, and decides when credentials are read again.
//!
//! A credentials file is checked once a second while its origin is used, and at once after a 401 or 403. If
//! it changed, the call is retried once with the new credentials. If it cannot be read, the old credentials
//! stay in use.

use crate::backend::Backend;
use crate::credentials::{self, FileStamp, Source};
use crate::given::Given;
use crate::meter::Meter;
use crate::object::{ObjectBytes, ObjectMeta, Pin};
use crate::pace::Pace;
use crate::retry::retrying;
use crate::shared_permits::{SharedPermit, SharedPermits};
use crate::stats::Counters;
use crate::transport::{Answered, BadAnswer, warn_of_ignored_proxy};
use crate::uri::{Scheme, check_plain_path};
use crate::{OriginConfig, OriginError, OriginLimits, OriginPace};
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
use std::time::{Duration, SystemTime};
pub(crate) use store::azure_key;
use store::{Recipe, Store};
use tokio::sync::{OnceCell, Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout, timeout_at};
use translate::{cause, changed, translate, unavailable, wrong_answer};

mod listing;
mod multipart;
mod store;
mod translate;
mod write;

/// How often a credentials file is checked for changes.
const CREDENTIALS_CHECK_EVERY: Duration = Duration::from_secs(1);

/// The setting of a server that limits the calls to all origins.
pub(crate) const ALL_SETTING: &str = "limits.origin_requests";
/// The setting of a server that limits the calls to one origin.
pub(crate) const OWN_SETTING: &str = "limits.origin_requests_per_origin";

/// What the calls to stores and servers of a process share.
#[derive(Debug, Clone)]
pub(crate) struct Permits {
    /// One for each request.
    pub all: Arc<Semaphore>,
    /// One for each call, divided among the backends.
    pub shared: Arc<SharedPermits<Backend>>,
}

/// Returns the error of a call that got no permit until its deadline.
fn waited_in_vain(
    what: &str,
    origin: &impl fmt::Display,
    (begun, held): (Instant, usize),
    setting: &str,
) -> OriginError {
    let seconds = begun.elapsed().as_secs_f64();
    let whose = match setting {
        ALL_SETTING => "all origins",
        OWN_SETTING => "the same endpoint, bucket or file system",
        _ => "this origin",
    };
    let why = format!(
        "the call waited {seconds:.1} s for its turn at {origin}: {held} other calls to {whose} are in \
         flight, the most that {setting} allows"
    );
    unavailable(what, &why)
}

/// Waits for a permit of a backend.
pub(crate) async fn shared_permit(
    what: &str,
    origin: &impl fmt::Display,
    (permits, backend): (&Arc<SharedPermits<Backend>>, &Backend),
    deadline: Instant,
) -> Result<SharedPermit<Backend>, OriginError> {
    let begun = Instant::now();
    let waited = || waited_in_vain(what, origin, (begun, permits.held(backend)), OWN_SETTING);
    let permit = timeout_at(deadline, permits.acquire(backend)).await.map_err(|_| waited())?;
    // A permit that comes at the last moment is of no use.
    if Instant::now() < deadline { Ok(permit) } else { Err(waited()) }
}

/// The longest object that is read whole to return a part of it, at a server without ranges.
const WHOLE_BYTES_MAX: u64 = 16 << 20;

/// One bucket, container or server, with its client, its limits and its pace.
pub(crate) struct Remote {
    config: OriginConfig,
    scheme: Scheme,
    host: String,
    limits: OriginLimits,
    counters: Arc<Counters>,
    backend: Backend,
    /// Permits of the whole process.
    permits: Permits,
    /// Permits of this origin, one for each call, in place of those that backends share.
    own_permits: Option<Semaphore>,
    pace: Pace,
    /// Whether the store honours the condition of `PutMode::Create`, once that is known.
    conditional_create: OnceCell<bool>,
    state: Mutex<ClientState>,
    /// Whether a plain server answered a range request with the whole object.
    whole_only: AtomicBool,
}

/// The client in use, with the number of times that credentials were replaced.
pub(super) struct Current {
    store: Store,
    generation: u64,
}

/// The client in use, and the state of its credentials.
struct ClientState {
    current: Arc<Current>,
    /// What a user handed over. `None` for an origin of the settings.
    given: Option<Arc<Given>>,
    file: Option<PathBuf>,
    /// The state of the file when it was read last, even if its credentials were not valid.
    stamp: Option<FileStamp>,
    checked: Instant,
}

impl fmt::Debug for Remote {
    /// Not derived, because a client's `Debug` shows the id of its key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Remote(..)")
    }
}

/// A prefix at a [`Remote`].
#[derive(Debug, Clone)]
pub(crate) struct RemotePrefix {
    pub remote: Arc<Remote>,
    /// Empty, or a clean relative path.
    pub prefix: String,
    /// Counts what the caller reads.
    pub meter: Meter,
}

impl Remote {
    /// Creates the remote of an `[[origin]]`, or of what a user handed over.
    pub fn new(
        (config, given): (&OriginConfig, Option<&Arc<Given>>),
        (scheme, host): (Scheme, &str),
        limits: OriginLimits,
        counters: &Arc<Counters>,
        permits: &Permits,
    ) -> Result<Self, OriginError> {
        if config.proxy.is_none() {
            warn_of_ignored_proxy();
        }
        let state = ClientState::make((config, given), (scheme, host), limits, (counters, 0))?;
        Ok(Remote {
            config: config.clone(),
            scheme,
            host: host.to_owned(),
            limits,
            counters: Arc::clone(counters),
            backend: Backend::of_store(config, scheme, host),
            permits: permits.clone(),
            own_permits: config.concurrency.map(|n| Semaphore::new(n as usize)),
            pace: Pace::new(config.requests_per_second, config.bytes_per_second, Instant::now()),
            conditional_create: OnceCell::new(),
            state: Mutex::new(state),
            whole_only: AtomicBool::new(false),
        })
    }

    /// Returns the limits that the settings give.
    pub fn pace_limits(&self) -> OriginPace {
        self.config.pace()
    }

    /// Returns what serves the origin.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Uses other credentials from now on, also for calls that wait or are repeated.
    ///
    /// After an error the older ones stay in use.
    pub fn replace(&self, given: &Arc<Given>) -> Result<(), OriginError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = state.current.generation + 1;
        let at = (self.scheme, self.host.as_str());
        let made = (&given.config, Some(given));
        *state = ClientState::make(made, at, self.limits, (&self.counters, generation))?;
        Ok(())
    }

    /// Checks that credentials with a known end have not expired.
    fn check_expiry(&self, what: &str) -> Result<(), OriginError> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let expires = state.given.as_ref().and_then(|given| given.expires);
        match expires.and_then(|at| SystemTime::now().duration_since(at).ok()) {
            None => Ok(()),
            Some(ago) => {
                let ago = Duration::from_secs(ago.as_secs());
                Err(OriginError::Expired { what: what.to_owned(), ago })
            }
        }
    }

    /// Adds to a rejection what its user has to check.
    fn explained(&self, error: OriginError) -> OriginError {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let config = state.given.as_ref().map_or(&self.config, |given| &given.config);
        match error {
            OriginError::Denied { what, why } => {
                OriginError::Denied { what, why: format!("{why}; {}", config.what_to_check(self.scheme)) }
            }
            error => error,
        }
    }

    /// Returns the client to use now. Makes a new one if the credentials file changed.
    fn current(&self) -> Arc<Current> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.file.is_some() && state.checked.elapsed() >= CREDENTIALS_CHECK_EVERY {
            self.reread_credentials(&mut state);
        }
        Arc::clone(&state.current)
    }

    /// Returns whether the credentials in use are newer than those of generation `used`.
    ///
    /// Called after a 401 or 403.
    fn has_newer_credentials(&self, used: u64) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.current.generation == used {
            self.reread_credentials(&mut state);
        }
        state.current.generation != used
    }

    fn reread_credentials(&self, state: &mut ClientState) {
        state.checked = Instant::now();
        let Some(stamp) = state.file.as_deref().and_then(FileStamp::of) else { return };
        if state.stamp == Some(stamp) {
            return;
        }
        state.stamp = Some(stamp);
        let config = state.given.as_ref().map_or(&self.config, |given| &given.config);
        let source = credentials::source(config.credentials.as_ref(), self.scheme, config.configured_by);
        let recipe = Recipe {
            config,
            scheme: self.scheme,
            host: &self.host,
            source: &source,
            connect_timeout: connect_timeout(self.limits),
            counters: &self.counters,
        };
        match Store::make(&recipe) {
            Ok(store) => {
                let generation = state.current.generation + 1;
                state.current = Arc::new(Current { store, generation });
                self.counters.credentials_read.fetch_add(1, Relaxed);
                tracing::info!(origin = %self.config.prefix, "read the changed credentials of an origin");
            }
            Err(error) => {
                tracing::warn!(%error, "the changed credentials are not valid; the old ones stay in use")
            }
        }
    }

    /// Returns the longest wait for an answer or the next piece of it.
    ///
    /// A third of the call's deadline: a stalled connection leaves time for another one.
    fn patience(&self) -> Duration {
        self.limits.io_timeout / 3
    }

    async fn with_patience<T>(
        &self,
        what: &str,
        answer: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, OriginError> {
        match timeout(self.patience(), answer).await {
            Ok(result) => result.map_err(|e| translate(what, &e)),
            Err(_) => Err(unavailable(what, "no answer within a third of io_timeout")),
        }
    }

    /// Waits for a permit. `max` is the number of all permits, and `setting` what limits it.
    async fn permit<'a>(
        &self,
        what: &str,
        (permits, max, setting): (&'a Semaphore, usize, &str),
        deadline: Instant,
    ) -> Result<SemaphorePermit<'a>, OriginError> {
        let begun = Instant::now();
        let waited = || waited_in_vain(what, &self.config.prefix, (begun, max), setting);
        let permit = timeout_at(deadline, permits.acquire()).await;
        let permit = permit.map_err(|_| waited())?.map_err(|_| waited())?;
        // A permit that comes at the last moment is of no use.
        if Instant::now() < deadline { Ok(permit) } else { Err(waited()) }
    }

    /// Waits for the permit of a call: one of this origin, or one of its backend.
    async fn own_permit(
        &self,
        what: &str,
        deadline: Instant,
    ) -> Result<(Option<SemaphorePermit<'_>>, Option<SharedPermit<Backend>>), OriginError> {
        match &self.own_permits {
            Some(own) => {
                let max = self.config.concurrency.map_or(0, |n| n as usize);
                let own = (own, max, "concurrency of its [[origin]]");
                Ok((Some(self.permit(what, own, deadline).await?), None))
            }
            None => {
                let shared = (&self.permits.shared, &self.backend);
                Ok((None, Some(shared_permit(what, &self.config.prefix, shared, deadline).await?)))
            }
        }
    }

    /// Runs one call: waits for permits and for the pace, retries, and repeats once after new credentials.
    ///
    /// `bytes` is the expected length of the answer. Every request goes through this function.
    async fn retried<T, F: Future<Output = Result<T, OriginError>>>(
        &self,
        what: &str,
        bytes: u64,
        once: impl Fn(u32, Arc<Current>) -> F,
    ) -> Result<T, OriginError> {
        let deadline = Instant::now() + self.limits.io_timeout;
        let _own = self.own_permit(what, deadline).await?;
        let once = &once;
        retrying(what, deadline, self.limits.attempts_max, &self.counters, |attempt| async move {
            let ticket = self.pace.admit(what, bytes, deadline).await?;
            let all = (&*self.permits.all, self.limits.requests_max, ALL_SETTING);
            let _permit = self.permit(what, all, deadline).await?;
            self.check_expiry(what)?;
            let current = self.current();
            let used = current.generation;
            let result = match once(attempt, current).await {
                Err(OriginError::Denied { .. }) if self.has_newer_credentials(used) => {
                    self.counters.retries.fetch_add(1, Relaxed);
                    once(attempt, self.current()).await
                }
                other => other,
            };
            match &result {
                Err(OriginError::Throttled { retry_after, .. }) => {
                    if self.pace.refused(ticket, *retry_after, rand::random()) {
                        self.counters.pauses.fetch_add(1, Relaxed);
                        let origin = &self.config.prefix;
                        tracing::debug!(%origin, ?retry_after, "the origin asks clients to slow down");
                    }
                }
                // No answer: it says nothing about the rate that the origin accepts.
                Err(OriginError::Unavailable { .. }) => {}
                _ => self.pace.answered(ticket),
            }
            result.map_err(|e| self.explained(e))
        })
        .await
    }

    fn meta_of(&self, path: &str, meta: &object_store::ObjectMeta) -> ObjectMeta {
        let mtime_ns = meta.last_modified.timestamp_nanos_opt();
        let etag = meta.e_tag.clone().map(|etag| match self.scheme {
            // Azure quotes etags in headers but not in listings.
            Scheme::Azure if !etag.starts_with('"') => format!("\"{etag}\""),
            _ => etag,
        });
        ObjectMeta {
            path: path.to_owned(),
            size: meta.size,
            // `object_store` returns 1970 if a plain server sends no time.
            mtime_ns: mtime_ns.filter(|t| *t != 0 || !self.scheme.is_plain()),
            etag,
        }
    }
}

impl ClientState {
    /// Makes a client from an origin's configuration, or from what a user handed over.
    fn make(
        (config, given): (&OriginConfig, Option<&Arc<Given>>),
        (scheme, host): (Scheme, &str),
        limits: OriginLimits,
        (counters, generation): (&Arc<Counters>, u64),
    ) -> Result<Self, OriginError> {
        let source = match given.and_then(|given| given.secrets.as_ref()) {
            Some(secrets) => Source::Given(Arc::clone(secrets)),
            None => credentials::source(config.credentials.as_ref(), scheme, config.configured_by),
        };
        let file = match &source {
            Source::File { path, .. } => Some(path.clone()),
            _ => None,
        };
        // Taken before the read, so that a change during the read is noticed later.
        let stamp = file.as_deref().and_then(FileStamp::of);
        let connect_timeout = connect_timeout(limits);
        let recipe = Recipe { config, scheme, host, source: &source, connect_timeout, counters };
        let current = Arc::new(Current { store: Store::make(&recipe)?, generation });
        Ok(ClientState { current, given: given.cloned(), file, stamp, checked: Instant::now() })
    }
}

fn connect_timeout(limits: OriginLimits) -> Duration {
    limits.io_timeout.min(Duration::from_secs(5))
}

impl RemotePrefix {
    fn key(&self, what: &str, path: &str) -> Result<Key, OriginError> {
        let full = if self.prefix.is_empty() { path.to_owned() } else { format!("{}/{path}", self.prefix) };
        if self.remote.scheme.is_plain() {
            check_plain_path(&full)?;
        }
        // Not `Key::from`, which would encode the name.
        Key::parse(full).map_err(|e| OriginError::invalid(what, e))
    }

    pub async fn get(
        &self,
        what: &str,
        path: &str,
        range: Option<Range<u64>>,
        pin: Option<&Pin>,
    ) -> Result<ObjectBytes, OriginError> {
        let key = &self.key(what, path)?;
        let range = &range;
        let expected = range.as_ref().map_or(pin.map_or(0, |p| p.size), |r| r.end - r.start);
        self.remote
            .retried(what, expected, |_, at| async move {
                self.get_once(&at, what, path, key, range.clone(), pin).await
            })
            .await
            .inspect(|got| self.remote.pace.charge_more((got.bytes.len() as u64).saturating_sub(expected)))
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
            .map_err(|_| unavailable(what, "no answer within a third of io_timeout"))
    }

    async fn get_once(
        &self,
        at: &Current,
        what: &str,
        path: &str,
        key: &Key,
        range: Option<Range<u64>>,
        pin: Option<&Pin>,
    ) -> Result<ObjectBytes, OriginError> {
        let remote = &self.remote;
        let plain = remote.scheme.is_plain();
        // HTTP has no range of zero bytes, but the object must exist.
        let head = range.as_ref().is_some_and(Range::is_empty);
        // `If-Match` never matches a weak etag, so `check_pin` compares it with that of the answer.
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
        if plain && matches!(&answer, Err(e) if matches!(cause(e), Some(BadAnswer::RangeIgnored(_)))) {
            // Ranges are optional in HTTP. From now on, request whole objects.
            if !remote.whole_only.swap(true, Relaxed) {
                tracing::warn!(
                    origin = %remote.config.prefix,
                    "the server does not support ranges; objects over 16 MiB cannot be read from it"
                );
            }
            sent = None;
            answer = self.ask(at, what, key, options(None)).await?;
        }
        let result = match answer {
            Ok(result) => result,
            Err(error) => {
                if let (Some(range), Some(BadAnswer::PastEnd { size })) = (&range, cause(&error)) {
                    let fitted = pin.is_some_and(|p| range.end <= p.size);
                    match size {
                        Some(size) if range.end <= *size => {
                            let why = format!("status 416 for {range:?} of an object of {size} bytes");
                            return Err(wrong_answer(what, why));
                        }
                        _ if fitted => return Err(changed(what, "the range now begins after its end")),
                        _ => {}
                    }
                }
                let error = translate(what, &error);
                if remote.scheme == Scheme::Azure && matches!(error, OriginError::Changed { .. }) {
                    // Azure answers a condition on a deleted blob like one on a changed blob.
                    remote.with_patience(what, at.store.objects().head(key)).await?;
                }
                return Err(error);
            }
        };
        let answered = result.extensions.get::<Answered>().copied();
        let mut meta = remote.meta_of(path, &result.meta);
        if answered.is_some_and(|a| a.is_size_unknown) {
            // `Content-Range: bytes 0-9/*`: the etag of the answer, or the hash of the bytes, decides.
            meta.size = match pin {
                Some(pin) => pin.size,
                None => remote.with_patience(what, at.store.objects().head(key)).await?.size,
            };
        }
        check_pin(what, pin, &meta, answered)?;
        let asked = range.unwrap_or(0..meta.size);
        if asked.end > meta.size {
            return Err(OriginError::invalid(
                what,
                format!("the range {asked:?} ends after the object's {} bytes", meta.size),
            ));
        }
        if head {
            return Ok(ObjectBytes { bytes: Bytes::new(), meta });
        }
        let expected = sent.unwrap_or(0..meta.size);
        if result.range != expected {
            let got = &result.range;
            return Err(wrong_answer(what, format!("the server sent bytes {got:?} instead of {expected:?}")));
        }
        let part = expected != asked;
        if part && meta.size > WHOLE_BYTES_MAX {
            return Err(OriginError::invalid(
                what,
                format!(
                    "the server does not support ranges, and the object has {} bytes, more than the 16 MiB \
                     that can be read without; use a server with ranges, such as nginx",
                    meta.size
                ),
            ));
        }
        let bytes = self.collect(what, result, expected.end - expected.start, answered).await?;
        if part {
            let at = |n: u64| usize::try_from(n).map_err(|e| OriginError::invalid(what, e));
            // A copy, so that the part does not keep the whole object in memory.
            let bytes = Bytes::copy_from_slice(&bytes[at(asked.start)?..at(asked.end)?]);
            return Ok(ObjectBytes { bytes, meta });
        }
        Ok(ObjectBytes { bytes, meta })
    }

    async fn collect(
        &self,
        what: &str,
        result: GetResult,
        length: u64,
        answered: Option<Answered>,
    ) -> Result<Bytes, OriginError> {
        let max = self.remote.limits.get_bytes_max;
        if length > max {
            return Err(OriginError::invalid(
                what,
                format!("one read of {length} bytes, at most {max} are allowed; read by range"),
            ));
        }
        let length = usize::try_from(length).map_err(|e| OriginError::invalid(what, e))?;
        let said = answered.map(|a| format!("{a}; ")).unwrap_or_default();
        let mut stream = result.into_stream();
        let mut bytes = BytesMut::with_capacity(length);
        loop {
            let piece = match timeout(self.remote.patience(), stream.next()).await {
                Ok(None) => break,
                Ok(Some(piece)) => piece.map_err(|e| match translate(what, &e) {
                    OriginError::Unavailable { why, .. } => {
                        let came = bytes.len();
                        let why = format!("{said}the answer ended after {came} of {length} bytes: {why}");
                        unavailable(what, &why)
                    }
                    other => other,
                })?,
                Err(_) => {
                    let why = format!("the answer stalled after {} of {length} bytes", bytes.len());
                    return Err(unavailable(what, &why));
                }
            };
            self.remote.counters.read(piece.len() as u64);
            self.meter.read(piece.len() as u64);
            if piece.len() > length - bytes.len() {
                let why = format!("{said}the answer has more than the requested {length} bytes");
                return Err(wrong_answer(what, why));
            }
            bytes.extend_from_slice(&piece);
        }
        if bytes.len() < length {
            let why = format!("{said}the answer has {} of the requested {length} bytes", bytes.len());
            return Err(wrong_answer(what, why));
        }
        Ok(bytes.freeze())
    }

    pub async fn head(&self, what: &str, path: &str) -> Result<ObjectMeta, OriginError> {
        let key = &self.key(what, path)?;
        let remote = &self.remote;
        remote
            .retried(what, 0, |_, at| async move {
                let meta = remote.with_patience(what, at.store.objects().head(key)).await?;
                Ok(remote.meta_of(path, &meta))
            })
            .await
    }
}

/// Compares an object with its pin. A store may ignore `If-Match`, and a pin may have no etag.
///
/// An answer with a content coding, or with the pin's strong etag and another length, does not describe the
/// pinned object: something between the store and this process made it.
fn check_pin(
    what: &str,
    pin: Option<&Pin>,
    meta: &ObjectMeta,
    answered: Option<Answered>,
) -> Result<(), OriginError> {
    let Some(pin) = pin else { return Ok(()) };
    let Some(why) = difference(pin, meta) else { return Ok(()) };
    let strong = pin.etag.as_ref().filter(|tag| !tag.starts_with("W/"));
    let same_etag = strong.is_some() && strong == meta.etag.as_ref();
    match answered {
        Some(answered) if answered.coding.is_some() => {
            Err(wrong_answer(what, answered.expected(format!("the stored bytes, {} of them", pin.size))))
        }
        Some(answered) if same_etag => {
            let expected = format!("{} bytes: the etag is that of the indexed object", pin.size);
            Err(wrong_answer(what, answered.expected(expected)))
        }
        _ => Err(changed(what, &why)),
    }
}

/// Returns how an object differs from its pin.
fn difference(pin: &Pin, meta: &ObjectMeta) -> Option<String> {
    if pin.size != meta.size {
        return Some(format!("{} bytes when it was indexed, {} now", pin.size, meta.size));
    }
    match (&pin.etag, &meta.etag) {
        (Some(then), Some(now)) if then != now => Some(format!("etag {then} when it was indexed, {now} now")),
        (Some(then), None) => Some(format!("etag {then} when it was indexed, none now")),
        (None, _) if pin.mtime_ns.is_some() && pin.mtime_ns != meta.mtime_ns => {
            Some("its modification time differs".to_owned())
        }
        _ => None,
    }
}
