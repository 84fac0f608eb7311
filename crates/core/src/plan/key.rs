//! The randomness of an epoch: a key that is derived from root, plan, seed and epoch number.
//!
//! So the same epoch has the same order on every server, and no server needs to store it.

use crate::hash::context;
use crate::{Hash, Root};

/// The key of one epoch's order: BLAKE3 in key-derivation mode over
/// `root ‖ plan hash ‖ seed u64 ‖ epoch u64` (little-endian).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OrderKey(pub [u8; 32]);

impl OrderKey {
    /// Returns the key of an epoch of a job with this seed, over a plan of a version.
    #[must_use]
    pub fn new(root: Root, plan: Hash, seed: u64, epoch: u64) -> Self {
        let mut h = blake3::Hasher::new_derive_key(context::ORDER);
        h.update(root.0.as_bytes());
        h.update(plan.as_bytes());
        h.update(&seed.to_le_bytes());
        h.update(&epoch.to_le_bytes());
        OrderKey(*h.finalize().as_bytes())
    }

    /// Returns the random stream for one purpose and number.
    ///
    /// It is the XOF of a keyed hash over `label ‖ number u64`.
    #[must_use]
    pub fn draws(&self, label: &str, number: u64) -> Draws {
        let mut h = blake3::Hasher::new_keyed(&self.0);
        h.update(label.as_bytes());
        h.update(&number.to_le_bytes());
        Draws { reader: h.finalize_xof(), block: [0; BLOCK], used: BLOCK }
    }
}

const BLOCK: usize = 512;

/// An endless stream of random words: the XOF of a keyed BLAKE3, read as little-endian u64.
#[derive(Clone)]
pub struct Draws {
    reader: blake3::OutputReader,
    block: [u8; BLOCK],
    used: usize,
}

impl std::fmt::Debug for Draws {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Draws({})", self.position())
    }
}

impl Draws {
    /// Returns the next 64 random bits.
    pub fn word(&mut self) -> u64 {
        if self.used == BLOCK {
            self.reader.fill(&mut self.block);
            self.used = 0;
        }
        let mut w = [0; 8];
        w.copy_from_slice(&self.block[self.used..self.used + 8]);
        self.used += 8;
        u64::from_le_bytes(w)
    }

    /// Returns a random number below `n`, or 0 when `n` is 0. Multiplies and takes the high word: biased by
    /// at most n/2^64.
    pub fn below(&mut self, n: u64) -> u64 {
        u64::try_from((u128::from(self.word()) * u128::from(n)) >> 64).unwrap_or(0)
    }

    /// Returns a random number in [0, 1), with 53 random bits.
    pub fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns how many bytes of the stream were used.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.reader.position() - (BLOCK - self.used) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_fixed_and_apart() {
        let key = OrderKey::new(Root(Hash::of(b"r")), Hash::of(b"p"), 1, 2);
        let mut a = key.draws("a", 0);
        let words: Vec<u64> = (0..200).map(|_| a.word()).collect();
        assert_eq!(a.position(), 1600);
        let mut again = key.draws("a", 0);
        assert!(words.iter().all(|&w| w == again.word()));
        for (label, n, other) in [
            ("a", 1, key),
            ("b", 0, key),
            ("a", 0, OrderKey::new(Root(Hash::of(b"r")), Hash::of(b"p"), 1, 3)),
        ] {
            assert_ne!(other.draws(label, n).word(), words[0]);
        }
        assert!((0..10_000).all(|_| a.below(7) < 7 && (0.0..1.0).contains(&a.unit())));
        assert_eq!(a.below(0), 0);
    }
}
