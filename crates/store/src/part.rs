//! Parts of chunks that lie on disk: a sample of a pack costs its own bytes, not those of its chunk.

use crate::{Hit, ReadError, Store, Tier, stats::Counters};
use fletch_core::{Hash, StoreKey};
use std::ops::Range;
use tokio::time::Instant;

impl Store {
    /// Bytes `at` of the chunk, which is `len` bytes long, if they are in memory by themselves or on disk in the chunk,
    /// and hash to `part` (I1). `None` says nothing about the chunk: it may be in memory, absent, or damaged, or `at`
    /// may be wrong; whoever reads the whole chunk then learns which.
    ///
    /// # Errors
    /// [`ReadError::Overloaded`] when no memory came free in time.
    pub async fn part(
        &self,
        chunk: &StoreKey,
        len: u32,
        at: &Range<usize>,
        part: Hash,
    ) -> Result<Option<Hit>, ReadError> {
        let key = StoreKey { domain: chunk.domain.clone(), hash: part };
        if let Some(hit) = self.cached(&key) {
            return Ok(Some(hit));
        }
        let Some(disk) = self.disk().filter(|d| d.has(chunk, len)) else { return Ok(None) };
        let Some(size) = u32::try_from(at.len()).ok().filter(|&size| size <= len) else { return Ok(None) };
        let (until, within) = (Instant::now() + self.deadline(), self.deadline());
        let Some(buffer) = self.buffer(size, until).await else {
            Counters::add(&self.counters.overloaded, 1);
            return Err(ReadError::Overloaded { len: size, within });
        };
        let Some(verified) = disk.read_part(chunk, at.start, part, buffer, until).await else {
            return Ok(None);
        };
        Counters::add(&self.counters.hits_disk, 1);
        self.memory.insert(key, verified.clone());
        Ok(Some(Hit { chunk: verified, tier: Tier::Disk }))
    }
}
