//! The six kinds of failure: who can act on it, not where it happened.
//!
//! Every boundary has its own `thiserror` type; each maps to one [`Kind`], and a kind maps
//! once to an HTTP status (`fletch-api`) and once to an errno (`fuse-client`).

use serde::{Deserialize, Serialize};

/// Who can act on an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// It does not exist, or not for this principal (I7: the same answer).
    NotFound,
    /// The caller asked for something that cannot be.
    Invalid,
    /// Bytes did not hash to their name, or a table contradicts itself.
    Corrupt,
    /// Something needed is not there now (origin, server, deadline); asking again may help.
    Unavailable,
    /// A limit was reached; wait and ask again (HTTP 429), never fall through.
    Overloaded,
    /// A defect of ours.
    Internal,
}

impl Kind {
    /// Whether the same request may succeed later without anyone changing anything.
    #[must_use]
    pub fn retryable(self) -> bool {
        matches!(self, Kind::Unavailable | Kind::Overloaded)
    }
}
