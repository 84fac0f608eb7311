//! Checks the members of a shard while the shard itself is read.
//!
//! The root covers the hash of a member but not its place in the shard. So a right shard does not prove that
//! the slices of its members are right: the bytes at these slices are hashed too.

use crate::out::count;
use fletch_core::Hash;
use fletch_core::manifest::{EntryRef, Slice};
use std::collections::HashMap;

/// The members of one shard. Its chunks are fed in the order of the shard.
#[derive(Debug, Default)]
pub struct Members {
    all: Vec<Member>,
    /// By chunk: the members with a slice in it.
    of_chunk: HashMap<Hash, Vec<usize>>,
}

#[derive(Debug)]
struct Member {
    path: String,
    hash: Option<Hash>,
    slices: Vec<Slice>,
    /// The number of slices that were hashed.
    seen: usize,
    /// Set while some slices, but not all, were hashed.
    hasher: Option<Box<blake3::Hasher>>,
    got: Option<Hash>,
}

impl Members {
    /// Adds a member.
    pub fn push(&mut self, e: &EntryRef<'_>, slices: &[Slice]) {
        for slice in slices {
            let of = self.of_chunk.entry(slice.chunk).or_default();
            if of.last() != Some(&self.all.len()) {
                of.push(self.all.len());
            }
        }
        self.all.push(Member {
            path: e.path.replace('\0', "/"),
            hash: e.hash,
            slices: slices.to_vec(),
            seen: 0,
            hasher: None,
            got: slices.is_empty().then(|| Hash::of(b"")),
        });
    }

    /// Returns the number of members.
    pub fn len(&self) -> u64 {
        self.all.len() as u64
    }

    /// Hashes the slices of members in the next chunk of the shard.
    pub fn feed(&mut self, chunk: Hash, bytes: &[u8]) {
        for &i in self.of_chunk.get(&chunk).into_iter().flatten() {
            let m = &mut self.all[i];
            // A member can have several slices in one chunk, one after the other.
            while let Some(slice) = m.slices.get(m.seen).filter(|s| s.chunk == chunk) {
                let at = slice.chunk_offset as usize;
                let Some(bytes) = bytes.get(at..at + slice.len as usize) else { break };
                m.hasher.get_or_insert_default().update(bytes);
                m.seen += 1;
                // The next slice is in another copy of this chunk, which is fed later.
                if m.slices
                    .get(m.seen)
                    .is_some_and(|next| next.chunk == chunk && next.chunk_offset <= slice.chunk_offset)
                {
                    break;
                }
            }
            if m.seen == m.slices.len()
                && let Some(hasher) = m.hasher.take()
            {
                m.got = Some(hasher.finalize().into());
            }
        }
    }

    /// Returns what is wrong with the first wrong member, and the number of wrong members.
    pub fn wrong(&self) -> Option<String> {
        let mut wrong = self.all.iter().filter(|m| m.got.is_none() || m.got != m.hash);
        let first = wrong.next()?;
        let why = if first.got.is_some() {
            "has other bytes than the tables say"
        } else {
            "is outside of its shard"
        };
        Some(format!(
            "{} {why}; wrong in all: {}; index again",
            first.path,
            count(wrong.count() + 1, "member")
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_core::manifest::EntryKind;

    fn slice(chunk: &[u8], chunk_offset: u32, len: u32) -> Slice {
        Slice { chunk: Hash::of(chunk), chunk_offset, len }
    }

    fn with(entries: &[(&str, &[u8], &[Slice])], chunks: &[&[u8]]) -> Option<String> {
        let mut members = Members::default();
        for (path, content, slices) in entries {
            let entry = fletch_core::manifest::Entry {
                kind: EntryKind::Member,
                ..fletch_core::manifest::Entry::file(*path, content.len() as u64, Hash::of(content))
            };
            members.push(&entry.as_ref(), slices);
        }
        for chunk in chunks {
            members.feed(Hash::of(chunk), chunk);
        }
        members.wrong()
    }

    #[test]
    fn members_are_hashed_from_their_shards_chunks() {
        let (a, b) = (&b"headONEpadTWOtail"[..], &b"THREEmore"[..]);
        let good: &[(&str, &[u8], &[Slice])] = &[
            ("s.tar\0one", b"ONE", &[slice(a, 4, 3)]),
            ("s.tar\0two", b"TWO", &[slice(a, 10, 3)]),
            ("s.tar\0none", b"", &[]),
            ("s.tar\0long", b"tailTHREE", &[slice(a, 13, 4), slice(b, 0, 5)]),
        ];
        assert_eq!(with(good, &[a, b]), None);
        // A chunk that the shard has twice.
        let twice: &[(&str, &[u8], &[Slice])] =
            &[("s.tar\0x", b"ZZZZ", &[slice(b"ZZ", 0, 2), slice(b"ZZ", 0, 2)])];
        assert_eq!(with(twice, &[b"ZZ", b"ZZ", b"ZZ"]), None);
    }

    #[test]
    fn a_place_that_is_not_the_members_is_found() {
        let a = &b"headONEpadTWOtail"[..];
        let swapped =
            [("s.tar\0one", &b"ONE"[..], &[slice(a, 10, 3)][..]), ("s.tar\0two", b"TWO", &[slice(a, 4, 3)])];
        let why = with(&swapped, &[a]).expect("wrong");
        assert!(
            why.starts_with("s.tar/one has other bytes") && why.contains("wrong in all: 2 members"),
            "{why}"
        );
        let outside = [("s.tar\0one", &b"ONE"[..], &[slice(a, 15, 3)][..])];
        assert!(with(&outside, &[a]).expect("wrong").contains("outside"));
        let elsewhere = [("s.tar\0one", &b"ONE"[..], &[slice(b"other", 0, 3)][..])];
        assert!(with(&elsewhere, &[a]).expect("wrong").contains("outside"));
    }
}
