//! Errors of jobs and epochs. A request that ends in one of them changed nothing.

use crate::{
    data::versions::{SamplesError, VersionError},
    tenancy::tenants::StateFull,
};
use fletch_api::{Code, Loader};
use fletch_core::{
    delivery::{lease::LeaseError, ledger::BadLedger},
    order::bucketed::BadBuckets,
    plan::{PlanError, unit_map::BadUnitMap},
};
use std::{io, path::PathBuf, sync::Arc, time::Duration};

/// The error of a request to a job or an epoch; `http/error.rs` maps its code to a status.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The tenant has no such job.
    #[error("this tenant has no such job")]
    NotFound,
    /// The job was declared before, with another setting.
    #[error("job {name} was declared with another {what}")]
    Differs {
        /// The job's name.
        name: String,
        /// The setting or field that differs.
        what: &'static str,
    },
    /// The plan or the world is invalid.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The buckets are invalid.
    #[error(transparent)]
    Buckets(#[from] BadBuckets),
    /// The ledger to replay is damaged, or belongs to another job.
    #[error("{0}")]
    BadLedger(String),
    /// The plan names samples that the version does not have, or the request lacks a part.
    #[error("{0}")]
    InvalidPlan(String),
    /// A setting of the job is invalid.
    #[error("{0}")]
    BadSettings(String),
    /// The job cannot be probed now.
    #[error("the job cannot be probed: {0}")]
    NoProbe(String),
    /// The request asks for, acknowledges or renews more than one request may.
    #[error("{0}")]
    TooLarge(String),
    /// What a rank's process says of a lost epoch cannot be used.
    #[error("a rank's record cannot be used: {0}")]
    BadRecord(String),
    /// The request names its process in a form that is not valid.
    #[error("{0}")]
    BadLoader(String),
    /// Another process is this rank, and lives.
    #[error("rank {rank} of job {job} belongs to {by}, which reads on")]
    RankInUse {
        /// The job's name.
        job: String,
        /// The rank.
        rank: u32,
        /// The process that is the rank.
        by: Arc<Loader>,
    },
    /// Another process took over this rank.
    #[error("rank {rank} of job {job} was taken over by {by}")]
    RankTaken {
        /// The job's name.
        job: String,
        /// The rank.
        rank: u32,
        /// The process that is the rank now.
        by: Arc<Loader>,
    },
    /// Another process was this rank, and may still live.
    #[error(
        "rank {rank} of job {job} belongs to {by}; if that stays silent, this process gets it in {left:.1?}"
    )]
    RankWaits {
        /// The job's name.
        job: String,
        /// The rank.
        rank: u32,
        /// The process that is the rank.
        by: Arc<Loader>,
        /// The time until that process counts as gone.
        left: Duration,
    },
    /// The leases reject the request.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// The epoch accepts no lease requests and acks any more.
    #[error("epoch {epoch} is {what}")]
    Closed {
        /// The epoch's number.
        epoch: u64,
        /// `finished` or `abandoned`.
        what: &'static str,
    },
    /// The epoch is not finished.
    #[error("epoch {epoch} is not finished: {left} entries are not acknowledged yet")]
    Open {
        /// The epoch's number.
        epoch: u64,
        /// Entries that are not acknowledged yet.
        left: u64,
    },
    /// The epoch has not begun, or is forgotten.
    #[error("epoch {0} has not begun")]
    NoEpoch(u64),
    /// The epoch cannot change its world now.
    #[error("the world of epoch {epoch} cannot change: {what}")]
    MidStep {
        /// The epoch's number.
        epoch: u64,
        /// The reason.
        what: &'static str,
    },
    /// The state belongs to another job or epoch.
    #[error("the state's {what} is {got}, the epoch's is {want}")]
    StateDiffers {
        /// The setting or field that differs.
        what: &'static str,
        /// The state's value.
        got: String,
        /// The expected value.
        want: String,
    },
    /// The server has the epoch, and more was delivered than the state says.
    #[error("the state does not match what was delivered of epoch {0} or of a later epoch")]
    StateBehind(u64),
    /// The state cannot be read.
    #[error("the state cannot be read: {0}")]
    BadState(String),
    /// The job's visitation is not `checkpoint`.
    #[error("the job's visitation has no commits")]
    NoCommits,
    /// The server is at a limit.
    #[error("{0}")]
    AtLimit(String),
    /// An epoch's ledger is at its limit.
    #[error("the ledger of epoch {epoch} has reached its limit of {most} bytes")]
    LedgerFull {
        /// The epoch's number.
        epoch: u64,
        /// The limit in bytes.
        most: u64,
    },
    /// The tenant's job records and ledgers have reached their limit.
    #[error(transparent)]
    StateFull(#[from] StateFull),
    /// The version cannot be read.
    #[error(transparent)]
    Version(#[from] VersionError),
    /// The version's tables contradict themselves.
    #[error(transparent)]
    UnitMap(#[from] BadUnitMap),
    /// A file of the state directory is damaged.
    #[error("{path}: {why}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The damage.
        why: BadLedger,
    },
    /// A file of the state directory cannot be read or written.
    #[error("{path}: {error}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// A task of the server ended without an answer.
    #[error("a task was lost")]
    TaskLost,
    /// The cluster did not record the declaration.
    #[error("the job was not declared: {0}")]
    Unrecorded(String),
    /// The job or epoch is being closed; the next request opens it anew.
    #[error("the job is being opened anew")]
    Reopening,
}

impl From<SamplesError> for JobError {
    fn from(e: SamplesError) -> Self {
        match e {
            SamplesError::Version(e) => JobError::Version(e),
            SamplesError::Request(why) => JobError::InvalidPlan(why),
            SamplesError::UnitMap(e) => JobError::UnitMap(e),
            SamplesError::Lost => JobError::TaskLost,
        }
    }
}

impl JobError {
    /// Returns whether the epoch's own file is damaged or unreadable, so that a retry would fail, too.
    #[must_use]
    pub fn is_file_damage(&self) -> bool {
        match self {
            JobError::Damaged { .. } | JobError::StateDiffers { .. } => true,
            JobError::Io { error, .. } => {
                use nix::libc::{EACCES, EIO, EISDIR, EPERM};
                // Other errors are temporary: too many open files, too little memory.
                error.raw_os_error().is_some_and(|e| [EIO, EACCES, EPERM, EISDIR].contains(&e))
            }
            _ => false,
        }
    }

    /// Returns the stable code of the error.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            JobError::NotFound | JobError::NoEpoch(_) => Code::NotFound,
            JobError::Differs { .. } => Code::JobDiffers,
            JobError::Plan(_) | JobError::InvalidPlan(_) | JobError::Buckets(_) | JobError::TooLarge(_) => {
                Code::BadPlan
            }
            JobError::BadSettings(_) | JobError::NoProbe(_) | JobError::BadLoader(_) => Code::BadRequest,
            JobError::RankInUse { .. } => Code::RankInUse,
            JobError::RankTaken { .. } => Code::RankTaken,
            JobError::RankWaits { .. } => Code::RankWaits,
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
            JobError::BadState(_) | JobError::BadRecord(_) => Code::BadState,
            JobError::NoCommits => Code::NoCommit,
            JobError::AtLimit(_) => Code::Overloaded,
            JobError::LedgerFull { .. } => Code::LedgerFull,
            JobError::StateFull(_) => Code::StateFull,
            JobError::Version(e) => e.code(),
            JobError::UnitMap(e) if e.kind() == fletch_core::Kind::Corrupt => Code::TablesCorrupt,
            JobError::UnitMap(_) => Code::BadPlan,
            JobError::Reopening => Code::Overloaded,
            JobError::Unrecorded(_) => Code::NotReady,
            JobError::Damaged { .. } | JobError::Io { .. } | JobError::TaskLost => Code::Internal,
        }
    }

    /// Returns what the caller can do about the error.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            JobError::NotFound => "declare the job first; `fletch jobs list` names the declared jobs",
            JobError::NoEpoch(_) => {
                "an epoch begins with its first lease or a state; the server remembers the last 16 epochs \
                 of a job"
            }
            JobError::Differs { .. } => {
                "use another name, change only the world, or delete the job (`fletch jobs delete NAME`)"
            }
            JobError::Plan(_) | JobError::InvalidPlan(_) | JobError::Buckets(_) => {
                "change plan, buckets or world; nothing was declared"
            }
            JobError::BadSettings(_) => "nothing was changed; `fletch jobs show NAME` shows the settings",
            JobError::NoProbe(_) => {
                "probe it while it trains under the order substitute, with a part of its dataset in the cache"
            }
            JobError::BadLoader(_) => "name the process as docs/EPOCHS.md says, or leave `loader` out",
            JobError::RankInUse { .. } => {
                "end that process, give this one another job name (`job=` of EpochDataset), or take the rank \
                 over (`take_over=True` of EpochDataset, `loader.take_over` of the API)"
            }
            JobError::RankTaken { .. } => {
                "end this process; to read beside the other one, give it another job name (`job=` of \
                 EpochDataset)"
            }
            JobError::RankWaits { .. } => {
                "wait: a restart gets the rank when its former process has been silent for limits.lease_ttl; \
                 `take_over=True` of EpochDataset takes it at once"
            }
            JobError::TooLarge(_) => {
                "ask for as much as the message says, in several requests; nothing was changed"
            }
            JobError::Lease(LeaseError::Rank { .. }) => {
                "ranks count from 0; `fletch jobs show NAME` shows the world"
            }
            JobError::Lease(LeaseError::Stale { .. }) => "count sequence numbers up per rank and worker",
            JobError::Lease(LeaseError::Gone(_)) => "drop the batch: the server delivers its samples again",
            JobError::Lease(LeaseError::Foreign { .. }) => {
                "acknowledge a lease as the rank to which it was granted"
            }
            JobError::Lease(LeaseError::Beyond { .. }) => {
                "upto is a number of entries, counted from the first entry of the lease"
            }
            JobError::Lease(LeaseError::Commit(_)) => {
                "`fletch jobs show NAME` lists the commits that the server remembers"
            }
            JobError::Lease(_) => "see the server's log",
            JobError::NoCommits => "declare the job with visitation checkpoint",
            JobError::Closed { .. } => {
                "continue with a later epoch, or declare a job with another name to read the dataset again"
            }
            JobError::Open { .. } => "acknowledge all received entries first",
            JobError::BadLedger(_) => {
                "give the saved ledger of an epoch that delivered entries to one number of ranks; \
                 name no seed; declare dataset, version, plan, buckets and ranks as in that job"
            }
            JobError::MidStep { .. } => {
                "acknowledge the whole step first, then change the number of ranks; batch and tail can \
                 change after the epoch has ended"
            }
            JobError::StateDiffers { .. } => {
                "declare the job with the settings that it had when the state was saved"
            }
            JobError::StateBehind(_) => {
                "add ?replace=true to forget what was delivered since the state; the server then deletes \
                 later epochs and their receipts"
            }
            JobError::BadState(_) => "give the bytes of a saved state, unchanged",
            JobError::BadRecord(_) => "load a saved state of the job (`fletch jobs restore`)",
            JobError::LedgerFull { .. } => {
                "save the epoch's state and load it again, which replaces the ledger, while no rank is in a \
                 later epoch (the server deletes later epochs); acknowledge whole or larger leases, or raise \
                 limits.ledger_bytes"
            }
            JobError::StateFull(_) => {
                "delete jobs that have ended (`fletch jobs delete NAME`), or ask the administrator for a \
                 larger quota `state`; nothing that was acknowledged is lost, and the epoch then goes on"
            }
            JobError::AtLimit(_) => "delete jobs that have ended (`fletch jobs delete NAME`)",
            JobError::Version(e) => e.hint(),
            JobError::UnitMap(_) => "index the dataset again",
            JobError::Damaged { .. } => "restore the file from a backup, or put a state with ?replace=true",
            JobError::Io { .. } => "check the disk of --state-dir",
            JobError::TaskLost => "see the server's log",
            JobError::Unrecorded(_) => {
                "check that etcd can be reached, and declare the job again; declared jobs go on meanwhile"
            }
            JobError::Reopening => "ask again",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loader() -> Arc<Loader> {
        let (id, host) = ("0".repeat(32), "host".to_owned());
        Arc::new(Loader { id, host, pid: 1, since_ms: 0, take_over: false, leave: false })
    }

    #[test]
    fn hints_name_no_methods_of_the_api() {
        let errors = [
            JobError::NotFound,
            JobError::NoEpoch(1),
            JobError::Differs { name: "n".into(), what: "seed" },
            JobError::InvalidPlan(String::new()),
            JobError::BadSettings(String::new()),
            JobError::NoProbe(String::new()),
            JobError::BadLoader(String::new()),
            JobError::RankInUse { job: String::new(), rank: 0, by: loader() },
            JobError::RankTaken { job: String::new(), rank: 0, by: loader() },
            JobError::RankWaits { job: String::new(), rank: 0, by: loader(), left: Duration::ZERO },
            JobError::TooLarge(String::new()),
            JobError::Lease(LeaseError::Gone(1)),
            JobError::Closed { epoch: 1, what: "finished" },
            JobError::Open { epoch: 1, left: 1 },
            JobError::BadLedger(String::new()),
            JobError::MidStep { epoch: 1, what: "w" },
            JobError::StateDiffers { what: "w", got: String::new(), want: String::new() },
            JobError::StateBehind(1),
            JobError::BadState(String::new()),
            JobError::BadRecord(String::new()),
            JobError::NoCommits,
            JobError::AtLimit(String::new()),
            JobError::LedgerFull { epoch: 1, most: 1 },
            JobError::TaskLost,
            JobError::Unrecorded(String::new()),
            JobError::Reopening,
        ];
        for hint in errors.iter().map(JobError::hint) {
            for method in ["GET", "POST", "PUT", "DELETE"] {
                assert!(!hint.contains(method), "a user of Python or of the CLI reads {hint:?}");
            }
        }
    }
}
