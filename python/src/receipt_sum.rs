//! The sum of received samples, by the hashes of their bytes. An epoch's receipt is compared with it.
//!
//! Invariant: a lease is in the sum once, after the consumer added it.

use crate::errors::Failure;
use fletch_api::EpochReceipt;
use fletch_client::epochs::LeasedSample;
use fletch_core::delivery::receipt::{Delivery, LtHash};
use fletch_core::{Hash, Root};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// The bytes of a delivery on its way from a worker to the training process.
const DELIVERY_BYTES: usize = 8 + 32 + 4;

/// Returns the part of a receipt of a received sample, by the hashes of its bytes when they arrived.
pub fn delivery(sample: &LeasedSample) -> impl Iterator<Item = u8> + use<> {
    let Delivery { ordinal, content, copy } = sample.delivery_as_received();
    let mut out = Vec::with_capacity(DELIVERY_BYTES);
    out.extend_from_slice(&ordinal.to_le_bytes());
    out.extend_from_slice(content.as_bytes());
    out.extend_from_slice(&copy.to_le_bytes());
    out.into_iter()
}

/// The receipt sum of the samples that a consumer received.
#[pyclass(module = "fletch._native")]
#[derive(Debug)]
pub struct ReceiptSum {
    root: Root,
    value: LtHash,
    delivered: u64,
}

#[pymethods]
impl ReceiptSum {
    #[new]
    fn new(root: &str) -> PyResult<Self> {
        let root: Root = root.parse().map_err(|e| Failure::Invalid(format!("root: {e}")))?;
        Ok(ReceiptSum { root, value: LtHash::default(), delivered: 0 })
    }

    /// Adds deliveries, in the form that `Reader.next` returns.
    fn add(&mut self, deliveries: &[u8]) -> PyResult<()> {
        if !deliveries.len().is_multiple_of(DELIVERY_BYTES) {
            return Err(Failure::Invalid(format!(
                "{} bytes are not deliveries of 44 bytes each",
                deliveries.len()
            ))
            .into());
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

    /// Adds another rank's sum, in the form that `bytes` returns.
    fn merge(&mut self, other: &[u8]) -> PyResult<()> {
        let read = other.split_first_chunk::<8>().and_then(|(n, v)| Some((*n, LtHash::from_bytes(v)?)));
        let (delivered, value) =
            read.ok_or_else(|| Failure::Invalid(format!("{} bytes are not a receipt sum", other.len())))?;
        self.value.merge(&value);
        self.delivered += u64::from_le_bytes(delivered);
        Ok(())
    }

    /// The sum as 2,056 bytes, for another process.
    fn bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &[&self.delivered.to_le_bytes()[..], &self.value.to_bytes()].concat())
    }

    /// The number of samples that were added.
    #[getter]
    fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Whether the sum is exactly that of the receipt's plan.
    fn agrees(&self, receipt: &str) -> PyResult<bool> {
        let said: EpochReceipt =
            serde_json::from_str(receipt).map_err(|e| Failure::Invalid(format!("receipt: {e}")))?;
        Ok(said.receipt.root == self.root && said.receipt.agrees(self.delivered, &self.value))
    }
}
