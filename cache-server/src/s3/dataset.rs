//! Keys and the versions that they name: `DATASET/path`, `DATASET@TAG/path` or `DATASET@ROOT/path`.

use super::error::{S3Error, S3Result};
use crate::{
    app::server::Server,
    data::versions::{Sources, VersionError},
    http::access::access,
    tenancy::auth::Principal,
};
use fletch_core::{DatasetName, Root, TagName};
use std::sync::Arc;

/// The version that the first component of a key names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetVersion {
    pub name: DatasetName,
    pub version: Select,
}

/// Which version of a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Select {
    Tag(TagName),
    Root(Root),
}

impl DatasetVersion {
    /// Reads the first component of a key; `None` if no dataset can have it.
    #[must_use]
    pub fn read(component: &str) -> Option<Self> {
        let (name, version) = match component.split_once('@') {
            None => (component, Select::Tag(TagName::latest())),
            Some((name, version)) => match version.parse::<Root>() {
                Ok(root) => (name, Select::Root(root)),
                Err(_) => (name, Select::Tag(TagName::new(version).ok()?)),
            },
        };
        Some(DatasetVersion { name: DatasetName::new(name).ok()?, version })
    }

    /// Opens the version for a caller, in `root` instead of what a tag names now if one is given.
    ///
    /// Returns `None` if the caller's domain has no such dataset or version.
    ///
    /// # Errors
    /// Those of the origin, the tables and the quota.
    pub async fn open(
        &self,
        server: &Server,
        principal: &Principal,
        root: Option<Root>,
    ) -> S3Result<Option<Arc<Sources>>> {
        let Some(entry) = server.registrations.get(&principal.domain, &self.name) else { return Ok(None) };
        let source = match (root, &self.version) {
            (None, Select::Tag(tag)) => server.versions.resolve_recent_tag(&entry, tag).await,
            (None, Select::Root(root)) => server.versions.resolve(&entry, *root, None).await,
            (Some(root), _) => server.versions.resolve(&entry, root, None).await,
        };
        let root = match source {
            Ok(source) => source.version.root(),
            Err(VersionError::NotFound) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        match access(server, principal, root, Some(&self.name)).await.map_err(S3Error::from) {
            Ok(sources) => Ok(Some(sources)),
            Err(e) if e == S3Error::from(VersionError::NotFound) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_component_names_a_version() {
        let root = "ab".repeat(32);
        let read = |text: &str| DatasetVersion::read(text).map(|d| (d.name.to_string(), d.version));
        let tag = |name: &str| Select::Tag(TagName::new(name).expect("a tag"));
        assert_eq!(read("photos"), Some(("photos".to_owned(), tag("latest"))));
        assert_eq!(read("photos@v1"), Some(("photos".to_owned(), tag("v1"))));
        assert_eq!(
            read(&format!("photos@{root}")),
            Some(("photos".to_owned(), Select::Root(root.parse().expect("a root"))))
        );
        for none in ["", "@v1", "photos@", "a b", "photos@a@b", ".."] {
            assert_eq!(read(none), None, "{none}");
        }
    }
}
