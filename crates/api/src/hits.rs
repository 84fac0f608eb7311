//! The protocol of a hit connection: a client of this machine asks for bytes that the server has at hand.
//!
//! The connection begins as HTTP/1.1 on the unix socket: `GET /v1/hits` with `Connection: upgrade` and
//! `Upgrade: fletch-hits/4`. The server checks it like any request and answers 101. Then the client sends
//! requests, and the server answers them in their order. Numbers are little-endian.
//!
//! ```text
//! request  length u16 · kind u8 · job u8 · dataset u8 · target u8 · size u32 · place u32 · root [32]
//!          · hash [32] · the names of job and dataset, of `job` and `dataset` bytes · for a file its path,
//!          for a part of a chunk where it begins, u32, for bytes that were read in slabs how many, u64
//! answer   status u8 · 0 [3] · length u32 · with HERE as many bytes, with IN_SLAB an offset u64
//! ```
//!
//! 1. `length` of a request counts the bytes after it, and is at most [`REQUEST_BYTES_MAX`].
//! 2. The server answers at once. If it has the bytes, it sends all `size` of them ([`HERE`]), or puts them
//!    into the window ([`IN_WINDOW`]), as `target` says. In each other case it answers [`NOT_HERE`] without
//!    bytes. Then the client asks by HTTP, which waits, and says what is wrong. A chunk and a file hash to
//!    `hash`. A part of a chunk, and the hashes of a chunk's groups, are those of the chunk `hash`.
//! 3. A client may send up to [`REQUESTS_AHEAD_MAX`] requests for the window before it reads their answers.
//!    It waits for each answer with bytes before it sends more: else both sides might wait for each other.
//! 4. A request that breaks these rules ends the connection.
//!
//! # The window
//!
//! A client that wants one sends its length ([`window_request`]). The server makes the memory, and answers
//! with [`IN_WINDOW`], the length and a descriptor (`SCM_RIGHTS`), or with [`NOT_HERE`]. The client maps the
//! memory, touches each page, and sends [`WINDOW_READY`]. The server answers with [`IN_WINDOW`] and the
//! length if each page is there, or with [`NOT_HERE`]. So the memory counts for the client, and the server
//! takes no descriptor of a client: calls on it could wait for the client.
//!
//! Then `place` is where bytes go, from the beginning of the window. The server writes there and nowhere
//! else, so the client must not use that place until the answer. It uses its other places as it likes.
//!
//! Another window replaces this one; the client asks for it when no request waits for its answer. A
//! connection gets at most [`WINDOWS_MAX`] windows of at most [`WINDOW_BYTES_MAX`] bytes.
//!
//! # Slabs
//!
//! A client may ask where a chunk lies on the server's disk. It names the length of the chunk, or 0 if it
//! does not know that. The answer is [`IN_SLAB`], the length of the chunk, a descriptor of the slab file that
//! can only be read, and the chunk's offset there; or [`NOT_HERE`]. Whoever reads there checks each byte: the
//! file may lose the chunk, and be cut, at any time.
//!
//! The client then tells how many bytes it read ([`Wanted::Read`], of size 0), so that they are counted for
//! the job and the dataset. The answer is [`HERE`] without bytes. After [`NOT_HERE`] the client forgets where
//! chunks lie: its access has ended.

use bytes::{Buf, BufMut};
use fletch_core::{DatasetName, Hash, JobName, Root};

/// The name and version of the protocol, in the `Upgrade` header.
pub const PROTOCOL: &str = "fletch-hits/4";
/// The versions before, which servers still speak. `/3` has no slabs; `/2` has no parts of chunks and no
/// hashes of groups, either.
pub const PROTOCOLS_BEFORE: [&str; 2] = ["fletch-hits/3", "fletch-hits/2"];
/// The longest window, in bytes.
pub const WINDOW_BYTES_MAX: u32 = 32 << 20;
/// The most windows of a connection. Each is at least twice as long as the one before.
pub const WINDOWS_MAX: u32 = 8;
/// The length of a request for a window, after its length.
pub const WINDOW_REQUEST_BYTES: usize = 4;
/// The request that says that each page of the window is there.
pub const WINDOW_READY: [u8; 2] = [0, 0];
/// The most requests that wait for their answers.
pub const REQUESTS_AHEAD_MAX: usize = 64;
/// The most bytes of requests that wait for their answers.
pub const REQUEST_BYTES_AHEAD_MAX: usize = 32 << 10;
/// The length of the fixed part of a request, after its length.
pub const FIXED_BYTES: usize = 76;
/// The most bytes of a request after its length: the fixed part, two names, and the longest path.
pub const REQUEST_BYTES_MAX: usize = 8 << 10;
/// The length of the head of an answer.
pub const ANSWER_HEAD_BYTES: usize = 8;
/// The length of the offset after the head of [`IN_SLAB`].
pub const SLAB_OFFSET_BYTES: usize = 8;
/// The status of an answer with bytes.
pub const HERE: u8 = 1;
/// The status of an answer whose bytes are in the window, and of one that offers or opens a window.
pub const IN_WINDOW: u8 = 2;
/// The status of an answer with the place of a chunk in a slab.
pub const IN_SLAB: u8 = 3;
/// The status of an answer without bytes, and of one without a window.
pub const NOT_HERE: u8 = 0;

/// Returns the request for a window of `bytes`.
#[must_use]
pub fn window_request(bytes: u32) -> [u8; 2 + WINDOW_REQUEST_BYTES] {
    let [a, b, c, d] = bytes.to_le_bytes();
    [4, 0, a, b, c, d]
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted<'a> {
    /// A whole chunk of the version.
    Chunk,
    /// The whole file at a path of the version, which lies in one chunk.
    File(&'a str),
    /// Bytes of a chunk of the version, from here on.
    Part(u32),
    /// The hashes of the groups of a chunk of the version.
    Groups,
    /// Where a chunk of the version lies on the server's disk.
    Slab,
    /// Nothing. The client read so many bytes of the version in slabs, since it last said so.
    Read(u64),
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HitRequest<'a> {
    /// The version.
    pub root: Root,
    /// What is asked for.
    pub wanted: Wanted<'a>,
    /// BLAKE3 of the bytes, or of the chunk that they are of.
    pub hash: Hash,
    /// The number of bytes.
    pub size: u32,
    /// Where the bytes go in the window. `None`: into the answer.
    pub place: Option<u32>,
    /// The job that the bytes are counted for.
    pub job: Option<JobName>,
    /// The dataset through which the client reads.
    pub dataset: Option<DatasetName>,
}

/// A request breaks the rules of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadHitRequest {
    /// It is shorter or longer than it says, or too long.
    #[error("the request has a wrong length")]
    Length,
    /// It asks for an unknown kind of bytes, or has more to say than this version knows.
    #[error("the request asks for an unknown kind of bytes")]
    Kind,
    /// Its job or its dataset has no valid name, or its path is not UTF-8.
    #[error("the request has an invalid name or path")]
    Name,
}

const KIND_CHUNK: u8 = 1;
const KIND_FILE: u8 = 2;
const KIND_PART: u8 = 3;
const KIND_GROUPS: u8 = 4;
const KIND_SLAB: u8 = 5;
const KIND_READ: u8 = 6;
const TO_ANSWER: u8 = 0;
const TO_WINDOW: u8 = 1;

impl HitRequest<'_> {
    /// Appends the request to `out`, with its length.
    ///
    /// # Errors
    /// [`BadHitRequest::Length`] if its path is too long for the protocol; `out` is then as it was.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), BadHitRequest> {
        let job = self.job.as_ref().map_or("", JobName::as_str);
        let dataset = self.dataset.as_ref().map_or("", DatasetName::as_str);
        let (begin, read);
        let (kind, rest): (u8, &[u8]) = match self.wanted {
            Wanted::Chunk => (KIND_CHUNK, &[]),
            Wanted::Groups => (KIND_GROUPS, &[]),
            Wanted::Slab => (KIND_SLAB, &[]),
            Wanted::Read(bytes) => {
                read = bytes.to_le_bytes();
                (KIND_READ, &read)
            }
            Wanted::File(path) => (KIND_FILE, path.as_bytes()),
            Wanted::Part(from) => {
                begin = from.to_le_bytes();
                (KIND_PART, &begin)
            }
        };
        let bytes = FIXED_BYTES + job.len() + dataset.len() + rest.len();
        let length = u16::try_from(bytes).ok().filter(|_| bytes <= REQUEST_BYTES_MAX);
        let lengths = (length, u8::try_from(job.len()), u8::try_from(dataset.len()));
        let (Some(length), Ok(job_length), Ok(dataset_length)) = lengths else {
            return Err(BadHitRequest::Length);
        };
        out.reserve(2 + bytes);
        out.put_u16_le(length);
        let (target, place) = self.place.map_or((TO_ANSWER, 0), |place| (TO_WINDOW, place));
        out.put_slice(&[kind, job_length, dataset_length, target]);
        out.put_u32_le(self.size);
        out.put_u32_le(place);
        out.put_slice(&self.root.0.0);
        out.put_slice(&self.hash.0);
        for bytes in [job.as_bytes(), dataset.as_bytes(), rest] {
            out.put_slice(bytes);
        }
        Ok(())
    }

    /// Parses the bytes of a request after its length.
    ///
    /// # Errors
    /// [`BadHitRequest`].
    pub fn parse(bytes: &[u8]) -> Result<HitRequest<'_>, BadHitRequest> {
        if bytes.len() > REQUEST_BYTES_MAX {
            return Err(BadHitRequest::Length);
        }
        let (mut fixed, rest) = bytes.split_at_checked(FIXED_BYTES).ok_or(BadHitRequest::Length)?;
        let (kind, job, dataset) = (fixed.get_u8(), fixed.get_u8(), fixed.get_u8());
        let (target, size, place) = (fixed.get_u8(), fixed.get_u32_le(), fixed.get_u32_le());
        let place = match (target, place) {
            (TO_ANSWER, 0) => None,
            (TO_WINDOW, place) => Some(place),
            _ => return Err(BadHitRequest::Kind),
        };
        let mut hash = || {
            let mut hash = [0; 32];
            fixed.copy_to_slice(&mut hash);
            Hash(hash)
        };
        let (root, hash) = (Root(hash()), hash());
        let (job, rest) = rest.split_at_checked(job.into()).ok_or(BadHitRequest::Length)?;
        let (dataset, rest) = rest.split_at_checked(dataset.into()).ok_or(BadHitRequest::Length)?;
        let text = |bytes| std::str::from_utf8(bytes).map_err(|_| BadHitRequest::Name);
        let wanted = match kind {
            KIND_CHUNK if rest.is_empty() => Wanted::Chunk,
            KIND_GROUPS if rest.is_empty() => Wanted::Groups,
            KIND_SLAB if rest.is_empty() => Wanted::Slab,
            KIND_READ => {
                let bytes = rest.try_into().map_err(|_| BadHitRequest::Length)?;
                Wanted::Read(u64::from_le_bytes(bytes))
            }
            KIND_PART => {
                let from = rest.try_into().map_err(|_| BadHitRequest::Length)?;
                Wanted::Part(u32::from_le_bytes(from))
            }
            KIND_CHUNK | KIND_GROUPS | KIND_SLAB => return Err(BadHitRequest::Length),
            KIND_FILE => Wanted::File(text(rest)?),
            _ => return Err(BadHitRequest::Kind),
        };
        let job = match text(job)? {
            "" => None,
            name => Some(JobName::new(name).map_err(|_| BadHitRequest::Name)?),
        };
        let dataset = match text(dataset)? {
            "" => None,
            name => Some(DatasetName::new(name).map_err(|_| BadHitRequest::Name)?),
        };
        Ok(HitRequest { root, wanted, hash, size, place, job, dataset })
    }
}

/// The head of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HitAnswer {
    /// As many bytes follow as were asked for.
    Here(u32),
    /// As many bytes as were asked for are in their place in the window. After [`window_request`] and
    /// [`WINDOW_READY`]: the window has so many bytes.
    InWindow(u32),
    /// The chunk, of so many bytes, is in the slab whose descriptor comes with this head. Its offset follows.
    InSlab(u32),
    /// The server does not have the bytes at hand.
    NotHere,
}

impl HitAnswer {
    /// Returns the bytes of the head.
    #[must_use]
    pub fn encode(self) -> [u8; ANSWER_HEAD_BYTES] {
        let (status, len) = match self {
            HitAnswer::Here(len) => (HERE, len),
            HitAnswer::InWindow(len) => (IN_WINDOW, len),
            HitAnswer::InSlab(len) => (IN_SLAB, len),
            HitAnswer::NotHere => (NOT_HERE, 0),
        };
        let [a, b, c, d] = len.to_le_bytes();
        [status, 0, 0, 0, a, b, c, d]
    }

    /// Parses a head. Returns `None` for one that no server of this version sends.
    #[must_use]
    pub fn parse(head: [u8; ANSWER_HEAD_BYTES]) -> Option<HitAnswer> {
        let [status, 0, 0, 0, a, b, c, d] = head else { return None };
        match (status, u32::from_le_bytes([a, b, c, d])) {
            (HERE, len) => Some(HitAnswer::Here(len)),
            (IN_WINDOW, len) => Some(HitAnswer::InWindow(len)),
            (IN_SLAB, len) => Some(HitAnswer::InSlab(len)),
            (NOT_HERE, 0) => Some(HitAnswer::NotHere),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(wanted: Wanted<'_>) -> HitRequest<'_> {
        HitRequest {
            root: Root(Hash([1; 32])),
            wanted,
            hash: Hash([2; 32]),
            size: 110_000,
            place: None,
            job: Some(JobName::new("train").expect("a name")),
            dataset: None,
        }
    }

    #[test]
    fn a_request_is_parsed_as_it_was_encoded() {
        let path = "a/b.jpg".repeat(1000);
        let files = [Wanted::File("a/b.jpg"), Wanted::File(&path)];
        let others = [Wanted::Part(0x0403_0201), Wanted::Groups, Wanted::Slab, Wanted::Read(u64::MAX)];
        for wanted in [Wanted::Chunk].into_iter().chain(files).chain(others) {
            for place in [None, Some(0), Some(u32::MAX)] {
                let (asked, mut out) = (HitRequest { place, ..request(wanted) }, vec![7]);
                asked.encode(&mut out).expect("it is short enough");
                let length = usize::from(u16::from_le_bytes([out[1], out[2]]));
                assert_eq!(length, out.len() - 3);
                assert_eq!(HitRequest::parse(&out[3..]), Ok(asked));
            }
        }
    }

    #[test]
    fn requests_that_break_the_rules_are_refused() {
        let path = "x".repeat(REQUEST_BYTES_MAX);
        let mut out = Vec::new();
        assert_eq!(request(Wanted::File(&path)).encode(&mut out), Err(BadHitRequest::Length));
        assert!(out.is_empty());
        request(Wanted::File("a")).encode(&mut out).expect("it is short");
        let whole = &out[2..];
        for (at, value, why) in [
            (0, 9, BadHitRequest::Kind),
            (3, 2, BadHitRequest::Kind),
            (8, 1, BadHitRequest::Kind),
            (0, KIND_CHUNK, BadHitRequest::Length),
            (0, KIND_PART, BadHitRequest::Length),
            (0, KIND_GROUPS, BadHitRequest::Length),
            (0, KIND_SLAB, BadHitRequest::Length),
            (0, KIND_READ, BadHitRequest::Length),
            (1, 200, BadHitRequest::Length),
            (FIXED_BYTES, b'/', BadHitRequest::Name),
            (whole.len() - 1, 0xff, BadHitRequest::Name),
        ] {
            let mut wrong = whole.to_vec();
            wrong[at] = value;
            assert_eq!(HitRequest::parse(&wrong), Err(why), "byte {at}");
        }
        for short in 0..FIXED_BYTES {
            assert_eq!(HitRequest::parse(&whole[..short]), Err(BadHitRequest::Length));
        }
        assert_eq!(HitRequest::parse(&vec![0; REQUEST_BYTES_MAX + 1]), Err(BadHitRequest::Length));
    }

    #[test]
    fn an_answer_is_parsed_as_it_was_encoded() {
        let here = [HitAnswer::Here(0), HitAnswer::Here(u32::MAX)];
        for answer in
            here.into_iter().chain([HitAnswer::InWindow(7), HitAnswer::InSlab(7), HitAnswer::NotHere])
        {
            assert_eq!(HitAnswer::parse(answer.encode()), Some(answer));
        }
        for wrong in [[4, 0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0]] {
            assert_eq!(HitAnswer::parse(wrong), None);
        }
    }
}
