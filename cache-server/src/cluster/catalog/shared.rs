//! The registrations of a cluster: reads them from etcd, executes them here, and writes changes.
//!
//! I1. Changes are executed in the order of revisions, each once. After a watch that broke or was idle,
//!     everything is read again.
//! I2. Deletions are executed only while etcd has the cluster that this server joined. An etcd that was wiped
//!     ends no access.
//! I3. An etcd that was restored ends no access either, and gives none back (`correction.rs`).
//! I4. `seen/ID` is written after the changes are durable in this server's log, and in force.

mod correction;

use super::{
    Catalog, CatalogError, Registered, detail,
    position::Position,
    records::{
        DataKey, PositionRecord, SeenRecord, TenantRecord, dataset_key, dataset_text, parse_key,
        position_key, read_dataset, read_position, tenant_key,
    },
};
use crate::{
    cluster::{
        ClusterState, Event, Follower, KeyValue, Op, RecoverError, RecoveryMark, SharedKeys, from_text,
        to_text,
    },
    tenancy::state::{
        Applied, Change, Planned, RegisterChange, RegisterError, Registration, RegistrationHandle,
    },
};
use fletch_core::{DatasetName, Domain, MemberId, Tenant};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    sync::{Notify, watch},
    task::spawn_blocking,
    time::{sleep, timeout},
};

/// How soon a failed read or write is tried again.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// How often a change that others overtook is tried.
const TRIES: usize = 16;
/// How long a server waits for the news of its own change before it reads everything.
const OWN_NEWS_WITHIN: Duration = Duration::from_secs(1);
/// How often the members' confirmations are looked at.
const CONFIRM_POLL: Duration = Duration::from_millis(20);

type DatasetKey = (Domain, DatasetName);

/// What is known of the record of a dataset.
#[derive(Debug, Clone, Copy)]
struct KnownRecord {
    revision: u64,
    bytes: u64,
}

/// What this server knows of the keys below `data/`.
#[derive(Debug, Default)]
struct Known {
    /// The revision of the record of the cluster.
    cluster: u64,
    datasets: BTreeMap<DatasetKey, KnownRecord>,
    /// The revision of each tenant's mark.
    tenants: BTreeMap<Tenant, u64>,
    /// The revision up to which this server has seen all changes. 0: everything must be read.
    cursor: u64,
    /// What makes a position of a revision.
    offset: u64,
}

/// The part of a catalog that a cluster shares.
pub struct Shared {
    of: SharedKeys,
    cluster: Arc<ClusterState>,
    known: Mutex<Known>,
    /// The revision of the last change that this server has executed.
    executed: watch::Sender<u64>,
    position: Arc<Position>,
    /// Since when this server claims that it knows later datasets than etcd.
    claims_since: Mutex<Option<Instant>>,
    sizes: Notify,
    /// Held by whoever executes changes.
    executing: tokio::sync::Mutex<()>,
    pub follower: Follower,
}

impl Shared {
    pub fn new(of: SharedKeys, cluster: Arc<ClusterState>, state: &Path) -> Self {
        Shared {
            of,
            cluster,
            known: Mutex::default(),
            executed: watch::Sender::new(0),
            position: Arc::new(Position::open(state)),
            claims_since: Mutex::default(),
            sizes: Notify::new(),
            executing: tokio::sync::Mutex::default(),
            follower: Follower::new("datasets"),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Whoever panicked leaves at worst an old revision, with which a transaction fails.
        self.known.lock()
    }

    pub fn revision(&self) -> u64 {
        *self.executed.borrow()
    }

    pub fn sizes_changed(&self) {
        self.sizes.notify_one();
    }

    /// Checks that etcd has the cluster that this server joined. Returns the revision of its record, and that
    /// of etcd.
    async fn check_cluster(&self) -> Result<(u64, u64), CatalogError> {
        let joined = self.cluster.uid().ok_or(CatalogError::NoCluster)?;
        self.of.check_cluster(&joined).await?.ok_or(CatalogError::NoCluster)
    }

    /// Reads all registrations, and makes them those of this server.
    pub async fn load(&self, catalog: &Catalog) -> Result<(), CatalogError> {
        let _one = self.executing.lock().await;
        let uid = self.cluster.uid().ok_or(CatalogError::NoCluster)?;
        let mut page = self.of.etcd.read_prefix(&self.of.keys.data()).await?;
        let (cluster, _) = self.check_cluster().await?;
        let is_member = catalog.local.is_copy_of(&uid);
        if is_member && self.is_ahead_of(&uid, &page.keys)? {
            self.correct(catalog, (&uid, cluster), &page).await?;
            page = self.of.etcd.read_prefix(&self.of.keys.data()).await?;
        }
        if !is_member && self.bring(catalog, cluster, &page.keys).await? {
            page = self.of.etcd.read_prefix(&self.of.keys.data()).await?;
        }
        let mut known = Known { cluster, cursor: page.revision, ..Known::default() };
        let mut all = Vec::new();
        // Every change writes a key that stays: the mark of the tenant.
        let executed = page.keys.iter().map(|kv| kv.mod_revision).max().unwrap_or(0);
        for kv in &page.keys {
            match parse_key(&self.of.keys, &kv.key) {
                DataKey::Dataset(domain, name) => {
                    let record = read_dataset(kv, &domain, &name)?;
                    let (revision, bytes) = (kv.mod_revision, record.bytes);
                    known.datasets.insert((domain, name), KnownRecord { revision, bytes });
                    all.push((record.registration, record.bytes));
                }
                DataKey::Tenant(tenant) => {
                    known.tenants.insert(tenant, kv.mod_revision);
                }
                DataKey::Position => known.offset = read_position(kv)?.offset,
                DataKey::Unknown => {}
            }
        }
        let (local, position) = (Arc::clone(&catalog.local), Arc::clone(&self.position));
        let reached = executed.saturating_add(known.offset);
        let adopt = move || {
            let applied = local.adopt(&uid, all)?;
            position.reach(&uid, reached);
            Ok::<_, RegisterError>(applied)
        };
        let applied = spawn_blocking(adopt).await??;
        *self.known() = known;
        self.executed.send_replace(executed);
        self.take_effect(catalog, &applied);
        Ok(())
    }

    /// Registers with the cluster what only this server has, when it joins. Returns whether etcd has
    /// other registrations since.
    async fn bring(&self, catalog: &Catalog, cluster: u64, there: &[KeyValue]) -> Result<bool, CatalogError> {
        let names: BTreeSet<&[u8]> = there.iter().map(|kv| &*kv.key).collect();
        let mut brought = false;
        for own in catalog.local.all() {
            let (domain, name) = (&own.domain, &own.dataset.name);
            let key = dataset_key(&self.of.keys, domain, name);
            if names.contains(key.as_bytes()) {
                tracing::warn!(
                    dataset = %name, %domain, uri = own.dataset.uri,
                    "the cluster has a dataset of this name, which is used from now on"
                );
                continue;
            }
            let compare = [(self.of.keys.cluster(), cluster), (key.clone(), 0)];
            let put = |key, value| Op::Put { key, value, lease: 0 };
            let ops = [
                put(key, dataset_text(&own, own.bytes())),
                put(tenant_key(&self.of.keys, &own.tenant), to_text(&TenantRecord {})),
            ];
            // If another server brought the name meanwhile, that one wins.
            if self.of.etcd.transact(&compare, &ops).await?.succeeded {
                tracing::info!(dataset = %name, %domain, "the dataset is registered with the cluster now");
            }
            brought = true;
        }
        Ok(brought)
    }

    /// Makes the datasets of this server those of an etcd that lost its keys.
    pub async fn write_back(&self, catalog: &Catalog, mark: RecoveryMark) -> Result<(), RecoverError> {
        let (keys, mut wanted) = (&self.of.keys, BTreeMap::new());
        for own in catalog.local.all() {
            let key = dataset_key(keys, &own.domain, &own.dataset.name);
            wanted.insert(key, dataset_text(&own, own.bytes()));
            wanted.insert(tenant_key(keys, &own.tenant), to_text(&TenantRecord {}));
        }
        // Later than all that servers know, so that none of them corrects it.
        let uid = self.cluster.uid().ok_or(RecoverError::NeverJoined)?;
        wanted.insert(position_key(keys), to_text(&self.position_after(&uid, 0)));
        // A recovery that was interrupted may have written the datasets of another server.
        let page = self.of.etcd.read_prefix(&keys.data()).await?;
        let mut changes = Vec::new();
        let mut there: BTreeMap<String, KeyValue> =
            page.keys.into_iter().map(|kv| (String::from_utf8_lossy(&kv.key).into_owned(), kv)).collect();
        for (key, value) in wanted {
            let found = there.remove(&key);
            let seen = found.as_ref().map_or(0, |kv| kv.mod_revision);
            if found.is_none_or(|kv| kv.value != value) {
                changes.push((Op::Put { key, value, lease: 0 }, Some(seen)));
            }
        }
        changes.extend(there.into_iter().map(|(key, kv)| (Op::Delete { key }, Some(kv.mod_revision))));
        match self.of.write_back(mark, changes).await? {
            true => Ok(()),
            false => Err(RecoverError::Overtaken),
        }
    }

    /// Executes changes that etcd announces.
    async fn execute(&self, catalog: &Catalog, events: Vec<Event>) -> Result<(), CatalogError> {
        let _one = self.executing.lock().await;
        let cursor = self.known().cursor;
        let new: Vec<Event> = events.into_iter().filter(|e| e.kv.mod_revision > cursor).collect();
        let Some(revision) = new.iter().map(|e| e.kv.mod_revision).max() else { return Ok(()) };
        if new.iter().any(Event::is_delete) {
            self.check_cluster().await?;
        }
        let mut changes = Vec::new();
        let mut noted: Vec<(DatasetKey, Option<KnownRecord>)> = Vec::new();
        let (mut tenants, mut offset) = (Vec::new(), self.known().offset);
        for event in &new {
            match parse_key(&self.of.keys, &event.kv.key) {
                DataKey::Dataset(domain, name) if event.is_delete() => {
                    changes.push(Change::Unregistered(domain.clone(), name.clone()));
                    noted.push(((domain, name), None));
                }
                DataKey::Dataset(domain, name) => {
                    let record = read_dataset(&event.kv, &domain, &name)?;
                    changes.push(Change::Registered(record.registration, record.bytes));
                    noted.push((
                        (domain, name),
                        Some(KnownRecord { revision: event.kv.mod_revision, bytes: record.bytes }),
                    ));
                }
                DataKey::Tenant(tenant) => tenants.push((tenant, event.kv.mod_revision)),
                DataKey::Position if event.is_delete() => offset = 0,
                DataKey::Position => offset = read_position(&event.kv)?.offset,
                DataKey::Unknown => {}
            }
        }
        let (local, position) = (Arc::clone(&catalog.local), Arc::clone(&self.position));
        let uid = self.cluster.uid().ok_or(CatalogError::NoCluster)?;
        let apply = move || {
            let applied = local.apply(changes)?;
            position.reach(&uid, revision.saturating_add(offset));
            Ok::<_, RegisterError>(applied)
        };
        let applied = spawn_blocking(apply).await??;
        {
            let mut known = self.known();
            (known.cursor, known.offset) = (revision, offset);
            known.tenants.extend(tenants);
            for (key, now) in noted {
                match now {
                    Some(now) => drop(known.datasets.insert(key, now)),
                    None => drop(known.datasets.remove(&key)),
                }
            }
        }
        self.executed.send_replace(revision);
        self.take_effect(catalog, &applied);
        Ok(())
    }

    fn take_effect(&self, catalog: &Catalog, applied: &Applied) {
        if *applied != Applied::default() {
            let datasets = catalog.local.len();
            tracing::info!(revision = self.revision(), datasets, "the datasets of the cluster changed");
            (catalog.effects)(applied);
        }
    }

    pub async fn run(&self, catalog: &Catalog) {
        let follow = async {
            loop {
                let Err(error) = self.follow(catalog).await else { continue };
                let needs_person = matches!(error, CatalogError::Record(..) | CatalogError::Register(_));
                self.follower.failed(&detail(&error), needs_person);
                sleep(RETRY_AFTER).await;
            }
        };
        tokio::join!(follow, self.tell(), self.push_sizes(catalog));
    }

    async fn follow(&self, catalog: &Catalog) -> Result<(), CatalogError> {
        // A watch that ended or was idle may have missed changes, also where etcd has a higher revision than
        // before: it may have been restored from a backup, and have other changes since.
        self.load(catalog).await?;
        self.follower.reached();
        self.watch(catalog).await
    }

    async fn watch(&self, catalog: &Catalog) -> Result<(), CatalogError> {
        let (prefix, from) = (self.of.keys.data(), self.known().cursor + 1);
        let mut watch = self.of.etcd.watch_from(&prefix, from).await?;
        while let Some(events) = watch.next().await? {
            self.execute(catalog, events).await?;
        }
        Ok(())
    }

    /// Says in etcd what this server has executed.
    async fn tell(&self) {
        let mut executed = self.executed.subscribe();
        let mut told = 0;
        loop {
            let revision = *executed.borrow_and_update();
            if revision != told {
                let key = self.of.keys.seen(self.cluster.own_id());
                let put = Op::Put { key, value: to_text(&SeenRecord { revision }), lease: 0 };
                if self.of.etcd.transact(&[], &[put]).await.is_err() {
                    sleep(RETRY_AFTER).await;
                    continue;
                }
                told = revision;
            }
            if executed.changed().await.is_err() {
                return;
            }
        }
    }

    /// Writes the sizes of versions that this server opened, so that all members count the same.
    async fn push_sizes(&self, catalog: &Catalog) {
        loop {
            self.sizes.notified().await;
            let known: Vec<_> = self.known().datasets.iter().map(|(k, v)| (k.clone(), *v)).collect();
            for ((domain, name), KnownRecord { revision, bytes }) in known {
                let Some(own) = catalog.local.get(&domain, &name).filter(|own| own.bytes() > bytes) else {
                    continue;
                };
                let text = dataset_text(&own, own.bytes());
                let key = dataset_key(&self.of.keys, &domain, &name);
                let put = Op::Put { key: key.clone(), value: text, lease: 0 };
                let done = self.change(&own.tenant, (key, revision), put).await;
                if !done.is_ok_and(|done| done.is_some()) {
                    // Others changed it, or etcd is away.
                    sleep(RETRY_AFTER).await;
                    self.sizes.notify_one();
                }
            }
        }
    }

    /// Changes one dataset of a tenant, if nobody else did. Returns the revision.
    async fn change(
        &self,
        tenant: &Tenant,
        dataset: (String, u64),
        op: Op,
    ) -> Result<Option<u64>, CatalogError> {
        let mark = tenant_key(&self.of.keys, tenant);
        let (cluster, tenant) = {
            let known = self.known();
            (known.cluster, known.tenants.get(tenant).copied().unwrap_or(0))
        };
        let compare = [(self.of.keys.cluster(), cluster), (mark.clone(), tenant), dataset];
        let ops = [op, Op::Put { key: mark, value: to_text(&TenantRecord {}), lease: 0 }];
        let done = self.of.etcd.transact(&compare, &ops).await?;
        Ok(done.succeeded.then_some(done.revision))
    }

    /// Waits until this server has executed a revision.
    async fn catch_up(&self, catalog: &Catalog, revision: u64) -> Result<(), CatalogError> {
        let mut executed = self.executed.subscribe();
        let is_done = timeout(OWN_NEWS_WITHIN, executed.wait_for(|done| *done >= revision)).await.is_ok();
        if is_done { Ok(()) } else { self.load(catalog).await }
    }

    fn known_of(&self, domain: &Domain, name: &DatasetName) -> u64 {
        self.known().datasets.get(&(domain.clone(), name.clone())).map_or(0, |known| known.revision)
    }

    pub async fn register(
        &self,
        catalog: &Catalog,
        registration: Registration,
        bytes: u64,
        quota: Option<u64>,
        replace: bool,
    ) -> Result<Registered, CatalogError> {
        let (domain, name) = (&registration.domain, &registration.dataset.name);
        let key = dataset_key(&self.of.keys, domain, name);
        for attempt in 0..TRIES {
            // Before the plan: a change in between makes the transaction fail.
            let revision = self.known_of(domain, name);
            let change = match catalog.local.plan(&registration, bytes, quota, replace) {
                Ok(Planned::Changed(change)) => change,
                Ok(Planned::Unchanged(there)) => return Ok(unchanged(&there)),
                // The other servers may have made room since.
                Err(RegisterError::Quota { .. } | RegisterError::Full(_)) if attempt == 0 => {
                    self.load(catalog).await?;
                    continue;
                }
                Err(e) => return Err(e.into()),
            };
            let put = Op::Put { key: key.clone(), value: dataset_text(&registration, bytes), lease: 0 };
            match self.change(&registration.tenant, (key.clone(), revision), put).await? {
                Some(done) => {
                    self.catch_up(catalog, done).await?;
                    let unconfirmed = match change {
                        RegisterChange::Replaced => self.unconfirmed(done).await,
                        _ => Vec::new(),
                    };
                    return Ok(Registered { dataset: registration.dataset, change, unconfirmed });
                }
                None => self.load(catalog).await?,
            }
        }
        Err(CatalogError::Contended)
    }

    pub async fn unregister(
        &self,
        catalog: &Catalog,
        domain: &Domain,
        name: &DatasetName,
    ) -> Result<Option<Vec<MemberId>>, CatalogError> {
        let key = dataset_key(&self.of.keys, domain, name);
        for _ in 0..TRIES {
            let revision = self.known_of(domain, name);
            let Some(there) = catalog.local.get(domain, name) else { return Ok(None) };
            let delete = Op::Delete { key: key.clone() };
            match self.change(&there.tenant, (key.clone(), revision), delete).await? {
                Some(done) => {
                    self.catch_up(catalog, done).await?;
                    return Ok(Some(self.unconfirmed(done).await));
                }
                None => self.load(catalog).await?,
            }
        }
        Err(CatalogError::Contended)
    }

    /// Waits until the members have executed a revision. Returns those that did not.
    ///
    /// A member that is up is waited for until it would count as down. One that is down may be cut off from
    /// etcd, and still serve, also after the ring has forgotten it. So every member counts that has ever
    /// confirmed a change, until it stopped in good order.
    async fn unconfirmed(&self, revision: u64) -> Vec<MemberId> {
        let end = Instant::now() + self.of.member_ttl;
        loop {
            let view = self.cluster.view();
            let ring = view.core.ring().members().iter().map(|m| m.id.clone());
            let mut missing: BTreeSet<MemberId> = ring.chain(view.core.up().iter().cloned()).collect();
            missing.remove(self.cluster.own_id());
            let prefix = self.of.keys.all_seen();
            if let Ok(page) = self.of.etcd.read_prefix(&prefix).await {
                for kv in page.keys {
                    let id = MemberId::new(&String::from_utf8_lossy(&kv.key[prefix.len()..]));
                    let seen = from_text::<SeenRecord>(&kv.value);
                    match (id, seen) {
                        (Ok(id), Ok(seen)) if seen.revision >= revision => drop(missing.remove(&id)),
                        (Ok(id), _) if id != *self.cluster.own_id() => drop(missing.insert(id)),
                        _ => {}
                    }
                }
            }
            let is_worth_waiting = missing.iter().any(|id| view.core.is_up(id));
            if !is_worth_waiting || Instant::now() >= end {
                if !missing.is_empty() {
                    tracing::warn!(members = ?missing, "members did not confirm that access ended");
                }
                return missing.into_iter().collect();
            }
            sleep(CONFIRM_POLL).await;
        }
    }
}

fn unchanged(there: &RegistrationHandle) -> Registered {
    let (dataset, change) = (there.dataset.clone(), RegisterChange::Unchanged);
    Registered { dataset, change, unconfirmed: Vec::new() }
}
