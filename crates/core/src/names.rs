//! Names that people give to datasets, tags, jobs, tenants and domains; and the key of a stored chunk.
//!
//! All names have one grammar: 1–128 characters of `A–Z a–z 0–9 . _ -`, beginning with a letter or digit. So
//! a name is safe as a path component, a URL segment and a metric label, and is never `..`.

use crate::Hash;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr, sync::Arc};

/// The longest name, in bytes.
pub const NAME_BYTES_MAX: usize = 128;

/// Why a name is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} name {name:?} is not 1-128 characters of A-Z a-z 0-9 . _ - beginning with a letter or digit")]
pub struct BadName {
    /// The kind of name: "dataset", "tag".
    pub what: &'static str,
    /// The first 80 characters of the text.
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
            /// Returns a name, after checking its grammar.
            ///
            /// # Errors
            /// [`BadName`] when it breaks the grammar of this module.
            pub fn new(s: &str) -> Result<Self, BadName> {
                check($what, s)?;
                Ok($name(s.into()))
            }

            /// Returns the name as text.
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
    /// The name of one training run, or of one mount that an unmodified program reads.
    JobName, "job"
}
name! {
    /// The name of a tenant, who owns jobs and quotas.
    Tenant, "tenant"
}
name! {
    /// The name of a domain: tenants of one domain share cached bytes and dataset names.
    Domain, "domain"
}
name! {
    /// The name that a mount chooses for itself. It is unique among the mounts of its owner.
    MountId, "mount"
}
name! {
    /// The name of a server in its cluster.
    MemberId, "member"
}

impl Domain {
    /// Returns the one domain of a server without configuration.
    #[must_use]
    pub fn default_domain() -> Self {
        Domain("default".into())
    }
}

impl MemberId {
    /// Returns the name of a server whose host has no usable name.
    #[must_use]
    pub fn default_member() -> Self {
        MemberId("server".into())
    }
}

impl Tenant {
    /// Returns the one tenant of a server without configuration.
    #[must_use]
    pub fn default_tenant() -> Self {
        Tenant("default".into())
    }
}

impl TagName {
    /// Returns the tag that `fletch index` and `fletch pack` move.
    #[must_use]
    pub fn latest() -> Self {
        TagName("latest".into())
    }
}

/// I7: the key of a stored chunk. Equal bytes of two domains have two keys.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StoreKey {
    /// The domain that the bytes belong to.
    pub domain: Domain,
    /// The hash of the bytes.
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
