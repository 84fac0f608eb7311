//! What was received, added up: the client's side of a receipt.

use super::{LeaseBatch, LeasedSample};
use fletch_api::EpochReceipt;
use fletch_core::{
    Hash, Root,
    delivery::{
        consumption_log::{self, ConsumptionRecord},
        receipt::{Delivery, LtHash, content},
    },
};
use std::fmt::Write as _;

impl LeasedSample {
    /// What it adds to a receipt, by the bytes that it has now: they are hashed here.
    #[must_use]
    pub fn delivery(&self) -> Delivery {
        let hashes: Vec<Hash> = self.files().map(|(_, bytes)| Hash::of(&bytes)).collect();
        Delivery { ordinal: self.ordinal, content: content(&hashes), copy: self.copy }
    }

    /// The same of a sample that a reader handed out and nobody changed, without hashing its bytes again: they had the
    /// hashes of its heads when they came, or it would not have been handed out.
    #[must_use]
    pub fn delivery_as_received(&self) -> Delivery {
        let hashes: Vec<Hash> = self.heads.iter().map(|f| f.hash).collect();
        Delivery { ordinal: self.ordinal, content: content(&hashes), copy: self.copy }
    }
}

impl LeaseBatch {
    /// Lines for a file of notes (`docs/FORMATS-epochs.md`), one a sample, to be durable before the batch is
    /// acknowledged. Such a file begins with the line [`consumption_log::head`].
    #[must_use]
    pub fn notes(&self) -> String {
        let mut text = String::new();
        for (place, sample) in (0..).zip(&self.samples) {
            let note = ConsumptionRecord { delivery: sample.delivery(), at: Some((self.token.lease, place)) };
            // Writing to a text cannot fail.
            let _ = writeln!(text, "{note}");
        }
        text
    }
}

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
        self.add_delivery(&sample.delivery());
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

    /// The sum as a whole file of notes.
    #[must_use]
    pub fn notes(&self, epoch: u64) -> String {
        format!(
            "{}\n{}\n",
            consumption_log::head(self.root, epoch),
            consumption_log::sum(self.delivered, &self.value)
        )
    }

    /// Whether exactly what the plan says was received.
    #[must_use]
    pub fn agrees(&self, receipt: &EpochReceipt) -> bool {
        self.root == receipt.receipt.root && receipt.receipt.agrees(self.delivered, &self.value)
    }
}
