//! Sums what a client received, and compares the sum with the receipt of the epoch.

use super::LeasedSample;
use fletch_api::EpochReceipt;
use fletch_core::{
    Root,
    delivery::{
        consumption_log,
        receipt::{Delivery, LtHash},
    },
};

/// The sum over all samples that a client received of one version.
///
/// Sums of several ranks add up, and so does a sum that a process wrote down before it died.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedSum {
    root: Root,
    value: LtHash,
    delivered: u64,
}

impl ReceivedSum {
    /// Returns the empty sum for a version.
    #[must_use]
    pub fn new(root: Root) -> Self {
        ReceivedSum { root, value: LtHash::default(), delivered: 0 }
    }

    /// Adds a consumed sample. Hashes its bytes as they are now.
    pub fn add(&mut self, sample: &LeasedSample) {
        self.add_delivery(&sample.delivery());
    }

    /// Adds a consumed sample by its delivery, as a consumption log records it.
    pub fn add_delivery(&mut self, delivery: &Delivery) {
        self.value.add(self.root, delivery);
        self.delivered += 1;
    }

    /// Adds another sum over the same version.
    pub fn merge(&mut self, other: &ReceivedSum) {
        self.value.merge(&other.value);
        self.delivered += other.delivered;
    }

    /// Returns the number of samples in the sum.
    #[must_use]
    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Returns the value of the sum.
    #[must_use]
    pub fn value(&self) -> &LtHash {
        &self.value
    }

    /// Returns the sum as the text of a whole consumption log.
    #[must_use]
    pub fn log(&self, epoch: u64) -> String {
        format!(
            "{}\n{}\n",
            consumption_log::head(self.root, epoch),
            consumption_log::sum(self.delivered, &self.value)
        )
    }

    /// Returns whether the client received exactly what the receipt's plan says.
    #[must_use]
    pub fn agrees(&self, receipt: &EpochReceipt) -> bool {
        self.root == receipt.receipt.root && receipt.receipt.agrees(self.delivered, &self.value)
    }
}
