//! Rank cursors: how far each rank has come in a sequence that is known in advance ([`super::bucketed`],
//! [`super::replay`]).
//!
//! Before a rank's cursor, every entry is granted or acknowledged. Behind it, entries that are not free are
//! skipped: they are in a lease, or were acknowledged before a restart. Entries that become free again move
//! the cursor back. So a rank draws the same entries after a restart, and entries that are granted again come
//! first.

/// The cursors of one world.
#[derive(Debug, Clone)]
pub struct RankCursors {
    cursors: Vec<u64>,
}

impl RankCursors {
    /// Returns cursors at the beginning of every rank's sequence.
    #[must_use]
    pub fn new(ranks: u32) -> Self {
        RankCursors { cursors: vec![0; ranks as usize] }
    }

    /// Returns the next `n` free entries of a rank, and the position of the first.
    ///
    /// [`RankCursors::rewind`] takes the position. `entry_at` is the rank's sequence, `None` past its end. A
    /// rank that does not exist gets no entries.
    pub fn next(
        &mut self,
        rank: u32,
        n: u32,
        entry_at: impl Fn(u64) -> Option<u32>,
        free: impl Fn(u32) -> bool,
    ) -> (Vec<u32>, u64) {
        let Some(cursor) = self.cursors.get_mut(rank as usize) else { return (Vec::new(), 0) };
        let (mut out, mut first) = (Vec::new(), None);
        while out.len() < n as usize
            && let Some(entry) = entry_at(*cursor)
        {
            if free(entry) {
                first.get_or_insert(*cursor);
                out.push(entry);
            }
            *cursor += 1;
        }
        (out, first.unwrap_or(*cursor))
    }

    /// Moves a rank back to position `from`, because entries from there on are free again. 0 if the position
    /// is unknown.
    pub fn rewind(&mut self, rank: u32, from: u64) {
        if let Some(cursor) = self.cursors.get_mut(rank as usize) {
            *cursor = (*cursor).min(from);
        }
    }
}
