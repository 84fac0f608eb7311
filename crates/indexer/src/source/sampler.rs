//! Which entries of a run are samples.

use crate::failure::Failure;
use fletch_core::manifest::sample::SampleMatcher;
use fletch_core::manifest::{EntryKind, KeyRule, Sample, SampleRule};
use std::collections::BTreeSet;

/// Marks the sample of each entry: the sample rule, and the rule for files beside tar shards.
#[derive(Debug, Clone)]
pub struct Sampler {
    matcher: SampleMatcher,
    /// Directories whose files are no samples, because the members of the shards there are.
    shard_dirs: BTreeSet<String>,
}

impl Sampler {
    /// Compiles the rule. `shard_dirs` are the directories with tar shards.
    ///
    /// # Errors
    /// A usage [`Failure`] when a glob of the rule is invalid.
    pub fn new(rule: &SampleRule, shard_dirs: &BTreeSet<String>) -> Result<Self, Failure> {
        let matcher = rule.matcher().map_err(|e| Failure::usage(e.to_string()))?;
        // A glob says more exactly than the place of a file which files are samples.
        let by_place = rule.key == KeyRule::Stem && rule.globs.is_empty();
        Ok(Sampler { matcher, shard_dirs: if by_place { shard_dirs.clone() } else { BTreeSet::new() } })
    }

    /// Returns the sample that an entry belongs to.
    #[must_use]
    pub fn sample(&self, path: &str, kind: EntryKind) -> Sample {
        if kind == EntryKind::File && self.shard_dirs.contains(directory(path)) {
            return Sample::None;
        }
        self.matcher.sample(path, kind)
    }
}

/// Returns the directory of a path; empty for the top.
#[must_use]
pub fn directory(path: &str) -> &str {
    path.rfind('/').map_or("", |at| &path[..at])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(key: KeyRule, globs: &[&str]) -> Sampler {
        let rule = SampleRule::new(key, globs.iter().map(ToString::to_string).collect());
        Sampler::new(&rule, &BTreeSet::from(["train".to_owned()])).expect("globs")
    }

    #[test]
    fn files_beside_shards_are_samples_only_where_a_glob_or_the_rule_says_so() {
        let stem = sampler(KeyRule::Stem, &[]);
        assert_eq!(stem.sample("train/README.md", EntryKind::File), Sample::None);
        assert_eq!(stem.sample("train/0.tar", EntryKind::File), Sample::None);
        assert_eq!(stem.sample("train/0.tar\x007.jpg", EntryKind::Member), Sample::Keyed("7".into()));
        assert_eq!(stem.sample("train/more/1.jpg", EntryKind::File), Sample::Keyed("train/more/1".into()));
        assert_eq!(stem.sample("1.jpg", EntryKind::File), Sample::Keyed("1".into()));
        let named = sampler(KeyRule::Stem, &["**/README*"]);
        assert_eq!(named.sample("train/README.md", EntryKind::File), Sample::Keyed("train/README".into()));
        let each = sampler(KeyRule::File, &[]);
        assert_eq!(each.sample("train/README.md", EntryKind::File), Sample::Single);
        assert_eq!(each.sample("train/0.tar", EntryKind::File), Sample::Single);
    }
}
