//! Which server of a cluster has which job.
//!
//! ```text
//! declare ─▶ Table::place ─▶ another server: 307          etcd ─▶ watch ─▶ Table ─▶ JobPlace of each request
//!                └─▶ this one: transaction in etcd ─▶ record on disk     (here, elsewhere, waits, lost)
//! ```
//! A group is what shares a sweep: the jobs of one (domain, root, layout) with the order `substitute`. Every
//! other job is a group of its own. One server has a group: its primary. It runs the epochs as a server that
//! is alone does.
//!
//! I1. A group changes its primary by compare-and-swap only, and its term grows with each change.
//! I2. A job is declared once its key is in etcd. The record on the primary's disk follows.
//! I3. A server serves a job only while it is the primary of the group in that job's key, as far as it knows.
//!     Without etcd that is what it knew last; after a start it must have read etcd once.
//! I4. A server that finds another primary of a group sets its ledgers of that group aside. It deletes none.
//! I5. A group goes to another server only if a rank says what it consumed, or somebody gives up what was
//!     delivered since a saved state, and only while its primary has no key in etcd.
//! I6. A primary confirms nothing after its tenure ([`crate::cluster::Tenure`]), nor before it has read the
//!     groups in that tenure. The check comes after the ledger is durable, and before the answer.
//! I7. A term never goes back. Each server remembers the highest term of a group that moved, and beside a
//!     ledger the term in which it came here. If etcd has a lower one, a backup was restored: the servers
//!     write the higher one back, and set nothing aside.
//! I8. (I7 of the whole) For other tenants a job does not exist, wherever it is.

mod records;
mod shared;
mod table;
mod terms;

use crate::{
    cluster::{ClusterState, EtcdError, Follower, RecoverError, RecoveryMark},
    training::{
        epochs::JobError,
        jobs::{Record, RecordSummary, Registry},
    },
};
use fletch_api::{TermStamp, WaitingJob};
use fletch_core::{Domain, LayoutId, MemberId, Root, Tenant};
use records::JobRecord;
use shared::Shared;
use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};
use table::JobPlace;
use tokio_util::sync::CancellationToken;

/// A server that has a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Its id.
    pub id: MemberId,
    /// The URL by which clients reach it, if it is up.
    pub url: Option<String>,
}

/// Why this server cannot serve a job.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// Another server has it.
    #[error("job {job} is served by {}", owner.id)]
    Elsewhere {
        /// The job's name or id.
        job: String,
        /// The server.
        owner: Owner,
    },
    /// Another server has it, and is not up.
    #[error("job {job} is served by {}, which is {}; it waits for that server", owner.id, down(*is_gone))]
    Waits {
        /// The job's name or id.
        job: String,
        /// The server.
        owner: Owner,
        /// Whether the server is neither up nor restarting.
        is_gone: bool,
    },
    /// This server has its group, and none of its ledgers.
    #[error(
        "job {job} came to this server without its ledgers: it waits until its ranks say what they consumed, \
         or for a saved state"
    )]
    Lost {
        /// The job's name or id.
        job: String,
    },
    /// A part of the declaration is not known here.
    #[error("the lists of samples that job {job} was declared with are not on this server")]
    Long {
        /// The job's name.
        job: String,
    },
    /// etcd did not answer. The change may have happened.
    #[error("the coordinator of the cluster did not answer")]
    Etcd(#[from] EtcdError),
    /// The server has not read the jobs of its cluster yet, or etcd has another cluster.
    #[error("this server is not in touch with its cluster")]
    NoCluster,
    /// No such member is up.
    #[error("no server {0} of the cluster is up")]
    NoMember(String),
    /// A record of a newer format.
    #[error("the coordinator has a record that this server cannot read: {0}: {1}")]
    Record(String, String),
    /// This server cannot prove that it still is the primary.
    #[error("this server cannot confirm that it still has job {job}: {why}")]
    Unproven {
        /// The job's name or id.
        job: String,
        /// What is missing.
        why: &'static str,
    },
    /// Others changed the same at every try.
    #[error("other servers changed the job or its group at every try")]
    Contended,
    /// What the registry says.
    #[error(transparent)]
    Job(#[from] JobError),
}

fn down(is_gone: bool) -> &'static str {
    if is_gone { "down or has lost its state directory" } else { "restarting" }
}

/// A job that the cluster knows, with all that is needed to have it here.
#[derive(Debug, Clone)]
pub struct KnownJob {
    /// The declaration, and what its names resolved to.
    pub record: Record,
    /// Whether the declaration had lists, which the cluster does not know.
    pub is_long: bool,
    /// The present term of its group.
    pub term: u64,
}

impl KnownJob {
    /// Returns the record, if it is whole.
    ///
    /// # Errors
    /// [`GroupError::Long`].
    pub fn whole(self) -> Result<Record, GroupError> {
        match self.is_long {
            true => Err(GroupError::Long { job: self.record.ask.name.to_string() }),
            false => Ok(self.record),
        }
    }
}

/// Numbers for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupStats {
    /// Jobs whose primary this server is.
    pub jobs: u64,
    /// Groups whose primary this server is.
    pub groups: u64,
    /// Groups that this server claimed first.
    pub claimed: u64,
    /// Groups that this server took from another one.
    pub taken_over: u64,
    /// Jobs whose ledgers this server set aside.
    pub set_aside: u64,
    /// Groups whose term this server wrote back, because etcd had forgotten it.
    pub corrected: u64,
}

/// The groups of a cluster. Does nothing on a server that is alone.
pub struct Groups {
    shared: Option<Arc<Shared>>,
}

impl Groups {
    /// Returns the groups of a server's cluster. `state`: its state directory.
    #[must_use]
    pub fn new(cluster: &Arc<ClusterState>, state: &Path) -> Self {
        let keys = cluster.shared_keys().zip(cluster.incarnation());
        let new = |(keys, incarnation)| Arc::new(Shared::new(keys, incarnation, Arc::clone(cluster), state));
        Groups { shared: keys.map(new) }
    }

    /// Checks that this server may serve a job, or knows of none with that id.
    ///
    /// # Errors
    /// [`GroupError::Elsewhere`], [`GroupError::Waits`], [`GroupError::Lost`], [`GroupError::NoCluster`].
    pub fn check(&self, domain: &Domain, tenant: &Tenant, id: &str) -> Result<(), GroupError> {
        let Some(shared) = &self.shared else { return Ok(()) };
        let name = shared.name_of(domain, tenant, id);
        shared.place_of(domain, tenant, id)?.check(&name)
    }

    /// Returns by which right this server answers for a job now. `None` on a server that is alone, and for a
    /// job that the cluster does not know.
    ///
    /// # Errors
    /// Those of [`Groups::check`], and [`GroupError::Unproven`].
    pub fn right(&self, domain: &Domain, tenant: &Tenant, id: &str) -> Result<Option<TermStamp>, GroupError> {
        let Some(shared) = &self.shared else { return Ok(None) };
        shared.right(domain, tenant, id)
    }

    /// Checks that this server may declare a new job of a version. The job's group need not exist.
    ///
    /// # Errors
    /// As [`Groups::check`].
    pub fn check_new(&self, record: &NewJob<'_>) -> Result<(), GroupError> {
        let Some(shared) = &self.shared else { return Ok(()) };
        shared.place_of_new(record)?.check(record.name)
    }

    /// Records the declaration of a new job with the cluster, and claims its group if no server has it.
    ///
    /// # Errors
    /// [`JobError::Unrecorded`].
    pub async fn record(&self, job: RecordSummary) -> Result<(), JobError> {
        let Some(shared) = &self.shared else { return Ok(()) };
        shared.record(job).await.map_err(|e| JobError::Unrecorded(detail(&e)))
    }

    /// Prepares for a state or for records of ranks that replace what a job's server has: takes the job's
    /// group over if that server is gone and this one is next. Returns the job if this server does not have
    /// its ledgers.
    ///
    /// # Errors
    /// [`GroupError`].
    pub async fn take_over(
        &self,
        domain: &Domain,
        tenant: &Tenant,
        id: &str,
    ) -> Result<Option<KnownJob>, GroupError> {
        let Some(shared) = &self.shared else { return Ok(None) };
        shared.take_over(domain, tenant, id).await?;
        match shared.place_of(domain, tenant, id)? {
            JobPlace::Lost => Ok(Some(self.known(domain, tenant, id).ok_or(JobError::NotFound)?)),
            place => place.check(&shared.name_of(domain, tenant, id)).map(|()| None),
        }
    }

    /// Returns what the cluster knows of a job, whichever server has it.
    #[must_use]
    pub fn known(&self, domain: &Domain, tenant: &Tenant, id: &str) -> Option<KnownJob> {
        let shared = self.shared.as_ref()?;
        let JobRecord { record, is_long, group, .. } = shared.job(domain, tenant, id)?;
        Some(KnownJob { record, is_long, term: shared.term_of(&group) })
    }

    /// Returns the ids of the jobs that move with a job.
    #[must_use]
    pub fn jobs_with(&self, id: &str) -> Vec<String> {
        self.shared.as_ref().map(|shared| shared.jobs_with(id)).unwrap_or_default()
    }

    /// Returns a job of each group that this server has to give away, and the member that gets it.
    #[must_use]
    pub fn to_give(&self) -> Vec<(String, MemberId)> {
        self.shared.as_ref().map(|shared| shared.to_give()).unwrap_or_default()
    }

    /// Returns whether a job came to this server without its ledgers.
    #[must_use]
    pub fn lacks_ledgers(&self, id: &str) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.lacks_ledgers(id))
    }

    /// Lets no ledger be set aside while the value lives.
    pub async fn hold_still(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        match &self.shared {
            Some(shared) => Some(shared.hold_still().await),
            None => None,
        }
    }

    /// Makes another member the primary of a job's group. This server must be its primary.
    ///
    /// # Errors
    /// [`GroupError`].
    pub async fn give(&self, id: &str, to: &MemberId) -> Result<(), GroupError> {
        let Some(shared) = &self.shared else { return Err(GroupError::NoMember(to.to_string())) };
        shared.give(id, to).await
    }

    /// Waits until this server knows that it has a job, whose ledgers another one gives it.
    ///
    /// # Errors
    /// [`GroupError`].
    pub async fn await_given(
        &self,
        domain: &Domain,
        tenant: &Tenant,
        id: &str,
        within: Duration,
    ) -> Result<(), GroupError> {
        let Some(shared) = &self.shared else { return Err(GroupError::NoCluster) };
        shared.await_given(domain, tenant, id, within).await
    }

    /// Says that a job has its ledgers on this server from now on.
    ///
    /// # Errors
    /// [`GroupError`].
    pub async fn revived(&self, registry: &Registry, id: &str) -> Result<(), GroupError> {
        let Some(shared) = &self.shared else { return Ok(()) };
        shared.revived(registry, id).await
    }

    /// Deletes a job and its ledgers. A job whose server is gone may be deleted at the next one.
    ///
    /// # Errors
    /// [`GroupError`].
    pub async fn delete(
        &self,
        registry: &Registry,
        domain: &Domain,
        tenant: &Tenant,
        id: &str,
    ) -> Result<(), GroupError> {
        match &self.shared {
            None => Ok(registry.delete(domain, tenant, id).await?),
            Some(shared) => shared.delete(registry, domain, tenant, id).await,
        }
    }

    /// Returns the jobs of some tenants whose server is away, in the order of their names.
    #[must_use]
    pub fn waiting(&self, sees: impl Fn(&Domain, &Tenant) -> bool) -> Vec<WaitingJob> {
        let Some(shared) = &self.shared else { return Vec::new() };
        shared.waiting(sees)
    }

    /// Returns the number of jobs that wait for each lost server, or `None` on a server that is alone.
    #[must_use]
    pub fn waiting_for(&self) -> Option<BTreeMap<MemberId, u64>> {
        self.shared.as_ref().map(|shared| shared.waiting_for())
    }

    /// Returns the ids and names of the jobs that this server knows or has.
    #[must_use]
    pub fn held_jobs(&self, registry: &Registry) -> BTreeMap<String, String> {
        self.shared.as_ref().map(|shared| shared.held_jobs(registry)).unwrap_or_default()
    }

    /// Writes the jobs and groups that this server knows or has to an etcd that lost them.
    ///
    /// # Errors
    /// [`RecoverError`].
    pub async fn write_back(&self, registry: &Registry, mark: RecoveryMark) -> Result<(), RecoverError> {
        match &self.shared {
            Some(shared) => shared.write_back(registry, mark).await,
            None => Err(RecoverError::Embedded),
        }
    }

    /// Says that the record of a job changed.
    pub fn changed(&self) {
        if let Some(shared) = &self.shared {
            shared.changed.notify_one();
        }
    }

    /// Returns numbers for metrics, or `None` for a server that is alone.
    #[must_use]
    pub fn stats(&self) -> Option<GroupStats> {
        self.shared.as_ref().map(|shared| shared.stats())
    }

    /// Returns the task that follows the cluster's jobs, or `None` for a server that is alone.
    #[must_use]
    pub fn follower(&self) -> Option<&Follower> {
        self.shared.as_ref().map(|shared| &shared.follower)
    }

    /// Reads the jobs of the cluster once. Without an answer of etcd, [`Self::run`] goes on, and no job is
    /// served until then.
    pub async fn load_first(&self, registry: &Registry) {
        let Some(shared) = &self.shared else { return };
        if let Err(error) = shared.load(registry).await {
            tracing::warn!(error = %detail(&error), "no job is served until the cluster's jobs are read");
        }
    }

    /// Follows the changes of the cluster until `stop`.
    pub async fn run(&self, registry: &Registry, stop: CancellationToken) {
        match &self.shared {
            None => stop.cancelled().await,
            Some(shared) => tokio::select! {
                () = stop.cancelled() => {}
                () = shared.run(registry) => {}
            },
        }
    }
}

/// A job that a caller declares.
#[derive(Debug, Clone, Copy)]
pub struct NewJob<'a> {
    /// Its domain.
    pub domain: &'a Domain,
    /// Its tenant.
    pub tenant: &'a Tenant,
    /// Its name.
    pub name: &'a str,
    /// Its order.
    pub order: fletch_api::OrderKind,
    /// The root of its version.
    pub root: Root,
    /// The layout.
    pub layout: LayoutId,
}

/// Returns an error with its reason, which may name hosts.
fn detail(error: &GroupError) -> String {
    match error {
        GroupError::Etcd(why) => why.to_string(),
        error => error.to_string(),
    }
}
