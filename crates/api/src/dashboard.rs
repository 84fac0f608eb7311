//! What the admin page shows (`docs/ADMIN-PAGE.md`). Only the page of the same release reads these answers.

use crate::{
    accounts::DatasetUse, benefit::BenefitVerdict, cluster::InfoDisk, drafts::Draft, epochs::EpochState,
    jobs::Job, mounts::Mount, origins::OriginView,
};
use fletch_core::{DatasetName, Domain, JobName, Root, TagName, Tenant};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The rows of each table that an answer has by default.
pub const ROWS_DEFAULT: usize = 100;
/// The most rows of each table that an answer has.
pub const ROWS_MAX: usize = 2000;

/// What the server does now, as far as the caller may see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Dashboard {
    /// The time of the answer, in nanoseconds since 1970.
    pub at_ns: u64,
    /// The server, and the caller.
    pub server: DashboardServer,
    /// The cache on disk. Absent if no disk cache is configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<InfoDisk>,
    /// What the cache saved, of all datasets that the caller may see.
    pub savings: Savings,
    /// What is wrong now, the worst first.
    pub problems: Vec<DashboardProblem>,
    /// Datasets, those that occupy most first.
    pub datasets: Vec<DashboardDataset>,
    /// The number of datasets, with those that the answer leaves out.
    pub datasets_total: u64,
    /// Jobs: those that are stalled or wait first.
    pub jobs: Vec<DashboardJob>,
    /// The number of jobs, with those that the answer leaves out.
    pub jobs_total: u64,
    /// The number of jobs by state, with those that the answer leaves out.
    pub jobs_by_state: JobsByState,
    /// Origins, those that fail first. Empty unless the caller is an admin.
    pub origins: Vec<OriginView>,
    /// The number of origins, with those that the answer leaves out.
    pub origins_total: u64,
    /// Mounts, those with a problem first.
    pub mounts: Vec<Mount>,
    /// The number of mounts, with those that the answer leaves out.
    pub mounts_total: u64,
}

/// The server, and what it knows of the caller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DashboardServer {
    /// The version of the program.
    pub version: String,
    /// The server's own URL.
    pub url: String,
    /// `starting`, `ready` or `draining`.
    pub phase: String,
    /// Seconds since the server started.
    pub uptime_s: u64,
    /// Open connections. Absent for all but admins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<u64>,
    /// The domain of the caller.
    #[schema(value_type = String)]
    pub domain: Domain,
    /// The tenant of the caller.
    #[schema(value_type = String)]
    pub tenant: Tenant,
    /// The role of the caller.
    pub role: String,
    /// Whether the answer covers all domains and tenants.
    pub is_admin: bool,
    /// Whether the server can ask a Prometheus for the caller.
    pub has_prometheus: bool,
}

/// What the cache saved since the server first ran with its state directory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Savings {
    /// Content bytes that were sent.
    pub delivered_bytes: u64,
    /// Bytes that were read from origins.
    pub origin_bytes: u64,
    /// Bytes that were sent beyond those that were read.
    pub avoided_bytes: u64,
    /// Requests for content that were not sent to origins: the avoided bytes, at the mean size of the
    /// requests that each origin answered. Absent while the server read nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub avoided_requests: Option<u64>,
}

/// The severity of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Readers get errors.
    Critical,
    /// Readers get their bytes, but late or at a higher cost.
    Warning,
}

/// The names of the alerts that one server can decide by itself. Each has a file in `docs/runbooks`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub enum Alert {
    /// Many requests end with an error of the server.
    FletchErrorBudgetBurn,
    /// Wrong bytes were found. None of them was delivered.
    FletchWrongBytes,
    /// A job acknowledges nothing, although it has samples or waits for them.
    FletchJobStalled,
    /// The cache evicts what is read again.
    FletchThrashing,
    /// The disk of the cache does not work.
    FletchDiskFailing,
    /// An origin fails.
    FletchOriginErrors,
    /// An origin asks the server to slow down.
    FletchOriginThrottled,
    /// The file system of the cache is full.
    FletchCacheFull,
    /// A mount does not show the version that it should.
    FletchMountBroken,
    /// An epoch cannot be delivered exactly once.
    FletchEpochNotExactlyOnce,
    /// The disk of the state directory is almost full.
    FletchStateDiskFull,
    /// The server uses almost all of the memory that its container may use.
    FletchMemoryNearLimit,
    /// Credentials that a user handed over expire soon.
    FletchCredentialsExpire,
    /// The certificate of the listener expires soon.
    FletchCertificateExpires,
    /// The last listing or seal of a dataset failed.
    FletchRefreshFailed,
    /// Jobs wait for a server of the cluster that is lost.
    FletchJobWaitsForServer,
}

impl Alert {
    /// All alerts.
    pub const ALL: [Alert; 16] = [
        Alert::FletchErrorBudgetBurn,
        Alert::FletchWrongBytes,
        Alert::FletchJobStalled,
        Alert::FletchThrashing,
        Alert::FletchDiskFailing,
        Alert::FletchOriginErrors,
        Alert::FletchOriginThrottled,
        Alert::FletchCacheFull,
        Alert::FletchMountBroken,
        Alert::FletchEpochNotExactlyOnce,
        Alert::FletchStateDiskFull,
        Alert::FletchMemoryNearLimit,
        Alert::FletchCredentialsExpire,
        Alert::FletchCertificateExpires,
        Alert::FletchRefreshFailed,
        Alert::FletchJobWaitsForServer,
    ];

    /// Returns the name, which is also that of its runbook.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Alert::FletchErrorBudgetBurn => "FletchErrorBudgetBurn",
            Alert::FletchWrongBytes => "FletchWrongBytes",
            Alert::FletchJobStalled => "FletchJobStalled",
            Alert::FletchThrashing => "FletchThrashing",
            Alert::FletchDiskFailing => "FletchDiskFailing",
            Alert::FletchOriginErrors => "FletchOriginErrors",
            Alert::FletchOriginThrottled => "FletchOriginThrottled",
            Alert::FletchCacheFull => "FletchCacheFull",
            Alert::FletchMountBroken => "FletchMountBroken",
            Alert::FletchEpochNotExactlyOnce => "FletchEpochNotExactlyOnce",
            Alert::FletchStateDiskFull => "FletchStateDiskFull",
            Alert::FletchMemoryNearLimit => "FletchMemoryNearLimit",
            Alert::FletchCredentialsExpire => "FletchCredentialsExpire",
            Alert::FletchCertificateExpires => "FletchCertificateExpires",
            Alert::FletchRefreshFailed => "FletchRefreshFailed",
            Alert::FletchJobWaitsForServer => "FletchJobWaitsForServer",
        }
    }
}

/// Something that is wrong now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DashboardProblem {
    /// The name of the alert.
    pub alert: Alert,
    /// The severity.
    pub severity: Severity,
    /// What has the problem: the name of a job, an origin, a mount or the disk.
    pub subject: String,
    /// What is wrong, as a sentence.
    pub detail: String,
    /// The path of the document that says what to do, at this server.
    pub runbook: String,
}

/// A dataset, its part of the cache, and what the cache saved of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DashboardDataset {
    /// What it is, what the cache holds, and what that saved.
    #[serde(flatten)]
    pub usage: DatasetUse,
    /// Where its objects lie.
    pub uri: String,
    /// The bytes of the disk that it may occupy, those of its sweeps included. Absent if it has no share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_bytes: Option<u64>,
    /// Jobs that read it now, as far as the caller may see them.
    pub jobs: u64,
    /// Whether an origin of it fails now.
    pub is_failing: bool,
    /// As [`Savings::avoided_requests`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub avoided_requests: Option<u64>,
}

/// What a job does now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// It acknowledges nothing, although it has samples or waits for them.
    Stalled,
    /// It waits more than it works.
    Waiting,
    /// It reads, and hardly waits for Fletch.
    Running,
    /// It asks for nothing now.
    Idle,
}

/// What a job waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WaitsFor {
    /// The origin of its dataset, which fails now.
    FailingOrigin,
    /// The origin of its dataset.
    Origin,
    /// The disk of this server.
    Disk,
    /// This server.
    Server,
    /// Bytes, of a source that is not known.
    Bytes,
    /// Its own workers, which decode and transform.
    Preparation,
    /// Its own training process, which has samples and acknowledges none.
    Trainer,
}

impl WaitsFor {
    /// Returns what the verdict about a measured job says. `None` if the job hardly waits.
    #[must_use]
    pub fn of(verdict: BenefitVerdict) -> Option<Self> {
        match verdict {
            BenefitVerdict::Compute => None,
            BenefitVerdict::Preparation => Some(WaitsFor::Preparation),
            BenefitVerdict::Origin => Some(WaitsFor::Origin),
            BenefitVerdict::Disk => Some(WaitsFor::Disk),
            BenefitVerdict::Queue => Some(WaitsFor::Server),
        }
    }
}

impl WaitsFor {
    /// Returns the words that follow "waits for".
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            WaitsFor::FailingOrigin => "the origin, which fails",
            WaitsFor::Origin => "the origin",
            WaitsFor::Disk => "the server's disk",
            WaitsFor::Server => "the server",
            WaitsFor::Bytes => "bytes",
            WaitsFor::Preparation => "its own preparation",
            WaitsFor::Trainer => "its training process",
        }
    }
}

/// What a job does now: the one verdict that the admin page, `fletch status` and `fletch jobs show` print.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobDoing {
    /// What it does now.
    pub state: JobState,
    /// What it waits for. Absent if it does not wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<WaitsFor>,
    /// Since when it has been in this state, waiting for this, in nanoseconds since 1970.
    pub since_ns: u64,
    /// Both in words, which follow the name of the job.
    pub words: String,
}

impl JobDoing {
    /// Returns a verdict with its words.
    #[must_use]
    pub fn new(state: JobState, waits_for: Option<WaitsFor>, since_ns: u64) -> Self {
        let what = waits_for.map_or("bytes", WaitsFor::words);
        let words = match (state, waits_for) {
            (JobState::Stalled, Some(WaitsFor::Trainer)) => {
                "stands still: its training process acknowledges nothing".to_owned()
            }
            (JobState::Stalled, _) => format!("stands still: waits for {what}"),
            (JobState::Waiting, _) => format!("waits for {what}"),
            (JobState::Running, Some(_)) => format!("runs; waits for {what}"),
            (JobState::Running, None) => "runs".to_owned(),
            (JobState::Idle, _) => "asks for nothing".to_owned(),
        };
        JobDoing { state, waits_for, since_ns, words }
    }
}

/// The number of jobs in each state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobsByState {
    /// Stalled jobs.
    pub stalled: u64,
    /// Waiting jobs.
    pub waiting: u64,
    /// Running jobs.
    pub running: u64,
    /// Idle jobs.
    pub idle: u64,
}

/// The progress of a job's latest epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EpochProgress {
    /// The number of the epoch.
    pub epoch: u64,
    /// The state of the epoch.
    pub state: EpochState,
    /// The entries that the epoch delivers.
    pub planned: u64,
    /// The acknowledged entries.
    pub acked: u64,
    /// The entries that are leased and not acknowledged.
    pub held: u64,
    /// The entries that were granted again.
    pub redelivered: u64,
}

/// A job, declared or not, and one dataset that it reads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DashboardJob {
    /// The id of a declared job, as in its routes. Of a job that only reads, an id of this page.
    pub id: String,
    /// Whether the job was declared.
    pub is_declared: bool,
    /// The name.
    #[schema(value_type = String)]
    pub name: JobName,
    /// The tenant.
    #[schema(value_type = String)]
    pub tenant: Tenant,
    /// The domain of the dataset.
    #[schema(value_type = String)]
    pub domain: Domain,
    /// The dataset.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// What it does now, since when.
    #[serde(flatten)]
    pub doing: JobDoing,
    /// The latest epoch. Absent for jobs without one, and while a declared job is closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<EpochProgress>,
    /// Acknowledged entries a second, over the last minute. Absent unless an epoch is open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// Bytes that were sent to it a second, over the last minute. Absent in its first seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_rate: Option<f64>,
    /// Seconds until the epoch ends at this rate. Absent without a rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_s: Option<f64>,
    /// Its rate as a part of the rate without waits, 0 to 1. Absent if it is not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<f64>,
    /// The part of the last minute in which it waited for bytes, 0 to 1. Absent in its first seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall_part: Option<f64>,
    /// Bytes that were sent and counted as `hit`.
    pub hit_bytes: u64,
    /// Bytes that were sent and counted as `substituted`.
    pub substituted_bytes: u64,
    /// Bytes that were sent and counted as `miss`.
    pub miss_bytes: u64,
    /// Bytes that were sent and counted as `bypass`.
    pub bypass_bytes: u64,
    /// Content bytes that the server read from origins for the job.
    pub origin_bytes: u64,
    /// The time in which at least one reply of the job waited for bytes, in milliseconds.
    pub stalled_ms: u64,
}

/// One job: its rows of the dashboard, and its declaration with all epochs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DashboardJobDetail {
    /// The row.
    pub row: DashboardJob,
    /// The job, if it is in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<Job>,
    /// The last hour of the job.
    pub history: DashboardHistory,
}

/// One dataset: its row of the dashboard, its versions and its readers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DashboardDatasetDetail {
    /// The row.
    pub row: DashboardDataset,
    /// Where its tables lie.
    pub tables: String,
    /// When it was registered, in nanoseconds since 1970.
    pub registered_ns: u64,
    /// The versions that the server knows now: those of tags, jobs, mounts and open tables.
    pub versions: Vec<DashboardVersion>,
    /// Why the tags could not be listed. Absent if they were, and for another domain than the caller's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tags_problem: Option<String>,
    /// The jobs that read it.
    pub jobs: Vec<DashboardJob>,
    /// The mounts that show it.
    pub mounts: Vec<Mount>,
}

/// A version of a dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DashboardVersion {
    /// The root.
    #[schema(value_type = String)]
    pub root: Root,
    /// The tags that name it.
    #[schema(value_type = Vec<String>)]
    pub tags: Vec<TagName>,
    /// The bytes of its files. Absent while it is not open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// The number of files that a mount shows. Absent while it is not open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<u64>,
    /// Its entries: files, links, empty directories, and members of tar shards. Absent while it is not open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entries: Option<u64>,
    /// When it was made, in nanoseconds since 1970. Absent while it is not open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_ns: Option<u64>,
    /// What is known of it, if it is a draft in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<Draft>,
    /// The declared jobs that read it.
    pub jobs: u64,
    /// The mounts that show it.
    pub mounts: u64,
}

/// Where a history comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum HistorySource {
    /// The memory of this server: it begins with the server.
    Memory,
    /// The configured Prometheus, of all servers that it scrapes.
    Prometheus,
}

/// Numbers over time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DashboardHistory {
    /// Where the numbers come from.
    pub source: HistorySource,
    /// The times, in seconds since 1970.
    pub times: Vec<f64>,
    /// The numbers.
    pub series: Vec<HistorySeries>,
}

/// One line of a history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HistorySeries {
    /// The name, which is fixed: `delivered`, `origin`, `avoided`, `errors`, `rate` or `stalled`.
    pub name: String,
    /// One value for each time: bytes a second, a number a second, or a part from 0 to 1. `null`: not known.
    pub values: Vec<Option<f64>>,
}
