//! The values that an [`super::EpochReader`] hands out: leases, samples, and the tokens to acknowledge them.

use bytes::Bytes;
use fletch_api::{Ack, BatchTimes, SampleFile};
use fletch_core::{
    Hash,
    delivery::{
        Request,
        consumption_log::ConsumptionRecord,
        receipt::{Delivery, content},
    },
};
use std::{fmt::Write as _, time::Duration};

/// A sample of a lease, with its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeasedSample {
    /// The plan entry that delivers this sample.
    pub entry: u32,
    /// The number of the sample in the version.
    pub sample: u32,
    /// The ordinal of the sample's first entry in the version.
    pub ordinal: u64,
    /// Which copy of the sample this is. Copies from 2^31 on only pad the last step.
    pub copy: u32,
    /// Path, size and hash of each file of the sample.
    pub heads: Vec<SampleFile>,
    /// The bytes of all files, one after the other.
    pub bytes: Bytes,
    /// How many of the bytes another job, or an earlier epoch, had brought to the server.
    pub shared: u64,
}

impl LeasedSample {
    /// Returns each file with its bytes. The bytes share the sample's buffer.
    pub fn files(&self) -> impl Iterator<Item = (&SampleFile, Bytes)> {
        let mut at = 0;
        self.heads.iter().map(move |f| {
            let end = at + usize::try_from(f.size).unwrap_or(usize::MAX);
            let bytes = self.bytes.get(at..end).map(|b| self.bytes.slice_ref(b)).unwrap_or_default();
            at = end;
            (f, bytes)
        })
    }

    /// Returns what the sample adds to a receipt. Hashes the bytes as they are now.
    #[must_use]
    pub fn delivery(&self) -> Delivery {
        let hashes: Vec<Hash> = self.files().map(|(_, bytes)| Hash::of(&bytes)).collect();
        Delivery { ordinal: self.ordinal, content: content(&hashes), copy: self.copy }
    }

    /// Returns what the sample adds to a receipt, from the hashes in `heads`. Does not hash the bytes again.
    ///
    /// Correct only while the sample's bytes are unchanged: the reader compared them with these hashes before
    /// it handed the sample out.
    #[must_use]
    pub fn delivery_as_received(&self) -> Delivery {
        let hashes: Vec<Hash> = self.heads.iter().map(|f| f.hash).collect();
        Delivery { ordinal: self.ordinal, content: content(&hashes), copy: self.copy }
    }
}

/// Everything that is needed to acknowledge a batch.
///
/// Small, so that it can travel to the process that runs the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct AckToken {
    /// The epoch of the lease.
    pub epoch: u64,
    /// The rank that holds the lease.
    pub rank: u32,
    /// The id of the lease.
    pub lease: u64,
    /// The number of entries in the lease.
    pub entries: u32,
    /// How long the lease lives without a renewal, in milliseconds.
    pub ttl_ms: u64,
}

impl AckToken {
    /// Returns the ack of the whole batch.
    #[must_use]
    pub fn ack(&self, times: BatchTimes) -> Ack {
        let times = BatchTimes { entries: self.entries, ..times };
        Ack { lease: self.lease, upto: self.entries, batches: vec![times] }
    }
}

/// What a server granted: which entries, to which request, by which term.
///
/// The process that acknowledges keeps it, in case the server is lost ([`super::RankRecords`]).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GrantRecord {
    /// The term of the server. 0: the server is alone.
    pub term: u64,
    /// The worker that asked.
    pub worker: u32,
    /// The number of its request.
    pub sequence: u64,
    /// The plan entries of the lease, in the order of delivery.
    pub entries: Vec<u32>,
}

impl GrantRecord {
    pub(super) fn request(&self, rank: u32) -> Request {
        Request { rank, worker: self.worker, sequence: self.sequence }
    }

    /// Returns the record's bytes, for another process of the same build. Empty if the server is alone.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        if self.term == 0 {
            return Vec::new();
        }
        let mut out = Vec::with_capacity(20 + 4 * self.entries.len());
        out.extend(self.term.to_le_bytes());
        out.extend(self.sequence.to_le_bytes());
        out.extend(self.worker.to_le_bytes());
        out.extend(self.entries.iter().flat_map(|entry| entry.to_le_bytes()));
        out
    }

    /// Reads the bytes of [`GrantRecord::to_bytes`]. Returns `None` for other bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        if bytes.is_empty() {
            return Some(GrantRecord::default());
        }
        let (term, rest) = bytes.split_first_chunk::<8>()?;
        let (sequence, rest) = rest.split_first_chunk::<8>()?;
        let (worker, rest) = rest.split_first_chunk::<4>()?;
        let (entries, []) = rest.as_chunks::<4>() else { return None };
        Some(GrantRecord {
            term: u64::from_le_bytes(*term),
            worker: u32::from_le_bytes(*worker),
            sequence: u64::from_le_bytes(*sequence),
            entries: entries.iter().map(|entry| u32::from_le_bytes(*entry)).collect(),
        })
    }
}

/// One whole lease.
#[derive(Debug, Clone)]
pub struct LeaseBatch {
    /// The token that acknowledges the lease.
    pub token: AckToken,
    /// What the server granted.
    pub grant: GrantRecord,
    /// The samples, in the order of the epoch.
    pub samples: Vec<LeasedSample>,
    /// How long the caller waited for the lease, until its last byte was there.
    pub received: Duration,
}

impl LeaseBatch {
    /// Returns the lines of a consumption log (`docs/FORMATS-epochs.md`), one for each sample.
    ///
    /// Write them durably before you acknowledge the batch. A log begins with the line
    /// [`head`](fletch_core::delivery::consumption_log::head).
    #[must_use]
    pub fn log_records(&self) -> String {
        let mut text = String::new();
        for (place, sample) in (0..).zip(&self.samples) {
            let record =
                ConsumptionRecord { delivery: sample.delivery(), at: Some((self.token.lease, place)) };
            // Writing to a text cannot fail.
            let _ = writeln!(text, "{record}");
        }
        text
    }
}

/// The answer to a request for more samples.
#[derive(Debug, Clone)]
pub enum Next {
    /// A lease with samples.
    Batch(LeaseBatch),
    /// No samples now: the rank holds as many as it may. Acknowledge some first.
    Full,
    /// No more samples, unless a lease that the rank still holds expires.
    Last,
    /// No more samples: the rank has acknowledged its whole share.
    Done,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_is_read_again() {
        let grant = GrantRecord { term: 3, worker: 2, sequence: 1 << 50, entries: vec![7, u32::MAX] };
        assert_eq!(GrantRecord::from_bytes(&grant.to_bytes()), Some(grant.clone()));
        let alone = GrantRecord { term: 0, ..grant.clone() };
        assert_eq!(alone.to_bytes(), Vec::<u8>::new());
        assert_eq!(GrantRecord::from_bytes(&[]), Some(GrantRecord::default()));
        assert_eq!(GrantRecord::from_bytes(&grant.to_bytes()[1..]), None);
    }
}
