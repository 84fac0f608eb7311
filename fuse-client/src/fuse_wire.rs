//! The messages of the FUSE protocol that a read-only mount receives and sends, as bytes. Pure.
//!
//! The layout is that of `linux/fuse.h`, protocol 7.31 and later, in the byte order of the machine.
//! [`crate::handshake`] has the INIT messages, which come before all others.

use crate::fs::attr::{Attr, CommonAttr, IO_BYTES, InodeKind};
use crate::fs::tree::{DirEntry, Totals};
use crate::requests::{BLOCK_BYTES, NAME_BYTES_MAX, TTL};
use std::time::UNIX_EPOCH;

/// The length of the header of a request, in bytes.
pub(crate) const IN_HEADER_BYTES: usize = 40;
/// Where a request has its number.
pub(crate) const UNIQUE_AT: usize = 8;
/// The length of the header of a reply, in bytes.
pub const OUT_HEADER_BYTES: usize = 16;
/// Entries of directories begin at multiples of this.
const ENTRY_ALIGN: usize = 8;
/// The length of an entry of a directory without its name, in bytes.
const ENTRY_HEAD_BYTES: usize = 24;
/// The kernel keeps the pages of the file when it is opened again.
const FOPEN_KEEP_CACHE: u32 = 1 << 1;
/// The kernel caches the listing of the directory.
const FOPEN_CACHE_DIR: u32 = 1 << 3;
/// The kernel sends no FLUSH for the file.
const FOPEN_NOFLUSH: u32 = 1 << 5;

/// A request of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The number of the request, which its reply repeats.
    pub unique: u64,
    /// The inode that the request is about.
    pub ino: u64,
    /// The thread that waits for it; 0 if this process cannot see that thread.
    pub pid: u32,
    /// What the kernel asks for.
    pub operation: Operation,
}

/// The operations that a read-only mount tells apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Look up a name in a directory.
    Lookup(Vec<u8>),
    /// Return the attributes of an inode.
    Getattr,
    /// Return the target of a symbolic link.
    Readlink,
    /// Open a file.
    Open,
    /// Read a file.
    Read {
        /// The first byte.
        offset: u64,
        /// The most bytes to return.
        size: u32,
        /// Whether the program bypasses the page cache.
        direct: bool,
    },
    /// Return the totals of the file system.
    Statfs,
    /// Return the value of an extended attribute, or its length if `size` is 0.
    Getxattr {
        /// The name of the attribute.
        name: Vec<u8>,
        /// The longest value that the caller takes.
        size: u32,
    },
    /// Return the names of the extended attributes, or their length if `size` is 0.
    Listxattr {
        /// The longest list that the caller takes.
        size: u32,
    },
    /// Open a directory.
    Opendir,
    /// List a directory.
    Readdir(Listing),
    /// List a directory with the attributes of its entries.
    Readdirplus(Listing),
    /// Close a file or a directory.
    Release,
    /// Forget inodes. Has no reply.
    Forget,
    /// The file system ends.
    Destroy,
    /// An operation that a read-only mount does not support.
    Other,
}

/// The part of a directory to list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listing {
    /// The position after which the listing begins.
    pub offset: u64,
    /// The longest reply, in bytes.
    pub size: u32,
}

/// A message that is no request of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the kernel sent a message of {0} bytes that is no FUSE request")]
pub struct Malformed(usize);

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    number(bytes, at).map(u32::from_ne_bytes)
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    number(bytes, at).map(u64::from_ne_bytes)
}

/// Returns the text before the first zero byte.
fn name(bytes: &[u8]) -> Option<Vec<u8>> {
    let end = bytes.iter().position(|b| *b == 0)?;
    Some(bytes[..end].to_vec())
}

/// Parses a message of the kernel.
///
/// # Errors
/// [`Malformed`]: the message is shorter than its operation needs.
pub fn parse(message: &[u8]) -> Result<Request, Malformed> {
    parsed(message).ok_or(Malformed(message.len()))
}

fn parsed(message: &[u8]) -> Option<Request> {
    let (opcode, unique, ino) = (u32_at(message, 4)?, u64_at(message, UNIQUE_AT)?, u64_at(message, 16)?);
    let pid = u32_at(message, 32)?;
    let body = message.get(IN_HEADER_BYTES..)?;
    let listing = || Some(Listing { offset: u64_at(body, 8)?, size: u32_at(body, 16)? });
    let operation = match opcode {
        1 => Operation::Lookup(name(body)?),
        2 | 42 => Operation::Forget,
        3 => Operation::Getattr,
        5 => Operation::Readlink,
        14 => Operation::Open,
        15 => {
            let Listing { offset, size } = listing()?;
            // The flags of the open file follow the owner of its locks.
            let direct = u32_at(body, 32)? & libc::O_DIRECT.cast_unsigned() != 0;
            Operation::Read { offset, size, direct }
        }
        17 => Operation::Statfs,
        18 | 29 => Operation::Release,
        22 => Operation::Getxattr { name: name(body.get(8..)?)?, size: u32_at(body, 0)? },
        23 => Operation::Listxattr { size: u32_at(body, 0)? },
        27 => Operation::Opendir,
        28 => Operation::Readdir(listing()?),
        38 => Operation::Destroy,
        44 => Operation::Readdirplus(listing()?),
        _ => Operation::Other,
    };
    Some(Request { unique, ino, pid, operation })
}

/// Whether the kernel sends a request again: it sets the highest bit of its number, which the reply repeats.
#[must_use]
pub fn is_resent(unique: u64) -> bool {
    unique >> 63 == 1
}

/// Returns the header of a reply with `len` bytes of payload. An errno of 0 means success.
#[must_use]
pub fn out_header(unique: u64, errno: i32, len: usize) -> [u8; OUT_HEADER_BYTES] {
    let mut out = Message::with_capacity(OUT_HEADER_BYTES);
    out.u32(u32::try_from(OUT_HEADER_BYTES + len).unwrap_or(u32::MAX));
    out.u32((-errno).cast_unsigned());
    out.u64(unique);
    let mut header = [0; OUT_HEADER_BYTES];
    header.copy_from_slice(&out.0);
    header
}

/// A message that is being written.
pub(crate) struct Message(Vec<u8>);

impl Message {
    pub fn with_capacity(bytes: usize) -> Self {
        Message(Vec::with_capacity(bytes))
    }

    pub fn u16(&mut self, n: u16) {
        self.0.extend_from_slice(&n.to_ne_bytes());
    }

    pub fn u32(&mut self, n: u32) {
        self.0.extend_from_slice(&n.to_ne_bytes());
    }

    pub fn u64(&mut self, n: u64) {
        self.0.extend_from_slice(&n.to_ne_bytes());
    }

    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn attr(&mut self, common: &CommonAttr, a: &Attr) {
        let created = common.created.duration_since(UNIX_EPOCH).unwrap_or_default();
        for n in [a.ino, a.size, a.blocks()] {
            self.u64(n);
        }
        // Access, modification and change.
        for _ in 0..3 {
            self.u64(created.as_secs());
        }
        for _ in 0..3 {
            self.u32(created.subsec_nanos());
        }
        self.u32(file_type(a.kind) | u32::from(a.kind.mode()));
        // 1 link for directories too: `find` then infers no number of subdirectories from it.
        for n in [1, common.uid, common.gid, 0, IO_BYTES, 0] {
            self.u32(n);
        }
    }

    fn entry(&mut self, common: &CommonAttr, attr: &Attr) {
        for n in [attr.ino, 0, TTL.as_secs(), TTL.as_secs()] {
            self.u64(n);
        }
        self.u32(0);
        self.u32(0);
        self.attr(common, attr);
    }

    fn dirent(&mut self, entry: &DirEntry) {
        self.u64(entry.attr.ino);
        self.u64(entry.offset);
        self.u32(u32::try_from(entry.name.len()).unwrap_or(u32::MAX));
        self.u32(file_type(entry.attr.kind) >> 12);
        self.0.extend_from_slice(entry.name.as_bytes());
        self.0.resize(self.0.len().next_multiple_of(ENTRY_ALIGN), 0);
    }
}

fn file_type(kind: InodeKind) -> u32 {
    match kind {
        InodeKind::Directory => libc::S_IFDIR,
        InodeKind::File => libc::S_IFREG,
        InodeKind::Symlink => libc::S_IFLNK,
    }
}

/// What a mount tells the kernel without being asked. The numbers are those of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Notification {
    /// Forget the attributes and pages of an inode.
    InvalidateInode = 2,
    /// Forget a name.
    InvalidateName = 3,
    /// Keep these pages.
    Store = 4,
    /// Send every unanswered request again.
    Resend = 7,
}

/// Returns the header of a notification with `len` bytes of payload.
#[must_use]
pub fn notification_header(kind: Notification, len: usize) -> [u8; OUT_HEADER_BYTES] {
    // It has no number of a request. Its kind stands where a reply has its error.
    out_header(0, -(kind as i32), len)
}

/// Returns the payload of [`Notification::InvalidateInode`]. A negative offset stands for no page; 0 bytes
/// stand for all from the offset on.
#[must_use]
pub fn invalidate_inode(ino: u64, offset: i64, bytes: i64) -> Vec<u8> {
    let mut out = Message::with_capacity(24);
    for n in [ino, offset.cast_unsigned(), bytes.cast_unsigned()] {
        out.u64(n);
    }
    out.0
}

/// Returns the payload of [`Notification::InvalidateName`].
#[must_use]
pub fn invalidate_name(parent: u64, name: &[u8]) -> Vec<u8> {
    let mut out = Message::with_capacity(17 + name.len());
    out.u64(parent);
    out.u32(u32::try_from(name.len()).unwrap_or(u32::MAX));
    out.u32(0);
    out.0.extend_from_slice(name);
    out.0.push(0);
    out.0
}

/// Returns the front of the payload of [`Notification::Store`]. The bytes follow.
#[must_use]
pub fn store_head(ino: u64, offset: u64, bytes: usize) -> Vec<u8> {
    let mut out = Message::with_capacity(24);
    out.u64(ino);
    out.u64(offset);
    out.u32(u32::try_from(bytes).unwrap_or(u32::MAX));
    out.u32(0);
    out.0
}

/// Returns the reply to a lookup. Without an inode the kernel caches that the name does not exist.
#[must_use]
pub fn entry_out(common: &CommonAttr, attr: Option<&Attr>) -> Vec<u8> {
    let mut out = Message::with_capacity(128);
    let none = Attr { ino: 0, kind: InodeKind::File, size: 0 };
    out.entry(common, attr.unwrap_or(&none));
    out.0
}

/// Returns the reply to a request for attributes.
#[must_use]
pub fn attr_out(common: &CommonAttr, attr: &Attr) -> Vec<u8> {
    let mut out = Message::with_capacity(104);
    out.u64(TTL.as_secs());
    out.u64(0);
    out.attr(common, attr);
    out.0
}

/// Returns the reply to an OPEN: the kernel keeps cached pages and sends no FLUSH.
#[must_use]
pub fn file_opened() -> Vec<u8> {
    opened(FOPEN_KEEP_CACHE | FOPEN_NOFLUSH)
}

/// Returns the reply to an OPENDIR: the kernel caches the listing.
#[must_use]
pub fn dir_opened() -> Vec<u8> {
    opened(FOPEN_KEEP_CACHE | FOPEN_CACHE_DIR)
}

fn opened(flags: u32) -> Vec<u8> {
    let mut out = Message::with_capacity(16);
    out.u64(0);
    out.u32(flags);
    out.u32(0);
    out.0
}

/// Returns the reply to a request for the totals: all blocks are used, and none is free.
#[must_use]
pub fn statfs_out(totals: Totals) -> Vec<u8> {
    let mut out = Message::with_capacity(80);
    for n in [totals.bytes.div_ceil(u64::from(BLOCK_BYTES)), 0, 0, totals.entries, 0] {
        out.u64(n);
    }
    for n in [IO_BYTES, NAME_BYTES_MAX, BLOCK_BYTES, 0, 0, 0, 0, 0, 0, 0] {
        out.u32(n);
    }
    out.0
}

/// Returns the reply to a request for the length of an extended attribute.
#[must_use]
pub fn xattr_length(len: usize) -> Vec<u8> {
    let mut out = Message::with_capacity(8);
    out.u32(u32::try_from(len).unwrap_or(u32::MAX));
    out.u32(0);
    out.0
}

/// The reply to a request for a part of a directory.
pub struct ListingReply {
    message: Message,
    bytes_max: usize,
    has_attributes: bool,
}

impl ListingReply {
    /// Returns an empty reply of at most `bytes_max` bytes, with or without the attributes of the entries.
    #[must_use]
    pub fn new(bytes_max: u32, has_attributes: bool) -> Self {
        let bytes_max = bytes_max as usize;
        ListingReply { message: Message::with_capacity(bytes_max.min(4096)), bytes_max, has_attributes }
    }

    /// Adds an entry. Returns whether the reply is full; then it does not hold the entry.
    #[must_use]
    pub fn add(&mut self, common: &CommonAttr, entry: &DirEntry) -> bool {
        let attributes = if self.has_attributes { 128 } else { 0 };
        let bytes = attributes + (ENTRY_HEAD_BYTES + entry.name.len()).next_multiple_of(ENTRY_ALIGN);
        if self.message.0.len() + bytes > self.bytes_max {
            return true;
        }
        if self.has_attributes {
            self.message.entry(common, &entry.attr);
        }
        self.message.dirent(entry);
        false
    }

    /// Returns the payload of the reply.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.message.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    const COMMON: CommonAttr = CommonAttr { uid: 7, gid: 8, created: UNIX_EPOCH };

    fn message(opcode: u32, body: &[u8]) -> Vec<u8> {
        let mut out = Message::with_capacity(64);
        out.u32(u32::try_from(IN_HEADER_BYTES + body.len()).expect("short"));
        out.u32(opcode);
        out.u64(99);
        out.u64(5);
        out.0.resize(IN_HEADER_BYTES, 0);
        out.0.extend_from_slice(body);
        out.0
    }

    #[test]
    fn requests_are_parsed_as_the_kernel_writes_them() {
        let of = |opcode, body: &[u8]| parse(&message(opcode, body)).expect("a request").operation;
        let request = parse(&message(1, b"name\0")).expect("a request");
        assert_eq!((request.unique, request.ino), (99, 5));
        assert_eq!(request.operation, Operation::Lookup(b"name".to_vec()));
        let mut read = Message::with_capacity(40);
        read.u64(0);
        read.u64(4096);
        read.u32(131_072);
        read.u32(0);
        read.u64(0);
        read.u32(libc::O_DIRECT.cast_unsigned());
        read.u32(0);
        assert_eq!(of(15, &read.0), Operation::Read { offset: 4096, size: 131_072, direct: true });
        assert_eq!(of(44, &read.0), Operation::Readdirplus(Listing { offset: 4096, size: 131_072 }));
        let mut xattr = Message::with_capacity(16);
        xattr.u64(64);
        xattr.0.extend_from_slice(b"user.x\0");
        assert_eq!(of(22, &xattr.0), Operation::Getxattr { name: b"user.x".to_vec(), size: 64 });
        assert_eq!((of(42, &[]), of(36, &[]), of(4096, &[])), {
            (Operation::Forget, Operation::Other, Operation::Other)
        });
        assert_eq!(parse(&message(1, b"no end")), Err(Malformed(46)));
    }

    #[test]
    fn replies_have_the_lengths_of_the_protocol() {
        let attr = Attr::dir(1);
        assert_eq!(entry_out(&COMMON, Some(&attr)).len(), 128);
        assert_eq!(attr_out(&COMMON, &attr).len(), 104);
        assert_eq!((file_opened().len(), dir_opened().len(), xattr_length(1).len()), (16, 16, 8));
        assert_eq!(statfs_out(Totals { bytes: 1, entries: 1 }).len(), 80);
        let negative = entry_out(&COMMON, None);
        assert_eq!(u64_at(&negative, 0), Some(0), "a name without an inode");
        assert_eq!((invalidate_inode(2, -1, 0).len(), store_head(2, 0, 9).len()), (24, 24));
        assert_eq!(
            invalidate_name(1, b"ab"),
            [&1u64.to_ne_bytes()[..], &[2, 0, 0, 0, 0, 0, 0, 0], b"ab\0"].concat()
        );
        let told = notification_header(Notification::Store, 24);
        assert_eq!((u32_at(&told, 0), u32_at(&told, 4), u64_at(&told, 8)), (Some(40), Some(4), Some(0)));
        let header = out_header(3, libc::ENOENT, 0);
        let numbers = (u32_at(&header, 0), u32_at(&header, 4), u64_at(&header, 8));
        assert_eq!(numbers, (Some(16), Some((-libc::ENOENT).cast_unsigned()), Some(3)));
    }

    #[test]
    fn a_listing_never_exceeds_its_size() {
        let entry = |name: &str| DirEntry { name: name.into(), offset: 3, attr: Attr::dir(9) };
        let mut plain = ListingReply::new(64, false);
        assert!(!plain.add(&COMMON, &entry("ab")) && !plain.add(&COMMON, &entry("c")));
        assert!(plain.add(&COMMON, &entry("d")), "32 bytes each");
        assert_eq!(plain.into_bytes().len(), 64);
        let mut plus = ListingReply::new(160, true);
        assert!(!plus.add(&COMMON, &entry("ab")) && plus.add(&COMMON, &entry("c")));
        assert_eq!(plus.into_bytes().len(), 160);
        let later = CommonAttr { created: UNIX_EPOCH + Duration::from_nanos(5_000_000_006), ..COMMON };
        let attr = attr_out(&later, &Attr::dir(2));
        assert_eq!((u64_at(&attr, 40), u32_at(&attr, 64)), (Some(5), Some(6)), "seconds and nanoseconds");
    }

    proptest! {
        #[test]
        fn no_message_makes_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(request) = parse(&bytes) {
                prop_assert!(bytes.len() >= IN_HEADER_BYTES);
                if let Operation::Lookup(name) = request.operation {
                    prop_assert!(!name.contains(&0));
                }
            }
        }
    }
}
