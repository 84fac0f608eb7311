//! The six kinds of error. A kind says who can act on an error, not where it happened.
//!
//! Every boundary has its own `thiserror` type, which maps to a [`Kind`]. A kind maps once to an HTTP status
//! (`fletch-api`) and once to an errno (`fuse-client`).

use serde::{Deserialize, Serialize};

/// The kind of an error: who can act on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The thing does not exist, or this principal has no access to it (I7: the same answer).
    NotFound,
    /// The caller asked for something impossible.
    Invalid,
    /// Bytes did not hash to their name, or a table contradicts itself.
    Corrupt,
    /// Something needed is not available now: an origin, a server, time. A retry may help.
    Unavailable,
    /// A limit was reached. Wait and retry (HTTP 429); never read from another source instead.
    Overloaded,
    /// A defect of Fletch.
    Internal,
}

impl Kind {
    /// Returns whether the same request may succeed later, without any other change.
    #[must_use]
    pub fn retryable(self) -> bool {
        matches!(self, Kind::Unavailable | Kind::Overloaded)
    }
}
