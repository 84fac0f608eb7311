//! Counters and sizes of the disk tier.

use crate::dataset_id::DatasetId;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters since the tier was opened.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct Counts {
            $($(#[$doc])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub $name: AtomicU64,)*
        }

        impl Counters {
            pub fn snapshot(&self) -> Counts {
                Counts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Reads that found their chunk.
    hits,
    /// Bytes that those reads returned, of whole chunks or of parts.
    hit_bytes,
    /// Reads that did not find their chunk.
    misses,
    /// Chunks written.
    puts,
    /// Bytes of those chunks.
    put_bytes,
    /// Chunks refused because the share of their dataset was full.
    refused_share,
    /// Chunks refused for any other reason.
    refused_full,
    /// Chunks evicted: for a newcomer, because a share shrank, or on request.
    evicted,
    /// Footprints of those chunks.
    evicted_bytes,
    /// Damaged records: wrong bytes, or a header or file that ends early.
    quarantined,
    /// Slabs whose file was gone.
    slabs_lost,
    /// Failed file operations.
    errors,
    /// Times that the tier was turned off.
    turned_off,
    /// Bytes copied to compact slabs.
    compacted_bytes,
    /// Bytes given back by punching holes.
    punched_bytes,
    /// Slabs unlinked.
    slabs_unlinked,
    /// Bytes read by scrubbing.
    scrubbed_bytes,
    /// Times that the catalogue was rebuilt.
    catalogue_rebuilds,
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// What one dataset uses of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DatasetUsage {
    /// The dataset.
    pub dataset: DatasetId,
    /// The dataset of the plain readers with which it shares chunks: itself, unless it is a sweep.
    pub plain: DatasetId,
    /// Footprints of its chunks, chunks that are being written included.
    pub bytes: u64,
    /// Footprints of chunks that count as those of sweeps, and that plain readers use too.
    pub shared_bytes: u64,
    /// Footprints of its chunks that it keeps only until the datasets with which it shares chunks need room.
    pub spare_bytes: u64,
    /// Number of its chunks.
    pub chunks: u64,
    /// Its share, if it has one.
    pub share: Option<u64>,
}

/// A snapshot of a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskStats {
    /// The counters.
    pub counts: Counts,
    /// Chunks in the tier.
    pub chunks: u64,
    /// Footprints of those chunks: each its payload in lines of 64 bytes, and 256 bytes.
    pub bytes: u64,
    /// Bytes that the directory may occupy.
    pub limit: u64,
    /// Footprints that the tier can hold. Shares divide this.
    pub capacity: u64,
    /// Slab files.
    pub slabs: u64,
    /// Bytes of the limit that slab files have reserved.
    pub slab_bytes: u64,
    /// Pinned chunks.
    pub pinned: u64,
    /// Bytes that the index occupies in memory.
    pub index_bytes: u64,
    /// Datasets that have chunks or a share.
    pub datasets: Vec<DatasetUsage>,
}

/// What the directory occupies, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectoryUsage {
    /// Everything in the directory, as `du` counts it: slabs, catalogue, temporary files.
    pub du: u64,
    /// The part of `du` that is the catalogue, and damaged catalogues that were kept aside.
    pub catalogue: u64,
    /// Files that are open in this process and have no name any more.
    pub unlinked: u64,
    /// Bytes of the limit that the tier has reserved; never less than its slabs occupy.
    pub taken: u64,
}
