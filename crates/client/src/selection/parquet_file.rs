//! A Parquet file that nobody has checked, as the parquet crate may read it.

use bytes::Bytes;
use fletch_tables::parquet_bytes::{clean_footer, page_header};
use parquet::{
    errors::{ParquetError, Result},
    file::{
        metadata::ParquetMetaData,
        reader::{ChunkReader, FileReader as _, Length, SerializedFileReader},
    },
};
use std::{
    fs::File,
    io::{self, BufReader, Cursor, Read},
    os::unix::fs::FileExt as _,
    sync::Arc,
};

/// The mark at the end of a file, and the length of the footer before it.
const TAIL_BYTES: u64 = 8;
/// The most bytes of a footer.
const FOOTER_BYTES_MAX: u64 = 256 << 20;
/// The bytes that are read for the header of a page: with the first, and if it does not fit, with the next.
const PAGE_HEADER_BYTES: [u64; 3] = [4 << 10, 64 << 10, 1 << 20];
/// The most rows for each byte of a file. Rows of distinct samples take more room than this: consecutive
/// numbers, packed as differences, have 21 rows a byte.
const ROWS_PER_BYTE_MAX: u64 = 32;
/// The rows that a file of any length may have.
const ROWS_ALWAYS: u64 = 4096;

/// A file of which the parquet crate sees another footer.
pub(super) struct ParquetFile {
    file: Arc<File>,
    /// The bytes before the footer.
    body: u64,
    /// The clean footer, its length and the mark.
    footer: Bytes,
}

fn damaged(why: impl Into<String>) -> ParquetError {
    ParquetError::General(why.into())
}

fn failed(e: io::Error) -> ParquetError {
    ParquetError::External(Box::new(e))
}

fn read_at(file: &File, at: u64, len: u64) -> Result<Vec<u8>> {
    let mut out = vec![0; usize::try_from(len).map_err(|_| damaged("it is too long"))?];
    file.read_exact_at(&mut out, at).map_err(failed)?;
    Ok(out)
}

impl ParquetFile {
    /// Opens a file. The columns that `wanted` chooses by their names are checked from page to page.
    pub fn open(file: File, wanted: impl Fn(&str) -> bool) -> Result<SerializedFileReader<Self>> {
        let len = file.metadata().map_err(failed)?.len();
        let end = len.checked_sub(TAIL_BYTES).ok_or_else(|| damaged("it is too short"))?;
        let tail = read_at(&file, end, TAIL_BYTES)?;
        let [a, b, c, d, b'P', b'A', b'R', b'1'] = tail[..] else {
            return Err(damaged("it does not end with the mark PAR1"));
        };
        let footer_len = u64::from(u32::from_le_bytes([a, b, c, d]));
        let body = end.checked_sub(footer_len).filter(|_| footer_len <= FOOTER_BYTES_MAX);
        let body = body.ok_or_else(|| damaged(format!("it claims a footer of {footer_len} bytes")))?;
        let mut footer = clean_footer(&read_at(&file, body, footer_len)?)?;
        let clean_len = u32::try_from(footer.len()).map_err(|_| damaged("its footer is too long"))?;
        footer.extend_from_slice(&clean_len.to_le_bytes());
        footer.extend_from_slice(b"PAR1");
        let file = Arc::new(file);
        let reader =
            SerializedFileReader::new(ParquetFile { file: Arc::clone(&file), body, footer: footer.into() })?;
        check_rows(reader.metadata(), len)?;
        check_pages(reader.metadata(), &file, body, wanted)?;
        Ok(reader)
    }
}

/// Refuses a file that claims more rows than distinct samples can have in its bytes.
fn check_rows(meta: &ParquetMetaData, len: u64) -> Result<()> {
    let rows = meta.row_groups().iter().map(|group| u64::try_from(group.num_rows()).unwrap_or(u64::MAX));
    let rows = rows.fold(0, u64::saturating_add);
    if rows > ROWS_ALWAYS.max(len.saturating_mul(ROWS_PER_BYTE_MAX)) {
        return Err(damaged(format!("it claims {rows} rows in {len} bytes")));
    }
    Ok(())
}

/// Checks the headers of the pages of some columns.
fn check_pages(meta: &ParquetMetaData, file: &File, body: u64, wanted: impl Fn(&str) -> bool) -> Result<()> {
    for column in meta.row_groups().iter().flat_map(|group| group.columns()) {
        if !column.column_path().parts().first().is_some_and(|name| wanted(name)) {
            continue;
        }
        let offset = column.dictionary_page_offset().unwrap_or_else(|| column.data_page_offset());
        let begin = u64::try_from(offset).ok();
        let len = u64::try_from(column.compressed_size()).ok();
        let end = begin.zip(len).and_then(|(begin, len)| begin.checked_add(len)).filter(|&end| end <= body);
        let (mut at, end) = begin.zip(end).ok_or_else(|| damaged("a column lies outside of the file"))?;
        while at < end {
            let mut page = Err(damaged("a page has no header"));
            for most in PAGE_HEADER_BYTES {
                page = page_header(&read_at(file, at, most.min(end - at))?);
                if page.is_ok() || most >= end - at {
                    break;
                }
            }
            let page = page?;
            at = at.saturating_add(page.header as u64).saturating_add(page.body as u64);
        }
        if at > end {
            return Err(damaged("a page is longer than its column"));
        }
    }
    Ok(())
}

/// Reads a range of a file, whose own position stays where it is.
struct FileRange {
    file: Arc<File>,
    at: u64,
    end: u64,
}

impl Read for FileRange {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let most = buf.len().min(usize::try_from(self.end - self.at).unwrap_or(usize::MAX));
        let n = self.file.read_at(&mut buf[..most], self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}

impl Length for ParquetFile {
    fn len(&self) -> u64 {
        self.body + self.footer.len() as u64
    }
}

impl ChunkReader for ParquetFile {
    type T = Box<dyn Read>;

    fn get_read(&self, start: u64) -> Result<Self::T> {
        if let Some(at) = start.checked_sub(self.body) {
            let at = usize::try_from(at).unwrap_or(usize::MAX).min(self.footer.len());
            return Ok(Box::new(Cursor::new(self.footer.slice(at..))));
        }
        let body = FileRange { file: Arc::clone(&self.file), at: start, end: self.body };
        Ok(Box::new(BufReader::new(body).chain(Cursor::new(self.footer.clone()))))
    }

    fn get_bytes(&self, start: u64, len: usize) -> Result<Bytes> {
        if start >= self.body {
            let at = usize::try_from(start - self.body).unwrap_or(usize::MAX);
            let end = at.checked_add(len).filter(|&end| end <= self.footer.len());
            return end
                .map(|end| self.footer.slice(at..end))
                .ok_or_else(|| damaged("a range beyond its end"));
        }
        let inside = start.checked_add(len as u64).is_some_and(|end| end <= self.body);
        if !inside {
            return Err(damaged("a range beyond its columns"));
        }
        read_at(&self.file, start, len as u64).map(Bytes::from)
    }
}
