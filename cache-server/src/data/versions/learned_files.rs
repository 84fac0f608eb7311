//! Which files of a draft the server has read to their last byte.

use super::{Sources, VersionError, Versions};
use fletch_api::{LearnedFile, LearnedFiles, ObjectPin};
use fletch_core::{
    Hash, StoreKey,
    manifest::{EntryKind, Slice},
};
use fletch_tables::{ChunkRow, LoadedPart, ObjectRef, PinRow};
use std::collections::HashMap;

/// The most entries that one page is about.
const PAGE_ENTRIES_MAX: usize = 1024;
/// The most slices of one page. A file with more (128 GiB) is in no page: a seal reads it again.
const PAGE_SLICES_MAX: usize = 32_768;

impl Versions {
    /// Returns the files of a draft that were read whole, from the entry with the ordinal `after` on.
    ///
    /// # Errors
    /// [`VersionError::NotFound`] for a version that is no draft; those of the tables.
    pub async fn learned_files(&self, sources: &Sources, after: u64) -> Result<LearnedFiles, VersionError> {
        let version = &sources.first.version;
        if !version.is_draft() {
            return Err(VersionError::NotFound);
        }
        let listed_ns = version.layout_doc().indexed_at_ns;
        let Some((part, first)) = version.index().find(after) else {
            return Ok(LearnedFiles { listed_ns, ..LearnedFiles::default() });
        };
        let (loaded, rows) = (version.part(part).await?, version.chunk_rows(part).await?);
        let pins = pins_of(&rows);
        let mut end = loaded.entries.len().min(first + PAGE_ENTRIES_MAX);
        let (mut files, mut slices) = (Vec::new(), 0);
        for row in first..end {
            let of_row = loaded.placed.slices(row).len();
            if of_row > PAGE_SLICES_MAX {
                continue;
            }
            if slices + of_row > PAGE_SLICES_MAX {
                end = row;
                break;
            }
            slices += of_row;
            let pin = u32::try_from(row).ok().and_then(|row| pins.get(&row));
            if let Some(pin) = pin
                && let Some(file) = self.learned_file(sources, &loaded, row, pin)
            {
                files.push(file);
            }
        }
        let (entries, total) = ((end - first) as u64, version.manifest().entries);
        let next = Some(after + entries).filter(|next| *next < total);
        Ok(LearnedFiles { listed_ns, files, entries, next })
    }

    /// Returns a file, if every slice of it was read.
    fn learned_file(
        &self,
        sources: &Sources,
        part: &LoadedPart,
        row: usize,
        pin: &PinRow,
    ) -> Option<LearnedFile> {
        let (entry, placed) = (part.entries.get(row), part.placed.slices(row));
        if entry.kind != EntryKind::File {
            return None;
        }
        let name = |slice: &Slice| StoreKey { domain: sources.domain.clone(), hash: slice.chunk };
        let (mut slices, mut subtrees) = (Vec::new(), Vec::new());
        match placed {
            [one] => slices.push(self.learned().content(&name(one))?),
            several => {
                for slice in several {
                    let learned = self.learned().slice(&name(slice))?;
                    slices.push(learned.chunk);
                    subtrees.push(Hash(learned.subtree));
                }
            }
        }
        let pin = ObjectPin { size: pin.size, mtime_ns: pin.mtime_ns, etag: pin.etag.clone() };
        Some(LearnedFile { path: entry.path.to_owned(), pin, slices, subtrees })
    }
}

/// Returns the pin of the object of each entry of a part that has bytes.
fn pins_of(rows: &[ChunkRow]) -> HashMap<u32, &PinRow> {
    let mut pins = HashMap::new();
    for row in rows {
        if let ObjectRef::Entry { row: entry } = row.object {
            pins.entry(entry).or_insert(&row.pin);
        }
    }
    pins
}
