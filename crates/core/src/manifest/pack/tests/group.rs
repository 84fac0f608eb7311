//! The order of a pack, and the cuts between its groups.

use super::{Rng, key, pack_all};
use crate::Hash;
use crate::manifest::pack::{
    BadItem, ChunkPlan, GroupKey, Item, Keyer, PackParams, Packer, Placing, SORT_ROW_BYTES,
};
use crate::manifest::{CHUNK_BYTES_MAX, Entry, EntryKind, LayoutParams, Sample};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Small parameters, with which small trees have many groups.
const SMALL: LayoutParams = LayoutParams {
    slice_bytes: 4 << 10,
    pack: Some(PackParams { group_bytes: 6 << 10, align: 64 }),
    ..LayoutParams::PACK
};

fn pack_of(params: &LayoutParams) -> PackParams {
    params.pack.expect("a pack")
}

/// The rule as in `docs/FORMATS-pack.md`: recursive, over the whole set.
fn documented_groups(params: &LayoutParams, items: &[Item], depth: u32, out: &mut Vec<Vec<Item>>) {
    let pack = pack_of(params);
    let Some(first) = items.first() else { return };
    if items.iter().map(|i| pack.room(i.len)).sum::<u64>() <= u64::from(pack.group_bytes) {
        out.push(items.to_vec());
    } else if items.iter().all(|i| i.key == first.key) {
        let (mut group, mut bytes) = (Vec::new(), 0);
        for i in items {
            if bytes + pack.room(i.len) > u64::from(CHUNK_BYTES_MAX) {
                out.push(std::mem::take(&mut group));
                bytes = 0;
            }
            bytes += pack.room(i.len);
            group.push(*i);
        }
        out.push(group);
    } else {
        let (left, right): (Vec<Item>, Vec<Item>) = items.iter().partition(|i| !i.key.bit(depth));
        documented_groups(params, &left, depth + 1, out);
        documented_groups(params, &right, depth + 1, out);
    }
}

fn check_chunk(params: &LayoutParams, plan: &ChunkPlan) {
    let pack = pack_of(params);
    let mut end = 0u32;
    for m in &plan.members {
        assert_eq!(m.offset % pack.align, 0, "aligned");
        assert_eq!(m.offset, end.next_multiple_of(pack.align), "no gap but padding");
        end = m.offset + m.item.len;
    }
    assert_eq!(plan.len, end, "nothing after the last member");
    assert!((1..=CHUNK_BYTES_MAX).contains(&plan.len));
    let samples: BTreeSet<GroupKey> = plan.members.iter().map(|m| m.item.key).collect();
    assert!(samples.len() == 1 || plan.len <= pack.group_bytes, "groups of several samples are bounded");
}

/// Keys of few bits, which make deep and unbalanced trees; samples of several entries.
fn items() -> impl Strategy<Value = Vec<Item>> {
    let key = prop_oneof![
        any::<u128>(),
        (0u32..128).prop_map(|b| 1u128 << b),
        (0u128..8, 120u32..126).prop_map(|(v, s)| v << s)
    ];
    proptest::collection::vec((key, proptest::collection::vec(1u32..=4096, 1..4)), 0..60).prop_map(
        |samples| {
            let mut ordinal = 0;
            let mut seen = BTreeSet::new();
            let mut out = Vec::new();
            for (k, lens) in samples {
                if seen.insert(k) {
                    for len in lens {
                        out.push(Item { key: GroupKey(k.to_be_bytes()), ordinal, len });
                        ordinal += 1;
                    }
                }
            }
            out
        },
    )
}

proptest! {
    /// The packer cuts as the documented rule does.
    ///
    /// It places every item once, keeps the bounds of chunks, and holds a bounded number of items.
    #[test]
    fn the_packer_cuts_as_documented(mut items in items()) {
        items.sort_unstable();
        let mut want = Vec::new();
        documented_groups(&SMALL, &items, 0, &mut want);
        let mut packer = Packer::new(&SMALL);
        let mut got = Vec::new();
        let mut held = 0u64;
        for i in &items {
            held += u64::from(i.len.next_multiple_of(64));
            for plan in packer.push(*i).expect("in order") {
                held -= plan.members.iter().map(|m| u64::from(m.item.len.next_multiple_of(64))).sum::<u64>();
                got.push(plan);
            }
            // One group, and one sample of at most three entries.
            prop_assert!(held <= (6 << 10) + 3 * 4096 + 3 * 4096);
        }
        got.extend(packer.finish());
        for plan in &got {
            check_chunk(&SMALL, plan);
        }
        let got: Vec<Vec<Item>> = got.iter().map(|p| p.members.iter().map(|m| m.item).collect()).collect();
        prop_assert_eq!(got, want);
    }

    /// Rows sorted as bytes give the same chunks, whatever their order of arrival.
    #[test]
    fn rows_sort_as_bytes(items in items().prop_flat_map(|v| Just(v).prop_shuffle())) {
        let want = pack_all(&SMALL, items.clone());
        let mut rows: Vec<[u8; SORT_ROW_BYTES]> = items.iter().map(Item::to_row).collect();
        rows.sort_unstable();
        let mut packer = Packer::new(&SMALL);
        let mut got = Vec::new();
        for row in &rows {
            got.extend(packer.push(Item::from_row(row)).expect("in order"));
        }
        got.extend(packer.finish());
        prop_assert_eq!(got, want);
    }

    /// Invariant 3: each changed sample costs at most one group and itself.
    #[test]
    fn a_change_stays_where_it_is(
        n in 1u64..300,
        changes in proptest::collection::vec((0u64..400, proptest::option::of(1u32..=4096)), 0..12),
    ) {
        let mut rng = Rng(n);
        let before: BTreeMap<u64, (u32, bool)> =
            (0..n).map(|i| (i, (1 + rng.below(4096) as u32, false))).collect();
        let mut after = before.clone();
        let mut allowed = BTreeMap::new();
        for (at, len) in changes {
            match len {
                Some(len) => after.insert(at, (len, true)),
                None => after.remove(&at),
            };
            allowed.insert(at, (6 << 10) + u64::from(len.unwrap_or(0).next_multiple_of(64)));
        }
        // Names identify entries, because ordinals move when entries are added or removed.
        let chunks = |tree: &BTreeMap<u64, (u32, bool)>| -> BTreeMap<Vec<(u64, u32, bool)>, u64> {
            let items = tree.iter().map(|(&i, v)| Item { key: key(i), ordinal: i, len: v.0 }).collect();
            let of = |p: &ChunkPlan| {
                p.members.iter().map(|m| (m.item.ordinal, m.offset, tree[&m.item.ordinal].1)).collect()
            };
            pack_all(&SMALL, items).iter().map(|p| (of(p), u64::from(p.len))).collect()
        };
        let old = chunks(&before);
        let written: u64 = chunks(&after).iter().filter(|(c, _)| !old.contains_key(*c)).map(|(_, n)| n).sum();
        prop_assert!(written <= allowed.values().sum::<u64>(), "{written} of {allowed:?}");
    }
}

#[test]
fn a_sample_shares_the_key_of_its_first_entry() {
    let h = Hash::of(b"");
    let keyed = |p: &str, size, k: &str| Entry { sample: Sample::Keyed(k.into()), ..Entry::file(p, size, h) };
    let member = |p: &str, k: &str| Entry { kind: EntryKind::Member, ..keyed(p, 9, k) };
    let entries = [
        keyed("a/1.cls", 2, "a/1"),
        Entry { sample: Sample::None, ..Entry::file("a/1.d/notes", 7, h) },
        keyed("a/1.empty", 0, "a/1"),
        keyed("a/1.jpg", 9, "a/1"),
        keyed("a/1.mp4", (4 << 20) + 1, "a/1"),
        keyed("a/1.txt", 4 << 20, "a/1"),
        keyed("a/2.mp4", 5 << 20, "a/2"),
        keyed("a/2.txt", 3, "a/2"),
        Entry { sample: Sample::None, ..Entry::file("a/README", 7, h) },
        Entry::file("b", 7, h),
        Entry::empty_dir("c"),
        Entry::symlink("d", "b"),
        Entry::file("s.tar", 9 << 20, h),
        member("s.tar\0x/1.cls", "x/1"),
        member("s.tar\0x/1.jpg", "x/1"),
        Entry { sample: Sample::None, ..Entry::file("t.tar", 9 << 20, h) },
        member("t.tar\0x/1.cls", "x/1"),
    ];
    let mut keyer = Keyer::new(&LayoutParams::PACK);
    let got: Vec<Placing> = entries.iter().map(|e| keyer.next(e.as_ref())).collect();
    let group = |ordinal, first: &str, len| Placing::Group(Item { key: GroupKey::of(first), ordinal, len });
    let want = [
        group(0, "a/1.cls", 2),
        group(1, "a/1.d/notes", 7),
        Placing::Nothing,
        group(3, "a/1.cls", 9),
        Placing::Slices,
        group(5, "a/1.cls", 4 << 20),
        Placing::Slices,
        group(7, "a/2.mp4", 3),
        group(8, "a/README", 7),
        group(9, "b", 7),
        Placing::Nothing,
        Placing::Nothing,
        Placing::Slices,
        group(13, "s.tar\0x/1.cls", 9),
        group(14, "s.tar\0x/1.cls", 9),
        Placing::Slices,
        group(16, "t.tar\0x/1.cls", 9),
    ];
    assert_eq!(got, want);
    assert_eq!(hex::encode(GroupKey::of("b").0), &Hash::of(b"b").to_string()[..32]);
}

#[test]
fn disorder_and_odd_lengths_are_rejected() {
    let item = |key: u8, ordinal, len| Item { key: GroupKey([key; 16]), ordinal, len };
    let mut p = Packer::new(&LayoutParams::PACK);
    let max = 4 << 20;
    assert_eq!(p.push(item(1, 0, 0)), Err(BadItem::Length { ordinal: 0, len: 0, max }));
    assert_eq!(p.push(item(1, 0, max + 1)), Err(BadItem::Length { ordinal: 0, len: max + 1, max }));
    assert_eq!(p.push(item(2, 5, 1)), Ok(vec![]));
    assert_eq!(p.push(item(2, 5, 1)), Err(BadItem::Order(5)));
    assert_eq!(p.push(item(2, 4, 1)), Err(BadItem::Order(4)));
    assert_eq!(p.push(item(1, 9, 1)), Err(BadItem::Order(9)));
    assert_eq!(p.push(item(3, 1, 1)), Ok(vec![]));
    assert_eq!(p.finish().len(), 1);
    assert_eq!(Packer::new(&LayoutParams::PACK).finish(), vec![]);
}

/// The largest groups, and a sample larger than the largest chunk, between others.
#[test]
fn the_largest_sample_is_cut_and_alone() {
    let params = LayoutParams {
        slice_bytes: CHUNK_BYTES_MAX,
        pack: Some(PackParams { group_bytes: CHUNK_BYTES_MAX, align: 512 }),
        ..LayoutParams::PACK
    };
    let mut items: Vec<Item> =
        (0..40).map(|i| Item { key: key(i), ordinal: i, len: 1 + 30_000 * i as u32 }).collect();
    let huge = key(7);
    // The nearest possible neighbour: it must not share a chunk with a piece of the sample.
    let near = u128::from_be_bytes(huge.0) - 1;
    items.push(Item { key: GroupKey(near.to_be_bytes()), ordinal: 500, len: 100 });
    items.extend((0..5).map(|i| Item { key: huge, ordinal: 1000 + i, len: (7 << 20) + 1 }));
    items.extend((0..2).map(|i| Item { key: huge, ordinal: 2000 + i, len: CHUNK_BYTES_MAX }));
    items.sort_unstable();
    let got = pack_all(&params, items.clone());
    got.iter().for_each(|p| check_chunk(&params, p));
    let mut want = Vec::new();
    documented_groups(&params, &items, 0, &mut want);
    let got: Vec<Vec<Item>> = got.iter().map(|p| p.members.iter().map(|m| m.item).collect()).collect();
    assert_eq!(got, want);
    let pieces = got.iter().filter(|g| g.iter().any(|i| i.key == huge));
    assert_eq!(pieces.map(Vec::len).collect::<Vec<_>>(), [3, 2, 1, 1, 1]);
}

/// Invariant 2: with paths sorted by class and sizes that differ by class, the classes of a chunk's members
/// are those of independent draws (χ² within 5 standard deviations). Chunks are as full as documented.
#[test]
fn chunk_mates_are_a_uniform_sample() {
    const CLASSES: usize = 16;
    let mut rng = Rng(20);
    let mut class_of = Vec::new();
    let mut items = Vec::new();
    for i in 0..32_000u64 {
        let class = i as usize * CLASSES / 32_000;
        class_of.push(class);
        let key = GroupKey::of(&format!("train/class{class:03}/{i:06}.jpg"));
        items.push(Item { key, ordinal: i, len: rng.length(60e3 + 5e3 * class as f64, 0.5) });
    }
    let total: u64 = items.iter().map(|i| u64::from(i.len)).sum();
    let plans = pack_all(&LayoutParams::PACK, items);
    let mut chi = 0.0;
    for p in &plans {
        let mut seen = [0.0; CLASSES];
        p.members.iter().for_each(|m| seen[class_of[m.item.ordinal as usize]] += 1.0);
        let expected = p.members.len() as f64 / CLASSES as f64;
        chi += seen.iter().map(|n| (n - expected) * (n - expected) / expected).sum::<f64>();
    }
    let df = ((plans.len() - 1) * (CLASSES - 1)) as f64;
    assert!((chi - df).abs() < 5.0 * (2.0 * df).sqrt(), "χ² {chi} at {df} degrees of freedom");
    let mean = total as f64 / plans.len() as f64 / f64::from(6 << 20);
    assert!((0.5..0.95).contains(&mean), "mean fill {mean}");
}

/// With 1 % of the files added, removed and changed, the bytes written are near the documented factor.
#[test]
fn one_percent_of_changes() {
    let mut rng = Rng(7);
    let before: BTreeMap<u64, (u32, u64)> = (0..20_000).map(|i| (i, (rng.length(98e3, 0.5), 0))).collect();
    let mut after = before.clone();
    let mut changed = 0u64;
    for at in 0..20_000u64 {
        if rng.below(100) > 0 {
            continue;
        }
        let old = u64::from(after[&at].0);
        match rng.below(3) {
            0 => {
                after.remove(&at);
                changed += old;
            }
            n => {
                let len = rng.length(98e3, 0.5);
                after.insert(if n == 1 { at } else { at + 100_000 }, (len, 1));
                changed += u64::from(len);
            }
        }
    }
    let chunks = |tree: &BTreeMap<u64, (u32, u64)>| -> BTreeMap<Vec<(u64, u64)>, u64> {
        let items = tree.iter().map(|(&i, v)| Item { key: key(i), ordinal: i, len: v.0 }).collect();
        let of =
            |p: &ChunkPlan| p.members.iter().map(|m| (m.item.ordinal, tree[&m.item.ordinal].1)).collect();
        pack_all(&LayoutParams::PACK, items).iter().map(|p| (of(p), u64::from(p.len))).collect()
    };
    let old = chunks(&before);
    let new = chunks(&after);
    let written: u64 = new.iter().filter(|(c, _)| !old.contains_key(*c)).map(|(_, n)| n).sum();
    let total: u64 = new.values().sum();
    let (factor, share) = (written as f64 / changed as f64, written as f64 / total as f64);
    assert!((15.0..58.0).contains(&factor), "factor {factor}");
    assert!(share < 0.45, "share {share}");
}
