//! A version of a dataset, as people name it.

use crate::failure::Failure;
use fletch_core::{Root, TagName};
use std::fmt;
use std::str::FromStr;

/// A tag or a root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Select {
    /// A movable name of a version.
    Tag(TagName),
    /// A version by its root.
    Root(Root),
}

impl FromStr for Select {
    type Err = Failure;
    fn from_str(s: &str) -> Result<Self, Failure> {
        if let Ok(root) = s.parse() {
            return Ok(Select::Root(root));
        }
        TagName::new(s).map(Select::Tag).map_err(|e| Failure::usage(e.to_string()))
    }
}

impl fmt::Display for Select {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Select::Tag(t) => t.fmt(f),
            Select::Root(r) => r.fmt(f),
        }
    }
}
