//! Rows of `chunks.parquet`: the location of each chunk at the origin.
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
        check_range(self.len, self.offset, self.pin.size)?;
        Ok(self)
    }

    /// The approximate size of the row in memory, in bytes.
    pub(crate) fn footprint(&self) -> usize {
        let key = if let ObjectRef::Key(k) = &self.object { k.capacity() } else { 0 };
        size_of::<Self>() + key + self.pin.etag.as_ref().map_or(0, String::capacity)
    }
}

/// Refuses a chunk of `len` bytes at `offset` that is empty, too long, or outside its object of `size` bytes.
pub(crate) fn check_range(len: u32, offset: u64, size: u64) -> Result<(), &'static str> {
    if len == 0 || len > CHUNK_BYTES_MAX {
        return Err("a chunk is empty or too long");
    }
    match offset.checked_add(u64::from(len)) {
        Some(end) if end <= size => Ok(()),
        _ => Err("a chunk lies outside its object"),
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
