//! Members of a shard, hashed from the shard's own bytes as they are read for it: a member's hash is in the root, and that
//! the shard is right says nothing about where in it the member is said to lie.

use fletch_core::Hash;
use fletch_core::manifest::{EntryRef, Slice};
use std::collections::HashMap;

/// Members of one shard, whose chunks come in the shard's order.
#[derive(Debug, Default)]
pub struct Members {
    all: Vec<Member>,
    /// Members that have a slice in a chunk.
    of_chunk: HashMap<Hash, Vec<usize>>,
}

#[derive(Debug)]
struct Member {
    path: String,
    hash: Option<Hash>,
    slices: Vec<Slice>,
    /// Slices that were hashed.
    seen: usize,
    /// While some are, and not all.
    hasher: Option<Box<blake3::Hasher>>,
    got: Option<Hash>,
}

impl Members {
    /// One more; an empty one has no bytes to look at.
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

    /// How many there are.
    pub fn len(&self) -> u64 {
        self.all.len() as u64
    }

    /// The bytes of the shard's next chunk.
    pub fn feed(&mut self, chunk: Hash, bytes: &[u8]) {
        for &i in self.of_chunk.get(&chunk).into_iter().flatten() {
            let m = &mut self.all[i];
            // Several slices in one chunk, one after the other, or the next of several chunks.
            while let Some(slice) = m.slices.get(m.seen).filter(|s| s.chunk == chunk) {
                let at = slice.chunk_offset as usize;
                let Some(piece) = bytes.get(at..at + slice.len as usize) else { break };
                m.hasher.get_or_insert_default().update(piece);
                m.seen += 1;
                // An equal chunk that comes again is fed again.
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

    /// What is wrong with the first that is not what the tables say, and how many are.
    pub fn wrong(&self) -> Option<String> {
        let mut wrong = self.all.iter().filter(|m| m.got.is_none() || m.got != m.hash);
        let first = wrong.next()?;
        let why = if first.got.is_some() { "does not hash to its name" } else { "lies outside of its shard" };
        Some(format!("{} {why}, of {} such members; index again", first.path, wrong.count() + 1))
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
        assert!(why.starts_with("s.tar/one does not hash") && why.contains("of 2 such"), "{why}");
        let outside = [("s.tar\0one", &b"ONE"[..], &[slice(a, 15, 3)][..])];
        assert!(with(&outside, &[a]).expect("wrong").contains("outside"));
        let elsewhere = [("s.tar\0one", &b"ONE"[..], &[slice(b"other", 0, 3)][..])];
        assert!(with(&elsewhere, &[a]).expect("wrong").contains("outside"));
    }
}
