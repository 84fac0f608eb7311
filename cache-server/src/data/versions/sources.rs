//! The sources of one root in one domain, as a reader sees them.

use super::{HomeOrigin, Source, VersionError};
use crate::tenancy::state::RegistrationHandle;
use fletch_core::{DatasetName, Domain, Hash, Root, Tenant};
use fletch_store::{DatasetId, VersionIds};
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// How long a source stands in for a dataset at least, before the dataset's own is tried again.
const STAND_IN_MIN: Duration = Duration::from_secs(1);

/// Who reads a version.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    /// The domain, whose datasets alone count.
    pub domain: &'a Domain,
    /// The tenant, whose searches for unknown roots are bounded.
    pub tenant: &'a Tenant,
    /// The dataset that the reader named. Its home is asked first, and the bytes are accounted to it.
    pub dataset: Option<&'a DatasetName>,
}

/// The sources of one root in one domain.
pub struct Sources {
    /// The domain. Chunks that the sources fetch are shared with no other domain.
    pub domain: Domain,
    pub(super) root: Root,
    /// The source in use.
    pub first: Arc<Source>,
    /// The dataset to which the bytes are accounted: the one that the reader named, if it has the root.
    owner: Arc<RegistrationHandle>,
    /// The id under which the disk tier keeps the chunks.
    dataset_id: DatasetId,
    /// The ids under which it keeps those of plain readers, and those of the sweep over the source in use.
    plain_id: DatasetId,
    sweep_id: DatasetId,
    /// The tables of the named dataset, if its home did not answer and another source stands in for it.
    pub(super) stands_in_for: Option<HomeOrigin>,
    opened: Instant,
}

fn sweep_id(domain: &Domain, owner: &RegistrationHandle, source: &Source) -> DatasetId {
    let version = &source.version;
    DatasetId::sweep_of(domain, &owner.dataset.name, version.root(), version.layout())
}

impl Sources {
    pub(super) fn new(
        domain: &Domain,
        root: Root,
        first: Arc<Source>,
        owner: Arc<RegistrationHandle>,
        stands_in_for: Option<HomeOrigin>,
    ) -> Self {
        let plain_id = DatasetId::of(domain, &owner.dataset.name);
        let sweep_id = sweep_id(domain, &owner, &first);
        let (domain, opened) = (domain.clone(), Instant::now());
        let dataset_id = plain_id;
        Sources { domain, root, first, owner, dataset_id, plain_id, sweep_id, stands_in_for, opened }
    }

    /// Returns the same version with `source` in use, whose chunks the disk tier keeps under `dataset_id`.
    #[must_use]
    pub fn with_source(&self, source: &Arc<Source>, dataset_id: DatasetId) -> Arc<Sources> {
        Arc::new(Sources {
            domain: self.domain.clone(),
            root: self.root,
            first: Arc::clone(source),
            owner: Arc::clone(&self.owner),
            dataset_id,
            plain_id: self.plain_id,
            sweep_id: sweep_id(&self.domain, &self.owner, source),
            stands_in_for: None,
            opened: self.opened,
        })
    }

    /// Returns the dataset to which the bytes are accounted.
    #[must_use]
    pub fn dataset(&self) -> &DatasetName {
        &self.owner.dataset.name
    }

    /// Returns the id under which the disk tier keeps the chunks of this version.
    #[must_use]
    pub fn dataset_id(&self) -> DatasetId {
        self.dataset_id
    }

    /// Returns the ids of the plain readers and of the sweep that share the chunks of the source in use.
    #[must_use]
    pub fn version_ids(&self) -> VersionIds {
        VersionIds { plain: self.plain_id, sweep: self.sweep_id }
    }

    /// As [`Sources::version_ids`], for `source` in place of the source in use.
    #[must_use]
    pub fn version_ids_in(&self, source: &Source) -> VersionIds {
        VersionIds { plain: self.plain_id, sweep: sweep_id(&self.domain, &self.owner, source) }
    }

    /// Returns whether the chunks belong to plain readers, and not to a sweep.
    #[must_use]
    pub fn are_plain(&self) -> bool {
        self.dataset_id == self.plain_id
    }

    /// Returns whether the version is a draft, whose chunks have location names.
    #[must_use]
    pub fn is_draft(&self) -> bool {
        self.first.is_draft()
    }

    /// Checks that the hashes of the version's content are known.
    ///
    /// # Errors
    /// [`VersionError::Draft`].
    pub fn check_sealed(&self) -> Result<(), VersionError> {
        if self.is_draft() { Err(VersionError::Draft(self.dataset().clone())) } else { Ok(()) }
    }

    /// Returns the root of the version.
    #[must_use]
    pub fn root(&self) -> Root {
        self.root
    }

    /// Returns the tenant that registered the dataset to which the bytes are accounted.
    #[must_use]
    pub fn registrar(&self) -> &Tenant {
        &self.owner.tenant
    }

    /// Returns the length of a chunk of this version from memory.
    ///
    /// The outer `None` says that the tables are not in memory: await [`super::Versions::locate`].
    #[must_use]
    pub fn try_len(&self, hash: Hash) -> Option<Option<u32>> {
        Some(self.first.try_row(hash)?.map(|row| row.row.len))
    }

    /// Returns the id under which the disk keeps a file that is fetched without its chunk.
    ///
    /// A sweep keeps no such file, because its policy evicts whole units and would never evict the file.
    #[must_use]
    pub fn single_file_id(&self) -> DatasetId {
        if self.are_plain() { self.dataset_id } else { DatasetId::UNCACHED }
    }

    /// Returns whether the datasets are still registered. If not, the access to the version has ended.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        self.first.is_registered() && self.owner.is_registered()
    }

    /// Returns whether the named dataset's own source may be opened instead of the one that stands in for it.
    pub(super) fn may_return_home(&self) -> bool {
        let back = self.stands_in_for.as_ref().is_some_and(|tables| tables.home().is_healthy());
        back && self.opened.elapsed() >= STAND_IN_MIN
    }
}
