//! Reads and hashes one file.
//!
//! Every byte is read once, into a small buffer that stays in the CPU's cache. A slice of a large file has
//! two hashes, both computed from this buffer: its own hash as a chunk, and its value in the tree of the
//! whole file. So several threads can hash the slices of one file ([`fletch_core::manifest::slice_hash`]).

use super::outage::{directory_outage, is_outage};
use crate::failure::Failure;
use fletch_core::Hash;
use fletch_core::groups::{GROUPED_BYTES_MIN, GroupHasher, GroupHashes};
use fletch_core::manifest::slice_hash::file_hash;
pub use fletch_core::manifest::slice_hash::{SliceHash, SliceHasher, slice_at, slice_count};
use fletch_core::manifest::tar::BadTar;
use fletch_core::manifest::tar::shard::{ShardMember, Sharded, Sharder};
use fletch_core::manifest::{SLICE_BYTES_DEFAULT, Slice};
use fletch_tables::GroupLists;
use serde::{Deserialize, Serialize};
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// The size of one read, in bytes.
const READ_BYTES: usize = 256 << 10;
/// How many times a file that changes during reading is read again.
pub const RETRIES: u32 = 3;

/// Why a file cannot be hashed.
#[derive(Debug, thiserror::Error)]
pub enum ReadFault {
    /// The operating system returned an error.
    #[error("{}", describe(.0))]
    Io(#[from] io::Error),
    /// The path is not a regular file, or not any more.
    #[error("it is not a regular file, or not any more; run again")]
    Kind,
    /// The file changed during every attempt.
    #[error("it changed during each of four reads; stop the program that writes to it and run again")]
    Changing,
    /// The target of a link is not UTF-8.
    #[error("its target is not UTF-8; replace the link")]
    Target,
    /// The file has bytes although its size is 0.
    #[error("its size is 0 but it has content, as in a special file system; leave it out")]
    Sizeless,
}

impl ReadFault {
    /// Whether the path is an entry that could not be read. Otherwise it is nothing that an entry can be.
    #[must_use]
    pub fn is_loss(&self) -> bool {
        match self {
            ReadFault::Io(_) | ReadFault::Changing => true,
            ReadFault::Kind | ReadFault::Target | ReadFault::Sizeless => false,
        }
    }

    /// Returns the failure of the run if the file system is at fault, and not the file at `path`.
    #[must_use]
    pub fn outage(&self, path: &Path) -> Option<Failure> {
        match self {
            ReadFault::Io(e) if is_outage(e) => Some(directory_outage(path, e)),
            _ => None,
        }
    }
}

fn describe(e: &io::Error) -> String {
    match e.raw_os_error() {
        Some(libc::ELOOP) => "it became a link during the run; run again".into(),
        _ => describe_io(e),
    }
}

/// Returns what happened at a path, and what to do next.
pub(super) fn describe_io(e: &io::Error) -> String {
    match e.raw_os_error() {
        Some(libc::ENOENT) => "it vanished during the run; run again".into(),
        Some(libc::EACCES | libc::EPERM) => format!("{e}; grant read access or run as a user who has it"),
        Some(libc::ENAMETOOLONG) => "the path is longer than the system can open; shorten it".into(),
        _ => e.to_string(),
    }
}

/// Reads the target of a link. The error says what is wrong with the link.
///
/// # Errors
/// When the link cannot be read, or its target is not UTF-8.
pub fn read_target(link: &Path) -> Result<String, ReadFault> {
    let target = std::fs::read_link(link)?;
    target.into_os_string().into_string().map_err(|_| ReadFault::Target)
}

/// The hashes of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    /// BLAKE3 of the whole file.
    pub hash: Hash,
    /// The slices of chunks that make up its bytes, in order.
    pub slices: Vec<Slice>,
    /// The members, if the file is a tar shard.
    #[serde(default)]
    pub members: Vec<ShardMember>,
}

impl Content {
    /// Returns the content of a file that is one chunk, or empty.
    #[must_use]
    pub fn whole(hash: Hash, size: u32) -> Self {
        let slices =
            if size == 0 { Vec::new() } else { vec![Slice { chunk: hash, chunk_offset: 0, len: size }] };
        Content { hash, slices, members: Vec::new() }
    }
}

/// Whether a file looks the same before and after reading.
#[must_use]
pub fn same(a: &Metadata, b: &Metadata) -> bool {
    let key = |m: &Metadata| {
        (m.dev(), m.ino(), m.size(), m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec(), m.mode())
    };
    key(a) == key(b)
}

/// Whether the system refused O_NOATIME once, for a file of another user. Then later opens do not try it.
static ATIME_REFUSED: AtomicBool = AtomicBool::new(false);

/// Opens a file for reading. Never waits, even for a pipe, and follows a link only with `follow`.
///
/// Reading does not change the access time where the system allows that.
///
/// # Errors
/// [`ReadFault`] when the path is not a regular file that can be opened.
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

/// Reads `len` bytes at `offset` and passes them to `each`. Returns false when the file ended early.
fn read_range(
    file: &File,
    offset: u64,
    len: u64,
    buf: &mut Vec<u8>,
    mut each: impl FnMut(&[u8]),
) -> io::Result<bool> {
    buf.resize(READ_BYTES, 0);
    let mut done = 0u64;
    while done < len {
        let want = usize::try_from(len - done).unwrap_or(usize::MAX).min(READ_BYTES);
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

/// Hashes a file of at most one slice. Returns `None` when the file changed during reading. Adds the hashes
/// of its groups to `groups`.
///
/// # Errors
/// [`ReadFault`] when it cannot be read.
pub fn read_small(
    file: &File,
    meta: &Metadata,
    buf: &mut Vec<u8>,
    groups: Option<&GroupLists>,
) -> Result<Option<Content>, ReadFault> {
    let size = meta.size();
    if size == 0 {
        let mut byte = [0; 1];
        if file.read_at(&mut byte, 0)? > 0 {
            return if same(meta, &file.metadata()?) { Err(ReadFault::Sizeless) } else { Ok(None) };
        }
    }
    let hash = if size < READ_BYTES as u64 {
        let mut hash = Hash::of(&[]);
        if !read_range(file, 0, size, buf, |b| hash = Hash::of(b))? {
            return Ok(None);
        }
        hash
    } else {
        let mut hasher = GroupHasher::default();
        if !read_range(file, 0, size, buf, |b| hasher.update(b))? {
            return Ok(None);
        }
        let (hash, of_groups) = hasher.finish();
        add_groups(groups, of_groups);
        hash
    };
    if !same(meta, &file.metadata()?) {
        return Ok(None);
    }
    Ok(Some(Content::whole(hash, u32::try_from(size).unwrap_or(u32::MAX))))
}

/// Hashes a tar shard and its members. Returns `None` when the file changed during reading.
///
/// The inner error says why the file is not an archive whose members can be read by range. Adds the hashes of
/// the groups of its chunks to `groups`.
///
/// # Errors
/// [`ReadFault`] when it cannot be read.
pub fn read_shard(
    file: &File,
    meta: &Metadata,
    buf: &mut Vec<u8>,
    groups: Option<&GroupLists>,
) -> Result<Option<Result<Content, BadTar>>, ReadFault> {
    let mut sharder = sharder(groups);
    let mut bad = None;
    let whole = read_range(file, 0, meta.size(), buf, |bytes| {
        if bad.is_none() {
            bad = sharder.feed(bytes).err();
            sharder.take_groups().into_iter().for_each(|of_chunk| add_groups(groups, Some(of_chunk)));
        }
    })?;
    if !whole || !same(meta, &file.metadata()?) {
        return Ok(None);
    }
    Ok(Some(match bad {
        Some(bad) => Err(bad),
        None => end_shard(sharder, groups),
    }))
}

/// Returns a reader of a tar shard, which hashes groups if somebody collects them.
#[must_use]
pub fn sharder(groups: Option<&GroupLists>) -> Sharder {
    let sharder = Sharder::new(SLICE_BYTES_DEFAULT);
    if groups.is_some() { sharder.with_groups() } else { sharder }
}

/// Ends a tar shard. Adds the hashes of the groups of its last chunks to `groups`.
///
/// # Errors
/// [`BadTar`].
pub fn end_shard(sharder: Sharder, groups: Option<&GroupLists>) -> Result<Content, BadTar> {
    let mut shard = sharder.finish()?;
    shard.groups.drain(..).for_each(|of_chunk| add_groups(groups, Some(of_chunk)));
    Ok(shard.into())
}

impl From<Sharded> for Content {
    fn from(s: Sharded) -> Content {
        Content { hash: s.hash, slices: s.slices, members: s.members }
    }
}

/// Reads and hashes one slice. Returns `None` when the file ended early. Adds the hashes of its groups to
/// `groups`.
///
/// # Errors
/// When the file cannot be read.
pub fn read_slice(
    file: &File,
    offset: u64,
    len: u32,
    buf: &mut Vec<u8>,
    groups: Option<&GroupLists>,
) -> io::Result<Option<SliceHash>> {
    let mut hasher = SliceHasher::new(offset);
    if !read_range(file, offset, u64::from(len), buf, |b| hasher.update(b))? {
        return Ok(None);
    }
    let (hash, of_groups) = hasher.finish();
    add_groups(groups, of_groups);
    Ok(Some(hash))
}

/// Hashes a slice that is in memory. Adds the hashes of its groups to `groups`.
#[must_use]
pub fn hash_slice(offset: u64, bytes: &[u8], groups: Option<&GroupLists>) -> SliceHash {
    let mut hasher = SliceHasher::new(offset);
    hasher.update(bytes);
    let (hash, of_groups) = hasher.finish();
    add_groups(groups, of_groups);
    hash
}

/// Hashes a file that is in memory. Adds the hashes of its groups to `groups`.
#[must_use]
pub fn hash_whole(bytes: &[u8], groups: Option<&GroupLists>) -> Hash {
    if groups.is_none() || bytes.len() < GROUPED_BYTES_MIN as usize {
        return Hash::of(bytes);
    }
    let mut hasher = GroupHasher::default();
    hasher.update(bytes);
    let (hash, of_groups) = hasher.finish();
    add_groups(groups, of_groups);
    hash
}

/// Adds the hashes of the groups of a chunk, if somebody collects them.
pub fn add_groups(groups: Option<&GroupLists>, of_chunk: Option<GroupHashes>) {
    if let (Some(groups), Some(of_chunk)) = (groups, of_chunk) {
        groups.add(&of_chunk);
    }
}

/// Folds the slices of a large file, at least two, into its content.
#[must_use]
pub fn fold(size: u64, slices: &[SliceHash]) -> Content {
    let rows = slices.iter().enumerate().map(|(i, s)| Slice {
        chunk: s.chunk,
        chunk_offset: 0,
        len: slice_at(size, i as u64).1,
    });
    Content { hash: file_hash(slices), slices: rows.collect(), members: Vec::new() }
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
                    read_slice(&file, offset, len, &mut buf, None).expect("read").expect("whole")
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
        for size in [0, 1, READ_BYTES, READ_BYTES + 1, step] {
            let path = dir.path().join("f");
            std::fs::write(&path, &bytes[..size]).expect("write");
            let (file, meta) = open(&path, false).expect("open");
            let content = read_small(&file, &meta, &mut buf, None).expect("read").expect("still");
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
        assert_eq!(read_small(&file, &meta, &mut Vec::new(), None).expect("read"), None);
        std::fs::write(&path, b"1").expect("write");
        assert_eq!(read_small(&file, &meta, &mut Vec::new(), None).expect("read"), None);
        std::os::unix::fs::symlink(&path, dir.path().join("l")).expect("link");
        assert!(open(&dir.path().join("l"), false).is_err());
        assert!(open(&dir.path().join("l"), true).is_ok());
        let fifo = dir.path().join("p");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("fifo");
        assert!(matches!(open(&fifo, false), Err(ReadFault::Kind)));
        assert!(matches!(
            open(Path::new("/proc/self/stat"), false).and_then(|(f, m)| read_small(
                &f,
                &m,
                &mut Vec::new(),
                None
            )),
            Err(ReadFault::Sizeless)
        ));
    }
}
