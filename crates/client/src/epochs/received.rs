//! What was received, added up: the client's side of a receipt.

use super::LeasedSample;
use fletch_api::EpochReceipt;
use fletch_core::{
    Hash, Root,
    order::receipt::{Delivery, LtHash, content},
};

/// A sum over received bytes. Sums of ranks, and of what a process had written down before it died, add up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    root: Root,
    value: LtHash,
    delivered: u64,
}

impl Received {
    /// Nothing of a version.
    #[must_use]
    pub fn new(root: Root) -> Self {
        Received { root, value: LtHash::default(), delivered: 0 }
    }

    /// Adds a consumed sample, by the bytes that it has now: they are hashed here.
    pub fn add(&mut self, sample: &LeasedSample) {
        let hashes: Vec<Hash> = sample.files().map(|(_, bytes)| Hash::of(&bytes)).collect();
        self.add_delivery(&Delivery {
            ordinal: sample.ordinal,
            content: content(&hashes),
            copy: sample.copy,
        });
    }

    /// Adds what was written down of a consumed sample.
    pub fn add_delivery(&mut self, delivery: &Delivery) {
        self.value.add(self.root, delivery);
        self.delivered += 1;
    }

    /// Adds another sum over the same version.
    pub fn merge(&mut self, other: &Received) {
        self.value.merge(&other.value);
        self.delivered += other.delivered;
    }

    /// How many samples were added.
    #[must_use]
    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// The sum.
    #[must_use]
    pub fn value(&self) -> &LtHash {
        &self.value
    }

    /// Whether exactly what the plan says was received.
    #[must_use]
    pub fn agrees(&self, receipt: &EpochReceipt) -> bool {
        self.root == receipt.receipt.root && receipt.receipt.agrees(self.delivered, &self.value)
    }
}
