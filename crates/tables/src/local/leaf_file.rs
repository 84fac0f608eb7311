//! A file of leaves: the leaves one after the other, their directory, and a footer of fixed length.
//!
//! The footer says which part of which version this is, and hashes the directory. The directory hashes each
//! leaf. So a read of one leaf checks all that it believes, and reads no more than that leaf.

use super::LocalTable;
use crate::leaf::Buffer;
use fletch_core::Hash;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The first bytes of the footer. They name the format, its version, and the byte order of the numbers.
const MAGIC: u64 = u64::from_le_bytes(*b"fltleaf3");
/// The largest directory that is read, in bytes: 2,048 leaves with paths of the greatest length.
const DIRECTORY_BYTES_MAX: u64 = 16 << 20;
/// The largest leaf, in bytes. A part's slices could all be in one leaf.
const LEAF_BYTES_MAX: u64 = 1 << 30;
/// The most bytes of leaves that are read before somebody needs them. Eight leaves of short files have 40 KB.
const AHEAD_BYTES_MAX: u64 = 128 << 10;

/// The part that a file is about, and the table of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    /// What [`super::version_hash`] returns.
    pub version: Hash,
    pub part: usize,
    pub table: LocalTable,
}

/// A leaf to write.
pub(crate) struct NewLeaf<'a> {
    /// The path of its first row; empty if its rows have no paths.
    pub first: &'a [u8],
    pub bytes: &'a [u8],
}

/// Where the leaves of a file are.
#[derive(Debug)]
pub(crate) struct Directory {
    leaves: Box<[Place]>,
    firsts: Box<[u8]>,
}

/// One leaf of a file. There are many, so it is small: half a hash is enough to notice other bytes.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Place {
    /// Where it begins in the file.
    offset: u32,
    len: u32,
    /// Where the path of its first row ends among those of all leaves.
    first_end: u32,
    hash: [u8; 16],
}

fn leaf_hash(bytes: &[u8]) -> [u8; 16] {
    let mut half = [0; 16];
    half.copy_from_slice(&Hash::of(bytes).0[..16]);
    half
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Footer {
    magic: u64,
    table: u32,
    leaves: u32,
    part: u64,
    directory_at: u64,
    directory_hash: Hash,
    version: Hash,
}

impl Footer {
    fn new(of: &Identity, leaves: usize, directory_at: u64, directory: &[u8]) -> Self {
        Footer {
            magic: MAGIC,
            table: of.table as u32,
            leaves: u32::try_from(leaves).unwrap_or(u32::MAX),
            part: of.part as u64,
            directory_at,
            directory_hash: Hash::of(directory),
            version: of.version,
        }
    }
}

impl Directory {
    /// The number of leaves.
    pub fn len(&self) -> usize {
        self.leaves.len()
    }

    /// Returns a leaf and those of the `ahead` leaves after it that have [`AHEAD_BYTES_MAX`] in sum.
    pub fn run(&self, leaf: usize, ahead: usize) -> Range<usize> {
        let mut bytes = 0;
        let fits = |place: &&Place| {
            bytes += u64::from(place.len);
            bytes <= AHEAD_BYTES_MAX
        };
        leaf..leaf + 1 + self.leaves.iter().skip(leaf + 1).take(ahead).take_while(fits).count()
    }

    /// The path of a leaf's first row.
    ///
    /// # Panics
    /// When there is no such leaf.
    pub fn first(&self, leaf: usize) -> &[u8] {
        let start = if leaf == 0 { 0 } else { self.leaves[leaf - 1].first_end };
        // `of_bytes` has checked the ends.
        &self.firsts[start as usize..self.leaves[leaf].first_end as usize]
    }

    /// The size in memory, in bytes.
    pub fn footprint(&self) -> usize {
        size_of::<Self>() + size_of_val(&*self.leaves) + self.firsts.len()
    }

    fn of_bytes(bytes: &[u8], leaves: usize) -> Option<Self> {
        let (places, firsts) = bytes.split_at_checked(leaves.checked_mul(size_of::<Place>())?)?;
        // Copied one by one: the bytes need not lie where numbers may.
        let places = places.chunks_exact(size_of::<Place>());
        let places: Box<[Place]> = places.map(|p| Place::read_from_bytes(p).ok()).collect::<Option<_>>()?;
        let mut end = 0;
        for place in &places {
            if place.first_end < end || place.first_end as usize > firsts.len() {
                return None;
            }
            end = place.first_end;
        }
        (!places.is_empty()).then(|| Directory { leaves: places, firsts: firsts.into() })
    }
}

/// Writes a file. Returns its length.
///
/// # Errors
/// Those of the system; [`io::ErrorKind::FileTooLarge`] if it would break a limit of the reader.
pub(super) fn write<'a>(
    file: &mut File,
    of: &Identity,
    leaves: impl Iterator<Item = NewLeaf<'a>>,
) -> io::Result<u64> {
    let mut file = BufWriter::with_capacity(1 << 18, file);
    let (mut places, mut firsts, mut at) = (Vec::new(), Vec::new(), 0u64);
    let number = |n: u64| u32::try_from(n).map_err(|_| too_long());
    for leaf in leaves {
        let len = Some(leaf.bytes.len() as u64).filter(|len| *len <= LEAF_BYTES_MAX).ok_or_else(too_long)?;
        file.write_all(leaf.bytes)?;
        firsts.extend_from_slice(leaf.first);
        let (offset, first_end) = (number(at)?, number(firsts.len() as u64)?);
        places.push(Place { offset, len: number(len)?, first_end, hash: leaf_hash(leaf.bytes) });
        at += len;
    }
    let mut directory = places.as_bytes().to_vec();
    directory.extend_from_slice(&firsts);
    if directory.len() as u64 > DIRECTORY_BYTES_MAX {
        return Err(too_long());
    }
    let footer = Footer::new(of, places.len(), at, &directory);
    file.write_all(&directory)?;
    file.write_all(footer.as_bytes())?;
    file.flush()?;
    Ok(at + directory.len() as u64 + size_of::<Footer>() as u64)
}

/// Reads the directory of a file that has this identity.
///
/// # Errors
/// Those of the system; [`io::ErrorKind::InvalidData`] if the file is another, or damaged.
pub(super) fn read_directory(file: &File, of: &Identity) -> io::Result<Directory> {
    let len = file.metadata()?.len();
    let footer_at = len.checked_sub(size_of::<Footer>() as u64).ok_or_else(cut_short)?;
    let mut bytes = [0; size_of::<Footer>()];
    file.read_exact_at(&mut bytes, footer_at)?;
    let footer = Footer::read_from_bytes(&bytes).map_err(|_| cut_short())?;
    let directory_len = footer_at.checked_sub(footer.directory_at).filter(|len| *len <= DIRECTORY_BYTES_MAX);
    let mut directory =
        vec![0; usize::try_from(directory_len.ok_or_else(cut_short)?).map_err(io::Error::other)?];
    file.read_exact_at(&mut directory, footer.directory_at)?;
    let leaves = footer.leaves as usize;
    let expected = Footer::new(of, leaves, footer.directory_at, &directory);
    if footer.as_bytes() != expected.as_bytes() {
        return Err(damaged("it is not the file of this part"));
    }
    Directory::of_bytes(&directory, leaves).ok_or_else(|| damaged("its directory breaks the format"))
}

/// Reads one leaf, and checks it against the directory.
///
/// # Errors
/// As [`read_directory`].
pub(super) fn read_leaf<T>(
    file: &File,
    directory: &Directory,
    leaf: usize,
    parse: impl FnOnce(Buffer) -> Option<T>,
) -> io::Result<T> {
    let place = directory.leaves.get(leaf).ok_or_else(|| damaged("it has no such leaf"))?;
    let mut buffer = Buffer::zeroed(place.len as usize);
    file.read_exact_at(buffer.bytes_mut(), place.offset.into())?;
    if leaf_hash(buffer.bytes()) != place.hash {
        return Err(damaged("a leaf has other bytes than its directory says"));
    }
    parse(buffer).ok_or_else(|| damaged("a leaf breaks the format"))
}

fn too_long() -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, "the part is too long for a local file")
}

fn cut_short() -> io::Error {
    damaged("it is too short, or its footer is damaged")
}

fn damaged(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
