//! Bytes of the state directory that tenants use: the records of their jobs, and the ledgers of their epochs.
//!
//! Each file has a [`FileCharge`] that follows its length. A charge that is dropped gives its bytes back. So
//! the sums stay exact, whatever opens, replaces or deletes a file. A start reads the lengths from the disk.

use super::FairPermit;
use fletch_core::Tenant;
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
};

/// The bytes of every tenant.
#[derive(Debug, Default)]
pub struct StateBytes {
    tenants: Mutex<HashMap<Tenant, Arc<AtomicU64>>>,
}

/// The bytes of one file.
#[derive(Debug)]
pub struct FileCharge {
    sum: Arc<AtomicU64>,
    bytes: AtomicU64,
}

/// What one declared job uses of its tenant's limits: its place, its record and its ledgers.
#[derive(Debug)]
pub struct JobCharges {
    sum: Arc<AtomicU64>,
    record: FileCharge,
    ledgers: Mutex<BTreeMap<u64, Arc<FileCharge>>>,
    _place: FairPermit,
}

impl StateBytes {
    fn sum(&self, tenant: &Tenant) -> Arc<AtomicU64> {
        let mut tenants = self.tenants.lock();
        Arc::clone(tenants.entry(tenant.clone()).or_default())
    }

    /// Returns the bytes that a tenant uses.
    #[must_use]
    pub fn used(&self, tenant: &Tenant) -> u64 {
        let tenants = self.tenants.lock();
        tenants.get(tenant).map_or(0, |sum| sum.load(SeqCst))
    }

    /// Returns the charges of a job that uses no bytes yet.
    #[must_use]
    pub fn job(&self, tenant: &Tenant, place: FairPermit) -> Arc<JobCharges> {
        let sum = self.sum(tenant);
        let record = FileCharge::new(&sum);
        Arc::new(JobCharges { sum, record, ledgers: Mutex::default(), _place: place })
    }
}

impl FileCharge {
    fn new(sum: &Arc<AtomicU64>) -> Self {
        FileCharge { sum: Arc::clone(sum), bytes: AtomicU64::new(0) }
    }

    /// Sets the length of the file.
    pub fn set(&self, bytes: u64) {
        let before = self.bytes.swap(bytes, SeqCst);
        // Wrapping sums are exact: every addition has its subtraction.
        self.sum.fetch_add(bytes.wrapping_sub(before), SeqCst);
    }

    /// Returns the length of the file.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(SeqCst)
    }
}

impl Drop for FileCharge {
    fn drop(&mut self) {
        self.sum.fetch_sub(*self.bytes.get_mut(), SeqCst);
    }
}

impl JobCharges {
    /// Returns the charge of the job's record.
    #[must_use]
    pub fn record(&self) -> &FileCharge {
        &self.record
    }

    /// Returns the charge of an epoch's ledger.
    #[must_use]
    pub fn ledger(&self, epoch: u64) -> Arc<FileCharge> {
        let mut ledgers = self.ledgers.lock();
        Arc::clone(ledgers.entry(epoch).or_insert_with(|| Arc::new(FileCharge::new(&self.sum))))
    }

    /// Forgets a ledger that was deleted.
    pub fn forget(&self, epoch: u64) {
        let gone = self.ledgers.lock().remove(&epoch);
        if let Some(gone) = gone {
            gone.set(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenancy::tenants::FairPermits;

    #[test]
    fn sums_follow_the_files() {
        let (all, places) = (StateBytes::default(), FairPermits::new(10, 1));
        let tenant = Tenant::new("t").expect("a name");
        let place = || places.try_acquire(&tenant, 1).expect("a place");
        let (one, two) = (all.job(&tenant, place()), all.job(&tenant, place()));
        one.record().set(100);
        two.record().set(7);
        let ledger = one.ledger(0);
        ledger.set(50);
        ledger.set(1_050);
        one.ledger(1).set(3);
        assert_eq!(all.used(&tenant), 1_160);
        ledger.set(20);
        one.ledger(0).set(30);
        assert_eq!(all.used(&tenant), 140);
        one.forget(0);
        assert_eq!((all.used(&tenant), places.used()), (110, 2));
        // A ledger that is deleted while it is still open.
        ledger.set(9);
        assert_eq!(all.used(&tenant), 119);
        drop((ledger, one));
        assert_eq!((all.used(&tenant), places.used()), (7, 1));
        drop(two);
        assert_eq!((all.used(&tenant), places.used()), (0, 0));
    }
}
