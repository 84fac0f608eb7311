//! The HTTP contract of Fletch: routes, header names, request and response types, the frames of
//! a batch, and the one mapping from an error's [`fletch_core::Kind`] to an HTTP status.
//!
//! No server and no client code lives here; both sides compile against these words, and
//! `docs/openapi.json` is written from them.

pub mod accounts;
pub mod batch;
pub mod cluster;
pub mod datasets;
pub mod epochs;
pub mod frames;
pub mod headers;
pub mod jobs;
pub mod node;
pub mod problem;
pub mod routes;
pub mod warmups;

pub use accounts::{Account, AccountKey, Accounts, ByteResult, ByteTier};
pub use batch::{BATCH_ITEMS_MAX, BatchItem, BatchRequest, ChunkSpan};
pub use cluster::{Cluster, Formats, Info, InfoDisk, InfoLimits, Member};
pub use datasets::{Dataset, Datasets, RegisterDataset, ResolvedVersion};
pub use epochs::{
    Ack, Acked, Acks, BatchTimes, Checkpoint, Epoch, EpochReceipt, EpochState, GrantStatus, LeaseGrant,
    LeaseRequest, RefPiece, Rollback, SampleFile, SampleHead, SampleRef, Times,
};
pub use jobs::{
    BucketSpec, EchoSpec, Job, JobLine, JobList, LedgerBytes, OrderKind, PlanBase, PlanSpec, ReplaySpec,
    StartJob, Visitation, WeightOf, Weights, WorldSpec,
};
pub use problem::{Code, Problem};
pub use warmups::{Amount, Evicted, StartWarmup, Warmup, WarmupState, Warmups};

/// The version of the HTTP contract, as in `/v1`.
pub const API_MAJOR: u32 = 1;
