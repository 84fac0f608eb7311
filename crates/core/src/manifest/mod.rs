//! The manifest of a version: entries in path order, parts, and the root over them; and the layouts that
//! place a version's bytes in chunks. Formats: `docs/FORMATS.md`.

pub mod entries;
pub mod layout;
pub mod locate;
pub mod location_name;
pub mod pack;
pub mod part;
pub mod parts;
pub mod sample;
pub mod slice_hash;
pub mod tar;

pub use entries::{BadEntry, Entry, EntryKind, EntryRef, Sample, SampleRef};
pub use layout::{LayoutKind, LayoutParams, Placed, Slice};
pub use location_name::ObjectState;
pub use pack::PackParams;
pub use part::{Part, PartBuilder};
pub use parts::{PartCutter, PartSummary, root};
pub use sample::{KeyRule, SampleRule};

/// The major version of the logical format and of the tables at rest.
pub const FORMAT_MAJOR: u32 = 1;
/// The minor version. A reader of the same major version may ignore its additions.
pub const FORMAT_MINOR: u32 = 0;
/// The most entries of a part.
pub const PART_ENTRIES_MAX: u32 = 65_536;
/// A path ends its part when the BLAKE3 of its bytes begins with this many zero bits.
pub const PART_CUT_BITS: u32 = 12;
/// The longest path, and the longest link target, in bytes.
pub const PATH_BYTES_MAX: usize = 4096;
/// The longest component of a path, in bytes: the limit of Linux file systems.
pub const COMPONENT_BYTES_MAX: usize = 255;
/// The longest chunk, in bytes.
pub const CHUNK_BYTES_MAX: u32 = 16 << 20;
/// The default slice length, in bytes. A file up to this size is one chunk; a larger file is cut into slices
/// of it.
pub const SLICE_BYTES_DEFAULT: u32 = 4 << 20;
