//! Entrances for the fuzz target of slabs in `tests/fuzz`.

use super::{
    catalogue::DeadMarks,
    layout::{self, BLOCK, Row, Table, footprint},
    recover,
};
use fletch_core::{Domain, Hash, StoreKey};
use std::{fs::File, io};

/// A record that recovery found in a slab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundRecord {
    /// The domain of its key.
    pub domain: Domain,
    /// The hash that its payload should have.
    pub hash: Hash,
    /// Where its header begins, in bytes.
    pub at: u64,
    /// The length of its payload, in bytes.
    pub len: u32,
}

/// The records of a slab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundSlab {
    /// The records, by offset.
    pub records: Vec<FoundRecord>,
    /// Whether the records come from the slab's table. Else recovery walked the slab and hashed each payload.
    pub sealed: bool,
    /// Where the records end.
    pub end: u64,
}

/// Loads slab `id` as the disk tier does when it opens. Returns `None` for a slab of another format.
///
/// # Errors
/// The disk's.
pub fn load(file: &File, id: u64) -> io::Result<Option<FoundSlab>> {
    let Ok(loaded) = recover::load(file, id, None)? else { return Ok(None) };
    let domain = |row: &Row| loaded.table.domains[usize::from(row.domain)].clone();
    let found = |row: &Row| FoundRecord { domain: domain(row), hash: row.hash, at: row.at, len: row.len };
    let records = loaded.table.rows.iter().map(found).collect();
    Ok(Some(FoundSlab { records, sealed: loaded.check.is_some(), end: loaded.end }))
}

/// Returns the bytes of slab `id` with these payloads in one domain, with or without its table.
#[must_use]
pub fn slab(id: u64, domain: &Domain, payloads: &[&[u8]], sealed: bool) -> Vec<u8> {
    let mut out = layout::slab_header(id).to_vec();
    let mut table = Table { domains: vec![domain.clone()], rows: Vec::new() };
    let mut at = BLOCK;
    for payload in payloads {
        let (hash, len) = (Hash::of(payload), u32::try_from(payload.len()).unwrap_or(0));
        let key = StoreKey { domain: domain.clone(), hash };
        out.extend_from_slice(&layout::record_header(id, &key, 7, len));
        out.extend_from_slice(payload);
        table.rows.push(Row { hash, dataset: 7, at, len, domain: 0 });
        at += footprint(len);
        out.resize(usize::try_from(at).unwrap_or(0), 0);
    }
    if sealed {
        out.extend_from_slice(&layout::seal(id, at, &table).0);
    }
    out
}

/// Returns whether the catalogue takes these bytes as the dead rows of a table, and asks for each row.
#[must_use]
pub fn dead_rows(bytes: &[u8]) -> Option<usize> {
    let marks = DeadMarks::decode(bytes)?;
    let rows = usize::try_from(marks.rows).unwrap_or(usize::MAX).min(8 * marks.dead.len());
    Some((0..rows).filter(|&row| marks.is_dead(row)).count())
}
