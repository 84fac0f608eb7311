//! A leaf: up to [`LEAF_ROWS`] entries of a part with their slices, in one allocation that is read where it
//! lies.
//!
//! A leaf has the same bytes in memory and in a local file (`docs/FORMATS.md`, "Local tables"): a table of
//! offsets, then the rows. Numbers have the byte order of the machine, because a local file never leaves it.
//!
//! Invariant: [`Leaf::parse`] has checked every offset, every length and every text. So an access finds what
//! it needs without a check that can fail.

use fletch_core::Hash;
use fletch_core::manifest::{EntryKind, EntryRef, Part, Placed, SampleRef, Slice};
use std::ops::Range;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The most rows of a leaf. All leaves of a part but the last have so many.
pub(crate) const LEAF_ROWS: usize = 32;
/// Rows begin at multiples of this, so that their numbers can be read in place.
const ROW_ALIGN: usize = 8;

/// Bytes at an address that numbers of up to 8 bytes may have.
#[derive(Debug)]
pub(crate) struct Buffer {
    words: Box<[u64]>,
    len: usize,
}

impl Buffer {
    /// Returns `len` bytes of zeros.
    pub fn zeroed(len: usize) -> Self {
        Buffer { words: vec![0; len.div_ceil(size_of::<u64>())].into(), len }
    }

    pub fn of(bytes: &[u8]) -> Self {
        let mut buffer = Buffer::zeroed(bytes.len());
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }

    pub fn bytes(&self) -> &[u8] {
        &self.words.as_bytes()[..self.len]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.words.as_mut_bytes()[..self.len]
    }

    /// The size of the allocation, in bytes.
    pub fn footprint(&self) -> usize {
        size_of_val(&*self.words)
    }
}

/// The fixed part of a row. The slices follow, then the path, the target and the sample key.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RowHead {
    size: u64,
    hash: Hash,
    slices: u32,
    path_len: u32,
    target_len: u32,
    key_len: u32,
    kind: u8,
    /// 0 none, 1 single, 2 keyed.
    sample: u8,
    has_hash: u8,
    zeros: [u8; 5],
}

const NO_SAMPLE: u8 = 0;
const SINGLE: u8 = 1;
const KEYED: u8 = 2;

/// Up to [`LEAF_ROWS`] entries and their slices.
#[derive(Debug)]
pub struct Leaf {
    buffer: Buffer,
    rows: usize,
}

impl Leaf {
    /// Returns the leaves of a part, in order.
    pub(crate) fn of_part(part: &Part, placed: &Placed) -> Vec<Leaf> {
        let firsts = (0..part.len()).step_by(LEAF_ROWS);
        firsts.map(|first| Leaf::of_rows(part, placed, first..part.len().min(first + LEAF_ROWS))).collect()
    }

    fn of_rows(part: &Part, placed: &Placed, rows: Range<usize>) -> Leaf {
        let count = rows.len();
        let mut bytes = vec![0; (1 + count) * size_of::<u32>()];
        let mut offsets = vec![u32::try_from(count).unwrap_or(u32::MAX)];
        for row in rows {
            bytes.resize(bytes.len().next_multiple_of(ROW_ALIGN), 0);
            // A leaf has 32 rows of at most a few kilobytes and the slices of a part, which fit 32 bits.
            offsets.push(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
            push_row(&mut bytes, &part.get(row), placed.slices(row));
        }
        bytes[..offsets.as_bytes().len()].copy_from_slice(offsets.as_bytes());
        Leaf { buffer: Buffer::of(&bytes), rows: count }
    }

    /// Returns the leaf with these bytes; `None` if they break a rule of the format.
    pub(crate) fn parse(buffer: Buffer) -> Option<Leaf> {
        let (count, _) = u32::read_from_prefix(buffer.bytes()).ok()?;
        let rows = usize::try_from(count).ok().filter(|rows| (1..=LEAF_ROWS).contains(rows))?;
        let leaf = Leaf { buffer, rows };
        leaf.offsets_checked()?;
        (0..rows).all(|row| leaf.checked(row).is_some()).then_some(leaf)
    }

    fn offsets_checked(&self) -> Option<&[u32]> {
        let (offsets, _) = <[u32]>::ref_from_prefix_with_elems(self.buffer.bytes(), 1 + self.rows).ok()?;
        Some(&offsets[1..])
    }

    /// Returns the fixed part of a row, and the bytes after it.
    fn head(&self, row: usize) -> Option<(&RowHead, &[u8])> {
        let at = usize::try_from(*self.offsets_checked()?.get(row)?).ok()?;
        RowHead::ref_from_prefix(self.buffer.bytes().get(at..)?).ok()
    }

    fn checked(&self, row: usize) -> Option<(EntryRef<'_>, &[Slice])> {
        let (head, rest) = self.head(row)?;
        let (slices, rest) = <[Slice]>::ref_from_prefix_with_elems(rest, head.slices as usize).ok()?;
        let (path, rest) = text(rest, head.path_len)?;
        let (target, rest) = text(rest, head.target_len)?;
        let (key, _) = text(rest, head.key_len)?;
        let entry = EntryRef {
            path,
            kind: EntryKind::from_number(head.kind)?,
            size: head.size,
            hash: (head.has_hash == 1).then_some(head.hash),
            target,
            sample: match head.sample {
                NO_SAMPLE => SampleRef::None,
                SINGLE => SampleRef::Single,
                KEYED => SampleRef::Keyed(key),
                _ => return None,
            },
        };
        Some((entry, slices))
    }

    /// The number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Returns a row with the slices of chunks that hold its bytes.
    ///
    /// # Panics
    /// When `row` is past the end.
    fn row(&self, row: usize) -> (EntryRef<'_>, &[Slice]) {
        assert!(row < self.rows, "row {row} of a leaf of {} rows", self.rows);
        self.checked(row).expect("every row was checked when the leaf was made")
    }

    /// Returns the entry of a row.
    ///
    /// # Panics
    /// When `row` is past the end.
    #[must_use]
    pub fn entry(&self, row: usize) -> EntryRef<'_> {
        self.row(row).0
    }

    /// Returns the slices of chunks that hold the bytes of a row's entry, in order.
    ///
    /// # Panics
    /// When `row` is past the end.
    #[must_use]
    pub fn slices(&self, row: usize) -> &[Slice] {
        self.row(row).1
    }

    /// The path of the first row, as bytes.
    pub(crate) fn first_path(&self) -> &[u8] {
        self.path(0)
    }

    fn path(&self, row: usize) -> &[u8] {
        self.entry(row).path.as_bytes()
    }

    /// Returns the first row whose path is not below `path`, or the number of rows.
    #[must_use]
    pub fn lower_bound(&self, path: &[u8]) -> usize {
        let (mut low, mut high) = (0, self.rows);
        while low < high {
            let mid = low + (high - low) / 2;
            if self.path(mid) < path {
                low = mid + 1;
            } else {
                high = mid;
            }
        }
        low
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.buffer.bytes()
    }

    /// The size of the leaf in memory, in bytes.
    pub(crate) fn footprint(&self) -> usize {
        size_of::<Self>() + self.buffer.footprint()
    }
}

fn push_row(bytes: &mut Vec<u8>, entry: &EntryRef<'_>, slices: &[Slice]) {
    let (sample, key) = match entry.sample {
        SampleRef::None => (NO_SAMPLE, ""),
        SampleRef::Single => (SINGLE, ""),
        SampleRef::Keyed(key) => (KEYED, key),
    };
    let len = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let head = RowHead {
        size: entry.size,
        hash: entry.hash.unwrap_or(Hash([0; 32])),
        slices: len(slices.len()),
        path_len: len(entry.path.len()),
        target_len: len(entry.target.len()),
        key_len: len(key.len()),
        kind: entry.kind as u8,
        sample,
        has_hash: u8::from(entry.hash.is_some()),
        zeros: [0; 5],
    };
    bytes.extend_from_slice(head.as_bytes());
    bytes.extend_from_slice(slices.as_bytes());
    for text in [entry.path, entry.target, key] {
        bytes.extend_from_slice(text.as_bytes());
    }
}

/// Splits a text of `len` bytes from the front.
fn text(bytes: &[u8], len: u32) -> Option<(&str, &[u8])> {
    let (text, rest) = bytes.split_at_checked(usize::try_from(len).ok()?)?;
    Some((std::str::from_utf8(text).ok()?, rest))
}
