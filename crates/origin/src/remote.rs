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
use crate::object::ObjectMeta;
use crate::pace::Pace;
use crate::retry::retrying;
use crate::shared_permits::{SharedPermit, SharedPermits};
use crate::stats::Counters;
use crate::transport::{PLACEHOLDER, Rewrite, warn_of_ignored_proxy};
use crate::uri::{Scheme, check_plain_path};
use crate::{OriginConfig, OriginError, OriginLimits, OriginPace};
use object_store::GetOptions;
use object_store::path::Path as Key;
use std::fmt;
use std::future::Future;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};
pub(crate) use store::azure_key;
use store::{Recipe, Store};
use tokio::sync::{OnceCell, Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout, timeout_at};
use translate::{translate, unavailable};

mod get;
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

/// The key of an object to read.
#[derive(Debug)]
struct ReadKey {
    key: Key,
    /// The real key, if `object_store` cannot express it.
    rewrite: Option<Rewrite>,
}

impl ReadKey {
    /// Returns the options of a request for the object.
    fn options(&self) -> GetOptions {
        let mut options = GetOptions::default();
        if let Some(rewrite) = &self.rewrite {
            options.extensions.insert(rewrite.clone());
        }
        options
    }
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
    /// Returns the key of an object to read, which may have control characters.
    fn read_key(&self, what: &str, path: &str) -> Result<ReadKey, OriginError> {
        match self.key(what, path) {
            Ok(key) => Ok(ReadKey { key, rewrite: None }),
            Err(error) if self.remote.scheme.is_plain() || !path.contains(|c: char| c.is_ascii_control()) => {
                Err(error)
            }
            Err(_) => {
                let full = self.key_prefix("") + path;
                let key = Key::from(PLACEHOLDER);
                Ok(ReadKey { key, rewrite: Some(Rewrite::Key(full)) })
            }
        }
    }

    fn key(&self, what: &str, path: &str) -> Result<Key, OriginError> {
        let full = if self.prefix.is_empty() { path.to_owned() } else { format!("{}/{path}", self.prefix) };
        if self.remote.scheme.is_plain() {
            check_plain_path(&full)?;
        }
        // Not `Key::from`, which would encode the name.
        Key::parse(full).map_err(|e| OriginError::invalid(what, e))
    }

    pub async fn head(&self, what: &str, path: &str) -> Result<ObjectMeta, OriginError> {
        let key = &self.read_key(what, path)?;
        let remote = &self.remote;
        remote.retried(what, 0, |_, at| async move { self.head_once(&at, what, path, key).await }).await
    }
}
