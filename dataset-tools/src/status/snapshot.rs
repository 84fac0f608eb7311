//! The answers of a server at one moment.

use fletch_api::dashboard::DashboardJob;
use fletch_api::{
    Accounts, Allocation, Dataset, Draft, Info, JobLine, MountBenefit, OriginState, OriginView,
};
use serde::Serialize;

/// A directory where a dataset is mounted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MountRow {
    /// The directory.
    pub dir: String,
    /// The machine.
    pub host: String,
    /// The dataset. Empty if nobody knows it.
    pub dataset: String,
    /// The job that the mount's bytes count for.
    pub job: String,
    /// Whether the mount's process is gone, so that every read fails.
    pub dead: bool,
    /// Why the directory does not show the version that its name means now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// What cache is worth to the programs in the mount.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub benefit: Option<MountBenefit>,
}

/// A credential that somebody handed to the server. It holds no secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CredentialRow {
    pub origin: String,
    /// A name of whoever owns it, such as a shortened key id.
    pub identity: String,
    /// Until when it is valid, in nanoseconds since 1970, if that is known.
    pub expires_ns: Option<u64>,
}

/// The answers of a server at one moment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Snapshot {
    /// The server that answered.
    pub server: String,
    /// The servers of its cluster; empty for a server that is alone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cluster: Vec<String>,
    /// When the answers came, in nanoseconds since 1970.
    pub at_ns: u64,
    /// What the server says of itself.
    pub info: Info,
    /// The registered datasets.
    pub datasets: Vec<Dataset>,
    /// The drafts in use.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub drafts: Vec<Draft>,
    /// Accounts and costs.
    pub accounts: Accounts,
    /// The declared jobs.
    pub jobs: Vec<JobLine>,
    /// What each job does, as the admin page shows it. Empty from a server of another release.
    #[serde(rename = "jobs_now", skip_serializing_if = "Vec::is_empty")]
    pub seen: Vec<DashboardJob>,
    /// The division of the disk.
    pub allocation: Allocation,
    /// The origins; empty if the caller is no admin.
    pub origins: Vec<OriginView>,
    pub mounts: Vec<MountRow>,
    /// The credentials; empty if the caller is no admin.
    pub credentials: Vec<CredentialRow>,
}

impl Snapshot {
    /// Returns the origins that fail now.
    #[must_use]
    pub fn failing(&self) -> Vec<&OriginView> {
        self.origins.iter().filter(|o| o.state == OriginState::Failing).collect()
    }

    /// Returns the seconds since an earlier snapshot.
    #[must_use]
    pub fn seconds_since(&self, before: &Snapshot) -> f64 {
        std::time::Duration::from_nanos(self.at_ns.saturating_sub(before.at_ns)).as_secs_f64()
    }
}
