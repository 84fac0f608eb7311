//! The entries of a draft, and which of its files the server has read to their last byte.

use super::{Sources, VersionError, Versions};
use fletch_api::{Draft, LearnedFile, LearnedFiles, ObjectPin};
use fletch_core::{
    Hash, StoreKey,
    manifest::{EntryKind, ObjectState, Slice, tar::shard::is_shard},
};
use fletch_indexer::source::listing::Listed;
use fletch_origin::ObjectMeta;
use fletch_tables::{ChunkRow, LoadedPart, ObjectRef, PinRow};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

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
        let mut end = loaded.len().min(first + PAGE_ENTRIES_MAX);
        let (mut files, mut slices) = (Vec::new(), 0);
        for row in first..end {
            let of_row = loaded.slices(row).len();
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

    /// Returns the entries of a draft from the ordinal `after` on, as a listing shows them, and where the
    /// next page begins.
    ///
    /// # Errors
    /// As [`Versions::learned_files`].
    pub async fn draft_entries(
        &self,
        sources: &Sources,
        after: u64,
    ) -> Result<(Vec<Listed>, Option<u64>), VersionError> {
        let version = &sources.first.version;
        let Some((part, first)) = version.index().find(after) else { return Ok((Vec::new(), None)) };
        let (loaded, rows) = (version.part(part).await?, version.chunk_rows(part).await?);
        let pins = pins_of(&rows);
        let end = loaded.len().min(first + PAGE_ENTRIES_MAX);
        let entries = (first..end).map(|row| {
            let entry = loaded.entry(row);
            let path = entry.path.to_owned();
            match entry.kind {
                EntryKind::File | EntryKind::Member => {
                    let pin = u32::try_from(row).ok().and_then(|row| pins.get(&row));
                    // An empty file has no bytes, and so no place.
                    let (mtime_ns, etag) = match pin {
                        Some(pin) => (pin.mtime_ns, pin.etag.clone()),
                        None => (None, None),
                    };
                    Listed::Object(ObjectMeta { path, size: entry.size, mtime_ns, etag })
                }
                EntryKind::Symlink => Listed::Link { path, target: entry.target.to_owned() },
                // In tables its path ends in a slash.
                EntryKind::EmptyDir => {
                    Listed::EmptyDir { path: path.strip_suffix('/').unwrap_or(&path).to_owned() }
                }
            }
        });
        let next = after + (end - first) as u64;
        Ok((entries.collect(), Some(next).filter(|next| *next < version.manifest().entries)))
    }

    /// Counts the files of a draft that were read whole, and the bytes that were read. Returns the bytes of
    /// its tar shards, too, which a seal reads again.
    ///
    /// # Errors
    /// Those of the tables.
    pub async fn known_share(&self, sources: &Sources) -> Result<(Draft, u64), VersionError> {
        let (version, mut shard_bytes) = (&sources.first.version, 0);
        let mut draft = Draft {
            dataset: sources.dataset().clone(),
            root: version.root(),
            listed_ns: version.layout_doc().indexed_at_ns,
            files: 0,
            bytes: 0,
            known_files: 0,
            known_bytes: 0,
        };
        for part in 0..version.manifest().parts.len() {
            let loaded = version.part(part).await?;
            for row in 0..loaded.len() {
                let entry = loaded.entry(row);
                if entry.kind != EntryKind::File {
                    continue;
                }
                let (mut size, mut known) = (0, 0);
                for slice in loaded.slices(row) {
                    let name = StoreKey { domain: sources.domain.clone(), hash: slice.chunk };
                    size += u64::from(slice.len);
                    if self.learned().content(&name).is_some() {
                        known += u64::from(slice.len);
                    }
                }
                shard_bytes += if is_shard(entry.path) { size } else { 0 };
                draft.files += 1;
                draft.bytes += size;
                draft.known_files += u64::from(size == known);
                draft.known_bytes += known;
            }
            // A draft has as many names as a listing. Other tasks have their turn.
            tokio::task::yield_now().await;
        }
        Ok((draft, shard_bytes))
    }

    /// Returns the drafts that are open, each once.
    #[must_use]
    pub fn drafts_in_use(&self) -> Vec<Arc<Sources>> {
        let mut seen = HashSet::new();
        let open = self.open.iter().filter_map(|(_, slot)| slot.get().cloned());
        let drafts = open.filter(|sources| sources.is_draft() && sources.is_registered());
        drafts
            .filter(|sources| {
                let root = sources.first.version.root();
                seen.insert((sources.domain.clone(), sources.dataset().clone(), root))
            })
            .collect()
    }

    /// Returns a file, if every slice of it was read.
    fn learned_file(
        &self,
        sources: &Sources,
        part: &LoadedPart,
        row: usize,
        pin: &PinRow,
    ) -> Option<LearnedFile> {
        let (entry, placed) = (part.entry(row), part.slices(row));
        if entry.kind != EntryKind::File {
            return None;
        }
        // Tables may name any place. Only the places of this object say what it holds.
        if !are_places_of(&sources.first.registered.dataset.uri, entry.path, pin, placed) {
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

/// Whether the slices of a file have the names of its places, one after the other.
fn are_places_of(uri: &str, path: &str, pin: &PinRow, slices: &[Slice]) -> bool {
    let state = ObjectState { uri, path, size: pin.size, mtime_ns: pin.mtime_ns, etag: pin.etag.as_deref() };
    let mut offset = 0;
    let are_named = slices.iter().all(|slice| {
        let name = state.location_name(offset, slice.len.into());
        offset += u64::from(slice.len);
        slice.chunk == name && slice.chunk_offset == 0
    });
    are_named && offset == pin.size
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
