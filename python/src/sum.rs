//! The sum that proves an epoch: what was received, by the hashes that the bytes had.
//!
//! Invariant: a lease is in the sum once, when the consumer says so.

use crate::errors::Failure;
use fletch_api::EpochReceipt;
use fletch_client::epochs::LeasedSample;
use fletch_core::delivery::receipt::{Delivery, LtHash};
use fletch_core::{Hash, Root};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Bytes of a delivery as it travels from a worker to the process that steps.
const DELIVERY_BYTES: usize = 8 + 32 + 4;

/// What a received sample adds to a receipt, by the hashes that the bytes had when they came here.
pub fn delivery(sample: &LeasedSample) -> impl Iterator<Item = u8> + use<> {
    let Delivery { ordinal, content, copy } = sample.delivery_as_received();
    let mut out = Vec::with_capacity(DELIVERY_BYTES);
    out.extend_from_slice(&ordinal.to_le_bytes());
    out.extend_from_slice(content.as_bytes());
    out.extend_from_slice(&copy.to_le_bytes());
    out.into_iter()
}

/// What was consumed, added up: the consumer's side of a receipt.
#[pyclass(module = "fletch._native")]
#[derive(Debug)]
pub struct Sum {
    root: Root,
    value: LtHash,
    delivered: u64,
}

#[pymethods]
impl Sum {
    #[new]
    fn new(root: &str) -> PyResult<Self> {
        let root: Root = root.parse().map_err(|e| Failure::Invalid(format!("root: {e}")))?;
        Ok(Sum { root, value: LtHash::default(), delivered: 0 })
    }

    /// Adds deliveries as `Reader.next` told them.
    fn add(&mut self, deliveries: &[u8]) -> PyResult<()> {
        if !deliveries.len().is_multiple_of(DELIVERY_BYTES) {
            return Err(Failure::Invalid("deliveries are 44 bytes each".into()).into());
        }
        for d in deliveries.chunks_exact(DELIVERY_BYTES) {
            let (mut ordinal, mut hash, mut copy) = ([0; 8], [0; 32], [0; 4]);
            ordinal.copy_from_slice(&d[..8]);
            hash.copy_from_slice(&d[8..40]);
            copy.copy_from_slice(&d[40..]);
            let (ordinal, copy) = (u64::from_le_bytes(ordinal), u32::from_le_bytes(copy));
            self.value.add(self.root, &Delivery { ordinal, content: Hash(hash), copy });
            self.delivered += 1;
        }
        Ok(())
    }

    /// Adds another rank's sum, as its `bytes` has it.
    fn merge(&mut self, other: &[u8]) -> PyResult<()> {
        let read = other.split_first_chunk::<8>().and_then(|(n, v)| Some((*n, LtHash::from_bytes(v)?)));
        let (delivered, value) = read.ok_or_else(|| Failure::Invalid("this is no sum of an epoch".into()))?;
        self.value.merge(&value);
        self.delivered += u64::from_le_bytes(delivered);
        Ok(())
    }

    /// The sum, for another process.
    fn bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &[&self.delivered.to_le_bytes()[..], &self.value.to_bytes()].concat())
    }

    /// How many samples were added.
    #[getter]
    fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Whether exactly what the plan says was received.
    fn agrees(&self, receipt: &str) -> PyResult<bool> {
        let said: EpochReceipt =
            serde_json::from_str(receipt).map_err(|e| Failure::Invalid(format!("receipt: {e}")))?;
        Ok(said.receipt.root == self.root && said.receipt.agrees(self.delivered, &self.value))
    }
}
