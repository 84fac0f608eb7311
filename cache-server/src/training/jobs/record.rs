//! The record of a declared job: the declaration and what its names resolved to; and the part kept in memory.
//!
//! (I6) A plan, buckets or a ledger to replay may be as long as a request. They stay in the file, which is
//! read when the job is opened; [`RecordSummary`] has their hashes.

use crate::training::epochs::JobError;
use fletch_api::{PlanBase, PlanSpec, StartJob};
use fletch_core::{DatasetName, Domain, Hash, LayoutId, Root, Tenant};
use fletch_host::replace::{Staged, replace_file, stage_file, sync_parent};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, Write as _},
    ops::Deref,
    path::Path,
};

/// The name of a record's file in its job's directory.
pub const RECORD_FILE: &str = "job.json";

/// The record of a declared job, as it is written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The domain whose cached bytes the job shares.
    pub domain: Domain,
    /// The tenant that is charged.
    pub tenant: Tenant,
    /// The declaration; its world is the one in force.
    pub ask: StartJob,
    /// The dataset through which the job reads.
    pub dataset: DatasetName,
    /// The version's root.
    pub root: Root,
    pub layout: LayoutId,
}

impl Record {
    /// Returns the job's id, derived from tenant and name, so that it is the same after a loss of all state.
    #[must_use]
    pub fn id_of(domain: &Domain, tenant: &Tenant, name: &str) -> String {
        // Names contain no zero byte.
        let hash = Hash::of(format!("{domain}\0{tenant}\0{name}").as_bytes());
        hash.to_string()[..24].to_owned()
    }

    /// Returns the job's id.
    #[must_use]
    pub fn id(&self) -> String {
        Record::id_of(&self.domain, &self.tenant, self.ask.name.as_str())
    }

    /// Returns the bytes of the record as it is written.
    ///
    /// # Errors
    /// [`JobError::Io`] if it cannot be written as JSON.
    pub fn bytes(&self) -> Result<u64, JobError> {
        let mut count = ByteCount(0);
        let path = || RECORD_FILE.into();
        serde_json::to_writer(&mut count, self)
            .map_err(|e| JobError::Io { path: path(), error: e.into() })?;
        Ok(count.0)
    }

    /// Returns the part that is kept in memory.
    #[must_use]
    pub fn known(mut self) -> RecordSummary {
        let (long, is_long) = (Long::of(&self.ask), is_long(&self.ask));
        self.ask.plan = PlanSpec::default();
        self.ask.buckets = None;
        self.ask.replay = None;
        RecordSummary { record: self, long, is_long }
    }

    /// Reads the record in a job's directory. Blocking.
    pub(super) fn read(dir: &Path) -> Result<Self, JobError> {
        let path = dir.join(RECORD_FILE);
        let read = std::fs::read(&path).and_then(|b| serde_json::from_slice(&b).map_err(io::Error::from));
        read.map_err(|error| JobError::Io { path, error })
    }

    /// Writes the record's new content beside it. Blocking.
    pub(super) fn stage(&self, dir: &Path) -> Result<Staged, JobError> {
        let path = dir.join(RECORD_FILE);
        let staged = serde_json::to_vec(self).map_err(io::Error::from).and_then(|b| stage_file(&path, &b));
        staged.map_err(|error| JobError::Io { path, error })
    }

    /// Writes the record. Durable when this returns. Blocking.
    pub(super) fn write(&self, dir: &Path) -> Result<(), JobError> {
        let path = dir.join(RECORD_FILE);
        let failed = |error| JobError::Io { path: path.clone(), error };
        let bytes = serde_json::to_vec(self).map_err(|e| failed(e.into()))?;
        std::fs::create_dir_all(dir).map_err(failed)?;
        if std::fs::exists(&path).map_err(failed)? {
            replace_file(&path, &bytes).map_err(failed)?;
        } else {
            // Nothing is replaced, so one sync of the file suffices; most file systems sync its directory
            // entry with it.
            let mut file = std::fs::File::create(&path).map_err(failed)?;
            file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(failed)?;
            sync_parent(&path).map_err(failed)?;
        }
        sync_parent(dir).map_err(failed)
    }
}

/// Counts the bytes that are written to it.
struct ByteCount(u64);

impl io::Write for ByteCount {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns whether a declaration may be as long as a request. Few such declarations are read at once.
#[must_use]
pub fn is_long(ask: &StartJob) -> bool {
    ask.plan.base != PlanBase::All || ask.buckets.is_some() || ask.replay.is_some()
}

/// Hashes of the parts that may be long.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Long {
    plan: Hash,
    buckets: Hash,
    replay: Hash,
}

impl Long {
    fn of(ask: &StartJob) -> Self {
        // The parts consist of strings, numbers and lists, which JSON can always express.
        fn hash(part: &impl Serialize) -> Hash {
            Hash::of(&serde_json::to_vec(part).unwrap_or_default())
        }
        Long { plan: hash(&ask.plan), buckets: hash(&ask.buckets), replay: hash(&ask.replay) }
    }
}

/// A record without its long parts.
#[derive(Debug, Clone)]
pub struct RecordSummary {
    record: Record,
    long: Long,
    /// Whether the record has a long part ([`is_long`]).
    pub is_long: bool,
}

impl Deref for RecordSummary {
    type Target = Record;

    fn deref(&self) -> &Record {
        &self.record
    }
}

impl RecordSummary {
    /// Sets another world.
    pub(super) fn set_world(&mut self, world: fletch_api::WorldSpec) {
        self.record.ask.world = world;
    }

    /// Returns the first setting, the world apart, that differs from another declaration.
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
