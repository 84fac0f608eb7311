//! Lookups in a version: the part that holds a path or an ordinal, the chunk ranges of a range of a file, and
//! the directory of an entry.

use super::{PartSummary, Slice};
use std::ops::Range;

/// An index over the parts of a version, by path and ordinal. A few hundred bytes a part.
#[derive(Debug, Clone)]
pub struct PartIndex {
    parts: Vec<PartSummary>,
    /// Ordinal of each part's first entry, and the total at the end.
    starts: Vec<u64>,
}

impl PartIndex {
    /// Returns the index of a manifest's parts.
    #[must_use]
    pub fn new(parts: Vec<PartSummary>) -> Self {
        let mut starts = Vec::with_capacity(parts.len() + 1);
        let mut at = 0u64;
        starts.push(0);
        for p in &parts {
            at += u64::from(p.entries);
            starts.push(at);
        }
        PartIndex { parts, starts }
    }

    /// Returns the parts, in order.
    #[must_use]
    pub fn parts(&self) -> &[PartSummary] {
        &self.parts
    }

    /// Returns the number of entries of the version.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Returns the ordinal of a part's first entry.
    ///
    /// # Panics
    /// When `part` is past the end.
    #[must_use]
    pub fn first_ordinal(&self, part: usize) -> u64 {
        self.starts[part]
    }

    /// Returns the part that holds an ordinal, and the row in it.
    #[must_use]
    pub fn find(&self, ordinal: u64) -> Option<(usize, usize)> {
        if ordinal >= self.entries() {
            return None;
        }
        let part = self.starts.partition_point(|&s| s <= ordinal) - 1;
        Some((part, usize::try_from(ordinal - self.starts[part]).ok()?))
    }

    /// Returns the part in which `path` is, or would be.
    ///
    /// It is the last part whose first path is not above `path`, or else the first part.
    ///
    /// The first entry not below `path` is in this part, *or* it is the first entry of the next part. `None`
    /// without parts.
    #[must_use]
    pub fn candidate(&self, path: &[u8]) -> Option<usize> {
        let after = self.parts.partition_point(|p| p.first.as_bytes() <= path);
        (!self.parts.is_empty()).then(|| after.saturating_sub(1))
    }
}

/// A range of one chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkRange {
    /// The entry's slice.
    pub slice: Slice,
    /// The offset of the slice in the entry, in bytes.
    pub begin: u64,
    /// The bytes of the chunk.
    pub range: Range<usize>,
}

/// Returns the chunk ranges that, in order, are the bytes `range` of an entry with these slices. The range is
/// cut at the entry's end.
pub fn ranges(slices: &[Slice], range: Range<u64>) -> impl Iterator<Item = ChunkRange> + '_ {
    let mut at = 0u64;
    slices.iter().filter_map(move |s| {
        let (begin, end) = (at, at + u64::from(s.len));
        at = end;
        let (from, to) = (range.start.max(begin), range.end.min(end));
        (from < to).then(|| {
            let base = u64::from(s.chunk_offset);
            // Both fit: a chunk is at most 16 MiB.
            let cut = |x: u64| usize::try_from(base + x - begin).unwrap_or(usize::MAX);
            ChunkRange { slice: *s, begin, range: cut(from)..cut(to) }
        })
    })
}

/// A directory of a version: the first `depth` components of the path of the first entry below it.
///
/// It needs no table, so an inode number can be computed from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DirId {
    /// The ordinal of the first entry below the directory, or of the empty directory itself.
    pub first: u64,
    /// The number of components of its path; 0 is the root of the tree.
    pub depth: u16,
}

/// Returns the first `depth` components of a path, without a closing slash; `None` when it has fewer. A
/// member's name, after the NUL, does not count.
#[must_use]
pub fn prefix(path: &str, depth: u16) -> Option<&str> {
    let path = path.split('\0').next().unwrap_or(path);
    if depth == 0 {
        return Some("");
    }
    let mut ends = path.match_indices('/').map(|(i, _)| i);
    match ends.nth(usize::from(depth) - 1) {
        Some(i) => Some(&path[..i]),
        None => None,
    }
}

/// A child of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Child<'a> {
    /// The entry itself, by its name.
    Entry(&'a str),
    /// A directory, by its name.
    Dir(&'a str),
    /// No child to list: the entry is a member, which is hidden, or the empty directory itself.
    Hidden,
}

/// Returns the child of `dir` that is the entry at `path` or holds it; `None` when the entry is not below
/// `dir`. `dir` has no closing slash and is "" for the root.
#[must_use]
pub fn child<'a>(dir: &str, path: &'a str) -> Option<Child<'a>> {
    let rest = if dir.is_empty() { path } else { path.strip_prefix(dir)?.strip_prefix('/')? };
    if rest.is_empty() {
        return Some(Child::Hidden);
    }
    let nul = rest.find('\0').unwrap_or(rest.len());
    Some(match rest[..nul].split_once('/') {
        Some((name, _)) => Child::Dir(name),
        None if nul < rest.len() => Child::Hidden,
        None => Child::Entry(rest),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Hash;
    use proptest::prelude::*;

    #[test]
    fn children_and_prefixes() {
        assert_eq!(child("", "a/b"), Some(Child::Dir("a")));
        assert_eq!(child("a", "a/b"), Some(Child::Entry("b")));
        assert_eq!(child("a", "a-b"), None);
        assert_eq!(child("a", "a/"), Some(Child::Hidden));
        assert_eq!(child("", "a/"), Some(Child::Dir("a")));
        assert_eq!(child("", "s.tar\0x/1.jpg"), Some(Child::Hidden));
        assert_eq!(child("", "d/s.tar\0x/1.jpg"), Some(Child::Dir("d")));
        assert_eq!(prefix("a/b/c", 0), Some(""));
        assert_eq!(prefix("a/b/c", 2), Some("a/b"));
        assert_eq!(prefix("a/b/c", 3), None);
        assert_eq!(prefix("a/b/", 2), Some("a/b"));
        assert_eq!(prefix("s.tar\0x/y", 1), None);
    }

    #[test]
    fn parts_are_found_by_path_and_ordinal() {
        let part = |first: &str, entries| PartSummary { hash: Hash::of(b""), entries, first: first.into() };
        let ix = PartIndex::new(vec![part("b", 2), part("f", 3)]);
        assert_eq!(ix.entries(), 5);
        assert_eq!(
            [0, 1, 2, 4, 5].map(|o| ix.find(o)),
            [Some((0, 0)), Some((0, 1)), Some((1, 0)), Some((1, 2)), None]
        );
        assert_eq!([&b"a"[..], b"b", b"e", b"f", b"z"].map(|p| ix.candidate(p)), [0, 0, 0, 1, 1].map(Some));
        assert_eq!(PartIndex::new(vec![]).candidate(b"a"), None);
    }

    proptest! {
        /// A range over slices gives the same bytes as a range over their concatenation.
        #[test]
        fn ranges_cut_like_the_whole(
            lens in proptest::collection::vec(1u32..50, 0..8),
            a in 0u64..300,
            b in 0u64..300,
        ) {
            let mut whole = Vec::new();
            let mut chunks = Vec::new();
            let slices: Vec<Slice> = lens
                .iter()
                .enumerate()
                .map(|(i, &len)| {
                    let pad = u32::try_from(i).expect("small");
                    let chunk: Vec<u8> =
                        (0..pad + len).map(|x| (x as u8).wrapping_mul(7).wrapping_add(i as u8)).collect();
                    whole.extend_from_slice(&chunk[pad as usize..]);
                    let s = Slice { chunk: Hash::of(&chunk), chunk_offset: pad, len };
                    chunks.push(chunk);
                    s
                })
                .collect();
            let got: Vec<u8> = ranges(&slices, a..b)
                .flat_map(|r| {
                    chunks.iter().find(|c| Hash::of(c) == r.slice.chunk).expect("chunk")[r.range].to_vec()
                })
                .collect();
            let n = whole.len() as u64;
            let want = &whole[a.min(n) as usize..b.clamp(a.min(n), n.max(a.min(n))) as usize];
            prop_assert_eq!(got, want);
        }
    }
}
