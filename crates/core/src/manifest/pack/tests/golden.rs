//! The golden files `tests/golden/pack`, made by another program from `docs/FORMATS-pack.md` alone.

use super::pack_all;
use crate::manifest::layout::layout_id;
use crate::manifest::pack::{Keyer, Placing};
use crate::manifest::{Entry, EntryKind, LayoutKind, LayoutParams, PackParams, Sample};
use crate::{Hash, Root};

const ENTRIES: &str = include_str!("../../../../../../tests/golden/pack/entries.tsv");
const CHUNKS: &str = include_str!("../../../../../../tests/golden/pack/chunks.tsv");
const LAYOUT_IDS: &str = include_str!("../../../../../../tests/golden/pack/layout-ids.json");

fn entry(line: &str) -> Entry {
    let f: Vec<&str> = line.split('\t').collect();
    let sample = match f[3] {
        "alone" => Sample::Single,
        "none" => Sample::None,
        key => Sample::Keyed(key.into()),
    };
    let kind = EntryKind::from_word(f[1]).expect("kind");
    let size = f[2].parse().expect("size");
    Entry { kind, size, sample, ..Entry::file(f[0].replace('|', "\0"), size, Hash::of(b"")) }
}

#[test]
fn grouping_is_the_documented_one() {
    let mut keyer = Keyer::new(&LayoutParams::PACK);
    let mut items = Vec::new();
    let mut sliced = 0;
    for line in ENTRIES.lines() {
        match keyer.next(entry(line).as_ref()) {
            Placing::Group(item) => items.push(item),
            Placing::Slices => sliced += 1,
            Placing::Nothing => {}
        }
    }
    assert!(sliced > 5, "the golden tree has large files");
    let mut got = String::new();
    for (n, plan) in pack_all(&LayoutParams::PACK, items).iter().enumerate() {
        for m in &plan.members {
            let key = hex::encode(m.item.key.0);
            got += &format!("{n}\t{}\t{}\t{}\t{key}\n", m.offset, m.item.len, m.item.ordinal);
        }
    }
    assert_eq!(got, CHUNKS);
}

#[test]
fn layout_ids_are_the_documented_ones() {
    let golden: serde_json::Value = serde_json::from_str(LAYOUT_IDS).expect("json");
    let hash = |v: &serde_json::Value| v.as_str().expect("text").parse::<Hash>().expect("hash");
    let root = Root(hash(&golden["root"]));
    let parts: Vec<Hash> = golden["parts"].as_array().expect("list").iter().map(hash).collect();
    let other = PackParams { group_bytes: 4 << 20, align: 4096 };
    for (name, params, parts) in [
        ("index", LayoutParams::INDEX, &parts[..]),
        ("index_without_parts", LayoutParams::INDEX, &[]),
        ("index_slice_1_mib", LayoutParams { slice_bytes: 1 << 20, ..LayoutParams::INDEX }, &parts),
        ("pack", LayoutParams::PACK, &parts),
        ("pack_without_parts", LayoutParams::PACK, &[]),
        ("pack_group_4_mib_align_4096", LayoutParams { pack: Some(other), ..LayoutParams::PACK }, &parts),
    ] {
        assert_eq!(params.check(), Ok(()), "{name}");
        assert_eq!(layout_id(&params, root, parts).0, hash(&golden[name]), "{name}");
    }
}

/// An index's parameters have the same JSON as before packs existed.
#[test]
fn parameters_in_json() {
    let index = r#"{"kind":"index","slice_bytes":4194304}"#;
    let pack = r#"{"kind":"pack","slice_bytes":4194304,"pack":{"group_bytes":6291456,"align":512}}"#;
    for (params, text) in [(LayoutParams::INDEX, index), (LayoutParams::PACK, pack)] {
        assert_eq!(serde_json::to_string(&params).expect("json"), text);
        assert_eq!(serde_json::from_str::<LayoutParams>(text).expect("params"), params);
    }
}

#[test]
fn parameters_outside_the_limits_are_rejected() {
    let pack = |group_bytes, align| LayoutParams {
        pack: Some(PackParams { group_bytes, align }),
        ..LayoutParams::PACK
    };
    for bad in [
        LayoutParams { slice_bytes: 0, ..LayoutParams::PACK },
        LayoutParams { slice_bytes: (16 << 20) + 1, ..LayoutParams::INDEX },
        LayoutParams { pack: None, ..LayoutParams::PACK },
        LayoutParams { kind: LayoutKind::Index, ..LayoutParams::PACK },
        pack(6 << 20, 0),
        pack(6 << 20, 1000),
        pack(6 << 20, 128 << 10),
        pack(256, 512),
        pack((16 << 20) + 1, 512),
    ] {
        assert!(bad.check().is_err(), "{bad:?}");
    }
    assert_eq!(pack(16 << 20, 1).check(), Ok(()));
}
