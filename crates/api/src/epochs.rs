//! Epochs: leases, acks, state and receipt (`docs/EPOCHS.md`).
//!
//! The answer to a lease request is a stream of [`crate::frames`]: one grant frame, whose payload is a
//! [`LeaseGrant`]; of each granted entry a sample frame ([`SampleHead`]) and then its bytes in data frames,
//! or one ref frame ([`SampleRef`]), or an error frame; and an end frame. A frame's index is the
//! entry's place in the lease.

use crate::jobs::WorldSpec;
use fletch_core::{
    Hash,
    delivery::{certificate::Certificate, receipt::Receipt},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// No request wants more entries at once.
pub const WANT_MAX: u32 = 4096;
/// No rank holds more entries that it has not acknowledged: three leases of 2,700 for each of 32 workers.
pub const HELD_MAX: u32 = 1 << 18;
/// The longest an answer is held back while a rank holds as much as it may, in milliseconds.
pub const WAIT_MS_MAX: u64 = 10_000;
/// Acks of one request, and leases it renews.
pub const ACKS_MAX: usize = 4096;

/// Body of `POST /v1/jobs/{id}/epochs/{n}/leases`. Asking again with the same rank, worker and sequence while
/// the lease lives gives the same lease, and its bytes again from entry `from`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LeaseRequest {
    /// The consumer, from 0.
    pub rank: u32,
    /// Which of its workers.
    #[serde(default)]
    pub worker: u32,
    /// Counts up per worker of a rank, from 1.
    pub sequence: u64,
    /// So many entries at most, up to 4,096; usually a rank's part of a step.
    pub want: u32,
    /// Send where the bytes are instead of the bytes.
    #[serde(default)]
    pub refs: bool,
    /// The first entry of the lease to send; what comes before it was received already.
    #[serde(default)]
    pub from: u32,
    /// How long the answer may be held back while the rank must acknowledge first, in milliseconds.
    #[serde(default)]
    pub wait_ms: u64,
    /// Acks that ride along; applied before anything is granted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub acks: Vec<Ack>,
    /// Leases that are still held and live on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub renew: Vec<u64>,
}

/// Consumed: the first `upto` entries of a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Ack {
    /// Which lease.
    pub lease: u64,
    /// How many of its entries, from the first. Fewer than before changes nothing.
    pub upto: u32,
    /// How the batches in it went.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub batches: Vec<BatchTimes>,
}

/// How one batch went, on the consumer's clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BatchTimes {
    /// Entries in it.
    pub entries: u32,
    /// Nanoseconds that the step's process waited for it.
    #[serde(default)]
    pub waited_ns: u64,
    /// Nanoseconds of preparing it (decoding, collating).
    #[serde(default)]
    pub prepared_ns: u64,
    /// Nanoseconds of the step.
    #[serde(default)]
    pub stepped_ns: u64,
}

/// Body of `POST /v1/jobs/{id}/epochs/{n}/acks`: acks, and leases that live on. All of it or nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Acks {
    /// Who speaks.
    pub rank: u32,
    /// What was consumed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub acks: Vec<Ack>,
    /// Leases that are still held and live on: a heartbeat.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub renew: Vec<u64>,
}

/// The answer to acks. What is said here is durable.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Acked {
    /// Entries that became acknowledged by this request.
    pub entries: u64,
    /// Leases of `renew` that are gone: what they held is granted again.
    pub gone: Vec<u64>,
    /// How long a lease lives without a sign of life, in milliseconds.
    pub ttl_ms: u64,
    /// Whether the epoch is over: every rank had its share and acknowledged it.
    pub finished: bool,
}

/// Body of `POST /v1/jobs/{id}/epochs/{n}/checkpoint`: the model was saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// The caller's number for it, a step for example. One that is remembered already changes nothing.
    pub commit: u64,
}

/// Body of `POST /v1/jobs/{id}/epochs/{n}/rollback`: the model went back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rollback {
    /// To which checkpoint of this epoch; the latest that is remembered when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<u64>,
}

/// What came of a lease request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum GrantStatus {
    /// Entries were granted.
    Granted,
    /// None now: the rank holds as much as it may; ack first.
    Full,
    /// None any more, unless a lease that the rank still holds expires.
    Last,
    /// None any more: the rank had its share and acknowledged it.
    Done,
}

/// Payload of a grant frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaseGrant {
    /// What came of the request.
    pub status: GrantStatus,
    /// The lease; 0 without one.
    #[serde(default)]
    pub lease: u64,
    /// Whether it was granted before, to the same request.
    #[serde(default)]
    pub again: bool,
    /// All its entries, in the order of service.
    #[serde(default)]
    pub entries: Vec<u32>,
    /// The first of them that follows in this stream.
    #[serde(default)]
    pub from: u32,
    /// How long the lease lives without a sign of life, in milliseconds.
    pub ttl_ms: u64,
    /// Entries that the rank may still be granted.
    pub left: u64,
}

/// Payload of a sample frame: what the bytes that follow are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SampleHead {
    /// The plan's entry.
    pub entry: u32,
    /// The sample's number in the version.
    pub sample: u32,
    /// The ordinal of its first entry in the version: with the root its id.
    pub ordinal: u64,
    /// Which copy of it; from 2^31 on it only fills up a last step.
    pub copy: u32,
    /// Its files. Their bytes follow one after the other.
    pub files: Vec<SampleFile>,
}

/// One file of a sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SampleFile {
    /// Its path in the version; of a member of a shard, shard and member with a slash between.
    pub path: String,
    /// Its length in bytes.
    pub size: u64,
    /// BLAKE3 of its bytes.
    #[schema(value_type = String)]
    pub hash: Hash,
}

/// Payload of a ref frame: where the bytes of a sample are, piece by piece.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SampleRef {
    /// In this order they are the sample's bytes.
    pub pieces: Vec<RefPiece>,
    /// The server to ask for them.
    pub owner: String,
}

/// Bytes of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefPiece {
    /// Which chunk.
    #[schema(value_type = String)]
    pub chunk: Hash,
    /// How long the whole chunk is; 0 when that is not known here.
    pub chunk_len: u32,
    /// The first byte meant.
    pub offset: u32,
    /// How many bytes.
    pub len: u32,
}

/// How far an epoch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum EpochState {
    /// It goes on.
    Open,
    /// Every rank had its share and acknowledged it.
    Finished,
    /// The job went on to later epochs without finishing it.
    Abandoned,
    /// Its ledger cannot be believed. Nothing is known of it; a state that is put replaces it.
    Damaged,
}

/// An epoch as it is now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Epoch {
    /// Which.
    pub epoch: u64,
    /// How far.
    pub state: EpochState,
    /// Who shares a step of it.
    pub world: WorldSpec,
    /// Entries it delivers, those that fill up a last step not counted.
    pub planned: u64,
    /// Of them, acknowledged.
    pub acked: u64,
    /// Of them, in a lease and not acknowledged.
    pub held: u64,
    /// Leases that live.
    pub leases: u64,
    /// Entries granted again: their lease expired, the world changed, or the model went back.
    pub redelivered: u64,
    /// Entries that filled up last steps and were acknowledged.
    pub padded: u64,
    /// Checkpoints that can be rolled back to, the latest last.
    #[serde(default)]
    pub commits: Vec<u64>,
    /// Bytes of its ledger.
    pub ledger_bytes: u64,
    /// What its acks said of batches, added up since the server started.
    pub times: Times,
}

/// Sums of [`BatchTimes`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Times {
    /// Batches.
    pub batches: u64,
    /// Nanoseconds waited.
    pub waited_ns: u64,
    /// Nanoseconds preparing.
    pub prepared_ns: u64,
    /// Nanoseconds stepping.
    pub stepped_ns: u64,
}

/// Answer to `GET …/receipt` of a finished epoch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EpochReceipt {
    /// The server's receipt: its value is what the plan says, from the manifest's hashes. It is proof when a
    /// value added up from received bytes agrees with it.
    #[schema(value_type = Object)]
    pub receipt: Receipt,
    /// How well shuffled what was delivered is.
    #[schema(value_type = Object)]
    pub certificate: Certificate,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_grants_read_as_documented() {
        let text = r#"{"rank":1,"sequence":3,"want":64,"acks":[{"lease":9,"upto":32,"batches":[{"entries":32,"stepped_ns":5}]}],"renew":[10]}"#;
        let r: LeaseRequest = serde_json::from_str(text).expect("documented form");
        assert_eq!((r.rank, r.worker, r.sequence, r.want, r.refs, r.from), (1, 0, 3, 64, false, 0));
        assert_eq!(r.acks[0].batches[0].stepped_ns, 5);
        let grant: LeaseGrant =
            serde_json::from_str(r#"{"status":"done","ttl_ms":30000,"left":0}"#).expect("form");
        assert_eq!((grant.status, grant.lease, grant.entries.len()), (GrantStatus::Done, 0, 0));
        assert!(serde_json::from_str::<LeaseRequest>(r#"{"rank":-1,"sequence":0,"want":1}"#).is_err());
        assert!(serde_json::from_str::<Acks>(r#"{"rank":0,"ack":[]}"#).is_err());
    }
}
