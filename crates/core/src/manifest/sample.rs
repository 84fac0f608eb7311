//! The sample rule: which entries form a sample, and which are samples at all. Part of the root.

use super::entries::{EntryKind, Sample, put_text};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use serde::{Deserialize, Serialize};

/// How entries are grouped into samples. The numbers are part of format 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum KeyRule {
    /// One file is one sample.
    File = 1,
    /// WebDataset's rule: entries whose path agrees up to the first dot of the last
    /// component are one sample; names without a dot, or beginning with one, are in none.
    Stem = 2,
}

/// The rule, as written in a manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleRule {
    /// How entries are grouped.
    pub key: KeyRule,
    /// Which entries are samples at all (any match; all of them when empty). Sorted, unique.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub globs: Vec<String>,
}

/// A glob that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("bad sample glob {glob:?}: {why}")]
pub struct BadGlob {
    /// The glob.
    pub glob: String,
    /// What is wrong with it.
    pub why: String,
}

/// A rule ready to be applied.
#[derive(Debug, Clone)]
pub struct SampleMatcher {
    key: KeyRule,
    globs: Option<GlobSet>,
}

impl SampleRule {
    /// A rule with its globs sorted and unique, so that equal rules are equal bytes.
    #[must_use]
    pub fn new(key: KeyRule, mut globs: Vec<String>) -> Self {
        globs.sort();
        globs.dedup();
        SampleRule { key, globs }
    }

    /// One file, one sample.
    #[must_use]
    pub fn file() -> Self {
        SampleRule::new(KeyRule::File, Vec::new())
    }

    /// Canonical encoding: key rule u8 · number of globs u32 · each u32+bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(self.key as u8);
        let n = u32::try_from(self.globs.len()).unwrap_or(u32::MAX);
        out.extend_from_slice(&n.to_le_bytes());
        for g in &self.globs {
            put_text(out, g);
        }
    }

    /// Compiles the globs. `*` does not cross `/`, `**` does.
    ///
    /// # Errors
    /// [`BadGlob`] naming the first that cannot be read.
    pub fn matcher(&self) -> Result<SampleMatcher, BadGlob> {
        let bad =
            |glob: &str, e: globset::Error| BadGlob { glob: glob.to_owned(), why: e.kind().to_string() };
        if self.globs.is_empty() {
            return Ok(SampleMatcher { key: self.key, globs: None });
        }
        let mut set = GlobSetBuilder::new();
        for g in &self.globs {
            set.add(GlobBuilder::new(g).literal_separator(true).build().map_err(|e| bad(g, e))?);
        }
        let set = set.build().map_err(|e| bad(&self.globs.join(","), e))?;
        Ok(SampleMatcher { key: self.key, globs: Some(set) })
    }
}

impl SampleMatcher {
    /// The place of an entry in a sample. For members the part of `path` after the NUL
    /// counts; entries without bytes are in no sample.
    #[must_use]
    pub fn sample(&self, path: &str, kind: EntryKind) -> Sample {
        let name = path.split_once('\0').map_or(path, |(_, member)| member);
        if !kind.has_bytes() || self.globs.as_ref().is_some_and(|g| !g.is_match(name)) {
            return Sample::None;
        }
        match self.key {
            KeyRule::File => Sample::Single,
            KeyRule::Stem => stem(name).map_or(Sample::None, |k| Sample::Keyed(k.to_owned())),
        }
    }
}

/// The path up to the first dot of its last component; `None` without one or at its start.
#[must_use]
pub fn stem(path: &str) -> Option<&str> {
    let base = path.rfind('/').map_or(0, |i| i + 1);
    match path[base..].find('.') {
        None | Some(0) => None,
        Some(dot) => Some(&path[..base + dot]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stems_follow_webdataset() {
        assert_eq!(stem("a/b.c/0001.seg.png"), Some("a/b.c/0001"));
        assert_eq!(stem("0001.jpg"), Some("0001"));
        assert_eq!(stem("README"), None);
        assert_eq!(stem("d.x/README"), None);
        assert_eq!(stem(".hidden"), None);
    }

    #[test]
    fn globs_choose_samples() {
        let m = SampleRule::new(KeyRule::File, vec!["train/**/*.jpg".into()]).matcher().expect("glob");
        assert_eq!(m.sample("train/a/1.jpg", EntryKind::File), Sample::Single);
        assert_eq!(m.sample("train/a/1.txt", EntryKind::File), Sample::None);
        assert_eq!(m.sample("train/a/1.jpg", EntryKind::Symlink), Sample::None);
        assert!(SampleRule::new(KeyRule::File, vec!["a[".into()]).matcher().is_err());
    }
}
