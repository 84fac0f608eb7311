//! Writing the tables of a version: one pass over the entries, memory for one part.

use crate::rows::{PartRows, Tables};
use crate::source::DOCUMENT_BYTES_MAX;
use crate::{Fault, LayoutDoc, Manifest, PinRow, Table, TableError, decode, documents};
use fletch_core::manifest::layout::layout_id;
use fletch_core::manifest::{
    CHUNK_BYTES_MAX, Entry, EntryKind, FORMAT_MAJOR, FORMAT_MINOR, LayoutKind, LayoutParams, PartCutter,
    PartSummary, Sample, SampleRule, Slice, root,
};
use fletch_core::{Hash, LayoutId, Root};
use std::path::{Path, PathBuf};

/// A chunk that a row brings, and where it is at the origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewChunk {
    /// Which chunk.
    pub chunk: Hash,
    /// Its length in bytes, 1 to 16 MiB.
    pub len: u32,
    /// `None`: the object of this row's entry. Otherwise an object's own key.
    pub object: Option<String>,
    /// Where in the object it begins.
    pub offset: u64,
    /// What the object was when it was read.
    pub pin: PinRow,
}

/// One entry with everything that is written about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewRow {
    /// The entry; after the previous one in byte order of paths.
    pub entry: Entry,
    /// Its bytes, in order; empty for entries without bytes.
    pub slices: Vec<Slice>,
    /// The chunks that it brings. A member whose bytes lie in its shard's chunks brings none.
    pub chunks: Vec<NewChunk>,
}

impl NewRow {
    /// A file of an index: each slice is a chunk that lies in the file itself. For an entry
    /// without bytes `slices` is empty.
    #[must_use]
    pub fn indexed(entry: Entry, slices: Vec<Slice>, pin: &PinRow) -> Self {
        let mut offset = 0;
        let chunks = slices
            .iter()
            .map(|s| {
                let at = offset;
                offset += u64::from(s.len);
                NewChunk { chunk: s.chunk, len: s.len, object: None, offset: at, pin: pin.clone() }
            })
            .collect();
        NewRow { entry, slices, chunks }
    }

    /// A symlink or an empty directory.
    #[must_use]
    pub fn without_bytes(entry: Entry) -> Self {
        NewRow { entry, slices: Vec::new(), chunks: Vec::new() }
    }
}

/// What else the documents say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Created {
    /// When the version is made, nanoseconds since 1970 UTC.
    pub created_unix_ns: u64,
    /// When the run began that read the objects, nanoseconds since 1970 UTC.
    pub indexed_at_ns: u64,
    /// Program and version.
    pub tool: String,
    /// Where the objects are (a URI); `None` for the place the tables will be in.
    pub origin: Option<String>,
    /// What was left out.
    pub faults: Vec<Fault>,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The version's identity.
    pub root: Root,
    /// The layout's identity.
    pub layout: LayoutId,
    /// Number of entries.
    pub entries: u64,
    /// Number of samples.
    pub samples: u64,
    /// Sum of the sizes of files and members.
    pub bytes: u64,
    /// Rows of `chunks.parquet`.
    pub chunks: u64,
    /// The files, as (path at rest, scratch file), in the order in which they are to be put in
    /// place: tables first, `layout.json` last.
    pub files: Vec<(String, PathBuf)>,
}

/// Writes the tables of one version into a scratch directory.
pub struct TablesWriter {
    scratch: PathBuf,
    rule: SampleRule,
    params: LayoutParams,
    cutter: PartCutter,
    parts: Vec<PartSummary>,
    placements: Vec<Hash>,
    tables: Tables,
    rows: PartRows,
    /// Shard ("" for files) and key of the last sample that had one: the next entry with both
    /// belongs to that sample.
    open_sample: Option<(String, String)>,
    entries: u64,
    samples: u64,
    bytes: u64,
    chunks: u64,
    chunk_bytes: u64,
}

impl TablesWriter {
    /// Begins the files in `scratch`, an existing directory of the caller's, who removes it.
    ///
    /// # Errors
    /// [`TableError::Io`], or [`TableError::Params`] when no layout can have these parameters.
    pub fn create(scratch: &Path, rule: SampleRule, params: LayoutParams) -> Result<Self, TableError> {
        params.check().map_err(|why| TableError::Params(why.to_owned()))?;
        Ok(TablesWriter {
            scratch: scratch.to_owned(),
            rule,
            params,
            cutter: PartCutter::new(),
            parts: Vec::new(),
            placements: Vec::new(),
            tables: Tables::create(scratch)?,
            rows: PartRows::new(0),
            open_sample: None,
            entries: 0,
            samples: 0,
            bytes: 0,
            chunks: 0,
            chunk_bytes: 0,
        })
    }

    /// Adds the next entry. Blocking: it writes a part's rows when the part ends.
    ///
    /// # Errors
    /// [`TableError`]: the row breaks the format (nothing was added then), or a file failed
    /// (the writer is of no more use then).
    pub fn push(&mut self, row: NewRow) -> Result<(), TableError> {
        check(&row, self.params.kind)?;
        self.rows.check_room(&row)?;
        let cut = self.cutter.push(row.entry.as_ref())?;
        self.entries += 1;
        if row.entry.kind.has_bytes() {
            self.bytes += row.entry.size;
        }
        match &row.entry.sample {
            Sample::None => {}
            Sample::Single => {
                self.samples += 1;
                self.open_sample = None;
            }
            Sample::Keyed(key) => {
                let shard = row.entry.path.split_once('\0').map_or("", |(shard, _)| shard);
                if self.open_sample.as_ref().is_none_or(|(s, k)| s != shard || k != key) {
                    self.samples += 1;
                    self.open_sample = Some((shard.to_owned(), key.clone()));
                }
            }
        }
        self.rows.push(row);
        match cut {
            Some(summary) => self.end_part(summary),
            None => Ok(()),
        }
    }

    fn end_part(&mut self, summary: PartSummary) -> Result<(), TableError> {
        let rows = std::mem::replace(&mut self.rows, PartRows::new(self.entries));
        self.chunks += rows.chunks.len() as u64;
        self.chunk_bytes += rows.chunks.iter().map(|(_, c)| u64::from(c.len)).sum::<u64>();
        self.placements.push(rows.placed.hash());
        self.parts.push(summary);
        self.tables.write(&rows)
    }

    /// Ends the files and writes the documents.
    ///
    /// # Errors
    /// [`TableError::Io`] or a limit.
    pub fn finish(mut self, about: Created) -> Result<Written, TableError> {
        if let Some(summary) = std::mem::take(&mut self.cutter).finish() {
            self.end_part(summary)?;
        }
        let hashes: Vec<Hash> = self.parts.iter().map(|p| p.hash).collect();
        let root = root(&self.rule, &hashes);
        let layout = layout_id(&self.params, root, &self.placements);
        let manifest = Manifest {
            format: documents::MANIFEST.into(),
            major: FORMAT_MAJOR,
            minor: FORMAT_MINOR,
            root,
            sample_rule: self.rule,
            entries: self.entries,
            samples: self.samples,
            bytes: self.bytes,
            created: documents::rfc3339(about.created_unix_ns),
            tool: about.tool,
            skipped: about.faults,
            parts: self.parts,
        };
        let doc = LayoutDoc {
            format: documents::LAYOUT.into(),
            major: FORMAT_MAJOR,
            minor: FORMAT_MINOR,
            layout,
            root,
            params: self.params,
            origin: about.origin,
            indexed_at_ns: about.indexed_at_ns,
            chunks: self.chunks,
            bytes: self.chunk_bytes,
            parts: self.placements,
        };
        self.tables.close()?;
        write_document(&self.scratch, Table::Manifest, &manifest.to_bytes()?)?;
        write_document(&self.scratch, Table::Layout, &doc.to_bytes()?)?;
        let order = [Table::Entries, Table::Placement, Table::Chunks, Table::Manifest, Table::Layout];
        Ok(Written {
            root,
            layout,
            entries: self.entries,
            samples: self.samples,
            bytes: self.bytes,
            chunks: self.chunks,
            files: order.map(|t| (t.path(root, layout), self.scratch.join(t.file_name()))).to_vec(),
        })
    }
}

fn write_document(scratch: &Path, table: Table, bytes: &[u8]) -> Result<(), TableError> {
    if bytes.len() as u64 > DOCUMENT_BYTES_MAX {
        return Err(TableError::Limit {
            table: table.file_name(),
            what: "bytes",
            got: bytes.len() as u64,
            limit: DOCUMENT_BYTES_MAX,
        });
    }
    let path = scratch.join(table.file_name());
    std::fs::write(&path, bytes)
        .map_err(|e| TableError::Io { path: path.display().to_string(), message: e.to_string() })
}

/// The rules that [`fletch_core::manifest::Placed::check`] and the reader of chunk rows will
/// ask of a row, so that what is written can be read.
fn check(row: &NewRow, kind: LayoutKind) -> Result<(), TableError> {
    let e = &row.entry;
    let bad = |why: &str| Err(TableError::Row { path: e.path.clone(), why: why.to_owned() });
    if i64::try_from(e.size).is_err() {
        return bad("it is longer than 2^63 bytes");
    }
    let want = if e.kind.has_bytes() { e.size } else { 0 };
    if row.slices.iter().map(|s| u64::from(s.len)).sum::<u64>() != want {
        return bad("its slices do not add up to its size");
    }
    if row
        .slices
        .iter()
        .any(|s| s.len == 0 || u64::from(s.chunk_offset) + u64::from(s.len) > u64::from(CHUNK_BYTES_MAX))
    {
        return bad("a slice is empty or reaches past the largest chunk");
    }
    if let ([s], LayoutKind::Index, EntryKind::File) = (row.slices.as_slice(), kind, e.kind)
        && (Some(s.chunk) != e.hash || s.chunk_offset != 0)
    {
        return bad("its chunk is not the file");
    }
    for c in &row.chunks {
        if c.len == 0 || c.len > CHUNK_BYTES_MAX {
            return bad("a chunk is empty or too long");
        }
        if c.offset.checked_add(c.len.into()).is_none_or(|end| end > c.pin.size) {
            return bad("a chunk lies outside its object");
        }
        if i64::try_from(c.pin.size).is_err() {
            return bad("an object is longer than 2^63 bytes");
        }
        if c.object.as_ref().is_some_and(|key| decode::object_key(key).is_err()) {
            return bad("an object's key is not a clean relative path");
        }
        if c.pin.etag.as_ref().is_some_and(|tag| decode::etag(tag).is_err()) {
            return bad("an entity tag is too long or has odd characters");
        }
    }
    Ok(())
}
