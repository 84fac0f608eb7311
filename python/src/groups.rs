//! Which chunks are read by groups, and the hashes by which this process checks these.
//!
//! A small range of a long chunk is read with the groups of 16 KiB that have it. Their hashes are asked for
//! once a chunk. They prove nothing before they make the chunk's name, so it does not matter who sent them.

use crate::fetch::OpenVersion;
use fletch_core::Hash;
use fletch_core::groups::{GROUPED_BYTES_MIN, GroupHashes, group_hash_bytes};
use futures::{StreamExt as _, stream};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use tokio::time::Instant;

/// A chunk of which one of so many parts is wanted, at once or one range after the other, is read whole.
const PART_MIN: u64 = 4;
/// The most chunks whose hashes are kept: a few MB of hashes.
const CHUNKS_MAX: usize = 512;
/// How many chunks' hashes are asked for at once.
const AT_ONCE: usize = 8;

/// What a process knows of chunks that it reads in parts.
#[derive(Debug, Clone, Default)]
pub struct KnownGroups(Arc<Mutex<HashMap<Hash, Known>>>);

#[derive(Debug)]
struct Known {
    groups: Arc<GroupHashes>,
    used: Instant,
    /// The bytes that readers read in a row, the last time.
    row: Range<u64>,
}

/// The ranges that one call wants of a chunk.
#[derive(Debug)]
pub struct Wanted {
    /// The chunk's length in bytes.
    pub len: u32,
    /// From the first byte of the first range to the end of the last one.
    pub within: Range<u64>,
    /// The bytes of all ranges together.
    pub bytes: u64,
}

impl Wanted {
    fn is_small(&self, bytes: u64) -> bool {
        self.len >= GROUPED_BYTES_MIN && bytes * PART_MIN < u64::from(self.len)
    }
}

impl KnownGroups {
    /// Returns the hashes of the chunks that are to be read by groups. The others are to be read whole.
    pub async fn of(
        &self,
        open: &OpenVersion,
        mut wanted: HashMap<Hash, Wanted>,
        until: Instant,
    ) -> HashMap<Hash, Arc<GroupHashes>> {
        let mut found = HashMap::new();
        wanted.retain(|chunk, wanted| match self.known(*chunk, wanted) {
            Some(Some(groups)) => {
                found.insert(*chunk, groups);
                false
            }
            Some(None) => false,
            None => wanted.is_small(wanted.bytes),
        });
        let asked = wanted.into_iter().map(|(chunk, wanted)| ask(open, chunk, wanted, until));
        let mut asked = stream::iter(asked).buffer_unordered(AT_ONCE);
        while let Some(answer) = asked.next().await {
            if let Some((groups, row)) = answer {
                found.insert(groups.chunk(), Arc::clone(&groups));
                self.keep(Known { groups, used: Instant::now(), row });
            }
        }
        found
    }

    /// Returns the hashes of a chunk, or the inner `None` if so much of it is read that all of it should be.
    fn known(&self, chunk: Hash, wanted: &Wanted) -> Option<Option<Arc<GroupHashes>>> {
        let mut all = self.0.lock();
        let known = all.get_mut(&chunk)?;
        known.used = Instant::now();
        let goes_on = (known.row.start..=known.row.end).contains(&wanted.within.start);
        known.row = match goes_on {
            true => known.row.start..known.row.end.max(wanted.within.end),
            false => wanted.within.clone(),
        };
        let in_a_row = if goes_on { known.row.end - known.row.start } else { 0 };
        Some(wanted.is_small(wanted.bytes.max(in_a_row)).then(|| Arc::clone(&known.groups)))
    }

    /// Keeps the hashes of a chunk, instead of those that were not used for the longest time.
    fn keep(&self, known: Known) {
        let mut all = self.0.lock();
        if all.len() >= CHUNKS_MAX
            && let Some(oldest) = all.iter().min_by_key(|(_, known)| known.used).map(|(chunk, _)| *chunk)
        {
            all.remove(&oldest);
        }
        all.insert(known.groups.chunk(), known);
    }
}

/// Asks for the hashes of a chunk. `None` if they do not come or are wrong, for whatever reason: then the
/// chunk is read, which says what is the matter.
async fn ask(
    open: &OpenVersion,
    chunk: Hash,
    wanted: Wanted,
    until: Instant,
) -> Option<(Arc<GroupHashes>, Range<u64>)> {
    let client = open.client.within(until.saturating_duration_since(Instant::now()) / 2);
    let root = open.version.root();
    let hashes = client.groups_unchecked(root, chunk, group_hash_bytes(wanted.len)).await.ok()?;
    Some((Arc::new(GroupHashes::check(chunk, wanted.len, &hashes).ok()?), wanted.within))
}
