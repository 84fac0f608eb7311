//! Decodes one column of a row group, and checks every length before it takes memory for it.
//!
//! The parquet crate finds the pages and decodes plain values. This module tells it that nothing is
//! compressed and gives it only pages that [`PageGuard`] has checked. So a crafted file cannot make the crate
//! take more memory than the bytes at hand account for.

use crate::footer::Span;
use crate::parquet_bytes::{check_pages, unpacked_max};
use crate::schema::{COLUMN_BYTES_MAX, Schema};
use crate::untrusted::bad;
use bytes::Bytes;
use parquet::basic::{Compression, Encoding};
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::column::reader::ColumnReaderImpl;
use parquet::data_type::DataType;
use parquet::errors::Result as ParquetResult;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::serialized_reader::SerializedPageReader;
use std::sync::Arc;

/// The number of rows decoded at a time.
pub(crate) const BATCH: usize = 1024;

/// Checks pages, and decompresses them.
struct PageGuard {
    pages: SerializedPageReader<Bytes>,
    snappy: bool,
    rows_left: usize,
    bytes_left: usize,
}

impl PageGuard {
    fn unpack(&mut self, buf: Bytes) -> ParquetResult<Bytes> {
        let len = if self.snappy {
            snap::raw::decompress_len(&buf).map_err(|e| bad(e.to_string()))?
        } else {
            buf.len()
        };
        if len > self.bytes_left || len > unpacked_max(buf.len()) {
            return Err(bad(format!("a page claims {len} bytes, more than its column can have")));
        }
        self.bytes_left -= len;
        if !self.snappy {
            return Ok(buf);
        }
        snap::raw::Decoder::new().decompress_vec(&buf).map(Bytes::from).map_err(|e| bad(e.to_string()))
    }
}

impl Iterator for PageGuard {
    type Item = ParquetResult<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for PageGuard {
    fn get_next_page(&mut self) -> ParquetResult<Option<Page>> {
        match self.pages.get_next_page()? {
            None => Ok(None),
            Some(Page::DataPage {
                buf,
                num_values,
                encoding: Encoding::PLAIN,
                def_level_encoding: def_level_encoding @ Encoding::RLE,
                rep_level_encoding,
                ..
            }) => {
                let n = num_values as usize;
                if n == 0 || n > self.rows_left {
                    return Err(bad(format!(
                        "a page claims {n} values, its row group has {} left",
                        self.rows_left
                    )));
                }
                self.rows_left -= n;
                Ok(Some(Page::DataPage {
                    buf: self.unpack(buf)?,
                    num_values,
                    encoding: Encoding::PLAIN,
                    def_level_encoding,
                    rep_level_encoding,
                    statistics: None,
                }))
            }
            Some(other) => Err(bad(format!("a page is not plain ({:?})", other.encoding()))),
        }
    }

    fn peek_next_page(&mut self) -> ParquetResult<Option<PageMetadata>> {
        Err(bad("pages are not skipped"))
    }

    fn skip_next_page(&mut self) -> ParquetResult<()> {
        Err(bad("pages are not skipped"))
    }
}

/// One column of a row group, read in batches.
pub(crate) struct Column<T: DataType> {
    reader: ColumnReaderImpl<T>,
    optional: bool,
    levels: Vec<i16>,
    values: Vec<T::T>,
}

impl<T: DataType> Column<T> {
    /// Opens the column at `index` of the schema. It has `rows` rows and these bytes.
    pub fn new(
        schema: &Schema,
        index: usize,
        (span, bytes): &(Span, Bytes),
        rows: u32,
    ) -> ParquetResult<Self> {
        check_pages(bytes)?;
        let descr = schema.columns.column(index);
        let meta = ColumnChunkMetaData::builder(Arc::clone(&descr))
            .set_compression(Compression::UNCOMPRESSED)
            .set_num_values(i64::from(rows))
            .set_data_page_offset(0)
            .set_total_compressed_size(bytes.len() as i64)
            .build()?;
        let pages = SerializedPageReader::new(Arc::new(bytes.clone()), &meta, rows as usize, None)?;
        let guard = PageGuard {
            pages,
            snappy: span.snappy,
            rows_left: rows as usize,
            bytes_left: usize::try_from(COLUMN_BYTES_MAX).unwrap_or(usize::MAX),
        };
        let optional = descr.max_def_level() == 1;
        let reader = ColumnReaderImpl::new(descr, Box::new(guard));
        Ok(Column { reader, optional, levels: Vec::new(), values: Vec::new() })
    }

    /// Returns the next `n` rows; fewer are an error.
    pub fn batch(&mut self, n: usize) -> ParquetResult<impl Iterator<Item = Option<T::T>> + '_> {
        self.levels.clear();
        self.values.clear();
        let levels = self.optional.then_some(&mut self.levels);
        let (rows, values, _) = self.reader.read_records(n, levels, None, &mut self.values)?;
        let present = if self.optional { self.levels.iter().filter(|&&l| l == 1).count() } else { rows };
        if rows != n || values != present || self.values.len() != values {
            return Err(bad(format!("a column gave {rows} rows, expected {n}")));
        }
        let mut values = self.values.drain(..);
        let (optional, levels) = (self.optional, &self.levels);
        Ok((0..n).map(move |i| if optional && levels[i] == 0 { None } else { values.next() }))
    }

    /// Returns the next `n` rows of a column without nulls.
    pub fn required(&mut self, n: usize) -> ParquetResult<Vec<T::T>> {
        let out: Vec<T::T> = self.batch(n)?.flatten().collect();
        if out.len() == n { Ok(out) } else { Err(bad("a value is missing")) }
    }
}

#[cfg(test)]
mod tests;
