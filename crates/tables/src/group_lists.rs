//! The hashes of the groups of long chunks, on their way from the readers of a dataset into `groups.bin`.
//!
//! Readers add the hashes of a chunk when they have hashed it. They lie in a file of the run, so memory grows
//! by some 60 bytes a chunk only, and a run that is resumed finds what the one before has read.
//!
//! They are a help, and nothing depends on them: where they are lost, a server reads the whole chunk once.
//! So an error of the file ends the collecting, and the run goes on.

use fletch_core::Hash;
use fletch_core::groups::{GROUPED_BYTES_MIN, GroupHashes, group_hash_bytes};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The first bytes of `groups.bin`.
pub(crate) const MAGIC: &[u8; 8] = b"FLTGRP01";
/// The length of a row of `groups.bin`, in bytes.
pub(crate) const ROW_BYTES: usize = 48;
/// The length of what comes before the rows, in bytes.
pub(crate) const HEAD_BYTES: usize = 16;

/// Where the hashes of a chunk are.
#[derive(Debug, Clone, Copy)]
struct List {
    at: u64,
    /// The chunk's length in bytes.
    len: u32,
}

impl List {
    fn bytes(self) -> usize {
        group_hash_bytes(self.len) as usize
    }
}

struct Lists {
    file: BufWriter<File>,
    end: u64,
    by_chunk: HashMap<Hash, List>,
    error: Option<io::Error>,
}

/// The hashes of the groups of the chunks that were read so far. Threads share it.
pub struct GroupLists(Mutex<Lists>);

impl GroupLists {
    /// Opens the file of a run, with what an earlier run has written there.
    ///
    /// # Errors
    /// When the file cannot be opened or read.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let (by_chunk, end) = read_lists(&file)?;
        // What a run was writing when it ended goes.
        file.set_len(end)?;
        let mut file = file;
        io::Seek::seek(&mut file, io::SeekFrom::Start(end))?;
        let file = BufWriter::with_capacity(256 << 10, file);
        Ok(GroupLists(Mutex::new(Lists { file, end, by_chunk, error: None })))
    }

    /// Adds the hashes of a chunk. A chunk that is always read whole needs none.
    pub fn add(&self, groups: &GroupHashes) {
        if groups.chunk_len() < GROUPED_BYTES_MIN {
            return;
        }
        let mut lists = self.0.lock();
        if lists.error.is_some() || lists.by_chunk.contains_key(&groups.chunk()) {
            return;
        }
        let mut head = [0; 36];
        head[..32].copy_from_slice(groups.chunk().as_bytes());
        head[32..].copy_from_slice(&groups.chunk_len().to_le_bytes());
        let written = lists.file.write_all(&head).and_then(|()| lists.file.write_all(groups.as_bytes()));
        if let Err(error) = written {
            lists.error = Some(error);
            return;
        }
        let at = lists.end + head.len() as u64;
        lists.end = at + groups.as_bytes().len() as u64;
        lists.by_chunk.insert(groups.chunk(), List { at, len: groups.chunk_len() });
    }

    /// Whether the hashes of a chunk are here.
    #[must_use]
    pub fn has(&self, chunk: Hash) -> bool {
        self.0.lock().by_chunk.contains_key(&chunk)
    }

    /// Ends the collecting. Returns why the file could not be written, if so: then nothing was collected.
    pub fn finish(&self) -> Option<io::Error> {
        let mut lists = self.0.lock();
        let error = lists.error.take().or_else(|| lists.file.flush().err())?;
        // What the file has of them is not known.
        lists.by_chunk.clear();
        Some(error)
    }

    /// Writes the hashes of these chunks, as far as they are here, as `groups.bin`. Returns of how many
    /// chunks it has them. Writes no file for none.
    ///
    /// # Errors
    /// When a file cannot be read or written.
    pub(crate) fn write(&self, chunks: &[(Hash, u32)], path: &Path) -> io::Result<u64> {
        let mut lists = self.0.lock();
        lists.file.flush()?;
        let mut seen = HashSet::new();
        let known = |(chunk, len): &(Hash, u32)| {
            let list = lists.by_chunk.get(chunk).filter(|list| list.len == *len)?;
            seen.insert(*chunk).then_some((*chunk, *list))
        };
        let wanted: Vec<(Hash, List)> = chunks.iter().filter_map(known).collect();
        if wanted.is_empty() {
            return Ok(0);
        }
        // The lists are in the order of the tables, so that those of a file lie side by side.
        let mut at = (HEAD_BYTES + wanted.len() * ROW_BYTES) as u64;
        let mut rows = Vec::with_capacity(wanted.len());
        for (chunk, list) in &wanted {
            rows.push((*chunk, at, list.len));
            at += list.bytes() as u64;
        }
        rows.sort_unstable_by_key(|(chunk, ..)| *chunk);
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
        out.write_all(MAGIC)?;
        out.write_all(&(rows.len() as u64).to_le_bytes())?;
        for (chunk, at, len) in rows {
            out.write_all(chunk.as_bytes())?;
            out.write_all(&at.to_le_bytes())?;
            out.write_all(&len.to_le_bytes())?;
            out.write_all(&[0; 4])?;
        }
        let mut bytes = Vec::new();
        for (_, list) in &wanted {
            bytes.resize(list.bytes(), 0);
            lists.file.get_ref().read_exact_at(&mut bytes, list.at)?;
            out.write_all(&bytes)?;
        }
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        Ok(wanted.len() as u64)
    }
}

/// Reads the lists of an earlier run, up to the first one that is not whole. Returns where they end.
fn read_lists(file: &File) -> io::Result<(HashMap<Hash, List>, u64)> {
    let (mut by_chunk, mut end) = (HashMap::new(), 0);
    let mut input = BufReader::with_capacity(256 << 10, file);
    let mut bytes = Vec::new();
    loop {
        let mut head = [0; 36];
        if !fills(&mut input, &mut head)? {
            break;
        }
        let (chunk, len) = head.split_at(32);
        let (Ok(chunk), Ok(len)) = (Hash::try_from(chunk), len.try_into().map(u32::from_le_bytes)) else {
            break;
        };
        if len > fletch_core::manifest::CHUNK_BYTES_MAX {
            break;
        }
        let list = List { at: end + head.len() as u64, len };
        bytes.resize(list.bytes(), 0);
        if !fills(&mut input, &mut bytes)? || GroupHashes::check(chunk, len, &bytes).is_err() {
            break;
        }
        by_chunk.insert(chunk, list);
        end = list.at + bytes.len() as u64;
    }
    Ok((by_chunk, end))
}

/// Fills the buffer; `false` at the end of the input.
fn fills(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match input.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_core::Verified;

    fn groups(seed: u8, len: usize) -> GroupHashes {
        let mut bytes = vec![0; len];
        blake3::Hasher::new().update(&[seed]).finalize_xof().fill(&mut bytes);
        let chunk = Hash::of(&bytes);
        Verified::check_grouped(chunk, bytes.into()).expect("right").1.expect("long enough")
    }

    #[test]
    fn a_resumed_run_has_the_whole_lists_of_the_one_before() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("groups");
        let (a, b, c) = (groups(1, 300_000), groups(2, 4 << 20), groups(3, 1 << 20));
        let lists = GroupLists::open(&path).expect("opened");
        for groups in [&a, &b, &a] {
            lists.add(groups);
        }
        drop(lists);
        let whole = std::fs::read(&path).expect("read");
        assert_eq!(whole.len(), 2 * 36 + a.as_bytes().len() + b.as_bytes().len());
        for (cut, flip, left) in [(0, None, 2), (1, None, 1), (8_200, None, 1), (0, Some(whole.len() - 9), 1)]
        {
            let mut bytes = whole[..whole.len() - cut].to_vec();
            if let Some(at) = flip {
                bytes[at] ^= 1;
            }
            std::fs::write(&path, &bytes).expect("written");
            let lists = GroupLists::open(&path).expect("opened");
            assert_eq!((lists.has(a.chunk()), lists.has(b.chunk())), (true, left == 2), "cut {cut}");
            lists.add(&c);
            drop(lists);
            assert!(
                GroupLists::open(&path).expect("opened").has(c.chunk()),
                "it goes on after the last whole one"
            );
        }
    }
}
