//! Counters of a caller, to which an origin adds the bytes that it receives for that caller.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// Counters of a caller, in bytes received.
///
/// Bytes of answers that are then rejected count, as in [`crate::OriginStats::bytes_read`]. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Meter(Arc<[Arc<AtomicU64>]>);

impl Meter {
    /// Returns a meter that adds to each of these counters.
    #[must_use]
    pub fn new(counters: impl IntoIterator<Item = Arc<AtomicU64>>) -> Self {
        Meter(counters.into_iter().collect())
    }

    pub(crate) fn read(&self, bytes: u64) {
        for counter in self.0.iter() {
            counter.fetch_add(bytes, Relaxed);
        }
    }
}
