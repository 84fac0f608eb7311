//! The registered datasets: a table in memory, and the log from which it is rebuilt.
//!
//! Invariants:
//! 1. A change is confirmed after its record was fsynced. A crash loses no confirmed change.
//! 2. At start, a torn last record is cut off. Damage before it stops the server, because a log that is cut
//!    there would silently forget datasets.
//! 3. When an unregistration or a replacement is confirmed, access through the registration ends. The holder
//!    of a [`RegistrationHandle`] checks [`RegistrationHandle::is_registered`] before each read.
//! 4. Records of unknown kinds are skipped, because a newer server wrote them.
//! 5. In a cluster the log is a copy, which says of which cluster. The coordinator decides, and this room
//!    executes: [`Registrations::apply`] and [`Registrations::adopt`].

use super::{StateDir, StateError};
use fletch_api::Dataset;
use fletch_core::{DatasetName, Domain, LayoutId, Root, Tenant, record};
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{File, OpenOptions},
    io::{self, Write as _},
    ops::Deref,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

const REGISTER: u8 = 1;
const UNREGISTER: u8 = 2;
const SIZED: u8 = 3;
const TAGGED: u8 = 4;
const COPY_OF: u8 = 5;

/// The most layouts that are recorded for one dataset. A record takes about 250 bytes of the log.
const TAGGED_MAX: usize = 1_000;

/// A registered dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// The domain that may read it.
    pub domain: Domain,
    /// The tenant that registered it, and whose quota it uses.
    #[serde(default = "Tenant::default_tenant")]
    pub tenant: Tenant,
    /// The dataset.
    #[serde(flatten)]
    pub dataset: Dataset,
}

/// The record of the largest version of a dataset that was opened.
#[derive(Debug, Serialize, Deserialize)]
struct SizeRecord {
    domain: Domain,
    name: DatasetName,
    bytes: u64,
}

/// The record of a version that a tag named, where the tables have no listing.
#[derive(Debug, Serialize, Deserialize)]
struct TagRecord {
    domain: Domain,
    name: DatasetName,
    root: Root,
    layout: LayoutId,
}

/// The record of the cluster whose registrations the log is a copy of.
#[derive(Debug, Serialize, Deserialize)]
struct CopyRecord {
    uid: String,
}

/// A change that the coordinator of a cluster made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A dataset is registered, and its largest known version has so many content bytes.
    Registered(Registration, u64),
    /// A name of a domain is free.
    Unregistered(Domain, DatasetName),
}

/// What changes had for effects.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Whether access through some registration ended.
    pub has_ended: bool,
    /// Domains with a dataset that is new or changed.
    pub domains: BTreeSet<Domain>,
}

/// What a registration would do.
#[derive(Debug, Clone)]
pub enum Planned {
    /// The dataset is registered already.
    Unchanged(Arc<RegistrationHandle>),
    /// It would take a free name, or replace what has the name.
    Changed(RegisterChange),
}

/// A handle to a registration, which says whether it is still registered.
#[derive(Debug)]
pub struct RegistrationHandle {
    registration: Registration,
    ended: AtomicBool,
    bytes: AtomicU64,
    tagged: Mutex<Vec<(Root, LayoutId)>>,
}

impl RegistrationHandle {
    fn new(registration: Registration, bytes: u64) -> Arc<Self> {
        Arc::new(RegistrationHandle {
            registration,
            ended: AtomicBool::new(false),
            bytes: AtomicU64::new(bytes),
            tagged: Mutex::default(),
        })
    }

    /// Returns the layouts of a root that tags have named, as far as they were recorded
    /// ([`Registrations::record_tagged`]).
    #[must_use]
    pub fn tagged_layouts(&self, root: Root) -> Vec<LayoutId> {
        self.tagged().iter().filter(|(r, _)| *r == root).map(|(_, layout)| *layout).collect()
    }

    fn tagged(&self) -> MutexGuard<'_, Vec<(Root, LayoutId)>> {
        // A panic cannot leave a half-made change: the only change is a push.
        self.tagged.lock()
    }

    /// Returns whether a version is neither recorded nor beyond [`TAGGED_MAX`].
    fn records(&self, version: (Root, LayoutId)) -> bool {
        let tagged = self.tagged();
        tagged.len() < TAGGED_MAX && !tagged.contains(&version)
    }

    /// Returns the content bytes of the largest version that was opened, or 0 before any was.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns whether the dataset is still registered. If not, access through the handle has ended.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        !self.ended.load(Ordering::Acquire)
    }
}

impl Deref for RegistrationHandle {
    type Target = Registration;
    fn deref(&self) -> &Registration {
        &self.registration
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct UnregisterRecord {
    domain: Domain,
    name: DatasetName,
}

/// Why a change was rejected. A rejected change has no effect.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The name is registered for another URI.
    #[error("the name {name} is already registered for {uri}, not for {asked}")]
    Conflict {
        /// The name.
        name: DatasetName,
        /// The registered URI.
        uri: String,
        /// The URI of the request.
        asked: String,
    },
    /// The limit of registered datasets is reached.
    #[error("{0} datasets are registered, which is the limit")]
    Full(usize),
    /// The tenant's datasets would be larger than its quota.
    #[error("tenant {tenant} has registered {has} of {quota} bytes, and {name} would add {adds}")]
    Quota {
        /// The tenant.
        tenant: Tenant,
        /// The dataset.
        name: DatasetName,
        /// The bytes that the tenant has registered.
        has: u64,
        /// The bytes that the dataset would add.
        adds: u64,
        /// The bytes that the tenant may register.
        quota: u64,
    },
    /// The log cannot be written.
    #[error("cannot write {path}: {error}")]
    Io {
        /// The log.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
}

/// What a registration changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegisterChange {
    /// The name was free.
    New,
    /// The same dataset was registered before.
    Unchanged,
    /// The name was registered for other tables or, with `replace`, for another URI.
    Replaced,
}

/// The registered datasets, by domain and name.
pub type Table = BTreeMap<(Domain, DatasetName), Arc<RegistrationHandle>>;

#[derive(Debug)]
struct Inner {
    table: Table,
    /// The cluster whose registrations these are.
    copy_of: Option<String>,
    log: File,
    /// The length of the log, up to its last complete record.
    len: u64,
}

/// The registered datasets of all domains.
#[derive(Debug)]
pub struct Registrations {
    path: PathBuf,
    max: usize,
    inner: Mutex<Inner>,
}

impl Registrations {
    /// Reads the log, and cuts off a torn last record.
    ///
    /// # Errors
    /// [`StateError`] if the log cannot be read or written, or is damaged.
    pub fn open(dir: &StateDir, max: usize) -> Result<Self, StateError> {
        let path = dir.path().join("registrations.log");
        let failed = |error| StateError::Open { path: path.clone(), error };
        let bytes = match std::fs::read(&path) {
            Ok(b) => b,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(failed(e)),
        };
        let (table, copy_of, len) = replay_all(&path, &bytes)?;
        let log = OpenOptions::new().create(true).append(true).open(&path).map_err(failed)?;
        if len < bytes.len() {
            tracing::warn!(
                file = %path.display(), at = len,
                "a crash tore the last record, which is cut off"
            );
        }
        log.set_len(len as u64).map_err(failed)?;
        let mut inner = Inner { table, copy_of, log, len: len as u64 };
        if len == 0 {
            inner.append(&record::file_header()).map_err(failed)?;
        }
        File::open(dir.path()).and_then(|d| d.sync_all()).map_err(failed)?;
        Ok(Registrations { path, max, inner: Mutex::new(inner) })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic cannot leave a half-made change, because changes come after everything that can fail.
        self.inner.lock()
    }

    /// Returns a dataset.
    #[must_use]
    pub fn get(&self, domain: &Domain, name: &DatasetName) -> Option<Arc<RegistrationHandle>> {
        self.lock().table.get(&(domain.clone(), name.clone())).cloned()
    }

    /// Returns a domain's datasets, sorted by name.
    #[must_use]
    pub fn list(&self, domain: &Domain) -> Vec<Arc<RegistrationHandle>> {
        self.lock().table.values().filter(|e| e.domain == *domain).cloned().collect()
    }

    /// Returns the number of datasets of all domains.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().table.len()
    }

    /// Returns the datasets of all domains.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<RegistrationHandle>> {
        self.lock().table.values().cloned().collect()
    }

    /// Returns the content bytes that a tenant has registered, as far as their versions were opened.
    #[must_use]
    pub fn charged_bytes(&self, tenant: &Tenant) -> u64 {
        self.lock().charged_bytes(tenant)
    }

    /// Records that a dataset has a version of `bytes` content bytes. Blocking.
    ///
    /// The record survives a restart. Without a quota it is for people only, so a failed write ends nothing.
    ///
    /// # Errors
    /// [`RegisterError::Quota`] and [`RegisterError::Io`].
    pub fn record_size(
        &self,
        of: &RegistrationHandle,
        bytes: u64,
        quota: Option<u64>,
    ) -> Result<(), RegisterError> {
        let mut inner = self.lock();
        let adds = bytes.saturating_sub(of.bytes());
        if adds == 0 {
            return Ok(());
        }
        inner.check_quota(&of.registration, adds, quota)?;
        let Registration { domain, dataset, .. } = of.registration.clone();
        let record = SizeRecord { domain, name: dataset.name, bytes };
        match self.write(&mut inner, SIZED, &record) {
            Err(error) if quota.is_none() => {
                tracing::warn!(dataset = %record.name, %error, "the size of a dataset is not recorded");
            }
            written => written?,
        }
        of.bytes.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Records that a tag of a dataset named this version, so that a restarted server finds its layout
    /// without a listing. Does nothing if the version is recorded, or if the dataset has its most records.
    /// Blocking.
    ///
    /// # Errors
    /// [`RegisterError::Io`].
    pub fn record_tagged(
        &self,
        of: &RegistrationHandle,
        root: Root,
        layout: LayoutId,
    ) -> Result<(), RegisterError> {
        // The lock orders the records of two callers that resolve the same tag.
        let mut inner = self.lock();
        if !of.is_registered() || !of.records((root, layout)) {
            return Ok(());
        }
        let Registration { domain, dataset, .. } = of.registration.clone();
        self.write(&mut inner, TAGGED, &TagRecord { domain, name: dataset.name, root, layout })?;
        of.tagged().push((root, layout));
        Ok(())
    }

    /// Registers a dataset, whose largest known version has `bytes` content bytes. Blocking.
    ///
    /// Registering the same again returns the existing handle. Other tables of the same URI replace the
    /// registration, as another URI does with `replace`: access through the former handle ends.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn register(
        &self,
        registration: Registration,
        bytes: u64,
        quota: Option<u64>,
        replace: bool,
    ) -> Result<(Arc<RegistrationHandle>, RegisterChange), RegisterError> {
        let mut inner = self.lock();
        match self.plan_in(&inner, &registration, bytes, quota, replace)? {
            Planned::Unchanged(handle) => Ok((handle, RegisterChange::Unchanged)),
            Planned::Changed(change) => {
                Ok((self.put(&mut inner, registration, bytes, quota.is_some())?, change))
            }
        }
    }

    /// Returns what [`Registrations::register`] would do now.
    ///
    /// # Errors
    /// [`RegisterError`], without [`RegisterError::Io`].
    pub fn plan(
        &self,
        registration: &Registration,
        bytes: u64,
        quota: Option<u64>,
        replace: bool,
    ) -> Result<Planned, RegisterError> {
        self.plan_in(&self.lock(), registration, bytes, quota, replace)
    }

    fn plan_in(
        &self,
        inner: &Inner,
        registration: &Registration,
        bytes: u64,
        quota: Option<u64>,
        replace: bool,
    ) -> Result<Planned, RegisterError> {
        let old = inner.table.get(&key_of(registration));
        match old {
            Some(old) => {
                let (a, b) = (&old.dataset, &registration.dataset);
                if a.uri == b.uri && a.tables == b.tables {
                    return Ok(Planned::Unchanged(Arc::clone(old)));
                }
                if a.uri != b.uri && !replace {
                    let (name, uri, asked) = (a.name.clone(), a.uri.clone(), b.uri.clone());
                    return Err(RegisterError::Conflict { name, uri, asked });
                }
            }
            None if inner.table.len() >= self.max => return Err(RegisterError::Full(self.max)),
            None => {}
        }
        // The bytes of the replaced registration are free again.
        let freed = old.filter(|old| old.tenant == registration.tenant).map_or(0, |old| old.bytes());
        match old {
            Some(_) if bytes <= freed => {}
            _ => inner.check_quota(registration, bytes.saturating_sub(freed), quota)?,
        }
        Ok(Planned::Changed(if old.is_some() { RegisterChange::Replaced } else { RegisterChange::New }))
    }

    /// Records a registration in place of the one with the same name, through which access ends.
    fn put(
        &self,
        inner: &mut Inner,
        registration: Registration,
        bytes: u64,
        keeps_bytes: bool,
    ) -> Result<Arc<RegistrationHandle>, RegisterError> {
        let key = key_of(&registration);
        self.write(inner, REGISTER, &registration)?;
        if bytes > 0 && keeps_bytes {
            let (domain, name) = key.clone();
            self.write(inner, SIZED, &SizeRecord { domain, name, bytes })?;
        }
        let handle = RegistrationHandle::new(registration, bytes);
        if let Some(gone) = inner.table.insert(key, Arc::clone(&handle)) {
            gone.ended.store(true, Ordering::Release);
        }
        Ok(handle)
    }

    /// Executes changes of the coordinator, in their order. Blocking.
    ///
    /// # Errors
    /// [`RegisterError::Io`]: the first changes are executed. Executing all again is safe.
    pub fn apply(&self, changes: Vec<Change>) -> Result<Applied, RegisterError> {
        let mut inner = self.lock();
        let mut applied = Applied::default();
        for change in changes {
            self.apply_one(&mut inner, change, &mut applied)?;
        }
        Ok(applied)
    }

    fn apply_one(
        &self,
        inner: &mut Inner,
        change: Change,
        applied: &mut Applied,
    ) -> Result<(), RegisterError> {
        match change {
            Change::Registered(new, bytes) => {
                let old = inner.table.get(&key_of(&new)).cloned();
                if let Some(old) = old.filter(|old| is_same(old, &new)) {
                    if bytes > old.bytes() {
                        let (domain, name) = key_of(&new);
                        self.write(inner, SIZED, &SizeRecord { domain, name, bytes })?;
                        old.bytes.fetch_max(bytes, Ordering::Relaxed);
                    }
                    return Ok(());
                }
                applied.domains.insert(new.domain.clone());
                applied.has_ended |= inner.table.contains_key(&key_of(&new));
                self.put(inner, new, bytes, true)?;
            }
            Change::Unregistered(domain, name) => {
                applied.has_ended |= self.remove(inner, &domain, &name)?;
            }
        }
        Ok(())
    }

    /// Makes these the only registrations: those of the cluster with this uid. Blocking.
    ///
    /// # Errors
    /// [`RegisterError::Io`]: a part is executed. Executing all again is safe.
    pub fn adopt(&self, uid: &str, all: Vec<(Registration, u64)>) -> Result<Applied, RegisterError> {
        let mut inner = self.lock();
        let mut applied = Applied::default();
        let kept: BTreeSet<_> = all.iter().map(|(r, _)| key_of(r)).collect();
        let gone: Vec<_> = inner.table.keys().filter(|key| !kept.contains(key)).cloned().collect();
        let gone = gone.into_iter().map(|(domain, name)| Change::Unregistered(domain, name));
        for change in gone.chain(all.into_iter().map(|(r, bytes)| Change::Registered(r, bytes))) {
            self.apply_one(&mut inner, change, &mut applied)?;
        }
        if inner.copy_of.as_deref() != Some(uid) {
            self.write(&mut inner, COPY_OF, &CopyRecord { uid: uid.to_owned() })?;
            inner.copy_of = Some(uid.to_owned());
        }
        Ok(applied)
    }

    /// Returns whether these are registrations of the cluster with this uid.
    #[must_use]
    pub fn is_copy_of(&self, uid: &str) -> bool {
        self.lock().copy_of.as_deref() == Some(uid)
    }

    /// Unregisters a dataset. Returns `false` if the domain has none of that name. Blocking.
    ///
    /// # Errors
    /// [`RegisterError::Io`].
    pub fn unregister(&self, domain: &Domain, name: &DatasetName) -> Result<bool, RegisterError> {
        self.remove(&mut self.lock(), domain, name)
    }

    fn remove(&self, inner: &mut Inner, domain: &Domain, name: &DatasetName) -> Result<bool, RegisterError> {
        let key = (domain.clone(), name.clone());
        if !inner.table.contains_key(&key) {
            return Ok(false);
        }
        self.write(inner, UNREGISTER, &UnregisterRecord { domain: domain.clone(), name: name.clone() })?;
        if let Some(gone) = inner.table.remove(&key) {
            gone.ended.store(true, Ordering::Release);
        }
        Ok(true)
    }

    fn write(&self, inner: &mut Inner, kind: u8, value: &impl Serialize) -> Result<(), RegisterError> {
        let failed = |error| RegisterError::Io { path: self.path.clone(), error };
        let payload = serde_json::to_vec(value).map_err(|e| failed(e.into()))?;
        let mut bytes = Vec::new();
        record::append(&mut bytes, kind, &payload);
        inner.append(&bytes).map_err(failed)
    }
}

fn key_of(r: &Registration) -> (Domain, DatasetName) {
    (r.domain.clone(), r.dataset.name.clone())
}

/// Whether access through one registration is access through the other.
fn is_same(a: &Registration, b: &Registration) -> bool {
    (&a.tenant, &a.dataset.uri, &a.dataset.tables) == (&b.tenant, &b.dataset.uri, &b.dataset.tables)
}

impl Inner {
    fn charged_bytes(&self, tenant: &Tenant) -> u64 {
        self.table.values().filter(|r| r.tenant == *tenant).fold(0, |n, r| n.saturating_add(r.bytes()))
    }

    /// Rejects bytes over the tenant's quota. A tenant that is over its quota already keeps what it has.
    fn check_quota(
        &self,
        registration: &Registration,
        adds: u64,
        quota: Option<u64>,
    ) -> Result<(), RegisterError> {
        let Some(quota) = quota else { return Ok(()) };
        let has = self.charged_bytes(&registration.tenant);
        // A new dataset of unknown size needs at least one free byte.
        if has.saturating_add(adds.max(1)) <= quota {
            return Ok(());
        }
        let (tenant, name) = (registration.tenant.clone(), registration.dataset.name.clone());
        Err(RegisterError::Quota { tenant, name, has, adds, quota })
    }

    /// Appends and fsyncs a record.
    ///
    /// A failed append is cut off, because a torn record before the next one would read as damage.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let written = self.log.write_all(bytes).and_then(|()| self.log.sync_all());
        if let Err(e) = written {
            self.log.set_len(self.len)?;
            return Err(e);
        }
        self.len += bytes.len() as u64;
        Ok(())
    }
}

/// Replays a log. Returns the table and the length of the log's valid prefix.
///
/// # Errors
/// [`StateError::Damaged`].
pub fn replay(path: &Path, bytes: &[u8]) -> Result<(Table, usize), StateError> {
    replay_all(path, bytes).map(|(table, _, len)| (table, len))
}

/// Replays a log. Returns the table, the cluster that it is a copy of, and the length of the valid prefix.
fn replay_all(path: &Path, bytes: &[u8]) -> Result<(Table, Option<String>, usize), StateError> {
    let damaged = |why: String| StateError::Damaged { path: path.to_owned(), why };
    let (records, len) = record::read(bytes).map_err(|e| damaged(e.to_string()))?;
    let (mut table, mut copy_of) = (Table::new(), None);
    for (i, r) in records.iter().enumerate() {
        let unreadable = |e: serde_json::Error| damaged(format!("record {i} cannot be parsed: {e}"));
        match r.kind {
            REGISTER => {
                let e: Registration = serde_json::from_slice(r.payload).map_err(unreadable)?;
                table.insert((e.domain.clone(), e.dataset.name.clone()), RegistrationHandle::new(e, 0));
            }
            UNREGISTER => {
                let gone: UnregisterRecord = serde_json::from_slice(r.payload).map_err(unreadable)?;
                table.remove(&(gone.domain, gone.name));
            }
            SIZED => {
                let s: SizeRecord = serde_json::from_slice(r.payload).map_err(unreadable)?;
                if let Some(of) = table.get(&(s.domain, s.name)) {
                    of.bytes.fetch_max(s.bytes, Ordering::Relaxed);
                }
            }
            TAGGED => {
                let t: TagRecord = serde_json::from_slice(r.payload).map_err(unreadable)?;
                if let Some(of) = table.get(&(t.domain, t.name)).filter(|of| of.records((t.root, t.layout))) {
                    of.tagged().push((t.root, t.layout));
                }
            }
            COPY_OF => {
                let copy: CopyRecord = serde_json::from_slice(r.payload).map_err(unreadable)?;
                copy_of = Some(copy.uid);
            }
            kind => {
                tracing::info!(file = %path.display(), kind, "skipped a record that a newer server wrote")
            }
        }
    }
    Ok((table, copy_of, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, uri: &str) -> Registration {
        let dataset = Dataset {
            name: DatasetName::new(name).expect("name"),
            uri: uri.into(),
            tables: uri.into(),
            registered_ns: 7,
        };
        Registration { domain: Domain::default_domain(), tenant: Tenant::default_tenant(), dataset }
    }

    fn open(dir: &Path) -> Result<Registrations, StateError> {
        // The lock is given up at once, so that a test can open again.
        Registrations::open(&StateDir::open(dir)?, 3)
    }

    fn names(r: &Registrations) -> Vec<String> {
        r.list(&Domain::default_domain()).iter().map(|e| e.dataset.name.to_string()).collect()
    }

    #[test]
    fn what_was_answered_is_there_again() {
        let dir = tempfile::tempdir().expect("tempdir");
        let r = open(dir.path()).expect("new");
        for name in ["b", "a", "c"] {
            let (_, change) = r.register(entry(name, "file:///x"), 0, None, false).expect("registered");
            assert_eq!(change, RegisterChange::New);
        }
        let (_, change) = r.register(entry("a", "file:///x"), 0, None, false).expect("the same again");
        assert_eq!(change, RegisterChange::Unchanged);
        assert!(matches!(
            r.register(entry("a", "file:///y"), 0, None, false),
            Err(RegisterError::Conflict { .. })
        ));
        assert!(matches!(r.register(entry("d", "file:///x"), 0, None, false), Err(RegisterError::Full(3))));
        let held = r.get(&Domain::default_domain(), &entry("b", "").dataset.name).expect("registered");
        assert!(held.is_registered());
        assert!(r.unregister(&Domain::default_domain(), &entry("b", "").dataset.name).expect("gone"));
        assert!(!held.is_registered());
        assert!(
            !r.unregister(&Domain::default_domain(), &entry("b", "").dataset.name).expect("gone already")
        );
        drop(r);
        let r = open(dir.path()).expect("again");
        assert_eq!(names(&r), ["a", "c"]);
        assert!(r.list(&Domain::new("other").expect("name")).is_empty());
    }

    #[test]
    fn other_tables_replace_a_registration_and_another_uri_only_on_request() {
        let dir = tempfile::tempdir().expect("tempdir");
        let r = open(dir.path()).expect("new");
        let (first, _) = r.register(entry("a", "file:///x"), 60, Some(100), false).expect("new");
        let mut elsewhere = entry("a", "file:///x");
        elsewhere.dataset.tables = "file:///t".into();
        let (second, change) = r.register(elsewhere, 70, Some(100), false).expect("other tables");
        assert_eq!(change, RegisterChange::Replaced);
        assert!(!first.is_registered() && second.is_registered());
        assert_eq!((r.len(), r.charged_bytes(&Tenant::default_tenant())), (1, 70));
        let told = r.register(entry("a", "file:///y"), 0, None, false).expect_err("another URI").to_string();
        assert!(told.contains("for file:///x") && told.contains("not for file:///y"), "{told}");
        assert!(second.is_registered());
        let (_, change) = r.register(entry("a", "file:///y"), 0, None, true).expect("on request");
        assert_eq!(change, RegisterChange::Replaced);
        drop(r);
        let r = open(dir.path()).expect("again");
        let there = r.get(&Domain::default_domain(), &entry("a", "").dataset.name).expect("registered");
        assert_eq!((r.len(), there.dataset.uri.as_str()), (1, "file:///y"));
    }

    #[test]
    fn every_torn_tail_is_cut_and_written_over() {
        let dir = tempfile::tempdir().expect("tempdir");
        let file = dir.path().join("registrations.log");
        let r = open(dir.path()).expect("new");
        r.register(entry("a", "file:///x"), 0, None, false).expect("registered");
        let one = std::fs::metadata(&file).expect("log").len();
        r.register(entry("b", "file:///x"), 0, None, false).expect("registered");
        drop(r);
        let whole = std::fs::read(&file).expect("log");
        for cut in 0..whole.len() {
            std::fs::write(&file, &whole[..cut]).expect("tear");
            let r = open(dir.path()).expect("a torn tail is no damage");
            assert_eq!(r.len(), usize::from(cut as u64 >= one));
            r.register(entry("c", "file:///x"), 0, None, false).expect("goes on");
            drop(r);
            assert!(names(&open(dir.path()).expect("whole")).contains(&"c".to_owned()));
        }
    }

    #[test]
    fn damage_names_file_offset_and_way_out_and_newer_kinds_are_skipped() {
        let dir = tempfile::tempdir().expect("tempdir");
        let file = dir.path().join("registrations.log");
        let r = open(dir.path()).expect("new");
        r.register(entry("a", "file:///x"), 0, None, false).expect("registered");
        r.register(entry("b", "file:///x"), 0, None, false).expect("registered");
        drop(r);
        let mut bytes = std::fs::read(&file).expect("log");
        record::append(&mut bytes, 99, b"from the future");
        std::fs::write(&file, &bytes).expect("write");
        assert_eq!(names(&open(dir.path()).expect("skips")), ["a", "b"]);
        bytes[60] ^= 1;
        std::fs::write(&file, &bytes).expect("write");
        let told = open(dir.path()).expect_err("damaged").to_string();
        for part in ["registrations.log", "byte 16", "backup"] {
            assert!(told.contains(part), "{part} in {told}");
        }
    }

    #[test]
    fn a_second_server_is_told_whose_directory_it_is() {
        let dir = tempfile::tempdir().expect("tempdir");
        let _first = StateDir::open(dir.path()).expect("free");
        assert!(matches!(StateDir::open(dir.path()), Err(StateError::InUse(_))));
    }

    #[test]
    fn changes_of_a_coordinator_are_executed_and_survive_a_restart() {
        let dir = tempfile::tempdir().expect("tempdir");
        let r = open(dir.path()).expect("new");
        let (own, _) = r.register(entry("own", "file:///x"), 0, None, false).expect("new");
        assert!(!r.is_copy_of("u1"));
        let all = vec![(entry("a", "file:///x"), 5), (entry("b", "file:///x"), 0)];
        let applied = r.adopt("u1", all.clone()).expect("adopted");
        assert_eq!((applied.has_ended, applied.domains.len()), (true, 1));
        assert!(!own.is_registered() && r.is_copy_of("u1") && !r.is_copy_of("u2"));
        assert_eq!(r.adopt("u1", all).expect("again"), Applied::default());
        let domain = Domain::default_domain();
        let a = r.get(&domain, &entry("a", "").dataset.name).expect("registered");
        // A larger version is no other registration. Another URI is.
        assert_eq!(
            r.apply(vec![Change::Registered(entry("a", "file:///x"), 9)]).expect("larger"),
            Applied::default()
        );
        assert_eq!((a.bytes(), a.is_registered()), (9, true));
        let changes = vec![
            Change::Registered(entry("a", "file:///y"), 9),
            Change::Unregistered(domain.clone(), entry("b", "").dataset.name),
            Change::Unregistered(domain, entry("never", "").dataset.name),
            // The limit of datasets is the business of whoever registers.
            Change::Registered(entry("c", "file:///x"), 0),
            Change::Registered(entry("d", "file:///x"), 0),
            Change::Registered(entry("e", "file:///x"), 0),
        ];
        assert!(r.apply(changes).expect("applied").has_ended && !a.is_registered());
        drop(r);
        let r = open(dir.path()).expect("again");
        assert!(r.is_copy_of("u1"));
        assert_eq!(
            (names(&r), r.charged_bytes(&Tenant::default_tenant())),
            (["a", "c", "d", "e"].map(str::to_owned).to_vec(), 9)
        );
        let told = r.plan(&entry("f", "file:///x"), 0, None, false).expect_err("full").to_string();
        assert!(told.contains("the limit"), "{told}");
        let planned = r.plan(&entry("a", "file:///z"), 0, None, true).expect("may be replaced");
        assert!(matches!(planned, Planned::Changed(RegisterChange::Replaced)));
    }

    #[test]
    fn a_quota_bounds_what_a_tenant_registers_over_restarts_too() {
        let dir = tempfile::tempdir().expect("tempdir");
        let r = open(dir.path()).expect("new");
        let (quota, tenant) = (Some(100), Tenant::default_tenant());
        let (a, _) = r.register(entry("a", "file:///x"), 60, quota, false).expect("fits");
        let told = r.register(entry("b", "file:///x"), 50, quota, false).expect_err("over").to_string();
        assert!(told.contains("60 of 100 bytes") && told.contains("would add 50"), "{told}");
        let (b, _) = r.register(entry("b", "file:///x"), 0, quota, false).expect("not indexed yet");
        assert!(matches!(r.record_size(&b, 41, quota), Err(RegisterError::Quota { has: 60, adds: 41, .. })));
        r.record_size(&b, 40, quota).expect("fits exactly");
        r.record_size(&a, 10, quota).expect("an older, smaller version");
        assert_eq!((a.bytes(), b.bytes(), r.charged_bytes(&tenant)), (60, 40, 100));
        assert!(r.register(entry("c", "file:///x"), 0, quota, false).is_err(), "nothing is left");
        r.unregister(&Domain::default_domain(), &a.dataset.name).expect("gone");
        drop(r);
        let r = open(dir.path()).expect("again");
        assert_eq!(r.charged_bytes(&tenant), 40);
        r.register(entry("c", "file:///x"), 1000, None, false).expect("no quota, no bound");
    }
}
