//! The sample rule: which entries form a sample, and which entries are samples at all. The root covers the
//! rule.

use super::entries::{EntryKind, Sample, put_text};
use super::tar::shard::is_shard;
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use serde::{Deserialize, Serialize};

/// The grouping of entries into samples. The numbers are part of format 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum KeyRule {
    /// One file is one sample.
    File = 1,
    /// WebDataset's rule: entries whose paths agree up to the first dot of the last component are one sample.
    /// Names without a dot, or that begin with one, belong to no sample. Neither does a tar shard, but
    /// its members do.
    Stem = 2,
}

/// The sample rule of a manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleRule {
    /// The grouping of entries.
    pub key: KeyRule,
    /// An entry is a sample only if a glob matches it, or if there are no globs. Sorted and unique.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub globs: Vec<String>,
}

/// Why a glob is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the sample glob {glob:?} is not valid: {why}")]
pub struct BadGlob {
    /// The glob.
    pub glob: String,
    /// Why it is not valid.
    pub why: String,
}

/// A sample rule with compiled globs.
#[derive(Debug, Clone)]
pub struct SampleMatcher {
    key: KeyRule,
    globs: Option<GlobSet>,
}

impl SampleRule {
    /// Returns a rule with its globs sorted and unique, so that equal rules have equal bytes.
    #[must_use]
    pub fn new(key: KeyRule, mut globs: Vec<String>) -> Self {
        globs.sort();
        globs.dedup();
        SampleRule { key, globs }
    }

    /// Returns the rule by which each file is one sample.
    #[must_use]
    pub fn file() -> Self {
        SampleRule::new(KeyRule::File, Vec::new())
    }

    /// Appends the canonical encoding: key rule u8 · number of globs u32 · each glob u32+bytes.
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
    /// [`BadGlob`] with the first glob that is not valid.
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
    /// Returns the sample that an entry belongs to. For a member, only the part of `path` after the NUL
    /// counts. An entry without bytes belongs to no sample.
    #[must_use]
    pub fn sample(&self, path: &str, kind: EntryKind) -> Sample {
        let name = path.split_once('\0').map_or(path, |(_, member)| member);
        if !kind.has_bytes() || self.globs.as_ref().is_some_and(|g| !g.is_match(name)) {
            return Sample::None;
        }
        match self.key {
            KeyRule::File => Sample::Single,
            // A whole shard beside its own members would deliver every sample twice.
            KeyRule::Stem if kind == EntryKind::File && is_shard(path) => Sample::None,
            KeyRule::Stem => stem(name).map_or(Sample::None, |k| Sample::Keyed(k.to_owned())),
        }
    }
}

/// Returns the path up to the first dot of its last component; `None` without a dot, or with a dot at its
/// start.
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
    fn a_shard_is_no_sample_by_the_rule_of_its_members() {
        let sample = |key, path: &str, kind| {
            SampleRule::new(key, Vec::new()).matcher().expect("no globs").sample(path, kind)
        };
        assert_eq!(sample(KeyRule::Stem, "d/0.tar", EntryKind::File), Sample::None);
        assert_eq!(sample(KeyRule::Stem, "d/0.tar\0a/7.tar", EntryKind::Member), Sample::Keyed("a/7".into()));
        assert_eq!(sample(KeyRule::File, "d/0.tar", EntryKind::File), Sample::Single);
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
