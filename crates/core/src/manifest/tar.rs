//! A scanner for tar archives: finds the byte ranges of members from the headers alone.
//!
//! The caller feeds bytes as they arrive. The scanner keeps no bytes of members and does no IO.
//!
//! It reads v7, ustar (with its name prefix), GNU (long names, binary sizes) and pax (`path` and `size`). It
//! rejects compressed archives, sparse files, archives in several volumes, and names that are not UTF-8, each
//! with its own error. It reports links, devices and directories, which are not members.
//!
//! An archive ends at a block of zeros, or where its bytes end after a whole member.

mod header;
pub mod shard;
#[cfg(test)]
mod tests;

use super::PATH_BYTES_MAX;
use header::Header;

/// The block size of tar, in bytes. Headers and members begin at multiples of it.
pub const BLOCK_BYTES: usize = 512;
/// The longest extended header (pax records, a long name), in bytes.
pub const EXTENDED_BYTES_MAX: u64 = 1 << 20;

/// An item of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// A regular file.
    Member {
        /// The name, as in the archive (`./a` stays `./a`).
        name: String,
        /// The offset of its bytes in the archive.
        offset: u64,
        /// Its length in bytes.
        size: u64,
    },
    /// An item without bytes of its own.
    Other {
        /// The name.
        name: String,
        /// The kind of the item: "directory", "symbolic link".
        what: &'static str,
    },
}

/// Why an archive is rejected. Offsets are those of the bad header.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadTar {
    /// The archive is compressed: members cannot be read by range.
    #[error("the archive is compressed ({0}): members could not be read by range. Decompress it first")]
    Compressed(&'static str),
    /// The bytes are not a tar archive.
    #[error("not a tar archive: the first block is no header")]
    NotTar,
    /// A header is damaged.
    #[error("damaged header at byte {offset}: {why}")]
    Header {
        /// The offset of the header.
        offset: u64,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// An item cannot be served as a range of bytes.
    #[error("{what} at byte {offset} cannot be read by range. Write the archive without")]
    Unsupported {
        /// The offset of the header.
        offset: u64,
        /// The kind of the item: "a sparse file", "a volume of several".
        what: &'static str,
    },
    /// No entry can have this name.
    #[error("the name at byte {offset} is empty, not UTF-8, longer than 4096 bytes, or holds a NUL")]
    Name {
        /// The offset of the header.
        offset: u64,
    },
    /// Two members have the same name. A version cannot hold both.
    #[error("the archive has two members of the name {name:?}")]
    Twice {
        /// The name.
        name: String,
    },
    /// The bytes end within a header or a member.
    #[error("the archive ends at byte {at}, within a member")]
    Short {
        /// The length of the archive in bytes.
        at: u64,
    },
}

/// What the next bytes are.
#[derive(Debug)]
enum State {
    /// Bytes of a header.
    Header,
    /// Bytes of an extended header: its kind, and how many of its bytes are missing.
    Extended { kind: u8, left: u64 },
    /// Bytes to skip: those of a member, or padding.
    Skip(u64),
    /// Bytes after the end mark, which are ignored.
    End,
}

/// Finds the members of one archive. Memory: one block and one extended header.
#[derive(Debug)]
pub struct TarScanner {
    at: u64,
    state: State,
    block: Vec<u8>,
    extended: Vec<u8>,
    /// The name and size that extended headers give to the next header.
    name: Option<Vec<u8>>,
    pax_name: Option<Vec<u8>>,
    pax_size: Option<u64>,
}

impl Default for TarScanner {
    fn default() -> Self {
        Self::new()
    }
}

impl TarScanner {
    /// Returns a scanner at the first byte of an archive.
    #[must_use]
    pub fn new() -> Self {
        TarScanner {
            at: 0,
            state: State::Header,
            block: Vec::with_capacity(BLOCK_BYTES),
            extended: Vec::new(),
            name: None,
            pax_name: None,
            pax_size: None,
        }
    }

    /// Returns the offset of the next byte in the archive.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.at
    }

    /// Returns how many of the next bytes [`Self::skip`] may pass over; `u64::MAX` after the archive's end.
    #[must_use]
    pub fn skippable(&self) -> u64 {
        match self.state {
            State::Skip(left) => left,
            State::End => u64::MAX,
            State::Header | State::Extended { .. } => 0,
        }
    }

    /// Passes over bytes, at most [`Self::skippable`]. Returns how many.
    pub fn skip(&mut self, bytes: u64) -> u64 {
        let n = bytes.min(self.skippable()).min(u64::MAX - self.at);
        self.at += n;
        if let State::Skip(left) = &mut self.state {
            *left -= n;
            if *left == 0 {
                self.state = State::Header;
            }
        }
        n
    }

    /// Reads the next bytes, in pieces of any length. Adds the items that they complete to `found`.
    ///
    /// # Errors
    /// [`BadTar`]. The scanner cannot be used after that.
    pub fn feed(&mut self, mut bytes: &[u8], found: &mut Vec<Found>) -> Result<(), BadTar> {
        while !bytes.is_empty() {
            let skipped = self.skip(bytes.len() as u64);
            // `skipped` is at most `bytes.len()`.
            bytes = &bytes[usize::try_from(skipped).unwrap_or(bytes.len())..];
            match &mut self.state {
                State::Skip(_) | State::End => {}
                State::Header => {
                    bytes = take(&mut self.block, BLOCK_BYTES, bytes, &mut self.at);
                    if self.block.len() == BLOCK_BYTES {
                        self.header(found)?;
                        self.block.clear();
                    }
                }
                State::Extended { kind, left } => {
                    let (kind, begun) = (*kind, self.extended.len());
                    // Bounded by EXTENDED_BYTES_MAX when the header was read.
                    let whole = begun + usize::try_from(*left).unwrap_or(usize::MAX);
                    bytes = take(&mut self.extended, whole, bytes, &mut self.at);
                    *left -= (self.extended.len() - begun) as u64;
                    if *left == 0 {
                        self.state = skip_or_header(padding(self.extended.len() as u64));
                        let text = std::mem::take(&mut self.extended);
                        self.apply(kind, &text)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Ends the archive.
    ///
    /// # Errors
    /// [`BadTar::Short`] when it ends within a header or a member; [`BadTar::NotTar`] or
    /// [`BadTar::Compressed`] when it is shorter than a header.
    pub fn finish(&self) -> Result<(), BadTar> {
        let dangling = self.name.is_some() || self.pax_name.is_some() || self.pax_size.is_some();
        match self.state {
            State::End => Ok(()),
            _ if self.at == 0 => Err(BadTar::NotTar),
            State::Header if self.block.is_empty() && !dangling => Ok(()),
            State::Header if self.at < BLOCK_BYTES as u64 => {
                Err(header::compression(&self.block).map_or(BadTar::NotTar, BadTar::Compressed))
            }
            _ => Err(BadTar::Short { at: self.at }),
        }
    }

    fn header(&mut self, found: &mut Vec<Found>) -> Result<(), BadTar> {
        let offset = self.at - BLOCK_BYTES as u64;
        if self.block.iter().all(|b| *b == 0) {
            self.state = State::End;
            return Ok(());
        }
        let h = match Header::parse(&self.block) {
            Ok(h) => h,
            Err(_) if offset == 0 => {
                return Err(header::compression(&self.block).map_or(BadTar::NotTar, BadTar::Compressed));
            }
            Err(why) => return Err(BadTar::Header { offset, why }),
        };
        let unsupported = |what| Err(BadTar::Unsupported { offset, what });
        match h.kind {
            b'x' | b'g' | b'L' | b'K' => {
                if h.size > EXTENDED_BYTES_MAX {
                    return Err(BadTar::Header { offset, why: "an extended header of more than 1 MiB" });
                }
                self.state = State::Extended { kind: h.kind, left: h.size };
                if h.size == 0 {
                    self.state = State::Header;
                }
                return Ok(());
            }
            b'S' => return unsupported("a sparse file"),
            b'M' => return unsupported("a volume of several"),
            _ => {}
        }
        let long = self.name.take();
        let name = self.pax_name.take().or(long).unwrap_or(h.name);
        let size = self.pax_size.take().unwrap_or(h.size);
        let directory = name.ends_with(b"/");
        let name = text(name).ok_or(BadTar::Name { offset })?;
        let (what, has_bytes) = match h.kind {
            // Before ustar a directory was a file whose name ends in a slash.
            0 | b'0' | b'7' if directory => ("directory", false),
            0 | b'0' | b'7' => ("", true),
            b'1' => ("hard link", false),
            b'2' => ("symbolic link", false),
            b'3' => ("character device", false),
            b'4' => ("block device", false),
            b'5' => ("directory", false),
            b'6' => ("pipe", false),
            b'V' => ("volume label", false),
            _ => return unsupported("a member of unknown kind"),
        };
        if !has_bytes {
            // The size of such an item, if any, is not that of bytes in the archive. Python's reader does the
            // same.
            found.push(Found::Other { name, what });
            self.state = State::Header;
            return Ok(());
        }
        let whole = size.checked_add(padding(size)).filter(|n| self.at.checked_add(*n).is_some());
        let Some(whole) = whole else {
            return Err(BadTar::Header { offset, why: "a size that no archive can have" });
        };
        found.push(Found::Member { name, offset: self.at, size });
        self.state = skip_or_header(whole);
        Ok(())
    }

    /// Applies an extended header to the next header.
    fn apply(&mut self, kind: u8, text: &[u8]) -> Result<(), BadTar> {
        let offset = self.at - (text.len() + BLOCK_BYTES) as u64;
        match kind {
            b'L' => self.name = Some(header::until_nul(text).to_vec()),
            b'x' | b'g' => {
                for record in header::pax(text) {
                    let (key, value) = record.map_err(|why| BadTar::Header { offset, why })?;
                    match key {
                        _ if key.starts_with(b"GNU.sparse.") => {
                            return Err(BadTar::Unsupported { offset, what: "a sparse file" });
                        }
                        b"path" | b"size" if kind == b'g' => {
                            return Err(BadTar::Header { offset, why: "a name or size for all members" });
                        }
                        b"path" => self.pax_name = Some(value.to_vec()),
                        b"size" => {
                            let size = std::str::from_utf8(value).ok().and_then(|v| v.parse().ok());
                            self.pax_size =
                                Some(size.ok_or(BadTar::Header { offset, why: "a size that is no number" })?);
                        }
                        _ => {}
                    }
                }
            }
            // A long link target (`K`) is ignored: links are not members.
            _ => {}
        }
        Ok(())
    }
}

fn skip_or_header(bytes: u64) -> State {
    if bytes == 0 { State::Header } else { State::Skip(bytes) }
}

/// Returns the number of bytes from the end of `size` bytes to the next block.
fn padding(size: u64) -> u64 {
    (BLOCK_BYTES as u64 - size % BLOCK_BYTES as u64) % BLOCK_BYTES as u64
}

/// Moves bytes into `to` until it has `whole` bytes. Returns the rest.
fn take<'a>(to: &mut Vec<u8>, whole: usize, bytes: &'a [u8], at: &mut u64) -> &'a [u8] {
    let (mine, rest) = bytes.split_at(bytes.len().min(whole - to.len()));
    to.extend_from_slice(mine);
    *at += mine.len() as u64;
    rest
}

/// Returns a name if an entry can have it.
fn text(name: Vec<u8>) -> Option<String> {
    let name = String::from_utf8(name).ok()?;
    (!name.is_empty() && name.len() <= PATH_BYTES_MAX && !name.contains('\0')).then_some(name)
}
