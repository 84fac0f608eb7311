//! Counts the objects of each dataset that changed since its index, as far as readers met them.
//!
//! A changed object makes its file fail, not the origin. The count is for people: `fletch refresh` indexes
//! the changed objects. It is soft: a restart forgets it, and the next read of a changed object counts again.

use crate::tenancy::state::RegistrationHandle;
use fletch_core::{DatasetName, Domain, Root};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

/// The most changed objects of a dataset that are counted.
const OBJECTS_MAX: usize = 10_000;
/// The most datasets of which something is remembered.
const DATASETS_MAX: usize = 65_536;

#[derive(Debug)]
struct DatasetChanges {
    registered: Arc<RegistrationHandle>,
    /// The version that the tag `latest` named last, if somebody resolved it.
    latest: Option<Root>,
    /// The names of the objects.
    objects: HashSet<Arc<str>>,
}

/// The changed objects of all datasets.
#[derive(Debug, Default)]
pub struct ChangedObjects(Mutex<BTreeMap<(Domain, DatasetName), DatasetChanges>>);

impl ChangedObjects {
    fn all(&self) -> MutexGuard<'_, BTreeMap<(Domain, DatasetName), DatasetChanges>> {
        self.0.lock()
    }

    fn with<T>(
        &self,
        registered: &Arc<RegistrationHandle>,
        change: impl FnOnce(&mut DatasetChanges) -> T,
    ) -> Option<T> {
        let mut all = self.all();
        let key = (registered.domain.clone(), registered.dataset.name.clone());
        if !all.contains_key(&key) && all.len() >= DATASETS_MAX {
            all.retain(|_, of| of.registered.is_registered());
            if all.len() >= DATASETS_MAX {
                return None;
            }
        }
        let new =
            || DatasetChanges { registered: Arc::clone(registered), latest: None, objects: HashSet::new() };
        let of = all.entry(key).or_insert_with(new);
        if !Arc::ptr_eq(&of.registered, registered) {
            *of = new();
        }
        Some(change(of))
    }

    /// Records that an object of a version changed. An object of an older version than `latest` is not
    /// counted: the dataset was indexed again.
    pub(super) fn add(&self, registered: &Arc<RegistrationHandle>, root: Root, object: &str) {
        self.with(registered, |of| {
            if of.latest.is_none_or(|latest| latest == root) && of.objects.len() < OBJECTS_MAX {
                of.objects.insert(object.into());
            }
        });
    }

    /// Returns whether an object is counted.
    pub(super) fn contains(&self, registered: &RegistrationHandle, object: &str) -> bool {
        let key = (registered.domain.clone(), registered.dataset.name.clone());
        self.all().get(&key).is_some_and(|of| of.objects.contains(object))
    }

    /// Records that an object has the indexed bytes again.
    pub(super) fn remove(&self, registered: &RegistrationHandle, object: &str) {
        let key = (registered.domain.clone(), registered.dataset.name.clone());
        if let Some(of) = self.all().get_mut(&key) {
            of.objects.remove(object);
        }
    }

    /// Records the version that `latest` names. A new one forgets the objects of the old one.
    pub(super) fn resolved(&self, registered: &Arc<RegistrationHandle>, latest: Root) {
        self.with(registered, |of| {
            if of.latest.replace(latest).is_some_and(|before| before != latest) {
                of.objects.clear();
            }
        });
    }

    /// Forgets the objects of a dataset, after it was registered again.
    pub fn forget(&self, domain: &Domain, dataset: &DatasetName) {
        self.all().remove(&(domain.clone(), dataset.clone()));
    }

    /// Returns the number of changed objects of each registered dataset that has any. At most
    /// [`OBJECTS_MAX`] are counted.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<(Domain, DatasetName), u64> {
        let all = self.all();
        let some = all.iter().filter(|(_, of)| of.registered.is_registered() && !of.objects.is_empty());
        some.map(|(key, of)| (key.clone(), of.objects.len() as u64)).collect()
    }
}
