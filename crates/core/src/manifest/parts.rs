//! Parts: where a sequence of entries is cut into parts, and the root over the parts.

use super::entries::{BadEntry, EntryKind, EntryRef};
use super::{PART_CUT_BITS, PART_ENTRIES_MAX, SampleRule};
use crate::hash::{StructureHasher, context};
use crate::{Hash, Root};
use serde::{Deserialize, Serialize};

/// The manifest's description of one part. A reader recomputes it from the part's entries before it uses
/// them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartSummary {
    /// Hash of the entries' canonical encoding.
    pub hash: Hash,
    /// Number of entries.
    pub entries: u32,
    /// Path of the first entry.
    pub first: String,
}

/// Returns the root of a version: the hash over its sample rule and its parts, in order.
#[must_use]
pub fn root(rule: &SampleRule, parts: &[Hash]) -> Root {
    let mut buf = Vec::with_capacity(64);
    buf.extend_from_slice(&1u32.to_le_bytes());
    rule.encode(&mut buf);
    buf.extend_from_slice(&(parts.len() as u64).to_le_bytes());
    let mut h = blake3::Hasher::new_derive_key(context::ROOT);
    h.update(&buf);
    for p in parts {
        h.update(p.as_bytes());
    }
    Root(h.finalize().into())
}

/// Returns whether a part ends after the entry with this path.
#[must_use]
pub fn ends_part(path: &str) -> bool {
    let h = blake3::hash(path.as_bytes());
    let b = h.as_bytes();
    u32::from_be_bytes([b[0], b[1], b[2], b[3]]) >> (32 - PART_CUT_BITS) == 0
}

/// Takes entries one by one and returns the parts that they end.
///
/// Rejects a sequence that breaks the invariants of [`super::entries`]. Memory: one path, its prefixes, and
/// 32 KiB of entries that are not hashed yet.
#[derive(Debug)]
pub struct PartCutter {
    hasher: StructureHasher,
    entries: u32,
    first: String,
    last: String,
    any: bool,
    /// Paths of files and links that are prefixes of `last`. A later entry `prefix/…` would contradict them.
    prefixes: Vec<String>,
}

impl Default for PartCutter {
    fn default() -> Self {
        Self::new()
    }
}

impl PartCutter {
    /// Returns a cutter at the start of a sequence.
    #[must_use]
    pub fn new() -> Self {
        PartCutter {
            hasher: StructureHasher::new(context::PART),
            entries: 0,
            first: String::new(),
            last: String::new(),
            any: false,
            prefixes: Vec::new(),
        }
    }

    /// Adds the next entry. Returns the part that it ends, if it ends one.
    ///
    /// # Errors
    /// [`BadEntry`]. The cutter does not change then.
    pub fn push(&mut self, e: EntryRef<'_>) -> Result<Option<PartSummary>, BadEntry> {
        e.validate()?;
        if self.any && e.path.as_bytes() <= self.last.as_bytes() {
            return Err(BadEntry::Order { previous: self.last.clone(), path: e.path.to_owned() });
        }
        self.prefixes.retain(|p| e.path.starts_with(p.as_str()));
        if let Some(p) = self.prefixes.iter().find(|p| e.path.as_bytes().get(p.len()) == Some(&b'/')) {
            return Err(BadEntry::FileAndDirectory(p.clone()));
        }
        if matches!(e.kind, EntryKind::EmptyDir) {
            // `a/` followed by `a/b` would be an empty directory with a child.
            self.prefixes.push(e.path[..e.path.len() - 1].to_owned());
        } else {
            self.prefixes.push(e.path.to_owned());
        }
        if self.entries == 0 {
            self.first = e.path.to_owned();
        }
        self.any = true;
        self.last.clear();
        self.last.push_str(e.path);
        self.hasher.add(|bytes| e.encode(bytes));
        self.entries += 1;
        Ok((self.entries == PART_ENTRIES_MAX || ends_part(e.path)).then(|| self.cut()))
    }

    /// Ends the sequence. Returns the last part, if it has entries.
    #[must_use]
    pub fn finish(mut self) -> Option<PartSummary> {
        (self.entries > 0).then(|| self.cut())
    }

    fn cut(&mut self) -> PartSummary {
        PartSummary {
            hash: self.hasher.finish(),
            entries: std::mem::take(&mut self.entries),
            first: std::mem::take(&mut self.first),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Entry;
    use super::*;
    use proptest::prelude::*;

    fn push_all(entries: &[Entry]) -> Result<Vec<PartSummary>, BadEntry> {
        let mut cutter = PartCutter::new();
        let mut parts = Vec::new();
        for e in entries {
            parts.extend(cutter.push(e.as_ref())?);
        }
        parts.extend(cutter.finish());
        Ok(parts)
    }

    #[test]
    fn rejects_disorder_duplicates_and_contradictions() {
        let f = |p: &str| Entry::file(p, 1, Hash::of(b"x"));
        assert!(push_all(&[f("a"), f("a-b"), f("a.c"), f("ab"), f("b/c")]).is_ok());
        assert!(matches!(push_all(&[f("b"), f("a")]), Err(BadEntry::Order { .. })));
        assert!(matches!(push_all(&[f("a"), f("a")]), Err(BadEntry::Order { .. })));
        assert_eq!(push_all(&[f("a"), f("a-b"), f("a/c")]), Err(BadEntry::FileAndDirectory("a".into())));
        assert_eq!(push_all(&[Entry::empty_dir("a"), f("a/c")]), Err(BadEntry::FileAndDirectory("a".into())));
        assert_eq!(push_all(&[f("a"), Entry::empty_dir("a")]), Err(BadEntry::FileAndDirectory("a".into())));
    }

    #[test]
    fn a_part_never_exceeds_its_limit() {
        let h = Hash::of(b"x");
        // Paths that do not end a part, so that only the limit can.
        let mut paths: Vec<String> =
            (0..70_000u32).map(|i| format!("{i:08}")).filter(|p| !ends_part(p)).collect();
        paths.sort();
        let entries: Vec<Entry> = paths.into_iter().map(|p| Entry::file(p, 1, h)).collect();
        let parts = push_all(&entries).expect("valid");
        assert_eq!(parts.len(), 2);
        assert_eq!(parts[0].entries, PART_ENTRIES_MAX);
        assert_eq!(parts[1].first, entries[PART_ENTRIES_MAX as usize].path);
    }

    proptest! {
        /// The ends of parts depend on paths alone, so a change of one entry's content changes one part.
        #[test]
        fn a_changed_entry_changes_one_part(n in 2usize..400, at in 0usize..400) {
            let at = at % n;
            let mut entries: Vec<Entry> =
                (0..n).map(|i| Entry::file(format!("{i:06}"), 1, Hash::of(&i.to_le_bytes()))).collect();
            let before = push_all(&entries).expect("valid");
            entries[at].hash = Some(Hash::of(b"changed"));
            let after = push_all(&entries).expect("valid");
            prop_assert_eq!(before.len(), after.len());
            prop_assert_eq!(before.iter().zip(&after).filter(|(a, b)| a != b).count(), 1);
        }
    }
}
