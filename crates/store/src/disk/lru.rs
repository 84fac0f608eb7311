//! The LRU list: a doubly linked list of record numbers in the order of their last use, 8 bytes each.

/// No record.
const NONE: u32 = u32::MAX;

#[derive(Debug, Default)]
pub(crate) struct LruList {
    /// (newer, older) by record number.
    links: Vec<(u32, u32)>,
    ends: Option<(u32, u32)>,
}

impl LruList {
    pub fn memory(&self) -> usize {
        self.links.capacity() * 8
    }

    /// Adds `r`, which must not be in the list, as the most recently used record.
    pub fn push_front(&mut self, r: u32) {
        if self.links.len() <= r as usize {
            self.links.resize(r as usize + 1, (NONE, NONE));
        }
        let newest = self.ends.map_or(NONE, |e| e.0);
        self.links[r as usize] = (NONE, newest);
        if let Some(l) = self.links.get_mut(newest as usize) {
            l.0 = r;
        }
        self.ends = Some((r, self.ends.map_or(r, |e| e.1)));
    }

    /// Removes `r`, which must be in the list.
    pub fn remove(&mut self, r: u32) {
        let Some((mut newest, mut oldest)) = self.ends else { return };
        let (newer, older) = self.links[r as usize];
        match self.links.get_mut(newer as usize) {
            Some(l) => l.1 = older,
            None => newest = older,
        }
        match self.links.get_mut(older as usize) {
            Some(l) => l.0 = newer,
            None => oldest = newer,
        }
        self.ends = (newest != NONE).then_some((newest, oldest));
    }

    pub fn oldest(&self) -> Option<u32> {
        self.ends.map(|e| e.1)
    }

    /// Returns the record that was used next after `r`.
    pub fn newer(&self, r: u32) -> Option<u32> {
        Some(self.links[r as usize].0).filter(|&n| n != NONE)
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        std::iter::successors(self.oldest(), |&r| self.newer(r)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_that_of_last_use() {
        let mut c = LruList::default();
        for r in [3, 0, 7] {
            c.push_front(r);
        }
        c.remove(0);
        c.push_front(0);
        let order: Vec<_> = std::iter::successors(c.oldest(), |&r| c.newer(r)).collect();
        assert_eq!(order, [3, 7, 0]);
        for r in [7, 3, 0] {
            c.remove(r);
        }
        assert_eq!((c.oldest(), c.len()), (None, 0));
    }
}
