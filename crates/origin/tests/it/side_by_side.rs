//! Long listings, whose folders are listed side by side, have the keys of the listing page by page.

use crate::{limits, names, origins, uri};
use bytes::Bytes;
use fletch_origin::Origin;
use fletch_testkit::{
    Backing, Delimiters, EmulatorConfig, Fault, KeyOrder, Latency, Manners, OriginEmulator, Paging,
};
use futures::TryStreamExt as _;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::time::Duration;

/// Returns an emulator with these keys and an origin there. Its pages have `page_keys` keys.
fn store(keys: &[String], manners: Manners) -> (OriginEmulator, Origin) {
    let objects: BTreeMap<String, Bytes> = keys.iter().map(|key| (key.clone(), Bytes::new())).collect();
    let first_byte = Some(Latency { median: Duration::from_millis(1), p99: Duration::from_millis(2) });
    let config = EmulatorConfig { manners, first_byte, ..EmulatorConfig::default() };
    let emulator = OriginEmulator::start(config, Backing::Memory(objects));
    let origin = origins(&emulator, limits(10_000)).open(&uri(&emulator.uri())).expect("open");
    (emulator, origin)
}

fn paged(page_keys: usize) -> Manners {
    Manners { page_keys: Some(page_keys), ..Manners::default() }
}

/// `folders` folders of `keys` keys each, below `top`.
fn tree(top: &str, folders: usize, keys: usize) -> Vec<String> {
    (0..folders).flat_map(|f| (0..keys).map(move |k| format!("{top}n{f:04}/{k:05}"))).collect()
}

/// Keys as buckets have them: files beside folders of the same name, markers, odd names, deep and flat parts.
fn random_keys(rng: &mut ChaCha8Rng) -> Vec<String> {
    let names = ["a", "b", "train", "train.csv", "x y", "ü", "a+b", "-", "~", "\u{10ffff}z", ".", ""];
    let mut keys = std::collections::BTreeSet::new();
    for _ in 0..rng.random_range(0..6) {
        let depth = rng.random_range(0..5);
        let parts = (0..depth).map(|_| names[rng.random_range(0..names.len())]);
        let dir: String = parts.map(|part| format!("{part}/")).collect();
        for k in 0..[1, 3, 20, 60][rng.random_range(0..4)] {
            keys.insert(format!("{dir}{k:03}"));
        }
        if rng.random_bool(0.3) && !dir.is_empty() {
            keys.insert(dir.clone());
        }
        if rng.random_bool(0.3) && !dir.is_empty() {
            keys.insert(dir.trim_end_matches('/').to_owned());
        }
    }
    keys.remove("");
    keys.into_iter().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_key_is_listed_once_whatever_the_store_is_like() {
    let mut rng = ChaCha8Rng::seed_from_u64(43);
    let orders =
        [KeyOrder::Bytes, KeyOrder::SlashFirst, KeyOrder::SlashLast, KeyOrder::Utf16, KeyOrder::Shuffled];
    let pagings = [
        Paging::Tokens,
        Paging::NoToken,
        Paging::RepeatLastKey,
        Paging::TokenAtEnd,
        Paging::Markers { next_marker: true },
    ];
    let delimiters = [
        Delimiters::Known,
        Delimiters::Known,
        Delimiters::Ignored,
        Delimiters::Refused,
        Delimiters::PrefixesRefused,
    ];
    let (mut split, mut trees) = (0, 0);
    for round in 0..80 {
        let keys = random_keys(&mut rng);
        let manners = Manners {
            order: orders[rng.random_range(0..orders.len())],
            paging: pagings[rng.random_range(0..pagings.len())],
            delimiters: delimiters[rng.random_range(0..delimiters.len())],
            page_keys: Some(rng.random_range(2..7)),
            ..Manners::default()
        };
        // Such a store goes on after a key, which is greater in the order of bytes alone.
        let goes_by_key = matches!(manners.paging, Paging::NoToken | Paging::Markers { .. });
        if goes_by_key && manners.order != KeyOrder::Bytes {
            continue;
        }
        let (emulator, origin) = store(&keys, manners.clone());
        let listed: Result<Vec<String>, _> = origin.list("").map_ok(|o| o.path).try_collect().await;
        let listed = listed.unwrap_or_else(|e| panic!("round {round}: {manners:?}: {e}"));
        let mut sorted = listed.clone();
        sorted.sort();
        assert_eq!(sorted, keys, "round {round}: {manners:?}");
        if manners.order == KeyOrder::Bytes {
            assert_eq!(listed, keys, "round {round}: {manners:?}");
        }
        split += usize::from(emulator.counts().lists_at_once > 1);
        trees += 1;
    }
    assert!(split * 10 > trees, "{split} of {trees} listings had pages side by side");
}

#[tokio::test(flavor = "multi_thread")]
async fn large_folders_are_listed_side_by_side_for_at_most_twice_the_requests() {
    for (top, folders, keys) in [("", 40, 10), ("set/train/", 40, 10), ("", 12, 45)] {
        let keys = tree(top, folders, keys);
        let (emulator, origin) = store(&keys, paged(10));
        assert_eq!(names(&origin, "").await, keys);
        let counts = emulator.counts();
        assert!(counts.lists_at_once >= 8, "{top} {folders}: {} pages at once", counts.lists_at_once);
        let alone = keys.len() as u64 / 10;
        assert!(counts.list <= 2 * alone + 20, "{top} {folders}: {} pages, {alone} in order", counts.list);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn small_folders_and_flat_ones_are_listed_page_by_page() {
    // The first pages lie in one folder, and all others are small.
    let mixed: Vec<String> = [tree("_raw/", 1, 40), tree("", 200, 2)].concat();
    let (emulator, origin) = store(&mixed, paged(10));
    assert_eq!(names(&origin, "").await, mixed);
    let requests = emulator.counts().list;
    assert!(requests <= 44 + 20, "{requests} requests for 44 pages");
    let flat: Vec<String> = (0..300).map(|i| format!("{i:05}")).collect();
    for (keys, requests) in [(tree("", 150, 2), 30), (flat, 31), (tree("", 2, 10), 2)] {
        let (emulator, origin) = store(&keys, paged(10));
        assert_eq!(names(&origin, "").await, keys);
        let counts = emulator.counts();
        assert_eq!((counts.list, counts.lists_at_once), (requests, 1), "{}", keys[0]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_folder_is_an_error_and_the_end_of_the_listing() {
    let keys = tree("", 30, 25);
    let (emulator, origin) = store(&keys, paged(10));
    emulator.set_fault("n0020/", Fault::Error { rate: 1.0, status: 403 }, None);
    let mut listing = origin.list("");
    let mut listed = Vec::new();
    let error = loop {
        match listing.try_next().await {
            Ok(Some(object)) => listed.push(object.path),
            Ok(None) => panic!("the listing ended as if it were whole, after {} keys", listed.len()),
            Err(error) => break error,
        }
    };
    assert_eq!(listed, keys[..listed.len()], "in order, up to the error: {error}");
    assert!(listed.len() <= 20 * 25);
    assert!(listing.try_next().await.expect("an end").is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_that_is_dropped_asks_for_nothing_more() {
    let keys = tree("", 60, 40);
    let (emulator, origin) = store(&keys, paged(10));
    let first: Vec<_> = futures::StreamExt::take(origin.list(""), 100).try_collect().await.expect("keys");
    assert_eq!(first.len(), 100);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let after = emulator.counts().list;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(emulator.counts().list, after);
    assert!(after < 60, "{after} pages");
}
