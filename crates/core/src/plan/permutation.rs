//! A keyed permutation of `[0, n)` in constant memory (`docs/FORMATS-epochs.md`, "Permutation").
//!
//! The construction is the generalised Feistel cipher of Black and Rogaway ("Ciphers with Arbitrary Finite
//! Domains", CT-RSA 2002) over `Z_a × Z_b` with cycle walking. `a` is the even number next to √n, and
//! `b = ⌈n/a⌉`. So at most `a` points are outside the domain, and a walk is nearly always one step. An
//! even `a` makes odd permutations possible too.
//!
//! There are eight rounds, or 32 below 1,024 points. Each round adds a keyed hash of one half to the other.
//! The round function is two rounds of multiply-xorshift on 64 bits under a 64-bit key from BLAKE3: an order
//! needs statistical, not cryptographic, strength. A position takes tens of nanoseconds.

use super::key::OrderKey;

const ROUNDS: usize = 8;
/// Rounds below [`SMALL`] points, where eight rounds do not reach every permutation equally often.
const ROUNDS_SMALL: usize = 32;
const SMALL: u64 = 1024;

/// A permutation of `[0, n)`, and its inverse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permutation {
    n: u64,
    a: u64,
    b: u64,
    keys: [u64; ROUNDS_SMALL],
    rounds: usize,
}

fn mix(x: u64, key: u64) -> u64 {
    let mut z = x.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ key;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_add(key.rotate_left(32)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn below(word: u64, n: u64) -> u64 {
    u64::try_from((u128::from(word) * u128::from(n)) >> 64).unwrap_or(0)
}

impl Permutation {
    /// Returns the permutation of `[0, n)` for `key`, `label` and `number`.
    ///
    /// # Panics
    /// When `n` is over 2^62: no plan is that long.
    #[must_use]
    pub fn new(key: &OrderKey, label: &str, number: u64, n: u64) -> Self {
        assert!(n <= 1 << 62, "permutation too long");
        let mut draws = key.draws(label, number);
        let mut a = n.isqrt();
        a += a % 2;
        a = a.max(2);
        let rounds = if n < SMALL { ROUNDS_SMALL } else { ROUNDS };
        let mut keys = [0; ROUNDS_SMALL];
        keys[..rounds].fill_with(|| draws.word());
        Permutation { n, a, b: n.div_ceil(a).max(1), keys, rounds }
    }

    /// Returns the number of positions.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.n
    }

    /// Returns whether there are no positions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// Returns the value at position `p`.
    ///
    /// # Panics
    /// When `p ≥ n`.
    #[must_use]
    pub fn at(&self, p: u64) -> u64 {
        assert!(p < self.n, "position {p} of {}", self.n);
        let mut x = p;
        loop {
            let (mut l, mut r) = (x % self.a, x / self.a);
            for pair in self.keys[..self.rounds].chunks_exact(2) {
                l += below(mix(r, pair[0]), self.a);
                l = if l >= self.a { l - self.a } else { l };
                r += below(mix(l, pair[1]), self.b);
                r = if r >= self.b { r - self.b } else { r };
            }
            x = r * self.a + l;
            if x < self.n {
                return x;
            }
        }
    }

    /// Returns the position of value `v`.
    ///
    /// # Panics
    /// When `v ≥ n`.
    #[must_use]
    pub fn position(&self, v: u64) -> u64 {
        assert!(v < self.n, "value {v} of {}", self.n);
        let mut x = v;
        loop {
            let (mut l, mut r) = (x % self.a, x / self.a);
            for pair in self.keys[..self.rounds].chunks_exact(2).rev() {
                let f = below(mix(l, pair[1]), self.b);
                r = if r >= f { r - f } else { r + self.b - f };
                let f = below(mix(r, pair[0]), self.a);
                l = if l >= f { l - f } else { l + self.a - f };
            }
            x = r * self.a + l;
            if x < self.n {
                return x;
            }
        }
    }
}

#[cfg(test)]
mod tests;
