//! The names of one directory, sorted as entries are: by bytes, with `/` appended to the names of
//! directories.
//!
//! DirNames are stored in one arena, without an allocation for each name. An arena over its budget is sorted
//! and written to the spill file as a run. Runs are merged during reading, so memory does not grow with the
//! directory.

use super::spill::{Extent, Spill};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;

/// What a name stands for, as far as the directory entry says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum NameKind {
    /// A regular file.
    File = 0,
    /// A directory. Its name ends in `/`.
    Dir = 1,
    /// A symbolic link that is kept or whose target is a file.
    Link = 2,
    /// A name that cannot be an entry. The walk finds the reason when it reaches the name.
    Odd = 3,
}

impl NameKind {
    fn from_byte(b: u8) -> Self {
        match b {
            0 => NameKind::File,
            1 => NameKind::Dir,
            2 => NameKind::Link,
            _ => NameKind::Odd,
        }
    }
}

/// The bytes before every name: length u16, kind u8.
const HEAD: usize = 3;
/// The read buffer of one run, in bytes.
const RUN_BUFFER_BYTES: usize = 64 << 10;

/// Collects the names of one directory, in any order.
#[derive(Debug, Default)]
pub struct DirNamesBuilder {
    arena: Vec<u8>,
    at: Vec<u32>,
    runs: Vec<Extent>,
}

/// The names of one directory, read in order.
#[derive(Debug)]
pub enum DirNames {
    /// All names are in memory.
    Memory {
        /// DirNames with their heads.
        arena: Vec<u8>,
        /// Offsets into the arena, in order.
        at: Vec<u32>,
        /// The index of the next name.
        next: usize,
    },
    /// The names are merged from runs in the spill file.
    Runs(Merge),
}

fn name_at(arena: &[u8], at: u32) -> (&[u8], NameKind) {
    let at = at as usize;
    let len = usize::from(u16::from_le_bytes([arena[at], arena[at + 1]]));
    (&arena[at + HEAD..at + HEAD + len], NameKind::from_byte(arena[at + 2]))
}

impl DirNamesBuilder {
    /// Returns the memory in use, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.arena.len() + self.at.len() * size_of::<u32>()
    }

    /// Adds a name, with a `/` at its end if it is a directory.
    ///
    /// # Errors
    /// When a run cannot be written.
    pub fn push(&mut self, name: &[u8], kind: NameKind, budget: usize, spill: &mut Spill) -> io::Result<()> {
        let len = u16::try_from(name.len())
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "a name is longer than 64 KiB"))?;
        if self.memory_bytes() + HEAD + name.len() > budget.min(u32::MAX as usize) && !self.at.is_empty() {
            self.flush(spill)?;
        }
        self.at.push(u32::try_from(self.arena.len()).unwrap_or(u32::MAX));
        self.arena.extend_from_slice(&len.to_le_bytes());
        self.arena.push(kind as u8);
        self.arena.extend_from_slice(name);
        Ok(())
    }

    fn sort(&mut self) {
        let arena = &self.arena;
        self.at.sort_unstable_by(|&a, &b| name_at(arena, a).0.cmp(name_at(arena, b).0));
    }

    fn flush(&mut self, spill: &mut Spill) -> io::Result<()> {
        self.sort();
        let arena = &self.arena;
        let run = spill.write_run(self.at.iter().map(|&at| {
            let end = at as usize + HEAD + name_at(arena, at).0.len();
            &arena[at as usize..end]
        }))?;
        self.runs.push(run);
        self.arena.clear();
        self.at.clear();
        Ok(())
    }

    /// Sorts the names.
    ///
    /// # Errors
    /// When the last run cannot be written or the first names cannot be read back.
    pub fn finish(mut self, spill: &mut Spill) -> io::Result<DirNames> {
        if self.runs.is_empty() {
            self.sort();
            self.arena.shrink_to_fit();
            return Ok(DirNames::Memory { arena: self.arena, at: self.at, next: 0 });
        }
        self.flush(spill)?;
        Merge::new(std::mem::take(&mut self.runs), spill).map(DirNames::Runs)
    }
}

impl DirNames {
    /// Returns the memory in use, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        match self {
            DirNames::Memory { arena, at, .. } => arena.len() + at.len() * size_of::<u32>(),
            DirNames::Runs(m) => m.runs.len() * RUN_BUFFER_BYTES,
        }
    }

    /// Returns the end of its runs in the spill file; 0 for names in memory.
    #[must_use]
    pub fn spill_end(&self) -> u64 {
        match self {
            DirNames::Memory { .. } => 0,
            DirNames::Runs(m) => m.end,
        }
    }

    /// Moves the names that are left to the spill file.
    ///
    /// # Errors
    /// When the run cannot be written.
    pub fn spill(&mut self, spill: &mut Spill) -> io::Result<()> {
        if let DirNames::Memory { arena, at, next } = self {
            let run = spill.write_run(at[*next..].iter().map(|&at| {
                let end = at as usize + HEAD + name_at(arena, at).0.len();
                &arena[at as usize..end]
            }))?;
            *self = DirNames::Runs(Merge::new(vec![run], spill)?);
        }
        Ok(())
    }

    /// Writes the next name to `out` and returns its kind; `None` at the end.
    ///
    /// # Errors
    /// When a run cannot be read back.
    pub fn next(&mut self, out: &mut Vec<u8>, spill: &Spill) -> io::Result<Option<NameKind>> {
        match self {
            DirNames::Memory { arena, at, next } => {
                let Some(&i) = at.get(*next) else { return Ok(None) };
                *next += 1;
                let (name, kind) = name_at(arena, i);
                out.clear();
                out.extend_from_slice(name);
                Ok(Some(kind))
            }
            DirNames::Runs(m) => m.next(out, spill),
        }
    }
}

/// A run of sorted names that is being read.
#[derive(Debug)]
struct Run {
    left: Extent,
    buf: Vec<u8>,
    at: usize,
}

impl Run {
    fn next(&mut self, spill: &Spill) -> io::Result<Option<(Vec<u8>, NameKind)>> {
        if self.buf.len() - self.at < HEAD + usize::from(u16::MAX) && self.left.len > 0 {
            self.buf.drain(..self.at);
            self.at = 0;
            spill.read_front(&mut self.left, RUN_BUFFER_BYTES, &mut self.buf)?;
        }
        if self.at == self.buf.len() {
            return Ok(None);
        }
        let (name, kind) = name_at(&self.buf, u32::try_from(self.at).unwrap_or(u32::MAX));
        let found = (name.to_vec(), kind);
        self.at += HEAD + found.0.len();
        Ok(Some(found))
    }
}

/// Merges runs by name.
#[derive(Debug)]
pub struct Merge {
    runs: Vec<Run>,
    heap: BinaryHeap<Reverse<(Vec<u8>, NameKind, usize)>>,
    end: u64,
}

impl Merge {
    fn new(extents: Vec<Extent>, spill: &Spill) -> io::Result<Self> {
        let end = extents.iter().map(|e| e.offset + e.len).max().unwrap_or(0);
        let mut runs: Vec<Run> =
            extents.into_iter().map(|left| Run { left, buf: Vec::new(), at: 0 }).collect();
        let mut heap = BinaryHeap::with_capacity(runs.len());
        for (i, run) in runs.iter_mut().enumerate() {
            if let Some((name, kind)) = run.next(spill)? {
                heap.push(Reverse((name, kind, i)));
            }
        }
        Ok(Merge { runs, heap, end })
    }

    fn next(&mut self, out: &mut Vec<u8>, spill: &Spill) -> io::Result<Option<NameKind>> {
        let Some(Reverse((name, kind, i))) = self.heap.pop() else { return Ok(None) };
        if let Some((name, kind)) = self.runs[i].next(spill)? {
            self.heap.push(Reverse((name, kind, i)));
        }
        out.clear();
        out.extend_from_slice(&name);
        Ok(Some(kind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(mut n: DirNames, spill: &Spill) -> Vec<(Vec<u8>, NameKind)> {
        let (mut out, mut name) = (Vec::new(), Vec::new());
        while let Some(kind) = n.next(&mut name, spill).expect("read") {
            out.push((name.clone(), kind));
        }
        out
    }

    fn build(names: &[String], budget: usize, spill: &mut Spill) -> DirNames {
        let mut b = DirNamesBuilder::default();
        for n in names {
            let kind = if n.ends_with('/') { NameKind::Dir } else { NameKind::File };
            b.push(n.as_bytes(), kind, budget, spill).expect("push");
        }
        b.finish(spill).expect("finish")
    }

    #[test]
    fn spilled_and_evicted_names_come_back_like_sorted_ones() {
        let dir = tempfile::tempdir().expect("tempdir");
        let mut spill = Spill::new(dir.path()).expect("spill");
        let names: Vec<String> = (0..5000u32)
            .map(|i| {
                let h = fletch_core::Hash::of(&i.to_le_bytes()).short();
                if i % 7 == 0 { format!("{h}/") } else { format!("{h}{}", "x".repeat(i as usize % 90)) }
            })
            .collect();
        let mut want: Vec<Vec<u8>> = names.iter().map(|n| n.clone().into_bytes()).collect();
        want.sort();
        for budget in [usize::MAX, 100_000, 4_000, 1] {
            let n = build(&names, budget, &mut spill);
            assert_eq!(matches!(n, DirNames::Memory { .. }), budget == usize::MAX);
            let got = all(n, &spill);
            assert!(
                got.iter().all(|(n, k)| (n.last() == Some(&b'/')) == (*k == NameKind::Dir)),
                "kinds follow their names"
            );
            assert_eq!(got.into_iter().map(|(n, _)| n).collect::<Vec<_>>(), want, "budget {budget}");
        }
        let mut n = build(&names, usize::MAX, &mut spill);
        let mut name = Vec::new();
        for w in &want[..1234] {
            n.next(&mut name, &spill).expect("read").expect("a name");
            assert_eq!(&name, w);
        }
        n.spill(&mut spill).expect("evict");
        assert!(n.memory_bytes() < 100_000 && n.spill_end() > 0);
        assert_eq!(all(n, &spill).into_iter().map(|(n, _)| n).collect::<Vec<_>>(), want[1234..]);
    }
}
