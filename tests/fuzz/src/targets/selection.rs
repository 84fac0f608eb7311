//! Selections of samples: Parquet and CSV files that a training program names.

use super::golden_bytes;
use crate::{plant, scratch};
use fletch_api::WeightOf;
use fletch_client::selection::{Columns, Selection};
use parquet::{
    basic::Compression,
    data_type::{ByteArray, ByteArrayType, DoubleType},
    file::{properties::WriterProperties, writer::SerializedFileWriter},
    schema::parser::parse_message_type,
};
use std::sync::Arc;

/// A file as other programs write it: compressed, with a dictionary.
fn with_dictionary() -> Vec<u8> {
    let schema = parse_message_type("message m { required byte_array key (utf8); optional double weight; }");
    let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
    let (schema, properties) = (Arc::new(schema.expect("a schema")), Arc::new(properties));
    let mut writer = SerializedFileWriter::new(Vec::new(), schema, properties).expect("a writer");
    let mut group = writer.next_row_group().expect("a group");
    let mut column = group.next_column().expect("a column").expect("keys");
    let keys: Vec<ByteArray> = (0..40).map(|i| format!("dir/{i:04}.jpg").as_str().into()).collect();
    column.typed::<ByteArrayType>().write_batch(&keys, None, None).expect("keys");
    column.close().expect("a column");
    let mut column = group.next_column().expect("a column").expect("weights");
    column.typed::<DoubleType>().write_batch(&[0.5; 40], Some(&[1; 40]), None).expect("weights");
    column.close().expect("a column");
    group.close().expect("a group");
    writer.into_inner().expect("a file")
}

pub fn seeds() -> Vec<Vec<u8>> {
    let csv = ["key\na/1\nb/2\n", "number,weight\n1,0.5\n7,2\n", "key,weight\n\"a,\"\"b\",1e3\nc,0\n"];
    let made = csv.into_iter().map(|t| t.as_bytes().to_vec());
    let golden = ["tables/entries.parquet", "tables/placement.parquet"].map(golden_bytes);
    made.chain(golden).chain([with_dictionary()]).collect()
}

/// A selection has a sample, and with weights as many weights as samples, each finite and not negative.
pub fn run(input: &[u8]) -> bool {
    let path = scratch::written("selection", input);
    let column = |name: &str| Some(name.to_owned());
    let columns = [
        Columns::default(),
        Columns { weights: column("weight"), ..Columns::default() },
        Columns { keys: column("path"), weights: column("size"), ..Columns::default() },
        Columns { numbers: column("ordinal"), ..Columns::default() },
    ];
    let mut accepted = false;
    for columns in &columns {
        let Ok(selection) = Selection::read(&path, columns) else { continue };
        accepted = true;
        assert!(!selection.is_empty());
        assert_eq!(selection.weights.is_some(), columns.weights.is_some());
        let weights = selection.weights.clone().unwrap_or_default();
        assert!(weights.iter().all(|w| w.is_finite() && *w >= 0.0), "{weights:?}");
        assert!(weights.is_empty() || weights.len() == selection.len());
        plant::bug(matches!(&selection.of, WeightOf::Keys(k) if k.iter().any(|k| k.len() > 40)));
        drop(selection.base(None));
    }
    accepted
}
