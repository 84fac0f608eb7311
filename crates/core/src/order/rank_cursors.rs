//! A line: how ranks draw sequences that are known in advance ([`super::bucketed`], [`super::replay`]).
//!
//! Each rank has a sequence of *turns*, and a cursor before which everything is granted or acknowledged.
//! What is not free (someone has it, or it was acknowledged in another life) is passed over; what comes
//! back moves the cursor back. So the same is drawn after a restart, and re-issued entries come first.

/// The cursors of one world.
#[derive(Debug, Clone)]
pub struct RankCursors {
    cursors: Vec<u64>,
}

impl RankCursors {
    /// All ranks at their beginning.
    #[must_use]
    pub fn new(ranks: u32) -> Self {
        RankCursors { cursors: vec![0; ranks as usize] }
    }

    /// The next `n` free entries of a rank, and the turn at which they begin (for [`RankCursors::rewind`]).
    /// `turn` is the rank's sequence, `None` past its end. Nothing for a rank that is not there.
    pub fn next(
        &mut self,
        rank: u32,
        n: u32,
        turn: impl Fn(u64) -> Option<u32>,
        free: impl Fn(u32) -> bool,
    ) -> (Vec<u32>, u64) {
        let Some(cursor) = self.cursors.get_mut(rank as usize) else { return (Vec::new(), 0) };
        let (mut out, mut first) = (Vec::new(), None);
        while out.len() < n as usize
            && let Some(entry) = turn(*cursor)
        {
            if free(entry) {
                first.get_or_insert(*cursor);
                out.push(entry);
            }
            *cursor += 1;
        }
        (out, first.unwrap_or(*cursor))
    }

    /// Entries of a rank came back that were drawn from turn `from` on (0 when that is not known).
    pub fn rewind(&mut self, rank: u32, from: u64) {
        if let Some(cursor) = self.cursors.get_mut(rank as usize) {
            *cursor = (*cursor).min(from);
        }
    }
}
