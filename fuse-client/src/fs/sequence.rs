//! Who reads a large file from front to back: a small, bounded memory of where readers are.

use moka::sync::Cache;

/// Files watched at once; forgetting one costs one slice of read-ahead.
const FILES_MAX: u64 = 1024;
/// How far from the expected place a READ may begin: the kernel's own read-ahead sends several
/// at once, and they may overtake one another.
const SLACK: u64 = 2 << 20;
/// READs in a row after which a reader counts as sequential.
const RUN: u32 = 2;

#[derive(Debug, Clone, Copy)]
struct Place {
    end: u64,
    run: u32,
    /// The last slice that was entered in this run.
    slice: Option<u64>,
}

/// Where readers of large files are.
#[derive(Debug)]
pub struct Sequence {
    places: Cache<u64, Place>,
}

impl Default for Sequence {
    fn default() -> Self {
        Sequence { places: Cache::new(FILES_MAX) }
    }
}

impl Sequence {
    /// Notes a READ of `offset..end` that ends in slice `slice`; whether a run of READs has just
    /// entered that slice.
    pub fn enters(&self, ino: u64, offset: u64, end: u64, slice: u64) -> bool {
        let mut place = match self.places.get(&ino) {
            Some(p) if offset + SLACK >= p.end && offset <= p.end + SLACK => {
                Place { end: p.end.max(end), run: p.run.saturating_add(1), slice: p.slice }
            }
            _ => Place { end, run: u32::from(offset == 0), slice: None },
        };
        let enters = place.run >= RUN && place.slice.is_none_or(|s| slice > s);
        if enters {
            place.slice = Some(slice);
        }
        self.places.insert(ino, place);
        enters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: u64 = 1 << 20;

    #[test]
    fn a_run_enters_each_slice_once_and_a_jump_ends_it() {
        let s = Sequence::default();
        let read = |ino, at| s.enters(ino, at * M, (at + 1) * M, at / 4);
        assert!(!read(7, 0), "one READ is no run");
        assert!(read(7, 1));
        // Two READs of one read-ahead window, the second first.
        assert!(!read(7, 3));
        assert!(!read(7, 2));
        assert!(read(7, 4), "the next slice");
        assert!(!read(7, 40));
        assert!(!read(7, 9));
        assert!(!read(8, 100), "another file has its own place");
    }

    #[test]
    fn memory_is_bounded() {
        let s = Sequence::default();
        for ino in 0..10 * FILES_MAX {
            s.enters(ino, 0, 1, 0);
        }
        s.places.run_pending_tasks();
        assert!(s.places.entry_count() <= FILES_MAX);
    }
}
