//! The spill file: one unnamed temporary file for data that does not fit in memory, written as extents.

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A range of the spill file that is still to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Where the range begins, in bytes.
    pub offset: u64,
    /// The number of bytes left.
    pub len: u64,
}

/// The spill file. It has no name, so the system removes it however the process ends.
#[derive(Debug)]
pub struct Spill {
    file: File,
    end: u64,
}

impl Spill {
    /// Creates a spill file in `dir`.
    ///
    /// # Errors
    /// When the file cannot be created.
    pub fn new(dir: &Path) -> io::Result<Self> {
        Ok(Spill { file: tempfile::tempfile_in(dir)?, end: 0 })
    }

    /// Appends the items, one after another, and returns their extent.
    ///
    /// # Errors
    /// When the bytes cannot be written.
    pub fn write_run<'a>(&mut self, items: impl Iterator<Item = &'a [u8]>) -> io::Result<Extent> {
        let offset = self.end;
        self.file.seek(SeekFrom::Start(offset))?;
        let mut out = BufWriter::with_capacity(1 << 20, &self.file);
        let mut len = 0;
        for item in items {
            out.write_all(item)?;
            len += item.len() as u64;
        }
        out.flush()?;
        drop(out);
        self.end = offset + len;
        Ok(Extent { offset, len })
    }

    /// Reads up to `max` bytes from the front of `extent` and appends them to `out`.
    ///
    /// # Errors
    /// When the bytes cannot be read back.
    pub fn read_front(&self, extent: &mut Extent, max: usize, out: &mut Vec<u8>) -> io::Result<()> {
        let n = usize::try_from(extent.len).unwrap_or(max).min(max.max(1 << 17));
        let start = out.len();
        out.resize(start + n, 0);
        self.file.read_exact_at(&mut out[start..], extent.offset)?;
        extent.offset += n as u64;
        extent.len -= n as u64;
        Ok(())
    }

    /// Truncates the file to `end` bytes.
    ///
    /// # Errors
    /// When the file cannot be truncated.
    pub fn truncate(&mut self, end: u64) -> io::Result<()> {
        if end < self.end {
            self.file.set_len(end)?;
            self.end = end;
        }
        Ok(())
    }
}
