//! Writes the tables of a version in one pass over its entries, with memory for one part.

use crate::new_row::{self, NewRow};
use crate::source::DOCUMENT_BYTES_MAX;
use crate::table_files::{PartRows, TableFiles};
use crate::{Fault, FileTotals, GroupLists, LayoutDoc, Manifest, Table, TableError, documents};
use fletch_core::groups::GROUPED_BYTES_MIN;
use fletch_core::manifest::layout::layout_id;
use fletch_core::manifest::{
    EntryKind, FORMAT_MAJOR, FORMAT_MINOR, LayoutParams, PartCutter, PartSummary, Sample, SampleRule, root,
};
use fletch_core::{Hash, LayoutId, Root};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// When, by which program and from where a version was made: the part of the documents that no hash covers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provenance {
    /// The time when the version is made, in nanoseconds since 1970 UTC.
    pub created_unix_ns: u64,
    /// The time when the run that read the objects began, in nanoseconds since 1970 UTC.
    pub indexed_at_ns: u64,
    /// The program that makes the version, with its version number.
    pub tool: String,
    /// The URI of the folder that holds the objects; `None` for the folder that will hold the tables.
    pub origin: Option<String>,
    /// The files that were left out.
    pub faults: Vec<Fault>,
}

/// The identity, the counts and the files of a version that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenVersion {
    /// The version's identity.
    pub root: Root,
    /// The layout's identity.
    pub layout: LayoutId,
    /// The number of entries.
    pub entries: u64,
    /// The number of samples.
    pub samples: u64,
    /// The sum of the sizes of files and members, in bytes.
    pub bytes: u64,
    /// The files that a mount shows.
    pub shown: FileTotals,
    /// The number of rows of `chunks.parquet`.
    pub chunks: u64,
    /// The files, as (path at rest, scratch file). Copy them in this order: tables first, `layout.json` last.
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
    tables: TableFiles,
    rows: PartRows,
    /// The shard ("" for files) and the key of the last keyed sample.
    ///
    /// The next entry with the same two belongs to that sample.
    open_sample: Option<(String, String)>,
    entries: u64,
    samples: u64,
    bytes: u64,
    shown: FileTotals,
    chunks: u64,
    chunk_bytes: u64,
    groups: Option<Arc<GroupLists>>,
    /// The chunks whose groups may be wanted, in the order of the tables, and their lengths.
    long_chunks: Vec<(Hash, u32)>,
}

impl TablesWriter {
    /// Creates the files in `scratch`, an existing directory that the caller removes.
    ///
    /// # Errors
    /// [`TableError::Io`], or [`TableError::Params`] if the layout parameters are not valid.
    pub fn create(scratch: &Path, rule: SampleRule, params: LayoutParams) -> Result<Self, TableError> {
        params.check().map_err(|why| TableError::Params(why.to_owned()))?;
        Ok(TablesWriter {
            scratch: scratch.to_owned(),
            rule,
            params,
            cutter: PartCutter::new(),
            parts: Vec::new(),
            placements: Vec::new(),
            tables: TableFiles::create(scratch)?,
            rows: PartRows::new(0),
            open_sample: None,
            entries: 0,
            samples: 0,
            bytes: 0,
            shown: FileTotals::default(),
            chunks: 0,
            chunk_bytes: 0,
            groups: None,
            long_chunks: Vec::new(),
        })
    }

    /// Has the hashes of the groups of long chunks written, as far as `lists` has them at the end.
    pub fn keep_groups(&mut self, lists: &Arc<GroupLists>) {
        self.groups = Some(Arc::clone(lists));
    }

    /// Returns the long chunks so far of which `lists` has no hashes.
    #[must_use]
    pub fn chunks_without(&self, lists: &GroupLists) -> HashSet<Hash> {
        self.long_chunks.iter().map(|(chunk, _)| *chunk).filter(|chunk| !lists.has(*chunk)).collect()
    }

    /// Adds the next entry. It blocks: it writes the rows of a part when the part ends.
    ///
    /// # Errors [`TableError::Io`]: a file failed, and the writer cannot be used any more. Any other error:
    /// the row breaks the format, and was not added.
    pub fn push(&mut self, row: NewRow) -> Result<(), TableError> {
        new_row::check(&row, self.params.kind)?;
        self.rows.check_room(&row)?;
        let cut = self.cutter.push(row.entry.as_ref())?;
        self.entries += 1;
        if row.entry.kind.has_bytes() {
            self.bytes += row.entry.size;
        }
        if row.entry.kind == EntryKind::File {
            self.shown.files += 1;
            self.shown.bytes += row.entry.size;
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
        if self.groups.is_some() {
            let long = row.chunks.iter().filter(|chunk| chunk.len >= GROUPED_BYTES_MIN);
            self.long_chunks.extend(long.map(|chunk| (chunk.chunk, chunk.len)));
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

    /// Closes the files and writes the documents.
    ///
    /// # Errors
    /// [`TableError::Io`], or [`TableError::Limit`] if a document is too long.
    pub fn finish(mut self, about: Provenance) -> Result<WrittenVersion, TableError> {
        if let Some(summary) = std::mem::take(&mut self.cutter).finish() {
            self.end_part(summary)?;
        }
        let groups_file = self.scratch.join(Table::Groups.file_name());
        let io = |e: std::io::Error| {
            let path = groups_file.display().to_string();
            TableError::Io { path, message: e.to_string() }
        };
        let grouped = match &self.groups {
            Some(lists) => lists.write(&self.long_chunks, &groups_file).map_err(io)?,
            None => 0,
        };
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
            files: (self.shown.files != self.entries).then_some(self.shown.files),
            file_bytes: (self.shown.bytes != self.bytes).then_some(self.shown.bytes),
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
            grouped_chunks: (grouped > 0).then_some(grouped),
            parts: self.placements,
        };
        self.tables.close()?;
        write_document(&self.scratch, Table::Manifest, &manifest.to_bytes()?)?;
        write_document(&self.scratch, Table::Layout, &doc.to_bytes()?)?;
        let groups = (grouped > 0).then_some(Table::Groups);
        let order = [Table::Entries, Table::Placement, Table::Chunks].into_iter().chain(groups);
        let order = order.chain([Table::Manifest, Table::Layout]);
        Ok(WrittenVersion {
            root,
            layout,
            entries: self.entries,
            samples: self.samples,
            bytes: self.bytes,
            shown: self.shown,
            chunks: self.chunks,
            files: order.map(|t| (t.path(root, layout), self.scratch.join(t.file_name()))).collect(),
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
