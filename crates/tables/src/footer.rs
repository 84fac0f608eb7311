//! Parquet footers, reduced to the position of each column of each row group.

use crate::parquet_bytes::clean_footer;
use crate::schema::{COLUMN_BYTES_MAX, GROUP_BYTES_MAX, META_MAJOR, META_TABLE, Schema};
use crate::untrusted::{blocking, contained};
use crate::{SourceError, Table, TableError, TableRange, TableSource};
use bytes::Bytes;
use fletch_core::manifest::FORMAT_MAJOR;
use parquet::basic::Compression;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData, ParquetMetaDataReader};
use std::ops::Range;

/// The position in the file of one column of one row group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub offset: u64,
    /// At most [`COLUMN_BYTES_MAX`].
    pub len: u32,
    pub snappy: bool,
}

/// The row groups of a file: 16 bytes for each column of a group.
#[derive(Debug)]
pub(crate) struct Footer {
    table: Table,
    columns: usize,
    rows: Vec<u32>,
    spans: Vec<Span>,
}

impl Footer {
    /// Reads the footer of a table, which must have `groups` row groups of at most `rows_max` rows.
    pub async fn read(
        source: &dyn TableSource,
        schema: &'static Schema,
        groups: usize,
        rows_max: u32,
    ) -> Result<Self, TableError> {
        let table = schema.table;
        let columns = schema.columns.num_columns();
        // The footer that our writer makes fits into `usual`, so one read is enough. A footer above `most` is
        // refused.
        let usual = 4096 + (groups * columns * 128) as u64;
        let most = 65_536 + (groups * columns * 1024) as u64;
        let mut tail = read_tail(source, table, usual).await?;
        let len = footer_len(table, &tail)?;
        if len > most {
            return Err(TableError::Limit {
                table: table.file_name(),
                what: "footer bytes",
                got: len,
                limit: most,
            });
        }
        if len + 8 > tail.len() as u64 {
            tail = read_tail(source, table, len + 8).await?;
            if footer_len(table, &tail)? != len || len + 8 > tail.len() as u64 {
                return Err(TableError::damaged(table, "its footer is cut off"));
            }
        }
        let end = tail.len() - 8;
        let begin = end - usize::try_from(len).unwrap_or(end).min(end);
        let thrift = tail.slice(begin..end);
        blocking(move || {
            contained(table, || {
                let meta = ParquetMetaDataReader::decode_metadata(&clean_footer(&thrift)?)?;
                Ok(from_metadata(schema, &meta, groups, rows_max))
            })?
        })
        .await
    }

    /// The number of row groups.
    pub fn groups(&self) -> usize {
        self.rows.len()
    }

    /// The number of rows of a group.
    pub fn rows(&self, group: usize) -> u32 {
        self.rows[group]
    }

    /// The columns of a group, in the order of the schema.
    pub fn spans(&self, group: usize) -> &[Span] {
        &self.spans[group * self.columns..(group + 1) * self.columns]
    }

    /// Reads some columns of a group in one request. Returns each column with its bytes.
    pub async fn fetch(
        &self,
        source: &dyn TableSource,
        group: usize,
        columns: Range<usize>,
    ) -> Result<Vec<(Span, Bytes)>, TableError> {
        let spans = &self.spans(group)[columns];
        let begin = spans.iter().map(|s| s.offset).min().unwrap_or(0);
        let end = spans.iter().map(|s| s.offset + u64::from(s.len)).max().unwrap_or(0);
        if begin == end {
            return Ok(spans.iter().map(|s| (*s, Bytes::new())).collect());
        }
        let bytes = source.read(self.table, TableRange::Range(begin..end)).await?;
        if bytes.len() as u64 != end - begin {
            return Err(short(self.table, bytes.len() as u64, end - begin));
        }
        let at = |x: u64| usize::try_from(x - begin).unwrap_or(usize::MAX);
        Ok(spans.iter().map(|s| (*s, bytes.slice(at(s.offset)..at(s.offset + u64::from(s.len))))).collect())
    }
}

fn short(table: Table, got: u64, want: u64) -> TableError {
    TableError::Source(SourceError {
        kind: fletch_core::Kind::Corrupt,
        message: format!("{table}: the source returned {got} bytes, the reader asked for {want}"),
    })
}

async fn read_tail(source: &dyn TableSource, table: Table, len: u64) -> Result<Bytes, TableError> {
    let tail = source.read(table, TableRange::Suffix(len)).await?;
    if tail.len() as u64 > len {
        return Err(short(table, tail.len() as u64, len));
    }
    Ok(tail)
}

/// Returns the footer's length, from the last 8 bytes of the file.
fn footer_len(table: Table, tail: &[u8]) -> Result<u64, TableError> {
    match tail.last_chunk::<8>() {
        Some([a, b, c, d, b'P', b'A', b'R', b'1']) => Ok(u64::from(u32::from_le_bytes([*a, *b, *c, *d]))),
        _ => Err(TableError::damaged(table, "it does not end with the mark of a parquet file, PAR1")),
    }
}

fn from_metadata(
    schema: &Schema,
    meta: &ParquetMetaData,
    groups: usize,
    rows_max: u32,
) -> Result<Footer, TableError> {
    let table = schema.table;
    let damaged = |why: String| TableError::damaged(table, why);
    check_version(table, meta)?;
    if meta.num_row_groups() != groups {
        return Err(damaged(format!("it has {} row groups, expected {groups}", meta.num_row_groups())));
    }
    let file = meta.file_metadata().schema_descr();
    let mut at = Vec::with_capacity(schema.columns.num_columns());
    for want in schema.columns.columns() {
        // By name, so that columns of a later minor version are skipped.
        let i = file.columns().iter().position(|c| c.path() == want.path());
        let i = i.ok_or_else(|| damaged(format!("it has no column {:?}", want.name())))?;
        let got = file.column(i);
        let same = got.physical_type() == want.physical_type()
            && got.max_def_level() == want.max_def_level()
            && got.max_rep_level() == 0
            && got.type_length() == want.type_length();
        if !same {
            return Err(damaged(format!(
                "its column {:?} does not have the type of the format",
                want.name()
            )));
        }
        at.push(i);
    }
    let mut out = Footer { table, columns: at.len(), rows: Vec::new(), spans: Vec::new() };
    out.rows.reserve_exact(groups);
    out.spans.reserve_exact(groups * at.len());
    for group in meta.row_groups() {
        let rows = u32::try_from(group.num_rows()).ok().filter(|&n| n <= rows_max);
        let rows = rows.ok_or_else(|| damaged(format!("a part has {} rows", group.num_rows())))?;
        let first = out.spans.len();
        for &i in &at {
            let column = group.columns().get(i).ok_or_else(|| damaged("a part lacks a column".into()))?;
            out.spans.push(span(column, rows).map_err(damaged)?);
        }
        let spans = &out.spans[first..];
        let begin = spans.iter().map(|s| s.offset).min().unwrap_or(0);
        let end = spans.iter().map(|s| s.offset + u64::from(s.len)).max().unwrap_or(0);
        if end - begin > GROUP_BYTES_MAX {
            return Err(damaged(format!("a part spans {} bytes", end - begin)));
        }
        out.rows.push(rows);
    }
    Ok(out)
}

fn check_version(table: Table, meta: &ParquetMetaData) -> Result<(), TableError> {
    let value = |key: &str| {
        let all = meta.file_metadata().key_value_metadata()?;
        all.iter().find(|kv| kv.key == key)?.value.as_deref()
    };
    if value(META_TABLE) != table.file_name().strip_suffix(".parquet") {
        return Err(TableError::damaged(table, "its metadata names another table"));
    }
    match value(META_MAJOR).and_then(|v| v.parse::<u32>().ok()) {
        Some(FORMAT_MAJOR) => Ok(()),
        Some(major) => Err(TableError::Newer { table: table.file_name(), major, known: FORMAT_MAJOR }),
        None => Err(TableError::damaged(table, "its metadata has no format version")),
    }
}

fn span(column: &ColumnChunkMetaData, rows: u32) -> Result<Span, String> {
    let name = column.column_descr().name();
    if column.dictionary_page_offset().is_some() {
        return Err(format!("column {name:?} has a dictionary"));
    }
    let snappy = match column.compression() {
        Compression::SNAPPY => true,
        Compression::UNCOMPRESSED => false,
        other => return Err(format!("column {name:?} is compressed by {other}")),
    };
    if column.num_values() != i64::from(rows) {
        return Err(format!("column {name:?} has {} values in {rows} rows", column.num_values()));
    }
    if rows == 0 {
        return Ok(Span { offset: 0, len: 0, snappy });
    }
    let offset = u64::try_from(column.data_page_offset()).ok().filter(|&o| o < 1 << 56);
    let len = u32::try_from(column.compressed_size()).ok().filter(|&n| u64::from(n) <= COLUMN_BYTES_MAX);
    match (offset, len) {
        (Some(offset), Some(len)) => Ok(Span { offset, len, snappy }),
        _ => Err(format!("column {name:?} has an offset or a length that no column can have")),
    }
}
