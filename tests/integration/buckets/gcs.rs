//! Google Cloud Storage: tables and packs are written there, and compressed objects are read as stored.
//!
//! The emulator speaks the XML API as the client library uses it, with generations as conditions.

use crate::bucket::{Bucket, faults};
use fletch_testkit::{Api, Manners};
use fletch_tests::require::{Need, have};
use serde_json::Value;
use std::collections::BTreeMap;

fn gcs(objects: &[(String, Vec<u8>)]) -> Bucket {
    Bucket::new(&Manners { api: Api::Gcs, ..Manners::default() }, objects)
}

/// A dataset of small files and of one that is uploaded and read in parts.
fn dataset() -> Vec<(String, Vec<u8>)> {
    let bytes = |seed: u64, len: usize| {
        let mut out = vec![0; len];
        blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
        out
    };
    let small = (0..60u64).map(|i| (format!("d{}/f{i:02}", i % 3), bytes(i, 40_000 + i as usize)));
    small.chain([("large.bin".to_owned(), bytes(99, 9_000_000))]).collect()
}

#[test]
fn tables_and_packs_are_written_to_gcs() {
    let objects = dataset();
    let bucket = gcs(&objects);
    let run = |words: &[&str]| -> Value {
        let said = bucket.user.say(&[words, &["--json"]].concat()).ok();
        serde_json::from_str(&said.stdout).unwrap_or_else(|e| panic!("{e}: {said:?}"))
    };
    let root = run(&["index", "gs://bucket/set", "--tables", "gs://bucket/set"])["root"].clone();
    run(&["verify", "gs://bucket/set"]);
    let packed = run(&["pack", "gs://bucket/set", "--tables", "gs://bucket/packs"]);
    assert_eq!(packed["root"], root, "{packed}");
    assert!(packed["chunks_written"].as_u64().is_some_and(|n| n > 0), "{packed}");
    run(&["verify", "gs://bucket/packs"]);

    // The tag of each is replaced, and what is unchanged is not read again.
    bucket.origin.insert("set/new", "new");
    bucket.origin.reset_counts();
    let again = run(&["index", "gs://bucket/set", "--tables", "gs://bucket/set", "--parent", "auto"]);
    assert!(again["root"] != root && again["bytes_read"] == 3, "{again}");
    let repacked = run(&["pack", "gs://bucket/set", "--tables", "gs://bucket/packs", "--parent", "auto"]);
    assert_eq!(repacked["root"], again["root"]);
    let counts = bucket.origin.counts();
    assert!(counts.put > 0 && counts.gets.keys().all(|key| key != "set/large.bin"), "{counts:?}");
    let held = |key: &str| bucket.origin.object(key).is_some();
    assert!(held("set/fletch/tags/latest") && held("packs/fletch/tags/latest"), "{counts:?}");
    assert!(counts.gets.keys().all(|key| !key.contains("probe")), "the store honours conditions: {counts:?}");

    if !have(&[Need::Fuse]) {
        return;
    }
    bucket.user.mount("gs://bucket/set", "mnt", &["--pack", "gs://bucket/mounted"]);
    let mut all: BTreeMap<String, Vec<u8>> = objects.into_iter().collect();
    all.insert("new".to_owned(), b"new".to_vec());
    assert!(bucket.mounted("mnt") == all, "{:?}", bucket.mounted("mnt").keys());
}

#[test]
fn objects_that_gcs_would_decompress_are_read_as_stored_or_named() {
    let bucket = gcs(&[("plain".to_owned(), b"plain".to_vec())]);
    bucket.origin.insert_compressed("set/log.gz", vec![0x1f, 0x8b, 8, 0, 7, 7, 7], "a longer text");
    let said = bucket.read("index", "tables", &["--keep-going"]);
    if said.code == 0 {
        assert_eq!(bucket.entries("tables").as_deref(), Ok(&["log.gz".to_owned(), "plain".to_owned()][..]));
        bucket.user.say(&["verify", &bucket.user.text("tables")]).ok();
    } else {
        let paths: Vec<String> = faults(&said).into_iter().map(|(path, _)| path).collect();
        assert_eq!((said.code, paths), (1, vec!["log.gz".to_owned()]), "{said:?}");
    }
}
