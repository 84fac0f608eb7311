//! The origins of a process: opens them, checks every call, and routes it to the file system or to a store.

use crate::backend::Backend;
use crate::given::{GiveError, Given};
use crate::local::Confinement;
use crate::meter::Meter;
use crate::object::PinCheck;
use crate::remote::{Permits, Remote, RemotePrefix, shared_permit};
use crate::shared_permits::SharedPermits;
use crate::stalls::StallWatch;
use crate::stats::Counters;
use crate::uri::{Address, Scheme, check_path};
use crate::{
    ConfiguredBy, ObjectBytes, ObjectMeta, OriginConfig, OriginError, OriginLimits, OriginPace, OriginStats,
    OriginUri, Pin, PutMode, local,
};
use bytes::Bytes;
use fletch_bounds::{Gate, pass_gate};
use futures::StreamExt as _;
use futures::stream::BoxStream;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

/// The configured origins of a process, with their shared limits and counters. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Origins(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limits: OriginLimits,
    configs: Vec<(OriginUri, OriginConfig)>,
    counters: Arc<Counters>,
    local_permits: Arc<SharedPermits<Backend>>,
    remote_permits: Permits,
    /// One client for each index in `configs` and each bucket.
    remotes: Mutex<HashMap<(usize, String), Arc<Remote>>>,
    /// One client for each bucket for which a user handed over credentials.
    given: Mutex<BTreeMap<OriginUri, Arc<Remote>>>,
}

impl Origins {
    /// Validates the `[[origin]]` tables and the limits.
    ///
    /// # Errors
    /// [`OriginError::Invalid`] with every fault of every table, or for a limit of zero.
    pub fn new(configs: Vec<OriginConfig>, limits: OriginLimits) -> Result<Self, OriginError> {
        if limits.requests_max == 0
            || limits.attempts_max == 0
            || limits.io_timeout.is_zero()
            || limits.get_bytes_max == 0
        {
            return Err(OriginError::invalid(
                "origin limits",
                "requests_max, attempts_max, io_timeout and get_bytes_max must be at least 1",
            ));
        }
        let mut faults = Vec::new();
        let mut read: Vec<(OriginUri, OriginConfig)> = Vec::new();
        for config in configs {
            match config.check() {
                Ok(prefix) if read.iter().any(|(other, _)| *other == prefix) => {
                    faults.push(format!("{prefix} is configured twice; remove one table"));
                }
                Ok(prefix) => read.push((prefix, config)),
                // Its user may have no settings, so the error speaks of no table.
                Err(error) if config.configured_by == ConfiguredBy::Environment => return Err(error),
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
            local_permits: SharedPermits::new(limits.requests_max, limits.requests_per_origin()),
            remote_permits: Permits {
                all: Arc::new(Semaphore::new(limits.requests_max)),
                shared: SharedPermits::new(limits.requests_max, limits.requests_per_origin()),
                stalls: StallWatch::new(limits.requests_max, limits.io_timeout / 3),
            },
            remotes: Mutex::default(),
            given: Mutex::default(),
        })))
    }

    /// Returns whether `uri` lies under a configured prefix. Does not resolve links.
    #[must_use]
    pub fn is_configured(&self, uri: &OriginUri) -> bool {
        self.find(uri).is_some() || self.given_remote(uri).is_some()
    }

    /// Uses credentials that a user hands over from now on, in place of older ones of the same origin.
    ///
    /// Origins that are open use them at once. At most `origins_max` origins have given credentials. The
    /// store of an origin stays the same: a bucket of that name at another store is another origin.
    ///
    /// # Errors
    /// [`GiveError`]; older credentials then stay in use.
    pub fn give(&self, given: Given, origins_max: usize) -> Result<(), GiveError> {
        let meets = |prefix: &OriginUri| prefix.contains(&given.uri) || given.uri.contains(prefix);
        if let Some((prefix, _)) = self.0.configs.iter().find(|(prefix, _)| meets(prefix)) {
            return Err(GiveError::Configured(prefix.clone()));
        }
        let given = Arc::new(given);
        let mut remotes = self.0.given.lock();
        if let Some(remote) = remotes.get(&given.uri) {
            // What was read under this URI is of the store of the first credentials.
            let (held, named) = (remote.store_of(&given.uri), given.config.store_of(&given.uri));
            if let (Some(held), Some(named)) = (held, named)
                && held != named
            {
                return Err(GiveError::OtherStore { uri: given.uri.to_string(), held, named });
            }
            return Ok(remote.replace(&given)?);
        }
        if remotes.len() >= origins_max {
            return Err(GiveError::TooMany(remotes.len()));
        }
        let Address::Store { scheme, host, .. } = given.uri.address() else {
            return Err(OriginError::invalid("origin", "is a directory, which needs no credentials").into());
        };
        let made = (&given.config, Some(&given));
        let (limits, counters, permits) = (self.0.limits, &self.0.counters, &self.0.remote_permits);
        let remote = Remote::new(made, (*scheme, host), limits, counters, permits)?;
        remotes.insert(given.uri.clone(), Arc::new(remote));
        Ok(())
    }

    fn given_remote(&self, uri: &OriginUri) -> Option<Arc<Remote>> {
        let top = uri.top()?;
        self.0.given.lock().get(&top).map(Arc::clone)
    }

    /// Returns the domains of the longest configured prefix of `uri`, as they are configured.
    ///
    /// Returns `None` if no prefix matches, and none for an origin for which a user handed over credentials.
    /// Does not resolve links.
    #[must_use]
    pub fn domains(&self, uri: &OriginUri) -> Option<&[String]> {
        match self.find(uri) {
            Some(index) => Some(self.0.configs[index].1.domains.as_slice()),
            None => self.given_remote(uri).map(|_| &[][..]),
        }
    }

    /// Opens the origin at `uri`. Sends no request.
    ///
    /// A store opens only under a configured prefix. A local directory always opens; the caller decides with
    /// [`Origins::is_configured`] whether it may be registered.
    ///
    /// # Errors
    /// [`OriginError::Invalid`] for a store that is not configured, or if the credentials cannot be read.
    pub fn open(&self, uri: &OriginUri) -> Result<Origin, OriginError> {
        let mut is_near = false;
        let (remote, backend) = match uri.address() {
            Address::Local(dir) => {
                let (backend, near) = Backend::of_dir(dir);
                is_near = near;
                (None, backend)
            }
            Address::Store { scheme, host, path, .. } => {
                let remote = self.remote(uri, (*scheme, host))?;
                let backend = remote.backend().clone();
                (Some(RemotePrefix { remote, prefix: path.clone(), meter: Meter::default() }), backend)
            }
        };
        Ok(Origin {
            uri: Arc::new(uri.clone()),
            shared: Arc::clone(&self.0),
            remote,
            backend,
            is_near,
            confinement: Confinement::default(),
            meter: Meter::default(),
        })
    }

    /// Returns the client of a store: that of its `[[origin]]`, else that of what a user handed over.
    fn remote(&self, uri: &OriginUri, (scheme, host): (Scheme, &str)) -> Result<Arc<Remote>, OriginError> {
        let Some(index) = self.find(uri) else {
            return self.given_remote(uri).ok_or_else(|| {
                let why = "nothing says how to reach this store; set the variables of its cloud, or add an \
                           [[origin]] with a prefix of this URI to the settings";
                OriginError::invalid(uri, why)
            });
        };
        let key = (index, host.to_owned());
        let mut remotes = self.0.remotes.lock();
        if let Some(remote) = remotes.get(&key) {
            return Ok(Arc::clone(remote));
        }
        let (config, permits) = (&self.0.configs[index].1, &self.0.remote_permits);
        let at = (scheme, host);
        let remote = Remote::new((config, None), at, self.0.limits, &self.0.counters, permits)?;
        let remote = Arc::new(remote);
        remotes.insert(key, Arc::clone(&remote));
        Ok(remote)
    }

    /// Returns the counters over all origins.
    #[must_use]
    pub fn stats(&self) -> OriginStats {
        self.0.counters.snapshot()
    }

    fn find(&self, uri: &OriginUri) -> Option<usize> {
        let under = self.0.configs.iter().enumerate().filter(|(_, (prefix, _))| prefix.contains(uri));
        under.max_by_key(|(_, (prefix, _))| prefix.length()).map(|(index, _)| index)
    }
}

/// One origin: a directory, or a prefix at a store or server. Cheap to clone.
///
/// Paths are relative, separated by `/`, and UTF-8. Every call ends within `io_timeout`. [`Origins::stats`]
/// counts every error.
#[derive(Debug, Clone)]
pub struct Origin {
    uri: Arc<OriginUri>,
    shared: Arc<Shared>,
    remote: Option<RemotePrefix>,
    backend: Backend,
    /// Whether it is a directory on a disk, or in the memory, of this machine.
    is_near: bool,
    confinement: Confinement,
    /// Counts what is read from a local directory; a store has the same meter in `remote`.
    meter: Meter,
}

impl Origin {
    /// Returns the same origin, confined to files whose real path `may` allows. For local directories.
    #[must_use]
    pub fn confined(self, may: local::PathFilter) -> Self {
        Origin { confinement: Confinement::only(may), ..self }
    }

    /// Returns the same origin, whose reads a caller's meter counts, too.
    #[must_use]
    pub fn metered(self, meter: &Meter) -> Self {
        let remote = self.remote.map(|remote| RemotePrefix { meter: meter.clone(), ..remote });
        Origin { meter: meter.clone(), remote, ..self }
    }

    /// Returns the URI.
    #[must_use]
    pub fn uri(&self) -> &OriginUri {
        &self.uri
    }

    /// Returns the limits that the settings of the origin give. A local directory has none.
    #[must_use]
    pub fn pace(&self) -> OriginPace {
        self.remote.as_ref().map(|r| r.remote.pace_limits()).unwrap_or_default()
    }

    /// Returns what serves the origin.
    #[must_use]
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Returns the directory, if the origin is a local one.
    #[must_use]
    pub fn local_dir(&self) -> Option<&Path> {
        self.uri.as_local()
    }

    /// Runs `waits`, in which a caller waits for a permit of its own limit on calls to the origin.
    ///
    /// While such callers wait, reads of hung objects end with [`OriginError::GaveWay`], so that their
    /// callers give such permits back. A local directory has no such reads.
    pub async fn awaited<T>(&self, waits: impl Future<Output = T>) -> T {
        match &self.remote {
            Some(remote) => remote.remote.awaited(waits).await,
            None => waits.await,
        }
    }

    /// Returns whether the origin is a directory on a disk, or in the memory, of this machine.
    #[must_use]
    pub fn is_near(&self) -> bool {
        self.is_near
    }

    /// Reads a range of the object (in bytes, end exclusive), or all of it.
    ///
    /// Returns `Changed` if the size differs from the pin's, and at a store if [`Pin::difference`] says so.
    /// Reads a local file whose size is the pin's and whose time differs: the caller hashes the bytes, and
    /// compares `pin` with `meta` to tell a changed file from a damaged disk.
    ///
    /// # Errors
    /// `NotFound`, `Changed`, `Denied`, `Throttled`, `Unavailable`. `Invalid` for a bad path, a range past
    /// the end of an object that has the pin's size, or a range longer than `get_bytes_max`. `Corrupt` for an
    /// answer with other bytes than were requested.
    pub async fn get(
        &self,
        path: &str,
        range: Option<Range<u64>>,
        pin: Option<&Pin>,
    ) -> Result<ObjectBytes, OriginError> {
        self.get_checked(path, range, pin.map(|pin| (pin, PinCheck::Exact))).await
    }

    /// Reads a range, or all, of an object for a caller that knows the hash of these bytes.
    ///
    /// As [`Origin::get`], but returns `Changed` only for another size: so equal bytes under a new tag come.
    /// The caller must hash the bytes. If the hash is wrong, [`Pin::difference`] of `pin` and `meta` tells a
    /// changed object from a damaged one. An object that no longer has the pin's tag costs two requests.
    ///
    /// # Errors
    /// As [`Origin::get`].
    pub async fn get_hashed(
        &self,
        path: &str,
        range: Option<Range<u64>>,
        pin: &Pin,
    ) -> Result<ObjectBytes, OriginError> {
        self.get_checked(path, range, Some((pin, PinCheck::SizeThenHash))).await
    }

    async fn get_checked(
        &self,
        path: &str,
        range: Option<Range<u64>>,
        pin: Option<(&Pin, PinCheck)>,
    ) -> Result<ObjectBytes, OriginError> {
        let what = self.what(path);
        let run = async {
            check_path(path)?;
            if let Some(range) = &range {
                if range.start > range.end {
                    return Err(OriginError::invalid(
                        &what,
                        format!("the range {range:?} ends before it begins"),
                    ));
                }
                self.check_length(&what, range.end - range.start)?;
            }
            match &self.remote {
                None => {
                    let pin = pin.map(|(pin, _)| pin.clone());
                    let (path, max) = (path.to_owned(), self.shared.limits.get_bytes_max);
                    let (named, confinement) = (what.clone(), self.confinement.clone());
                    self.local(&what, move |dir| {
                        local::get(&confinement, dir, &named, &path, range, pin.as_ref(), max)
                    })
                    .await
                }
                Some(remote) => remote.get(&what, path, range, pin).await,
            }
        };
        self.counted(run.await.inspect(|got| {
            if self.remote.is_none() {
                self.shared.counters.read(got.bytes.len() as u64);
                self.meter.read(got.bytes.len() as u64);
            }
        }))
    }

    /// Fills `buffer` with bytes of a file from `offset` on, on the calling thread. For origins that are near
    /// ([`Origin::is_near`]), and short ranges: it takes as long as this machine's disk.
    ///
    /// A file whose size is not the pin's is `Changed`; the caller hashes the bytes.
    ///
    /// # Errors
    /// As [`Origin::get`]; `Invalid` for an origin that is not near.
    pub fn fill_here(
        &self,
        path: &str,
        (offset, pin): (u64, &Pin),
        buffer: &mut [u8],
    ) -> Result<(), OriginError> {
        let (what, len) = (self.what(path), buffer.len() as u64);
        let filled = check_path(path).and_then(|()| {
            let Some(dir) = self.local_dir().filter(|_| self.is_near) else {
                return Err(OriginError::invalid(
                    &what,
                    "the origin is no directory on a disk of this machine",
                ));
            };
            self.shared.counters.request();
            local::fill((&self.confinement, dir), (&what, path), (offset, pin), buffer)
        });
        self.counted(filled.inspect(|()| {
            self.shared.counters.read(len);
            self.meter.read(len);
        }))
    }

    /// Returns the metadata of the object.
    ///
    /// # Errors
    /// As [`Origin::get`].
    pub async fn head(&self, path: &str) -> Result<ObjectMeta, OriginError> {
        let what = self.what(path);
        let run = async {
            check_path(path)?;
            match &self.remote {
                None => {
                    let (path, named) = (path.to_owned(), what.clone());
                    let confinement = self.confinement.clone();
                    self.local(&what, move |dir| local::head(&confinement, dir, &named, &path)).await
                }
                Some(remote) => remote.head(&what, path).await,
            }
        };
        self.counted(run.await)
    }

    /// Writes the object. It is whole and durable when this returns, and whole or absent after an error.
    ///
    /// # Errors
    /// `AlreadyExists` in mode `Create`; otherwise as [`Origin::get`]. After `Unavailable` the object may
    /// have been written.
    pub async fn put(&self, path: &str, bytes: Bytes, mode: PutMode) -> Result<(), OriginError> {
        let what = self.what(path);
        let length = bytes.len() as u64;
        let run = async {
            check_path(path)?;
            match &self.remote {
                None => {
                    let (path, named) = (path.to_owned(), what.clone());
                    self.local(&what, move |dir| local::put(dir, &named, &path, &mut &bytes[..], mode)).await
                }
                Some(remote) => remote.put(&what, path, bytes, mode).await,
            }
        };
        self.counted(run.await.inspect(|()| self.shared.counters.wrote(length)))
    }

    /// Writes the object from a local file, in bounded memory. `io_timeout` applies to each 16 MiB.
    ///
    /// At a store, `Create` of more than 16 MiB checks first and then writes, which is not atomic: use it
    /// only for names that follow from the content.
    ///
    /// # Errors
    /// As [`Origin::put`], and if `file` cannot be read.
    pub async fn put_file(&self, path: &str, file: &Path, mode: PutMode) -> Result<(), OriginError> {
        let what = self.what(path);
        let run = async {
            check_path(path)?;
            match &self.remote {
                None => {
                    let (path, named, file) = (path.to_owned(), what.clone(), file.to_owned());
                    let length = std::fs::metadata(&file)
                        .map_err(|e| OriginError::io(&file.display().to_string(), &e))?
                        .len();
                    let parts = u32::try_from(length / (16 << 20) + 1).unwrap_or(u32::MAX);
                    let deadline = Instant::now() + self.shared.limits.io_timeout.saturating_mul(parts);
                    self.local_by(&what, deadline, move |dir| {
                        local::put_file(dir, &named, &path, &file, mode)
                    })
                    .await
                }
                Some(remote) => remote.put_file(&what, path, file, mode).await,
            }
        };
        self.counted(run.await).map(|length| self.shared.counters.wrote(length))
    }

    /// Returns whether the origin honours the condition of [`PutMode::Create`], so that of two writers at
    /// once one fails. May write a probe object below `fletch/` and delete it.
    ///
    /// # Errors
    /// As [`Origin::put`].
    pub async fn has_conditional_create(&self) -> Result<bool, OriginError> {
        match &self.remote {
            None => Ok(true),
            Some(remote) => self.counted(remote.has_conditional_create(&self.what("")).await),
        }
    }

    /// Deletes the object. Succeeds if the object does not exist.
    ///
    /// # Errors
    /// As [`Origin::get`].
    pub async fn delete(&self, path: &str) -> Result<(), OriginError> {
        let what = self.what(path);
        let run = async {
            check_path(path)?;
            match &self.remote {
                None => {
                    let (path, named) = (path.to_owned(), what.clone());
                    self.local(&what, move |dir| local::delete(dir, &named, &path)).await
                }
                Some(remote) => remote.delete(&what, path).await,
            }
        };
        self.counted(run.await)
    }

    /// Lists the objects below the directory `prefix`. An empty prefix lists all.
    ///
    /// A missing directory has no objects. Each item comes within `io_timeout`.
    ///
    /// A local listing is in the byte order of its paths. It returns regular files and follows no links. An
    /// unreadable directory or a name that is not UTF-8 is an `Err` in its place, and the listing continues.
    ///
    /// The listing of a store is in the order of the store: byte order in most. It returns every key as it
    /// is, so a path may end in a slash, or have empty, `.` or `..` components: [`is_path`](crate::is_path).
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
        let items = match (&self.remote, self.local_dir()) {
            (Some(remote), _) => remote.list(what, &prefix),
            (None, Some(dir)) => {
                counters.request();
                local::list(
                    self.confinement.clone(),
                    dir.to_owned(),
                    what,
                    prefix,
                    self.shared.limits.io_timeout,
                )
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

    /// Returns whether a store has any key below the directory `prefix`, its own marker included.
    ///
    /// # Errors
    /// As [`Origin::get`]; `Invalid` for a local directory or a plain server, which have no such listing.
    pub async fn has_below(&self, prefix: &str) -> Result<bool, OriginError> {
        let what = self.what(prefix);
        let run = async {
            check_path(prefix)?;
            match &self.remote {
                Some(remote) => remote.has_below(&what, prefix).await,
                None => Err(OriginError::invalid(&what, "only stores list keys by their prefix")),
            }
        };
        self.counted(run.await)
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
                format!("one read of {length} bytes, at most {max} are allowed; read by range"),
            ));
        }
        Ok(())
    }

    fn counted<T>(&self, result: Result<T, OriginError>) -> Result<T, OriginError> {
        result.inspect_err(|error| self.shared.counters.failed(error))
    }

    async fn local<T: Send + 'static>(
        &self,
        what: &str,
        work: impl FnOnce(&Path) -> Result<T, OriginError> + Send + 'static,
    ) -> Result<T, OriginError> {
        self.local_by(what, self.deadline(), work).await
    }

    /// Runs `work` on a blocking thread.
    ///
    /// A thread that hangs in a dead file system keeps its permit beyond the deadline, so that at most
    /// `requests_max` threads can hang.
    async fn local_by<T: Send + 'static>(
        &self,
        what: &str,
        deadline: Instant,
        work: impl FnOnce(&Path) -> Result<T, OriginError> + Send + 'static,
    ) -> Result<T, OriginError> {
        let permits = &self.shared.local_permits;
        let permit = shared_permit(what, &self.uri, (permits, &self.backend), deadline).await?;
        self.shared.counters.request();
        let dir = self.local_dir().map(Path::to_owned).unwrap_or_default();
        let running = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work(&dir)
        });
        let unavailable = |why: &str| OriginError::Unavailable { what: what.to_owned(), why: why.to_owned() };
        match pass_gate(Gate::Origin, timeout_at(deadline, running)).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(unavailable("the thread of this call panicked or was cancelled")),
            Err(_) => Err(unavailable("the file system did not answer within io_timeout")),
        }
    }
}
