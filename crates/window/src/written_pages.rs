//! Pages of a private mapping of which a program has made a copy by writing into them.

use memmap2::{MmapMut, UncheckedAdvice};
use std::{fs::File, os::unix::fs::FileExt as _};

/// The bytes of an entry of `/proc/self/pagemap`.
const ENTRY_BYTES: usize = 8;
/// The page is that of the file, and no copy.
const OF_FILE: u64 = 1 << 61;
/// The page is swapped out, or in memory.
const SWAPPED: u64 = 1 << 62;
const PRESENT: u64 = 1 << 63;
/// How many entries are read at once.
const ENTRIES: usize = 256;

/// Finds the copied pages of this process's mappings.
///
/// A forked child would read its parent's table. It sends no request with its parent's window, so no server
/// writes to a place that the child gave back.
#[derive(Debug)]
pub struct WrittenPages {
    /// The kernel's table of this process's pages. `None` where the system hides it: then every page of a
    /// place is taken for a copy.
    table: Option<File>,
    page_bytes: usize,
}

impl WrittenPages {
    pub fn of_this_process() -> Self {
        WrittenPages { table: File::open("/proc/self/pagemap").ok(), page_bytes: rustix::param::page_size() }
    }

    /// Drops the copies of the pages of a part of a mapping, which begins at a page. Returns whether there is
    /// none left.
    pub fn discard(&self, map: &MmapMut, offset: u32, len: u32) -> bool {
        let (offset, len) = (offset as usize, len.max(1) as usize);
        if self.is_clean(map, offset, len) == Some(true) {
            return true;
        }
        let whole = len.next_multiple_of(self.page_bytes);
        discard(map, offset, whole.min(map.len().saturating_sub(offset)))
    }

    /// Whether no page of the part is a copy. `None`: nobody knows.
    fn is_clean(&self, map: &MmapMut, offset: usize, len: usize) -> Option<bool> {
        let table = self.table.as_ref()?;
        let first = (map.as_ptr() as usize + offset) / self.page_bytes;
        let pages = len.div_ceil(self.page_bytes);
        let mut buffer = [0; ENTRIES * ENTRY_BYTES];
        let mut at = 0;
        while at < pages {
            let entries = buffer.get_mut(..(pages - at).min(ENTRIES) * ENTRY_BYTES)?;
            table.read_exact_at(entries, ((first + at) * ENTRY_BYTES) as u64).ok()?;
            let is_copy = |entry: &[u8]| match <[u8; ENTRY_BYTES]>::try_from(entry).map(u64::from_le_bytes) {
                Ok(entry) => entry & (PRESENT | SWAPPED) != 0 && entry & OF_FILE == 0,
                Err(_) => true,
            };
            if entries.chunks(ENTRY_BYTES).any(is_copy) {
                return Some(false);
            }
            at += entries.len() / ENTRY_BYTES;
        }
        Some(true)
    }
}

/// Gives up the pages of a part of a private mapping. The next read gets them from the file. Returns whether
/// the system did it.
#[expect(unsafe_code, reason = "the bytes of the mapping change")]
fn discard(map: &MmapMut, offset: usize, len: usize) -> bool {
    // SAFETY: the part belongs to a place that is being dropped, so no reference to its bytes is left.
    unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, len) }.is_ok()
}
