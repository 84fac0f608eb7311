//! Bitmaps: [`Bits`], such as the state of an epoch, and [`Ring`], an ordered set over a ring that finds its
//! next member in O(log₆₄ n).

/// A bitmap of fixed length that counts its set bits.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Bits {
    words: Vec<u64>,
    len: u64,
    ones: u64,
}

impl Bits {
    /// Returns `len` clear bits.
    #[must_use]
    pub fn zeros(len: u64) -> Self {
        Bits { words: vec![0; usize::try_from(len.div_ceil(64)).unwrap_or(usize::MAX)], len, ones: 0 }
    }

    /// Returns `len` set bits.
    #[must_use]
    pub fn ones(len: u64) -> Self {
        let mut b = Bits::zeros(len);
        b.words.fill(u64::MAX);
        if let (Some(last), tail @ 1..) = (b.words.last_mut(), len % 64) {
            *last = (1 << tail) - 1;
        }
        b.ones = len;
        b
    }

    /// Reads the encoding of [`Bits::to_bytes`]. Returns `None` when the length is wrong or a bit past the
    /// end is set.
    #[must_use]
    pub fn from_bytes(len: u64, bytes: &[u8]) -> Option<Self> {
        if bytes.len() as u64 != len.div_ceil(8) {
            return None;
        }
        let mut b = Bits::zeros(len);
        for (i, &x) in bytes.iter().enumerate() {
            b.words[i / 8] |= u64::from(x) << (8 * (i % 8));
        }
        b.ones = b.words.iter().map(|w| u64::from(w.count_ones())).sum();
        let spill = b.words.last().is_some_and(|w| !len.is_multiple_of(64) && w >> (len % 64) != 0);
        (!spill).then_some(b)
    }

    /// Returns the bits, least significant first, in ⌈len/8⌉ bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out: Vec<u8> = self.words.iter().flat_map(|w| w.to_le_bytes()).collect();
        out.truncate(usize::try_from(self.len.div_ceil(8)).unwrap_or(usize::MAX));
        out
    }

    /// Returns the number of bits.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether there are no bits at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns how many bits are set.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.ones
    }

    /// Returns whether bit `i` is set; false past the end.
    #[must_use]
    pub fn get(&self, i: u64) -> bool {
        i < self.len && self.words[word(i)] >> (i % 64) & 1 == 1
    }

    /// Sets bit `i`. Returns whether it was clear.
    ///
    /// # Panics
    /// Past the end.
    pub fn set(&mut self, i: u64) -> bool {
        assert!(i < self.len, "bit {i} of {}", self.len);
        let w = &mut self.words[word(i)];
        let new = *w >> (i % 64) & 1 == 0;
        *w |= 1 << (i % 64);
        self.ones += u64::from(new);
        new
    }

    /// Clears bit `i`. Returns whether it was set.
    pub fn clear(&mut self, i: u64) -> bool {
        let was = self.get(i);
        if was {
            self.words[word(i)] &= !(1 << (i % 64));
            self.ones -= 1;
        }
        was
    }

    /// Returns word `w` with all bits outside `from..to` cleared.
    fn masked(&self, w: usize, from: u64, to: u64) -> u64 {
        let base = w as u64 * 64;
        let mut x = self.words[w];
        if from > base {
            x &= u64::MAX << (from - base);
        }
        if to < base + 64 {
            x &= (1 << (to - base)) - 1;
        }
        x
    }

    /// Returns how many bits of `from..to` are set.
    #[must_use]
    pub fn count_in(&self, from: u64, to: u64) -> u64 {
        let to = to.min(self.len);
        if from >= to {
            return 0;
        }
        (word(from)..=word(to - 1)).map(|w| u64::from(self.masked(w, from, to).count_ones())).sum()
    }

    /// Returns the positions of the set bits of `from..to`, ascending.
    pub fn iter_in(&self, from: u64, to: u64) -> impl Iterator<Item = u64> + '_ {
        let to = to.min(self.len);
        let words = if from < to { word(from)..word(to - 1) + 1 } else { 0..0 };
        words.flat_map(move |w| {
            let mut x = self.masked(w, from, to);
            std::iter::from_fn(move || {
                let bit = (x != 0).then(|| w as u64 * 64 + u64::from(x.trailing_zeros()));
                x &= x.wrapping_sub(1);
                bit
            })
        })
    }

    /// Returns the positions of bits that are set here and not in `other`, ascending. Both have the same
    /// length.
    pub fn without<'a>(&'a self, other: &'a Bits) -> impl Iterator<Item = u64> + 'a {
        self.words.iter().zip(&other.words).zip(0u64..).flat_map(|((a, b), w)| {
            let mut x = a & !b;
            std::iter::from_fn(move || {
                let bit = (x != 0).then(|| w * 64 + u64::from(x.trailing_zeros()));
                x &= x.wrapping_sub(1);
                bit
            })
        })
    }

    /// Returns the position of the `k`-th set bit of `from..to`, from 0.
    #[must_use]
    pub fn nth_in(&self, from: u64, to: u64, k: u64) -> Option<u64> {
        let to = to.min(self.len);
        let mut k = k;
        if from >= to {
            return None;
        }
        for w in word(from)..=word(to - 1) {
            let mut x = self.masked(w, from, to);
            let n = u64::from(x.count_ones());
            if k >= n {
                k -= n;
                continue;
            }
            for _ in 0..k {
                x &= x - 1;
            }
            return Some(w as u64 * 64 + u64::from(x.trailing_zeros()));
        }
        None
    }
}

fn word(i: u64) -> usize {
    usize::try_from(i / 64).unwrap_or(usize::MAX)
}

/// A set of places on a ring of `len` places: a bitmap, a summary bitmap over its words, and so on. The next
/// member is found in a few words.
#[derive(Debug, Clone)]
pub struct Ring {
    /// `levels[0]` has one bit a place. Each further level has one bit a word of the level below.
    levels: Vec<Vec<u64>>,
    len: usize,
}

impl Ring {
    /// Returns the empty set over `len` places.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let mut levels = Vec::new();
        let mut n = len.div_ceil(64).max(1);
        loop {
            levels.push(vec![0; n]);
            if n == 1 {
                return Ring { levels, len };
            }
            n = n.div_ceil(64);
        }
    }

    /// Returns whether place `i` is in the set.
    #[must_use]
    pub fn has(&self, i: usize) -> bool {
        self.levels[0][i / 64] >> (i % 64) & 1 == 1
    }

    /// Adds place `i` to the set or removes it.
    pub fn put(&mut self, i: usize, member: bool) {
        let mut i = i;
        for level in &mut self.levels {
            let w = &mut level[i / 64];
            let before = *w;
            if member {
                *w |= 1 << (i % 64);
            } else {
                *w &= !(1 << (i % 64));
            }
            if (before == 0) == (*w == 0) {
                return;
            }
            i /= 64;
        }
    }

    /// Returns the first member at or after `from`, going round once.
    #[must_use]
    pub fn next(&self, from: usize) -> Option<usize> {
        self.first(from).or_else(|| self.first(0))
    }

    fn first(&self, from: usize) -> Option<usize> {
        if from >= self.len {
            return None;
        }
        let mut at = from;
        for (up, level) in self.levels.iter().enumerate() {
            let &w = level.get(at / 64)?;
            let x = w & (u64::MAX << (at % 64));
            if x != 0 {
                let mut at = at / 64 * 64 + x.trailing_zeros() as usize;
                for below in self.levels[..up].iter().rev() {
                    at = at * 64 + below[at].trailing_zeros() as usize;
                }
                return Some(at);
            }
            at = at / 64 + 1;
        }
        None
    }

    /// Counts the places of `from..to` that are not members, until they are more than `enough`.
    #[must_use]
    pub fn gaps_in(&self, from: usize, to: usize, enough: usize) -> usize {
        let (mut n, mut at) = (0usize, from);
        while at < to && n <= enough {
            let end = ((at / 64 + 1) * 64).min(to);
            let mut x = !self.levels[0][at / 64] & (u64::MAX << (at % 64));
            if !end.is_multiple_of(64) {
                x &= (1 << (end % 64)) - 1;
            }
            n += x.count_ones() as usize;
            at = end;
        }
        n
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn bits_are_a_set(
            len in 1u64..400,
            ops in proptest::collection::vec((any::<bool>(), any::<u64>()), 0..200),
            a: u64,
            b: u64,
            k in 0u64..50,
        ) {
            let (mut bits, mut set) = (Bits::zeros(len), BTreeSet::new());
            for (on, i) in ops {
                let i = i % len;
                if on {
                    prop_assert_eq!(bits.set(i), set.insert(i));
                } else {
                    prop_assert_eq!(bits.clear(i), set.remove(&i));
                }
            }
            prop_assert_eq!(bits.count(), set.len() as u64);
            let (a, b) = (a % (len + 1), b % (len + 1));
            let want: Vec<u64> = set.iter().copied().filter(|&i| a <= i && i < b).collect();
            prop_assert_eq!(bits.iter_in(a, b).collect::<Vec<_>>(), want.clone());
            prop_assert_eq!(bits.count_in(a, b), want.len() as u64);
            prop_assert_eq!(bits.nth_in(a, b, k), want.get(k as usize).copied());
            let mut other = bits.clone();
            for i in a..b {
                other.clear(i);
            }
            prop_assert_eq!(bits.without(&other).collect::<Vec<_>>(), want);
            prop_assert_eq!(Bits::from_bytes(len, &bits.to_bytes()), Some(bits));
            prop_assert_eq!(Bits::ones(len).count_in(0, len), len);
        }

        #[test]
        fn a_ring_finds_its_next_member(
            len in 1usize..9000,
            ops in proptest::collection::vec((any::<bool>(), any::<usize>()), 0..60),
            from: usize,
            to: usize,
        ) {
            let (mut ring, mut set) = (Ring::new(len), BTreeSet::new());
            for (on, i) in ops {
                ring.put(i % len, on);
                if on {
                    set.insert(i % len);
                } else {
                    set.remove(&(i % len));
                }
            }
            let (from, to) = (from % len, to % (len + 1));
            let want = set.range(from..).next().or_else(|| set.iter().next()).copied();
            prop_assert_eq!(ring.next(from), want);
            if from <= to {
                prop_assert_eq!(ring.gaps_in(from, to, usize::MAX), to - from - set.range(from..to).count());
            }
            prop_assert_eq!(ring.has(from), set.contains(&from));
        }
    }

    #[test]
    fn a_bit_past_the_end_is_rejected() {
        assert_eq!(Bits::from_bytes(3, &[0b1000]), None);
        assert_eq!(Bits::from_bytes(3, &[0, 0]), None);
        assert!(Bits::from_bytes(3, &[0b101]).is_some_and(|b| b.count() == 2 && b.get(2) && !b.get(3)));
    }
}
