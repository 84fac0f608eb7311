//! The columns of the three parquet tables (`docs/FORMATS.md`, "Tables at rest").

use crate::Table;
use parquet::schema::parser::parse_message_type;
use parquet::schema::types::{SchemaDescPtr, SchemaDescriptor, TypePtr};
use std::sync::{Arc, LazyLock};

/// Columns of `entries.parquet`, in order.
pub(crate) mod entries {
    pub const PATH: usize = 0;
    pub const KIND: usize = 1;
    pub const SIZE: usize = 2;
    pub const BLAKE3: usize = 3;
    pub const TARGET: usize = 4;
    pub const SAMPLE_KIND: usize = 5;
    pub const SAMPLE: usize = 6;
}

/// Columns of `placement.parquet`, in order.
pub(crate) mod placement {
    pub const ORDINAL: usize = 0;
    pub const CHUNK: usize = 1;
    pub const CHUNK_OFFSET: usize = 2;
    pub const LENGTH: usize = 3;
}

/// Columns of `chunks.parquet`, in order.
pub(crate) mod chunks {
    pub const CHUNK: usize = 0;
    pub const LENGTH: usize = 1;
    pub const ENTRY: usize = 2;
    pub const OBJECT: usize = 3;
    pub const OBJECT_OFFSET: usize = 4;
    pub const OBJECT_SIZE: usize = 5;
    pub const MTIME_NS: usize = 6;
    pub const ETAG: usize = 7;
}

const ENTRIES: &str = "message entries {
    REQUIRED BYTE_ARRAY path (STRING);
    REQUIRED BYTE_ARRAY kind (STRING);
    REQUIRED INT64 size;
    OPTIONAL FIXED_LEN_BYTE_ARRAY (32) blake3;
    OPTIONAL BYTE_ARRAY target (STRING);
    REQUIRED BYTE_ARRAY sample_kind (STRING);
    OPTIONAL BYTE_ARRAY sample (STRING);
}";

const PLACEMENT: &str = "message placement {
    REQUIRED INT64 ordinal;
    REQUIRED FIXED_LEN_BYTE_ARRAY (32) chunk;
    REQUIRED INT32 chunk_offset;
    REQUIRED INT32 length;
}";

const CHUNKS: &str = "message chunks {
    REQUIRED FIXED_LEN_BYTE_ARRAY (32) chunk;
    REQUIRED INT32 length;
    OPTIONAL INT64 entry;
    OPTIONAL BYTE_ARRAY object (STRING);
    REQUIRED INT64 object_offset;
    REQUIRED INT64 object_size;
    OPTIONAL INT64 mtime_ns;
    OPTIONAL BYTE_ARRAY etag (STRING);
}";

/// The columns of one table.
pub(crate) struct Schema {
    pub table: Table,
    pub message: TypePtr,
    pub columns: SchemaDescPtr,
}

impl Schema {
    fn new(table: Table, text: &str) -> Self {
        let message =
            Arc::new(parse_message_type(text).expect("the schemas above parse: every test reads them"));
        let columns = Arc::new(SchemaDescriptor::new(Arc::clone(&message)));
        Schema { table, message, columns }
    }
}

pub(crate) static ENTRIES_SCHEMA: LazyLock<Schema> = LazyLock::new(|| Schema::new(Table::Entries, ENTRIES));
pub(crate) static PLACEMENT_SCHEMA: LazyLock<Schema> =
    LazyLock::new(|| Schema::new(Table::Placement, PLACEMENT));
pub(crate) static CHUNKS_SCHEMA: LazyLock<Schema> = LazyLock::new(|| Schema::new(Table::Chunks, CHUNKS));

/// The keys of a file's key-value metadata.
pub(crate) const META_TABLE: &str = "fletch.table";
pub(crate) const META_MAJOR: &str = "fletch.major";
pub(crate) const META_MINOR: &str = "fletch.minor";

/// The most rows that a part has in `placement.parquet`, and in `chunks.parquet`.
pub(crate) const ROWS_PER_PART_MAX: u32 = 4 << 20;
/// The most bytes of a column of a part, before and after compression.
pub(crate) const COLUMN_BYTES_MAX: u64 = 192 << 20;
/// The most bytes of a file that a row group spans.
pub(crate) const GROUP_BYTES_MAX: u64 = 512 << 20;
