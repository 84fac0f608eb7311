//! Which datasets were read lately: those divide the disk tier among them.
//!
//! Until jobs are measured the split is equal among datasets read in the last hour. Requests note
//! what they read; whoever owns the disk asks for the split when it has changed.
//!
//! Invariant (I6): at most [`VERSIONS_MAX`] versions are remembered. One more gets no share of
//! its own, only what the others leave.

use crate::{
    Disk,
    disk::{DatasetId, equal_split},
};
use fletch_core::Root;
use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Mutex, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::sync::Notify;

/// A dataset that nobody has read for so long is idle.
const IDLE_AFTER: Duration = Duration::from_secs(3600);
/// Versions remembered at once.
const VERSIONS_MAX: usize = 65_536;

/// Datasets, and the footprint each can use at most.
pub type Split = Vec<(DatasetId, Option<u64>)>;

#[derive(Debug)]
struct Reading {
    /// When it was last read, nanoseconds since the start.
    last: AtomicU64,
    /// The footprint of all its chunks, at most.
    footprint: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Shares {
    read: RwLock<HashMap<(DatasetId, Root), Reading>>,
    /// The split that was last given out.
    given: Mutex<Option<Split>>,
    /// What the tier could hold then, in footprints.
    capacity: AtomicU64,
    appeared: Notify,
}

/// What a tenant may have on disk, in bytes of its quota, and all its datasets with what each has there now.
pub type Bound = (u64, Vec<(DatasetId, u64)>);

/// The split with what tenants may have on disk: a tenant's datasets, idle ones too, divide its quota
/// equally, and none may use more than its part of it. Pure.
#[must_use]
pub fn bounded(split: Split, bounds: &[Bound]) -> Split {
    let mut of: BTreeMap<DatasetId, Option<u64>> = split.into_iter().collect();
    for (quota, datasets) in bounds {
        // An idle dataset wants what it has, and no more.
        let wants: Vec<_> =
            datasets.iter().map(|(id, has)| (*id, of.get(id).copied().unwrap_or(Some(*has)))).collect();
        for (id, part) in equal_split(*quota, &wants) {
            of.insert(id, Some(part));
        }
    }
    of.into_iter().collect()
}

/// What a disk can hold, in footprints.
fn capacity(disk: &Disk) -> u64 {
    disk.tier().map_or(0, |t| t.capacity())
}

/// Whether a disk that was divided when it could hold `then` is to be divided again. It holds more or less with the
/// length of what it keeps; a share that falls costs chunks, so that a little less is borne. Pure.
fn moved(then: u64, now: u64) -> bool {
    now > then.saturating_add(then / 1000) || now < then.saturating_sub(then / 50)
}

impl Shares {
    /// A version of a dataset is being read; its chunks occupy at most `footprint` on disk.
    pub fn note(&self, dataset: DatasetId, root: Root, footprint: u64, now_ns: u64) {
        let of = (dataset, root);
        if let Some(r) = self.read.read().unwrap_or_else(PoisonError::into_inner).get(&of) {
            r.last.fetch_max(now_ns, Relaxed);
            return;
        }
        let mut read = self.read.write().unwrap_or_else(PoisonError::into_inner);
        if read.len() < VERSIONS_MAX {
            read.entry(of).or_insert(Reading { last: AtomicU64::new(now_ns), footprint });
            self.appeared.notify_one();
        }
    }

    /// Waits until a version is read that was not remembered.
    pub async fn appeared(&self) {
        self.appeared.notified().await;
    }

    /// Forgets idle versions. The datasets that are left, if they are others than at the last call or `disk` can
    /// hold another amount than when it was divided: beyond the shares its room would be anybody's.
    pub fn changed(&self, disk: &Disk, now_ns: u64) -> Option<Split> {
        if moved(self.capacity.load(Relaxed), capacity(disk)) {
            self.repeat();
        }
        self.others(now_ns)
    }

    /// Forgets idle versions. The datasets that are left, if they are others than at the last call.
    fn others(&self, now_ns: u64) -> Option<Split> {
        let idle = u64::try_from(IDLE_AFTER.as_nanos()).unwrap_or(u64::MAX);
        let mut of: BTreeMap<DatasetId, u64> = BTreeMap::new();
        {
            let mut read = self.read.write().unwrap_or_else(PoisonError::into_inner);
            read.retain(|_, r| now_ns.saturating_sub(r.last.load(Relaxed)) < idle);
            for ((dataset, _), r) in read.iter() {
                let sum = of.entry(*dataset).or_default();
                *sum = sum.saturating_add(r.footprint);
            }
        }
        let split: Split = of.into_iter().map(|(d, n)| (d, Some(n))).collect();
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        (given.as_ref() != Some(&split)).then(|| given.insert(split).clone())
    }

    /// Gives a split out; without a tier it is said again.
    pub fn give(&self, disk: &Disk, split: &Split) {
        self.capacity.store(capacity(disk), Relaxed);
        match disk.share(split) {
            Some(0) => tracing::info!(datasets = split.len(), "the disk is divided anew"),
            Some(chunks) => {
                tracing::info!(
                    datasets = split.len(),
                    chunks,
                    "the disk is divided anew, chunks had to leave"
                );
            }
            None => self.repeat(),
        }
    }

    /// What was given out did not arrive: the next call of `changed` says it again.
    pub fn repeat(&self) {
        *self.given.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_core::Hash;

    #[test]
    fn a_tenants_datasets_divide_its_quota() {
        let d = DatasetId;
        let split = vec![(d(1), Some(100)), (d(2), None), (d(9), Some(500))];
        let bounds = [(90, vec![(d(1), 5), (d(2), 80), (d(3), 40)])];
        let want = vec![(d(1), Some(30)), (d(2), Some(30)), (d(3), Some(30)), (d(9), Some(500))];
        assert_eq!(bounded(split.clone(), &bounds), want, "an idle dataset counts, too");
        assert_eq!(bounded(split.clone(), &[(90, vec![(d(1), 5), (d(4), 0)])])[..1], [(d(1), Some(90))]);
        assert_eq!(bounded(split.clone(), &[]), split);
    }

    const HOUR: u64 = 3_600_000_000_000;

    #[test]
    fn a_disk_that_holds_more_is_divided_again_and_one_that_holds_a_little_less_is_not() {
        assert!(moved(0, 1) && moved(1_000_000, 1_001_001) && moved(1_000_000, 979_999));
        assert!(!moved(0, 0) && !moved(1_000_000, 1_001_000) && !moved(1_000_000, 980_000));
        // There and back again, as with records whose mean length swings about a bound: once.
        assert!(moved(980_000, 1_000_000) && !moved(1_000_000, 980_000));
    }

    #[test]
    fn datasets_come_with_their_first_read_and_go_an_hour_after_their_last() {
        let s = Shares::default();
        let (a, b, root) = (DatasetId(1), DatasetId(2), |n: u8| Root(Hash::of(&[n])));
        assert_eq!(s.others(0), Some(vec![]));
        s.note(a, root(1), 100, 5);
        assert_eq!(s.others(6), Some(vec![(a, Some(100))]));
        s.note(a, root(1), 100, 7);
        assert_eq!(s.others(8), None, "nothing new");
        // Another version of it, and another dataset.
        s.note(a, root(2), 50, 10);
        s.note(b, root(3), 7, HOUR);
        assert_eq!(s.others(HOUR), Some(vec![(a, Some(150)), (b, Some(7))]));
        assert_eq!(s.others(HOUR + 8), Some(vec![(a, Some(50)), (b, Some(7))]), "one version is idle");
        assert_eq!(s.others(HOUR + 10), Some(vec![(b, Some(7))]));
        // A clock that steps back forgets nobody.
        s.note(b, root(3), 7, 3);
        assert_eq!(s.others(1), None);
        s.repeat();
        assert_eq!(s.others(1), Some(vec![(b, Some(7))]));
    }
}
