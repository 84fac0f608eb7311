//! What is written of a declared job: what was asked, and what it was resolved to; and what of that stays in memory.
//!
//! (I6) A plan, buckets or a ledger to replay may be as long as a request. They are in the file, which is read when the job is
//! opened; [`RecordSummary`] has their hashes.

use crate::epochs::{JobError, Staged, stage, sync_parent, write_whole};
use fletch_api::{PlanBase, PlanSpec, StartJob};
use fletch_core::{DatasetName, Domain, Hash, LayoutId, Root, Tenant};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, Write as _},
    ops::Deref,
    path::Path,
};

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

    /// What stays in memory.
    #[must_use]
    pub fn known(mut self) -> RecordSummary {
        let (long, is_long) = (Long::of(&self.ask), is_long(&self.ask));
        self.ask.plan = PlanSpec::default();
        self.ask.buckets = None;
        self.ask.replay = None;
        RecordSummary { record: self, long, is_long }
    }

    /// Reads the file of a job's directory. Blocking.
    pub(super) fn read(dir: &Path) -> Result<Self, JobError> {
        let path = dir.join("job.json");
        let read = std::fs::read(&path).and_then(|b| serde_json::from_slice(&b).map_err(io::Error::from));
        read.map_err(|error| JobError::Io { path, error })
    }

    /// Writes beside the file what it is to become. Blocking.
    pub(super) fn stage(&self, dir: &Path) -> Result<Staged, JobError> {
        let path = dir.join("job.json");
        let staged = serde_json::to_vec(self).map_err(io::Error::from).and_then(|b| stage(&path, &b));
        staged.map_err(|error| JobError::Io { path, error })
    }

    /// Writes the file, durable when this returns. Blocking.
    pub(super) fn write(&self, dir: &Path) -> Result<(), JobError> {
        let path = dir.join("job.json");
        let failed = |error| JobError::Io { path: path.clone(), error };
        let bytes = serde_json::to_vec(self).map_err(|e| failed(e.into()))?;
        std::fs::create_dir_all(dir).map_err(failed)?;
        if std::fs::exists(&path).map_err(failed)? {
            write_whole(&path, &bytes).map_err(failed)?;
        } else {
            // Nothing is replaced: one sync brings the file and, on most file systems, the ways to it.
            let mut file = std::fs::File::create(&path).map_err(failed)?;
            file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(failed)?;
            sync_parent(&path).map_err(failed)?;
        }
        sync_parent(dir).map_err(failed)
    }
}

/// Whether what is asked may be as long as a request: few such are read at once.
#[must_use]
pub fn is_long(ask: &StartJob) -> bool {
    ask.plan.base != PlanBase::All || ask.buckets.is_some() || ask.replay.is_some()
}

/// Hashes of what may be long.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Long {
    plan: Hash,
    buckets: Hash,
    replay: Hash,
}

impl Long {
    fn of(ask: &StartJob) -> Self {
        // Strings, numbers and lists of them: there is nothing that JSON has no form for.
        fn hash(part: &impl Serialize) -> Hash {
            Hash::of(&serde_json::to_vec(part).unwrap_or_default())
        }
        Long { plan: hash(&ask.plan), buckets: hash(&ask.buckets), replay: hash(&ask.replay) }
    }
}

/// A record without what may be long.
#[derive(Debug, Clone)]
pub struct RecordSummary {
    record: Record,
    long: Long,
    /// See [`is_long`].
    pub is_long: bool,
}

impl Deref for RecordSummary {
    type Target = Record;

    fn deref(&self) -> &Record {
        &self.record
    }
}

impl RecordSummary {
    /// The job goes on in another world.
    pub(super) fn set_world(&mut self, world: fletch_api::WorldSpec) {
        self.record.ask.world = world;
    }

    /// What of the settings is another than what is asked now, the world apart.
    pub(super) fn header_mismatch(&self, asked: &RecordSummary) -> Option<&'static str> {
        let (a, ask, long) = (&self.record.ask, &asked.record.ask, &asked.long);
        let pairs = [
            ("dataset", a.dataset == ask.dataset),
            ("version", (&a.version, a.root) == (&ask.version, ask.root)),
            ("layout", a.layout == ask.layout),
            ("seed", a.seed == ask.seed),
            ("order", a.order == ask.order),
            ("plan", self.long.plan == long.plan),
            ("buckets", self.long.buckets == long.buckets),
            ("ledger to replay", self.long.replay == long.replay),
            ("visitation", a.visitation == ask.visitation),
        ];
        pairs.into_iter().find(|(_, same)| !same).map(|(what, _)| what)
    }
}
