//! The name of a version on the command line: `URI[@TAG]`, `URI@ROOT`, `NAME[@TAG]`.
//!
//! The tag follows the last `@` after the last `/`: `a@b/c@d` is tag `d` of `a@b/c`. A directory with an `@`
//! in its own name needs a slash at its end: `a@b/`.

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

/// A dataset, and one of its versions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// A URI, a path or a registered name.
    pub base: String,
    /// The tag or root after the `@`, if there is one.
    pub select: Option<Select>,
}

impl FromStr for Target {
    type Err = Failure;
    fn from_str(s: &str) -> Result<Self, Failure> {
        let name = s.rfind('/').map_or(0, |i| i + 1);
        let (base, select) = match s[name..].rfind('@') {
            Some(at) => (&s[..name + at], Some(s[name + at + 1..].parse::<Select>()?)),
            None => (s, None),
        };
        if base.is_empty() {
            return Err(Failure::usage(format!("{s:?} does not name a dataset"))
                .hint("write URI[@TAG] or NAME[@TAG]; write a directory with an @ in its name as `./a@b/`"));
        }
        Ok(Target { base: base.to_owned(), select })
    }
}

impl Target {
    /// Returns the same version at another place of tables, if one is given.
    #[must_use]
    pub fn at(self, tables: Option<String>) -> Self {
        Target { base: tables.unwrap_or(self.base), ..self }
    }

    /// Returns the tag or root; the tag `latest` if none was given.
    #[must_use]
    pub fn select(&self) -> Select {
        self.select.clone().unwrap_or_else(|| Select::Tag(TagName::latest()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_follows_the_last_at_after_the_last_slash() {
        let tag = |t: &str| Some(Select::Tag(TagName::new(t).expect("tag")));
        let root = Root(fletch_core::Hash::of(b"x"));
        let cases = [
            ("a@b/c@d", "a@b/c", tag("d")),
            ("a@b/c", "a@b/c", None),
            ("a@b", "a", tag("b")),
            ("a@b/", "a@b/", None),
            ("a@b@c", "a@b", tag("c")),
            ("s3://bucket/p@2026-01", "s3://bucket/p", tag("2026-01")),
            ("/data/set", "/data/set", None),
        ];
        for (text, base, select) in cases {
            assert_eq!(text.parse(), Ok(Target { base: base.into(), select }), "{text}");
        }
        let t: Target = format!("/d@{root}").parse().expect("root");
        assert_eq!(t.select, Some(Select::Root(root)));
        assert_eq!("/d".parse::<Target>().expect("plain").select(), Select::Tag(TagName::latest()));
        for bad in ["a@", "@b", "", "a@-x", "/x/@b c"] {
            assert_eq!(bad.parse::<Target>().expect_err(bad).exit, crate::failure::Exit::Usage, "{bad}");
        }
    }
}
