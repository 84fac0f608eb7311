//! The HTTP API of Fletch: routes, headers, request and answer types, stream frames, and problem codes.
//!
//! Server and client compile against these types, and `docs/openapi.json` is generated from them. Contains no
//! server or client code. Only this crate maps the [`fletch_core::Kind`] of an error to an HTTP status.

#![warn(missing_docs)]

pub mod accounts;
pub mod allocation;
pub mod batch;
pub mod benefit;
pub mod cluster;
pub mod credentials;
pub mod dashboard;
pub mod datasets;
pub mod drafts;
pub mod epochs;
pub mod frames;
pub mod headers;
pub mod hits;
pub mod hosts;
pub mod jobs;
pub mod loaders;
pub mod mounts;
pub mod node;
pub mod origins;
pub mod problem;
pub mod reclaim;
pub mod routes;
pub mod s3;
pub mod term;
pub mod warmups;
pub mod world;

pub use accounts::{Account, AccountKey, Accounts, ByteResult, ByteTier, DatasetUse, JobUse};
pub use allocation::{
    Allocation, AllocationReason, CurvePoint, DatasetShare, JobSettings, JobShare, ShareBasis,
};
pub use batch::{BATCH_ITEMS_MAX, BatchItem, BatchRequest, ChunkSpan};
pub use cluster::{Cluster, Formats, Info, InfoDisk, InfoLimits, Member, MemberState, Publish};
pub use credentials::{CredentialsList, GiveCredentials, GivenCredentials, OriginOptions, Secrets};
pub use datasets::{
    Dataset, Datasets, ListedDataset, ObjectPin, PutDataset, RegisterDataset, RegisteredDataset, RenewedPin,
    RenewedPins, ResolvedVersion, Tags, Unconfirmed,
};
pub use drafts::{Draft, LearnedFile, LearnedFiles, Listing, RunState, Sealing};
pub use epochs::{
    Ack, Acked, Acks, BatchTimes, Checkpoint, Epoch, EpochReceipt, EpochState, GrantStatus, LeaseGrant,
    LeaseRequest, RefPiece, Rollback, SampleFile, SampleHead, SampleRef, Times,
};
pub use jobs::{
    BucketSpec, EchoSpec, GateWait, Job, JobLine, JobList, JobSweep, LedgerBytes, OrderKind, PlanBase,
    PlanSpec, ReplaySpec, StartJob, Visitation, WaitingJob, WeightOf, Weights,
};
pub use loaders::{AckedBy, JobLoaders, Loader, RankLoader};
pub use mounts::{AnnounceMount, Mount, MountBenefit, MountReads, MountState, Mounts};
pub use origins::{OriginFailure, OriginList, OriginState, OriginView};
pub use problem::{Code, Problem};
pub use reclaim::{LostRank, MoveJob, MovedJobs, Reclaim, Reclaimed, ReclaimedEpoch, UnknownRanks};
pub use term::TermStamp;
pub use warmups::{Amount, Evicted, StartWarmup, Warmup, WarmupState, Warmups};
pub use world::WorldSpec;

/// The text with which a port that speaks TLS answers a request of plain HTTP, with the status 400.
pub const SPEAKS_TLS: &str = "this port speaks TLS; use https://";

/// The major version of the API, as in `/v1`.
pub const API_MAJOR: u32 = 1;
