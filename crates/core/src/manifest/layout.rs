//! Layouts: how a version's bytes are placed in chunks. A layout's id covers the placement and not the
//! origin, so the same tree has the same layout wherever its objects are.

use super::{CHUNK_BYTES_MAX, EntryKind, PackParams, Part, SLICE_BYTES_DEFAULT};
use crate::hash::{StructureHasher, context};
use crate::{Hash, LayoutId, Root};
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The kind of a layout. The numbers are part of format 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum LayoutKind {
    /// The objects stay at their place. Every file is a chunk of its own; a large file is cut into several.
    Index = 1,
    /// Small files are grouped into chunks, which are written as objects of their own.
    Pack = 2,
    /// As an index, but nothing was read: location names stand in the place of the hashes of content.
    Draft = 3,
}

impl LayoutKind {
    /// Whether a file of one slice is a chunk of its own, under the same name.
    #[must_use]
    pub fn keeps_files_apart(self) -> bool {
        match self {
            LayoutKind::Index | LayoutKind::Draft => true,
            LayoutKind::Pack => false,
        }
    }
}

/// The parameters that decide a layout's chunks. Layouts with different parameters share no chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayoutParams {
    /// The kind of the layout.
    pub kind: LayoutKind,
    /// A file of up to this many bytes is one chunk; a larger file is cut into slices of it.
    pub slice_bytes: u32,
    /// The grouping of small files; present exactly for packs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pack: Option<PackParams>,
}

impl LayoutParams {
    /// The default parameters of an index. Versions indexed with the same parameters share chunks.
    pub const INDEX: LayoutParams =
        LayoutParams { kind: LayoutKind::Index, slice_bytes: SLICE_BYTES_DEFAULT, pack: None };

    /// The parameters of a draft.
    pub const DRAFT: LayoutParams = LayoutParams { kind: LayoutKind::Draft, ..LayoutParams::INDEX };

    /// The default parameters of a pack.
    pub const PACK: LayoutParams = LayoutParams {
        kind: LayoutKind::Pack,
        slice_bytes: SLICE_BYTES_DEFAULT,
        pack: Some(PackParams::DEFAULT),
    };

    /// Checks that a layout can be made with these parameters.
    ///
    /// # Errors
    /// The rule that they break, in words.
    pub fn check(&self) -> Result<(), &'static str> {
        if self.slice_bytes == 0 || self.slice_bytes > CHUNK_BYTES_MAX {
            return Err("slice_bytes is not within 1 byte to 16 MiB");
        }
        match (self.kind, self.pack) {
            (LayoutKind::Index, None) => Ok(()),
            (LayoutKind::Pack, Some(pack)) => pack.check(),
            // The hash of a file is folded from those of its slices, which are subtrees of it.
            (LayoutKind::Draft, None) if self.slice_bytes.is_power_of_two() => Ok(()),
            (LayoutKind::Draft, None) => Err("slice_bytes of a draft is not a power of two"),
            _ => Err("group_bytes and align belong to a pack, and every pack has them"),
        }
    }

    /// Returns the parameters that a layout's id covers: (id, value), ascending by id.
    fn canonical(&self) -> Vec<(u16, u64)> {
        let mut all = vec![(1, u64::from(self.slice_bytes))];
        if let Some(pack) = self.pack {
            all.extend([(2, u64::from(pack.group_bytes)), (3, u64::from(pack.align))]);
        }
        all
    }

    /// Returns the lengths of the slices of a file of `size` bytes, in order; none for an empty file.
    pub fn slice_lengths(&self, size: u64) -> impl Iterator<Item = u32> + use<> {
        let step = u64::from(self.slice_bytes);
        (0..size.div_ceil(step)).map(move |i| u32::try_from((size - i * step).min(step)).unwrap_or(u32::MAX))
    }
}

/// A run of an entry's bytes inside one chunk.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Slice {
    /// The chunk.
    pub chunk: Hash,
    /// The offset in the chunk, in bytes.
    pub chunk_offset: u32,
    /// The length, in bytes.
    pub len: u32,
}

/// The placement of one part: for each entry, the slices that hold its bytes, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placed {
    ends: Vec<u32>,
    slices: Vec<Slice>,
}

/// Why a placement is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadPlacement {
    /// The placement is not the one that the layout names.
    #[error("the placement hashes to {got}, and the layout names {expected}")]
    Mismatch {
        /// The hash that the layout names.
        expected: Hash,
        /// The hash of the rows.
        got: Hash,
    },
    /// The placement does not cover an entry's bytes.
    #[error("the placement of {path:?} does not fit: {why}")]
    Entry {
        /// The entry's path.
        path: String,
        /// The rule that is broken.
        why: &'static str,
    },
}

impl Placed {
    /// Adds the next entry's slices; none for an entry without bytes.
    pub fn push(&mut self, slices: impl IntoIterator<Item = Slice>) {
        self.slices.extend(slices);
        self.ends.push(u32::try_from(self.slices.len()).unwrap_or(u32::MAX));
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns whether there are no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the slices of one entry.
    ///
    /// # Panics
    /// When `row` is past the end.
    #[must_use]
    pub fn slices(&self, row: usize) -> &[Slice] {
        let start = if row == 0 { 0 } else { self.ends[row - 1] as usize };
        &self.slices[start..self.ends[row] as usize]
    }

    /// Returns the hash of the canonical encoding (`docs/FORMATS.md`, "Placement").
    ///
    /// For each entry with slices: row u32, number of slices u32, and each slice as chunk 32 · offset u32 ·
    /// length u32.
    #[must_use]
    pub fn hash(&self) -> Hash {
        let mut hasher = StructureHasher::new(context::PLACEMENT);
        for row in 0..self.len() {
            let slices = self.slices(row);
            if slices.is_empty() {
                continue;
            }
            hasher.add(|bytes| {
                bytes.extend_from_slice(&u32::try_from(row).unwrap_or(u32::MAX).to_le_bytes());
                bytes.extend_from_slice(&u32::try_from(slices.len()).unwrap_or(u32::MAX).to_le_bytes());
                for s in slices {
                    bytes.extend_from_slice(s.chunk.as_bytes());
                    bytes.extend_from_slice(&s.chunk_offset.to_le_bytes());
                    bytes.extend_from_slice(&s.len.to_le_bytes());
                }
            });
        }
        hasher.finish()
    }

    /// Checks the placement against the hash that the layout names, and against the part that it places.
    ///
    /// # Errors
    /// [`BadPlacement`]: the hash differs, an entry's bytes are not covered exactly, or a file that is one
    /// chunk of an index is placed in a chunk with another hash.
    pub fn check(&self, expected: Hash, part: &Part, kind: LayoutKind) -> Result<(), BadPlacement> {
        let got = self.hash();
        if got != expected || self.len() != part.len() {
            return Err(BadPlacement::Mismatch { expected, got });
        }
        for row in 0..part.len() {
            let e = part.get(row);
            let slices = self.slices(row);
            let bad = |why| Err(BadPlacement::Entry { path: e.path.to_owned(), why });
            let want = if e.kind.has_bytes() { e.size } else { 0 };
            if slices.iter().map(|s| u64::from(s.len)).sum::<u64>() != want {
                return bad("its slices do not add up to its size");
            }
            if slices.iter().any(|s| {
                s.len == 0 || u64::from(s.chunk_offset) + u64::from(s.len) > u64::from(CHUNK_BYTES_MAX)
            }) {
                return bad("a slice is empty or reaches past the largest chunk");
            }
            if let ([s], true, EntryKind::File) = (slices, kind.keeps_files_apart(), e.kind)
                && (Some(s.chunk) != e.hash || s.chunk_offset != 0)
            {
                return bad("its chunk has another hash than the file");
            }
        }
        Ok(())
    }
}

/// Returns the id of a layout: the hash over its parameters, the root, and the placements of the parts, in
/// order.
#[must_use]
pub fn layout_id(params: &LayoutParams, root: Root, placements: &[Hash]) -> LayoutId {
    let mut buf = Vec::with_capacity(64);
    buf.extend_from_slice(&1u32.to_le_bytes());
    buf.push(params.kind as u8);
    // Parameters as (id u16, value u64), ascending: 1 slice_bytes, 2 group_bytes, 3 align.
    let canonical = params.canonical();
    buf.extend_from_slice(&u16::try_from(canonical.len()).unwrap_or(u16::MAX).to_le_bytes());
    for (id, value) in canonical {
        buf.extend_from_slice(&id.to_le_bytes());
        buf.extend_from_slice(&value.to_le_bytes());
    }
    buf.extend_from_slice(root.0.as_bytes());
    buf.extend_from_slice(&(placements.len() as u64).to_le_bytes());
    let mut h = blake3::Hasher::new_derive_key(context::LAYOUT);
    h.update(&buf);
    for p in placements {
        h.update(p.as_bytes());
    }
    LayoutId(h.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::super::{Entry, PartBuilder, PartCutter};
    use super::*;

    #[test]
    fn slice_lengths_cover_the_file() {
        let p = LayoutParams { slice_bytes: 10, ..LayoutParams::INDEX };
        let lens = |n| p.slice_lengths(n).collect::<Vec<_>>();
        assert_eq!(lens(0), Vec::<u32>::new());
        assert_eq!(lens(10), [10]);
        assert_eq!(lens(21), [10, 10, 1]);
    }

    #[test]
    fn swapped_or_short_placements_are_rejected() {
        let (a, b) = (Hash::of(b"aaa"), Hash::of(b"bbb"));
        let rows = [Entry::file("a", 3, a), Entry::file("b", 3, b), Entry::symlink("l", "a")];
        let mut cutter = PartCutter::new();
        let mut builder = PartBuilder::new(0, 3);
        for e in &rows {
            assert_eq!(cutter.push(e.as_ref()), Ok(None));
            builder.push(e.as_ref()).expect("valid");
        }
        let part = builder.finish(&cutter.finish().expect("part")).expect("part");
        let place = |x: Hash, y: Hash, len| {
            let mut p = Placed::default();
            p.push([Slice { chunk: x, chunk_offset: 0, len: 3 }]);
            p.push([Slice { chunk: y, chunk_offset: 0, len }]);
            p.push([]);
            p
        };
        let good = place(a, b, 3);
        assert_eq!(good.check(good.hash(), &part, LayoutKind::Index), Ok(()));
        let swapped = place(b, a, 3);
        assert!(matches!(
            swapped.check(good.hash(), &part, LayoutKind::Index),
            Err(BadPlacement::Mismatch { .. })
        ));
        assert!(matches!(
            swapped.check(swapped.hash(), &part, LayoutKind::Index),
            Err(BadPlacement::Entry { .. })
        ));
        let short = place(a, b, 2);
        assert!(matches!(
            short.check(short.hash(), &part, LayoutKind::Index),
            Err(BadPlacement::Entry { .. })
        ));
    }
}
