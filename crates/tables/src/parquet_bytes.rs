//! Bytes of foreign Parquet files, cut down to what the parquet crate reads in bounded time.
//!
//! [`clean_footer`] and [`page_header`] stand before every use of the crate on bytes that nobody has checked.
//! (The crate skips a list of booleans without a byte of input.) What the footer loses, such as statistics,
//! indexes of pages and bloom filters, no reader of Fletch needs.
//!
//! The crate calls itself for each level of a schema, and takes memory for as many columns, values of a
//! dictionary and bytes of a page as a file claims. A stack or a memory that is used up ends the process,
//! which no `catch_unwind` contains. So nothing here claims more than the bytes at hand can hold.

use crate::thrift::{Fields, Kind, Reader};
use crate::untrusted::bad;
use parquet::errors::Result;

// The structs of Parquet, by the names and ids of its format:
// https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift

/// The deepest nesting of a schema.
const SCHEMA_DEPTH_MAX: usize = 64;

const FILE_META_DATA: Fields = &[
    (1, Kind::I32),
    (2, Kind::List(&Kind::Struct(SCHEMA_ELEMENT))),
    (3, Kind::I64),
    (4, Kind::List(&Kind::Struct(ROW_GROUP))),
    (5, Kind::List(&Kind::Struct(KEY_VALUE))),
    (6, Kind::Binary),
];
const SCHEMA_ELEMENT: Fields = &[
    (1, Kind::I32),
    (2, Kind::I32),
    (3, Kind::I32),
    (4, Kind::Binary),
    (5, Kind::I32),
    (6, Kind::I32),
    (7, Kind::I32),
    (8, Kind::I32),
    (9, Kind::I32),
];
const KEY_VALUE: Fields = &[(1, Kind::Binary), (2, Kind::Binary)];
const ROW_GROUP: Fields = &[
    (1, Kind::List(&Kind::Struct(COLUMN_CHUNK))),
    (2, Kind::I64),
    (3, Kind::I64),
    (5, Kind::I64),
    (6, Kind::I64),
    (7, Kind::I16),
];
const COLUMN_CHUNK: Fields = &[(1, Kind::Binary), (2, Kind::I64), (3, Kind::Struct(COLUMN_META_DATA))];
const COLUMN_META_DATA: Fields = &[
    (1, Kind::I32),
    (2, Kind::List(&Kind::I32)),
    (3, Kind::List(&Kind::Binary)),
    (4, Kind::I32),
    (5, Kind::I64),
    (6, Kind::I64),
    (7, Kind::I64),
    (9, Kind::I64),
    (11, Kind::I64),
];
const PAGE_HEADER: Fields = &[
    (1, Kind::I32),
    (2, Kind::I32),
    (3, Kind::I32),
    (4, Kind::I32),
    (5, Kind::Struct(DATA_PAGE_HEADER)),
    (6, Kind::Struct(&[])),
    (7, Kind::Struct(DICTIONARY_PAGE_HEADER)),
    (8, Kind::Struct(DATA_PAGE_HEADER_V2)),
];
const DATA_PAGE_HEADER: Fields =
    &[(1, Kind::I32), (2, Kind::I32), (3, Kind::I32), (4, Kind::I32), (5, Kind::Struct(STATISTICS))];
const DICTIONARY_PAGE_HEADER: Fields = &[(1, Kind::I32), (2, Kind::I32), (3, Kind::Bool)];
const DATA_PAGE_HEADER_V2: Fields = &[
    (1, Kind::I32),
    (2, Kind::I32),
    (3, Kind::I32),
    (4, Kind::I32),
    (5, Kind::I32),
    (6, Kind::I32),
    (7, Kind::Bool),
    (8, Kind::Struct(STATISTICS)),
];
const STATISTICS: Fields = &[
    (1, Kind::Binary),
    (2, Kind::Binary),
    (3, Kind::I64),
    (4, Kind::I64),
    (5, Kind::Binary),
    (6, Kind::Binary),
    (7, Kind::Bool),
    (8, Kind::Bool),
];

/// Returns a footer with what the parquet crate needs, from the footer of a foreign file. Neither has the
/// length and the mark at its end.
///
/// # Errors
/// When the bytes are no footer.
pub fn clean_footer(footer: &[u8]) -> Result<Vec<u8>> {
    let mut clean = Vec::with_capacity(footer.len());
    Reader::new(footer).copy(FILE_META_DATA, &mut clean)?;
    check_schema(&clean)?;
    Ok(clean)
}

/// Refuses a schema that is too deep, or that claims more columns than it has.
fn check_schema(footer: &[u8]) -> Result<()> {
    let mut reader = Reader::new(footer);
    // For each group around the next element, how many of its children are still to come.
    let mut open: Vec<u64> = Vec::new();
    for left in (0..reader.enter_list(2)?).rev() {
        let children = u64::try_from(reader.i32_field(5)?.unwrap_or(0));
        let children = children.map_err(|_| bad("its schema has a group of less than no columns"))?;
        if let Some(siblings) = open.last_mut() {
            *siblings -= 1;
        }
        if children > 0 {
            open.push(children);
        }
        if open.len() > SCHEMA_DEPTH_MAX || open.iter().sum::<u64>() > left {
            return Err(bad(format!(
                "its schema is deeper than {SCHEMA_DEPTH_MAX} groups, or claims columns that it does not have"
            )));
        }
        while children == 0 && open.last() == Some(&0) {
            open.pop();
        }
    }
    Ok(())
}

/// Returns the most bytes that a page of so many bytes can have unpacked.
pub(crate) fn unpacked_max(packed: usize) -> usize {
    // Three compressed bytes of Snappy hold at most 64 bytes.
    packed.saturating_mul(22).saturating_add(64)
}

/// The lengths of a page in a column chunk, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageLengths {
    /// The length of its header.
    pub header: usize,
    /// The length of what follows the header.
    pub body: usize,
}

/// Reads the header of the page at the front of these bytes of a column chunk.
///
/// # Errors
/// When they do not begin with a header, or when the header has fields that the parquet crate would not read
/// as this function does.
pub fn page_header(bytes: &[u8]) -> Result<PageLengths> {
    let (mut reader, mut clean) = (Reader::new(bytes), Vec::new());
    reader.copy(PAGE_HEADER, &mut clean)?;
    let header = bytes.len() - reader.rest().len();
    if clean != bytes[..header] {
        return Err(bad("the header of a page has fields that the format does not have"));
    }
    let length = |id| {
        let length = Reader::new(&clean).i32_field(id)?.and_then(|n| usize::try_from(n).ok());
        length.ok_or_else(|| bad("the header of a page has no length"))
    };
    let (unpacked, body) = (length(2)?, length(3)?);
    let mut dictionary = Reader::new(&clean);
    let values = if dictionary.enter(7)? { dictionary.i32_field(1)?.unwrap_or(0) } else { 0 };
    if unpacked > unpacked_max(body) || matches!(usize::try_from(values), Ok(n) if n > unpacked) {
        return Err(bad(format!(
            "a page of {body} bytes claims {unpacked} bytes and {values} values of a dictionary"
        )));
    }
    Ok(PageLengths { header, body })
}

/// Checks the headers of all pages of a column chunk.
///
/// # Errors
/// As [`page_header`], and when the last page is cut off.
pub fn check_pages(mut column: &[u8]) -> Result<()> {
    while !column.is_empty() {
        let page = page_header(column)?;
        let len = page.header.saturating_add(page.body);
        column = column.get(len..).ok_or_else(|| bad("a page is longer than its column"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
