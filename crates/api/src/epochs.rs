//! Epochs: leases, acks, state and receipt (`docs/EPOCHS.md`).
//!
//! The answer to a lease request is a stream of [`crate::frames`]:
//!
//! 1. a grant frame, whose payload is a [`LeaseGrant`];
//! 2. for each granted entry a sample frame ([`SampleHead`]), followed by its bytes in data frames, or by a
//!    ref frame ([`SampleRef`]), or by an error frame;
//! 3. an end frame, once the grant is durable. Or an error frame, whose index is the number of entries: the
//!    lease was not granted.
//!
//! The index of a frame is the position of its entry in the lease.

use crate::{
    loaders::{AckedBy, Loader},
    reclaim::UnknownRanks,
    world::WorldSpec,
};
use fletch_core::{
    Hash,
    delivery::{certificate::Certificate, receipt::Receipt},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The most entries that one lease request may want.
pub const WANT_MAX: u32 = 4096;
/// The most entries that a rank may hold without acknowledging them.
///
/// Enough for four leases of 2,048 entries for each of 32 workers.
pub const HELD_MAX: u32 = 1 << 18;
/// The longest time for which an answer waits while a rank may hold no more entries, in milliseconds.
pub const WAIT_MS_MAX: u64 = 10_000;
/// The most acks in a request, the most leases that it renews, and the most leases that it releases.
pub const ACKS_MAX: usize = 4096;

/// Body of `POST /v1/jobs/{id}/epochs/{n}/leases`.
///
/// A request with the same rank, worker and sequence returns the same lease while that lease lives, and sends
/// its bytes again from entry `from`. So does each of a worker's latest eight requests that got a lease.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LeaseRequest {
    /// The rank, from 0.
    pub rank: u32,
    /// The worker of the rank.
    #[serde(default)]
    pub worker: u32,
    /// The sequence number. It starts at 1 or higher and grows with each request of a worker of a rank.
    pub sequence: u64,
    /// Entries to grant, 1 to 4,096, usually a rank's share of a step. A rank's last lease may have fewer.
    pub want: u32,
    /// Whether to send the locations of the bytes instead of the bytes.
    #[serde(default)]
    pub refs: bool,
    /// The position of the first entry of the lease to send. The client has received the entries before it.
    #[serde(default)]
    pub from: u32,
    /// The longest delay of the answer while the rank must acknowledge entries first, in milliseconds.
    #[serde(default)]
    pub wait_ms: u64,
    /// Acks to apply before entries are granted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub acks: Vec<Ack>,
    /// Ids of held leases to renew.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub renew: Vec<u64>,
    /// Ids of leases that the client will not consume further. They end after the acks are applied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub release: Vec<u64>,
    /// The process that reads as this rank. Clients that do not name themselves cannot be told apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loader: Option<Loader>,
}

/// Acknowledges the first `upto` entries of a lease as consumed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Ack {
    /// The id of the lease.
    pub lease: u64,
    /// The number of consumed entries, counted from the first. A smaller number than before changes nothing.
    pub upto: u32,
    /// The times of the batches that were made of these entries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub batches: Vec<BatchTimes>,
}

/// The times of one batch, by the consumer's clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BatchTimes {
    /// The number of entries in the batch.
    pub entries: u32,
    /// The time that the training process waited for the batch, in nanoseconds.
    #[serde(default)]
    pub waited_ns: u64,
    /// The time that the process which prepared the batch waited for its lease, from asking for it until it
    /// had the last byte, in nanoseconds. Absent if nobody knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub received_ns: Option<u64>,
    /// The time to prepare the batch (decoding, collating), in nanoseconds.
    #[serde(default)]
    pub prepared_ns: u64,
    /// The time of the training step, in nanoseconds.
    #[serde(default)]
    pub stepped_ns: u64,
    /// The time that the device computed for the step, or for an earlier one, in nanoseconds. Absent if
    /// nobody knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_ns: Option<u64>,
    /// Whether the training loop itself prepares batches, so that it computes nothing meanwhile.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_loop: bool,
}

/// Body of `POST /v1/jobs/{id}/epochs/{n}/acks`. The server applies all acks, releases and renewals, or none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Acks {
    /// The rank that sends the request.
    pub rank: u32,
    /// The consumed entries, by lease.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub acks: Vec<Ack>,
    /// Ids of held leases to renew.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub renew: Vec<u64>,
    /// Ids of leases that the client will not consume further. They end after the acks are applied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub release: Vec<u64>,
    /// The process that reads as this rank. Clients that do not name themselves cannot be told apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loader: Option<Loader>,
}

/// The answer to acks. The acknowledged entries are durable.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Acked {
    /// The number of entries that this request acknowledged.
    pub entries: u64,
    /// The leases of `renew` that are gone. The server grants their entries again.
    pub gone: Vec<u64>,
    /// How long a lease lives without a renewal, in milliseconds.
    pub ttl_ms: u64,
    /// Whether the epoch is finished: every rank has acknowledged its whole share.
    pub finished: bool,
}

/// Body of `POST /v1/jobs/{id}/epochs/{n}/checkpoint`. Send it after the model was saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// The caller's number for the checkpoint, such as the step.
    ///
    /// A number that the server remembers changes nothing.
    pub commit: u64,
}

/// Body of `POST /v1/jobs/{id}/epochs/{n}/rollback`. Send it after the model was restored from a checkpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rollback {
    /// The checkpoint of this epoch to roll back to. The default is the latest one that the server remembers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<u64>,
}

/// The result of a lease request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum GrantStatus {
    /// Entries were granted.
    Granted,
    /// No entries now: the rank holds as many as it may. Acknowledge some first.
    Full,
    /// No more entries, unless a lease that the rank still holds expires.
    Last,
    /// No more entries: the rank has acknowledged its whole share.
    Done,
}

/// The payload of a grant frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaseGrant {
    /// The result of the request.
    pub status: GrantStatus,
    /// The id of the lease. 0 if no entries were granted.
    #[serde(default)]
    pub lease: u64,
    /// Whether the lease was granted before, to the same request.
    #[serde(default)]
    pub again: bool,
    /// All entries of the lease, in the order of delivery.
    #[serde(default)]
    pub entries: Vec<u32>,
    /// The position of the first entry that this stream contains.
    #[serde(default)]
    pub from: u32,
    /// How long the lease lives without a renewal, in milliseconds.
    pub ttl_ms: u64,
    /// The number of entries that the rank may still be granted in this epoch.
    pub left: u64,
}

/// The payload of a sample frame: the description of the bytes that follow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SampleHead {
    /// The plan entry that delivers this sample.
    pub entry: u32,
    /// The number of the sample in the version.
    pub sample: u32,
    /// The ordinal of the sample's first entry in the version. Root and ordinal identify the sample.
    pub ordinal: u64,
    /// Which copy of the sample this is. Copies from 2^31 on only pad the last step.
    pub copy: u32,
    /// The files of the sample. Their bytes follow one after the other.
    pub files: Vec<SampleFile>,
    /// How many of its bytes the server did not read from the origin for this epoch, as far as it knows now.
    ///
    /// Another job, or an earlier epoch, had brought them: they count as `substituted` or `hit`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shared: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// One file of a sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SampleFile {
    /// The path of the file in the version. For a member of a shard, `SHARD/MEMBER`.
    pub path: String,
    /// The length of the file, in bytes.
    pub size: u64,
    /// The BLAKE3 hash of the file's bytes.
    #[schema(value_type = String)]
    pub hash: Hash,
}

/// The payload of a ref frame: the location of a sample's bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SampleRef {
    /// The pieces. In this order they make up the sample's bytes.
    pub pieces: Vec<RefPiece>,
    /// The URL of the server that has the chunks.
    pub owner: String,
}

/// A range of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefPiece {
    /// The BLAKE3 hash of the chunk.
    #[schema(value_type = String)]
    pub chunk: Hash,
    /// The length of the whole chunk, in bytes. 0 if the server does not know it.
    pub chunk_len: u32,
    /// The offset of the first byte.
    pub offset: u32,
    /// The number of bytes.
    pub len: u32,
}

/// The state of an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum EpochState {
    /// The epoch takes lease requests and acks.
    Open,
    /// Every rank has acknowledged its whole share.
    Finished,
    /// The job went on to later epochs without finishing this one.
    Abandoned,
    /// The ledger is damaged, so the progress is unknown. Put a state to replace it.
    Damaged,
}

/// The progress of an epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Epoch {
    /// The number of the epoch.
    pub epoch: u64,
    /// The state of the epoch.
    pub state: EpochState,
    /// The world of the epoch.
    pub world: WorldSpec,
    /// The number of entries that the epoch delivers, without the padding of the last step.
    pub planned: u64,
    /// The number of these entries that were acknowledged.
    pub acked: u64,
    /// The number of these entries that are in a lease and not acknowledged.
    pub held: u64,
    /// The number of live leases.
    pub leases: u64,
    /// The number of entries that were granted again: their lease expired or was released, the world changed,
    /// or the job was rolled back.
    pub redelivered: u64,
    /// The number of acknowledged entries that only pad the last step.
    pub padded: u64,
    /// The checkpoints that the job can roll back to, the latest last.
    #[serde(default)]
    pub commits: Vec<u64>,
    /// The length of the ledger, in bytes.
    pub ledger_bytes: u64,
    /// The sums of the batch times in the acks, since the server started.
    pub times: Times,
}

/// Sums of [`BatchTimes`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Times {
    /// The number of batches.
    pub batches: u64,
    /// The time that training processes waited for batches, in nanoseconds.
    pub waited_ns: u64,
    /// The time to prepare batches, in nanoseconds.
    pub prepared_ns: u64,
    /// The time of training steps, in nanoseconds.
    pub stepped_ns: u64,
}

/// The answer to `GET …/receipt` of a finished epoch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EpochReceipt {
    /// The receipt. Its value is computed from the plan and the manifest's hashes.
    ///
    /// It proves the delivery if a value that a client computed from received bytes is equal.
    #[schema(value_type = Object)]
    pub receipt: Receipt,
    /// The shuffle certificate: how well the delivered order was shuffled.
    #[schema(value_type = Object)]
    pub certificate: Certificate,
    /// Which loaders acknowledged how much, as far as this server knows since it started; at most 256 rows.
    ///
    /// What is missing here was acknowledged before that, or is part of a state that was loaded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub acked_by: Vec<AckedBy>,
    /// The losses of a server after which nobody knew what some ranks had consumed. If this is empty, no
    /// process that lived on consumed a sample twice. Otherwise the delivery was at least once: what those
    /// ranks had consumed before may have been delivered again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<UnknownRanks>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_grants_parse_as_documented() {
        let text = concat!(
            r#"{"rank":1,"sequence":3,"want":64,"#,
            r#""acks":[{"lease":9,"upto":32,"batches":[{"entries":32,"stepped_ns":5}]}],"renew":[10]}"#
        );
        let r: LeaseRequest = serde_json::from_str(text).expect("documented form");
        assert_eq!((r.rank, r.worker, r.sequence, r.want, r.refs, r.from), (1, 0, 3, 64, false, 0));
        assert_eq!(r.acks[0].batches[0].stepped_ns, 5);
        let acks: Acks = serde_json::from_str(r#"{"rank":1,"release":[7,8]}"#).expect("documented form");
        assert_eq!(acks, Acks { rank: 1, release: vec![7, 8], ..Acks::default() });
        let grant: LeaseGrant =
            serde_json::from_str(r#"{"status":"done","ttl_ms":30000,"left":0}"#).expect("form");
        assert_eq!((grant.status, grant.lease, grant.entries.len()), (GrantStatus::Done, 0, 0));
        assert!(serde_json::from_str::<LeaseRequest>(r#"{"rank":-1,"sequence":0,"want":1}"#).is_err());
        assert!(serde_json::from_str::<Acks>(r#"{"rank":0,"ack":[]}"#).is_err());
    }
}
