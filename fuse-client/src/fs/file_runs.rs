//! Detects programs that read small files in the order of the version, as `cp -r` and a data set without
//! shuffling do. For them the mount pushes the next files into the kernel's page cache.
//!
//! The kernel sends no request for a file that was pushed. So every [`MARKER_EVERY`]th file is left out, and
//! the READ of it tells how far the program is.
//!
//! ```text
//!   read            pushed                                   the next push, after the READ of the marker
//!   … ■ ■ ■ ■ ■ ■ ■ □ □ □ □ □ □ □ □ marker □ □ □ □ □ □ □ marker ▷ ▷ ▷ ▷ ▷ ▷ ▷ ▷
//! ```

use parking_lot::Mutex;
use std::ops::Range;

/// The runs that are followed at once: programs, or threads with parts of their own. The oldest one leaves.
const RUNS_MAX: usize = 8;
/// The files in a row after which a program counts as one that reads in order.
const RUN_FILES_MIN: u32 = 8;
/// How many files are pushed beyond the last READ.
const AHEAD_FILES: u64 = 64;
/// Each file with an ordinal that is a multiple of this is not pushed.
const MARKER_EVERY: u64 = 32;
/// At the beginning of a run, the program reads so many files while the first ones are pushed.
const LEAD_FILES: u64 = 16;
/// How far from its expected place a READ may be: links lie between files, and threads overtake each other.
const REORDER_FILES_MAX: u64 = 16;
/// For how many READs nothing is pushed after the kernel took no page.
const READS_WITHOUT: u32 = 1024;

#[derive(Debug, Clone, Copy)]
struct Run {
    /// The ordinal after the last file that was read.
    next: u64,
    files: u32,
    /// The end of what was given out to be pushed.
    ahead: u64,
    /// The number of the READ that was its last.
    used: u64,
}

#[derive(Debug, Default)]
struct Inner {
    runs: Vec<Run>,
    reads: u64,
    /// Up to which READ nothing is pushed.
    quiet_until: u64,
}

/// The runs of one mount.
#[derive(Debug, Default)]
pub struct FileRuns(Mutex<Inner>);

/// Returns whether a file is never pushed.
#[must_use]
pub fn is_marker(ordinal: u64) -> bool {
    ordinal.is_multiple_of(MARKER_EVERY)
}

impl FileRuns {
    /// Records the READ of the beginning of a file. Returns the files to push now, without markers left out.
    pub fn read(&self, ordinal: u64) -> Option<Range<u64>> {
        let mut inner = self.0.lock();
        inner.reads += 1;
        let (reads, is_quiet) = (inner.reads, inner.reads < inner.quiet_until);
        let near = |run: &&mut Run| {
            let from = run.next.saturating_sub(REORDER_FILES_MAX);
            (from..=run.next.max(run.ahead) + REORDER_FILES_MAX).contains(&ordinal)
        };
        let Some(run) = inner.runs.iter_mut().find(near) else {
            let new = Run { next: ordinal + 1, files: 1, ahead: 0, used: reads };
            if inner.runs.len() < RUNS_MAX {
                inner.runs.push(new);
            } else if let Some(oldest) = inner.runs.iter_mut().min_by_key(|run| run.used) {
                *oldest = new;
            }
            return None;
        };
        run.used = reads;
        if ordinal < run.next {
            // A thread that was overtaken, or a program that goes backwards.
            return None;
        }
        run.next = ordinal + 1;
        run.files = run.files.saturating_add(1);
        if is_quiet || run.files < RUN_FILES_MIN {
            return None;
        }
        let end = run.next.saturating_add(AHEAD_FILES);
        // At a marker, or where the program has caught up.
        let begin = if run.ahead > run.next { run.ahead } else { run.next + LEAD_FILES };
        if end < begin + MARKER_EVERY / 2 {
            return None;
        }
        run.ahead = end;
        Some(begin..end)
    }

    /// Records that the kernel did not take what was pushed: it does not know the files yet.
    pub fn not_taken(&self) {
        let mut inner = self.0.lock();
        inner.quiet_until = inner.reads + u64::from(READS_WITHOUT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_pushed_once_and_each_marker_moves_it_on() {
        let runs = FileRuns::default();
        let mut pushed = vec![false; 1000];
        let mut reads = 0;
        for ordinal in 0..900_u64 {
            if pushed[ordinal as usize] {
                continue;
            }
            reads += 1;
            for ahead in runs.read(ordinal).into_iter().flatten() {
                assert!(ahead > ordinal && !pushed[ahead as usize], "{ahead} after {ordinal}");
                pushed[ahead as usize] = !is_marker(ahead);
            }
        }
        assert!(reads < 24 + 900 / 32 + 5, "{reads} READs of 900 files");
    }

    #[test]
    fn random_reads_and_reads_backwards_push_nothing() {
        let runs = FileRuns::default();
        assert!((0..5000).rev().all(|ordinal| runs.read(ordinal).is_none()));
        // A fixed sequence that looks random, by a linear congruential generator.
        let mut state = 7_u32;
        for _ in 0..20_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            assert_eq!(runs.read(u64::from(state >> 8) % 100_000), None);
        }
    }

    #[test]
    fn threads_that_overtake_each_other_are_one_run_and_programs_have_their_own() {
        let runs = FileRuns::default();
        let swapped = (0..40_u64).map(|n| n ^ 1);
        let pushes: Vec<_> = swapped.filter_map(|n| runs.read(n)).collect();
        assert!(!pushes.is_empty());
        let mut ends = pushes.windows(2).map(|two| (two[0].end, two[1].start));
        assert!(ends.all(|(end, start)| end <= start), "{pushes:?}");
        let runs = FileRuns::default();
        let begun = |n: &u64| [0, 10_000, 20_000].iter().filter_map(|of| runs.read(of + n)).count();
        assert_eq!((0..8).map(|n| begun(&n)).sum::<usize>(), 3);
    }

    #[test]
    fn what_the_kernel_does_not_take_is_not_tried_soon_again() {
        let runs = FileRuns::default();
        let first = (0..).find(|n| runs.read(*n).is_some()).expect("a run");
        runs.not_taken();
        let again = (first + 1..).find(|n| runs.read(*n).is_some()).expect("again");
        assert_eq!(again - first, u64::from(READS_WITHOUT));
    }
}
