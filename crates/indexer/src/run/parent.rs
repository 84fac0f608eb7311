//! The parent of a run: an earlier version whose tables say how each file looked and what it holds.
//!
//! The index layout of the parent has the pin of each file, which proves whether the file is unchanged. The
//! packed layout says in which chunk a small file is. At most two parts, and the members of one shard, are in
//! memory.

use super::Run;
use super::file_record::{Earlier, FileRecord};
use super::renewed::RenewedPins;
use crate::failure::{Exit, Failure};
use crate::select::Select;
use crate::source::content::Content;
use crate::source::pin::proves_unchanged;
use crate::tables_location::{TablesLocation, layout_of};
use fletch_core::manifest::pack::ParentLocation;
use fletch_core::manifest::tar::shard::{ShardMember, is_shard};
use fletch_core::manifest::{EntryKind, EntryRef, LayoutParams};
use fletch_core::{Hash, LayoutId, Root};
use fletch_origin::OriginError;
use fletch_tables::{ChunkRow, LoadedPart, ObjectRef, PinRow, Version, paths};
use futures::StreamExt;
use std::sync::Arc;
use tokio::runtime::Handle;

/// A pin row that no entry has.
const NO_PIN: u32 = u32::MAX;

/// Opens the parent that the options name, with `open`. Returns `None` when the run goes on without a parent.
///
/// # Errors
/// [`Failure`] when the parent is missing or unreadable and the options require it, or its origin is away.
pub fn open<T>(
    run: &Run<'_>,
    open: impl FnOnce(Root, LayoutId) -> Result<Option<T>, Failure>,
) -> Result<Option<T>, Failure> {
    let Some(parent) = &run.options.parent else { return Ok(None) };
    let rt = run.ctx.rt;
    let opened = || {
        if parent.optional
            && let Select::Tag(tag) = &parent.select
            && rt.block_on(run.tables.tag(tag))?.is_none()
        {
            return Ok(None);
        }
        let (root, layout) = rt.block_on(run.tables.resolve(&parent.select))?;
        open(root, layout)
    };
    match opened() {
        Err(e) if parent.optional && e.exit == Exit::Failed => {
            let out = run.ctx.out;
            out.warn(format_args!("cannot use the parent, so every file is read: {}", e.what));
            Ok(None)
        }
        opened => opened,
    }
}

/// One part of the parent, in both layouts, with the row at hand.
struct OpenPart {
    index: Arc<LoadedPart>,
    chunks: Arc<Vec<ChunkRow>>,
    packed: Option<Arc<LoadedPart>>,
    /// By row of the part: the row of `chunks.parquet` that has the entry's pin, or [`NO_PIN`].
    pins: Vec<u32>,
    row: usize,
}

impl OpenPart {
    fn entry(&self) -> EntryRef<'_> {
        self.index.entry(self.row)
    }

    /// The record of the file in this row, without members, if its pin proves that it is unchanged.
    fn file(&self, indexed_at_ns: u64, local: bool) -> Option<FileRecord> {
        let entry = self.entry();
        let pin = &self.chunks.get(self.pins[self.row] as usize)?.pin;
        let (EntryKind::File, Some(hash)) = (entry.kind, entry.hash) else { return None };
        if pin.size != entry.size || !proves_unchanged(pin, indexed_at_ns, local) {
            return None;
        }
        let slices = self.index.slices(self.row).to_vec();
        Some(FileRecord::new(pin.clone(), Content { hash, slices, members: Vec::new() }))
    }
}

/// Reads the rows of the parent in path order, part by part.
struct ParentRows {
    rt: Handle,
    index: Version,
    packed: Option<Version>,
    next_part: usize,
    open: Option<OpenPart>,
}

impl ParentRows {
    fn new(rt: &Handle, index: Version, packed: Option<Version>) -> Self {
        ParentRows { rt: rt.clone(), index, packed, next_part: 0, open: None }
    }

    fn indexed_at_ns(&self) -> u64 {
        self.index.layout_doc().indexed_at_ns
    }

    /// The part with the next row; `None` at the end. The caller advances its row.
    fn part(&mut self) -> Result<Option<&mut OpenPart>, Failure> {
        while self.open.as_ref().is_none_or(|open| open.row >= open.index.len()) {
            self.open = None;
            if self.next_part >= self.index.index().parts().len() {
                return Ok(None);
            }
            self.open = Some(self.load(self.next_part)?);
            self.next_part += 1;
        }
        Ok(self.open.as_mut())
    }

    fn load(&self, part: usize) -> Result<OpenPart, Failure> {
        let (index, chunks, packed) = self.rt.block_on(async {
            let packed = match &self.packed {
                Some(v) => Some(v.part(part).await?),
                None => None,
            };
            Ok::<_, Failure>((self.index.part(part).await?, self.index.chunk_rows(part).await?, packed))
        })?;
        let mut pins = vec![NO_PIN; index.len()];
        for (at, chunk) in chunks.iter().enumerate() {
            if let ObjectRef::Entry { row } = chunk.object
                && let Some(slot) = pins.get_mut(row as usize)
                && *slot == NO_PIN
            {
                *slot = u32::try_from(at).unwrap_or(NO_PIN);
            }
        }
        Ok(OpenPart { index, chunks, packed, pins, row: 0 })
    }
}

/// The unchanged files of a parent, each with its members if it is a tar shard: the parent of `index`.
pub struct IndexParent {
    rows: ParentRows,
    local: bool,
}

impl IndexParent {
    /// Begins at the first entry of `version`, which is in an index layout: only that has pins.
    #[must_use]
    pub fn new(rt: &Handle, version: Version, local: bool) -> Self {
        IndexParent { rows: ParentRows::new(rt, version, None), local }
    }

    /// The members that follow the row of their shard.
    fn members(&mut self, shard: &str) -> Result<Vec<ShardMember>, Failure> {
        let mut members = Vec::new();
        while let Some(part) = self.rows.part()? {
            let entry = part.entry();
            let name = entry.path.strip_prefix(shard).and_then(|rest| rest.strip_prefix('\0'));
            let (Some(name), Some(hash)) = (name, entry.hash) else { break };
            let slices = part.index.slices(part.row).to_vec();
            members.push(ShardMember { name: name.to_owned(), size: entry.size, hash, slices });
            part.row += 1;
        }
        Ok(members)
    }
}

impl Earlier for IndexParent {
    type Record = FileRecord;

    fn next(&mut self) -> Result<Option<(String, FileRecord)>, Failure> {
        let (at_ns, local) = (self.rows.indexed_at_ns(), self.local);
        while let Some(part) = self.rows.part()? {
            let found = part.file(at_ns, local).map(|record| (part.entry().path.to_owned(), record));
            part.row += 1;
            if let Some((path, mut record)) = found {
                if is_shard(&path) {
                    record.content.members = self.members(&path)?;
                }
                return Ok(Some((path, record)));
            }
        }
        Ok(None)
    }
}

/// The chunks of a parent's pack. Their number is their position in the order of their hashes.
#[derive(Debug, Default)]
pub struct ParentChunks {
    /// Hash and length of each chunk.
    pub all: Vec<(Hash, u32)>,
    /// Whether the object of each chunk still exists, with the right length.
    exists: Vec<bool>,
    /// The index layout of the parent.
    pub index: Option<Version>,
}

impl ParentChunks {
    fn place(&self, chunk: Hash, offset: u32) -> Option<ParentLocation> {
        let at = self.all.binary_search_by_key(&chunk, |c| c.0).ok()?;
        self.exists[at].then_some(ParentLocation { chunk: u32::try_from(at).ok()?, offset })
    }

    /// Reads the chunks of a pack from its tables, and lists which of their objects exist.
    async fn read(version: &Version, tables: &TablesLocation) -> Result<Self, Failure> {
        let mut all = Vec::new();
        for part in 0..version.index().parts().len() {
            let rows = version.chunk_rows(part).await?;
            let own = |r: &ChunkRow| matches!(r.object, ObjectRef::Key(_)).then_some((r.chunk, r.len));
            all.extend(rows.iter().filter_map(own));
        }
        all.sort_unstable();
        all.dedup_by_key(|c| c.0);
        let mut exists = vec![false; all.len()];
        let mut list = tables.origin().list(paths::CHUNKS);
        while let Some(object) = list.next().await {
            let object = match object {
                Ok(object) => object,
                Err(OriginError::NotFound { .. }) => break,
                Err(e) => return Err(e.into()),
            };
            let name = object.path.rsplit('/').next().unwrap_or_default();
            let Ok(hash) = name.parse::<Hash>() else { continue };
            if let Ok(at) = all.binary_search_by_key(&hash, |chunk| chunk.0)
                && u64::from(all[at].1) == object.size
            {
                exists[at] = true;
            }
        }
        Ok(ParentChunks { all, exists, index: None })
    }
}

/// An entry of the parent, as `pack` needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackRecord {
    /// The entry's pin and hashes. A member has no times and no slices: its shard is read in any case.
    pub file: FileRecord,
    /// Where the parent's pack has its bytes, if in a chunk that still exists.
    pub place: Option<ParentLocation>,
}

/// The unchanged files and all members of a parent, each with its place in the pack: the parent of `pack`.
pub struct PackParent {
    rows: ParentRows,
    chunks: Arc<ParentChunks>,
    local: bool,
    renewed: RenewedPins,
}

impl PackParent {
    /// Opens a version for a pack with `params`. Returns `None` when the version has no index layout: then
    /// nothing proves which files are unchanged.
    ///
    /// # Errors
    /// [`Failure`] when its tables cannot be read.
    pub fn open(
        run: &Run<'_>,
        (root, layout): (Root, LayoutId),
        params: &LayoutParams,
    ) -> Result<Option<Self>, Failure> {
        let tables = &run.tables;
        run.ctx.rt.block_on(async {
            let layouts = tables.layouts(root).await?;
            let Some(index) = layout_of(&layouts, &LayoutParams::INDEX, layout) else { return Ok(None) };
            // The cursor reads each part once, so a cache of parts would not help.
            let index = tables.version_keeping(root, index, 1).await?;
            let (packed, chunks) = match layout_of(&layouts, params, layout) {
                Some(layout) => {
                    let packed = tables.version_keeping(root, layout, 1).await?;
                    let chunks = ParentChunks::read(&packed, tables).await?;
                    (Some(packed), chunks)
                }
                None => (None, ParentChunks::default()),
            };
            let chunks = ParentChunks { index: Some(index.clone()), ..chunks };
            let rows = ParentRows::new(run.ctx.rt, index, packed);
            let (local, renewed) = (run.is_local(), run.options.renewed.clone());
            Ok(Some(PackParent { rows, chunks: Arc::new(chunks), local, renewed }))
        })
    }

    /// The chunks that the new pack may keep.
    #[must_use]
    pub fn chunks(&self) -> Arc<ParentChunks> {
        Arc::clone(&self.chunks)
    }
}

impl Earlier for PackParent {
    type Record = PackRecord;

    fn next(&mut self) -> Result<Option<(String, PackRecord)>, Failure> {
        let (at_ns, local) = (self.rows.indexed_at_ns(), self.local);
        while let Some(part) = self.rows.part()? {
            let entry = part.entry();
            let file = match (entry.kind, entry.hash) {
                (EntryKind::Member, Some(hash)) => {
                    let pin = PinRow { size: entry.size, mtime_ns: None, etag: None };
                    Some(FileRecord::new(pin, Content::whole(hash, 0)))
                }
                _ => part.file(at_ns, local).map(|mut file| {
                    self.renewed.renew(entry.path, &mut file);
                    file
                }),
            };
            let found = file.map(|file| {
                let place = match part.packed.as_ref().map_or(&[][..], |p| p.slices(part.row)) {
                    [one] => self.chunks.place(one.chunk, one.chunk_offset),
                    _ => None,
                };
                (entry.path.to_owned(), PackRecord { file, place })
            });
            part.row += 1;
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }
}
