//! What is written of a declared job: what was asked, and what it was resolved to.

use fletch_api::StartJob;
use fletch_core::{DatasetName, Domain, Hash, LayoutId, Root, Tenant};
use serde::{Deserialize, Serialize};

/// What is written of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Whose cached bytes.
    pub domain: Domain,
    /// Who is charged.
    pub tenant: Tenant,
    /// What was asked; the world is the one in force.
    pub ask: StartJob,
    /// The dataset it reads through.
    pub dataset: DatasetName,
    /// The version.
    pub root: Root,
    /// The layout.
    pub layout: LayoutId,
}

impl Record {
    /// What a job's routes call it: derived from tenant and name, so that it is the same after a loss.
    #[must_use]
    pub fn id_of(domain: &Domain, tenant: &Tenant, name: &str) -> String {
        // No name has a zero byte.
        let hash = Hash::of(format!("{domain}\0{tenant}\0{name}").as_bytes());
        hash.to_string()[..24].to_owned()
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> String {
        Record::id_of(&self.domain, &self.tenant, self.ask.name.as_str())
    }

    /// What of the settings is another than what is asked now, the world apart.
    pub(super) fn differs(&self, ask: &StartJob) -> Option<&'static str> {
        let a = &self.ask;
        let pairs = [
            ("dataset", a.dataset == ask.dataset),
            ("version", (&a.version, a.root) == (&ask.version, ask.root)),
            ("layout", a.layout == ask.layout),
            ("seed", a.seed == ask.seed),
            ("order", a.order == ask.order),
            ("plan", a.plan == ask.plan),
            ("buckets", a.buckets == ask.buckets),
            ("ledger to replay", a.replay == ask.replay),
            ("visitation", a.visitation == ask.visitation),
        ];
        pairs.into_iter().find(|(_, same)| !same).map(|(what, _)| what)
    }
}
