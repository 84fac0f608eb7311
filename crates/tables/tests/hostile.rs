//! Corrupt tables: a call returns an error or the written rows, never a panic and never other rows.

mod support;

use fletch_core::manifest::{Entry, LayoutParams, Sample};
use fletch_core::{Hash, Kind};
use fletch_tables::{LayoutDoc, Manifest, PartCache, Table, TableError, TagDoc, Version};
use proptest::prelude::*;
use std::sync::{Arc, LazyLock};
use support::{Files, Made, make, read_all, runtime};

fn entries() -> Vec<Entry> {
    let mut all: Vec<Entry> = (0..9_000u64)
        .map(|i| {
            let path = format!("d{:02}/{i:06}.jpg", i / 500);
            Entry::file(path.clone(), i * 1000, Hash::of(path.as_bytes()))
        })
        .collect();
    all.push(Entry::empty_dir("e"));
    all.push(Entry::symlink("l", "d00"));
    all.push(Entry { sample: Sample::Keyed("k".into()), ..Entry::file("k.jpg", 9, Hash::of(b"k")) });
    all.sort_by(|a, b| a.path.cmp(&b.path));
    all
}

static MADE: LazyLock<Made> = LazyLock::new(|| make(&entries()));

/// Reads every row. Rows that a hash covers must be the written ones; chunk rows must keep the limits.
async fn read(files: Files) -> Result<(), TableError> {
    let v = MADE.open_with(Arc::new(files), PartCache::new(64 << 20)).await?;
    let got = read_all(&v).await?;
    let want: Vec<_> =
        entries().iter().map(|e| (e.clone(), support::slices(e, LayoutParams::INDEX))).collect();
    assert!(got == want, "a lie was believed");
    for part in 0..v.index().parts().len() {
        for row in v.chunk_rows(part).await?.iter() {
            assert!(row.len > 0 && row.offset + u64::from(row.len) <= row.pin.size);
        }
    }
    v.chunk_index().await.map(|_| ())
}

fn tables() -> impl Strategy<Value = Table> {
    proptest::sample::select(Table::ALL.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn flipped_bytes_are_noticed_or_harmless(
        table in tables(),
        flips in proptest::collection::vec((any::<prop::sample::Index>(), 1u8..=255), 1..4),
        near_end: bool,
    ) {
        let mut bytes = MADE.files.files[&table].to_vec();
        // Half of the cases hit the footer or the last document lines.
        let from = if near_end { bytes.len().saturating_sub(3000) } else { 0 };
        for (at, mask) in flips {
            let at = from + at.index(bytes.len() - from);
            bytes[at] ^= mask;
        }
        if let Err(e) = runtime().block_on(read(MADE.files.with(table, bytes))) {
            prop_assert!(!matches!(e, TableError::Internal(_)), "{}", e);
        }
    }

    #[test]
    fn cut_files_are_noticed(table in tables(), at: prop::sample::Index) {
        let bytes = &MADE.files.files[&table];
        // The last byte of a document is a line end, which may be missing.
        let cut = bytes.slice(..at.index(bytes.len() - 1));
        prop_assert!(runtime().block_on(read(MADE.files.with(table, cut))).is_err());
    }

    #[test]
    fn garbage_is_refused(
        table in tables(),
        garbage in proptest::collection::vec(any::<u8>(), 0..2000),
        tail: bool,
    ) {
        let mut garbage = garbage;
        if tail {
            let n = garbage.len() as u32;
            garbage.extend_from_slice(&n.to_le_bytes());
            garbage.extend_from_slice(b"PAR1");
        }
        prop_assert!(runtime().block_on(read(MADE.files.with(table, garbage))).is_err());
    }

    /// A wrong first path of a part in the manifest hides no entry, and invents none.
    #[test]
    fn a_lie_about_first_paths_hides_nothing(
        part in 0usize..3,
        to in "[a-z0-9/]{0,12}",
        look in 0usize..9003,
    ) {
        let mut m = Manifest::parse(&MADE.files.files[&Table::Manifest], MADE.written.root).expect("good");
        let n = m.parts.len();
        prop_assert!(n >= 2);
        m.parts[part % n].first = to;
        let files = MADE.files.with(Table::Manifest, m.to_bytes().expect("good"));
        runtime().block_on(async {
            let Ok(v) = MADE.open_with(Arc::new(files), PartCache::new(64 << 20)).await else { return };
            let path = &entries()[look].path;
            if let Ok(found) = v.find(path).await {
                assert_eq!(found.map(|f| f.ordinal), Some(look as u64));
            }
            if let Ok(none) = v.find(&format!("{path}~")).await {
                assert!(none.is_none());
            }
            if let Ok(at) = v.lower_bound(path.as_bytes()).await {
                assert_eq!(at, look as u64);
            }
        });
    }
}

fn refused(table: Table, bytes: Vec<u8>) -> TableError {
    runtime().block_on(read(MADE.files.with(table, bytes))).expect_err("a lie")
}

fn json(table: Table, edit: impl Fn(&mut serde_json::Value)) -> Vec<u8> {
    let mut doc = serde_json::from_slice(&MADE.files.files[&table]).expect("a document");
    edit(&mut doc);
    serde_json::to_vec(&doc).expect("a document")
}

#[test]
fn newer_majors_are_named_and_newer_fields_skipped() {
    for table in [Table::Manifest, Table::Layout] {
        let newer = json(table, |d| {
            d["major"] = 2.into();
            d["parts"] = "of another shape".into();
        });
        let e = refused(table, newer);
        assert!(matches!(e, TableError::Newer { major: 2, known: 1, .. }), "{e}");
        assert!(e.to_string().contains("use a newer build"));
        let minor = json(table, |d| {
            d["minor"] = 7.into();
            d["something"] = serde_json::json!({"new": [1, 2]});
        });
        assert_eq!(runtime().block_on(read(MADE.files.with(table, minor))), Ok(()));
        assert!(matches!(
            refused(table, json(table, |d| d["format"] = "other".into())),
            TableError::Damaged { .. }
        ));
    }
    for table in [Table::Entries, Table::Placement, Table::Chunks] {
        let mut bytes = MADE.files.files[&table].to_vec();
        let key = b"fletch.major";
        let at = bytes.windows(key.len()).position(|w| w == key).expect("the key") + key.len();
        // Thrift: field 2, binary, one byte.
        assert_eq!(&bytes[at..at + 3], b"\x18\x011");
        bytes[at + 2] = b'9';
        let e = refused(table, bytes);
        assert!(matches!(e, TableError::Newer { major: 9, known: 1, .. }), "{e}");
    }
    let tag = TagDoc::new(MADE.written.root, MADE.written.layout, 5);
    assert_eq!(TagDoc::parse(&tag.to_bytes().expect("good")), Ok(tag.clone()));
    let newer = TagDoc { major: 3, ..tag }.to_bytes().expect("good");
    assert!(matches!(TagDoc::parse(&newer), Err(TableError::Newer { table: "tag", major: 3, .. })));
}

#[test]
fn another_versions_tables_are_refused() {
    let mut swapped = entries();
    let (a, b) = (swapped[3].hash, swapped[4].hash);
    (swapped[3].hash, swapped[4].hash) = (b, a);
    let other = make(&swapped);
    assert_ne!(other.written.root, MADE.written.root);
    for table in [Table::Manifest, Table::Entries, Table::Layout, Table::Placement] {
        let e = refused(table, other.files.files[&table].to_vec());
        assert_eq!(e.kind(), Kind::Corrupt, "{table}: {e}");
    }
    // Two rows swapped in a layout of the same entries: the layout id notices.
    let e = runtime()
        .block_on(Version::open(
            other.files.clone(),
            other.written.root,
            MADE.written.layout,
            PartCache::new(1 << 20),
        ))
        .expect_err("another layout");
    assert!(matches!(e, TableError::Layout { .. }));
}

#[test]
fn documents_that_contradict_themselves_are_refused() {
    let edits: [fn(&mut serde_json::Value); 5] = [
        |d| d["entries"] = 9004.into(),
        |d| d["parts"][0]["entries"] = 0.into(),
        |d| d["parts"][0]["entries"] = 65_537.into(),
        |d| d["parts"].as_array_mut().expect("parts").swap(0, 1),
        |d| d["created"] = "yesterday".into(),
    ];
    for edit in edits {
        assert_eq!(refused(Table::Manifest, json(Table::Manifest, edit)).kind(), Kind::Corrupt);
    }
    // Counts that agree with each other and not with the table.
    let moved = json(Table::Manifest, |d| {
        for (part, by) in [(0, 1i64), (1, -1)] {
            let n = d["parts"][part]["entries"].as_i64().expect("a count");
            d["parts"][part]["entries"] = (n + by).into();
        }
    });
    assert_eq!(refused(Table::Manifest, moved).kind(), Kind::Corrupt);
    let slices = json(Table::Layout, |d| d["params"]["slice_bytes"] = 0.into());
    assert_eq!(refused(Table::Layout, slices).kind(), Kind::Corrupt);
    let chunks = json(Table::Layout, |d| d["chunks"] = 1.into());
    assert_eq!(refused(Table::Layout, chunks).kind(), Kind::Corrupt);
    assert!(LayoutDoc::parse_any(b"{}").is_err());
}
