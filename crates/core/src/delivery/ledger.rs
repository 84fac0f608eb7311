//! The ledger of an epoch: the durable log of grants, acks and all other events (`docs/FORMATS-epochs.md`,
//! "Ledger").
//!
//! A ledger is a log of records ([`crate::record`]). The first record is the header, each further record is
//! an [`Event`]. Numbers are LEB128; a text is its length and UTF-8; the entries of a grant are a first
//! number and zigzag differences. A reader skips records of unknown kinds, and fields that a newer minor
//! version adds to the header.

use super::event::{Event, RESUME, get_world, put_world};
use super::lease::{LeaseError, Leases};
use crate::plan::{PlanError, World, bits::Bits};
use crate::varint::{get, put, take};
use crate::{
    Hash, Kind, LayoutId, Root,
    record::{self, BadLog},
};

/// The format's major version.
pub const FORMAT_MAJOR: u32 = 1;

const HEADER: u8 = 1;

/// Bytes of a bitmap in one record. A larger bitmap becomes several records.
pub const RESUME_BYTES_MAX: usize = 8 << 20;
/// The most `resume` records of a ledger.
pub const RESUMES_MAX: usize = 4096;

/// The epoch that a ledger belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The job's name.
    pub job: String,
    /// The epoch's number.
    pub epoch: u64,
    /// The version that the epoch delivers.
    pub root: Root,
    /// The layout that it reads.
    pub layout: LayoutId,
    /// The plan's hash.
    pub plan: Hash,
    /// `strict`, `substitute`, `bucketed` or `replay`.
    pub order: String,
    /// The job's seed.
    pub seed: u64,
    /// The world at the start.
    pub world: World,
}

/// Why a ledger cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadLedger {
    /// The log is foreign, newer or damaged.
    #[error(transparent)]
    Log(#[from] BadLog),
    /// The ledger does not begin with a header.
    #[error("not a ledger: it does not begin with a header")]
    Header,
    /// A newer Fletch wrote the ledger.
    #[error("ledger format {0} is newer than this build reads (1); use a newer build")]
    Major(u64),
    /// The header's world is impossible.
    #[error("the ledger's header has an impossible world: {0}")]
    World(#[from] PlanError),
    /// A record cannot be read, or is one `resume` record too many.
    #[error("record {0} of the ledger is malformed")]
    Record(usize),
    /// A record contradicts those before it.
    #[error("record {at} of the ledger: {why}")]
    Contradiction {
        /// The number of the record.
        at: usize,
        /// Why it contradicts them.
        why: LeaseError,
    },
    /// The ledger has too many changes of world and rollbacks to replay, or too many ranks or pads in them.
    #[error(
        "the ledger's changes of world and rollbacks are too many to replay: {count} of them, or of their \
             ranks or pads; at most {most} can be replayed"
    )]
    TooManyWorlds {
        /// Changes of world and rollbacks, or the ranks or pads of all of them together.
        count: u64,
        /// The bound.
        most: u64,
    },
}

impl BadLedger {
    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> Kind {
        Kind::Corrupt
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    put(out, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

fn get_text(at: &mut &[u8]) -> Option<String> {
    let n = usize::try_from(get(at)?).ok()?;
    String::from_utf8(take(at, n)?.to_vec()).ok()
}

fn get_hash(at: &mut &[u8]) -> Option<Hash> {
    Hash::try_from(take(at, 32)?).ok()
}

impl Header {
    fn write(&self) -> Vec<u8> {
        let mut p = Vec::new();
        put(&mut p, u64::from(FORMAT_MAJOR));
        put_text(&mut p, &self.job);
        put(&mut p, self.epoch);
        for hash in [self.root.0, self.layout.0, self.plan] {
            p.extend_from_slice(hash.as_bytes());
        }
        put_text(&mut p, &self.order);
        put(&mut p, self.seed);
        put_world(&mut p, self.world);
        p
    }

    fn read(mut p: &[u8]) -> Result<Self, BadLedger> {
        let at = &mut p;
        match get(at) {
            Some(major) if major == u64::from(FORMAT_MAJOR) => {}
            Some(major) => return Err(BadLedger::Major(major)),
            None => return Err(BadLedger::Record(0)),
        }
        let mut fields = || {
            Some(Header {
                job: get_text(at)?,
                epoch: get(at)?,
                root: Root(get_hash(at)?),
                layout: LayoutId(get_hash(at)?),
                plan: get_hash(at)?,
                order: get_text(at)?,
                seed: get(at)?,
                world: get_world(at)?,
            })
        };
        let header = fields().ok_or(BadLedger::Record(0))?;
        header.world.check()?;
        Ok(header)
    }
}

/// Returns the bytes of a state: a ledger with a header and the acknowledged entries only.
#[must_use]
pub fn state(header: &Header, acked: &Bits) -> Vec<u8> {
    let mut out = begin(header);
    for event in resume(acked) {
        event.append(&mut out);
    }
    out
}

/// Returns the events that say which entries were acknowledged before. An empty bitmap gives none.
pub fn resume(acked: &Bits) -> impl Iterator<Item = Event> {
    let bytes = if acked.count() == 0 { Vec::new() } else { acked.to_bytes() };
    let pieces: Vec<Event> = (0u64..)
        .zip(bytes.chunks(RESUME_BYTES_MAX))
        .map(|(i, bits)| Event::Resume { byte: i * RESUME_BYTES_MAX as u64, bits: bits.to_vec() })
        .collect();
    pieces.into_iter()
}

/// Returns the bytes of a new ledger: the file header and the header record.
#[must_use]
pub fn begin(header: &Header) -> Vec<u8> {
    let mut out = record::file_header().to_vec();
    record::append(&mut out, HEADER, &header.write());
    out
}

/// A ledger that was read from bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ledger {
    /// The epoch that it belongs to.
    pub header: Header,
    /// The events, in order.
    pub events: Vec<Event>,
    /// Bytes of the valid prefix. In a longer file a crash tore the last append.
    pub len: usize,
}

impl Ledger {
    /// Reads a ledger.
    ///
    /// # Errors
    /// Any [`BadLedger`] except [`BadLedger::Contradiction`]: the events are not applied.
    pub fn read(file: &[u8]) -> Result<Self, BadLedger> {
        let (records, len) = record::read(file)?;
        let (first, rest) = match records.split_first() {
            Some((first, rest)) if first.kind == HEADER => (first, rest),
            _ => return Err(BadLedger::Header),
        };
        let header = Header::read(first.payload)?;
        let many = rest.iter().enumerate().filter(|(_, r)| r.kind == RESUME).nth(RESUMES_MAX);
        if let Some((i, _)) = many {
            return Err(BadLedger::Record(i + 1));
        }
        let mut events = Vec::with_capacity(rest.len());
        for (i, r) in rest.iter().enumerate() {
            events.extend(Event::read(r.kind, r.payload).ok_or(BadLedger::Record(i + 1))?);
        }
        Ok(Ledger { header, events, len })
    }

    /// Applies all events to new leases of the same plan. Leases that are live at the end expire at
    /// `expires_ms`.
    ///
    /// # Errors
    /// [`BadLedger::Contradiction`].
    pub fn replay(&self, leases: &mut Leases, expires_ms: u64) -> Result<(), BadLedger> {
        (0..self.events.len()).try_for_each(|at| self.apply(at, leases, expires_ms))
    }

    /// Applies the event number `at`, after those before it.
    pub(crate) fn apply(&self, at: usize, leases: &mut Leases, expires_ms: u64) -> Result<(), BadLedger> {
        match (&self.events[at], self.events.get(at + 1)) {
            // The free entries are divided once, after the last piece.
            (Event::Resume { byte, bits }, Some(Event::Resume { .. })) => leases.resume(*byte, bits),
            (event, _) => leases.apply(event, expires_ms).map(drop),
        }
        .map_err(|why| BadLedger::Contradiction { at: at + 1, why })
    }

    /// Returns the entries that were granted to a rank, in order. An entry granted twice is in it twice.
    pub fn order_of(&self, rank: u32) -> impl Iterator<Item = u32> + '_ {
        self.events
            .iter()
            .flat_map(move |e| match e {
                Event::Grant { request, entries, .. } if request.rank == rank => entries.as_slice(),
                _ => &[],
            })
            .copied()
    }
}

#[cfg(test)]
mod tests;
