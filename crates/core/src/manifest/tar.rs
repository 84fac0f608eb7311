//! Which byte ranges of a tar shard are its members: a reader of headers alone, fed with bytes
//! as they come. It owns no bytes of members and does no IO.
//!
//! Read are v7, ustar (with its name prefix), GNU (long names, binary sizes) and pax (`path` and
//! `size`). Refused, each with its own error: compressed archives, sparse files, archives in
//! several volumes, names that are not UTF-8. Links, devices and directories are reported and are no members.
//!
//! An archive ends at a block of zeros, or where its bytes end after a whole member.

mod header;
pub mod shard;
#[cfg(test)]
mod tests;

use super::PATH_BYTES_MAX;
use header::Header;

/// Everything in a tar archive is a multiple of this many bytes.
pub const BLOCK_BYTES: usize = 512;
/// No extended header (pax records, a long name) may be longer, in bytes.
pub const EXTENDED_BYTES_MAX: u64 = 1 << 20;

/// Something found in an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// A regular file.
    Member {
        /// Its name, as the archive has it (`./a` stays `./a`).
        name: String,
        /// Where in the archive its bytes begin.
        offset: u64,
        /// How many bytes it has.
        size: u64,
    },
    /// Something without bytes of its own.
    Other {
        /// Its name.
        name: String,
        /// What it is, in a word or two: "directory", "symbolic link".
        what: &'static str,
    },
}

/// Why an archive cannot be read. Offsets are those of the header at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadTar {
    /// It is compressed: members cannot be read by range.
    #[error("the archive is compressed ({0}): members could not be read by range. Decompress it first")]
    Compressed(&'static str),
    /// It is no tar archive at all.
    #[error("not a tar archive: the first block is no header")]
    NotTar,
    /// A header that does not check.
    #[error("damaged header at byte {offset}: {why}")]
    Header {
        /// Where the header begins.
        offset: u64,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A kind of member that cannot be served as a range of bytes.
    #[error("{what} at byte {offset} cannot be read by range. Write the archive without")]
    Unsupported {
        /// Where the header begins.
        offset: u64,
        /// What it is: "a sparse file", "a volume of several".
        what: &'static str,
    },
    /// A name that no entry can have.
    #[error("the name at byte {offset} is empty, not UTF-8, longer than 4096 bytes, or holds a NUL")]
    Name {
        /// Where the header begins.
        offset: u64,
    },
    /// Two members of one name, which no version can hold.
    #[error("the archive has two members of the name {name:?}")]
    Twice {
        /// The name.
        name: String,
    },
    /// The bytes end within a header or a member.
    #[error("the archive ends at byte {at}, within a member")]
    Short {
        /// How many bytes there were.
        at: u64,
    },
}

#[derive(Debug)]
enum State {
    /// Collecting a header.
    Header,
    /// Within an extended header: its kind, and how many of its bytes are still to come.
    Extended { kind: u8, left: u64 },
    /// Within bytes that are of no interest: a member's, or padding.
    Skip(u64),
    /// Past the end mark: everything is ignored.
    End,
}

/// Finds the members of one archive. Memory: one block and one extended header.
#[derive(Debug)]
pub struct TarScanner {
    at: u64,
    state: State,
    block: Vec<u8>,
    extended: Vec<u8>,
    /// What extended headers say of the next header.
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
    /// At the first byte of an archive.
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

    /// Where in the archive the next byte belongs.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.at
    }

    /// How many of the next bytes need not be fed but may be passed by [`Self::skip`];
    /// `u64::MAX` when the archive has ended.
    #[must_use]
    pub fn skippable(&self) -> u64 {
        match self.state {
            State::Skip(left) => left,
            State::End => u64::MAX,
            State::Header | State::Extended { .. } => 0,
        }
    }

    /// Passes over bytes, at most [`Self::skippable`] of them; returns how many were passed.
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

    /// Takes the next bytes, in pieces of any length; adds what they complete to `found`.
    ///
    /// # Errors
    /// [`BadTar`]; the scanner is of no more use then.
    pub fn feed(&mut self, mut bytes: &[u8], found: &mut Vec<Found>) -> Result<(), BadTar> {
        while !bytes.is_empty() {
            let skipped = self.skip(bytes.len() as u64);
            // No more than `bytes.len()`.
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
            // Their size, if any, is not that of bytes in the archive (Python's reader agrees).
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

    /// Takes an extended header at its word.
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
            // A long link target: links are not followed.
            _ => {}
        }
        Ok(())
    }
}

fn skip_or_header(bytes: u64) -> State {
    if bytes == 0 { State::Header } else { State::Skip(bytes) }
}

/// Bytes from the end of `size` bytes to the next block.
fn padding(size: u64) -> u64 {
    (BLOCK_BYTES as u64 - size % BLOCK_BYTES as u64) % BLOCK_BYTES as u64
}

/// Moves bytes into `to` until it has `whole`; returns the rest.
fn take<'a>(to: &mut Vec<u8>, whole: usize, bytes: &'a [u8], at: &mut u64) -> &'a [u8] {
    let (mine, rest) = bytes.split_at(bytes.len().min(whole - to.len()));
    to.extend_from_slice(mine);
    *at += mine.len() as u64;
    rest
}

/// A name, if an entry can have it.
fn text(name: Vec<u8>) -> Option<String> {
    let name = String::from_utf8(name).ok()?;
    (!name.is_empty() && name.len() <= PATH_BYTES_MAX && !name.contains('\0')).then_some(name)
}
