//! What a draft says of a file that nobody has read: the names of its places.

use super::content::{Content, slice_at, slice_count};
use fletch_core::Hash;
use fletch_core::manifest::{ObjectState, Slice};
use fletch_tables::PinRow;

/// Returns the names of a file's places, in the form of its hashes. `uri` is the dataset, as the server has
/// it registered.
#[must_use]
pub fn places(uri: &str, path: &str, pin: &PinRow) -> Content {
    let state = ObjectState { uri, path, size: pin.size, mtime_ns: pin.mtime_ns, etag: pin.etag.as_deref() };
    if pin.size == 0 {
        return Content::whole(Hash::of(&[]), 0);
    }
    let slices = (0..slice_count(pin.size)).map(|i| {
        let (offset, len) = slice_at(pin.size, i);
        Slice { chunk: state.location_name(offset, len.into()), chunk_offset: 0, len }
    });
    Content { hash: state.location_name(0, pin.size), slices: slices.collect(), members: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_one_slice_has_one_name() {
        let pin = |size| PinRow { size, mtime_ns: Some(1), etag: Some("t".to_owned()) };
        assert_eq!(places("s3://b", "x", &pin(0)), Content::whole(Hash::of(b""), 0));
        let small = places("s3://b", "x", &pin(4 << 20));
        assert_eq!((small.slices.len(), small.slices[0].chunk), (1, small.hash));
        let large = places("s3://b", "x", &pin((8 << 20) + 1));
        assert_eq!(large.slices.iter().map(|s| s.len).collect::<Vec<_>>(), [4 << 20, 4 << 20, 1]);
        assert!(large.slices.iter().all(|s| s.chunk != large.hash));
    }
}
