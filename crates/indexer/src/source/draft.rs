//! What a draft says of a file that nobody has read: the names of its places. And the entries of a draft,
//! for an index that seals it.

use super::content::{Content, slice_at, slice_count};
use super::listing::{Listed, ListingError};
use crate::failure::Failure;
use async_trait::async_trait;
use fletch_core::manifest::{ObjectState, Slice};
use fletch_core::{Hash, Root};
use fletch_tables::PinRow;
use futures::{Stream, StreamExt as _, stream};
use std::fmt::Debug;
use std::sync::Arc;

/// A page of the entries of a draft, in their order.
#[derive(Debug, Default)]
pub struct EntryPage {
    /// The entries, as a listing shows them.
    pub entries: Vec<Listed>,
    /// The ordinal at which the next page begins; `None` after the last one.
    pub next: Option<u64>,
}

/// The entries of a draft.
#[async_trait]
pub trait DraftEntries: Debug + Send + Sync {
    /// Returns the root of the draft. A seal moves no tag that names another version meanwhile.
    fn root(&self) -> Root;

    /// Returns a page that begins at the entry with the ordinal `after`.
    ///
    /// # Errors
    /// [`Failure`] when the tables of the draft cannot be read.
    async fn page(&self, after: u64) -> Result<EntryPage, Failure>;
}

/// Returns all entries of a draft, in their order.
pub fn entries(draft: Arc<dyn DraftEntries>) -> impl Stream<Item = Result<Listed, ListingError>> {
    let pages = stream::unfold(Some((draft, 0)), |state| async move {
        let (draft, after) = state?;
        match draft.page(after).await {
            // A page that does not go on is the last one.
            Ok(EntryPage { entries, next }) => {
                let entries = entries.into_iter().map(Ok).collect::<Vec<_>>();
                let next = next.filter(|next| *next > after);
                Some((entries, next.map(|next| (draft, next))))
            }
            Err(failure) => Some((vec![Err(failure.into())], None)),
        }
    });
    pages.flat_map(stream::iter)
}

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
