//! The rows that a caller gives to the writer, and the rules of the format for them.

use crate::{PinRow, TableError, chunks};
use fletch_core::Hash;
use fletch_core::manifest::{CHUNK_BYTES_MAX, Entry, EntryKind, LayoutKind, Slice};

/// A chunk of a row, and its location at the origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewChunk {
    /// The chunk's hash.
    pub chunk: Hash,
    /// The chunk's length in bytes, 1 to 16 MiB.
    pub len: u32,
    /// The key of the object that holds the chunk; `None` for the object of this row's entry.
    pub object: Option<String>,
    /// The chunk's first byte in the object.
    pub offset: u64,
    /// The state of the object when it was read.
    pub pin: PinRow,
}

/// One entry, with its slices and its chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewRow {
    /// The entry. Its path is greater than the previous row's, in byte order.
    pub entry: Entry,
    /// The slices of chunks that hold the entry's bytes, in order; empty for an entry without bytes.
    pub slices: Vec<Slice>,
    /// The chunks that this row adds. A member whose bytes lie in its shard's chunks adds none.
    pub chunks: Vec<NewChunk>,
}

impl NewRow {
    /// Returns the row of a file of an index: each slice is a chunk that lies in the file itself.
    ///
    /// `slices` is empty for an entry without bytes.
    #[must_use]
    pub fn indexed(entry: Entry, slices: Vec<Slice>, pin: &PinRow) -> Self {
        let mut offset = 0;
        let chunks = slices
            .iter()
            .map(|s| {
                let at = offset;
                offset += u64::from(s.len);
                NewChunk { chunk: s.chunk, len: s.len, object: None, offset: at, pin: pin.clone() }
            })
            .collect();
        NewRow { entry, slices, chunks }
    }

    /// Returns the row of a symlink or an empty directory.
    #[must_use]
    pub fn without_bytes(entry: Entry) -> Self {
        NewRow { entry, slices: Vec::new(), chunks: Vec::new() }
    }
}

/// Checks the rules that a reader checks ([`fletch_core::manifest::Placed::check`], limits of chunk rows).
///
/// # Errors
/// [`TableError::Row`] names the rule that the row breaks.
pub(crate) fn check(row: &NewRow, kind: LayoutKind) -> Result<(), TableError> {
    let e = &row.entry;
    let bad = |why: &str| Err(TableError::Row { path: e.path.clone(), why: why.to_owned() });
    if i64::try_from(e.size).is_err() {
        return bad("it is longer than 2^63 bytes");
    }
    let want = if e.kind.has_bytes() { e.size } else { 0 };
    if row.slices.iter().map(|s| u64::from(s.len)).sum::<u64>() != want {
        return bad("its slices do not add up to its size");
    }
    if row
        .slices
        .iter()
        .any(|s| s.len == 0 || u64::from(s.chunk_offset) + u64::from(s.len) > u64::from(CHUNK_BYTES_MAX))
    {
        return bad("a slice is empty or reaches past the largest chunk");
    }
    if let ([s], true, EntryKind::File) = (row.slices.as_slice(), kind.keeps_files_apart(), e.kind)
        && (Some(s.chunk) != e.hash || s.chunk_offset != 0)
    {
        return bad("the hash of its only chunk is not the hash of the file");
    }
    for c in &row.chunks {
        if c.len == 0 || c.len > CHUNK_BYTES_MAX {
            return bad("a chunk is empty or too long");
        }
        if c.offset.checked_add(c.len.into()).is_none_or(|end| end > c.pin.size) {
            return bad("a chunk lies outside its object");
        }
        if i64::try_from(c.pin.size).is_err() {
            return bad("an object is longer than 2^63 bytes");
        }
        if let Some(Err(why)) = c.object.as_deref().map(chunks::object_key) {
            return bad(why);
        }
        if let Some(Err(why)) = c.pin.etag.as_deref().map(chunks::etag) {
            return bad(why);
        }
    }
    Ok(())
}
