//! The number of a dataset, under which the disk tier counts its chunks.
//!
//! Slab records hold this number (`docs/FORMATS-slab.md`), so it must be the same after every restart.

use fletch_core::{DatasetName, Domain, LayoutId, Root};

/// Context of the hash that gives a dataset its number.
const DATASET_CONTEXT: &str = "fletch 2026 dataset number 1";
/// Context of the hash that gives a sweep its number.
const SWEEP_CONTEXT: &str = "fletch 2026 sweep number 1";

/// The dataset that a chunk was fetched for. Only equality matters.
///
/// A chunk that several datasets contain belongs to the dataset that fetched it first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DatasetId(pub u64);

impl DatasetId {
    /// The dataset of reads whose chunks are never kept on disk.
    pub const UNCACHED: DatasetId = DatasetId(0);

    /// Returns the number of a domain's dataset: the first eight bytes of a hash of both names.
    #[must_use]
    pub fn of(domain: &Domain, dataset: &DatasetName) -> Self {
        let mut h = blake3::Hasher::new_derive_key(DATASET_CONTEXT);
        // No name has a zero byte.
        h.update(domain.as_str().as_bytes()).update(&[0]).update(dataset.as_str().as_bytes());
        Self::first_bytes(&h)
    }

    /// Returns the number under which a sweep over one version in one layout keeps its chunks.
    ///
    /// The sweep has a share of its own, beside the share of the dataset's plain readers.
    #[must_use]
    pub fn sweep_of(domain: &Domain, dataset: &DatasetName, root: Root, layout: LayoutId) -> Self {
        let mut h = blake3::Hasher::new_derive_key(SWEEP_CONTEXT);
        h.update(domain.as_str().as_bytes()).update(&[0]).update(dataset.as_str().as_bytes()).update(&[0]);
        h.update(root.0.as_bytes()).update(layout.0.as_bytes());
        Self::first_bytes(&h)
    }

    fn first_bytes(h: &blake3::Hasher) -> Self {
        let mut first = [0; 8];
        h.finalize_xof().fill(&mut first);
        DatasetId(u64::from_le_bytes(first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datasets_number_never_changes() {
        let of = |d: &str, n: &str| {
            DatasetId::of(&Domain::new(d).expect("name"), &DatasetName::new(n).expect("name"))
        };
        assert_eq!(of("default", "images").0, 283_200_182_055_979_889);
        assert_ne!(of("ab", "c"), of("a", "bc"));
        assert_ne!(of("default", "images"), of("other", "images"), "I7");
    }
}
