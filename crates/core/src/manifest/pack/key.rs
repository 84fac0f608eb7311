//! The order of a pack: every small entry gets a key, and the pack's order is ascending by (key, ordinal).
//! Rows have a fixed length and compare as bytes, so any external sort can order them.

use crate::Hash;
use crate::manifest::{EntryRef, LayoutParams, SampleRef};

/// The position of a sample in the order of a pack: the first 16 bytes of the BLAKE3 of the path of the
/// sample's first entry. Compares as bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupKey(pub [u8; 16]);

impl GroupKey {
    /// Returns the key of a sample whose first entry has this path. A member's path includes its shard and
    /// NUL.
    #[must_use]
    pub fn of(path: &str) -> Self {
        let hash = Hash::of(path.as_bytes());
        let mut key = [0; 16];
        key.copy_from_slice(&hash.as_bytes()[..16]);
        GroupKey(key)
    }

    /// Returns how many leading bits two keys share, 0 to 128.
    pub(super) fn common_bits(self, other: Self) -> u32 {
        (u128::from_be_bytes(self.0) ^ u128::from_be_bytes(other.0)).leading_zeros()
    }

    /// Returns one bit of the key, counted from the first.
    pub(super) fn bit(self, at: u32) -> bool {
        (u128::from_be_bytes(self.0) << at) >> 127 == 1
    }
}

/// A small entry to be grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Item {
    /// The position of its sample in the order.
    pub key: GroupKey,
    /// Its ordinal in the version, which is the order inside a sample.
    pub ordinal: u64,
    /// Its length in bytes, 1 to `slice_bytes`.
    pub len: u32,
}

/// The length of [`Item::to_row`], in bytes.
pub const SORT_ROW_BYTES: usize = 28;

impl Item {
    /// Returns the item as bytes that sort as items do: key 16 · ordinal u64 · length u32, big-endian. Rows
    /// of one version differ in their first 24 bytes.
    #[must_use]
    pub fn to_row(&self) -> [u8; SORT_ROW_BYTES] {
        let mut row = [0; SORT_ROW_BYTES];
        row[..16].copy_from_slice(&self.key.0);
        row[16..24].copy_from_slice(&self.ordinal.to_be_bytes());
        row[24..].copy_from_slice(&self.len.to_be_bytes());
        row
    }

    /// Reads an item that [`Item::to_row`] wrote.
    #[must_use]
    pub fn from_row(row: &[u8; SORT_ROW_BYTES]) -> Self {
        let (mut key, mut ordinal, mut len) = ([0; 16], [0; 8], [0; 4]);
        key.copy_from_slice(&row[..16]);
        ordinal.copy_from_slice(&row[16..24]);
        len.copy_from_slice(&row[24..]);
        Item { key: GroupKey(key), ordinal: u64::from_be_bytes(ordinal), len: u32::from_be_bytes(len) }
    }
}

/// The way in which a pack places an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placing {
    /// The entry has no bytes and no placement: a link, an empty directory, an empty file.
    Nothing,
    /// The entry is grouped with others.
    Group(Item),
    /// The entry is longer than `slice_bytes`. It is cut into slices, each a chunk, as in an index.
    Slices,
}

/// Gives every entry of a version its place in a pack. Takes entries in path order and remembers one sample.
#[derive(Debug)]
pub struct Keyer {
    slice_bytes: u32,
    ordinal: u64,
    /// The present sample: its shard ("" for files), its key in the version, its group key.
    run: Option<(String, String, GroupKey)>,
}

impl Keyer {
    /// Returns a keyer at the first entry of a version.
    #[must_use]
    pub fn new(params: &LayoutParams) -> Self {
        Keyer { slice_bytes: params.slice_bytes, ordinal: 0, run: None }
    }

    /// Returns the place of the next entry. All entries of a sample share the group key of the sample's first
    /// entry, whatever that entry's size or place.
    pub fn next(&mut self, e: EntryRef<'_>) -> Placing {
        let ordinal = self.ordinal;
        self.ordinal += 1;
        let key = match e.sample {
            // An entry without a sample may be between entries of one sample: `1.cls`, `1.d/notes`, `1.jpg`.
            SampleRef::None => GroupKey::of(e.path),
            SampleRef::Single => {
                self.run = None;
                GroupKey::of(e.path)
            }
            SampleRef::Keyed(k) => {
                let shard = e.path.split_once('\0').map_or("", |(shard, _)| shard);
                match &self.run {
                    Some((in_shard, open, key)) if open == k && in_shard == shard => *key,
                    _ => {
                        let key = GroupKey::of(e.path);
                        self.run = Some((shard.to_owned(), k.to_owned(), key));
                        key
                    }
                }
            }
        };
        if !e.kind.has_bytes() || e.size == 0 {
            return Placing::Nothing;
        }
        match u32::try_from(e.size) {
            Ok(len) if len <= self.slice_bytes => Placing::Group(Item { key, ordinal, len }),
            _ => Placing::Slices,
        }
    }
}
