//! The groups of a pack: where its order is cut.
//!
//! Keys are leaves of a binary tree, bit by bit. A group is a highest node of that tree whose members take at
//! most `group_bytes`. A single sample that takes more is a group of its own, and a sample larger than the
//! largest chunk is cut between its entries. The members of a node depend on that node alone, so a change
//! does not affect its neighbours.
//!
//! ```text
//!          9 MiB              keys arrive ascending; `pending` is the part of the current node
//!         /     \             that has arrived. When it grows too heavy, its left half is
//!      5 MiB   4 MiB          complete and becomes a group, and no later group may reach above
//!      group   group          the right half: that depth is the floor.
//! ```

use super::{GroupKey, Item, PackParams};
use crate::manifest::{CHUNK_BYTES_MAX, LayoutParams};

/// An item and its offset in its chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// The item.
    pub item: Item,
    /// Its offset in the chunk, a multiple of the alignment.
    pub offset: u32,
}

/// A chunk to be assembled: its members in order, with zeros between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkPlan {
    /// The members, ascending by offset; never empty.
    pub members: Vec<Member>,
    /// The length of the chunk in bytes: the end of its last member.
    pub len: u32,
}

/// Why an item cannot be packed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadItem {
    /// The item does not come after its predecessor in the order of (key, ordinal).
    #[error("the item of entry {0} does not come after the one before it in the order of a pack")]
    Order(u64),
    /// The item is empty or longer than `slice_bytes`.
    #[error("the item of entry {ordinal} has {len} bytes: a pack groups items of 1 to {max} bytes")]
    Length {
        /// The entry.
        ordinal: u64,
        /// The item's length in bytes.
        len: u32,
        /// The longest item that is grouped.
        max: u32,
    },
}

/// Takes items in the order of a pack and returns the plans of chunks. Memory: the items of less than two
/// chunks, at most 65,536 with 512 bytes each.
#[derive(Debug)]
pub struct Packer {
    params: PackParams,
    len_max: u32,
    last: Option<Item>,
    /// Complete samples of the present node, and the bytes of that node so far.
    pending: Vec<Item>,
    pending_bytes: u64,
    /// The present node may not reach above this depth.
    floor: u32,
    /// The present sample, and its bytes, those in plans already returned included.
    sample: Vec<Item>,
    sample_bytes: u64,
    /// The bytes of `sample_bytes` that are still in `sample`.
    held_bytes: u64,
}

impl Packer {
    /// Returns a packer at the first item. Parameters without a pack, such as those of an index, get the
    /// default grouping.
    #[must_use]
    pub fn new(params: &LayoutParams) -> Self {
        Packer {
            params: params.pack.unwrap_or(PackParams::DEFAULT),
            len_max: params.slice_bytes.min(CHUNK_BYTES_MAX),
            last: None,
            pending: Vec::new(),
            pending_bytes: 0,
            floor: 0,
            sample: Vec::new(),
            sample_bytes: 0,
            held_bytes: 0,
        }
    }

    /// Adds the next item. Returns the chunks that are complete now, in order.
    ///
    /// # Errors
    /// [`BadItem`]. The packer does not change then.
    pub fn push(&mut self, item: Item) -> Result<Vec<ChunkPlan>, BadItem> {
        if item.len == 0 || item.len > self.len_max {
            return Err(BadItem::Length { ordinal: item.ordinal, len: item.len, max: self.len_max });
        }
        if self.last.is_some_and(|l| (l.key, l.ordinal) >= (item.key, item.ordinal)) {
            return Err(BadItem::Order(item.ordinal));
        }
        let mut out = Vec::new();
        if self.last.is_some_and(|l| l.key != item.key) {
            self.close_sample(&mut out);
        }
        self.last = Some(item);
        let room = self.params.room(item.len);
        if self.held_bytes + room > u64::from(CHUNK_BYTES_MAX) {
            // The sample is larger than a chunk: its entries so far become a chunk of their own.
            self.emit_before(item.key, self.sample_bytes + room, &mut out);
            emit(&self.params, &self.sample, &mut out);
            self.sample.clear();
            self.held_bytes = 0;
        }
        self.sample.push(item);
        self.sample_bytes += room;
        self.held_bytes += room;
        Ok(out)
    }

    /// Ends the order. Returns the remaining chunks.
    #[must_use]
    pub fn finish(mut self) -> Vec<ChunkPlan> {
        let mut out = Vec::new();
        self.close_sample(&mut out);
        emit(&self.params, &self.pending, &mut out);
        out
    }

    fn close_sample(&mut self, out: &mut Vec<ChunkPlan>) {
        let Some(first) = self.sample.first() else { return };
        self.emit_before(first.key, self.sample_bytes, out);
        self.pending.append(&mut self.sample);
        // Bytes in plans already returned count too: a node that was too heavy stays too heavy.
        self.pending_bytes += self.sample_bytes;
        self.sample_bytes = 0;
        self.held_bytes = 0;
    }

    /// Emits the pending samples that cannot be in one group with a sample of `bytes` bytes at `key`.
    fn emit_before(&mut self, key: GroupKey, bytes: u64, out: &mut Vec<ChunkPlan>) {
        while let Some(first) = self.pending.first() {
            let depth = first.key.common_bits(key);
            let left = if depth < self.floor {
                // Another node: the node above both was too heavy before.
                self.pending.len()
            } else if self.pending_bytes + bytes <= u64::from(self.params.group_bytes) {
                return;
            } else {
                // The node at `depth` is too heavy, and all of its left half is here.
                self.pending.partition_point(|i| !i.key.bit(depth))
            };
            emit(&self.params, &self.pending[..left], out);
            self.pending.drain(..left);
            self.pending_bytes = self.pending.iter().map(|i| self.params.room(i.len)).sum();
            self.floor = depth + 1;
        }
    }
}

/// Appends the plan of one chunk with these items, one after another.
fn emit(params: &PackParams, items: &[Item], out: &mut Vec<ChunkPlan>) {
    let mut at = 0u64;
    let mut len = 0u64;
    let members: Vec<Member> = items
        .iter()
        .map(|&item| {
            // Fits: groups and cut samples take at most 16 MiB.
            let offset = u32::try_from(at).unwrap_or(u32::MAX);
            len = at + u64::from(item.len);
            at += params.room(item.len);
            Member { item, offset }
        })
        .collect();
    if !members.is_empty() {
        out.push(ChunkPlan { members, len: u32::try_from(len).unwrap_or(u32::MAX) });
    }
}
