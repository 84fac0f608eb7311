//! Tar shards: the chunks and members of an archive, found and hashed in one pass over its bytes
//! (`docs/FORMATS-pack.md`, "Tar shards").
//!
//! A slice that begins at `s` ends at the last sample boundary in `(s, s + slice_bytes]`; else at the last
//! member boundary there; else at `s + slice_bytes`. The last slice ends with the archive. So a sample that
//! fits in a slice is in one chunk. The ends of slices depend on the archive and `slice_bytes` alone, not on
//! the version's sample rule.
//!
//! Memory: the bytes of one slice and one extended header, and the members' names and hashes.

use super::{BLOCK_BYTES, BadTar, Found, TarScanner};
use crate::Hash;
use crate::groups::{GROUPED_BYTES_MIN, GroupHasher, GroupHashes};
use crate::manifest::{CHUNK_BYTES_MAX, Slice, sample::stem};
use std::collections::VecDeque;

/// The most members of a shard: their names are in memory until the archive ends.
pub const MEMBERS_MAX: usize = 4_000_000;

/// A member of a shard: a run of its bytes, with a name.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ShardMember {
    /// The name, as in the archive.
    pub name: String,
    /// Its length in bytes.
    pub size: u64,
    /// Plain BLAKE3 of its bytes.
    pub hash: Hash,
    /// The slices that hold its bytes, in order; none for an empty member.
    pub slices: Vec<Slice>,
}

/// The chunks and members of a whole archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sharded {
    /// Plain BLAKE3 of the archive.
    pub hash: Hash,
    /// Its chunks, in order; none for an empty archive.
    pub slices: Vec<Slice>,
    /// Its members, in byte order of their names.
    pub members: Vec<ShardMember>,
    /// What [`Sharder::take_groups`] has not returned yet.
    pub groups: Vec<GroupHashes>,
}

/// A member whose bytes are not all hashed yet.
struct OpenMember {
    name: String,
    offset: u64,
    size: u64,
    hasher: blake3::Hasher,
    slices: Vec<Slice>,
}

/// Cuts one archive into slices and finds its members. Takes bytes in pieces of any length.
pub struct Sharder {
    slice_bytes: usize,
    scanner: TarScanner,
    whole: blake3::Hasher,
    /// The bytes from `start`, where the current slice begins.
    buffer: Vec<u8>,
    start: u64,
    /// Member boundaries after `start`, and whether each is also a sample boundary.
    bounds: VecDeque<(u64, bool)>,
    /// The end of the last member found, with its padding, and the member's sample key.
    known_to: u64,
    last_key: Option<String>,
    /// Whether the first member was found: there is no boundary before it.
    begun: bool,
    /// Members whose bytes are not all in slices yet, by offset.
    open: VecDeque<OpenMember>,
    slices: Vec<Slice>,
    members: Vec<ShardMember>,
    found: Vec<Found>,
    /// The hashes of the groups of chunks, if they are wanted.
    groups: Option<Vec<GroupHashes>>,
}

impl Sharder {
    /// Returns a sharder at the first byte of an archive. `slice_bytes` is 1 byte to 16 MiB.
    #[must_use]
    pub fn new(slice_bytes: u32) -> Self {
        Sharder {
            slice_bytes: slice_bytes.clamp(1, CHUNK_BYTES_MAX) as usize,
            scanner: TarScanner::new(),
            whole: blake3::Hasher::new(),
            buffer: Vec::new(),
            start: 0,
            bounds: VecDeque::new(),
            known_to: 0,
            last_key: None,
            begun: false,
            open: VecDeque::new(),
            slices: Vec::new(),
            members: Vec::new(),
            found: Vec::new(),
            groups: None,
        }
    }

    /// Computes the hashes of the groups of long chunks, too.
    #[must_use]
    pub fn with_groups(self) -> Self {
        Sharder { groups: Some(Vec::new()), ..self }
    }

    /// Returns the hashes of the groups of the chunks that ended since the last call.
    pub fn take_groups(&mut self) -> Vec<GroupHashes> {
        self.groups.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn hash(&mut self, length: usize) -> Hash {
        let bytes = &self.buffer[..length];
        match &mut self.groups {
            Some(groups) if length >= GROUPED_BYTES_MIN as usize => {
                let mut hasher = GroupHasher::default();
                hasher.update(bytes);
                let (hash, of_chunk) = hasher.finish();
                groups.extend(of_chunk);
                hash
            }
            _ => Hash::of(bytes),
        }
    }

    /// Reads the next bytes.
    ///
    /// # Errors
    /// [`BadTar`]. The archive is then a file like any other.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), BadTar> {
        self.scanner.feed(bytes, &mut self.found)?;
        for found in std::mem::take(&mut self.found) {
            if let Found::Member { name, offset, size } = found {
                self.member(name, offset, size)?;
            }
        }
        self.whole.update(bytes);
        self.buffer.extend_from_slice(bytes);
        // A boundary that is not found yet could change the cut.
        while self.buffer.len() > self.slice_bytes && self.bounds_known() {
            self.cut(false);
        }
        Ok(())
    }

    /// Returns whether every boundary up to the largest possible end of this slice is known.
    fn bounds_known(&self) -> bool {
        let end = self.start + self.slice_bytes as u64;
        self.known_to > end
            || self.scanner.skippable() == u64::MAX
            || self.scanner.position() > end + HEADERS_BYTES_MAX
    }

    fn member(&mut self, name: String, offset: u64, size: u64) -> Result<(), BadTar> {
        let key = stem(&name);
        if self.begun {
            let joined = key.is_some() && key == self.last_key.as_deref();
            self.bounds.push_back((self.known_to, !joined));
        }
        self.begun = true;
        self.last_key = key.map(str::to_owned);
        self.known_to = (offset + size).next_multiple_of(BLOCK_BYTES as u64);
        if self.members.len() + self.open.len() == MEMBERS_MAX {
            return Err(BadTar::Unsupported { offset, what: "more than 4,000,000 members" });
        }
        self.open.push_back(OpenMember {
            name,
            offset,
            size,
            hasher: blake3::Hasher::new(),
            slices: Vec::new(),
        });
        Ok(())
    }

    /// Ends the current slice. With `last`, the slice takes all bytes that are left, if they fit.
    fn cut(&mut self, last: bool) {
        let limit = self.start + self.slice_bytes as u64;
        let tail = self.start + self.buffer.len() as u64;
        let end = if last && tail <= limit {
            tail
        } else {
            // The end of the last member is a boundary too: only the archive's end mark follows.
            let ended = self.scanner.skippable() == u64::MAX || last;
            let archive = (ended && self.begun).then_some((self.known_to, true));
            let fits = |(at, _): &(u64, bool)| *at > self.start && *at <= limit;
            let all = || self.bounds.iter().copied().chain(archive).filter(fits);
            let sample = all().filter(|(_, sample)| *sample).map(|(at, _)| at).max();
            sample.or_else(|| all().map(|(at, _)| at).max()).unwrap_or(limit).min(tail)
        };
        let length = usize::try_from(end - self.start).unwrap_or(self.buffer.len()).min(self.buffer.len());
        let chunk = self.hash(length);
        let bytes = &self.buffer[..length];
        let len = u32::try_from(length).unwrap_or(u32::MAX);
        self.slices.push(Slice { chunk, chunk_offset: 0, len });
        for member in self.open.iter_mut().take_while(|m| m.offset < end) {
            let from = member.offset.max(self.start);
            let to = (member.offset + member.size).min(end);
            if from < to {
                // Both offsets are within this slice.
                let at = |n: u64| usize::try_from(n - self.start).unwrap_or(length).min(length);
                member.hasher.update(&bytes[at(from)..at(to)]);
                member.slices.push(Slice {
                    chunk,
                    chunk_offset: u32::try_from(from - self.start).unwrap_or(u32::MAX),
                    len: u32::try_from(to - from).unwrap_or(u32::MAX),
                });
            }
        }
        while self.open.front().is_some_and(|m| m.offset + m.size <= end) {
            self.close();
        }
        while self.bounds.front().is_some_and(|(at, _)| *at <= end) {
            self.bounds.pop_front();
        }
        self.buffer.drain(..length);
        self.start = end;
    }

    fn close(&mut self) {
        if let Some(m) = self.open.pop_front() {
            let hash = m.hasher.finalize().into();
            self.members.push(ShardMember { name: m.name, size: m.size, hash, slices: m.slices });
        }
    }

    /// Ends the archive.
    ///
    /// # Errors
    /// [`BadTar`]: the archive ends within a member, is not an archive, or has a name twice.
    pub fn finish(mut self) -> Result<Sharded, BadTar> {
        self.scanner.finish()?;
        while !self.buffer.is_empty() {
            self.cut(true);
        }
        while !self.open.is_empty() {
            self.close();
        }
        self.members.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some(pair) = self.members.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(BadTar::Twice { name: pair[0].name.clone() });
        }
        let groups = self.take_groups();
        Ok(Sharded { hash: self.whole.finalize().into(), slices: self.slices, members: self.members, groups })
    }
}

/// How far past a slice's end the scanner must be before all boundaries up to that end are known, in bytes: a
/// header that begins there may have extended headers before it.
const HEADERS_BYTES_MAX: u64 = 4 * super::EXTENDED_BYTES_MAX;

/// Returns whether a file with this name is treated as a tar shard.
#[must_use]
pub fn is_shard(path: &str) -> bool {
    path.ends_with(".tar")
}

/// Returns whether a file's name says that it is a compressed archive, whose members cannot be read by range.
#[must_use]
pub fn is_compressed_shard(path: &str) -> bool {
    [".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz", ".tar.lz4"].iter().any(|end| path.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ustar archive of members with these names and bytes.
    fn archive(members: &[(&str, &[u8])]) -> Vec<u8> {
        let mut out = Vec::new();
        for (name, bytes) in members {
            let mut h = [0u8; BLOCK_BYTES];
            h[..name.len()].copy_from_slice(name.as_bytes());
            h[100..108].copy_from_slice(b"0000644\0");
            h[124..136].copy_from_slice(format!("{:011o}\0", bytes.len()).as_bytes());
            h[136..148].copy_from_slice(b"00000000000\0");
            h[148..156].copy_from_slice(b"        ");
            h[156] = b'0';
            h[257..265].copy_from_slice(b"ustar\x0000");
            let sum: u32 = h.iter().map(|b| u32::from(*b)).sum();
            h[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            out.extend_from_slice(&h);
            out.extend_from_slice(bytes);
            out.resize(out.len().next_multiple_of(BLOCK_BYTES), 0);
        }
        out.extend_from_slice(&[0; 2 * BLOCK_BYTES]);
        out
    }

    fn shard(bytes: &[u8], slice_bytes: u32, piece: usize) -> Result<Sharded, BadTar> {
        let mut s = Sharder::new(slice_bytes).with_groups();
        for piece in bytes.chunks(piece) {
            s.feed(piece)?;
        }
        s.finish()
    }

    fn lengths(s: &Sharded) -> Vec<u32> {
        s.slices.iter().map(|s| s.len).collect()
    }

    /// Each slice is a chunk of the archive, and each member's slices are its bytes.
    fn check(bytes: &[u8], s: &Sharded, members: &[(&str, &[u8])]) {
        let mut at = 0;
        let mut chunks = std::collections::BTreeMap::new();
        for slice in &s.slices {
            let part = &bytes[at..at + slice.len as usize];
            assert_eq!(slice.chunk, Hash::of(part));
            chunks.insert(slice.chunk, part);
            at += slice.len as usize;
        }
        assert_eq!((at, s.hash), (bytes.len(), Hash::of(bytes)));
        let long = s.slices.iter().filter(|slice| slice.len >= GROUPED_BYTES_MIN);
        let groups = s.groups.iter().map(|groups| (groups.chunk(), groups.chunk_len()));
        assert!(groups.eq(long.map(|slice| (slice.chunk, slice.len))));
        assert_eq!(s.members.len(), members.len());
        for (name, bytes) in members {
            let m = s.members.iter().find(|m| m.name == *name).expect("the member");
            let read: Vec<u8> = m
                .slices
                .iter()
                .flat_map(|s| &chunks[&s.chunk][s.chunk_offset as usize..][..s.len as usize])
                .copied()
                .collect();
            assert_eq!((m.hash, m.size), (Hash::of(bytes), bytes.len() as u64), "{name}");
            assert_eq!(read, *bytes, "{name}");
        }
    }

    /// The golden file: slices of 4,096 bytes of an archive whose members are 0x61 repeated.
    #[test]
    fn slices_end_as_the_golden_file_says() {
        let golden = include_str!("../../../../../tests/golden/shards.tsv");
        let mut cases = 0;
        for line in golden.lines().filter(|l| !l.starts_with('#')) {
            let [what, members, want] = line.split('\t').collect::<Vec<_>>()[..] else { panic!("{line}") };
            let members: Vec<(&str, Vec<u8>)> = members
                .split(' ')
                .filter(|m| !m.is_empty())
                .map(|m| m.split_once(':').expect("name:size"))
                .map(|(name, size)| (name, vec![b'a'; size.parse().expect("size")]))
                .collect();
            let members: Vec<(&str, &[u8])> = members.iter().map(|(n, b)| (*n, b.as_slice())).collect();
            let bytes = archive(&members);
            for piece in [1, 500, 512, 4096, 100_000] {
                let s = shard(&bytes, 4096, piece).expect(what);
                let got: Vec<String> = lengths(&s).iter().map(ToString::to_string).collect();
                assert_eq!(got.join(" "), want, "{what}, pieces of {piece}");
                check(&bytes, &s, &members);
            }
            cases += 1;
        }
        assert_eq!(cases, 8);
    }

    #[test]
    fn any_archive_in_any_pieces_is_covered_once() {
        use proptest::prelude::*;
        let member = (0..6u8, 0..4u8, 0..9_000usize);
        proptest!(ProptestConfig::with_cases(200), |(sizes in prop::collection::vec(member, 0..30),
                slice in 512u32..6_000, piece in 1usize..20_000)| {
            let mut seen = std::collections::BTreeSet::new();
            let members: Vec<(String, Vec<u8>)> = sizes
                .iter()
                .map(|(key, kind, n)| (format!("{key:02}.{kind}"), vec![b'0' + key; *n]))
                .filter(|(name, _)| seen.insert(name.clone()))
                .collect();
            let members: Vec<(&str, &[u8])> =
                members.iter().map(|(n, b)| (n.as_str(), b.as_slice())).collect();
            let bytes = archive(&members);
            let s = shard(&bytes, slice, piece).expect("an archive");
            check(&bytes, &s, &members);
            prop_assert!(s.slices.iter().all(|s| s.len <= slice && s.len > 0));
            prop_assert_eq!(&s, &shard(&bytes, slice, 512).expect("an archive"));
        });
    }

    #[test]
    fn bad_archives_and_names_used_twice_are_rejected() {
        assert!(matches!(shard(&[0x1f, 0x8b, 8, 0], 4096, 4), Err(BadTar::Compressed(_))));
        assert!(matches!(shard(b"", 4096, 1), Err(BadTar::NotTar)));
        let twice = archive(&[("a", b"1"), ("b", b""), ("a", b"2")]);
        assert!(matches!(shard(&twice, 4096, 512), Err(BadTar::Twice { name }) if name == "a"));
        let cut = &archive(&[("a", &[1; 2000])])[..1500];
        assert!(matches!(shard(cut, 4096, 512), Err(BadTar::Short { .. })));
        let padded = [archive(&[("a", b"1")]), vec![0; 20_000]].concat();
        assert_eq!(
            lengths(&shard(&padded, 4096, 700).expect("padding is legal")).iter().sum::<u32>(),
            22_048
        );
        assert!(is_shard("d/x.tar") && !is_shard("d/x.tar.gz") && is_compressed_shard("x.tgz"));
    }
}
