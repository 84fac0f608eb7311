//! Groups of chunks, written together: what is kept of them, and what a failed write costs.

use super::*;

/// Charges the dataset for each chunk, as far as the tier admits it.
fn newcomers<'a>(tier: &Arc<DiskEngine>, chunks: &'a [Verified], keys: &'a [StoreKey]) -> Vec<Newcomer<'a>> {
    let admitted = chunks.iter().zip(keys).filter_map(|(chunk, key)| {
        let len = u32::try_from(chunk.bytes().len()).expect("short");
        let reserved = tier.reserve_share(key, D1, len).ok()?;
        Some(Newcomer { key, dataset: D1, chunk, reserved })
    });
    admitted.collect()
}

fn usage(tier: &DiskEngine) -> u64 {
    tier.stats().datasets.iter().map(|d| d.bytes).sum()
}

#[test]
fn i6_of_a_group_that_is_too_long_the_first_chunks_are_kept_over_several_slabs() {
    let dir = tempfile::tempdir().expect("a directory");
    let size = 16 << 20;
    let tier = Arc::new(open(dir.path(), size, Policy::Pin).0);
    let chunks: Vec<Verified> = (0..200).map(|n| chunk(n, 100_000 + n as usize)).collect();
    let keys: Vec<StoreKey> = chunks.iter().map(key).collect();
    let group = newcomers(&tier, &chunks, &keys);
    let stored = tier.put_group(group).expect("no error");
    let kept = stored.iter().filter(|s| **s == Stored::Yes).count();
    assert!((100..160).contains(&kept), "{kept} of 100 kB fit into 16 MiB");
    assert!(stored[..kept].iter().all(|s| *s == Stored::Yes), "those that came first");
    assert!(slab_files(dir.path()).len() > 2, "over several slabs");
    assert!(tier.usage().du <= size);
    let footprints = chunks[..kept].iter().map(|c| DiskEngine::footprint(c.bytes().len() as u32));
    assert_eq!(usage(&tier), footprints.sum::<u64>(), "the others' charges were given back");
    tier.read_index().check();
    drop(tier);
    let (tier, found) = open(dir.path(), size, Policy::Pin);
    assert_eq!(found.records, kept as u64, "found after a kill");
    for (chunk, key) in chunks.iter().zip(&keys).take(kept) {
        assert_eq!(read(&tier, key).0.as_ref().map(Verified::hash), Some(chunk.hash()));
    }
}

#[test]
fn a_write_that_fails_costs_its_group_and_nothing_else() {
    let dir = tempfile::tempdir().expect("a directory");
    let tier = Arc::new(open(dir.path(), 64 << 20, Policy::Fletch).0);
    let chunks: Vec<Verified> = (0..12).map(|n| chunk(n, 5000)).collect();
    let keys: Vec<StoreKey> = chunks.iter().map(key).collect();
    let first = newcomers(&tier, &chunks[..4], &keys[..4]);
    assert_eq!(tier.put_group(first).expect("kept"), [Stored::Yes; 4]);
    let before = usage(&tier);
    let group = newcomers(&tier, &chunks[4..], &keys[4..]);
    assert!(usage(&tier) > before, "charged");
    tier.break_open_slabs();
    assert!(tier.put_group(group).is_err());
    assert_eq!(usage(&tier), before, "the charges were given back");
    for (n, (chunk, key)) in chunks.iter().zip(&keys).enumerate() {
        let got = read(&tier, key).0;
        assert_eq!(got.as_ref().map(Verified::hash), (n < 4).then_some(chunk.hash()), "{n}");
    }
    tier.read_index().check();
}

#[test]
fn of_a_chunk_twice_in_a_group_one_is_kept() {
    let dir = tempfile::tempdir().expect("a directory");
    let tier = Arc::new(open(dir.path(), 64 << 20, Policy::Fletch).0);
    let twice = [chunk(1, 5000), chunk(1, 5000)];
    let keys = [key(&twice[0]), key(&twice[1])];
    let group = newcomers(&tier, &twice, &keys);
    assert_eq!(tier.put_group(group).expect("kept"), [Stored::Yes, Stored::Already]);
    assert_eq!(usage(&tier), DiskEngine::footprint(5000));
    let wrong = [Verified::of(vec![2; 5000].into())];
    let group = newcomers(&tier, &wrong, &keys[..1]);
    assert!(group.is_empty(), "it is there");
    let other = [StoreKey { hash: Hash::of(b"another"), ..keys[0].clone() }];
    let group = newcomers(&tier, &wrong, &other);
    assert!(tier.put_group(group).is_err(), "I1: under another name");
    assert!(!tier.contains(&other[0]));
    assert_eq!(usage(&tier), DiskEngine::footprint(5000));
}
