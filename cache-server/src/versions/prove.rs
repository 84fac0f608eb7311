//! Which entries lie where their layout says.
//!
//! A chunk in memory was verified by its name, and a layout's placements by theirs, so that the bytes of an entry that were
//! once hashed there are its bytes ever after. What is read from a disk in parts is hashed each time all the same.

use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// Words of a page: 65,536 entries, 8 KiB.
const PAGE_WORDS: usize = 1024;
const PAGE_ENTRIES: u64 = PAGE_WORDS as u64 * 64;
/// Of versions with more entries nothing is remembered; of smaller ones at most 2 MiB.
const ENTRIES_MAX: u64 = 1 << 24;

type Page = Box<[AtomicU64]>;

/// A bit for each entry of one version in one layout; pages are made when they are first written to.
#[derive(Debug)]
pub struct ProvenFiles {
    pages: Box<[OnceLock<Page>]>,
}

impl ProvenFiles {
    /// Nothing of so many entries is proved.
    #[must_use]
    pub fn new(entries: u64) -> Self {
        let pages = if entries > ENTRIES_MAX { 0 } else { entries.div_ceil(PAGE_ENTRIES) };
        ProvenFiles { pages: (0..pages).map(|_| OnceLock::new()).collect() }
    }

    fn place(ordinal: u64) -> (usize, usize, u64) {
        // There are 2^8 pages at most.
        let page = usize::try_from(ordinal / PAGE_ENTRIES).unwrap_or(usize::MAX);
        (page, (ordinal % PAGE_ENTRIES / 64) as usize, 1 << (ordinal % 64))
    }

    /// Whether the entry was hashed where its layout says, and is what its version says.
    #[must_use]
    pub fn has(&self, ordinal: u64) -> bool {
        let (page, word, bit) = Self::place(ordinal);
        self.pages.get(page).and_then(OnceLock::get).is_some_and(|p| p[word].load(Relaxed) & bit != 0)
    }

    /// The entry was.
    pub fn note(&self, ordinal: u64) {
        let (page, word, bit) = Self::place(ordinal);
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
        noted.iter().for_each(|&o| proven.note(o));
        let known: Vec<u64> = (0..300_000).filter(|&o| proven.has(o)).collect();
        assert_eq!(known, noted);
        let made = proven.pages.iter().filter(|p| p.get().is_some()).count();
        assert_eq!((proven.pages.len(), made), (4, 3), "only what is written to takes memory");
    }

    #[test]
    fn of_too_many_entries_nothing_is_remembered() {
        let proven = ProvenFiles::new(ENTRIES_MAX + 1);
        proven.note(7);
        proven.note(u64::MAX);
        assert!(!proven.has(7) && !proven.has(u64::MAX) && proven.pages.is_empty());
    }
}
