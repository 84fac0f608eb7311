//! Decodes row groups into parts, placements and chunk rows.
//!
//! Must never: return a row that was not checked. Entries are checked against the root, placements against
//! the layout id, and chunk rows, which no hash covers, against the limits of the format.

use crate::chunks::{ChunkRow, ObjectRef, PinRow, etag, object_key};
use crate::columns::{BATCH, Column};
use crate::footer::{Footer, Span};
use crate::schema::{self, CHUNKS_SCHEMA, ENTRIES_SCHEMA, PLACEMENT_SCHEMA};
use crate::untrusted::{bad, contained};
use crate::{LayoutDoc, Table, TableError};
use bytes::Bytes;
use fletch_core::Hash;
use fletch_core::manifest::locate::PartIndex;
use fletch_core::manifest::part::BadPart;
use fletch_core::manifest::{EntryKind, EntryRef, Part, PartBuilder, Placed, SampleRef, Slice};
use parquet::data_type::{ByteArray, ByteArrayType, FixedLenByteArrayType, Int32Type, Int64Type};
use parquet::errors::Result as ParquetResult;

/// The columns of one row group, in the order of the schema.
type Group = [(Span, Bytes)];

fn text(v: &ByteArray) -> ParquetResult<&str> {
    std::str::from_utf8(v.data()).map_err(|_| bad("a text is not UTF-8"))
}

fn hash(v: &[u8]) -> ParquetResult<Hash> {
    Hash::try_from(v).map_err(|_| bad("a hash does not have 32 bytes"))
}

fn unsigned(v: i64) -> ParquetResult<u64> {
    u64::try_from(v).map_err(|_| bad("a number is negative"))
}

fn unsigned32(v: i32) -> ParquetResult<u32> {
    u32::try_from(v).map_err(|_| bad("a number is negative"))
}

/// The sizes of the batches that make up `rows`.
fn batches(rows: u32) -> impl Iterator<Item = usize> {
    let rows = rows as usize;
    (0..rows.div_ceil(BATCH)).map(move |i| BATCH.min(rows - i * BATCH))
}

/// Returns the entries of a part, checked against the part's hash in `index`.
pub(crate) fn entries(
    footer: &Footer,
    index: &PartIndex,
    part: usize,
    group: &Group,
) -> Result<Part, TableError> {
    use schema::entries::*;
    let named = &index.parts()[part];
    let rows = footer.rows(part);
    let first = index.first_ordinal(part);
    let s = &*ENTRIES_SCHEMA;
    let wrong = |why: BadPart| TableError::Part { part, why: Box::new(why) };
    let built = contained(Table::Entries, || {
        let mut paths = Column::<ByteArrayType>::new(s, PATH, &group[PATH], rows)?;
        let mut kinds = Column::<ByteArrayType>::new(s, KIND, &group[KIND], rows)?;
        let mut sizes = Column::<Int64Type>::new(s, SIZE, &group[SIZE], rows)?;
        let mut hashes = Column::<FixedLenByteArrayType>::new(s, BLAKE3, &group[BLAKE3], rows)?;
        let mut targets = Column::<ByteArrayType>::new(s, TARGET, &group[TARGET], rows)?;
        let mut sample_kinds = Column::<ByteArrayType>::new(s, SAMPLE_KIND, &group[SAMPLE_KIND], rows)?;
        let mut samples = Column::<ByteArrayType>::new(s, SAMPLE, &group[SAMPLE], rows)?;
        let mut builder = PartBuilder::new(first, rows as usize);
        for n in batches(rows) {
            let paths = paths.required(n)?;
            let kinds = kinds.required(n)?;
            let sizes = sizes.required(n)?;
            let mut hashes = hashes.batch(n)?;
            let mut targets = targets.batch(n)?;
            let sample_kinds = sample_kinds.required(n)?;
            let mut samples = samples.batch(n)?;
            for i in 0..n {
                let kind = EntryKind::from_word(text(&kinds[i])?).ok_or_else(|| bad("an unknown kind"))?;
                let target = targets.next().flatten();
                let key = samples.next().flatten();
                let sample = match (sample_kinds[i].data(), &key) {
                    (b"none", None) => SampleRef::None,
                    (b"alone", None) => SampleRef::Single,
                    (b"keyed", Some(key)) => SampleRef::Keyed(text(key)?),
                    _ => return Err(bad("sample_kind and sample do not fit together")),
                };
                let row = EntryRef {
                    path: text(&paths[i])?,
                    kind,
                    size: unsigned(sizes[i])?,
                    hash: hashes.next().flatten().map(|h| hash(h.data())).transpose()?,
                    target: target.as_ref().map_or(Ok(""), text)?,
                    sample,
                };
                if let Err(e) = builder.push(row) {
                    return Ok(Err(wrong(e.into())));
                }
            }
        }
        Ok(Ok(builder))
    })??;
    built.finish(named).map_err(wrong)
}

/// Returns the placement of a part, checked against the part's placement hash in `layout`.
pub(crate) fn placed(
    footer: &Footer,
    layout: &LayoutDoc,
    part: usize,
    group: &Group,
    entries: &Part,
) -> Result<Placed, TableError> {
    use schema::placement::*;
    let rows = footer.rows(part);
    let first = entries.first_ordinal();
    let s = &*PLACEMENT_SCHEMA;
    let placed = contained(Table::Placement, || {
        let mut ordinals = Column::<Int64Type>::new(s, ORDINAL, &group[ORDINAL], rows)?;
        let mut chunks = Column::<FixedLenByteArrayType>::new(s, CHUNK, &group[CHUNK], rows)?;
        let mut offsets = Column::<Int32Type>::new(s, CHUNK_OFFSET, &group[CHUNK_OFFSET], rows)?;
        let mut lengths = Column::<Int32Type>::new(s, LENGTH, &group[LENGTH], rows)?;
        let mut placed = Placed::default();
        let mut slices: Vec<Slice> = Vec::new();
        for n in batches(rows) {
            let ordinals = ordinals.required(n)?;
            let chunks = chunks.required(n)?;
            let offsets = offsets.required(n)?;
            let lengths = lengths.required(n)?;
            for i in 0..n {
                let row = unsigned(ordinals[i])?.checked_sub(first).filter(|&r| r < entries.len() as u64);
                let row = row.ok_or_else(|| bad("an ordinal is not of its part"))?;
                if row < placed.len() as u64 {
                    return Err(bad("ordinals descend"));
                }
                while (placed.len() as u64) < row {
                    placed.push(slices.drain(..));
                }
                slices.push(Slice {
                    chunk: hash(chunks[i].data())?,
                    chunk_offset: unsigned32(offsets[i])?,
                    len: unsigned32(lengths[i])?,
                });
            }
        }
        while placed.len() < entries.len() {
            placed.push(slices.drain(..));
        }
        Ok(placed)
    })?;
    placed
        .check(layout.parts[part], entries, layout.params.kind)
        .map_err(|why| TableError::Placement { part, why: Box::new(why) })?;
    Ok(placed)
}

/// Returns the chunk rows of a part, checked against the limits of the format.
pub(crate) fn chunk_rows(
    footer: &Footer,
    index: &PartIndex,
    part: usize,
    group: &Group,
) -> Result<Vec<ChunkRow>, TableError> {
    use schema::chunks::*;
    let rows = footer.rows(part);
    let first = index.first_ordinal(part);
    let entries = u64::from(index.parts()[part].entries);
    let s = &*CHUNKS_SCHEMA;
    contained(Table::Chunks, || {
        let mut chunks = Column::<FixedLenByteArrayType>::new(s, CHUNK, &group[CHUNK], rows)?;
        let mut lengths = Column::<Int32Type>::new(s, LENGTH, &group[LENGTH], rows)?;
        let mut ordinals = Column::<Int64Type>::new(s, ENTRY, &group[ENTRY], rows)?;
        let mut objects = Column::<ByteArrayType>::new(s, OBJECT, &group[OBJECT], rows)?;
        let mut offsets = Column::<Int64Type>::new(s, OBJECT_OFFSET, &group[OBJECT_OFFSET], rows)?;
        let mut sizes = Column::<Int64Type>::new(s, OBJECT_SIZE, &group[OBJECT_SIZE], rows)?;
        let mut mtimes = Column::<Int64Type>::new(s, MTIME_NS, &group[MTIME_NS], rows)?;
        let mut etags = Column::<ByteArrayType>::new(s, ETAG, &group[ETAG], rows)?;
        let mut out = Vec::new();
        for n in batches(rows) {
            let chunks = chunks.required(n)?;
            let lengths = lengths.required(n)?;
            let mut ordinals = ordinals.batch(n)?;
            let mut objects = objects.batch(n)?;
            let offsets = offsets.required(n)?;
            let sizes = sizes.required(n)?;
            let mut mtimes = mtimes.batch(n)?;
            let mut etags = etags.batch(n)?;
            out.reserve(n);
            for i in 0..n {
                let object = match (ordinals.next().flatten(), objects.next().flatten()) {
                    (Some(ordinal), None) => {
                        let row = unsigned(ordinal)?.checked_sub(first).filter(|&r| r < entries);
                        let row = row.and_then(|r| u32::try_from(r).ok());
                        ObjectRef::Entry { row: row.ok_or_else(|| bad("an ordinal is not of its part"))? }
                    }
                    (None, Some(key)) => ObjectRef::Key(object_key(text(&key)?).map_err(bad)?.to_owned()),
                    _ => return Err(bad("a chunk has no object, or two")),
                };
                let row = ChunkRow {
                    chunk: hash(chunks[i].data())?,
                    len: unsigned32(lengths[i])?,
                    object,
                    offset: unsigned(offsets[i])?,
                    pin: PinRow {
                        size: unsigned(sizes[i])?,
                        mtime_ns: mtimes.next().flatten(),
                        etag: etags
                            .next()
                            .flatten()
                            .map(|t| etag(text(&t)?).map(str::to_owned).map_err(bad))
                            .transpose()?,
                    },
                };
                out.push(row.checked().map_err(bad)?);
            }
        }
        Ok(out)
    })
}

/// Returns the chunk hashes of a part, in row order.
pub(crate) fn chunk_hashes(
    footer: &Footer,
    part: usize,
    column: &(Span, Bytes),
) -> Result<Vec<Hash>, TableError> {
    let rows = footer.rows(part);
    contained(Table::Chunks, || {
        let s = &*CHUNKS_SCHEMA;
        let mut chunks = Column::<FixedLenByteArrayType>::new(s, schema::chunks::CHUNK, column, rows)?;
        let mut out = Vec::new();
        for n in batches(rows) {
            for v in chunks.required(n)? {
                out.push(hash(v.data())?);
            }
        }
        Ok(out)
    })
}
