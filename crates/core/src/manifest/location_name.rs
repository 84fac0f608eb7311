//! Location names: what a draft writes in the place of hashes, before anything was read.
//!
//! A draft is a version made from a listing. The listing pins each object by its size and its entity tag or
//! modification time. A location name is the hash of this pin and of a range of the object. It names bytes
//! by where they are, as a content hash names them by what they are. Nobody can make a location name equal
//! to a content hash, because both are BLAKE3 in different modes.

use crate::hash::context;
use crate::{Hash, StoreKey};

/// An object as a listing showed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectState<'a> {
    /// The URI of the dataset, as the server has registered it.
    pub uri: &'a str,
    /// The object's path below the URI.
    pub path: &'a str,
    /// Its size in bytes.
    pub size: u64,
    /// Its modification time, in nanoseconds since 1970.
    pub mtime_ns: Option<i64>,
    /// Its entity tag.
    pub etag: Option<&'a str>,
}

impl ObjectState<'_> {
    /// Returns the name of `len` bytes from `offset` on, while the object is in this state.
    ///
    /// The name covers the entity tag, or else the modification time. Encoding: lengths and numbers are u64,
    /// little-endian;
    /// `uri length · uri · path length · path · size · 1 · tag length · tag · offset · len`, or
    /// `… size · 2 · time · offset · len`, or `… size · 0 · offset · len`.
    #[must_use]
    pub fn location_name(&self, offset: u64, len: u64) -> Hash {
        let mut h = blake3::Hasher::new_derive_key(context::LOCATION);
        let text = |h: &mut blake3::Hasher, text: &str| {
            h.update(&(text.len() as u64).to_le_bytes());
            h.update(text.as_bytes());
        };
        text(&mut h, self.uri);
        text(&mut h, self.path);
        h.update(&self.size.to_le_bytes());
        match (self.etag, self.mtime_ns) {
            (Some(tag), _) => {
                h.update(&[1]);
                text(&mut h, tag);
            }
            (None, Some(time)) => {
                h.update(&[2]);
                h.update(&time.to_le_bytes());
            }
            (None, None) => {
                h.update(&[0]);
            }
        }
        h.update(&offset.to_le_bytes());
        h.update(&len.to_le_bytes());
        h.finalize().into()
    }
}

/// A location name in a domain, in 16 bytes, for tables with many of them.
///
/// Whoever chooses the names of objects can find two with the same short form, with the work of 2^64 hashes,
/// and then both are his own. Nobody can find one with the short form of another one's name.
pub type ShortName = [u8; 16];

/// Returns the short form of a location name. Two domains have two forms of one name (I7).
#[must_use]
pub fn short_name(name: &StoreKey) -> ShortName {
    let mut h = blake3::Hasher::new_derive_key(context::LEARNED);
    h.update(name.domain.as_str().as_bytes());
    h.update(&[0]);
    h.update(name.hash.as_bytes());
    let mut short = ShortName::default();
    h.finalize_xof().fill(&mut short);
    short
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_field_is_part_of_the_name() {
        let object = ObjectState { uri: "s3://b", path: "a/x", size: 9, mtime_ns: Some(5), etag: Some("t") };
        let no_tag = ObjectState { etag: None, ..object };
        let names = [
            object.location_name(0, 9),
            object.location_name(0, 8),
            object.location_name(1, 8),
            ObjectState { uri: "s3://c", ..object }.location_name(0, 9),
            // The border between two fields is part of the name.
            ObjectState { uri: "s3://ba", path: "/x", ..object }.location_name(0, 9),
            ObjectState { path: "a/y", ..object }.location_name(0, 9),
            ObjectState { size: 10, ..object }.location_name(0, 9),
            ObjectState { etag: Some("u"), ..object }.location_name(0, 9),
            no_tag.location_name(0, 9),
            ObjectState { mtime_ns: Some(6), ..no_tag }.location_name(0, 9),
            ObjectState { mtime_ns: None, ..no_tag }.location_name(0, 9),
        ];
        assert_eq!(BTreeSet::from(names).len(), names.len());
        let touched = ObjectState { mtime_ns: Some(6), ..object };
        assert_eq!(touched.location_name(0, 9), object.location_name(0, 9), "the tag decides");
    }

    #[test]
    fn a_name_is_the_same_in_every_release() {
        let object = ObjectState {
            uri: "s3://bucket/set",
            path: "train/a.jpg",
            size: 110_000,
            mtime_ns: None,
            etag: Some("\"abc\""),
        };
        assert_eq!(
            object.location_name(0, 110_000).to_string(),
            "8b7d523e1a56bd461c37e5b9ee1e09012d6ae6446b39e3f91e5c96ec3a6ba95c"
        );
    }
}
