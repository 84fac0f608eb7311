//! Packing with a parent: which chunks stay, which are regrouped, and that no entry is ever misplaced.

use super::{Rng, key, pack_all};
use crate::Hash;
use crate::manifest::layout::layout_id;
use crate::manifest::pack::{ChunkPlan, Fate, Item, KeepRule, Keeper, Packer, ParentLocation, Survey};
use crate::manifest::{Entry, LayoutParams, PartCutter, Placed, SampleRule, Slice, root};
use std::collections::{BTreeMap, BTreeSet};

/// A version: entry number → (sample, length, content).
type Tree = BTreeMap<u64, (u64, u32, u64)>;
/// A chunk: its members as (offset, length, content), dead or alive.
type Chunk = Vec<(u32, u32, u64)>;

/// A packed version, as a tool would hold it.
#[derive(Default, Clone)]
struct Packed {
    chunks: Vec<Chunk>,
    /// The chunk and offset of each entry.
    places: BTreeMap<u64, ParentLocation>,
    /// Bytes written that the parent did not have.
    written: u64,
    outside: usize,
    tree: Tree,
}

fn len_of(chunk: &Chunk) -> u32 {
    chunk.last().map_or(0, |m| m.0 + m.1)
}

fn items(tree: &Tree) -> Vec<Item> {
    tree.iter().map(|(&ordinal, v)| Item { key: key(v.0), ordinal, len: v.1 }).collect()
}

fn pack(rule: KeepRule, tree: &Tree, parent: &Packed) -> Packed {
    let params = LayoutParams::PACK;
    let plans = pack_all(&params, items(tree));
    let mut keeper = Keeper::new(rule, &params, parent.chunks.iter().map(len_of).collect());
    let same = |i: u64| parent.tree.get(&i).is_some_and(|old| (old.1, old.2) == (tree[&i].1, tree[&i].2));
    let place = |i: &Item| parent.places.get(&i.ordinal).copied().filter(|_| same(i.ordinal));
    let places =
        |p: &ChunkPlan| p.members.iter().map(|m| place(&m.item)).collect::<Vec<Option<ParentLocation>>>();
    for at in plans.iter().flat_map(&places).flatten() {
        assert!(keeper.found(at));
    }
    let surveys: Vec<Survey> = plans.iter().map(|p| keeper.survey(p, &places(p))).collect();
    let write = keeper.decide(&surveys);
    let mut out = Packed { tree: tree.clone(), ..Packed::default() };
    // Kept chunks by their number in the parent → their number here.
    let mut kept: BTreeMap<u32, u32> = BTreeMap::new();
    let mut rest = Packer::new(&params);
    let mut leftover = Vec::new();
    let mut expect_outside = 0;
    for ((plan, &write), survey) in plans.iter().zip(&write).zip(&surveys) {
        let fate = keeper.fate(plan, &places(plan), write);
        if let Fate::Keep { inside, outside } = &fate {
            for (item, at) in inside {
                let chunk = &parent.chunks[at.chunk as usize];
                assert!(
                    chunk.contains(&(at.offset, item.len, tree[&item.ordinal].2)),
                    "kept bytes are the entry's"
                );
                let next = out.chunks.len() as u32;
                let new = *kept.entry(at.chunk).or_insert(next);
                if new == next {
                    out.chunks.push(chunk.clone());
                }
                out.places.insert(item.ordinal, ParentLocation { chunk: new, offset: at.offset });
            }
            expect_outside += survey.outside as usize;
            for i in outside {
                leftover.extend(rest.push(*i).expect("the order of a pack"));
            }
        } else {
            place_plan(&mut out, plan, &fate, parent, tree);
        }
    }
    leftover.extend(rest.finish());
    let samples: BTreeSet<_> = leftover.iter().flat_map(|p| p.members.iter().map(|m| m.item.key)).collect();
    assert_eq!(samples.len(), expect_outside, "surveys count correctly");
    out.outside = samples.len();
    for plan in &leftover {
        let fate = keeper.fate(plan, &places(plan), true);
        place_plan(&mut out, plan, &fate, parent, tree);
    }
    out
}

fn place_plan(out: &mut Packed, plan: &ChunkPlan, fate: &Fate, parent: &Packed, tree: &Tree) {
    let chunk: Chunk = plan.members.iter().map(|m| (m.offset, m.item.len, tree[&m.item.ordinal].2)).collect();
    match fate {
        Fate::Same(old) => assert_eq!(parent.chunks[*old as usize], chunk, "the same bytes"),
        Fate::Write => out.written += u64::from(plan.len),
        Fate::Keep { .. } => panic!("a plan that is written is not kept"),
    }
    let number = out.chunks.len() as u32;
    for m in &plan.members {
        let at = ParentLocation { chunk: number, offset: m.offset };
        assert!(out.places.insert(m.item.ordinal, at).is_none(), "placed once");
    }
    out.chunks.push(chunk);
}

/// Checks all that holds for a packed version, whatever its parents were.
fn check(rule: KeepRule, v: &Packed) {
    let ours: Vec<u64> = v.tree.keys().copied().collect();
    assert_eq!(v.places.keys().copied().collect::<Vec<_>>(), ours, "every entry is placed");
    for (i, at) in &v.places {
        let (_, len, content) = v.tree[i];
        assert!(v.chunks[at.chunk as usize].contains(&(at.offset, len, content)));
    }
    let samples: BTreeSet<u64> = v.tree.values().map(|e| e.0).collect();
    assert!(v.outside as u64 <= samples.len() as u64 * u64::from(rule.outside_percent) / 100);
    // A sample is in one chunk.
    let mut chunk_of: BTreeMap<u64, u32> = BTreeMap::new();
    for (i, at) in &v.places {
        assert_eq!(*chunk_of.entry(v.tree[i].0).or_insert(at.chunk), at.chunk, "a sample stays whole");
    }
    // No chunk is mostly dead, and live samples of a chunk belong to one canonical group, except those
    // outside.
    let mut alive = vec![0u64; v.chunks.len()];
    for (i, at) in &v.places {
        alive[at.chunk as usize] += u64::from(v.tree[i].1.next_multiple_of(512));
    }
    for (chunk, alive) in v.chunks.iter().zip(&alive) {
        assert!(alive * 100 >= u64::from(len_of(chunk)) * u64::from(100 - rule.dead_percent));
    }
    let mut strangers = BTreeSet::new();
    let mut group_of: BTreeMap<u32, usize> = BTreeMap::new();
    for (n, plan) in pack_all(&LayoutParams::PACK, items(&v.tree)).iter().enumerate() {
        for m in &plan.members {
            let chunk = v.places[&m.item.ordinal].chunk;
            if *group_of.entry(chunk).or_insert(n) != n {
                strangers.insert(chunk);
            }
        }
    }
    let outside: BTreeSet<u64> =
        v.places.iter().filter(|(_, at)| strangers.contains(&at.chunk)).map(|(i, _)| v.tree[i].0).collect();
    assert!(
        outside.len() <= v.outside,
        "{} samples share a chunk with another group, {} are outside",
        outside.len(),
        v.outside
    );
}

/// Two files a sample, the second small.
fn sample(tree: &mut Tree, rng: &mut Rng, n: u64) {
    tree.insert(2 * n, (n, rng.length(98e3, 0.5), rng.next()));
    tree.insert(2 * n + 1, (n, 1 + rng.below(100) as u32, rng.next()));
}

fn change(tree: &mut Tree, rng: &mut Rng, per_mille: u64, next: &mut u64) -> u64 {
    let samples: Vec<u64> = tree.values().map(|e| e.0).collect::<BTreeSet<_>>().into_iter().collect();
    let mut changed = 0;
    for n in samples {
        if rng.below(1000) >= per_mille {
            continue;
        }
        changed += 1;
        match rng.below(4) {
            0 => {
                tree.remove(&(2 * n));
                tree.remove(&(2 * n + 1));
            }
            1 => {
                let content = rng.next();
                tree.insert(2 * n + 1, (n, 1 + rng.below(100) as u32, content));
            }
            2 => sample(tree, rng, n),
            _ => {
                sample(tree, rng, *next);
                *next += 1;
            }
        }
    }
    changed
}

fn tree_of(samples: u64, seed: u64) -> (Tree, Rng) {
    let (mut tree, mut rng) = (Tree::new(), Rng(seed));
    (0..samples).for_each(|n| sample(&mut tree, &mut rng, n));
    (tree, rng)
}

#[test]
fn an_unchanged_version_writes_nothing() {
    let (tree, _) = tree_of(2000, 1);
    let first = pack(KeepRule::DEFAULT, &tree, &Packed::default());
    check(KeepRule::DEFAULT, &first);
    assert_eq!(first.outside, 0);
    let again = pack(KeepRule::DEFAULT, &tree, &first);
    assert_eq!((again.written, again.outside), (0, 0));
    assert_eq!((again.chunks, again.places), (first.chunks, first.places));
}

/// Twelve versions, 1 % of samples changed each: the rule holds in all of them, and far fewer
/// bytes are written than by canonical packs.
#[test]
fn a_chain_of_versions_keeps_the_rule() {
    let (mut tree, mut rng) = tree_of(6000, 2);
    let mut next = 6000;
    let mut kept = pack(KeepRule::DEFAULT, &tree, &Packed::default());
    let mut canonical = kept.clone();
    let (mut with, mut without, mut most) = (0, 0, 0);
    let strict = KeepRule { outside_percent: 0, ..KeepRule::DEFAULT };
    for version in 0..12 {
        change(&mut tree, &mut rng, 10, &mut next);
        kept = pack(KeepRule::DEFAULT, &tree, &kept);
        check(KeepRule::DEFAULT, &kept);
        canonical = pack(strict, &tree, &canonical);
        let fresh = pack(strict, &tree, &Packed::default());
        assert_eq!(canonical.chunks, fresh.chunks, "with nothing outside it is canonical");
        most = most.max(kept.outside);
        if version > 5 {
            with += kept.written;
            without += canonical.written;
        }
    }
    assert!(most > 100, "the share is used: {most}");
    assert!(with * 10 < without * 7, "{with} bytes against {without}");
}

/// Half of the dataset is new: all groups that gain by it are regrouped at once.
#[test]
fn much_new_data_is_mixed_in() {
    let (mut tree, mut rng) = tree_of(2000, 3);
    let first = pack(KeepRule::DEFAULT, &tree, &Packed::default());
    (2000..4000).for_each(|n| sample(&mut tree, &mut rng, n));
    let second = pack(KeepRule::DEFAULT, &tree, &first);
    check(KeepRule::DEFAULT, &second);
    // After most entries are removed, chunks are mostly dead, so they do not stay.
    tree.retain(|_, e| e.0 % 5 == 0);
    let third = pack(KeepRule::DEFAULT, &tree, &second);
    check(KeepRule::DEFAULT, &third);
}

#[test]
fn groups_with_the_most_outside_go_first() {
    let keeper = Keeper::new(KeepRule::DEFAULT, &LayoutParams::PACK, vec![]);
    let s = |samples, outside, bytes| Survey { samples, outside, bytes };
    assert_eq!(keeper.decide(&[]), Vec::<bool>::new());
    assert_eq!(keeper.decide(&[s(50, 1, 100), s(50, 2, 100)]), [false, false], "3 of 100 is allowed");
    assert_eq!(keeper.decide(&[s(50, 2, 100), s(49, 2, 100)]), [true, false], "the earlier of equals");
    assert_eq!(keeper.decide(&[s(50, 2, 100), s(49, 2, 90)]), [false, true], "the cheaper");
    assert_eq!(keeper.decide(&[s(50, 1, 100), s(50, 3, 100)]), [false, true]);
    assert_eq!(keeper.decide(&[s(1, 1, 100), s(1000, 0, 100)]), [true, false], "nothing to keep");
}

/// A chunk with one live member of another group does not stay, however full it is of this group.
#[test]
fn a_chunk_stays_for_one_group_only() {
    let params = LayoutParams::PACK;
    let items: Vec<Item> = (0..20).map(|i| Item { key: key(i), ordinal: i, len: 512 }).collect();
    let plan = pack_all(&params, items).remove(0);
    let places: Vec<Option<ParentLocation>> =
        (0..20).map(|i| Some(ParentLocation { chunk: 0, offset: (20 - i) * 512 })).collect();
    let survey = |strangers: usize, parent_len: u32| {
        let mut keeper = Keeper::new(KeepRule::DEFAULT, &params, vec![parent_len]);
        let stranger = Some(ParentLocation { chunk: 0, offset: 0 });
        for at in places.iter().chain(std::iter::repeat_n(&stranger, strangers)).flatten() {
            assert!(keeper.found(*at));
        }
        assert!(!keeper.found(ParentLocation { chunk: 1, offset: 0 }), "no such chunk");
        keeper.survey(&plan, &places)
    };
    assert_eq!(survey(0, 21 * 512).outside, 0, "the stranger is dead");
    assert_eq!(survey(1, 21 * 512).outside, 20, "a live member is in another group");
    assert_eq!(survey(0, 23 * 512).outside, 20, "more than a tenth is dead");
}

/// Two files that became one sample do not stay in their chunks.
#[test]
fn a_torn_sample_is_outside() {
    let params = LayoutParams::PACK;
    let items = (0..2).map(|ordinal| Item { key: key(1), ordinal, len: 512 }).collect();
    let plan = pack_all(&params, items).remove(0);
    let places: Vec<Option<ParentLocation>> =
        (0..2).map(|chunk| Some(ParentLocation { chunk, offset: 0 })).collect();
    let mut keeper = Keeper::new(KeepRule::DEFAULT, &params, vec![512; 2]);
    places.iter().flatten().for_each(|at| assert!(keeper.found(*at)));
    assert_eq!(keeper.survey(&plan, &places), Survey { samples: 1, outside: 1, bytes: 1024 });
    assert_eq!(keeper.fate(&plan, &places, true), Fate::Write);
}

/// The parent affects the chunks, never the root: layouts with and without a parent have the same root.
#[test]
fn the_root_is_the_same_with_and_without_a_parent() {
    let (mut tree, mut rng) = tree_of(300, 4);
    let first = pack(KeepRule::DEFAULT, &tree, &Packed::default());
    sample(&mut tree, &mut rng, 300);
    let canonical = pack(KeepRule::DEFAULT, &tree, &Packed::default());
    let kept = pack(KeepRule::DEFAULT, &tree, &first);
    let ids = |v: &Packed| {
        let mut cutter = PartCutter::new();
        let mut placed = Placed::default();
        let mut parts = Vec::new();
        let name = |c: &Chunk| Hash::of(format!("{c:?}").as_bytes());
        for (i, &(_, len, content)) in &v.tree {
            let e = Entry::file(format!("{i:08}"), u64::from(len), Hash::of(&content.to_le_bytes()));
            parts.extend(cutter.push(e.as_ref()).expect("valid"));
            let at = v.places[i];
            let chunk = name(&v.chunks[at.chunk as usize]);
            placed.push([Slice { chunk, chunk_offset: at.offset, len }]);
        }
        parts.extend(cutter.finish());
        let root = root(&SampleRule::file(), &parts.iter().map(|p| p.hash).collect::<Vec<_>>());
        (root, layout_id(&LayoutParams::PACK, root, &[placed.hash()]))
    };
    let (with, without) = (ids(&kept), ids(&canonical));
    assert_eq!(with.0, without.0);
    assert_ne!(with.1, without.1);
    assert!(kept.outside == 1 && kept.written < canonical.written);
}
