//! One part while it is decoded and checked: a table of columns, about 50 bytes an entry beside the paths.

use super::entries::{BadEntry, EntryKind, EntryRef, SampleRef};
use super::{PartCutter, PartSummary};
use crate::Hash;

/// The entries of one part, checked against its hash.
#[derive(Debug, Clone)]
pub struct Part {
    first_ordinal: u64,
    paths: String,
    path_ends: Vec<u32>,
    kinds: Vec<EntryKind>,
    sizes: Vec<u64>,
    hashes: Vec<Option<Hash>>,
    /// 0 none, 1 single, 2 keyed. The keys are in `texts`.
    samples: Vec<u8>,
    /// Link targets and sample keys, with their rows, ascending by row.
    texts: Vec<(u32, Box<str>)>,
}

/// Why a part is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadPart {
    /// An entry, or the order of entries, breaks the format.
    #[error(transparent)]
    Entry(#[from] BadEntry),
    /// The rows are valid, but not those that the manifest names.
    #[error("the part has {got:?}, and the manifest names {expected:?}")]
    Mismatch {
        /// The manifest's description of the part.
        expected: Box<PartSummary>,
        /// The description of the rows.
        got: Option<Box<PartSummary>>,
    },
}

/// Collects rows, and returns them as a [`Part`] only if they are those that the manifest names.
#[derive(Debug)]
pub struct PartBuilder {
    cutter: PartCutter,
    closed: Option<PartSummary>,
    part: Part,
}

impl PartBuilder {
    /// Returns a builder for the part whose first entry has this ordinal.
    #[must_use]
    pub fn new(first_ordinal: u64, capacity: usize) -> Self {
        PartBuilder {
            cutter: PartCutter::new(),
            closed: None,
            part: Part {
                first_ordinal,
                paths: String::new(),
                path_ends: Vec::with_capacity(capacity),
                kinds: Vec::with_capacity(capacity),
                sizes: Vec::with_capacity(capacity),
                hashes: Vec::with_capacity(capacity),
                samples: Vec::with_capacity(capacity),
                texts: Vec::new(),
            },
        }
    }

    /// Adds the next row.
    ///
    /// # Errors
    /// [`BadEntry`] when the row, or its position, breaks the format.
    pub fn push(&mut self, e: EntryRef<'_>) -> Result<(), BadEntry> {
        if let Some(cut) = self.cutter.push(e)? {
            // After a second cut there are rows past the part's end, and `finish` sees a mismatch.
            self.closed = Some(cut);
        }
        let p = &mut self.part;
        let row = u32::try_from(p.kinds.len()).unwrap_or(u32::MAX);
        p.paths.push_str(e.path);
        p.path_ends.push(u32::try_from(p.paths.len()).unwrap_or(u32::MAX));
        p.kinds.push(e.kind);
        p.sizes.push(e.size);
        p.hashes.push(e.hash);
        match e.sample {
            SampleRef::None => p.samples.push(0),
            SampleRef::Single => p.samples.push(1),
            SampleRef::Keyed(k) => {
                p.samples.push(2);
                p.texts.push((row, k.into()));
            }
        }
        if e.kind == EntryKind::Symlink {
            p.texts.push((row, e.target.into()));
        }
        Ok(())
    }

    /// Returns the part if its rows are those that `expected` describes.
    ///
    /// # Errors
    /// [`BadPart::Mismatch`] when they are not.
    pub fn finish(self, expected: &PartSummary) -> Result<Part, BadPart> {
        let got = self.cutter.finish().or(self.closed);
        if got.as_ref() == Some(expected) && self.part.len() == expected.entries as usize {
            Ok(self.part)
        } else {
            Err(BadPart::Mismatch { expected: Box::new(expected.clone()), got: got.map(Box::new) })
        }
    }
}

impl Part {
    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Returns whether there are no entries. A part always has some.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// Returns the ordinal of the first entry.
    #[must_use]
    pub fn first_ordinal(&self) -> u64 {
        self.first_ordinal
    }

    /// Returns the path of a row.
    ///
    /// # Panics
    /// When `row` is past the end.
    #[must_use]
    pub fn path(&self, row: usize) -> &str {
        let start = if row == 0 { 0 } else { self.path_ends[row - 1] as usize };
        &self.paths[start..self.path_ends[row] as usize]
    }

    /// Returns a row.
    ///
    /// # Panics
    /// When `row` is past the end.
    #[must_use]
    pub fn get(&self, row: usize) -> EntryRef<'_> {
        let kind = self.kinds[row];
        let text = || {
            let key = u32::try_from(row).unwrap_or(u32::MAX);
            self.texts.binary_search_by_key(&key, |(r, _)| *r).map_or("", |i| &*self.texts[i].1)
        };
        EntryRef {
            path: self.path(row),
            kind,
            size: self.sizes[row],
            hash: self.hashes[row],
            target: if kind == EntryKind::Symlink { text() } else { "" },
            sample: match self.samples[row] {
                0 => SampleRef::None,
                1 => SampleRef::Single,
                _ => SampleRef::Keyed(text()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Entry, Sample};
    use super::*;

    fn entries() -> Vec<Entry> {
        vec![
            Entry::file("a.jpg", 5, Hash::of(b"a")),
            Entry { sample: Sample::Keyed("b".into()), ..Entry::file("b.cls", 1, Hash::of(b"b")) },
            Entry::empty_dir("d"),
            Entry::symlink("l", "b.cls"),
        ]
    }

    fn build(rows: &[Entry], expected: &PartSummary) -> Result<Part, BadPart> {
        let mut b = PartBuilder::new(10, rows.len());
        for e in rows {
            b.push(e.as_ref())?;
        }
        b.finish(expected)
    }

    #[test]
    fn the_named_rows_are_a_part_and_swapped_rows_are_not() {
        let rows = entries();
        let mut cutter = PartCutter::new();
        for e in &rows {
            assert_eq!(cutter.push(e.as_ref()), Ok(None));
        }
        let summary = cutter.finish().expect("one part");
        let part = build(&rows, &summary).expect("same rows");
        assert_eq!(part.first_ordinal(), 10);
        for (i, e) in rows.iter().enumerate() {
            assert_eq!(part.get(i).to_owned(), *e);
        }

        let mut swapped = rows.clone();
        let (a, b) = (swapped[0].hash, swapped[1].hash);
        (swapped[0].hash, swapped[1].hash) = (b, a);
        assert!(matches!(build(&swapped, &summary), Err(BadPart::Mismatch { .. })));
        assert!(matches!(build(&rows[..3], &summary), Err(BadPart::Mismatch { .. })));
    }
}
