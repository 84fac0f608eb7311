//! Why a job or an epoch refuses something. Nothing was changed then.

use crate::versions::{SamplesError, VersionError};
use fletch_api::Code;
use fletch_core::{
    delivery::{lease::LeaseError, ledger::BadLedger},
    order::bucketed::BadBuckets,
    plan::{PlanError, unit_map::BadUnitMap},
};
use std::{io, path::PathBuf};

/// One boundary's error; `http/problem.rs` maps its code once.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// No such job of this tenant.
    #[error("no such job here")]
    NotFound,
    /// One of that name has other settings.
    #[error("job {name} was declared with another {what}")]
    Differs {
        /// Its name.
        name: String,
        /// What differs.
        what: &'static str,
    },
    /// The plan or the world cannot be.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The buckets cannot be.
    #[error(transparent)]
    Buckets(#[from] BadBuckets),
    /// The ledger to replay is damaged, or of something else.
    #[error("{0}")]
    BadLedger(String),
    /// The plan names what the version does not have, or nothing to read.
    #[error("{0}")]
    Ask(String),
    /// One request asks for, acknowledges or renews more than one may.
    #[error("{0}")]
    Request(String),
    /// A lease refuses.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// The epoch takes no leases or acks any more.
    #[error("epoch {epoch} is {what}")]
    Closed {
        /// Which.
        epoch: u64,
        /// Finished or abandoned.
        what: &'static str,
    },
    /// The epoch is not finished.
    #[error("epoch {epoch} has {left} entries to be acknowledged")]
    Open {
        /// Which.
        epoch: u64,
        /// How many are left.
        left: u64,
    },
    /// No such epoch.
    #[error("epoch {0} has not begun")]
    NoEpoch(u64),
    /// The world cannot change now.
    #[error("the world of epoch {epoch} cannot change: {what}")]
    MidStep {
        /// Which.
        epoch: u64,
        /// Why.
        what: &'static str,
    },
    /// The state is of something else.
    #[error("the state's {what} is {got}, the epoch's is {want}")]
    StateDiffers {
        /// What differs.
        what: &'static str,
        /// What the state says.
        got: String,
        /// What it should say.
        want: String,
    },
    /// The epoch is there and further.
    #[error("what was delivered of epoch {0}, or of a later one, is not what the state says")]
    StateBehind(u64),
    /// The state is no state.
    #[error("the state cannot be read: {0}")]
    BadState(String),
    /// Commits are of jobs whose visitation is `checkpoint`.
    #[error("the job's visitation knows no commits")]
    Uncommitted,
    /// A bound.
    #[error("{0}")]
    Full(String),
    /// Nothing more goes into an epoch's ledger.
    #[error("the ledger of epoch {epoch} is at its bound of {most} bytes")]
    LedgerFull {
        /// Which.
        epoch: u64,
        /// The bound.
        most: u64,
    },
    /// The version.
    #[error(transparent)]
    Version(#[from] VersionError),
    /// Its tables contradict themselves.
    #[error(transparent)]
    UnitMap(#[from] BadUnitMap),
    /// A file of the state directory cannot be believed.
    #[error("{path}: {why}")]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        why: BadLedger,
    },
    /// A file of the state directory cannot be read or written.
    #[error("{path}: {error}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// A task was lost.
    #[error("a task was lost")]
    Lost,
    /// What was asked is being closed, and opened anew by the next request.
    #[error("the job is being opened anew")]
    Reopening,
}

impl From<SamplesError> for JobError {
    fn from(e: SamplesError) -> Self {
        match e {
            SamplesError::Version(e) => JobError::Version(e),
            SamplesError::Request(why) => JobError::Ask(why),
            SamplesError::UnitMap(e) => JobError::UnitMap(e),
            SamplesError::Lost => JobError::Lost,
        }
    }
}

impl JobError {
    /// Whether an epoch's own file is to blame, and will be the next time: it cannot be believed, or not be read.
    #[must_use]
    pub fn is_of_its_file(&self) -> bool {
        match self {
            JobError::Damaged { .. } | JobError::StateDiffers { .. } => true,
            JobError::Io { error, .. } => {
                use nix::libc::{EACCES, EIO, EISDIR, EPERM};
                // Others pass: too many open files, too little memory.
                error.raw_os_error().is_some_and(|e| [EIO, EACCES, EPERM, EISDIR].contains(&e))
            }
            _ => false,
        }
    }

    /// The stable word for it.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            JobError::NotFound | JobError::NoEpoch(_) => Code::NotFound,
            JobError::Differs { .. } => Code::JobDiffers,
            JobError::Plan(_) | JobError::Ask(_) | JobError::Buckets(_) | JobError::Request(_) => {
                Code::BadPlan
            }
            JobError::Lease(e) => match e {
                LeaseError::Rank { .. } => Code::BadRank,
                LeaseError::Stale { .. } => Code::StaleSequence,
                LeaseError::Gone(_) => Code::LeaseGone,
                LeaseError::Foreign { .. } => Code::LeaseForeign,
                LeaseError::Beyond { .. } => Code::BadAck,
                LeaseError::World { .. } => Code::BadPlan,
                LeaseError::Entry(_) => Code::BadState,
                LeaseError::Commit(_) => Code::NoCommit,
                LeaseError::Busy(_) => Code::Internal,
            },
            JobError::Closed { .. } => Code::EpochClosed,
            JobError::Open { .. } => Code::EpochOpen,
            JobError::BadLedger(_) => Code::BadLedger,
            JobError::MidStep { .. } => Code::MidStep,
            JobError::StateDiffers { .. } => Code::StateDiffers,
            JobError::StateBehind(_) => Code::StateBehind,
            JobError::BadState(_) => Code::BadState,
            JobError::Uncommitted => Code::NoCommit,
            JobError::Full(_) => Code::Overloaded,
            JobError::LedgerFull { .. } => Code::LedgerFull,
            JobError::Version(e) => e.code(),
            JobError::UnitMap(e) if e.kind() == fletch_core::Kind::Corrupt => Code::TablesCorrupt,
            JobError::UnitMap(_) => Code::BadPlan,
            JobError::Reopening => Code::Overloaded,
            JobError::Damaged { .. } | JobError::Io { .. } | JobError::Lost => Code::Internal,
        }
    }

    /// What a person can do about it.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            JobError::NotFound => "declare the job with POST /v1/jobs first",
            JobError::NoEpoch(_) => {
                "it begins with its first lease, or a state; the last 16 epochs are remembered, and of older ones nothing is kept"
            }
            JobError::Differs { .. } => {
                "use another name, change only the world (PUT …/world), or delete the job"
            }
            JobError::Plan(_) | JobError::Ask(_) | JobError::Buckets(_) => {
                "change plan, buckets or world; nothing was declared"
            }
            JobError::Request(_) => {
                "ask for as much as the message says, in several requests; nothing was changed"
            }
            JobError::Lease(LeaseError::Rank { .. }) => {
                "ranks count from 0; see GET /v1/jobs/{id} for the world"
            }
            JobError::Lease(LeaseError::Stale { .. }) => "count sequence numbers up per rank and worker",
            JobError::Lease(LeaseError::Gone(_)) => "drop the batch: what it held is delivered again",
            JobError::Lease(LeaseError::Foreign { .. }) => {
                "acknowledge with the rank that the lease was granted to"
            }
            JobError::Lease(LeaseError::Beyond { .. }) => "upto counts the lease's entries from its first",
            JobError::Lease(LeaseError::Commit(_)) => "GET …/jobs/{id} lists the commits that are remembered",
            JobError::Lease(_) => "see the server's log",
            JobError::Uncommitted => "declare the job with visitation checkpoint",
            JobError::Closed { .. } => "go on to a later epoch, or use another job name to read it anew",
            JobError::Open { .. } => "acknowledge what was received, until the epoch is finished",
            JobError::BadLedger(_) => {
                "give the bytes of GET …/ledger of an epoch that delivered something, to one number of ranks; name no seed, and declare dataset, version, plan, buckets and ranks as that job had them"
            }
            JobError::MidStep { .. } => {
                "acknowledge all of the step in the world it was begun in, then change the number of ranks; batch and tail stay until the epoch has ended"
            }
            JobError::StateDiffers { .. } => "declare the job as it was when the state was saved",
            JobError::StateBehind(_) => {
                "add ?replace=true to forget what was delivered since; later epochs are deleted then, with their receipts"
            }
            JobError::BadState(_) => "put the bytes that GET …/state gave",
            JobError::LedgerFull { .. } => {
                "put the epoch's own state (GET …/state) with ?replace=true while no rank is in a later epoch (those are deleted), which begins a short ledger; acknowledge whole leases, or larger ones, or raise limits.ledger_bytes"
            }
            JobError::Full(_) => "delete jobs that are over (DELETE /v1/jobs/{id})",
            JobError::Version(e) => e.hint(),
            JobError::UnitMap(_) => "index the dataset again",
            JobError::Damaged { .. } => "restore the file from a backup, or put a state with ?replace=true",
            JobError::Io { .. } => "check the disk of --state-dir",
            JobError::Lost => "see the server's log",
            JobError::Reopening => "ask again",
        }
    }
}
