//! Listings that are cut off, that never end, or that have another order: whole, or an error.

use crate::bucket::Bucket;
use crate::form::{Form, check, objects};
use fletch_testkit::{Described, KeyOrder, Manners, Paging, TimeForm};
use serde_json::Value;

/// The keys of a listing of three pages, in byte order.
fn keys() -> Vec<String> {
    (0..25).map(|i| format!("d{}/f{i:02}", i / 9)).collect()
}

fn paged(paging: Paging) -> Manners {
    Manners { paging, page_keys: Some(10), ..Manners::default() }
}

#[test]
fn pages_and_how_they_go_on() {
    let keys = keys();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let whole = |name, paging| Form::entries(name, &keys, &keys).with(paged(paging));
    let endless = |name, paging| Form::error(name, &keys, &["s3://bucket/set", "no end"]).with(paged(paging));
    check(&[
        whole("tokens", Paging::Tokens),
        whole("truncated without a token", Paging::NoToken).mounted(),
        whole("the first version with NextMarker", Paging::Markers { next_marker: true }),
        whole("the first version with IsTruncated alone", Paging::Markers { next_marker: false }).mounted(),
        whole("a token on the last page", Paging::TokenAtEnd),
        whole("pages without keys in between", Paging::EmptyPages(3)),
        whole("an empty token element on the last page", Paging::EmptyTokenElement),
        whole("pages that repeat the last key", Paging::RepeatLastKey),
        Form::entries("one key in a page", &keys[..6], &keys[..6])
            .with(Manners { page_keys: Some(1), ..Manners::default() }),
        Form::entries("markers at the end of a page", &["a/()", "a.b", "a/b", "c/()"], &["a.b", "a/b", "c/"])
            .with(Manners { page_keys: Some(1), ..paged(Paging::NoToken) }),
        endless("pages without keys and without end", Paging::EndlessEmptyPages),
        endless("the same page again and again", Paging::SamePage),
    ]);
}

#[test]
fn orders_of_keys() {
    let names = ["train/()", "train.csv", "train/1", "train/2/x", "void/()", "\u{1f600}", "\u{ff01}"];
    let shown = ["train.csv", "train/1", "train/2/x", "void/", "\u{1f600}", "\u{ff01}"];
    let order = |name, order| {
        let manners = Manners { order, page_keys: Some(2), ..Manners::default() };
        Form::entries(name, &names, &shown).with(manners)
    };
    check(&[
        order("no order (directory buckets)", KeyOrder::Shuffled).mounted(),
        order("the slash first (hierarchical namespaces)", KeyOrder::SlashFirst),
        order("the slash last", KeyOrder::SlashLast),
        order("UTF-16 code units", KeyOrder::Utf16),
    ]);
}

#[test]
fn a_version_does_not_depend_on_the_order_of_the_listing() {
    let keys = keys();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let bucket = Bucket::new(&Manners::default(), &objects(&keys));
    let roots: Vec<Value> = [KeyOrder::Bytes, KeyOrder::Shuffled, KeyOrder::SlashLast]
        .into_iter()
        .map(|order| {
            bucket.origin.set_manners(Manners { order, page_keys: Some(4), ..Manners::default() });
            let said = bucket.read("index", &format!("{order:?}"), &[]).ok();
            serde_json::from_str::<Value>(&said.stdout).expect("JSON")["root"].clone()
        })
        .collect();
    assert!(roots.iter().all(|root| *root == roots[0] && root.is_string()), "{roots:?}");
}

#[test]
fn a_refresh_does_not_move_the_tag_to_a_listing_that_was_cut_off() {
    let keys = keys();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let bucket = Bucket::new(&Manners::default(), &objects(&keys));
    bucket.read("index", "tables", &[]).ok();
    for paging in [Paging::NoToken, Paging::Markers { next_marker: false }, Paging::SamePage] {
        bucket.origin.set_manners(paged(paging));
        let said = bucket.read("index", "tables", &["--parent", "auto"]);
        assert!(said.code != 3, "{paging:?}: {said:?}");
        assert_eq!(bucket.entries("tables").expect("a tag").len(), keys.len(), "{paging:?}: {said:?}");
    }
}

#[test]
fn times_in_listings_and_answers() {
    let form = |name, listed, answered| {
        let described = |time| Described { time, ..Described::default() };
        let manners =
            Manners { listed: described(listed), answered: described(answered), ..Manners::default() };
        Form::entries(name, &["a", "b/c", "e()"], &["a", "b/c", "e"]).with(manners).verified()
    };
    let usual = TimeForm::Usual;
    check(&[
        form("listed times without a fraction", TimeForm::Seconds, usual),
        form("listed times with an offset", TimeForm::Offset, usual),
        form("listed times with a space", TimeForm::Space, usual),
        form("listed times of RFC 1123", TimeForm::Rfc1123, usual).mounted(),
        form("listed times in seconds", TimeForm::Epoch, usual),
        form("no listed times", TimeForm::Absent, usual).mounted(),
        form("answers without a time", usual, TimeForm::Absent).mounted(),
        form("answers with a time of RFC 3339", usual, TimeForm::Seconds),
        form("answers with a time in seconds", usual, TimeForm::Epoch),
        form("no times anywhere", TimeForm::Absent, TimeForm::Absent),
    ]);
}
