//! Remembers which entries were proven to lie where their layout says.
//!
//! A chunk in memory matches its hash, and the placements match the layout's id. So an entry that was hashed
//! once at its placement need not be hashed there again. Parts of chunks that are read from disk are hashed
//! each time.

use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// 64-bit words of a page: 65,536 entries, 8 KiB.
const PAGE_WORDS: usize = 1024;
const PAGE_ENTRIES: u64 = PAGE_WORDS as u64 * 64;
/// A version with more entries is not remembered. Smaller ones take at most 2 MiB.
const ENTRIES_MAX: u64 = 1 << 24;

type Page = Box<[AtomicU64]>;

/// A bit for each entry of a version in one layout. A page is allocated at its first write.
#[derive(Debug)]
pub struct ProvenFiles {
    pages: Box<[OnceLock<Page>]>,
}

impl ProvenFiles {
    /// Creates the set for a version of `entries` entries, empty.
    #[must_use]
    pub fn new(entries: u64) -> Self {
        let pages = if entries > ENTRIES_MAX { 0 } else { entries.div_ceil(PAGE_ENTRIES) };
        ProvenFiles { pages: (0..pages).map(|_| OnceLock::new()).collect() }
    }

    fn bit_of(ordinal: u64) -> (usize, usize, u64) {
        // There are at most 2^8 pages.
        let page = usize::try_from(ordinal / PAGE_ENTRIES).unwrap_or(usize::MAX);
        (page, (ordinal % PAGE_ENTRIES / 64) as usize, 1 << (ordinal % 64))
    }

    /// Returns whether the entry was proven.
    #[must_use]
    pub fn contains(&self, ordinal: u64) -> bool {
        let (page, word, bit) = Self::bit_of(ordinal);
        self.pages.get(page).and_then(OnceLock::get).is_some_and(|p| p[word].load(Relaxed) & bit != 0)
    }

    /// Notes that the entry was hashed at its placement, and has the hash that the version says.
    pub fn insert(&self, ordinal: u64) {
        let (page, word, bit) = Self::bit_of(ordinal);
        let Some(page) = self.pages.get(page) else { return };
        let page = page.get_or_init(|| (0..PAGE_WORDS).map(|_| AtomicU64::new(0)).collect());
        page[word].fetch_or(bit, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_is_known_and_nothing_else() {
        let proven = ProvenFiles::new(200_000);
        let noted = [0, 1, 63, 64, 65_535, 65_536, 199_999];
        noted.iter().for_each(|&o| proven.insert(o));
        let known: Vec<u64> = (0..300_000).filter(|&o| proven.contains(o)).collect();
        assert_eq!(known, noted);
        let made = proven.pages.iter().filter(|p| p.get().is_some()).count();
        assert_eq!((proven.pages.len(), made), (4, 3), "only what is written to takes memory");
    }

    #[test]
    fn of_too_many_entries_nothing_is_remembered() {
        let proven = ProvenFiles::new(ENTRIES_MAX + 1);
        proven.insert(7);
        proven.insert(u64::MAX);
        assert!(!proven.contains(7) && !proven.contains(u64::MAX) && proven.pages.is_empty());
    }
}
