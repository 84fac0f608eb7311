//! What a version is: entries in path order, cut into parts, folded into a root; and how a
//! layout places its bytes in chunks. Formats: `docs/FORMATS.md`.

pub mod entries;
pub mod layout;
pub mod locate;
pub mod pack;
pub mod part;
pub mod parts;
pub mod sample;
pub mod tar;

pub use entries::{BadEntry, Entry, EntryKind, EntryRef, Sample, SampleRef};
pub use layout::{LayoutKind, LayoutParams, Placed, Slice};
pub use pack::PackParams;
pub use part::{Part, PartBuilder};
pub use parts::{PartCutter, PartSummary, root};
pub use sample::{KeyRule, SampleRule};

/// The major version of the logical format and of the tables at rest.
pub const FORMAT_MAJOR: u32 = 1;
/// Additions that a reader of the same major may ignore.
pub const FORMAT_MINOR: u32 = 0;
/// No part has more entries.
pub const PART_ENTRIES_MAX: u32 = 65_536;
/// A path ends its part when the BLAKE3 of its bytes begins with this many zero bits.
pub const PART_CUT_BITS: u32 = 12;
/// The longest path, and the longest link target, in bytes.
pub const PATH_BYTES_MAX: usize = 4096;
/// The longest single component of a path, in bytes (what Linux file systems take).
pub const COMPONENT_BYTES_MAX: usize = 255;
/// No chunk is longer.
pub const CHUNK_BYTES_MAX: u32 = 16 << 20;
/// Files up to this size are one chunk; larger ones are cut into slices of it.
pub const SLICE_BYTES_DEFAULT: u32 = 4 << 20;
