//! The journal of `index`: finished files, in path order.
//!
//! Each segment begins with a `run` record that says when the run began. Batches of finished files follow.
//! A run writes `new/` and reads `old/`. At the next start the journal that got further becomes `old/`.

use super::{SegmentWriter, segment, segments};
use crate::failure::Failure;
use crate::run::file_record::{Earlier, FileRecord};
use crate::source::content::Content;
use crate::source::pin::proves_unchanged;
use fletch_core::Hash;
use fletch_core::manifest::Slice;
use fletch_core::manifest::tar::shard::ShardMember;
use fletch_core::record;
use fletch_tables::PinRow;
use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const KIND_RUN: u8 = 1;
const KIND_FILES: u8 = 2;
const BATCH_BYTES: usize = 256 << 10;
const BATCH_AGE: Duration = Duration::from_secs(1);
/// The most slices of one journalled file (2 TB). A longer file does not fit one record and is read again.
const SLICES_MAX: usize = 400_000;

/// Writes a journal of files.
#[derive(Debug)]
pub struct FileJournalWriter {
    segments: SegmentWriter,
    started_ns: u64,
    batch: Vec<u8>,
    flushed: Instant,
}

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(bytes);
}

impl FileJournalWriter {
    /// Starts an empty journal in `dir`, for a run that began at `started_ns`. Removes what `dir` held.
    ///
    /// # Errors
    /// When the directory cannot be removed or created.
    pub fn create(dir: PathBuf, started_ns: u64) -> io::Result<Self> {
        super::remove(&dir)?;
        fs::create_dir_all(&dir)?;
        let segments = SegmentWriter::new(dir, 0);
        Ok(FileJournalWriter { segments, started_ns, batch: Vec::new(), flushed: Instant::now() })
    }

    /// Adds a finished file to the batch, and writes a batch that is large or a second old.
    ///
    /// # Errors
    /// When the state directory cannot be written.
    pub fn push(&mut self, path: &str, pin: &PinRow, content: &Content) -> io::Result<()> {
        let pieces: usize = content.members.iter().map(|m| 2 + m.name.len() / 32 + m.slices.len()).sum();
        if content.slices.len() + pieces > SLICES_MAX {
            return Ok(());
        }
        let b = &mut self.batch;
        put(b, path.as_bytes());
        b.extend_from_slice(&pin.size.to_le_bytes());
        b.push(u8::from(pin.mtime_ns.is_some()) | u8::from(pin.etag.is_some()) << 1);
        b.extend_from_slice(&pin.mtime_ns.unwrap_or(0).to_le_bytes());
        put(b, pin.etag.as_deref().unwrap_or("").as_bytes());
        b.extend_from_slice(content.hash.as_bytes());
        b.extend_from_slice(&u32::try_from(content.slices.len()).unwrap_or(u32::MAX).to_le_bytes());
        for s in &content.slices {
            b.extend_from_slice(s.chunk.as_bytes());
            b.extend_from_slice(&s.len.to_le_bytes());
        }
        b.extend_from_slice(&u32::try_from(content.members.len()).unwrap_or(u32::MAX).to_le_bytes());
        for m in &content.members {
            put(b, m.name.as_bytes());
            b.extend_from_slice(&m.size.to_le_bytes());
            b.extend_from_slice(m.hash.as_bytes());
            b.extend_from_slice(&u32::try_from(m.slices.len()).unwrap_or(u32::MAX).to_le_bytes());
            for s in &m.slices {
                b.extend_from_slice(s.chunk.as_bytes());
                b.extend_from_slice(&s.chunk_offset.to_le_bytes());
                b.extend_from_slice(&s.len.to_le_bytes());
            }
        }
        if self.batch.len() >= BATCH_BYTES || self.flushed.elapsed() >= BATCH_AGE {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes the batch to the segment.
    ///
    /// # Errors
    /// When the state directory cannot be written.
    pub fn flush(&mut self) -> io::Result<()> {
        self.flushed = Instant::now();
        if !self.batch.is_empty() {
            let run = self.started_ns.to_le_bytes();
            self.segments.append(KIND_FILES, &self.batch, Some((KIND_RUN, &run)))?;
            self.batch.clear();
        }
        Ok(())
    }
}

/// A cursor over the bytes of a batch. Checks every length.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn text(&mut self) -> Option<String> {
        let n = u32::from_le_bytes(self.array()?) as usize;
        String::from_utf8(self.take(n)?.to_vec()).ok()
    }

    /// Reads a list. It takes memory for elements that are there, not for those that it claims.
    fn list<T>(&mut self, element: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let n = u32::from_le_bytes(self.array()?);
        (0..n).map(|_| element(self)).collect()
    }

    fn file(&mut self) -> Option<(String, FileRecord)> {
        let path = self.text()?;
        let size = u64::from_le_bytes(self.array()?);
        let [flags] = self.array()?;
        let mtime = i64::from_le_bytes(self.array()?);
        let etag = self.text()?;
        let hash = Hash(self.array()?);
        let slices = self.list(|fields| {
            let chunk = Hash(fields.array()?);
            Some(Slice { chunk, chunk_offset: 0, len: u32::from_le_bytes(fields.array()?) })
        })?;
        let members = self.list(Self::member)?;
        let pin = PinRow {
            size,
            mtime_ns: (flags & 1 != 0).then_some(mtime),
            etag: (flags & 2 != 0).then_some(etag),
        };
        Some((path, FileRecord::new(pin, Content { hash, slices, members })))
    }

    fn member(&mut self) -> Option<ShardMember> {
        let (name, size, hash) = (self.text()?, u64::from_le_bytes(self.array()?), Hash(self.array()?));
        let slices = self.list(|fields| {
            let (chunk, chunk_offset) = (Hash(fields.array()?), u32::from_le_bytes(fields.array()?));
            Some(Slice { chunk, chunk_offset, len: u32::from_le_bytes(fields.array()?) })
        })?;
        Some(ShardMember { name, size, hash, slices })
    }
}

/// Reads one segment: when its run began, its files, and whether all of it was readable.
fn read_segment(path: &Path) -> (u64, Vec<(String, FileRecord)>, bool) {
    let mut files = Vec::new();
    let mut started = 0;
    let Ok(bytes) = fs::read(path) else { return (0, files, false) };
    let Ok((records, len)) = record::read(&bytes) else { return (0, files, false) };
    for r in &records {
        match r.kind {
            KIND_RUN => started = r.payload.try_into().map_or(0, u64::from_le_bytes),
            KIND_FILES => {
                let mut fields = Fields(r.payload);
                while !fields.0.is_empty() {
                    let Some(file) = fields.file() else { return (started, files, false) };
                    files.push(file);
                }
            }
            _ => {}
        }
    }
    (started, files, len == bytes.len())
}

/// Reads a journal of files, segment by segment.
#[derive(Debug)]
pub struct FileJournalReader {
    segments: VecDeque<PathBuf>,
    current: VecDeque<(String, FileRecord)>,
    started_ns: u64,
    local: bool,
    /// The number of files in it.
    pub files: u64,
    /// The path of its last file.
    pub last: Option<String>,
}

impl FileJournalReader {
    /// Opens the journal in `dir` and reads it once. Leaves out everything after a damaged record or after a
    /// path that is out of order. A missing directory is an empty journal.
    #[must_use]
    pub fn open(dir: &Path, local: bool) -> Self {
        let mut reader = FileJournalReader {
            segments: VecDeque::new(),
            current: VecDeque::new(),
            started_ns: 0,
            local,
            files: 0,
            last: None,
        };
        for path in segments(dir).unwrap_or_default().into_iter().map(|number| segment(dir, number)) {
            let (_, files, sound) = read_segment(&path);
            for (path, _) in &files {
                if reader.last.as_ref().is_some_and(|last| last >= path) {
                    return reader;
                }
                reader.last = Some(path.clone());
                reader.files += 1;
            }
            reader.segments.push_back(path);
            if !sound {
                break;
            }
        }
        reader
    }
}

impl Earlier for FileJournalReader {
    type Record = FileRecord;

    fn next(&mut self) -> Result<Option<(String, FileRecord)>, Failure> {
        loop {
            if let Some((path, record)) = self.current.pop_front() {
                if proves_unchanged(&record.pin, self.started_ns, self.local) {
                    return Ok(Some((path, record)));
                }
                continue;
            }
            let Some(path) = self.segments.pop_front() else { return Ok(None) };
            let (started, files, _) = read_segment(&path);
            self.started_ns = started;
            self.current = files.into();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(i: u64) -> (String, PinRow, Content) {
        let pin = PinRow { size: i, mtime_ns: Some(5), etag: Some("1-5".into()) };
        let hash = Hash::of(&i.to_le_bytes());
        let slices = (0..i % 3).map(|k| Slice { chunk: Hash::of(&k.to_le_bytes()), chunk_offset: 0, len: 7 });
        let members = (0..i % 2).map(|k| ShardMember {
            name: format!("m{k}"),
            size: 3,
            hash,
            slices: vec![Slice { chunk: hash, chunk_offset: 512, len: 3 }],
        });
        let members = members.collect();
        (format!("dir/{i:08}"), pin, Content { hash, slices: slices.collect(), members })
    }

    fn write(dir: &Path, n: u64) {
        let mut w = FileJournalWriter::create(dir.to_path_buf(), 10_000_000_000).expect("create");
        for i in 0..n {
            let (path, pin, content) = file(i);
            w.push(&path, &pin, &content).expect("push");
        }
        w.flush().expect("flush");
    }

    fn read(dir: &Path) -> Vec<(String, FileRecord)> {
        let mut r = FileJournalReader::open(dir, true);
        let files = r.files;
        let all: Vec<_> = std::iter::from_fn(|| r.next().expect("readable")).collect();
        assert_eq!(all.len() as u64, files);
        all
    }

    #[test]
    fn comes_back_over_segments_and_after_damage_in_part() {
        let tmp = tempfile::tempdir().expect("tempdir");
        let dir = tmp.path().join("j");
        assert_eq!(read(&dir), []);
        write(&dir, 60_000);
        assert!(fs::read_dir(&dir).expect("dir").count() > 1, "more than one segment");
        let want: Vec<_> =
            (0..60_000).map(file).map(|(p, pin, content)| (p, FileRecord::new(pin, content))).collect();
        assert!(read(&dir) == want);

        let first = dir.join("00000000.log");
        let bytes = fs::read(&first).expect("read");
        // A torn end of the last segment, as after a kill.
        fs::remove_file(dir.join("00000001.log")).expect("remove");
        fs::write(&first, &bytes[..bytes.len() - 100]).expect("write");
        let some = read(&dir);
        assert!(!some.is_empty() && some[..] == want[..some.len()]);
        // A flipped bit in the middle.
        let mut bad = bytes.clone();
        bad[bytes.len() / 2] ^= 4;
        fs::write(&first, &bad).expect("write");
        let some = read(&dir);
        assert!(some[..] == want[..some.len()]);
    }

    #[test]
    fn files_younger_than_the_run_are_left_out() {
        let tmp = tempfile::tempdir().expect("tempdir");
        let dir = tmp.path().join("j");
        let mut w = FileJournalWriter::create(dir.clone(), 10_000_000_000).expect("create");
        for (i, mtime) in [(1, 7_000_000_000), (2, 9_000_000_000), (3, 7_000_000_000)] {
            let (path, pin, content) = file(i);
            w.push(&path, &PinRow { mtime_ns: Some(mtime), ..pin }, &content).expect("push");
        }
        w.flush().expect("flush");
        let mut r = FileJournalReader::open(&dir, true);
        let got: Vec<_> = std::iter::from_fn(|| r.next().expect("readable")).map(|(p, _)| p).collect();
        assert_eq!(got, ["dir/00000001", "dir/00000003"]);
    }
}
