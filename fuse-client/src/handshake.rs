//! The INIT messages, with which the kernel and a new mount agree on the protocol.

use crate::fuse_wire::{IN_HEADER_BYTES, Message, OUT_HEADER_BYTES, out_header, u32_at, u64_at};
use serde::{Deserialize, Serialize};

/// The major version of the protocol.
const MAJOR: u32 = 7;
/// The latest minor version that this module was written for.
const MINOR_MAX: u32 = 41;
/// The first minor version whose messages have the lengths that [`crate::fuse_wire`] writes.
const MINOR_MIN: u32 = 31;
const OPCODE_INIT: u32 = 26;

/// The longest message body, which also bounds the reply to a READ.
pub const MESSAGE_BYTES_MAX: u32 = 1 << 20;
const PAGE_BYTES: u32 = 4096;
/// The longest write that a mount announces if its requests are read into [`crate::request_memory`]. The
/// shortest buffer that the kernel fills depends on it. A read-only mount gets no write.
const WRITE_BYTES: u32 = 4096;
/// The READs of its read-ahead that the kernel may have in flight.
const BACKGROUND_MAX: u16 = 128;
/// With so many, the kernel takes the mount for slow.
const CONGESTED_AT: u16 = BACKGROUND_MAX / 4 * 3;

const ASYNC_READ: u32 = 1 << 0;
const DO_READDIRPLUS: u32 = 1 << 13;
const READDIRPLUS_AUTO: u32 = 1 << 14;
const NO_OPEN_SUPPORT: u32 = 1 << 17;
const PARALLEL_DIROPS: u32 = 1 << 18;
const MAX_PAGES: u32 = 1 << 22;
const CACHE_SYMLINKS: u32 = 1 << 23;
const NO_OPENDIR_SUPPORT: u32 = 1 << 24;
const EXPLICIT_INVAL_DATA: u32 = 1 << 25;
/// Says that the message has a second word of flags.
const INIT_EXT: u32 = 1 << 30;
/// In the second word: the kernel sends unanswered requests again when it is asked to (Linux 6.9).
const HAS_RESEND: u32 = 1 << 7;
/// What a mount uses, where the kernel offers it.
const WANTED: u32 = ASYNC_READ
    | DO_READDIRPLUS
    | READDIRPLUS_AUTO
    | NO_OPEN_SUPPORT
    | PARALLEL_DIROPS
    | MAX_PAGES
    | CACHE_SYMLINKS
    | NO_OPENDIR_SUPPORT
    | EXPLICIT_INVAL_DATA;

/// The kernel's first message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Init {
    unique: u64,
    major: u32,
    minor: u32,
    max_readahead: u32,
    flags: u32,
    more_flags: u32,
}

/// Why a mount and the kernel do not agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The first message is not INIT.
    #[error("the kernel's first message is no INIT")]
    NotInit,
    /// The kernel is older than Linux 5.4.
    #[error("the kernel speaks FUSE {0}.{1}; Linux 5.4 or later is needed")]
    TooOld(u32, u32),
}

/// What the kernel and the mount agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Agreed {
    /// Whether the kernel opens files without a request once a request was answered ENOSYS.
    pub no_open: bool,
    /// The same for directories.
    pub no_opendir: bool,
    /// Whether the kernel sends unanswered requests again when it is asked to.
    pub resend: bool,
    /// Tells this mount apart from all others of the machine since it started.
    #[serde(default)]
    pub tag: u64,
}

/// The reply to an INIT.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The kernel speaks a later major version. After this reply it sends an INIT of ours.
    Again(Vec<u8>),
    /// The mount may serve requests after this reply.
    Agreed(Vec<u8>, Agreed),
}

impl Init {
    /// Parses the kernel's first message.
    ///
    /// # Errors
    /// [`HandshakeError::NotInit`].
    pub fn parse(message: &[u8]) -> Result<Self, HandshakeError> {
        let parsed = || {
            let body = message.get(IN_HEADER_BYTES..)?;
            (u32_at(message, 4)? == OPCODE_INIT).then_some(())?;
            Some(Init {
                unique: u64_at(message, 8)?,
                major: u32_at(body, 0)?,
                minor: u32_at(body, 4)?,
                // A later major version may send nothing else.
                max_readahead: u32_at(body, 8).unwrap_or(0),
                flags: u32_at(body, 12).unwrap_or(0),
                more_flags: u32_at(body, 16).unwrap_or(0),
            })
        };
        parsed().ok_or(HandshakeError::NotInit)
    }

    /// Returns the reply. `tag` becomes [`Agreed::tag`]. Without `may_resend` the kernel sends no request
    /// again.
    ///
    /// # Errors
    /// [`HandshakeError::TooOld`].
    pub fn answer(&self, tag: u64, may_resend: bool) -> Result<Answer, HandshakeError> {
        if self.major > MAJOR {
            let mut out = Message::with_capacity(8);
            out.u32(MAJOR);
            out.u32(MINOR_MAX);
            return Ok(Answer::Again(self.message(&out.into_bytes())));
        }
        if (self.major, self.minor) < (MAJOR, MINOR_MIN) {
            return Err(HandshakeError::TooOld(self.major, self.minor));
        }
        let resend = may_resend && self.flags & INIT_EXT != 0 && self.more_flags & HAS_RESEND != 0;
        let (extended, more_flags) = if resend { (INIT_EXT, HAS_RESEND) } else { (0, 0) };
        let flags = self.flags & WANTED | extended;
        let mut out = Message::with_capacity(64);
        for n in [MAJOR, self.minor.min(MINOR_MAX), self.max_readahead, flags] {
            out.u32(n);
        }
        out.u16(BACKGROUND_MAX);
        out.u16(CONGESTED_AT);
        out.u32(if resend { MESSAGE_BYTES_MAX } else { WRITE_BYTES });
        // Times are exact to a nanosecond.
        out.u32(1);
        out.u16(u16::try_from(MESSAGE_BYTES_MAX / PAGE_BYTES).unwrap_or(u16::MAX));
        out.u16(0);
        out.u32(more_flags);
        // The rest is for features that this mount does not use.
        let mut out = out.into_bytes();
        out.resize(64, 0);
        let (no_open, no_opendir) = (flags & NO_OPEN_SUPPORT != 0, flags & NO_OPENDIR_SUPPORT != 0);
        let agreed = Agreed { no_open, no_opendir, resend, tag };
        Ok(Answer::Agreed(self.message(&out), agreed))
    }

    fn message(&self, payload: &[u8]) -> Vec<u8> {
        let mut message = Vec::with_capacity(OUT_HEADER_BYTES + payload.len());
        message.extend_from_slice(&out_header(self.unique, 0, payload.len()));
        message.extend_from_slice(payload);
        message
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn init(opcode: u32, numbers: &[u32]) -> Result<Init, HandshakeError> {
        let mut out = Message::with_capacity(64);
        out.u32(56);
        out.u32(opcode);
        out.u64(77);
        let mut bytes = out.into_bytes();
        bytes.resize(IN_HEADER_BYTES, 0);
        bytes.extend(numbers.iter().flat_map(|n| n.to_ne_bytes()));
        Init::parse(&bytes)
    }

    #[test]
    fn a_mount_takes_what_the_kernel_offers_and_no_more() {
        let offered = NO_OPEN_SUPPORT | MAX_PAGES | 1 << 30 | 1 << 5;
        let kernel = init(OPCODE_INIT, &[7, 45, 131_072, offered]).expect("an INIT");
        let Ok(Answer::Agreed(reply, agreed)) = kernel.answer(5, true) else { panic!("they agree") };
        assert_eq!(agreed, Agreed { no_open: true, no_opendir: false, resend: false, tag: 5 });
        assert_eq!((reply.len(), u32_at(&reply, 0), u64_at(&reply, 8)), (80, Some(80), Some(77)));
        let body = &reply[OUT_HEADER_BYTES..];
        let numbers = [0, 4, 8, 12].map(|at| u32_at(body, at).expect("there"));
        assert_eq!(numbers, [7, 41, 131_072, NO_OPEN_SUPPORT | MAX_PAGES]);
        assert_eq!(u32_at(body, 20), Some(4096), "max_write");
        assert_eq!(body[28..30], 256u16.to_ne_bytes(), "max_pages");
    }

    #[test]
    fn a_kernel_that_sends_requests_again_is_told_that_this_mount_knows() {
        let kernel = init(OPCODE_INIT, &[7, 45, 0, INIT_EXT | NO_OPEN_SUPPORT, HAS_RESEND | 1]);
        let kernel = kernel.expect("an INIT");
        let answer = |may_resend| match kernel.answer(5, may_resend) {
            Ok(Answer::Agreed(reply, agreed)) => (reply, agreed),
            other => panic!("they agree: {other:?}"),
        };
        let (reply, agreed) = answer(true);
        assert_eq!(agreed, Agreed { no_open: true, no_opendir: false, resend: true, tag: 5 });
        let body = &reply[OUT_HEADER_BYTES..];
        assert_eq!([12, 32].map(|at| u32_at(body, at)), [Some(INIT_EXT | NO_OPEN_SUPPORT), Some(HAS_RESEND)]);
        assert_eq!(u32_at(body, 20), Some(1 << 20), "max_write");
        let (reply, agreed) = answer(false);
        assert!(!agreed.resend);
        assert_eq!(u32_at(&reply[OUT_HEADER_BYTES..], 32), Some(0), "no flag in the second word");
    }

    #[test]
    fn other_versions_are_answered_or_named() {
        let later = init(OPCODE_INIT, &[8, 0]).expect("an INIT").answer(5, true);
        assert!(matches!(later, Ok(Answer::Again(reply)) if reply.len() == 24));
        let old = init(OPCODE_INIT, &[7, 30, 0, 0]).expect("an INIT").answer(5, true);
        assert_eq!(old, Err(HandshakeError::TooOld(7, 30)));
        assert_eq!(init(1, &[7, 31, 0, 0]), Err(HandshakeError::NotInit));
        assert_eq!(Init::parse(b"short"), Err(HandshakeError::NotInit));
    }
}
