//! Registers and unregisters datasets: on a server that is alone, or for all members of a cluster.
//!
//! ```text
//! alone:    register ─▶ state (log, table)
//! cluster:  register ─▶ transaction in etcd ─▶ watch of every member ─▶ state ─▶ `seen/ID` in etcd
//! ```
//! I1. In a cluster only `shared.rs` changes the state, in the order of etcd's revisions.
//! I2. A transaction compares what this server knew of the name and of the tenant. So two servers never give
//!     one name to two datasets, and together do not pass a tenant's quota.
//! I3. Without etcd reads go on with what was known, also over a restart. Changes are refused.
//! I4. etcd may go back to a backup. The server that knows the latest change writes its datasets back.
//! I5. A change that ends access is confirmed by every member, or names those that did not confirm it.

mod position;
mod records;
mod shared;

use crate::{
    cluster::{ClusterState, EtcdError, Follower, RecoverError, RecoveryMark},
    tenancy::state::{
        Applied, RegisterChange, RegisterError, Registration, RegistrationHandle, Registrations,
    },
};
use fletch_api::Dataset;
use fletch_core::{DatasetName, Domain, MemberId};
use shared::Shared;
use std::{path::Path, sync::Arc};
use tokio::task::{JoinError, spawn_blocking};
use tokio_util::sync::CancellationToken;

/// What is done when datasets came or access ended.
pub type Effects = Box<dyn Fn(&Applied) + Send + Sync>;

/// The registered datasets, and those who change them.
pub struct Catalog {
    local: Arc<Registrations>,
    effects: Effects,
    shared: Option<Shared>,
}

/// A registered dataset.
#[derive(Debug, Clone)]
pub struct Registered {
    /// The dataset.
    pub dataset: Dataset,
    /// What the registration changed.
    pub change: RegisterChange,
    /// Members that may still serve what it replaced.
    pub unconfirmed: Vec<MemberId>,
}

/// Why a change did not happen.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// The registrations do not allow it, or cannot be written.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// etcd did not answer. The change may have happened.
    #[error("the coordinator of the cluster did not answer")]
    Etcd(#[from] EtcdError),
    /// The server is not a member yet, or etcd has another cluster.
    #[error("this server is not in touch with its cluster")]
    NoCluster,
    /// A record of a newer format.
    #[error("the coordinator has a record that this server cannot read: {0}: {1}")]
    Record(String, String),
    /// etcd was restored from a backup.
    #[error("etcd has the datasets of a backup; the server that knows the latest change writes its own back")]
    WentBack,
    /// Others changed the same at every try.
    #[error("other servers changed the datasets of this tenant at every try")]
    Contended,
    /// The server stops.
    #[error("the change was not recorded: {0}")]
    Stopped(#[from] JoinError),
}

impl Catalog {
    /// Returns the catalog of a server. `effects` is called after each change. Blocking.
    #[must_use]
    pub fn new(
        local: Arc<Registrations>,
        cluster: &Arc<ClusterState>,
        state: &Path,
        effects: Effects,
    ) -> Self {
        let shared = cluster.shared_keys().map(|keys| Shared::new(keys, Arc::clone(cluster), state));
        Catalog { local, effects, shared }
    }

    /// Registers a dataset, as [`Registrations::register`] does.
    ///
    /// # Errors
    /// [`CatalogError`].
    pub async fn register(
        &self,
        registration: Registration,
        bytes: u64,
        quota: Option<u64>,
        replace: bool,
    ) -> Result<Registered, CatalogError> {
        if let Some(shared) = &self.shared {
            return shared.register(self, registration, bytes, quota, replace).await;
        }
        let local = Arc::clone(&self.local);
        let register = move || local.register(registration, bytes, quota, replace);
        let (entry, change) = spawn_blocking(register).await??;
        if change != RegisterChange::Unchanged {
            let has_ended = change == RegisterChange::Replaced;
            (self.effects)(&Applied { has_ended, domains: [entry.domain.clone()].into() });
        }
        Ok(Registered { dataset: entry.dataset.clone(), change, unconfirmed: Vec::new() })
    }

    /// Unregisters a dataset. Returns the members that may still serve it, or `None` if the domain has no
    /// dataset of that name.
    ///
    /// # Errors
    /// [`CatalogError`].
    pub async fn unregister(
        &self,
        domain: &Domain,
        name: &DatasetName,
    ) -> Result<Option<Vec<MemberId>>, CatalogError> {
        if let Some(shared) = &self.shared {
            return shared.unregister(self, domain, name).await;
        }
        let (local, domain, name) = (Arc::clone(&self.local), domain.clone(), name.clone());
        let existed = spawn_blocking(move || local.unregister(&domain, &name)).await??;
        if existed {
            (self.effects)(&Applied { has_ended: true, ..Applied::default() });
        }
        Ok(existed.then(Vec::new))
    }

    /// Records that a dataset has a version of `bytes` content bytes, as [`Registrations::record_size`] does.
    /// The other members of a cluster hear of it later.
    ///
    /// # Errors
    /// [`CatalogError::Register`].
    pub async fn record_size(
        &self,
        of: Arc<RegistrationHandle>,
        bytes: u64,
        quota: Option<u64>,
    ) -> Result<(), CatalogError> {
        let local = Arc::clone(&self.local);
        spawn_blocking(move || local.record_size(&of, bytes, quota)).await??;
        if let (Some(shared), Some(_)) = (&self.shared, quota) {
            shared.sizes_changed();
        }
        Ok(())
    }

    /// Writes the datasets of this server to an etcd that lost them.
    ///
    /// # Errors
    /// [`RecoverError`].
    pub async fn write_back(&self, mark: RecoveryMark) -> Result<(), RecoverError> {
        match &self.shared {
            Some(shared) => shared.write_back(self, mark).await,
            None => Err(RecoverError::Embedded),
        }
    }

    /// Returns etcd's revision whose registrations this server has, or `None` for a server that is alone.
    #[must_use]
    pub fn revision(&self) -> Option<u64> {
        self.shared.as_ref().map(Shared::revision)
    }

    /// Returns the task that follows the cluster's registrations, or `None` for a server that is alone.
    #[must_use]
    pub fn follower(&self) -> Option<&Follower> {
        self.shared.as_ref().map(|shared| &shared.follower)
    }

    /// Reads the registrations of the cluster once. Without an answer of etcd those of the last run stay, and
    /// [`Self::run`] goes on.
    pub async fn load_first(&self) {
        let Some(shared) = &self.shared else { return };
        if let Err(error) = shared.load(self).await {
            let datasets = self.local.len();
            tracing::warn!(error = %detail(&error), datasets, "the datasets of the last run stay registered");
        }
    }

    /// Follows the changes of the cluster until `stop`.
    pub async fn run(&self, stop: CancellationToken) {
        match &self.shared {
            None => stop.cancelled().await,
            Some(shared) => tokio::select! {
                () = stop.cancelled() => {}
                () = shared.run(self) => {}
            },
        }
    }
}

/// Returns an error with its reason, which may name hosts.
fn detail(error: &CatalogError) -> String {
    match error {
        CatalogError::Etcd(why) => why.to_string(),
        error => error.to_string(),
    }
}
