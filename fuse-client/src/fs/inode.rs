//! Inode numbers without a table: the number itself encodes what it names.
//!
//! ```text
//! 1                                   the root directory
//! ordinal + 2                         a file or a symlink
//! 1<<63 | depth<<48 | first ordinal   a directory: the first `depth` components of the path
//!                                     of its first entry
//! ```
//! A version never changes, so a number never changes its meaning, in any mount of the version.

use fletch_core::manifest::locate::DirId;

/// The number of this encoding. A process may take over a mount only from one with the same encoding: the
/// kernel goes on with the numbers that it knows.
pub const ENCODING: u32 = 1;

const ROOT: u64 = 1;
const ENTRY_BASE: u64 = 2;
const DIR_BIT: u64 = 1 << 63;
const DEPTH_SHIFT: u32 = 48;
const FIRST_MASK: u64 = (1 << DEPTH_SHIFT) - 1;

/// What an inode number names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ino {
    /// A directory; depth 0 is the root.
    Dir(DirId),
    /// A file or a symlink, by its ordinal.
    Entry(u64),
}

impl Ino {
    /// The root directory.
    pub const ROOT: Ino = Ino::Dir(DirId { first: 0, depth: 0 });

    /// Decodes a number; `None` for a number that no inode has.
    #[must_use]
    pub fn decode(number: u64) -> Option<Self> {
        if number == ROOT {
            return Some(Ino::ROOT);
        }
        if number & DIR_BIT == 0 {
            return number.checked_sub(ENTRY_BASE).map(Ino::Entry);
        }
        // The depth has 15 bits; a path has at most 2,048 components.
        let depth = u16::try_from((number & !DIR_BIT) >> DEPTH_SHIFT).ok()?;
        (depth > 0).then_some(Ino::Dir(DirId { first: number & FIRST_MASK, depth }))
    }

    /// Encodes the number; `None` if an ordinal or depth does not fit (2^48 entries, 2^15 levels).
    #[must_use]
    pub fn number(self) -> Option<u64> {
        match self {
            Ino::Dir(DirId { depth: 0, .. }) => Some(ROOT),
            Ino::Dir(DirId { first, depth }) => (first <= FIRST_MASK && depth < 1 << 15)
                .then_some(DIR_BIT | u64::from(depth) << DEPTH_SHIFT | first),
            Ino::Entry(ordinal) => (ordinal <= FIRST_MASK).then_some(ordinal + ENTRY_BASE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_numbers_have_their_encoding() {
        assert_eq!(Ino::ROOT.number(), Some(1));
        assert_eq!(Ino::Entry(0).number(), Some(2));
        assert_eq!(Ino::Dir(DirId { first: 5, depth: 3 }).number(), Some(1 << 63 | 3 << 48 | 5));
        assert_eq!(Ino::decode(0), None);
        assert_eq!(Ino::decode(1 << 63 | 5), None);
        assert_eq!(Ino::Entry(1 << 48).number(), None);
    }

    proptest! {
        #[test]
        fn numbers_round_trip(first in 0u64..1 << 48, depth in 1u16..2049) {
            for ino in [Ino::Entry(first), Ino::Dir(DirId { first, depth })] {
                let n = ino.number().expect("in range");
                prop_assert_eq!(Ino::decode(n), Some(ino));
                prop_assert!(n > 1);
            }
        }
    }
}
