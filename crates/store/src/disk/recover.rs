//! Recovery of one slab when the tier opens: from its table if it has one, else record by record.
//!
//! Invariants:
//! 1. a sealed slab costs reading its table, never its payloads;
//! 2. in a slab without a good table, a record counts only if its header's check and its payload's hash are
//!    right. The walk steps over everything else line by line;
//! 3. a record that reaches into a hole is dead, whatever the table says: it was punched out.

use super::{
    catalogue::DeadMarks,
    layout::{self, BLOCK, BadSlab, Block, HEAD, LINE, Row, Table, footprint},
    slab,
};
use fletch_core::{Domain, Hash};
use rustix::{fs::SeekFrom, io::Errno};
use std::{fs::File, io, ops::Range, os::unix::fs::FileExt};

/// Bytes that a walk reads at a time.
const WINDOW: u64 = 1 << 20;

/// The content of a slab.
#[derive(Debug)]
pub(crate) struct LoadedSlab {
    pub table: Table,
    /// Whether each row is dead.
    pub dead: Vec<bool>,
    /// First bytes of the table's hash; `None` when the slab was walked.
    pub check: Option<[u8; 8]>,
    /// Where the records end.
    pub end: u64,
    /// Bytes of the file that are not records.
    pub fixed: u64,
    pub blocks: u64,
    /// Records that did not verify, or were punched out.
    pub dropped: u64,
}

/// Loads slab `id`. The outer error is the disk's, the inner one says that the slab has another format.
pub(crate) fn load(
    file: &File,
    id: u64,
    marks: Option<&DeadMarks>,
) -> io::Result<Result<LoadedSlab, BadSlab>> {
    let len = file.metadata()?.len();
    if let Err(BadSlab::Major(m)) = block(file, 0, len)?.map_or(Ok(()), |b| layout::check_slab_header(&b, id))
    {
        return Ok(Err(BadSlab::Major(m)));
    }
    let found = match sealed(file, id, len)? {
        Ok((table, check, end)) => {
            let marks = marks.filter(|m| m.check == check && m.rows as usize == table.rows.len());
            let (dead, holes) = match marks {
                Some(m) => ((0..table.rows.len()).map(|row| m.is_dead(row)).collect(), 0),
                None => rows_in_holes(&table, &holes(file, end)?),
            };
            let fixed = BLOCK + (len - end);
            LoadedSlab {
                table,
                dead,
                check: Some(check),
                end,
                fixed,
                blocks: slab::blocks(file)?,
                dropped: holes,
            }
        }
        // The header was damaged, else it would have said so.
        Err(why @ BadSlab::Major(_)) => return Ok(Err(why)),
        Err(why) => {
            if why != BadSlab::Magic {
                tracing::warn!(slab = id, %why, "the table of a slab is damaged; walking its records");
            }
            walk(file, id, len)?
        }
    };
    Ok(Ok(found))
}

fn block(file: &File, at: u64, len: u64) -> io::Result<Option<Block>> {
    let mut b = [0; BLOCK as usize];
    if at.checked_add(BLOCK).is_none_or(|end| end > len) {
        return Ok(None);
    }
    match file.read_exact_at(&mut b, at) {
        Ok(()) => Ok(Some(b)),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(e) => Err(e),
    }
}

/// The table, its check, and its offset.
type Sealed = (Table, [u8; 8], u64);

fn sealed(file: &File, id: u64, len: u64) -> io::Result<Result<Sealed, BadSlab>> {
    let Some(last) = len.checked_sub(BLOCK) else { return Ok(Err(BadSlab::Magic)) };
    let Some(b) = block(file, last, len)? else { return Ok(Err(BadSlab::Magic)) };
    let footer = match layout::read_footer(&b, id, len) {
        Ok(f) => f,
        Err(e) => return Ok(Err(e)),
    };
    // `read_footer` checked that the table is not longer than the file.
    let bytes = slab::read(file, footer.table_at, footer.table_len as usize)?;
    let check = layout::table_check(footer.table_hash);
    Ok(layout::read_table(&bytes, &footer).map(|t| (t, check, footer.table_at)))
}

/// Returns the holes of the file before `end`. A file system without holes returns none.
fn holes(file: &File, end: u64) -> io::Result<Vec<Range<u64>>> {
    let mut out = Vec::new();
    let mut at = 0;
    while at < end {
        let begin = match rustix::fs::seek(file, SeekFrom::Hole(at)) {
            Ok(b) if b < end => b,
            Ok(_) | Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP) => break,
            Err(e) => return Err(e.into()),
        };
        at = match rustix::fs::seek(file, SeekFrom::Data(begin)) {
            Ok(d) => d,
            Err(Errno::NXIO) => end,
            Err(e) => return Err(e.into()),
        };
        out.push(begin..at);
    }
    Ok(out)
}

fn rows_in_holes(table: &Table, holes: &[Range<u64>]) -> (Vec<bool>, u64) {
    let mut rest = holes;
    let dead: Vec<bool> = table
        .rows
        .iter()
        .map(|r| {
            while rest.first().is_some_and(|h| h.end <= r.at) {
                rest = &rest[1..];
            }
            rest.first().is_some_and(|h| h.start < r.at + footprint(r.len))
        })
        .collect();
    let n = dead.iter().filter(|d| **d).count() as u64;
    (dead, n)
}

/// Looks at every line of the file for records whose header and payload verify.
fn walk(file: &File, id: u64, len: u64) -> io::Result<LoadedSlab> {
    let mut w = Walk { table: Table::default(), end: BLOCK, dropped: 0 };
    let mut at = BLOCK;
    while at + HEAD <= len {
        at = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(d) => d / LINE * LINE,
            Err(Errno::NXIO) => break,
            // This file system has no holes.
            Err(_) => at,
        };
        let window = slab::read(file, at, WINDOW.min(len - at) as usize)?;
        let next = w.window(file, id, at, &window)?;
        if next == at {
            break;
        }
        at = next;
    }
    let dead = vec![false; w.table.rows.len()];
    let blocks = slab::blocks(file)?;
    Ok(LoadedSlab { table: w.table, dead, check: None, end: w.end, fixed: BLOCK, blocks, dropped: w.dropped })
}

struct Walk {
    table: Table,
    end: u64,
    dropped: u64,
}

impl Walk {
    /// Adds the records that begin in the window at `at`, and returns the offset to continue at.
    fn window(&mut self, file: &File, id: u64, at: u64, window: &[u8]) -> io::Result<u64> {
        let mut off = 0;
        while off + HEAD as usize <= window.len() {
            let here = at + off as u64;
            let head = &window[off..off + HEAD as usize];
            if !layout::looks_like_record(head) {
                off += LINE as usize;
                continue;
            }
            let Ok(r) = layout::read_record(head, id) else {
                self.dropped += 1;
                off += LINE as usize;
                continue;
            };
            let inside = window.get(off + HEAD as usize..off + HEAD as usize + r.len as usize);
            let right = match inside {
                Some(payload) => Hash::of(payload) == r.key.hash,
                None => {
                    // The file may end within the payload, and the hash may be that of the shorter payload.
                    let payload = slab::read(file, here + HEAD, r.len as usize)?;
                    payload.len() == r.len as usize && Hash::of(&payload) == r.key.hash
                }
            };
            if !right {
                self.dropped += 1;
                off += LINE as usize;
                continue;
            }
            let domain = self.domain(&r.key.domain);
            self.table.rows.push(Row { hash: r.key.hash, dataset: r.dataset, at: here, len: r.len, domain });
            self.end = here + footprint(r.len);
            off += footprint(r.len) as usize;
        }
        Ok(at + off as u64)
    }

    fn domain(&mut self, d: &Domain) -> u16 {
        let known = self.table.domains.iter().position(|x| x == d);
        known.unwrap_or_else(|| {
            self.table.domains.push(d.clone());
            self.table.domains.len() - 1
        }) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_core::StoreKey;
    use std::io::Write as _;

    /// Invariant 2. The fuzz target of slabs found this: the header promises more bytes than the file has.
    #[test]
    fn a_record_past_the_end_is_dropped_even_if_its_rest_has_its_hash() {
        let key = StoreKey { domain: Domain::default_domain(), hash: Hash::of(b"") };
        let mut file = tempfile::tempfile().expect("file");
        for bytes in [&layout::slab_header(3)[..], &layout::record_header(3, &key, 7, 65_536)[..]] {
            file.write_all(bytes).expect("written");
        }
        let loaded = load(&file, 3, None).expect("readable").expect("this format");
        assert_eq!((loaded.table.rows.len(), loaded.dropped, loaded.end), (0, 1, BLOCK));
    }
}
