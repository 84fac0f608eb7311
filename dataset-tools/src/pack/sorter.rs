//! Sorts rows of one length, as bytes, in bounded memory.
//!
//! Rows beyond the bound are written out in sorted runs and merged during reading. The result can be read
//! many times.

use crate::source::spill::{Extent, Spill};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::path::Path;

/// The read buffer of one run, in bytes.
const RUN_BUFFER_BYTES: usize = 128 << 10;

/// Collects rows of `N` bytes, in any order.
#[derive(Debug)]
pub struct Sorter<const N: usize> {
    spill: Spill,
    runs: Vec<Extent>,
    rows: Vec<[u8; N]>,
    rows_max: usize,
}

/// The sorted rows.
#[derive(Debug)]
pub struct Sorted<const N: usize> {
    spill: Spill,
    runs: Vec<Extent>,
    rows: Vec<[u8; N]>,
}

impl<const N: usize> Sorter<N> {
    /// Keeps at most `bytes_max` bytes of rows in memory. Runs go to `scratch`.
    ///
    /// # Errors
    /// When the scratch file cannot be created.
    pub fn new(scratch: &Path, bytes_max: usize) -> io::Result<Self> {
        let spill = Spill::new(scratch)?;
        Ok(Sorter { spill, runs: Vec::new(), rows: Vec::new(), rows_max: (bytes_max / N).max(1) })
    }

    /// Adds a row.
    ///
    /// # Errors
    /// When a run cannot be written.
    pub fn push(&mut self, row: [u8; N]) -> io::Result<()> {
        if self.rows.len() == self.rows_max {
            self.write_run()?;
        }
        self.rows.push(row);
        Ok(())
    }

    fn write_run(&mut self) -> io::Result<()> {
        self.rows.sort_unstable();
        self.runs.push(self.spill.write_run(self.rows.iter().map(|r| &r[..]))?);
        self.rows.clear();
        Ok(())
    }

    /// Sorts the rows.
    ///
    /// # Errors
    /// When a run cannot be written.
    pub fn finish(mut self) -> io::Result<Sorted<N>> {
        if self.runs.is_empty() {
            self.rows.sort_unstable();
        } else {
            self.write_run()?;
            self.rows = Vec::new();
        }
        Ok(Sorted { spill: self.spill, runs: self.runs, rows: self.rows })
    }
}

/// A sorted run that is being read.
#[derive(Debug)]
struct Run {
    left: Extent,
    buf: Vec<u8>,
    at: usize,
}

/// Reads sorted rows, from the first one on.
#[derive(Debug)]
pub struct Merge<'a, const N: usize> {
    sorted: &'a Sorted<N>,
    next: usize,
    runs: Vec<Run>,
    heap: BinaryHeap<Reverse<([u8; N], usize)>>,
    primed: bool,
}

impl<const N: usize> Sorted<N> {
    /// Returns a reader of all rows, in order.
    #[must_use]
    pub fn merge(&self) -> Merge<'_, N> {
        let runs = self.runs.iter().map(|&left| Run { left, buf: Vec::new(), at: 0 }).collect();
        Merge { sorted: self, next: 0, runs, heap: BinaryHeap::new(), primed: false }
    }
}

impl<const N: usize> Merge<'_, N> {
    /// Pushes the next row of a run, if there is one, to the heap.
    fn advance(&mut self, which: usize) -> io::Result<()> {
        let run = &mut self.runs[which];
        if run.buf.len() - run.at < N {
            run.buf.drain(..run.at);
            run.at = 0;
            if run.left.len > 0 {
                self.sorted.spill.read_front(&mut run.left, RUN_BUFFER_BYTES, &mut run.buf)?;
            }
        }
        if let Some(row) = run.buf.get(run.at..run.at + N) {
            let mut key = [0; N];
            key.copy_from_slice(row);
            run.at += N;
            self.heap.push(Reverse((key, which)));
        }
        Ok(())
    }

    /// Returns the next row; `None` at the end.
    ///
    /// # Errors
    /// When a run cannot be read.
    pub fn next_row(&mut self) -> io::Result<Option<[u8; N]>> {
        if self.runs.is_empty() {
            let row = self.sorted.rows.get(self.next).copied();
            self.next += 1;
            return Ok(row);
        }
        if !self.primed {
            self.primed = true;
            for which in 0..self.runs.len() {
                self.advance(which)?;
            }
        }
        let Some(Reverse((row, which))) = self.heap.pop() else { return Ok(None) };
        self.advance(which)?;
        Ok(Some(row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// With any memory bound, all rows come back sorted, any number of times.
        #[test]
        fn rows_come_back_in_order(
            rows in proptest::collection::vec(any::<[u8; 5]>(), 0..400),
            kept in 1usize..500,
        ) {
            let dir = tempfile::tempdir().expect("tempdir");
            let mut sorter = Sorter::new(dir.path(), kept * 5).expect("scratch");
            for r in &rows {
                sorter.push(*r).expect("push");
            }
            let sorted = sorter.finish().expect("finish");
            let mut want = rows.clone();
            want.sort_unstable();
            for _ in 0..2 {
                let mut merge = sorted.merge();
                let mut got = Vec::new();
                while let Some(r) = merge.next_row().expect("read") {
                    got.push(r);
                }
                prop_assert_eq!(&got, &want);
            }
        }
    }
}
