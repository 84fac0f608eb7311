//! Reads one file and names its bytes.
//!
//! Every byte is read once, into a small buffer that stays in the CPU's cache: both hashes of
//! a large file's slice (its own name as a chunk, and its place in the tree of the whole file)
//! are computed from it. BLAKE3 is a tree and a 4 MiB slice a complete subtree of it, so the
//! slices of one file can be read and hashed by several threads, and the file's hash is
//! folded from them ([`blake3::hazmat`], "subtrees").

use blake3::hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};
use fletch_core::Hash;
use fletch_core::manifest::tar::BadTar;
use fletch_core::manifest::tar::shard::{ShardMember, Sharded, Sharder};
use fletch_core::manifest::{SLICE_BYTES_DEFAULT, Slice};
use serde::{Deserialize, Serialize};
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes read at a time.
const PIECE_BYTES: usize = 256 << 10;
/// How often a file that changes while it is read is read again.
pub const RETRIES: u32 = 3;

/// Why a file has no content to name.
#[derive(Debug, thiserror::Error)]
pub enum ReadFault {
    /// The system refused.
    #[error("{}", describe(.0))]
    Io(#[from] io::Error),
    /// No regular file (any more).
    #[error("it is not a regular file (any more); run again")]
    Kind,
    /// It did not hold still.
    #[error("it changed while it was read, four times over; stop what writes to it and run again")]
    Changing,
    /// It holds bytes that its size does not admit.
    #[error("its size is given as 0 but it has content (a file of a special file system); leave it out")]
    Sizeless,
}

fn describe(e: &io::Error) -> String {
    match e.raw_os_error() {
        Some(libc::ENOENT) => "it vanished while the tree was read; run again".into(),
        Some(libc::EACCES | libc::EPERM) => format!("{e}; grant read access or run as a user who has it"),
        Some(libc::ENAMETOOLONG) => "the path is longer than the system can open; shorten it".into(),
        Some(libc::ELOOP) => "it became a link while the tree was read; run again".into(),
        Some(libc::EIO) => format!("{e}; the disk or the file system is failing"),
        _ => e.to_string(),
    }
}

/// The bytes of a file, named.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    /// BLAKE3 of the whole.
    pub hash: Hash,
    /// The chunks that are, in order, its bytes.
    pub slices: Vec<Slice>,
    /// What is in it, where it is a tar shard.
    #[serde(default)]
    pub members: Vec<ShardMember>,
}

impl Content {
    /// The content of a file that is one chunk, or empty.
    #[must_use]
    pub fn whole(hash: Hash, size: u32) -> Self {
        let slices =
            if size == 0 { Vec::new() } else { vec![Slice { chunk: hash, chunk_offset: 0, len: size }] };
        Content { hash, slices, members: Vec::new() }
    }
}

/// What must be equal before and after reading.
#[must_use]
pub fn same(a: &Metadata, b: &Metadata) -> bool {
    let key = |m: &Metadata| {
        (m.dev(), m.ino(), m.size(), m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec(), m.mode())
    };
    key(a) == key(b)
}

/// Whether O_NOATIME was refused once (files of others); then it is not asked for again.
static ATIME_REFUSED: AtomicBool = AtomicBool::new(false);

/// Opens for reading without ever waiting (a pipe) and, unless `follow`, without passing a
/// link; reading does not move the access time where the system allows that.
///
/// # Errors
/// [`ReadFault`] when there is no regular file that can be opened.
pub fn open(path: &Path, follow: bool) -> Result<(File, Metadata), ReadFault> {
    let base = libc::O_NONBLOCK | libc::O_NOCTTY | if follow { 0 } else { libc::O_NOFOLLOW };
    let open = |flags: i32| OpenOptions::new().read(true).custom_flags(flags).open(path);
    let file = if ATIME_REFUSED.load(Ordering::Relaxed) {
        open(base)?
    } else {
        match open(base | libc::O_NOATIME) {
            Err(e) if e.raw_os_error() == Some(libc::EPERM) => {
                let file = open(base)?;
                ATIME_REFUSED.store(true, Ordering::Relaxed);
                file
            }
            other => other?,
        }
    };
    let meta = file.metadata()?;
    if meta.is_file() { Ok((file, meta)) } else { Err(ReadFault::Kind) }
}

/// Reads exactly `len` bytes at `offset`, piece by piece.
///
/// Returns false when the file ended early.
fn pieces(
    file: &File,
    offset: u64,
    len: u64,
    buf: &mut Vec<u8>,
    mut each: impl FnMut(&[u8]),
) -> io::Result<bool> {
    buf.resize(PIECE_BYTES, 0);
    let mut done = 0u64;
    while done < len {
        let want = usize::try_from(len - done).unwrap_or(usize::MAX).min(PIECE_BYTES);
        let mut have = 0;
        while have < want {
            match file.read_at(&mut buf[have..want], offset + done + have as u64) {
                Ok(0) => return Ok(false),
                Ok(n) => have += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        each(&buf[..have]);
        done += have as u64;
    }
    Ok(true)
}

/// Names a file of at most one slice; `None` when it changed meanwhile.
///
/// # Errors
/// [`ReadFault`] when it cannot be read.
pub fn read_small(file: &File, meta: &Metadata, buf: &mut Vec<u8>) -> Result<Option<Content>, ReadFault> {
    let size = meta.size();
    if size == 0 {
        let mut byte = [0; 1];
        if file.read_at(&mut byte, 0)? > 0 {
            return if same(meta, &file.metadata()?) { Err(ReadFault::Sizeless) } else { Ok(None) };
        }
    }
    let hash = if size <= PIECE_BYTES as u64 {
        let mut hash = Hash::of(&[]);
        if !pieces(file, 0, size, buf, |b| hash = Hash::of(b))? {
            return Ok(None);
        }
        hash
    } else {
        let mut hasher = blake3::Hasher::new();
        if !pieces(file, 0, size, buf, |b| {
            hasher.update(b);
        })? {
            return Ok(None);
        }
        hasher.finalize().into()
    };
    if !same(meta, &file.metadata()?) {
        return Ok(None);
    }
    Ok(Some(Content::whole(hash, u32::try_from(size).unwrap_or(u32::MAX))))
}

/// Names a tar shard and its members; `None` when it changed meanwhile, and why it is a file like
/// any other where it is no archive that can be read by range.
///
/// # Errors
/// [`ReadFault`] when it cannot be read.
pub fn read_shard(
    file: &File,
    meta: &Metadata,
    buf: &mut Vec<u8>,
) -> Result<Option<Result<Content, BadTar>>, ReadFault> {
    let mut sharder = Sharder::new(SLICE_BYTES_DEFAULT);
    let mut bad = None;
    let whole = pieces(file, 0, meta.size(), buf, |bytes| {
        if bad.is_none() {
            bad = sharder.feed(bytes).err();
        }
    })?;
    if !whole || !same(meta, &file.metadata()?) {
        return Ok(None);
    }
    Ok(Some(match bad {
        Some(bad) => Err(bad),
        None => sharder.finish().map(Content::from),
    }))
}

impl From<Sharded> for Content {
    fn from(s: Sharded) -> Content {
        Content { hash: s.hash, slices: s.slices, members: s.members }
    }
}

/// One slice of a large file: its name as a chunk, and its subtree in the file's hash.
#[derive(Debug, Clone, Copy)]
pub struct SliceHash {
    /// BLAKE3 of the slice alone.
    pub chunk: Hash,
    /// Its value in the tree of the whole.
    pub subtree: ChainingValue,
}

/// Both hashes of a slice while its bytes pass by.
#[derive(Debug)]
pub struct SliceHasher {
    alone: blake3::Hasher,
    within: blake3::Hasher,
}

impl SliceHasher {
    /// Begins the slice at `offset`, a multiple of 4 MiB.
    #[must_use]
    pub fn new(offset: u64) -> Self {
        let mut within = blake3::Hasher::new();
        within.set_input_offset(offset);
        SliceHasher { alone: blake3::Hasher::new(), within }
    }

    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.alone.update(bytes);
        self.within.update(bytes);
    }

    /// Ends the slice.
    #[must_use]
    pub fn finish(&self) -> SliceHash {
        SliceHash { chunk: self.alone.finalize().into(), subtree: self.within.finalize_non_root() }
    }
}

/// Reads one slice; `None` when the file ended early.
///
/// # Errors
/// When it cannot be read.
pub fn read_slice(file: &File, offset: u64, len: u32, buf: &mut Vec<u8>) -> io::Result<Option<SliceHash>> {
    let mut hasher = SliceHasher::new(offset);
    Ok(pieces(file, offset, u64::from(len), buf, |b| hasher.update(b))?.then(|| hasher.finish()))
}

/// The lengths of a large file's slices.
#[must_use]
pub fn slice_count(size: u64) -> u64 {
    size.div_ceil(u64::from(SLICE_BYTES_DEFAULT))
}

/// Offset and length of slice `i` of a file of `size` bytes.
#[must_use]
pub fn slice_at(size: u64, i: u64) -> (u64, u32) {
    let step = u64::from(SLICE_BYTES_DEFAULT);
    let offset = i * step;
    (offset, u32::try_from((size - offset).min(step)).unwrap_or(SLICE_BYTES_DEFAULT))
}

/// Folds a large file's slices (at least two) into its content.
#[must_use]
pub fn fold(size: u64, slices: &[SliceHash]) -> Content {
    let rows = slices.iter().enumerate().map(|(i, s)| Slice {
        chunk: s.chunk,
        chunk_offset: 0,
        len: slice_at(size, i as u64).1,
    });
    // The left subtree holds the largest power of two of slices that leaves something.
    let cut = slices.len().next_power_of_two() / 2;
    let hash = merge_subtrees_root(&subtree(&slices[..cut]), &subtree(&slices[cut..]), Mode::Hash);
    Content { hash: hash.into(), slices: rows.collect(), members: Vec::new() }
}

fn subtree(slices: &[SliceHash]) -> ChainingValue {
    if let [one] = slices {
        return one.subtree;
    }
    let cut = slices.len().next_power_of_two() / 2;
    merge_subtrees_non_root(&subtree(&slices[..cut]), &subtree(&slices[cut..]), Mode::Hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_fold_to_the_hash_of_the_whole() {
        let dir = tempfile::tempdir().expect("tempdir");
        let step = SLICE_BYTES_DEFAULT as usize;
        let bytes: Vec<u8> = (0..5 * step + 77).map(|i| ((i * 7919) >> 5) as u8).collect();
        let mut buf = Vec::new();
        for size in [step + 1, 2 * step, 2 * step + 1, 3 * step, 4 * step, 4 * step + 1025, 5 * step + 77] {
            let path = dir.path().join("f");
            std::fs::write(&path, &bytes[..size]).expect("write");
            let (file, meta) = open(&path, false).expect("open");
            let hashes: Vec<SliceHash> = (0..slice_count(meta.size()))
                .map(|i| {
                    let (offset, len) = slice_at(meta.size(), i);
                    read_slice(&file, offset, len, &mut buf).expect("read").expect("whole")
                })
                .collect();
            let content = fold(meta.size(), &hashes);
            assert_eq!(content.hash, Hash::of(&bytes[..size]), "{size}");
            let mut at = 0;
            for s in &content.slices {
                assert_eq!(s.chunk, Hash::of(&bytes[at..at + s.len as usize]));
                at += s.len as usize;
            }
            assert_eq!(at, size);
        }
        for size in [0, 1, PIECE_BYTES, PIECE_BYTES + 1, step] {
            let path = dir.path().join("f");
            std::fs::write(&path, &bytes[..size]).expect("write");
            let (file, meta) = open(&path, false).expect("open");
            let content = read_small(&file, &meta, &mut buf).expect("read").expect("still");
            assert_eq!(content.hash, Hash::of(&bytes[..size]));
            assert_eq!(content.slices.len(), usize::from(size > 0));
        }
    }

    #[test]
    fn a_file_that_changes_and_one_that_is_none_are_not_named() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("f");
        std::fs::write(&path, b"12345").expect("write");
        let (file, meta) = open(&path, false).expect("open");
        std::fs::write(&path, b"123456").expect("write");
        assert_eq!(read_small(&file, &meta, &mut Vec::new()).expect("read"), None);
        std::fs::write(&path, b"1").expect("write");
        assert_eq!(read_small(&file, &meta, &mut Vec::new()).expect("read"), None);
        std::os::unix::fs::symlink(&path, dir.path().join("l")).expect("link");
        assert!(open(&dir.path().join("l"), false).is_err());
        assert!(open(&dir.path().join("l"), true).is_ok());
        let fifo = dir.path().join("p");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("fifo");
        assert!(matches!(open(&fifo, false), Err(ReadFault::Kind)));
        assert!(matches!(
            open(Path::new("/proc/self/stat"), false).and_then(|(f, m)| read_small(&f, &m, &mut Vec::new())),
            Err(ReadFault::Sizeless)
        ));
    }
}
