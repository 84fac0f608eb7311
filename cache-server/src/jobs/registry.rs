//! All declared jobs of this server, and the sweeps that they share.
//!
//! 1. (I7) A job is its tenant's: to others it does not exist.
//! 2. A job is opened when it is first asked for, by one caller while others wait; a restart opens none.
//! 3. (I6) At most [`DECLARED_MAX`] jobs are declared. Jobs of one (domain, root, layout) share its samples and its sweep, which
//!    go with the last of them.

use super::{
    JobError, Samples, Wheel,
    declared::{Opened, Record},
    wheel::Means,
};
use crate::versions::{Source, Sources};
use fletch_api::{JobLine, OrderKind, StartJob};
use fletch_core::{Domain, LayoutId, Root, Tenant, order::substitute::Standing};
use fletch_store::DatasetId;
use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};
use tokio::{sync::OnceCell, task::spawn_blocking};

/// Jobs declared at once.
pub const DECLARED_MAX: usize = 10_000;

/// A job that may be opened.
struct Slot {
    record: Record,
    opened: OnceCell<Arc<Opened>>,
}

type Place = (Domain, Root, LayoutId);

/// What jobs of one place share.
#[derive(Default)]
struct Shared {
    samples: tokio::sync::Mutex<Weak<Samples>>,
    wheel: tokio::sync::Mutex<Weak<Wheel>>,
}

/// See the module.
pub struct Registry {
    dir: PathBuf,
    /// What jobs are served with.
    pub means: Arc<Means>,
    slots: Mutex<BTreeMap<String, Arc<Slot>>>,
    /// One job is declared or deleted at a time.
    changing: tokio::sync::Mutex<()>,
    places: Mutex<HashMap<Place, Arc<Shared>>>,
}

/// Numbers for metrics.
#[derive(Debug, Default)]
pub struct RegistryStats {
    /// Jobs declared.
    pub declared: u64,
    /// Epochs that go on, in memory.
    pub epochs_open: u64,
    /// Sweeps.
    pub wheels: Vec<Standing>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Registry {
    /// Reads which jobs there are below the state directory. A job whose file cannot be believed is
    /// left where it is, and said.
    ///
    /// # Errors
    /// What the system said about the directory itself.
    pub fn open(state: &Path, means: Means) -> std::io::Result<Self> {
        let dir = state.join("jobs");
        std::fs::create_dir_all(&dir)?;
        let mut slots = BTreeMap::new();
        for entry in std::fs::read_dir(&dir)? {
            let path = entry?.path();
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            if name.starts_with("gone-") {
                // A deletion that a crash interrupted.
                std::fs::remove_dir_all(&path)?;
                continue;
            }
            let read = std::fs::read(path.join("job.json"))
                .and_then(|b| serde_json::from_slice::<Record>(&b).map_err(Into::into));
            match read {
                Ok(record) if record.id() == name => {
                    slots.insert(name, Arc::new(Slot { record, opened: OnceCell::new() }));
                }
                Ok(_) => {
                    tracing::error!(dir = %path.display(), "a job's directory has another job's file; it is left alone")
                }
                Err(e) => {
                    tracing::error!(dir = %path.display(), error = %e, "a job's file cannot be read; it is left alone")
                }
            }
        }
        Ok(Registry {
            dir,
            means: Arc::new(means),
            slots: Mutex::new(slots),
            changing: tokio::sync::Mutex::default(),
            places: Mutex::default(),
        })
    }

    fn slot(&self, domain: &Domain, tenant: &Tenant, id: &str) -> Result<Arc<Slot>, JobError> {
        let slot = lock(&self.slots).get(id).cloned();
        slot.filter(|s| s.record.tenant == *tenant && s.record.domain == *domain).ok_or(JobError::NotFound)
    }

    /// Where a declared job's bytes are to be looked for: its root and layout.
    ///
    /// # Errors
    /// [`JobError::NotFound`].
    pub fn place(&self, domain: &Domain, tenant: &Tenant, id: &str) -> Result<(Root, LayoutId), JobError> {
        let slot = self.slot(domain, tenant, id)?;
        Ok((slot.record.root, slot.record.layout))
    }

    /// What was asked for when a job of that name was declared, if one was.
    #[must_use]
    pub fn declared(&self, domain: &Domain, tenant: &Tenant, name: &str) -> Option<Record> {
        let id = Record::id_of(domain, tenant, name);
        self.slot(domain, tenant, &id).ok().map(|s| s.record.clone())
    }

    /// A tenant's jobs, by name.
    #[must_use]
    pub fn list(&self, domain: &Domain, tenant: &Tenant) -> Vec<JobLine> {
        let slots = lock(&self.slots);
        let mine = slots.values().filter(|s| s.record.tenant == *tenant && s.record.domain == *domain);
        let mut lines: Vec<JobLine> = mine
            .map(|s| JobLine {
                id: s.record.id(),
                name: s.record.ask.name.clone(),
                dataset: s.record.dataset.clone(),
                root: s.record.root,
            })
            .collect();
        lines.sort_by(|a, b| a.name.cmp(&b.name));
        lines
    }

    /// A declared job, opened. `sources` and `source` are the ways to its bytes.
    ///
    /// # Errors
    /// [`JobError`].
    pub async fn get(
        &self,
        domain: &Domain,
        tenant: &Tenant,
        id: &str,
        sources: &Arc<Sources>,
        source: &Arc<Source>,
    ) -> Result<Arc<Opened>, JobError> {
        let slot = self.slot(domain, tenant, id)?;
        let opened = slot
            .opened
            .get_or_try_init(|| async {
                let opened = self.open_record(slot.record.clone(), sources, source).await?;
                Ok::<_, JobError>(Arc::new(opened))
            })
            .await?;
        Ok(Arc::clone(opened))
    }

    /// A job that is open already.
    ///
    /// # Errors
    /// [`JobError::NotFound`].
    pub fn opened(
        &self,
        domain: &Domain,
        tenant: &Tenant,
        id: &str,
    ) -> Result<Option<Arc<Opened>>, JobError> {
        Ok(self.slot(domain, tenant, id)?.opened.get().cloned())
    }

    /// Closes a job whose way to its bytes is gone; the next request opens it anew.
    pub async fn close(&self, id: &str, stale: &Arc<Opened>) {
        // Its files first: nobody opens them anew while this one writes.
        stale.close().await;
        let mut slots = lock(&self.slots);
        let there = slots.get(id).and_then(|s| s.opened.get());
        if there.is_some_and(|there| Arc::ptr_eq(there, stale)) {
            let fresh = Slot { record: stale.record(), opened: OnceCell::new() };
            slots.insert(id.to_owned(), Arc::new(fresh));
        }
    }

    async fn open_record(
        &self,
        record: Record,
        sources: &Arc<Sources>,
        source: &Arc<Source>,
    ) -> Result<Opened, JobError> {
        let place = (record.domain.clone(), record.root, record.layout);
        let shared = Arc::clone(lock(&self.places).entry(place).or_default());
        let samples = {
            let mut weak = shared.samples.lock().await;
            match weak.upgrade() {
                Some(samples) => samples,
                None => {
                    let samples = Arc::new(Samples::load(source).await?);
                    *weak = Arc::downgrade(&samples);
                    samples
                }
            }
        };
        let wheel = match record.ask.order {
            OrderKind::Strict => None,
            OrderKind::Substitute => {
                let mut weak = shared.wheel.lock().await;
                match weak.upgrade() {
                    Some(wheel) => Some(wheel),
                    None => {
                        let wheel = Wheel::start(&self.means, sources, source, Arc::clone(&samples)).await;
                        *weak = Arc::downgrade(&wheel);
                        Some(wheel)
                    }
                }
            }
        };
        let dir = self.dir.join(record.id());
        Opened::open(record, dir, &self.means, Arc::clone(sources), Arc::clone(source), samples, wheel).await
    }

    /// Declares a job; whether it is new.
    ///
    /// # Errors
    /// [`JobError`]; nothing was declared.
    pub async fn declare(
        &self,
        domain: &Domain,
        tenant: &Tenant,
        ask: StartJob,
        sources: &Arc<Sources>,
        source: &Arc<Source>,
    ) -> Result<(Arc<Opened>, bool), JobError> {
        let id = Record::id_of(domain, tenant, ask.name.as_str());
        let _one = self.changing.lock().await;
        if lock(&self.slots).contains_key(&id) {
            let there = self.get(domain, tenant, &id, sources, source).await?;
            there.is(&ask)?;
            return Ok((there, false));
        }
        if lock(&self.slots).len() >= DECLARED_MAX {
            return Err(JobError::Full(format!("{DECLARED_MAX} jobs are declared, which is the limit")));
        }
        let record = Record {
            domain: domain.clone(),
            tenant: tenant.clone(),
            ask,
            dataset: source.dataset().clone(),
            root: source.version.root(),
            layout: source.version.layout(),
        };
        let opened = Arc::new(self.open_record(record.clone(), sources, source).await?);
        let (dir, written) = (self.dir.join(&id), record.clone());
        spawn_blocking(move || Opened::write(&dir, &written)).await.map_err(|_| JobError::Lost)??;
        let slot = Slot { record, opened: OnceCell::new_with(Some(Arc::clone(&opened))) };
        lock(&self.slots).insert(id, Arc::new(slot));
        Ok((opened, true))
    }

    /// Forgets a job and its ledgers.
    ///
    /// # Errors
    /// [`JobError::NotFound`], [`JobError::Io`].
    pub async fn delete(&self, domain: &Domain, tenant: &Tenant, id: &str) -> Result<(), JobError> {
        let _one = self.changing.lock().await;
        let slot = self.slot(domain, tenant, id)?;
        if let Some(opened) = slot.opened.get() {
            opened.close().await;
        }
        let (from, to) = (self.dir.join(id), self.dir.join(format!("gone-{id}")));
        let gone = spawn_blocking(move || {
            let failed = |error| JobError::Io { path: from.clone(), error };
            std::fs::rename(&from, &to).map_err(failed)?;
            std::fs::remove_dir_all(&to).map_err(failed)?;
            from.parent().map_or(Ok(()), |dir| std::fs::File::open(dir)?.sync_all()).map_err(failed)
        });
        lock(&self.slots).remove(id);
        gone.await.map_err(|_| JobError::Lost)?
    }

    fn wheels(&self) -> Vec<Arc<Wheel>> {
        let places: Vec<_> = lock(&self.places).values().cloned().collect();
        places.iter().filter_map(|p| p.wheel.try_lock().ok()?.upgrade()).collect()
    }

    fn all_opened(&self) -> Vec<Arc<Opened>> {
        lock(&self.slots).values().filter_map(|s| s.opened.get().cloned()).collect()
    }

    /// Housekeeping: leases whose time is over, changed shares, places that nobody reads.
    pub fn tick(&self, now_ns: u64) {
        self.all_opened().iter().for_each(|o| o.tick());
        self.wheels().iter().for_each(|w| w.tick(now_ns));
        let unused = |p: &Shared| p.samples.try_lock().is_ok_and(|s| s.strong_count() == 0);
        lock(&self.places).retain(|_, p| Arc::strong_count(p) > 1 || !unused(p));
    }

    /// The sweeps' numbers for the disk tier, of one dataset.
    #[must_use]
    pub fn sweeps_of(&self, domain: &Domain, dataset: &fletch_core::DatasetName) -> Vec<DatasetId> {
        let of = |w: &Arc<Wheel>| w.keeping.domain == *domain && w.source.dataset() == dataset;
        self.wheels().iter().filter(|w| of(w)).map(|w| w.keeping.number()).collect()
    }

    /// Numbers.
    #[must_use]
    pub fn stats(&self) -> RegistryStats {
        let declared = lock(&self.slots).len() as u64;
        RegistryStats {
            declared,
            epochs_open: self.all_opened().iter().map(|o| o.counts().1).sum(),
            wheels: self.wheels().iter().map(|w| w.standing()).collect(),
        }
    }
}
