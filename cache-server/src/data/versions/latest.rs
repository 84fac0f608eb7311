//! What a dataset's `latest` version is, without opening it for readers.

use super::{VersionError, Versions, table_blocks::TableLocation};
use crate::tenancy::state::Registration;
use fletch_core::TagName;
use fletch_tables::Version;
use std::sync::Arc;

impl Versions {
    /// Returns the content bytes of a dataset's `latest` version, or 0 without that tag.
    ///
    /// The dataset need not be registered.
    ///
    /// # Errors
    /// Those of the origin and the tables.
    pub async fn bytes_of_latest(&self, entry: &Registration) -> Result<u64, VersionError> {
        Ok(self.peek_latest(entry).await?.map_or(0, |version| version.manifest().bytes))
    }

    /// Returns the number of samples of a dataset's `latest` version, or 0 without that tag.
    ///
    /// # Errors
    /// As [`Versions::bytes_of_latest`].
    pub async fn samples_of_latest(&self, entry: &Registration) -> Result<u64, VersionError> {
        Ok(self.peek_latest(entry).await?.map_or(0, |version| version.manifest().samples))
    }

    /// Opens a dataset's `latest` version for one look at it: it is not among the open versions afterwards.
    async fn peek_latest(&self, entry: &Registration) -> Result<Option<Version>, VersionError> {
        let doc = match self.tag(entry, &TagName::latest()).await {
            Err(VersionError::NotFound) => return Ok(None),
            doc => doc?,
        };
        let (tables, blocks, parts) = self.tables_scoped(entry)?;
        let location = TableLocation { blocks, origin: tables, root: doc.root, layout: doc.layout };
        Ok(Some(Version::open(Arc::new(location), doc.root, doc.layout, parts).await?))
    }

    /// Whether what is worked out about a version's samples can be kept.
    #[must_use]
    pub fn keeps_samples(&self) -> bool {
        self.parts.local().is_some()
    }
}
