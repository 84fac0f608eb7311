//! Rows of `chunks.parquet`: the location of each chunk at the origin; and an index of them by hash.
//!
//! Owns the limits of such a row, which the reader and the writer both check. No hash covers these rows, so a
//! reader hashes every byte that it finds through them.

use fletch_core::Hash;
use fletch_core::manifest::{CHUNK_BYTES_MAX, PATH_BYTES_MAX};
use serde::{Deserialize, Serialize};

/// The longest entity tag, in bytes.
pub(crate) const ETAG_BYTES_MAX: usize = 1024;

/// The object that holds a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectRef {
    /// The object of an entry of the same part. The entry's path is the object's key.
    Entry {
        /// The entry's row in the part.
        row: u32,
    },
    /// An object of a pack, by its key relative to the folder of the tables.
    Key(String),
}

/// The state of an object when it was indexed. A later reader compares it to detect a changed object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinRow {
    /// The object's length in bytes.
    pub size: u64,
    /// The object's modification time in nanoseconds since 1970 UTC, if the origin reports one.
    pub mtime_ns: Option<i64>,
    /// The object's entity tag, if the origin has one.
    pub etag: Option<String>,
}

/// One location of a chunk at the origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkRow {
    /// The chunk's hash.
    pub chunk: Hash,
    /// The chunk's length in bytes, 1 to 16 MiB.
    pub len: u32,
    /// The object that holds the chunk.
    pub object: ObjectRef,
    /// The chunk's first byte in the object. `offset + len` is at most `pin.size`.
    pub offset: u64,
    /// The state of the object when it was indexed.
    pub pin: PinRow,
}

impl ChunkRow {
    /// Returns the row if it is within the limits of the format, else the rule that it breaks.
    pub(crate) fn checked(self) -> Result<Self, &'static str> {
        if self.len == 0 || self.len > CHUNK_BYTES_MAX {
            return Err("a chunk is empty or too long");
        }
        match self.offset.checked_add(u64::from(self.len)) {
            Some(end) if end <= self.pin.size => Ok(self),
            _ => Err("a chunk lies outside its object"),
        }
    }

    /// The approximate size of the row in memory, in bytes.
    pub(crate) fn footprint(&self) -> usize {
        let key = if let ObjectRef::Key(k) = &self.object { k.capacity() } else { 0 };
        size_of::<Self>() + key + self.pin.etag.as_ref().map_or(0, String::capacity)
    }
}

/// Returns the key if it is a clean relative path of bounded length, else the rule that it breaks.
///
/// The key comes from a file that nobody signed. It must not lead out of the folder of the tables.
pub(crate) fn object_key(key: &str) -> Result<&str, &'static str> {
    let clean = key.split('/').all(|c| !c.is_empty() && c != "." && c != "..");
    if clean && key.len() <= PATH_BYTES_MAX && !key.contains('\0') {
        Ok(key)
    } else {
        Err("an object's key is not a clean relative path")
    }
}

/// Returns the entity tag if it can be sent as a header, else the rule that it breaks.
pub(crate) fn etag(tag: &str) -> Result<&str, &'static str> {
    if tag.len() <= ETAG_BYTES_MAX && tag.bytes().all(|b| (0x20..0x7f).contains(&b)) {
        Ok(tag)
    } else {
        Err("an entity tag is too long or has characters that are not printable ASCII")
    }
}

/// An index from a chunk's hash to the rows that may describe it: 16 bytes a row, sorted.
#[derive(Debug, Clone, Default)]
pub struct ChunkIndex {
    rows: Vec<IndexRow>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct IndexRow {
    /// The first 8 bytes of the chunk's hash.
    key: [u8; 8],
    part: u32,
    row: u32,
}

fn key_of(hash: &Hash) -> [u8; 8] {
    let mut key = [0; 8];
    key.copy_from_slice(&hash.as_bytes()[..8]);
    key
}

impl ChunkIndex {
    /// Adds the rows of a part, given its chunk hashes in row order. [`Self::sorted`] ends the index.
    pub(crate) fn add_part(&mut self, part: usize, hashes: &[Hash]) {
        let part = u32::try_from(part).unwrap_or(u32::MAX);
        self.rows.reserve(hashes.len());
        self.rows.extend((0u32..).zip(hashes).map(|(row, h)| IndexRow { key: key_of(h), part, row }));
    }

    /// Returns the index, ready to be searched.
    pub(crate) fn sorted(mut self) -> Self {
        self.rows.sort_unstable();
        self.rows.shrink_to_fit();
        self
    }

    /// The number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether the index has no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the rows that may describe this chunk, as (part, row) in ascending order.
    ///
    /// The index compares only the first 8 bytes of the hash. The caller compares the row's whole hash.
    pub fn find(&self, hash: Hash) -> impl Iterator<Item = (usize, usize)> + '_ {
        let key = key_of(&hash);
        let from = self.rows.partition_point(|s| s.key < key);
        self.rows[from..].iter().take_while(move |s| s.key == key).map(|s| (s.part as usize, s.row as usize))
    }

    /// The approximate size of the index in memory, in bytes.
    #[must_use]
    pub fn footprint(&self) -> usize {
        self.rows.capacity() * size_of::<IndexRow>()
    }
}
