//! Slabs of a cache directory, and the catalogue's rows of dead records.

use crate::{plant, repair, scratch};
use fletch_core::{Domain, Hash};
use fletch_store::disk::fuzzing::{self, FoundSlab};

/// The number of the slab that every input pretends to be.
const ID: u64 = 3;

pub fn seeds() -> Vec<Vec<u8>> {
    let domain = Domain::new("vision").expect("a name");
    let payloads: [&[u8]; 3] = [b"one", &[7; 300], b""];
    [true, false].map(|sealed| fuzzing::slab(ID, &domain, &payloads, sealed)).to_vec()
}

/// Records of a slab lie within it and do not overlap. Without a table, each payload has its hash.
pub fn run(input: &[u8]) -> bool {
    let _ = fuzzing::dead_rows(input);
    check(input);
    check(&repair::slab(input)).is_some_and(|found| {
        plant::bug(found.sealed && found.records.len() == 2);
        plant::bug(!found.sealed && found.records.iter().any(|r| r.len == 64));
        !found.records.is_empty()
    })
}

fn check(bytes: &[u8]) -> Option<FoundSlab> {
    let file = scratch::opened("slab", bytes);
    let found = fuzzing::load(&file, ID).expect("a readable file")?;
    let mut end = 512;
    for r in &found.records {
        assert!(r.at >= end, "records overlap");
        end = r.at + 256 + u64::from(r.len);
        assert!(end <= bytes.len() as u64, "a record reaches past the slab");
        let at = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        if !found.sealed {
            assert_eq!(Hash::of(&bytes[at(r.at + 256)..at(end)]), r.hash, "a payload without its hash");
        }
    }
    Some(found)
}
