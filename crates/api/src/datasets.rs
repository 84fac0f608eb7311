//! Datasets, and what their tags name.

use fletch_core::{DatasetName, LayoutId, Root, TagName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A registered dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Dataset {
    /// Its name, unique in its domain.
    #[schema(value_type = String)]
    pub name: DatasetName,
    /// Where its objects are.
    pub uri: String,
    /// Where its version tables are (`fletch/…` below this URI).
    pub tables: String,
    /// When it was registered, nanoseconds since 1970.
    pub registered_ns: u64,
}

/// All datasets of the asking principal's domain, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Datasets {
    /// The datasets.
    pub datasets: Vec<Dataset>,
}

/// Body of `POST /v1/datasets`. Registering the same again changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RegisterDataset {
    /// The name to give it.
    #[schema(value_type = String)]
    pub name: DatasetName,
    /// Where its objects are.
    pub uri: String,
    /// Where its version tables are; `uri` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tables: Option<String>,
}

/// What a tag, or a root, of a dataset is at the moment of asking.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ResolvedVersion {
    /// Of which dataset.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// The version.
    #[schema(value_type = String)]
    pub root: Root,
    /// The layout to read it by.
    #[schema(value_type = String)]
    pub layout: LayoutId,
    /// The tag that was asked for; absent when a root was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub tag: Option<TagName>,
    /// Entries of the version.
    pub entries: u64,
    /// Content bytes of the version.
    pub bytes: u64,
    /// When the version was made, nanoseconds since 1970.
    pub created_ns: u64,
}
