//! I1: the one gate for bytes.
//!
//! A [`Verified`] can be made only by hashing every byte of it. All code that stores or sends a chunk takes
//! this type, so unchecked bytes cannot be stored or sent.

use crate::{
    Hash,
    groups::{GROUPED_BYTES_MIN, GroupHasher, GroupHashes, GroupRun},
};
use bytes::Bytes;
use std::ops::Range;

/// The bytes that are read and then hashed at once. They fit in a second-level cache beside their copy, and
/// are enough for the hash to use all lanes. A multiple of the length of a group.
const PIECE_BYTES: usize = 256 << 10;

/// A whole chunk whose bytes hash to its name, or a run of groups of a chunk, which hash to what they must.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    hash: Hash,
    bytes: Bytes,
}

/// What bytes must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Bytes with this hash.
    Whole(Hash),
    /// A run of groups of a chunk.
    Run(GroupRun),
}

impl From<Hash> for Expected {
    fn from(hash: Hash) -> Self {
        Expected::Whole(hash)
    }
}

impl From<GroupRun> for Expected {
    fn from(run: GroupRun) -> Self {
        Expected::Run(run)
    }
}

impl Expected {
    /// Returns the name of the bytes: their hash, or the name of the run.
    #[must_use]
    pub fn name(&self) -> Hash {
        match self {
            Expected::Whole(hash) => *hash,
            Expected::Run(run) => run.name(),
        }
    }
}

/// Bytes do not have the expected hash.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes hash to {got}, expected {expected}")]
pub struct Mismatch {
    /// The expected hash, or the name of the expected run.
    pub expected: Hash,
    /// The hash of the bytes.
    pub got: Hash,
    /// The number of bytes.
    pub len: usize,
}

/// Bytes on their way to be [`Verified`].
enum Hashing {
    Whole(Hash, Box<blake3::Hasher>),
    /// Group by group, so that the hashes of the groups remain.
    Groups(Hash, Box<GroupHasher>),
    Run(GroupRun, bool),
}

impl Hashing {
    fn new(expected: Expected, wants_groups: bool) -> Self {
        match expected {
            Expected::Whole(hash) if wants_groups => Hashing::Groups(hash, Box::default()),
            Expected::Whole(hash) => Hashing::Whole(hash, Box::default()),
            Expected::Run(run) => Hashing::Run(run, true),
        }
    }

    /// Adds the piece at byte `at`. All pieces but the last are as long as [`PIECE_BYTES`].
    fn add(&mut self, at: usize, piece: &[u8]) {
        match self {
            Hashing::Whole(_, hasher) => drop(hasher.update(piece)),
            Hashing::Groups(_, hasher) => hasher.update(piece),
            Hashing::Run(run, right) => *right = *right && run.has(at, piece),
        }
    }

    /// Returns the name of the bytes, with the hashes of their groups if they were wanted.
    fn end(self, bytes: &[u8]) -> Result<(Hash, Option<GroupHashes>), Mismatch> {
        let len = bytes.len();
        match self {
            Hashing::Run(run, right) if right && len == run.range().len() => Ok((run.name(), None)),
            Hashing::Run(run, _) => Err(Mismatch { expected: run.name(), got: Hash::of(bytes), len }),
            Hashing::Whole(expected, hasher) => {
                let got = Hash::from(hasher.finalize());
                if got == expected { Ok((got, None)) } else { Err(Mismatch { expected, got, len }) }
            }
            Hashing::Groups(expected, hasher) => {
                let (got, groups) = hasher.finish();
                if got == expected { Ok((got, groups)) } else { Err(Mismatch { expected, got, len }) }
            }
        }
    }
}

/// Bytes that were verified, and the hashes of their groups, if they are a chunk that has them.
pub type Grouped = (Verified, Option<GroupHashes>);

impl Verified {
    /// Returns `bytes` as verified if they are what is expected. CPU-bound: large buffers belong on a
    /// blocking thread.
    ///
    /// # Errors
    /// [`Mismatch`] when the hash differs.
    pub fn check(expected: impl Into<Expected>, bytes: Bytes) -> Result<Self, Mismatch> {
        let mut hashing = Hashing::new(expected.into(), false);
        hashing.add(0, &bytes);
        let (hash, _) = hashing.end(&bytes)?;
        Ok(Verified { hash, bytes })
    }

    /// As [`Verified::check`], and returns the hashes of the groups of a chunk that is read in parts.
    ///
    /// # Errors
    /// [`Mismatch`] when the hash differs.
    pub fn check_grouped(expected: impl Into<Expected>, bytes: Bytes) -> Result<Grouped, Mismatch> {
        let mut hashing = Hashing::new(expected.into(), bytes.len() >= GROUPED_BYTES_MIN as usize);
        hashing.add(0, &bytes);
        let (hash, groups) = hashing.end(&bytes)?;
        Ok((Verified { hash, bytes }, groups))
    }

    /// Fills `buffer` piece by piece with `fill`, and returns it as verified if it is what is expected.
    ///
    /// `fill` gets the offset of each piece, from the first piece to the last. Each piece is hashed while it
    /// is still in the processor's cache. Blocks as long as `fill` does.
    ///
    /// # Errors
    /// The error of `fill`; the inner [`Mismatch`] when the hash differs.
    pub fn fill<B, E>(
        expected: impl Into<Expected>,
        buffer: B,
        fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<Result<Self, Mismatch>, E>
    where
        B: AsRef<[u8]> + AsMut<[u8]> + Send + 'static,
    {
        let filled = Self::fill_hashing(Hashing::new(expected.into(), false), buffer, fill)?;
        Ok(filled.map(|(verified, _)| verified))
    }

    /// As [`Verified::fill`], and returns the hashes of the groups of a chunk that is read in parts.
    ///
    /// # Errors
    /// As [`Verified::fill`].
    pub fn fill_grouped<B, E>(
        expected: impl Into<Expected>,
        buffer: B,
        fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<Result<Grouped, Mismatch>, E>
    where
        B: AsRef<[u8]> + AsMut<[u8]> + Send + 'static,
    {
        let wants_groups = buffer.as_ref().len() >= GROUPED_BYTES_MIN as usize;
        Self::fill_hashing(Hashing::new(expected.into(), wants_groups), buffer, fill)
    }

    fn fill_hashing<B, E>(
        mut hashing: Hashing,
        mut buffer: B,
        mut fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<Result<Grouped, Mismatch>, E>
    where
        B: AsRef<[u8]> + AsMut<[u8]> + Send + 'static,
    {
        let mut at = 0;
        for piece in buffer.as_mut().chunks_mut(PIECE_BYTES) {
            fill(at, piece)?;
            hashing.add(at, piece);
            at += piece.len();
        }
        Ok(hashing.end(buffer.as_ref()).map(|(hash, groups)| {
            let bytes = Bytes::from_owner(buffer);
            (Verified { hash, bytes }, groups)
        }))
    }

    /// Hashes bytes and returns them under that hash.
    #[must_use]
    pub fn of(bytes: Bytes) -> Self {
        Verified { hash: Hash::of(&bytes), bytes }
    }

    /// Returns the chunk's hash, or the name of the run.
    #[must_use]
    pub fn hash(&self) -> Hash {
        self.hash
    }

    /// Returns the whole chunk, or the run. A clone shares the memory.
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Returns a part of the bytes, or `None` when the range reaches past the end.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Option<Bytes> {
        (range.start <= range.end && range.end <= self.bytes.len()).then(|| self.bytes.slice(range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i1_only_matching_bytes_pass() {
        let v = Verified::of(Bytes::from_static(b"chunk"));
        assert_eq!(Verified::check(v.hash(), v.bytes().clone()), Ok(v.clone()));
        let err = Verified::check(v.hash(), Bytes::from_static(b"chunK")).expect_err("one flipped bit");
        assert_eq!((err.expected, err.len), (v.hash(), 5));
        assert_eq!(v.slice(1..3), Some(Bytes::from_static(b"hu")));
        assert_eq!(v.slice(3..6), None);
    }

    #[test]
    fn i1_bytes_filled_in_pieces_are_hashed() {
        let want: Vec<u8> = (0..3 * PIECE_BYTES + 5).map(|i| (i % 251) as u8).collect();
        let from = |want: &[u8], flip: Option<usize>| {
            let mut bytes = want.to_vec();
            if let Some(i) = flip {
                bytes[i] ^= 1;
            }
            move |at: usize, piece: &mut [u8]| -> Result<(), ()> {
                piece.copy_from_slice(bytes.get(at..at + piece.len()).ok_or(())?);
                Ok(())
            }
        };
        for len in [0, 1, PIECE_BYTES, PIECE_BYTES + 1, want.len()] {
            let (want, hash) = (&want[..len], Hash::of(&want[..len]));
            let v = Verified::fill(hash, vec![0; len], from(want, None)).expect("filled").expect("right");
            assert_eq!((v.bytes().as_ref(), v.hash()), (want, hash));
            for flip in [0, len / 2, len.saturating_sub(1)].into_iter().filter(|_| len > 0) {
                let wrong = Verified::fill(hash, vec![0; len], from(want, Some(flip))).expect("filled");
                assert_eq!(wrong.expect_err("one flipped bit").expected, hash);
            }
        }
        let short = Verified::fill(Hash::of(&want), vec![0; want.len()], from(&want[1..], None));
        assert_eq!(short, Err(()), "an error of `fill` is returned");
    }

    #[test]
    fn i1_a_chunk_gives_the_hashes_by_which_its_runs_are_checked() {
        let bytes: Vec<u8> = (0..3 * PIECE_BYTES + 5).map(|i| (i % 249) as u8).collect();
        let hash = Hash::of(&bytes);
        let checked = Verified::check_grouped(hash, bytes.clone().into()).expect("the right bytes");
        let filled = Verified::fill_grouped(hash, vec![0; bytes.len()], |at, piece| {
            piece.copy_from_slice(&bytes[at..at + piece.len()]);
            Ok::<_, ()>(())
        });
        assert_eq!(filled.expect("filled").expect("right"), checked);
        let groups = std::sync::Arc::new(checked.1.expect("long enough"));
        let run = groups.run(&(PIECE_BYTES - 1..2 * PIECE_BYTES + 1)).expect("inside");
        let of_run = Bytes::copy_from_slice(&bytes[run.range()]);
        let v = Verified::check(run.clone(), of_run.clone()).expect("the run");
        assert_eq!((v.hash(), v.bytes()), (run.name(), &of_run));
        let fill = |flip: usize| {
            let mut bytes = of_run.to_vec();
            bytes[flip] ^= 1;
            Verified::fill(run.clone(), vec![0; bytes.len()], move |at, piece| {
                piece.copy_from_slice(&bytes[at..at + piece.len()]);
                Ok::<_, ()>(())
            })
        };
        for flip in [0, PIECE_BYTES + 7, of_run.len() - 1] {
            assert_eq!(fill(flip).expect("filled").expect_err("a flipped bit").expected, run.name());
        }
        for wrong in [of_run.slice(1..), of_run.slice(..of_run.len() - 1), Bytes::new(), bytes.clone().into()]
        {
            assert!(Verified::check(run.clone(), wrong).is_err());
        }
        let wrong = Verified::check_grouped(Hash::of(b"other"), bytes.into()).expect_err("another name");
        assert_eq!(wrong.got, hash);
        let short = Bytes::from_static(b"short");
        assert_eq!(Verified::check_grouped(Hash::of(&short), short).expect("right").1, None);
    }
}
