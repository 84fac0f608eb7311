//! Reads and writes blob stores and plain servers through `object_store`.
//!
//! Checks that each answer is the one that was requested, and decides when credentials are read again.
//!
//! A credentials file is checked once a second while its origin is used, and at once after an answer that
//! rejects or ends the credentials. If it changed, the call is retried once with the new credentials. If it
//! cannot be read, the old credentials stay in use.

use crate::backend::Backend;
use crate::credentials::{self, FileStamp, Source};
use crate::given::Given;
use crate::meter::Meter;
use crate::object::ObjectMeta;
use crate::pace::Pace;
use crate::shared_permits::{SharedPermit, SharedPermits};
use crate::stalls::{StallWatch, WaitsFor};
use crate::stats::Counters;
use crate::transport::{PLACEHOLDER, Rewrite, warn_of_ignored_proxy};
use crate::uri::{Scheme, check_plain_path};
use crate::{OriginConfig, OriginError, OriginLimits, OriginPace};
use fletch_bounds::{Gate, pass_gate};
use object_store::GetOptions;
use object_store::path::Path as Key;
use parking_lot::Mutex;
use std::fmt;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, SystemTime};
pub(crate) use store::azure_key;
use store::{Recipe, Store};
use tokio::sync::{OnceCell, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};
use translate::{translate, unavailable};

mod call;
mod get;
mod listing;
mod multipart;
mod store;
mod translate;
mod write;

/// How often a credentials file is checked for changes.
const CREDENTIALS_CHECK_EVERY: Duration = Duration::from_secs(1);

/// How often a client without a credentials file is made again, because the store says that they expired.
const RENEW_EVERY: Duration = Duration::from_secs(10);

/// What a user does whose credentials the server holds.
const RUN_AGAIN: &str = "run `fletch mount` again with new ones, which hands them to the running server";

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
    /// Takes permits from calls to hung objects.
    pub stalls: Arc<StallWatch>,
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
    let acquire = timeout_at(deadline, permits.acquire(backend));
    let permit = pass_gate(Gate::OriginRequests, acquire).await.map_err(|_| waited())?;
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
    /// Whose permits the calls take: the backend's, or those of this `[[origin]]` alone.
    line: Backend,
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
            line: match config.concurrency {
                Some(_) => Backend::of_table(&config.prefix),
                None => Backend::of_store(config, scheme, host),
            },
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

    /// Returns the name of the store that a bucket of this remote is at.
    pub fn store_of(&self, uri: &crate::OriginUri) -> Option<String> {
        self.config.store_of(uri)
    }

    /// Returns what serves the origin.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Runs `waits`, in which a caller waits for a permit of its own limit on calls to this origin. Calls to
    /// hung objects give way to it.
    pub async fn awaited<T>(&self, waits: impl Future<Output = T>) -> T {
        self.permits.stalls.waited(WaitsFor::Outside(&self.line), waits).await
    }

    /// Uses other credentials from now on, also for calls that wait or are repeated.
    ///
    /// After an error the older ones stay in use.
    pub fn replace(&self, given: &Arc<Given>) -> Result<(), OriginError> {
        let mut state = self.state.lock();
        let generation = state.current.generation + 1;
        let at = (self.scheme, self.host.as_str());
        let made = (&given.config, Some(given));
        *state = ClientState::make(made, at, self.limits, (&self.counters, generation))?;
        Ok(())
    }

    /// Checks that credentials with a known end have not expired.
    fn check_expiry(&self, what: &str) -> Result<(), OriginError> {
        let state = self.state.lock();
        let expires = state.given.as_ref().and_then(|given| given.expires);
        match expires.and_then(|at| SystemTime::now().duration_since(at).ok()) {
            None => Ok(()),
            Some(ago) => {
                let ago = Duration::from_secs(ago.as_secs());
                let why = format!("{ago:?} ago; {RUN_AGAIN}");
                Err(OriginError::Expired { what: what.to_owned(), why, is_given: true })
            }
        }
    }

    /// Adds to a rejection what its user has to check, or who has to act.
    fn explained(&self, error: OriginError) -> OriginError {
        let state = self.state.lock();
        let config = state.given.as_ref().map_or(&self.config, |given| &given.config);
        let is_given = state.given.is_some();
        match error {
            OriginError::Denied { what, why, is_of_origin } => OriginError::Denied {
                what,
                why: format!("{why}; {}", config.what_to_check(self.scheme)),
                is_of_origin,
            },
            // The check of the time that was handed over says it already.
            OriginError::Expired { what, why, is_given: false } => {
                let todo = match (is_given, &state.file) {
                    (true, _) => RUN_AGAIN,
                    (false, Some(_)) => "write new ones to its credentials file, which is read again at once",
                    (false, None) => {
                        "give this process new ones, or a credentials file, which is read again when it \
                         changes"
                    }
                };
                OriginError::Expired { what, why: format!("{why}; {todo}"), is_given }
            }
            error => error,
        }
    }

    /// Returns the client to use now. Makes a new one if the credentials file changed.
    fn current(&self) -> Arc<Current> {
        let mut state = self.state.lock();
        if state.file.is_some() && state.checked.elapsed() >= CREDENTIALS_CHECK_EVERY {
            self.reread_credentials(&mut state);
        }
        Arc::clone(&state.current)
    }

    /// Returns whether the credentials in use are newer than those of generation `used`.
    ///
    /// Called after an answer that rejects them. Reads their file again at once. Credentials that a service
    /// of the machine gives and that have expired are fetched again: the client that keeps them is replaced.
    fn has_newer_credentials(&self, used: u64, error: &OriginError) -> bool {
        let mut state = self.state.lock();
        if state.current.generation == used {
            let is_expired = matches!(error, OriginError::Expired { .. });
            let has_secrets = state.given.as_ref().is_some_and(|given| given.secrets.is_some());
            if state.file.is_some() {
                self.reread_credentials(&mut state);
            } else if is_expired && !has_secrets && state.checked.elapsed() >= RENEW_EVERY {
                state.checked = Instant::now();
                self.renew(&mut state);
            }
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
        self.renew(state);
    }

    /// Makes the client again, with the credentials that there are now.
    fn renew(&self, state: &mut ClientState) {
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
        remote.read(what, 0, |_, at| async move { self.head_once(&at, what, path, key).await }).await
    }
}
