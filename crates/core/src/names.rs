//! Names people give: datasets, tags, jobs, tenants, domains. And the key of a stored chunk.
//!
//! One grammar for all: 1–128 characters of `A–Z a–z 0–9 . _ -`, beginning with a letter or
//! digit. So a name is safe as a path component, a URL segment and a metric label, and can
//! never be `..`.

use crate::Hash;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr, sync::Arc};

/// The longest name, in bytes.
pub const NAME_BYTES_MAX: usize = 128;

/// A text that is no name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} name {name:?} is not 1-128 characters of A-Z a-z 0-9 . _ - beginning with a letter or digit")]
pub struct BadName {
    /// Which sort of name it was to be.
    pub what: &'static str,
    /// Its first 80 characters.
    pub name: String,
}

fn check(what: &'static str, s: &str) -> Result<(), BadName> {
    let ok = !s.is_empty()
        && s.len() <= NAME_BYTES_MAX
        && s.as_bytes()[0].is_ascii_alphanumeric()
        && s.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
    if ok { Ok(()) } else { Err(BadName { what, name: s.chars().take(80).collect() }) }
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks and wraps a name.
            ///
            /// # Errors
            /// [`BadName`] when it breaks the grammar of this module.
            pub fn new(s: &str) -> Result<Self, BadName> {
                check($what, s)?;
                Ok($name(s.into()))
            }

            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = BadName;
            fn from_str(s: &str) -> Result<Self, BadName> {
                $name::new(s)
            }
        }

        impl TryFrom<String> for $name {
            type Error = BadName;
            fn try_from(s: String) -> Result<Self, BadName> {
                $name::new(&s)
            }
        }

        impl From<$name> for String {
            fn from(n: $name) -> String {
                n.0.to_string()
            }
        }
    };
}

name! {
    /// A dataset's name, unique in its domain.
    DatasetName, "dataset"
}
name! {
    /// A movable name for a version.
    TagName, "tag"
}
name! {
    /// One training run, or one mount of an unmodified one.
    JobName, "job"
}
name! {
    /// Who owns jobs and quota.
    Tenant, "tenant"
}
name! {
    /// Who may share bytes with whom.
    Domain, "domain"
}

impl Domain {
    /// The one domain of a server without configuration.
    #[must_use]
    pub fn default_domain() -> Self {
        Domain("default".into())
    }
}

impl Tenant {
    /// The one tenant of a server without configuration.
    #[must_use]
    pub fn default_tenant() -> Self {
        Tenant("default".into())
    }
}

impl TagName {
    /// The tag that `index` and `pack` move.
    #[must_use]
    pub fn latest() -> Self {
        TagName("latest".into())
    }
}

/// I7: what a stored chunk is kept under. Equal bytes of two domains are two entries.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StoreKey {
    /// Whose bytes.
    pub domain: Domain,
    /// Which bytes.
    pub hash: Hash,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grammar() {
        for ok in ["a", "imagenet-1k", "v1.2_3", "0"] {
            assert!(DatasetName::new(ok).is_ok(), "{ok}");
        }
        for bad in ["", ".", "..", "-x", "a/b", "a b", "a\0", "é", &"x".repeat(129), "a@b"] {
            assert!(TagName::new(bad).is_err(), "{bad}");
        }
    }
}
