//! A dataset or a version on the command line: `URI[@TAG]`, `URI@ROOT`, `NAME[@TAG]`, or a directory.
//!
//! One rule for every command:
//!
//! 1. An existing path is that path, also with an `@` in its name. A note says so if the text could name a
//!    version, too.
//! 2. Else the version follows the last `@` after the last `/`: `a@b/c@d` is tag `d` of `a@b/c`. So a prefix
//!    of a store with an `@` in its last part needs a slash at its end: `s3://bucket/a@b/`.
//! 3. A command that takes a dataset without a version ([`DatasetArg`]) takes the whole text of a URI.

use crate::failure::Failure;
use fletch_core::TagName;
pub use fletch_indexer::select::Select;
use std::path::Path;
use std::str::FromStr;

/// A dataset, and one of its versions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// A URI, a path or a registered name.
    pub base: String,
    /// The tag or root after the `@`, if there is one.
    pub select: Option<Select>,
    /// What the text could mean, too, if it could.
    pub note: Option<String>,
}

/// A dataset on the command line, without a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetArg {
    /// A URI, a path or a registered name.
    pub text: String,
    /// What the text could mean, too, if it could.
    pub note: Option<String>,
}

/// Splits a text at the last `@` after its last `/`.
fn split(text: &str) -> (&str, Option<&str>) {
    let name = text.rfind('/').map_or(0, |i| i + 1);
    match text[name..].rfind('@') {
        Some(at) => (&text[..name + at], Some(&text[name + at + 1..])),
        None => (text, None),
    }
}

fn exists(text: &str) -> bool {
    Path::new(text).symlink_metadata().is_ok()
}

/// Returns the note for a path that could be read as a version, too.
fn both_ways(text: &str) -> Option<String> {
    let (base, version) = split(text);
    let version = version.filter(|version| !base.is_empty() && version.parse::<Select>().is_ok())?;
    Some(format!("{text} is the path of that name here, and not version {version} of {base}"))
}

impl FromStr for Target {
    type Err = Failure;
    fn from_str(s: &str) -> Result<Self, Failure> {
        Target::read(s, exists)
    }
}

impl FromStr for DatasetArg {
    type Err = Failure;
    fn from_str(s: &str) -> Result<Self, Failure> {
        DatasetArg::read(s, exists)
    }
}

impl DatasetArg {
    fn read(text: &str, exists: impl Fn(&str) -> bool) -> Result<Self, Failure> {
        let whole = |note| Ok(DatasetArg { text: text.to_owned(), note });
        let (base, version) = split(text);
        let Some(version) = version.filter(|_| !text.contains("://")) else { return whole(None) };
        if exists(text) {
            return whole(both_ways(text));
        }
        Err(Failure::usage(format!(
            "there is no path {text}, and this command takes a dataset without a version"
        ))
        .hint(format!("to name the dataset of version {version}, write {base:?}")))
    }
}

impl Target {
    fn read(text: &str, exists: impl Fn(&str) -> bool) -> Result<Self, Failure> {
        let (base, select) = match split(text) {
            (_, Some(_)) if exists(text) => {
                let note = both_ways(text);
                return Ok(Target { base: text.to_owned(), select: None, note });
            }
            (base, Some(version)) => (base, Some(version.parse::<Select>()?)),
            (base, None) => (base, None),
        };
        if base.is_empty() {
            return Err(Failure::usage(format!("{text:?} does not name a dataset"))
                .hint("write URI[@TAG] or NAME[@TAG]"));
        }
        Ok(Target { base: base.to_owned(), select, note: None })
    }

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
    use fletch_core::Root;

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
            let target = Target { base: base.into(), select, note: None };
            assert_eq!(Target::read(text, |_| false), Ok(target), "{text}");
        }
        let t: Target = format!("/d@{root}").parse().expect("root");
        assert_eq!(t.select, Some(Select::Root(root)));
        assert_eq!("/d".parse::<Target>().expect("plain").select(), Select::Tag(TagName::latest()));
        for bad in ["a@", "@b", "", "a@-x", "/x/@b c"] {
            assert_eq!(bad.parse::<Target>().expect_err(bad).exit, crate::failure::Exit::Usage, "{bad}");
        }
    }

    #[test]
    fn an_existing_path_wins_and_a_note_says_so() {
        let target = Target::read("me@host", |_| true).expect("a path");
        assert_eq!((target.base.as_str(), &target.select), ("me@host", &None));
        assert_eq!(
            target.note.as_deref(),
            Some("me@host is the path of that name here, and not version host of me")
        );
        // It can be read in one way only.
        for text in ["me@", "@host", "a@b/c", "me@-x"] {
            let target = Target::read(text, |_| true).expect("a path");
            assert_eq!((target.base.as_str(), target.note), (text, None));
        }
        let dataset = DatasetArg::read("me@host", |_| true).expect("a path");
        assert!(dataset.text == "me@host" && dataset.note.is_some());
        let error = DatasetArg::read("me@host", |_| false).expect_err("no path");
        assert!(error.to_string().contains("no path me@host"), "{error}");
        for text in ["s3://b/me@host", "me", "a@b/c", "https://u@h/x"] {
            let dataset = DatasetArg::read(text, |_| false).expect(text);
            assert_eq!((dataset.text.as_str(), dataset.note), (text, None));
        }
    }
}
