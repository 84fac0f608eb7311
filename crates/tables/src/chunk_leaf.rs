//! A leaf of `chunks.parquet`: up to [`LEAF_ROWS`] locations of chunks, in one allocation.
//!
//! The bytes are those of a local file (`docs/FORMATS.md`, "Local tables"): the count, then fixed parts, then
//! texts. No hash of the version covers these rows; the limits of the format were checked when they were
//! decoded, and are checked again when a row is returned.

use crate::chunks::{ChunkRow, ObjectRef, PinRow, check_range, etag, object_key};
use crate::leaf::{Buffer, LEAF_ROWS};
use fletch_core::Hash;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// In the place of an entry's row: the object is named by its key.
const NO_ENTRY: u32 = u32::MAX;

/// The fixed part of a row.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RowHead {
    chunk: Hash,
    offset: u64,
    size: u64,
    mtime_ns: i64,
    len: u32,
    /// The row of the entry whose object holds the chunk, or [`NO_ENTRY`].
    entry: u32,
    /// Where the row's texts, the key and the etag, begin.
    texts: u32,
    key_len: u32,
    etag_len: u32,
    has_mtime: u8,
    has_etag: u8,
    zeros: [u8; 2],
}

/// The count at the front, as wide as a row's numbers are aligned.
const COUNT_BYTES: usize = size_of::<u64>();

/// Up to [`LEAF_ROWS`] rows of `chunks.parquet`.
#[derive(Debug)]
pub(crate) struct ChunkLeaf {
    buffer: Buffer,
    rows: usize,
}

impl ChunkLeaf {
    /// Returns the leaves of a part's rows, in order.
    pub fn of_rows(rows: &[ChunkRow]) -> Vec<ChunkLeaf> {
        rows.chunks(LEAF_ROWS).map(ChunkLeaf::of).collect()
    }

    fn of(rows: &[ChunkRow]) -> ChunkLeaf {
        let len = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let mut texts = Vec::new();
        let mut bytes = (rows.len() as u64).as_bytes().to_vec();
        let texts_at = COUNT_BYTES + size_of::<RowHead>() * rows.len();
        for row in rows {
            let (entry, key) = match &row.object {
                ObjectRef::Entry { row } => (*row, ""),
                ObjectRef::Key(key) => (NO_ENTRY, key.as_str()),
            };
            let tag = row.pin.etag.as_deref();
            let head = RowHead {
                chunk: row.chunk,
                offset: row.offset,
                size: row.pin.size,
                mtime_ns: row.pin.mtime_ns.unwrap_or(0),
                len: row.len,
                entry,
                texts: len(texts_at + texts.len()),
                key_len: len(key.len()),
                etag_len: len(tag.unwrap_or_default().len()),
                has_mtime: u8::from(row.pin.mtime_ns.is_some()),
                has_etag: u8::from(tag.is_some()),
                zeros: [0; 2],
            };
            bytes.extend_from_slice(head.as_bytes());
            texts.extend_from_slice(key.as_bytes());
            texts.extend_from_slice(tag.unwrap_or_default().as_bytes());
        }
        bytes.extend_from_slice(&texts);
        ChunkLeaf { buffer: Buffer::of(&bytes), rows: rows.len() }
    }

    /// Returns the leaf with these bytes; `None` if they break a rule of the format.
    pub fn parse(buffer: Buffer) -> Option<ChunkLeaf> {
        let (count, _) = u64::read_from_prefix(buffer.bytes()).ok()?;
        let rows = usize::try_from(count).ok().filter(|rows| (1..=LEAF_ROWS).contains(rows))?;
        let leaf = ChunkLeaf { buffer, rows };
        (0..rows).all(|row| leaf.parts(row).is_some()).then_some(leaf)
    }

    /// Returns the fixed part of a row, its key and its entity tag; `None` past the end, or if one of them
    /// breaks a rule of the format.
    fn parts(&self, row: usize) -> Option<(&RowHead, &str, &str)> {
        let heads = self.buffer.bytes().get(COUNT_BYTES..)?;
        let (heads, _) = <[RowHead]>::ref_from_prefix_with_elems(heads, self.rows).ok()?;
        let head = heads.get(row)?;
        let texts = self.buffer.bytes().get(head.texts as usize..)?;
        let (key, rest) = texts.split_at_checked(head.key_len as usize)?;
        let key = std::str::from_utf8(key).ok()?;
        let key = if head.entry == NO_ENTRY { object_key(key).ok()? } else { key };
        let tag = std::str::from_utf8(rest.get(..head.etag_len as usize)?).ok()?;
        check_range(head.len, head.offset, head.size).ok()?;
        Some((head, key, etag(tag).ok()?))
    }

    /// Returns a row; `None` past the end.
    pub fn get(&self, row: usize) -> Option<ChunkRow> {
        let (head, key, tag) = self.parts(row)?;
        let object = match head.entry {
            NO_ENTRY => ObjectRef::Key(key.to_owned()),
            row => ObjectRef::Entry { row },
        };
        let etag = (head.has_etag == 1).then(|| tag.to_owned());
        let pin = PinRow { size: head.size, mtime_ns: (head.has_mtime == 1).then_some(head.mtime_ns), etag };
        Some(ChunkRow { chunk: head.chunk, len: head.len, object, offset: head.offset, pin })
    }

    pub fn bytes(&self) -> &[u8] {
        self.buffer.bytes()
    }

    /// The size of the leaf in memory, in bytes.
    pub fn footprint(&self) -> usize {
        size_of::<Self>() + self.buffer.footprint()
    }
}
