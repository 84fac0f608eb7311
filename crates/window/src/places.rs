//! Which parts of a window are free.

use std::collections::BTreeMap;

/// The free parts of a window, as lengths by offset. Neighbours are always joined.
#[derive(Debug)]
pub struct Places {
    free: BTreeMap<u32, u32>,
    /// Places begin at multiples of this.
    align: u32,
}

impl Places {
    /// Returns a window of which all `bytes` are free, as far as they are whole pages of `align` bytes.
    ///
    /// Places begin at pages, because a program that writes into its bytes copies whole pages.
    pub fn new(bytes: u32, align: u32) -> Self {
        Places { free: BTreeMap::from([(0, bytes / align * align)]), align }
    }

    /// Returns the bytes that a place of `len` bytes occupies.
    fn occupied(&self, len: u32) -> Option<u32> {
        len.max(1).checked_next_multiple_of(self.align)
    }

    /// Takes the first part that is long enough. Its pages are the most likely to be in a processor's cache.
    pub fn take(&mut self, len: u32) -> Option<u32> {
        let len = self.occupied(len)?;
        let (&offset, &room) = self.free.iter().find(|(_, room)| **room >= len)?;
        self.free.remove(&offset);
        if room > len {
            self.free.insert(offset + len, room - len);
        }
        Some(offset)
    }

    /// Gives back what [`Places::take`] returned for `len` bytes.
    pub fn give_back(&mut self, offset: u32, len: u32) {
        let Some(len) = self.occupied(len) else { return };
        let (mut begin, mut end) = (offset, offset + len);
        if let Some((&before, &room)) = self.free.range(..begin).next_back()
            && before + room == begin
        {
            self.free.remove(&before);
            begin = before;
        }
        if let Some(room) = self.free.remove(&end) {
            end += room;
        }
        self.free.insert(begin, end - begin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALIGN: u32 = 4096;

    #[test]
    fn places_never_overlap_and_all_of_them_come_back() {
        let bytes = 1 << 20;
        let mut places = Places::new(bytes, ALIGN);
        let mut taken: Vec<(u32, u32)> = Vec::new();
        // A fixed sequence that looks random, by a linear congruential generator.
        let mut state = 12_345_u32;
        let mut next = |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % below
        };
        for _ in 0..20_000 {
            if next(2) == 0 && !taken.is_empty() {
                let (offset, len) = taken.swap_remove(next(taken.len() as u32) as usize);
                places.give_back(offset, len);
            } else {
                let len = next(60_000);
                if let Some(offset) = places.take(len) {
                    assert!(offset + len <= bytes && offset.is_multiple_of(ALIGN));
                    for &(other, other_len) in &taken {
                        assert!(offset + len <= other || other + other_len <= offset, "they overlap");
                    }
                    taken.push((offset, len));
                }
            }
        }
        for (offset, len) in taken {
            places.give_back(offset, len);
        }
        assert_eq!(places.free, BTreeMap::from([(0, bytes)]));
        assert_eq!(places.take(bytes), Some(0));
        assert_eq!((places.take(1), places.take(u32::MAX)), (None, None));
    }
}
