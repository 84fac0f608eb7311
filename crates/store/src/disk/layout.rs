//! The bytes of a slab: header, records, and in a sealed slab a table with a footer (`docs/FORMATS-slab.md`).
//!
//! Pure: bytes in, values out. Numbers are little-endian. Records lie at multiples of 64 bytes (ADR 48).
//!
//! Invariants:
//! 1. for any bytes in a file, no function here panics, allocates more than the file is long, or believes a
//!    length that no check covers;
//! 2. a header is valid only in the slab that it was written into. So a block of a deleted slab that shows up
//!    in a new slab is no record of the new one.

use fletch_core::{Domain, Hash, StoreKey};

/// Length of a slab's header and of its footer. A table is padded to a multiple of it.
pub(crate) const BLOCK: u64 = 512;
/// A record, and so its payload, begins at a multiple of this many bytes.
///
/// It is a cache line of the processor: a payload is copied as fast as from the beginning of a page.
pub(crate) const LINE: u64 = 64;
/// Length of a record's header.
pub(crate) const HEAD: u64 = 256;
/// Longest chunk.
pub(crate) const CHUNK_BYTES_MAX: u32 = 16 << 20;
/// Longest slab. An offset in it, in lines, fits 32 bits with space to spare.
pub(crate) const SLAB_BYTES_MAX: u64 = 1 << 37;

const SLAB_MAGIC: [u8; 8] = *b"FLETCHSL";
const RECORD_MAGIC: [u8; 4] = *b"FLRC";
const TABLE_MAGIC: [u8; 8] = *b"FLETCHTB";
const FOOTER_MAGIC: [u8; 8] = *b"FLETCHFT";
const MAJOR: u32 = 2;
const KIND_CHUNK: u8 = 1;
const RECORD_CHECKED: usize = 192;
const DOMAIN_AT: usize = 64;
const DOMAIN_MAX: usize = 128;
const TABLE_HEADER: usize = 24;
pub(crate) const ROW: usize = 56;
const FOOTER_CHECKED: usize = 80;

/// Context strings of BLAKE3's key derivation mode.
const CONTEXT_SLAB: &str = "fletch 2026 slab 1";
const CONTEXT_RECORD: &str = "fletch 2026 slab record 1";
const CONTEXT_TABLE: &str = "fletch 2026 slab table 1";

/// A slab's header, or its footer.
pub(crate) type Block = [u8; BLOCK as usize];
/// A record's header.
pub(crate) type Head = [u8; HEAD as usize];

/// The fields of a record's header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecordHeader {
    pub slab: u64,
    pub key: StoreKey,
    pub dataset: u64,
    pub len: u32,
}

/// A record's row in the table at the end of its slab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    pub hash: Hash,
    pub dataset: u64,
    /// Where the record's header begins, in bytes.
    pub at: u64,
    pub len: u32,
    /// Index into the table's domains.
    pub domain: u16,
}

/// A table that was read, or is to be written.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Table {
    pub domains: Vec<Domain>,
    pub rows: Vec<Row>,
}

/// The last block of a sealed slab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Footer {
    pub slab: u64,
    pub table_at: u64,
    pub table_len: u64,
    pub count: u32,
    pub table_hash: Hash,
}

/// Why bytes of a slab are not valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadSlab {
    #[error("its magic bytes are wrong")]
    Magic,
    #[error("it has format {0}, and this build reads format 2")]
    Major(u32),
    #[error("its check does not match its bytes")]
    Check,
    #[error("it belongs to another slab")]
    OtherSlab,
    #[error("its fields contradict each other")]
    Inconsistent,
}

/// Rounds `n` bytes up to whole blocks.
pub(crate) const fn padded(n: u64) -> u64 {
    n.next_multiple_of(BLOCK)
}

/// Returns the bytes that a chunk of `len` bytes occupies in a slab.
pub(crate) const fn footprint(len: u32) -> u64 {
    HEAD + (len as u64).next_multiple_of(LINE)
}

/// Returns the most bytes that the table and footer of `count` records take.
pub(crate) const fn table_bytes(count: u64, domain_bytes: u64) -> u64 {
    padded(TABLE_HEADER as u64 + domain_bytes + 8 + count * ROW as u64) + BLOCK
}

/// Returns the bytes that a domain adds to [`table_bytes`].
pub(crate) fn domain_bytes(domain: &Domain) -> u64 {
    1 + domain.as_str().len() as u64
}

fn derive(context: &'static str, bytes: &[u8]) -> Hash {
    let mut h = blake3::Hasher::new_derive_key(context);
    h.update(bytes);
    h.finalize().into()
}

fn check8(context: &'static str, bytes: &[u8]) -> [u8; 8] {
    let mut out = [0; 8];
    out.copy_from_slice(&derive(context, bytes).0[..8]);
    out
}

fn array<const N: usize>(b: &[u8], at: usize) -> Option<[u8; N]> {
    b.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u64_at(b: &[u8], at: usize) -> Option<u64> {
    array(b, at).map(u64::from_le_bytes)
}

fn u32_at(b: &[u8], at: usize) -> Option<u32> {
    array(b, at).map(u32::from_le_bytes)
}

fn u16_at(b: &[u8], at: usize) -> Option<u16> {
    array(b, at).map(u16::from_le_bytes)
}

/// Returns the header of slab `id`.
pub(crate) fn slab_header(id: u64) -> Block {
    let mut b = [0; BLOCK as usize];
    b[..8].copy_from_slice(&SLAB_MAGIC);
    b[8..12].copy_from_slice(&MAJOR.to_le_bytes());
    b[16..24].copy_from_slice(&id.to_le_bytes());
    let check = check8(CONTEXT_SLAB, &b[..24]);
    b[24..32].copy_from_slice(&check);
    b
}

/// Checks that `b` is the header of slab `id`.
pub(crate) fn check_slab_header(b: &Block, id: u64) -> Result<(), BadSlab> {
    if b[..8] != SLAB_MAGIC {
        return Err(BadSlab::Magic);
    }
    if b[24..32] != check8(CONTEXT_SLAB, &b[..24]) {
        return Err(BadSlab::Check);
    }
    match (u32_at(b, 8), u64_at(b, 16)) {
        (Some(MAJOR), Some(i)) if i == id => Ok(()),
        (Some(MAJOR), _) => Err(BadSlab::OtherSlab),
        (major, _) => Err(BadSlab::Major(major.unwrap_or(0))),
    }
}

/// Returns the header of a record.
pub(crate) fn record_header(slab: u64, key: &StoreKey, dataset: u64, len: u32) -> Head {
    let mut b = [0; HEAD as usize];
    let domain = key.domain.as_str().as_bytes();
    b[..4].copy_from_slice(&RECORD_MAGIC);
    b[4] = 1;
    b[5] = KIND_CHUNK;
    // The grammar of domain names permits at most DOMAIN_MAX bytes.
    b[6] = domain.len().min(DOMAIN_MAX) as u8;
    b[8..16].copy_from_slice(&slab.to_le_bytes());
    b[16..24].copy_from_slice(&dataset.to_le_bytes());
    b[24..28].copy_from_slice(&len.to_le_bytes());
    b[32..64].copy_from_slice(key.hash.as_bytes());
    b[DOMAIN_AT..DOMAIN_AT + domain.len().min(DOMAIN_MAX)]
        .copy_from_slice(&domain[..domain.len().min(DOMAIN_MAX)]);
    let check = check8(CONTEXT_RECORD, &b[..RECORD_CHECKED]);
    b[RECORD_CHECKED..RECORD_CHECKED + 8].copy_from_slice(&check);
    b
}

/// Whether a record's header may begin here: a cheap test for a walk.
pub(crate) fn looks_like_record(b: &[u8]) -> bool {
    b.starts_with(&RECORD_MAGIC)
}

/// Reads the header of a record in slab `slab`.
pub(crate) fn read_record(b: &[u8], slab: u64) -> Result<RecordHeader, BadSlab> {
    let b = b.get(..HEAD as usize).ok_or(BadSlab::Inconsistent)?;
    if !looks_like_record(b) {
        return Err(BadSlab::Magic);
    }
    if b[RECORD_CHECKED..RECORD_CHECKED + 8] != check8(CONTEXT_RECORD, &b[..RECORD_CHECKED]) {
        return Err(BadSlab::Check);
    }
    if b[4] != 1 || b[5] != KIND_CHUNK {
        return Err(BadSlab::Major(u32::from(b[4])));
    }
    if u64_at(b, 8) != Some(slab) {
        return Err(BadSlab::OtherSlab);
    }
    let parse = || {
        let text = b.get(DOMAIN_AT..DOMAIN_AT + usize::from(b[6]).min(DOMAIN_MAX))?;
        let domain = Domain::new(std::str::from_utf8(text).ok()?).ok()?;
        let hash = Hash(array(b, 32)?);
        let len = u32_at(b, 24).filter(|&l| l <= CHUNK_BYTES_MAX)?;
        Some(RecordHeader { slab, key: StoreKey { domain, hash }, dataset: u64_at(b, 16)?, len })
    };
    parse().ok_or(BadSlab::Inconsistent)
}

/// Returns the table and footer that seal slab `id`, whose records end at `table_at`.
///
/// Also returns the first bytes of the table's hash, by which the catalogue recognizes the table.
pub(crate) fn seal(id: u64, table_at: u64, table: &Table) -> (Vec<u8>, [u8; 8]) {
    let mut out = Vec::new();
    out.extend_from_slice(&TABLE_MAGIC);
    out.extend_from_slice(&id.to_le_bytes());
    out.extend_from_slice(&(table.rows.len() as u32).to_le_bytes());
    out.extend_from_slice(&(table.domains.len() as u16).to_le_bytes());
    out.extend_from_slice(&[0; 2]);
    for d in &table.domains {
        out.push(d.as_str().len() as u8);
        out.extend_from_slice(d.as_str().as_bytes());
    }
    out.resize(out.len().next_multiple_of(8), 0);
    for r in &table.rows {
        out.extend_from_slice(r.hash.as_bytes());
        out.extend_from_slice(&r.dataset.to_le_bytes());
        out.extend_from_slice(&((r.at / LINE) as u32).to_le_bytes());
        out.extend_from_slice(&r.len.to_le_bytes());
        out.extend_from_slice(&r.domain.to_le_bytes());
        out.extend_from_slice(&[KIND_CHUNK, 0, 0, 0, 0, 0]);
    }
    let table_len = out.len() as u64;
    let hash = derive(CONTEXT_TABLE, &out);
    out.resize(padded(table_len) as usize, 0);

    let mut f: Block = [0; BLOCK as usize];
    f[..8].copy_from_slice(&FOOTER_MAGIC);
    f[8..12].copy_from_slice(&MAJOR.to_le_bytes());
    f[12..16].copy_from_slice(&(table.rows.len() as u32).to_le_bytes());
    f[16..24].copy_from_slice(&id.to_le_bytes());
    f[24..32].copy_from_slice(&table_at.to_le_bytes());
    f[32..40].copy_from_slice(&table_len.to_le_bytes());
    f[40..72].copy_from_slice(hash.as_bytes());
    let check = check8(CONTEXT_TABLE, &f[..FOOTER_CHECKED]);
    f[FOOTER_CHECKED..FOOTER_CHECKED + 8].copy_from_slice(&check);
    out.extend_from_slice(&f);
    (out, table_check(hash))
}

/// Returns the first bytes of a table's hash, by which the catalogue recognizes the table.
pub(crate) fn table_check(hash: Hash) -> [u8; 8] {
    let mut check = [0; 8];
    check.copy_from_slice(&hash.0[..8]);
    check
}

/// Reads the footer of slab `id`, the last block of a file of `file_len` bytes.
pub(crate) fn read_footer(b: &Block, id: u64, file_len: u64) -> Result<Footer, BadSlab> {
    if b[..8] != FOOTER_MAGIC {
        return Err(BadSlab::Magic);
    }
    if b[FOOTER_CHECKED..FOOTER_CHECKED + 8] != check8(CONTEXT_TABLE, &b[..FOOTER_CHECKED]) {
        return Err(BadSlab::Check);
    }
    let parse = || {
        let table_hash = Hash(array(b, 40)?);
        let (slab, table_at) = (u64_at(b, 16)?, u64_at(b, 24)?);
        Some((
            u32_at(b, 8)?,
            Footer { slab, table_at, table_len: u64_at(b, 32)?, count: u32_at(b, 12)?, table_hash },
        ))
    };
    let (major, f) = parse().ok_or(BadSlab::Inconsistent)?;
    if major != MAJOR {
        return Err(BadSlab::Major(major));
    }
    if f.slab != id {
        return Err(BadSlab::OtherSlab);
    }
    let whole = f.table_len <= file_len
        && f.table_at >= BLOCK
        && f.table_at.is_multiple_of(LINE)
        && f.table_at.checked_add(padded(f.table_len)).and_then(|e| e.checked_add(BLOCK)) == Some(file_len);
    if whole { Ok(f) } else { Err(BadSlab::Inconsistent) }
}

/// Reads the table that `footer` describes.
///
/// Its rows are in order of their offset, do not overlap, and end before the table. Rows of unknown kinds are
/// left out.
pub(crate) fn read_table(bytes: &[u8], footer: &Footer) -> Result<Table, BadSlab> {
    if derive(CONTEXT_TABLE, bytes) != footer.table_hash {
        return Err(BadSlab::Check);
    }
    parse_table(bytes, footer).ok_or(BadSlab::Inconsistent)
}

fn parse_table(b: &[u8], footer: &Footer) -> Option<Table> {
    if b.get(..8)? != TABLE_MAGIC || u64_at(b, 8)? != footer.slab || u32_at(b, 16)? != footer.count {
        return None;
    }
    let mut domains = Vec::new();
    let mut at = TABLE_HEADER;
    for _ in 0..u16_at(b, 20)? {
        let n = usize::from(*b.get(at)?);
        let text = b.get(at + 1..at + 1 + n)?;
        domains.push(Domain::new(std::str::from_utf8(text).ok()?).ok()?);
        at += 1 + n;
    }
    let rows_bytes = b.get(at.next_multiple_of(8)..)?;
    if rows_bytes.len() as u64 != u64::from(footer.count) * ROW as u64 {
        return None;
    }
    let mut rows = Vec::with_capacity(footer.count as usize);
    let mut end = BLOCK;
    for r in rows_bytes.chunks_exact(ROW) {
        let row = Row {
            hash: Hash(array(r, 0)?),
            dataset: u64_at(r, 32)?,
            at: u64::from(u32_at(r, 40)?) * LINE,
            len: u32_at(r, 44)?,
            domain: u16_at(r, 48)?,
        };
        let sane = row.len <= CHUNK_BYTES_MAX
            && row.at >= end
            && usize::from(row.domain) < domains.len()
            && row.at + footprint(row.len) <= footer.table_at;
        if !sane {
            return None;
        }
        end = row.at + footprint(row.len);
        if r[50] == KIND_CHUNK {
            rows.push(row);
        }
    }
    Some(Table { domains, rows })
}

#[cfg(test)]
mod tests;
