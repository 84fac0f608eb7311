//! Chunks that are kept: their admission, the charge of their datasets, and the write of their records.
//!
//! ```text
//! charge ─► place of each record ─► records side by side: one write ─► index ─► slab sealed, if it is full
//! ```
//!
//! Invariants:
//! 1. a dataset is charged for a chunk before the chunk is written. The charge is given back unless the chunk
//!    comes into the index;
//! 2. a record is in the index only after all of it was written;
//! 3. an error ends its group: what is not in the index by then is not kept. Places of a write that failed
//!    stay unused.

use super::{
    DiskEngine, DiskError, Policy, Refusal, Stored,
    layout::{self, Head, footprint},
    slab,
    stats::add,
    writer::{Purpose, Reservation, ReserveOutcome},
};
use crate::dataset_id::DatasetId;
use fletch_core::{StoreKey, Verified};
use std::sync::{Arc, Weak};

/// How often a newcomer finds that other newcomers took the space that was made for it, before it is refused.
const ROUNDS: usize = 4;

/// What a dataset was charged for a chunk that is not in the index yet.
#[derive(Debug)]
struct ChargedSpace {
    /// Numbers of the domain and of the dataset in the index.
    domain: u16,
    dataset: u32,
    bytes: u64,
}

/// The part of a dataset's share that a chunk will occupy once it is written. Dropping this value gives it
/// back.
#[derive(Debug)]
pub(crate) struct ReservedShare {
    engine: Weak<DiskEngine>,
    space: Option<ChargedSpace>,
}

impl ReservedShare {
    /// Returns the engine that charged for it, unless that is closed.
    pub fn engine(&self) -> Option<Arc<DiskEngine>> {
        self.engine.upgrade()
    }
}

impl Drop for ReservedShare {
    fn drop(&mut self) {
        if let (Some(engine), Some(space)) = (self.engine.upgrade(), self.space.take()) {
            engine.discharge(&space);
        }
    }
}

/// A chunk to keep, for which [`DiskEngine::reserve_share`] charged its dataset.
pub(crate) struct Newcomer<'a> {
    pub key: &'a StoreKey,
    pub dataset: DatasetId,
    pub chunk: &'a Verified,
    pub reserved: ReservedShare,
}

/// What a dataset was charged, until the chunk is in the index. Dropping it gives the charge back.
struct Charge<'a> {
    engine: &'a DiskEngine,
    space: Option<ChargedSpace>,
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        if let Some(space) = self.space.take() {
            self.engine.discharge(&space);
        }
    }
}

/// A chunk that is charged for.
struct Charged<'a> {
    key: &'a StoreKey,
    dataset: DatasetId,
    chunk: &'a Verified,
    charge: Charge<'a>,
}

/// A chunk with a place in a slab, and its number in the group.
struct Placed<'a> {
    number: usize,
    charged: Charged<'a>,
    at: Reservation,
    header: Head,
}

/// Records that lie side by side in one slab, and are not written yet.
type Run<'a> = Vec<Placed<'a>>;

impl DiskEngine {
    /// Keeps a chunk, if the policy admits it and there is space.
    ///
    /// # Errors
    /// [`DiskError`] when the tier is off or the disk fails, which may turn the tier off. The chunk is not
    /// kept.
    pub fn put(&self, key: &StoreKey, dataset: DatasetId, chunk: &Verified) -> Result<Stored, DiskError> {
        self.check_writable()?;
        let Some(len) = u32::try_from(chunk.bytes().len()).ok().filter(|&l| self.plan.fits(l)) else {
            return Ok(self.count(chunk, Stored::Refused(Refusal::TooLong)));
        };
        let charge = match self.charge(key, dataset, len) {
            Ok(space) => Charge { engine: self, space: Some(space) },
            Err(stored) => return Ok(self.count(chunk, stored)),
        };
        let charged = Charged { key, dataset, chunk, charge };
        let stored = self.write_group(vec![charged])?;
        Ok(stored.into_iter().next().unwrap_or(Stored::Refused(Refusal::Full)))
    }

    /// Charges a dataset for a chunk that will be written later, if the policy admits the chunk.
    pub(crate) fn reserve_share(
        self: &Arc<Self>,
        key: &StoreKey,
        dataset: DatasetId,
        len: u32,
    ) -> Result<ReservedShare, Stored> {
        if self.check_writable().is_err() {
            return Err(Stored::Refused(Refusal::Full));
        }
        if !self.plan.fits(len) {
            return Err(Stored::Refused(Refusal::TooLong));
        }
        let space = Some(self.charge(key, dataset, len)?);
        Ok(ReservedShare { engine: Arc::downgrade(self), space })
    }

    /// Keeps chunks for which this engine charged their datasets. Records that lie side by side are written
    /// by one call. Returns the outcomes in the order of the chunks.
    ///
    /// # Errors
    /// As [`DiskEngine::put`]. Some of the chunks may be kept.
    pub(crate) fn put_group(&self, group: Vec<Newcomer<'_>>) -> Result<Vec<Stored>, DiskError> {
        self.check_writable()?;
        let charged = group.into_iter().map(|newcomer| {
            let Newcomer { key, dataset, chunk, mut reserved } = newcomer;
            let charge = Charge { engine: self, space: reserved.space.take() };
            Charged { key, dataset, chunk, charge }
        });
        self.write_group(charged.collect())
    }

    /// Counts the outcome of a write.
    fn count(&self, chunk: &Verified, stored: Stored) -> Stored {
        match &stored {
            Stored::Yes => {
                add(&self.counters.puts, 1);
                add(&self.counters.put_bytes, chunk.bytes().len() as u64);
            }
            Stored::Already => {}
            Stored::Refused(Refusal::Share) => add(&self.counters.refused_share, 1),
            Stored::Refused(_) => add(&self.counters.refused_full, 1),
        }
        stored
    }

    /// Admits a chunk and charges its dataset, or says why there is nothing to write.
    fn charge(&self, key: &StoreKey, dataset: DatasetId, len: u32) -> Result<ChargedSpace, Stored> {
        let bytes = footprint(len);
        let capacity = self.capacity();
        let mut index = self.write_index();
        if index.contains(key) {
            return Err(Stored::Already);
        }
        let fletch = self.config.policy == Policy::Fletch;
        if fletch && !index.datasets.has_space(dataset, bytes, capacity) {
            return Err(Stored::Refused(Refusal::Share));
        }
        if self.config.policy != Policy::Lru && self.full.excludes(bytes, self.deaths()) {
            return Err(Stored::Refused(Refusal::Full));
        }
        let domain = index.domain(&key.domain).ok_or(Stored::Refused(Refusal::Domains))?;
        let dataset = index.datasets.number(dataset);
        if fletch {
            self.make_room_in_pool(&mut index, dataset, bytes, capacity);
        }
        index.datasets.charge(dataset, bytes);
        Ok(ChargedSpace { domain, dataset, bytes })
    }

    fn discharge(&self, space: &ChargedSpace) {
        self.write_index().datasets.discharge(space.dataset, space.bytes);
    }

    /// Writes chunks. Notes an error, which ends the write.
    fn write_group(&self, group: Vec<Charged<'_>>) -> Result<Vec<Stored>, DiskError> {
        let mut stored = vec![Stored::Refused(Refusal::Full); group.len()];
        let mut run = Run::new();
        let placed = self.place_group(group, &mut run, &mut stored);
        // Also after an error: the last places are taken.
        let written = self.write_run(&mut run, &mut stored);
        match placed.and(written) {
            Ok(()) => Ok(stored),
            Err(e) => {
                self.note_io_error(&e);
                Err(e)
            }
        }
    }

    /// Finds places for chunks, and writes each run that is complete. The last run is left.
    fn place_group<'a>(
        &self,
        group: Vec<Charged<'a>>,
        run: &mut Run<'a>,
        stored: &mut [Stored],
    ) -> Result<(), DiskError> {
        for (number, charged) in group.into_iter().enumerate() {
            // Another append of the same chunk came first.
            if self.read_index().contains(charged.key) {
                stored[number] = Stored::Already;
                continue;
            }
            let (name, hash) = (charged.key.hash, charged.chunk.hash());
            if name != hash {
                return Err(DiskError::Invalid(format!("chunk {hash} cannot be kept as {name}")));
            }
            let Some(at) = self.place(&charged, run, stored)? else {
                stored[number] = self.count(charged.chunk, Stored::Refused(Refusal::Full));
                continue;
            };
            let header = layout::record_header(at.slab, charged.key, charged.dataset.0, at.location.len);
            let is_next = run.last().is_none_or(|last| last.at.is_followed_by(&at));
            let written = if is_next { Ok(()) } else { self.write_run(run, stored) };
            run.push(Placed { number, charged, at, header });
            written?;
        }
        Ok(())
    }

    /// Finds a place for a chunk; `None` when there is no space.
    fn place<'a>(
        &self,
        charged: &Charged<'a>,
        run: &mut Run<'a>,
        stored: &mut [Stored],
    ) -> Result<Option<Reservation>, DiskError> {
        let Some(space) = &charged.charge.space else { return Ok(None) };
        let len = charged.chunk.bytes().len() as u32;
        let deaths = self.deaths();
        let (mut rounds, mut last) = (0, false);
        loop {
            let domain_bytes = layout::domain_bytes(&charged.key.domain);
            match self.reserve(len, space.domain, domain_bytes, Purpose::Newcomer)? {
                ReserveOutcome::Reserved(at) => return Ok(Some(at)),
                // Its slab may be sealed when it is written, which gives space back.
                ReserveOutcome::NoRoom(_) if !run.is_empty() => self.write_run(run, stored)?,
                ReserveOutcome::NoRoom(want) => {
                    rounds += 1;
                    if rounds > ROUNDS || last {
                        self.full.note(space.bytes, deaths);
                        return Ok(None);
                    }
                    // The space that did come free may suffice for a short slab.
                    last = !self.make_room(want)?;
                }
            }
        }
    }

    /// Writes a run, adds its records to the index, and seals the slab if it is full. The run is empty then.
    fn write_run(&self, run: &mut Run<'_>, stored: &mut [Stored]) -> Result<(), DiskError> {
        let mut run = std::mem::take(run);
        let Some(Placed { at, .. }) = run.first() else { return Ok(()) };
        let (slab, number) = (at.location.slab, at.slab);
        let records: Vec<_> = run.iter().map(|p| (&p.header, &p.charged.chunk.bytes()[..])).collect();
        let written = slab::append(&at.file, at.location.at, &records);
        if written.is_ok() {
            let mut index = self.write_index();
            for Placed { charged, at, .. } in &mut run {
                let hash = charged.key.hash;
                // What is in the index stays charged.
                if let Some(space) = charged.charge.space.take()
                    && !index.insert(space.domain, hash, space.dataset, at.location)
                {
                    charged.charge.space = Some(space);
                }
            }
        }
        self.finish_records(slab, run.len())?;
        written.map_err(|e| DiskError::io("write", self.files.path(number), e))?;
        for Placed { number, charged, .. } in run {
            let outcome = if charged.charge.space.is_none() { Stored::Yes } else { Stored::Already };
            stored[number] = self.count(charged.chunk, outcome);
        }
        Ok(())
    }
}
