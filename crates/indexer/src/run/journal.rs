//! Journals: what a stopped run has finished, so that the next run does not repeat it.
//!
//! A journal is a directory of segment files, each a log of `fletch_core::record`. It holds nothing that the
//! dataset cannot give again. So it is never synced to disk, and a damaged segment costs only reading again.
//! `index` journals files in path order ([`files`]); `pack` journals chunks by fingerprint ([`chunks`]).

pub mod chunks;
pub mod files;

use crate::failure::Failure;
use fletch_core::record;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A segment that has reached this size is followed by a new one. Short segments take little memory to read.
const SEGMENT_BYTES: usize = 4 << 20;

/// Appends records to the segments of a journal.
#[derive(Debug)]
struct SegmentWriter {
    dir: PathBuf,
    next: u32,
    /// The segment at hand, and how many bytes it has.
    file: Option<(File, usize)>,
}

impl SegmentWriter {
    /// Writes segments from number `next` on.
    fn new(dir: PathBuf, next: u32) -> Self {
        SegmentWriter { dir, next, file: None }
    }

    /// Appends a record. A new segment begins with the record `first`, if there is one.
    fn append(&mut self, kind: u8, payload: &[u8], first: Option<(u8, &[u8])>) -> io::Result<()> {
        let mut out = Vec::with_capacity(payload.len() + 64);
        let (file, written) = match &mut self.file {
            Some((file, written)) if *written < SEGMENT_BYTES => (file, written),
            slot => {
                out.extend_from_slice(&record::file_header());
                if let Some((kind, payload)) = first {
                    record::append(&mut out, kind, payload);
                }
                let file = File::create_new(segment(&self.dir, self.next))?;
                self.next += 1;
                let (file, written) = slot.insert((file, 0));
                (file, written)
            }
        };
        record::append(&mut out, kind, payload);
        file.write_all(&out)?;
        *written += out.len();
        Ok(())
    }
}

fn segment(dir: &Path, number: u32) -> PathBuf {
    dir.join(format!("{number:08}.log"))
}

/// The numbers of the segments in `dir`, ascending.
fn segments(dir: &Path) -> io::Result<Vec<u32>> {
    let mut numbers: Vec<u32> = Vec::new();
    for item in fs::read_dir(dir)? {
        let name = item?.file_name();
        numbers.extend(name.to_str().and_then(|n| n.strip_suffix(".log")?.parse::<u32>().ok()));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Removes a directory of the state directory, if it exists.
///
/// # Errors
/// When it exists and cannot be removed.
pub fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// The failure of a run that cannot write its journal.
#[must_use]
pub fn write_failed(e: &io::Error) -> Failure {
    Failure::io("cannot write the journal", e).hint("free some space, or give another --state-dir")
}
