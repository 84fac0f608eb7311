//! Pages with false lengths.

use super::*;
use crate::Table;
use crate::untrusted::contained;

fn guard(snappy: bool, bytes_left: usize) -> PageGuard {
    let descr = crate::schema::PLACEMENT_SCHEMA.columns.column(0);
    let meta = ColumnChunkMetaData::builder(descr)
        .set_data_page_offset(0)
        .set_total_compressed_size(4)
        .build()
        .expect("metadata");
    let pages =
        SerializedPageReader::new(Arc::new(Bytes::from_static(b"none")), &meta, 1, None).expect("pages");
    PageGuard { pages, snappy, rows_left: 1, bytes_left }
}

#[test]
fn a_page_cannot_claim_more_than_its_bytes_can_hold() {
    let zeros = snap::raw::Encoder::new().compress_vec(&[0; 1 << 20]).expect("snappy");
    assert_eq!(guard(true, 1 << 20).unpack(zeros.clone().into()).expect("true").len(), 1 << 20);
    assert!(guard(true, (1 << 20) - 1).unpack(zeros.into()).is_err(), "over the column's limit");
    // A length of 2^32 - 1 in front of four bytes.
    let lie = Bytes::from_static(&[0xff, 0xff, 0xff, 0xff, 0x0f, 1, 2, 3, 4]);
    assert!(guard(true, usize::MAX).unpack(lie).is_err());
    assert!(guard(true, 1 << 20).unpack(Bytes::new()).is_err());
    assert!(guard(false, 3).unpack(Bytes::from_static(b"1234")).is_err());
}

#[test]
fn a_panic_of_the_decoder_is_an_error() {
    let e = contained::<()>(Table::Entries, || panic!("garbage")).expect_err("contained");
    assert_eq!(e.kind(), fletch_core::Kind::Corrupt);
}
