//! Inputs without libFuzzer: seeds, changed at places that a fixed number decides.
//!
//! No coverage guides it. It shows within seconds, with any build, that a target works and finds shallow
//! faults. The long search is libFuzzer's.

use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// The longest input, in bytes.
pub const INPUT_BYTES_MAX: usize = 16 << 10;

/// Bytes and numbers at which parsers turn.
const TURNS: &[u64] = &[0, 1, 2, 7, 9, 10, 13, 32, 34, 44, 45, 47, 48, 57, 92, 0x7f, 0x80, 0xff, 0x100];
/// Lengths and offsets that overflow a sum.
const LARGE: &[u64] = &[0xffff, 0x1_0000, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 1 << 32, 1 << 63, u64::MAX];

/// Makes inputs from seeds.
#[derive(Debug)]
pub struct Mutator {
    rng: ChaCha8Rng,
    seeds: Vec<Vec<u8>>,
}

impl Mutator {
    /// Returns a mutator whose inputs depend on `seed` and the seeds only.
    #[must_use]
    pub fn new(seed: u64, seeds: Vec<Vec<u8>>) -> Self {
        Mutator { rng: ChaCha8Rng::seed_from_u64(seed), seeds }
    }

    /// Returns the next input: a seed with one to eight changes.
    pub fn input(&mut self) -> Vec<u8> {
        let mut out = self.seed();
        for _ in 0..self.rng.random_range(1..=8) {
            self.change(&mut out);
        }
        out.truncate(INPUT_BYTES_MAX);
        out
    }

    fn seed(&mut self) -> Vec<u8> {
        if self.seeds.is_empty() {
            return Vec::new();
        }
        let at = self.rng.random_range(0..self.seeds.len());
        self.seeds[at].clone()
    }

    /// Returns a run of at most `max` bytes within `len` bytes.
    fn run(&mut self, len: usize, max: usize) -> std::ops::Range<usize> {
        let at = self.rng.random_range(0..=len);
        at..at + self.rng.random_range(0..=max.min(len - at))
    }

    fn change(&mut self, out: &mut Vec<u8>) {
        let at = self.rng.random_range(0..out.len().max(1));
        match self.rng.random_range(0..10) {
            0 if !out.is_empty() => out[at] ^= 1 << self.rng.random_range(0..8),
            1 if !out.is_empty() => out[at] = self.rng.random(),
            2 if !out.is_empty() => out[at] = out[at].wrapping_add(if self.rng.random() { 1 } else { 255 }),
            3 => self.number(out, at),
            4 => drop(out.drain(self.run(out.len(), 64))),
            5 => {
                let copied = self.run(out.len(), 64);
                let copied = out[copied].to_vec();
                out.splice(at.min(out.len())..at.min(out.len()), copied);
            }
            6 => {
                let n = self.rng.random_range(1..=8);
                let fresh: Vec<u8> = (0..n).map(|_| self.rng.random()).collect();
                out.splice(at.min(out.len())..at.min(out.len()), fresh);
            }
            7 => {
                let other = self.seed();
                let taken = self.run(other.len(), 128);
                let replaced = self.run(out.len(), 128);
                out.splice(replaced, other[taken].to_vec());
            }
            8 => self.decimal(out),
            _ => out.truncate(self.run(out.len(), 0).start),
        }
    }

    /// Writes a number at which parsers turn over one to eight bytes.
    fn number(&mut self, out: &mut [u8], at: usize) {
        let numbers = if self.rng.random() { TURNS } else { LARGE };
        let number = numbers[self.rng.random_range(0..numbers.len())];
        let wide = [1, 2, 4, 8][self.rng.random_range(0..4)];
        let bytes = number.to_le_bytes();
        out.iter_mut().skip(at).zip(&bytes[..wide]).for_each(|(o, b)| *o = *b);
    }

    /// Replaces a run of decimal digits by another number.
    fn decimal(&mut self, out: &mut Vec<u8>) {
        let from = self.run(out.len(), 0).start;
        let Some(begin) = (from..out.len()).find(|&i| out[i].is_ascii_digit()) else { return };
        let end = (begin..out.len()).find(|&i| !out[i].is_ascii_digit()).unwrap_or(out.len());
        let numbers = if self.rng.random() { TURNS } else { LARGE };
        let number = numbers[self.rng.random_range(0..numbers.len())];
        out.splice(begin..end, number.to_string().into_bytes());
    }
}
