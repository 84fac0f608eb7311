//! Origins of registered datasets, and whether they work.

use fletch_core::{DatasetName, Domain};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Whether an origin works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OriginState {
    /// The last call was answered, or nobody called yet.
    Ok,
    /// The last call failed, or a call has had no answer for seconds.
    Failing,
}

impl OriginState {
    /// Returns the word that JSON and people use.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            OriginState::Ok => "ok",
            OriginState::Failing => "failing",
        }
    }
}

/// The last failed call to an origin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OriginFailure {
    /// The error, which names the object.
    pub why: String,
    /// When the call failed, in nanoseconds since 1970.
    pub at_ns: u64,
}

/// An origin of registered datasets: the place of their objects, or of their tables.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OriginView {
    /// The URI. It holds no secret.
    pub uri: String,
    /// The domain whose reads these numbers count.
    #[schema(value_type = String)]
    pub domain: Domain,
    /// The datasets whose objects or tables lie there.
    #[schema(value_type = Vec<String>)]
    pub datasets: Vec<DatasetName>,
    /// Whether the origin works.
    pub state: OriginState,
    /// Calls since the server started, those of probes included. A call may be several requests.
    pub requests: u64,
    /// Calls that failed.
    pub failed: u64,
    /// The last failed call. It stays after the origin works again.
    pub last_error: Option<OriginFailure>,
}

/// The origins of all registered datasets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OriginList {
    /// The origins, sorted by domain and URI.
    pub origins: Vec<OriginView>,
}
