//! The files of a draft that a server has read whole, for an index that seals it.

use super::file_record::{Earlier, FileRecord};
use crate::failure::Failure;
use crate::source::content::{Content, SliceHash, fold};
use crate::source::pin::proves_unchanged;
use async_trait::async_trait;
use fletch_api::{LearnedFile, LearnedFiles};
use fletch_core::manifest::tar::shard::is_shard;
use fletch_tables::PinRow;
use std::collections::VecDeque;
use std::fmt::Debug;
use std::sync::Arc;
use tokio::runtime::Handle;

/// Who knows what was read of a draft.
#[async_trait]
pub trait LearnedPages: Debug + Send + Sync {
    /// Returns the files that were read whole, from the entry with the ordinal `after` on.
    ///
    /// # Errors
    /// [`Failure`] when the server does not answer, or the tables of the draft cannot be read.
    async fn page(&self, after: u64) -> Result<LearnedFiles, Failure>;
}

/// The records of a draft, in path order, page by page.
pub struct LearnedRecords {
    rt: Handle,
    draft: Arc<dyn LearnedPages>,
    local: bool,
    listed_ns: u64,
    page: VecDeque<LearnedFile>,
    /// The ordinal at which the next page begins; `None` after the last one.
    next: Option<u64>,
}

impl LearnedRecords {
    /// Begins at the first file of `draft`.
    #[must_use]
    pub fn new(rt: &Handle, draft: Arc<dyn LearnedPages>, local: bool) -> Self {
        LearnedRecords { rt: rt.clone(), draft, local, listed_ns: 0, page: VecDeque::new(), next: Some(0) }
    }

    /// Returns the record of a file. `None` for one that has to be read again.
    fn record(&self, file: LearnedFile) -> Option<(String, FileRecord)> {
        let pin = PinRow { size: file.pin.size, mtime_ns: file.pin.mtime_ns, etag: file.pin.etag };
        // Nothing was learned of the members of a shard, whose slices end at samples.
        if is_shard(&file.path) || !proves_unchanged(&pin, self.listed_ns, self.local) {
            return None;
        }
        let content = match &file.slices[..] {
            [one] => Content::whole(*one, u32::try_from(pin.size).ok()?),
            several if several.len() == file.subtrees.len() && several.len() > 1 => {
                let hashes = several.iter().zip(&file.subtrees);
                let hashes = hashes.map(|(chunk, subtree)| SliceHash { chunk: *chunk, subtree: subtree.0 });
                fold(pin.size, &hashes.collect::<Vec<_>>())
            }
            _ => return None,
        };
        Some((file.path, FileRecord::new(pin, content)))
    }
}

impl Earlier for LearnedRecords {
    type Record = FileRecord;

    fn next(&mut self) -> Result<Option<(String, FileRecord)>, Failure> {
        loop {
            while let Some(file) = self.page.pop_front() {
                if let Some(record) = self.record(file) {
                    return Ok(Some(record));
                }
            }
            let Some(after) = self.next else { return Ok(None) };
            let page = self.rt.block_on(self.draft.page(after))?;
            self.listed_ns = page.listed_ns;
            self.next = page.next.filter(|next| *next > after);
            self.page = page.files.into();
        }
    }
}
