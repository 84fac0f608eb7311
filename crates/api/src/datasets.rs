//! Datasets, and the versions that their tags name.

use crate::Draft;
use fletch_core::{DatasetName, LayoutId, Root, TagName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A registered dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Dataset {
    /// The name of the dataset, unique in its domain.
    #[schema(value_type = String)]
    pub name: DatasetName,
    /// The URI of the dataset's objects.
    pub uri: String,
    /// The URI of the version tables. They are below `fletch/` at this URI.
    pub tables: String,
    /// The time of registration, in nanoseconds since 1970.
    pub registered_ns: u64,
}

/// A dataset after its registration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RegisteredDataset {
    /// The dataset.
    #[serde(flatten)]
    pub dataset: Dataset,
    /// What replaced another registration may still be served by these members of a cluster.
    #[serde(flatten)]
    pub unconfirmed: Unconfirmed,
}

/// The members of a cluster that did not confirm that access to a dataset ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Unconfirmed {
    /// Their ids. A member that is cut off from the cluster may serve the dataset until it is back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unconfirmed: Vec<String>,
}

/// A dataset of a list, with its size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ListedDataset {
    /// The dataset.
    #[serde(flatten)]
    pub dataset: Dataset,
    /// Bytes of its files, as [`crate::DatasetUse::version_bytes`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// The datasets of the caller's domain.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Datasets {
    /// The datasets, in the order of their names.
    pub datasets: Vec<ListedDataset>,
    /// The drafts among their versions that are in use, in the order of the names of their datasets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drafts: Vec<Draft>,
}

/// The tags of a dataset.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Tags {
    /// At most 1000 tags, in the order of their names.
    #[schema(value_type = Vec<String>)]
    pub tags: Vec<TagName>,
}

/// How an object looked when it was read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ObjectPin {
    /// The size in bytes.
    pub size: u64,
    /// The time of the last modification, in nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtime_ns: Option<i64>,
    /// The entity tag of the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
}

/// An object that has the indexed bytes under another entity tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RenewedPin {
    /// The path of the object, which is the path of its entry.
    pub path: String,
    /// The pin of the tables.
    pub old: ObjectPin,
    /// The pin under which the server hashed every byte of the object, and found the indexed hashes.
    pub new: ObjectPin,
}

/// A page of the renewed pins of a dataset.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RenewedPins {
    /// At most 1000 objects, in the order of their paths.
    pub objects: Vec<RenewedPin>,
    /// The value of `after` for the next page. Absent after the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Body of `POST /v1/datasets`. Registering the same dataset again changes nothing.
///
/// The same name and URI with other tables replace the registration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RegisterDataset {
    /// The name of the dataset.
    #[schema(value_type = String)]
    pub name: DatasetName,
    /// The URI of the dataset's objects.
    pub uri: String,
    /// The URI of the version tables. The default is `uri`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tables: Option<String>,
    /// Whether the name may be registered for another URI, which this one then replaces.
    #[serde(default, skip_serializing_if = "is_false")]
    pub replace: bool,
    /// Whether a dataset without any tag at its tables is rejected, with `not_indexed`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub check: bool,
}

/// A dataset that is registered by its URI alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PutDataset {
    /// The URI of the dataset's objects.
    pub uri: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

/// The version that a tag or a root of a dataset names now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ResolvedVersion {
    /// The dataset.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// The root of the version.
    #[schema(value_type = String)]
    pub root: Root,
    /// The layout to read the version by.
    #[schema(value_type = String)]
    pub layout: LayoutId,
    /// The tag that was asked for. Absent if a root was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub tag: Option<TagName>,
    /// The number of entries of the version: files, links, empty directories, and members of tar shards.
    pub entries: u64,
    /// The number of files that a mount shows. Absent in the answer of an older server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<u64>,
    /// The bytes of those files.
    pub bytes: u64,
    /// The time when the version was created, in nanoseconds since 1970.
    pub created_ns: u64,
    /// Whether the version is a draft: it was listed, and the hashes of its files are not known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draft: bool,
}
