//! Lists of numbers that take few bits each: [`PackedInts`].
//!
//! A list is cut into blocks of 256. A block has a line, and of each number only the distance from that line,
//! in as many bits as the greatest distance needs. (*Frame of reference* with a slope, after Goldstein,
//! Ramakrishnan and Shaft, "Compressing relations and indexes", ICDE 1998; Lucene's `DirectMonotonicWriter`
//! adds the slope.) So a list that counts up evenly takes less than a bit for ten numbers, and the lengths of
//! photographs take about two bytes each.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Numbers in a block.
const BLOCK: usize = 256;
/// Words that a block of `bits` bits a number takes: `WORDS_A_BIT · bits`.
const WORDS_A_BIT: usize = BLOCK / u64::BITS as usize;

/// A list of numbers below 2^32. A number is read in a few nanoseconds, by its index.
///
/// Equal lists have equal representations.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PackedInts {
    len: usize,
    blocks: Box<[Block]>,
    words: Box<[u64]>,
}

/// Number k of a block is `base + step · k + distance`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Block {
    base: i64,
    step: u32,
    /// The index of the block's first word.
    at: u32,
    /// The bits of a distance.
    bits: u32,
    zeros: u32,
}

/// Packs numbers one by one.
#[derive(Debug, Default)]
pub struct PackedIntsBuilder {
    len: usize,
    block: Vec<u32>,
    blocks: Vec<Block>,
    words: Vec<u64>,
}

impl PackedIntsBuilder {
    /// Appends a number.
    pub fn push(&mut self, n: u32) {
        self.block.push(n);
        self.len += 1;
        if self.block.len() == BLOCK {
            self.close_block();
        }
    }

    /// Returns how many numbers it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether it has no number.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the list.
    #[must_use]
    pub fn finish(mut self) -> PackedInts {
        if !self.block.is_empty() {
            self.close_block();
        }
        PackedInts { len: self.len, blocks: self.blocks.into(), words: self.words.into() }
    }

    fn close_block(&mut self) {
        let (first, last) = (self.block[0], self.block[self.block.len() - 1]);
        let slope = last.saturating_sub(first) / u32::try_from(self.block.len() - 1).unwrap_or(1).max(1);
        // One number far from its neighbours can spoil the slope.
        let (step, (base, bits)) = [0, slope]
            .map(|step| (step, line(&self.block, step)))
            .into_iter()
            .min_by_key(|(_, (_, bits))| *bits)
            .unwrap_or_default();
        let at = self.words.len();
        self.words.resize(at + WORDS_A_BIT * bits as usize, 0);
        for (k, &n) in self.block.iter().enumerate().filter(|_| bits > 0) {
            let distance = u64::try_from(above(n, step, k) - base).unwrap_or(0);
            let bit = k * bits as usize;
            let (word, shift) = (at + bit / 64, bit % 64);
            self.words[word] |= distance << shift;
            if shift + bits as usize > 64 {
                self.words[word + 1] |= distance >> (64 - shift);
            }
        }
        // 2^32 numbers of 32 bits have 2^31 words.
        let at = u32::try_from(at).unwrap_or(u32::MAX);
        self.blocks.push(Block { base, step, at, bits, zeros: 0 });
        self.block.clear();
    }
}

/// Returns how far number `k` is above a line through 0.
fn above(n: u32, step: u32, k: usize) -> i64 {
    i64::from(n) - i64::from(step) * k as i64
}

/// Returns the base of the line with this step below all numbers, and the bits of the greatest distance.
fn line(block: &[u32], step: u32) -> (i64, u32) {
    let distances = || block.iter().enumerate().map(|(k, &n)| above(n, step, k));
    let (least, most) = (distances().min().unwrap_or(0), distances().max().unwrap_or(0));
    (least, u64::BITS - most.abs_diff(least).leading_zeros())
}

impl FromIterator<u32> for PackedInts {
    fn from_iter<T: IntoIterator<Item = u32>>(numbers: T) -> Self {
        let mut packed = PackedIntsBuilder::default();
        numbers.into_iter().for_each(|n| packed.push(n));
        packed.finish()
    }
}

impl PackedInts {
    /// Returns how many numbers there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there is no number.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number at an index.
    ///
    /// # Panics
    /// When there is no such number.
    #[must_use]
    pub fn get(&self, index: usize) -> u32 {
        assert!(index < self.len, "number {index} of {}", self.len);
        let (block, k) = (&self.blocks[index / BLOCK], index % BLOCK);
        let distance = if block.bits == 0 { 0 } else { self.distance(block, k) };
        // Built of numbers below 2^32, or read from bytes of which nothing better is known.
        let n = block.base.wrapping_add(i64::from(block.step) * k as i64).wrapping_add(distance);
        u32::try_from(n).unwrap_or(u32::MAX)
    }

    fn distance(&self, block: &Block, k: usize) -> i64 {
        let (bits, bit) = (block.bits as usize, k * block.bits as usize);
        let (word, shift) = (block.at as usize + bit / 64, bit % 64);
        let mut distance = self.words[word] >> shift;
        if shift + bits > 64 {
            distance |= self.words[word + 1] << (64 - shift);
        }
        i64::try_from(distance & ((1 << bits) - 1)).unwrap_or(i64::MAX)
    }

    /// Returns all numbers, in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + Clone + '_ {
        (0..self.len).map(|index| self.get(index))
    }

    /// Returns how many of the numbers are at most `n`. The numbers must ascend.
    #[must_use]
    pub fn count_at_most(&self, n: u32) -> usize {
        let (mut low, mut high) = (0, self.len);
        while low < high {
            let mid = low + (high - low) / 2;
            if self.get(mid) <= n {
                low = mid + 1;
            } else {
                high = mid;
            }
        }
        low
    }

    /// Returns the size in memory, in bytes.
    #[must_use]
    pub fn footprint(&self) -> usize {
        size_of::<Self>() + size_of_val(&*self.blocks) + size_of_val(&*self.words)
    }

    /// Returns the list as bytes for [`PackedInts::of_bytes`] on the same machine.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let (len, blocks) = (self.len as u64, self.blocks.as_bytes());
        [len.as_bytes(), blocks, self.words.as_bytes()].concat()
    }

    /// Returns the list with these bytes; `None` if they are none of [`PackedInts::to_bytes`].
    #[must_use]
    pub fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let (len, rest) = u64::read_from_prefix(bytes).ok()?;
        let len = u32::try_from(len).ok()? as usize;
        let (blocks, words) = rest.split_at_checked(len.div_ceil(BLOCK).checked_mul(size_of::<Block>())?)?;
        let blocks: Box<[Block]> = blocks
            .chunks_exact(size_of::<Block>())
            .map(|block| Block::read_from_bytes(block).ok())
            .collect::<Option<_>>()?;
        if !words.len().is_multiple_of(size_of::<u64>()) {
            return None;
        }
        let words: Box<[u64]> = words
            .chunks_exact(size_of::<u64>())
            .map(|word| u64::read_from_bytes(word).ok())
            .collect::<Option<_>>()?;
        let whole = |b: &Block| b.bits <= 33 && b.at as usize + WORDS_A_BIT * b.bits as usize <= words.len();
        blocks.iter().all(whole).then_some(PackedInts { len, blocks, words })
    }
}

#[cfg(test)]
mod tests;
