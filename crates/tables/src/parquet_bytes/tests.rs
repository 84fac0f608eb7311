//! Footers and pages of this writer and of others, and those that would keep the parquet crate busy.

use super::*;
use parquet::basic::{Compression, Encoding};
use parquet::column::page::{CompressedPage, Page};
use parquet::data_type::Int64Type;
use parquet::file::metadata::ParquetMetaDataReader;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::reader::FileReader as _;
use parquet::file::serialized_reader::SerializedFileReader;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::sync::Arc;

/// A file with statistics, a dictionary and several pages, and its footer.
fn foreign() -> (Vec<u8>, Vec<u8>) {
    let schema = parse_message_type("message m { required int64 number; }").expect("schema");
    let properties = WriterProperties::builder()
        .set_compression(Compression::SNAPPY)
        .set_statistics_enabled(EnabledStatistics::Page)
        .set_write_page_header_statistics(true)
        .set_data_page_row_count_limit(100)
        .set_write_batch_size(100)
        .build();
    let mut file = Vec::new();
    let mut writer =
        SerializedFileWriter::new(&mut file, Arc::new(schema), Arc::new(properties)).expect("writer");
    let mut group = writer.next_row_group().expect("group");
    let mut column = group.next_column().expect("column").expect("one");
    let values: Vec<i64> = (0..1000).map(|n| n % 7).collect();
    column.typed::<Int64Type>().write_batch(&values, None, None).expect("values");
    column.close().expect("column");
    group.close().expect("group");
    writer.close().expect("file");
    let end = file.len() - 8;
    let len = u32::from_le_bytes(file[end..end + 4].try_into().expect("four")) as usize;
    let footer = file[end - len..end].to_vec();
    (file, footer)
}

#[test]
fn a_clean_footer_says_where_the_columns_are() {
    let (_, footer) = foreign();
    let clean = clean_footer(&footer).expect("a footer");
    assert!(clean.len() < footer.len(), "statistics and indexes are dropped");
    let [before, after] =
        [&footer, &clean].map(|f| ParquetMetaDataReader::decode_metadata(f).expect("footer"));
    assert_eq!(before.file_metadata().num_rows(), after.file_metadata().num_rows());
    assert_eq!(before.file_metadata().schema_descr(), after.file_metadata().schema_descr());
    let [before, after] = [before, after].map(|m| m.row_group(0).column(0).clone());
    assert_eq!(before.byte_range(), after.byte_range());
    assert_eq!(before.compression(), after.compression());
    assert_eq!(before.dictionary_page_offset(), after.dictionary_page_offset());
    assert_eq!(clean_footer(&clean).expect("again"), clean);
}

#[test]
fn pages_with_statistics_and_dictionaries_pass() {
    let (file, _) = foreign();
    let reader = SerializedFileReader::new(bytes::Bytes::from(file.clone())).expect("file");
    let column = reader.metadata().row_group(0).column(0);
    let (begin, len) = column.byte_range();
    let chunk = &file[begin as usize..(begin + len) as usize];
    check_pages(chunk).expect("the writer's own pages");
    let mut pages = reader.get_row_group(0).expect("group").get_column_page_reader(0).expect("pages");
    let read: Vec<Page> = std::iter::from_fn(|| pages.get_next_page().expect("page")).collect();
    let (mut mine, mut rest) = (0, chunk);
    while !rest.is_empty() {
        let page = page_header(rest).expect("page");
        rest = &rest[page.header + page.body..];
        mine += 1;
    }
    assert!(mine == read.len() && mine > 5, "{mine} pages, the crate reads {}", read.len());
    assert!(check_pages(&chunk[..chunk.len() - 1]).is_err(), "the last page is cut off");
}

/// 60 lists within each other, of 2^31 - 1 booleans each.
fn endless_field() -> Vec<u8> {
    let list_of_lists = [0xf9, 0xff, 0xff, 0xff, 0xff, 0x07];
    let list_of_booleans = [0xf1, 0xff, 0xff, 0xff, 0xff, 0x07];
    [&list_of_lists.repeat(60)[..], &list_of_booleans].concat()
}

#[test]
fn an_endless_field_is_refused() {
    let (file, footer) = foreign();
    // Field 15 of the file's metadata: its last known field is 7.
    let mut endless = footer[..footer.len() - 1].to_vec();
    endless.push(0x89);
    endless.extend_from_slice(&endless_field());
    endless.push(0);
    assert!(clean_footer(&endless).is_err());
    let page = page_header(&file[4..]).expect("the first page");
    let mut endless = file[4..4 + page.header - 1].to_vec();
    endless.push(0x89);
    endless.extend_from_slice(&endless_field());
    endless.extend_from_slice(&[0; 64]);
    assert!(check_pages(&endless).is_err());
    // A field that ends is refused too: the crate skips it, and a column's bytes are passed on as they are.
    let mut more = file[4..4 + page.header - 1].to_vec();
    more.extend_from_slice(&[0x85, 0x02, 0x00]);
    more.extend_from_slice(&file[4 + page.header..4 + page.header + page.body]);
    assert!(check_pages(&more).is_err());
}

#[test]
fn a_page_with_fields_of_other_types_is_refused() {
    let page = CompressedPage::new(
        Page::DataPage {
            buf: bytes::Bytes::from_static(b"12345678"),
            num_values: 1,
            encoding: Encoding::PLAIN,
            def_level_encoding: Encoding::RLE,
            rep_level_encoding: Encoding::RLE,
            statistics: None,
        },
        8,
    );
    assert_eq!(page.compressed_size(), 8);
    // type, both lengths, and the header of a data page.
    let header = [0x15, 0x00, 0x15, 0x10, 0x15, 0x10, 0x2c, 0x15, 2, 0x15, 0, 0x15, 6, 0x15, 6, 0, 0];
    assert_eq!(page_header(&header).expect("plain"), PageLengths { header: header.len(), body: 8 });
    let mut other = header;
    other[4] = 0x16;
    assert!(page_header(&other).is_err(), "a length of 64 bits");
    let mut negative = header;
    negative[5] = 0x0f;
    assert!(page_header(&negative).is_err(), "a negative length");
}

/// A footer with a schema only. Each element is a group with so many children.
fn groups(elements: usize, children: u32) -> Vec<u8> {
    let varint = |mut n: u64| {
        let mut out = Vec::new();
        while n > 0x7f {
            out.push(n as u8 | 0x80);
            n >>= 7;
        }
        out.push(n as u8);
        out
    };
    // Its repetition, an empty name, and the number of its children.
    let group = [&[0x35, 0, 0x18, 0, 0x15][..], &varint(u64::from(children) * 2), &[0]].concat();
    [&[0x15, 2, 0x19, 0xfc][..], &varint(elements as u64), &group.repeat(elements), &[0]].concat()
}

/// The parquet crate calls itself for each level. The stack of a thread ended the process.
#[test]
fn a_deep_schema_is_refused() {
    for elements in [SCHEMA_DEPTH_MAX + 2, 10_300, 1_000_000] {
        let error = clean_footer(&groups(elements, 1)).expect_err("too deep").to_string();
        assert!(error.contains("deeper than 64 groups"), "{error}");
    }
    // The last group has no child.
    let leaf = [0x35, 0, 0x18, 0, 0];
    let mut most = groups(SCHEMA_DEPTH_MAX + 1, 1);
    let at = most.len() - 8;
    most.splice(at.., leaf.into_iter().chain([0]));
    assert!(clean_footer(&most).is_ok());
}

/// The parquet crate takes memory for as many columns as a group claims. Without it, the process ended.
#[test]
fn a_schema_that_claims_columns_is_refused() {
    for (elements, children) in [(1, 1), (1, i32::MAX as u32), (6, i32::MAX as u32), (3, 2)] {
        let error = clean_footer(&groups(elements, children)).expect_err("too many").to_string();
        assert!(error.contains("claims columns that it does not have"), "{error}");
    }
    let mut negative = groups(1, 1);
    let at = negative.len() - 3;
    negative[at] = 1;
    assert!(clean_footer(&negative).is_err());
}

/// The parquet crate takes memory for as many bytes and values as the header of a page claims.
#[test]
fn a_page_that_claims_more_than_it_can_hold_is_refused() {
    // A data page of 8 bytes; then a dictionary page of 8 bytes with 8 values.
    let data = [0x15, 0x00, 0x15, 0x10, 0x15, 0x10, 0x2c, 0x15, 2, 0x15, 0, 0x15, 6, 0x15, 6, 0, 0];
    let dictionary = [0x15, 0x04, 0x15, 0x10, 0x15, 0x10, 0x4c, 0x15, 0x10, 0x15, 0, 0, 0];
    for header in [&data[..], &dictionary] {
        assert_eq!(page_header(header).expect("sound"), PageLengths { header: header.len(), body: 8 });
        let most = [0xfe, 0xff, 0xff, 0xff, 0x0f];
        let bomb = [&header[..3], &most, &header[4..]].concat();
        assert!(page_header(&bomb).is_err(), "2^31 - 1 bytes out of 8");
    }
    let bomb = [&dictionary[..8], &[0xfe, 0xff, 0xff, 0xff, 0x0f], &dictionary[9..]].concat();
    assert!(page_header(&bomb).is_err(), "2^31 - 1 values in 8 bytes");
}
