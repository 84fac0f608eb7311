//! Objects as callers see them: metadata, pins, bytes, and how a write treats an object that exists.

use bytes::Bytes;

/// The metadata of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectMeta {
    /// The path, relative to the origin's URI.
    pub path: String,
    /// The size in bytes.
    pub size: u64,
    /// The time of the last modification, in nanoseconds since 1970. S3 has a precision of seconds.
    pub mtime_ns: Option<i64>,
    /// The entity tag of the store. For a local file, its inode and change time.
    pub etag: Option<String>,
}

impl ObjectMeta {
    /// Returns the pin of this state of the object.
    #[must_use]
    pub fn pin(&self) -> Pin {
        Pin { size: self.size, mtime_ns: self.mtime_ns, etag: self.etag.clone() }
    }
}

/// The state of an object when it was indexed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pin {
    /// The size in bytes.
    pub size: u64,
    /// As [`ObjectMeta::mtime_ns`].
    pub mtime_ns: Option<i64>,
    /// As [`ObjectMeta::etag`].
    pub etag: Option<String>,
}

/// The bytes of a read. There are as many as were requested; they are not verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectBytes {
    /// The requested range, or the whole object.
    pub bytes: Bytes,
    /// The metadata of the object, from the same answer.
    ///
    /// For a local file, taken after the read, so that a change during the read shows in it.
    pub meta: ObjectMeta,
}

/// Whether a write may replace an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutMode {
    /// Creates the object. Fails with [`OriginError::AlreadyExists`] if it exists.
    Create,
    /// Creates or replaces the object.
    Overwrite,
}
