//! The three parquet files that a writer fills, and the rows of the part that it collects.
//!
//! A file has one row group for each part.
//!
//! Columns are written plain, without dictionaries, in data pages of version 1, compressed by Snappy. Every
//! parquet reader knows this subset, and the reader of this crate can check it without trusting it. Only
//! `path` and `ordinal` have statistics, with which query engines skip row groups.

use crate::schema::{
    self, CHUNKS_SCHEMA, COLUMN_BYTES_MAX, ENTRIES_SCHEMA, META_MAJOR, META_MINOR, META_TABLE,
    PLACEMENT_SCHEMA, ROWS_PER_PART_MAX, Schema,
};
use crate::untrusted::bad;
use crate::{NewChunk, NewRow, Table, TableError};
use fletch_core::Hash;
use fletch_core::manifest::{Entry, FORMAT_MAJOR, FORMAT_MINOR, Placed, Sample};
use parquet::basic::Compression;
use parquet::data_type::{
    ByteArray, ByteArrayType, DataType, FixedLenByteArray, FixedLenByteArrayType, Int32Type, Int64Type,
};
use parquet::errors::Result as ParquetResult;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::types::ColumnPath;
use std::collections::HashSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The rows of the part that the writer collects.
pub(crate) struct PartRows {
    first_ordinal: u64,
    entries: Vec<Entry>,
    pub placed: Placed,
    slices: u64,
    /// Each chunk with the row that added it.
    pub chunks: Vec<(u32, NewChunk)>,
    /// The chunks with an object of their own that this part has: many entries share one.
    seen: HashSet<(Hash, String, u64)>,
    /// The approximate bytes of the longest column of `entries.parquet`; `object_bytes`: of `chunks.parquet`.
    path_bytes: u64,
    object_bytes: u64,
}

impl PartRows {
    pub fn new(first_ordinal: u64) -> Self {
        PartRows {
            first_ordinal,
            entries: Vec::new(),
            placed: Placed::default(),
            slices: 0,
            chunks: Vec::new(),
            seen: HashSet::new(),
            path_bytes: 0,
            object_bytes: 0,
        }
    }

    /// Refuses a row that would make the part larger than a reader accepts.
    pub fn check_room(&self, row: &NewRow) -> Result<(), TableError> {
        let limit = |table: Table, what, got, limit| {
            if got > limit {
                Err(TableError::Limit { table: table.file_name(), what, got, limit })
            } else {
                Ok(())
            }
        };
        let rows = u64::from(ROWS_PER_PART_MAX);
        // Half of what a reader accepts leaves room for the bytes that compression can add.
        let bytes = COLUMN_BYTES_MAX / 2;
        limit(Table::Entries, "bytes of paths in a part", self.path_bytes + text_bytes(&row.entry), bytes)?;
        limit(Table::Placement, "slices of a part", self.slices + row.slices.len() as u64, rows)?;
        limit(Table::Chunks, "chunks of a part", (self.chunks.len() + row.chunks.len()) as u64, rows)?;
        let objects = self.object_bytes + row.chunks.iter().map(object_bytes).sum::<u64>();
        limit(Table::Chunks, "bytes of keys and tags in a part", objects, bytes)
    }

    pub fn push(&mut self, row: NewRow) {
        let number = u32::try_from(self.entries.len()).unwrap_or(u32::MAX);
        self.path_bytes += text_bytes(&row.entry);
        self.slices += row.slices.len() as u64;
        self.placed.push(row.slices);
        for chunk in row.chunks {
            let new = match &chunk.object {
                Some(key) => self.seen.insert((chunk.chunk, key.clone(), chunk.offset)),
                None => true,
            };
            if new {
                self.object_bytes += object_bytes(&chunk);
                self.chunks.push((number, chunk));
            }
        }
        self.entries.push(row.entry);
    }
}

fn text_bytes(e: &Entry) -> u64 {
    let key = if let Sample::Keyed(k) = &e.sample { k.len() } else { 0 };
    (e.path.len().max(e.target.len()).max(key) + 4) as u64
}

fn object_bytes(c: &NewChunk) -> u64 {
    (c.object.as_ref().map_or(0, String::len).max(c.pin.etag.as_ref().map_or(0, String::len)) + 4) as u64
}

/// The three open files.
pub(crate) struct TableFiles {
    entries: TableFile,
    placement: TableFile,
    chunks: TableFile,
}

struct TableFile {
    path: PathBuf,
    writer: SerializedFileWriter<File>,
}

impl TableFile {
    fn create(scratch: &Path, schema: &Schema) -> Result<Self, TableError> {
        let path = scratch.join(schema.table.file_name());
        let io = |message: String| TableError::Io { path: path.display().to_string(), message };
        let file = File::create(&path).map_err(|e| io(e.to_string()))?;
        let meta = [
            (META_TABLE, schema.message.name().to_owned()),
            (META_MAJOR, FORMAT_MAJOR.to_string()),
            (META_MINOR, FORMAT_MINOR.to_string()),
        ];
        let properties = WriterProperties::builder()
            .set_created_by("fletch".to_owned())
            .set_compression(Compression::SNAPPY)
            .set_dictionary_enabled(false)
            .set_statistics_enabled(EnabledStatistics::None)
            .set_column_statistics_enabled(ColumnPath::from("path"), EnabledStatistics::Chunk)
            .set_column_statistics_enabled(ColumnPath::from("ordinal"), EnabledStatistics::Chunk)
            .set_offset_index_disabled(true)
            .set_key_value_metadata(Some(meta.map(|(k, v)| KeyValue::new(k.to_owned(), v)).to_vec()))
            .build();
        let writer = SerializedFileWriter::new(file, Arc::clone(&schema.message), Arc::new(properties))
            .map_err(|e| io(e.to_string()))?;
        Ok(TableFile { path, writer })
    }

    fn io(&self, e: &dyn std::fmt::Display) -> TableError {
        TableError::Io { path: self.path.display().to_string(), message: e.to_string() }
    }

    fn group(&mut self, f: impl FnOnce(&mut Group<'_>) -> ParquetResult<()>) -> Result<(), TableError> {
        let write = |writer: &mut SerializedFileWriter<File>| {
            let mut group = writer.next_row_group()?;
            f(&mut group)?;
            group.close().map(|_| ())
        };
        write(&mut self.writer).map_err(|e| self.io(&e))
    }

    fn close(mut self) -> Result<(), TableError> {
        self.writer.finish().map(|_| ()).map_err(|e| self.io(&e))
    }
}

type Group<'a> = SerializedRowGroupWriter<'a, File>;

/// Writes the next column. `levels` has 1 for a value and 0 for a null; it is `None` for a required column.
fn column<T: DataType>(group: &mut Group<'_>, values: &[T::T], levels: Option<&[i16]>) -> ParquetResult<()> {
    let mut column = group.next_column()?.ok_or_else(|| bad("the schema has no more columns"))?;
    column.typed::<T>().write_batch(values, levels, None)?;
    column.close()
}

/// Writes the next column, whose rows may be null.
fn optional<T: DataType>(
    group: &mut Group<'_>,
    rows: impl Iterator<Item = Option<T::T>>,
) -> ParquetResult<()> {
    let (mut values, mut levels) = (Vec::new(), Vec::new());
    for row in rows {
        levels.push(i16::from(row.is_some()));
        values.extend(row);
    }
    column::<T>(group, &values, Some(&levels))
}

fn required<T: DataType>(group: &mut Group<'_>, rows: impl Iterator<Item = T::T>) -> ParquetResult<()> {
    column::<T>(group, &rows.collect::<Vec<_>>(), None)
}

fn fixed(hash: &Hash) -> FixedLenByteArray {
    ByteArray::from(hash.as_bytes().to_vec()).into()
}

/// Converts a size, offset or ordinal. `new_row::check` refuses values that do not fit.
fn int(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn int32(n: u32) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

impl TableFiles {
    pub fn create(scratch: &Path) -> Result<Self, TableError> {
        Ok(TableFiles {
            entries: TableFile::create(scratch, &ENTRIES_SCHEMA)?,
            placement: TableFile::create(scratch, &PLACEMENT_SCHEMA)?,
            chunks: TableFile::create(scratch, &CHUNKS_SCHEMA)?,
        })
    }

    pub fn write(&mut self, part: &PartRows) -> Result<(), TableError> {
        self.entries.group(|g| write_entries(g, &part.entries))?;
        self.placement.group(|g| write_placement(g, part))?;
        self.chunks.group(|g| write_chunks(g, part))
    }

    pub fn close(self) -> Result<(), TableError> {
        self.entries.close()?;
        self.placement.close()?;
        self.chunks.close()
    }
}

fn text(s: &str) -> ByteArray {
    ByteArray::from(s)
}

fn write_entries(g: &mut Group<'_>, rows: &[Entry]) -> ParquetResult<()> {
    debug_assert_eq!(schema::entries::SAMPLE + 1, ENTRIES_SCHEMA.columns.num_columns());
    required::<ByteArrayType>(g, rows.iter().map(|e| text(&e.path)))?;
    required::<ByteArrayType>(g, rows.iter().map(|e| text(e.kind.as_str())))?;
    required::<Int64Type>(g, rows.iter().map(|e| int(e.size)))?;
    optional::<FixedLenByteArrayType>(g, rows.iter().map(|e| e.hash.as_ref().map(fixed)))?;
    optional::<ByteArrayType>(g, rows.iter().map(|e| (!e.target.is_empty()).then(|| text(&e.target))))?;
    required::<ByteArrayType>(g, rows.iter().map(|e| text(sample_word(&e.sample))))?;
    let key = |e: &Entry| if let Sample::Keyed(k) = &e.sample { Some(text(k)) } else { None };
    optional::<ByteArrayType>(g, rows.iter().map(key))
}

fn sample_word(sample: &Sample) -> &'static str {
    match sample {
        Sample::None => "none",
        Sample::Single => "alone",
        Sample::Keyed(_) => "keyed",
    }
}

fn write_placement(g: &mut Group<'_>, part: &PartRows) -> ParquetResult<()> {
    let rows =
        || (0..part.placed.len()).flat_map(|row| part.placed.slices(row).iter().map(move |s| (row, s)));
    required::<Int64Type>(g, rows().map(|(row, _)| int(part.first_ordinal + row as u64)))?;
    required::<FixedLenByteArrayType>(g, rows().map(|(_, s)| fixed(&s.chunk)))?;
    required::<Int32Type>(g, rows().map(|(_, s)| int32(s.chunk_offset)))?;
    required::<Int32Type>(g, rows().map(|(_, s)| int32(s.len)))
}

fn write_chunks(g: &mut Group<'_>, part: &PartRows) -> ParquetResult<()> {
    let rows = || part.chunks.iter();
    let ordinal = |row: &u32| int(part.first_ordinal + u64::from(*row));
    required::<FixedLenByteArrayType>(g, rows().map(|(_, c)| fixed(&c.chunk)))?;
    required::<Int32Type>(g, rows().map(|(_, c)| int32(c.len)))?;
    optional::<Int64Type>(g, rows().map(|(row, c)| c.object.is_none().then(|| ordinal(row))))?;
    optional::<ByteArrayType>(g, rows().map(|(_, c)| c.object.as_deref().map(text)))?;
    required::<Int64Type>(g, rows().map(|(_, c)| int(c.offset)))?;
    required::<Int64Type>(g, rows().map(|(_, c)| int(c.pin.size)))?;
    optional::<Int64Type>(g, rows().map(|(_, c)| c.pin.mtime_ns))?;
    optional::<ByteArrayType>(g, rows().map(|(_, c)| c.pin.etag.as_deref().map(text)))
}
