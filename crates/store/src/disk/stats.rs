//! What a tier counted.

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
    /// Bytes that they read: of a chunk, or of a part.
    hit_bytes,
    /// Reads that did not.
    misses,
    /// Chunks that were kept.
    puts,
    /// Bytes of those.
    put_bytes,
    /// Chunks that were not kept because their dataset's share is full.
    refused_share,
    /// Chunks that were not kept for any other reason.
    refused_full,
    /// Chunks that left to make room, because a share shrank, or on request.
    evicted,
    /// Footprints of those.
    evicted_bytes,
    /// Records that turned out damaged: wrong bytes, a header or a file that ends early.
    quarantined,
    /// Slabs whose file was gone.
    slabs_lost,
    /// Operations on files that failed.
    errors,
    /// Times the tier was turned off.
    turned_off,
    /// Bytes copied to compact slabs.
    compacted_bytes,
    /// Bytes given back by punching holes.
    punched_bytes,
    /// Slabs unlinked.
    slabs_unlinked,
    /// Bytes that scrubbing has read.
    scrubbed_bytes,
    /// Times the catalogue was begun anew.
    catalogue_rebuilds,
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// One dataset's part of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DatasetUsage {
    /// Which dataset.
    pub dataset: super::DatasetId,
    /// Footprints of its chunks, and of those on their way to the disk.
    pub bytes: u64,
    /// How many chunks it has.
    pub chunks: u64,
    /// Its share, if it was given one.
    pub share: Option<u64>,
}

/// A snapshot of a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskStats {
    /// What was counted.
    pub counts: Counts,
    /// Chunks that are there.
    pub chunks: u64,
    /// Footprints of those: payload in whole lines of 64 bytes, and 256 bytes each.
    pub bytes: u64,
    /// What the directory may occupy.
    pub limit: u64,
    /// What footprints may add up to; shares are parts of this.
    pub capacity: u64,
    /// Slab files.
    pub slabs: u64,
    /// What slab files have taken of the limit.
    pub slab_bytes: u64,
    /// Chunks protected from eviction.
    pub pinned: u64,
    /// What the index holds in memory.
    pub index_bytes: u64,
    /// Datasets that have chunks or a share.
    pub datasets: Vec<DatasetUsage>,
}

/// What the directory occupies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectoryUsage {
    /// Everything under the directory, as `du` counts it: slabs, catalogue, temporary files.
    pub du: u64,
    /// Of that, the catalogue and damaged ones that were set aside.
    pub catalogue: u64,
    /// Files that are open here but have no name any more.
    pub unlinked: u64,
    /// What the tier has taken of the limit; never less than what slabs occupy.
    pub taken: u64,
}
