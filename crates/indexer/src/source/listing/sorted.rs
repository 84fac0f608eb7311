//! Sorts the keys of a listing in bounded memory, and finds which empty objects have keys below them.
//!
//! Keys beyond the bound are written out in sorted runs, and merged twice. The first merge finds the empty
//! objects below which keys lie: until that shows, such an object is a prefix of the last key, so few are
//! open at a time. The second merge returns the keys.

use crate::source::spill::{Extent, Spill};
use fletch_origin::ObjectMeta;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::io;
use std::path::Path;

/// The memory for keys that are not yet sorted, in bytes.
pub(super) const MEMORY_BYTES_MAX: usize = 32 << 20;
/// The read buffer of one run, in bytes.
const RUN_BUFFER_BYTES: usize = 128 << 10;

/// A record: lengths of key and tag, size, time, key, tag.
fn encode(object: &ObjectMeta, out: &mut Vec<u8>) {
    let tag = object.etag.as_deref();
    // A key has at most 16 MiB, the length of a page.
    let length = |text: &str| u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes();
    out.extend(length(&object.path));
    out.extend(tag.map_or(u32::MAX.to_le_bytes(), length));
    out.extend(object.size.to_le_bytes());
    out.extend(object.mtime_ns.unwrap_or(i64::MIN).to_le_bytes());
    out.extend(object.path.as_bytes());
    out.extend(tag.unwrap_or_default().as_bytes());
}

const HEAD: usize = 24;

/// Returns the lengths of the key and of the whole record, if its head is in `bytes`.
fn lengths(bytes: &[u8]) -> Option<(usize, usize)> {
    let number = |at: usize| {
        let part = bytes.get(at..at + 4)?;
        Some(u32::from_le_bytes([part[0], part[1], part[2], part[3]]))
    };
    let (key, tag) = (number(0)? as usize, number(4)?);
    bytes.get(..HEAD)?;
    Some((key, HEAD + key + if tag == u32::MAX { 0 } else { tag as usize }))
}

fn key_of(record: &[u8]) -> &[u8] {
    lengths(record).and_then(|(key, _)| record.get(HEAD..HEAD + key)).unwrap_or_default()
}

fn decode(record: &[u8]) -> io::Result<ObjectMeta> {
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, "a record of a temporary file is damaged");
    let (key, len) = lengths(record).filter(|(_, len)| *len == record.len()).ok_or_else(damaged)?;
    let number = |at: usize| -> io::Result<[u8; 8]> {
        record.get(at..at + 8).and_then(|part| part.try_into().ok()).ok_or_else(damaged)
    };
    let text = |part: &[u8]| String::from_utf8(part.to_vec()).map_err(|_| damaged());
    let has_tag = record.get(4..8).is_some_and(|part| part != u32::MAX.to_le_bytes());
    let mtime = i64::from_le_bytes(number(16)?);
    Ok(ObjectMeta {
        path: text(&record[HEAD..HEAD + key])?,
        size: u64::from_le_bytes(number(8)?),
        mtime_ns: Some(mtime).filter(|time| *time != i64::MIN),
        etag: if has_tag { Some(text(&record[HEAD + key..len])?) } else { None },
    })
}

/// Collects keys in any order.
#[derive(Debug)]
pub(super) struct SortedKeysWriter {
    spill: Spill,
    runs: Vec<Extent>,
    records: Vec<u8>,
    /// Where each record of `records` begins and ends.
    bounds: Vec<(usize, usize)>,
    memory_bytes_max: usize,
}

/// All keys, in byte order, each once.
#[derive(Debug)]
pub(super) struct SortedKeys {
    spill: Spill,
    merge: Merge,
    ordinal: u64,
    /// The ordinals of the empty objects below which keys lie.
    folders: BTreeSet<u64>,
}

impl SortedKeysWriter {
    pub fn new(scratch: &Path) -> io::Result<Self> {
        Self::bounded(scratch, MEMORY_BYTES_MAX)
    }

    fn bounded(scratch: &Path, memory_bytes_max: usize) -> io::Result<Self> {
        Ok(SortedKeysWriter {
            spill: Spill::new(scratch)?,
            runs: Vec::new(),
            records: Vec::new(),
            bounds: Vec::new(),
            memory_bytes_max,
        })
    }

    pub fn push(&mut self, object: &ObjectMeta) -> io::Result<()> {
        let begin = self.records.len();
        encode(object, &mut self.records);
        self.bounds.push((begin, self.records.len()));
        if self.records.len() + self.bounds.len() * size_of::<(usize, usize)>() >= self.memory_bytes_max {
            self.write_run()?;
        }
        Ok(())
    }

    fn write_run(&mut self) -> io::Result<()> {
        let records = &self.records;
        // Stable: of two records of one key, the first one that was listed comes first.
        self.bounds.sort_by(|a, b| key_of(&records[a.0..a.1]).cmp(key_of(&records[b.0..b.1])));
        self.runs.push(self.spill.write_run(self.bounds.iter().map(|b| &records[b.0..b.1]))?);
        self.records.clear();
        self.bounds.clear();
        Ok(())
    }

    /// Ends the collection.
    pub fn finish(mut self) -> io::Result<SortedKeys> {
        self.write_run()?;
        let mut folders = BTreeSet::new();
        let mut open: Vec<(Vec<u8>, u64)> = Vec::new();
        let mut merge = Merge::new(&self.runs);
        let mut ordinal = 0;
        while let Some(record) = merge.next_record(&self.spill)? {
            let key = key_of(&record);
            open.retain(|(prefix, _)| key.starts_with(prefix));
            let is_below = |prefix: &[u8]| key.get(prefix.len()) == Some(&b'/');
            folders.extend(open.iter().filter(|(prefix, _)| is_below(prefix)).map(|(_, ordinal)| *ordinal));
            let object = decode(&record)?;
            if object.size == 0 && !object.path.ends_with('/') {
                open.push((key.to_vec(), ordinal));
            }
            ordinal += 1;
        }
        let merge = Merge::new(&self.runs);
        Ok(SortedKeys { spill: self.spill, merge, ordinal: 0, folders })
    }
}

impl SortedKeys {
    /// Returns the next key, and whether keys lie below it. `None` at the end.
    ///
    /// The second value is for empty objects whose key does not end in a slash.
    pub fn next_key(&mut self) -> io::Result<Option<(ObjectMeta, bool)>> {
        let Some(record) = self.merge.next_record(&self.spill)? else { return Ok(None) };
        let is_folder = self.folders.contains(&self.ordinal);
        self.ordinal += 1;
        Ok(Some((decode(&record)?, is_folder)))
    }
}

/// A sorted run that is being read.
#[derive(Debug)]
struct Run {
    left: Extent,
    buffer: Vec<u8>,
    at: usize,
}

/// The next record of a run: its key, the number of the run, and the record.
type Waiting = Reverse<(Vec<u8>, usize, Vec<u8>)>;

/// Merges sorted runs. Of several records of one key it returns the first.
#[derive(Debug)]
struct Merge {
    runs: Vec<Run>,
    heap: BinaryHeap<Waiting>,
    is_primed: bool,
    last: Option<Vec<u8>>,
}

impl Merge {
    fn new(runs: &[Extent]) -> Self {
        let runs = runs.iter().map(|&left| Run { left, buffer: Vec::new(), at: 0 }).collect();
        Merge { runs, heap: BinaryHeap::new(), is_primed: false, last: None }
    }

    fn advance(&mut self, number: usize, spill: &Spill) -> io::Result<()> {
        let run = &mut self.runs[number];
        let record = loop {
            let waiting = &run.buffer[run.at..];
            match lengths(waiting) {
                Some((_, len)) if len <= waiting.len() => break waiting[..len].to_vec(),
                _ if run.left.len == 0 => return Ok(()),
                _ => {
                    run.buffer.drain(..run.at);
                    run.at = 0;
                    spill.read_front(&mut run.left, RUN_BUFFER_BYTES, &mut run.buffer)?;
                }
            }
        };
        run.at += record.len();
        self.heap.push(Reverse((key_of(&record).to_vec(), number, record)));
        Ok(())
    }

    fn next_record(&mut self, spill: &Spill) -> io::Result<Option<Vec<u8>>> {
        if !self.is_primed {
            self.is_primed = true;
            for number in 0..self.runs.len() {
                self.advance(number, spill)?;
            }
        }
        loop {
            let Some(Reverse((key, number, record))) = self.heap.pop() else { return Ok(None) };
            self.advance(number, spill)?;
            if self.last.as_ref() != Some(&key) {
                self.last = Some(key);
                return Ok(Some(record));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn object(path: &str, size: u64, etag: Option<&str>) -> ObjectMeta {
        ObjectMeta { path: path.to_owned(), size, mtime_ns: Some(7), etag: etag.map(str::to_owned) }
    }

    fn all(objects: &[ObjectMeta], memory: usize) -> Vec<(ObjectMeta, bool)> {
        let dir = tempfile::tempdir().expect("tempdir");
        let mut writer = SortedKeysWriter::bounded(dir.path(), memory).expect("scratch");
        objects.iter().for_each(|object| writer.push(object).expect("pushed"));
        let mut keys = writer.finish().expect("merged");
        std::iter::from_fn(|| keys.next_key().expect("read")).collect()
    }

    #[test]
    fn an_empty_object_is_a_folder_if_a_key_lies_below_it_whatever_comes_between() {
        let objects = [
            object("train/1.jpg", 5, Some("e")),
            object("train.csv", 5, None),
            object("train", 0, None),
            object("train", 0, Some("again")),
            object("tr", 0, None),
            object("tree", 0, None),
        ];
        for memory in [1, 1 << 20] {
            let got = all(&objects, memory);
            let got: Vec<_> = got.iter().map(|(o, is_folder)| (o.path.as_str(), *is_folder)).collect();
            let want = [
                ("tr", false),
                ("train", true),
                ("train.csv", false),
                ("train/1.jpg", false),
                ("tree", false),
            ];
            assert_eq!(got, want, "{memory}");
        }
        let same = ObjectMeta { path: "k".into(), size: u64::MAX, mtime_ns: None, etag: Some(String::new()) };
        assert_eq!(all(std::slice::from_ref(&same), 1), [(same, false)]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// With any memory bound, every key comes once, in order.
        #[test]
        fn keys_come_once_and_in_order(
            names in proptest::collection::vec("[a-c./]{1,6}", 0..200),
            memory in 1usize..4000,
        ) {
            let objects: Vec<_> = (0u64..).zip(&names).map(|(i, name)| object(name, i % 3, None)).collect();
            let mut want: BTreeMap<&str, u64> = BTreeMap::new();
            for object in &objects {
                want.entry(&object.path).or_insert(object.size);
            }
            let got = all(&objects, memory);
            let seen: Vec<_> = got.iter().map(|(o, _)| (o.path.as_str(), o.size)).collect();
            prop_assert_eq!(seen, want.iter().map(|(k, v)| (*k, *v)).collect::<Vec<_>>());
            for (object, is_folder) in got.iter().filter(|(o, _)| o.size == 0 && !o.path.ends_with('/')) {
                let dir = format!("{}/", object.path);
                prop_assert_eq!(*is_folder, want.keys().any(|key| key.starts_with(&dir)), "{}", object.path);
            }
        }
    }
}
