//! Tells programs that read a large file from front to back from those that read it here and there, with a
//! small, bounded table of read positions.

use moka::sync::Cache;

/// The most files in the table. To forget a file costs its reader one slice of prefetch.
const FILES_MAX: u64 = 1024;
/// How far from the expected position a READ may start: the kernel's read-ahead sends several READs at once,
/// and they may arrive out of order.
const REORDER_BYTES_MAX: u64 = 2 << 20;
/// The READs in a row after which slices are prefetched for a reader.
const RUN_READS_MIN: u32 = 2;
/// A reader that began inside a file and has not come farther may stop soon: it gets what it asks for.
const SCATTERED_BYTES_MAX: u64 = 2 << 20;

#[derive(Debug, Clone, Copy)]
struct ReadPosition {
    begin: u64,
    end: u64,
    run: u32,
    /// The last slice that this run entered.
    slice: Option<u64>,
}

/// How a program reads a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadPattern {
    /// Whether a run of READs has just entered its slice.
    pub enters_slice: bool,
    /// Whether the program seems to read here and there.
    pub is_scattered: bool,
}

/// The read positions in large files, by inode.
#[derive(Debug)]
pub struct SequentialReads {
    positions: Cache<u64, ReadPosition>,
}

impl Default for SequentialReads {
    fn default() -> Self {
        SequentialReads { positions: Cache::new(FILES_MAX) }
    }
}

impl SequentialReads {
    /// Records a READ of `offset..end` that ends in slice `slice`. Returns how the program reads the file.
    pub fn note(&self, ino: u64, offset: u64, end: u64, slice: u64) -> ReadPattern {
        let mut position = match self.positions.get(&ino) {
            Some(p) if offset + REORDER_BYTES_MAX >= p.end && offset <= p.end + REORDER_BYTES_MAX => {
                let begin = p.begin.min(offset);
                ReadPosition { begin, end: p.end.max(end), run: p.run.saturating_add(1), slice: p.slice }
            }
            _ => ReadPosition { begin: offset, end, run: u32::from(offset == 0), slice: None },
        };
        let is_scattered = position.begin > 0 && position.end - position.begin <= SCATTERED_BYTES_MAX;
        let is_run = position.run >= RUN_READS_MIN && !is_scattered;
        let enters_slice = is_run && position.slice.is_none_or(|s| slice > s);
        if enters_slice {
            position.slice = Some(slice);
        }
        self.positions.insert(ino, position);
        ReadPattern { enters_slice, is_scattered }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: u64 = 1 << 20;

    #[test]
    fn a_run_enters_each_slice_once_and_a_jump_ends_it() {
        let s = SequentialReads::default();
        let read = |ino, at| s.note(ino, at * M, (at + 1) * M, at / 4).enters_slice;
        assert!(!read(7, 0), "one READ is no run");
        assert!(read(7, 1));
        // Two READs of one read-ahead window, the second first.
        assert!(!read(7, 3));
        assert!(!read(7, 2));
        assert!(read(7, 4), "the next slice");
        assert!(!read(7, 40));
        assert!(!read(7, 9));
        assert!(!read(8, 100), "another file has its own position");
    }

    #[test]
    fn who_begins_at_the_front_or_comes_far_is_not_scattered() {
        let s = SequentialReads::default();
        let read = |ino, at: u64, n: u64| s.note(ino, at, at + n, at / (4 * M)).is_scattered;
        assert!(!read(7, 0, 4096) && !read(7, 4096, 4096), "from the front");
        assert!(read(7, 9 * M, 4096), "a jump");
        assert!(read(7, 50 * M, M) && read(7, 51 * M, M), "a window of two megabytes");
        assert!(!read(7, 52 * M, 4096), "it came far");
        assert!(read(7, 20 * M, 4096), "another jump");
        assert!(read(8, 4096, 4096), "another file");
    }

    #[test]
    fn memory_is_bounded() {
        let s = SequentialReads::default();
        for ino in 0..10 * FILES_MAX {
            s.note(ino, 0, 1, 0);
        }
        s.positions.run_pending_tasks();
        assert!(s.positions.entry_count() <= FILES_MAX);
    }
}
