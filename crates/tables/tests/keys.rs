//! Flat listings by prefix agree with a model of an object store, whatever the caches hold.

mod support;

use fletch_core::Hash;
use fletch_core::manifest::{Entry, EntryKind, Sample, parts::ends_part};
use fletch_tables::{Key, KeyItem, KeyRange, PartCache, Version, successor};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::LazyLock;
use support::{make, runtime};

fn file(path: &str) -> Entry {
    Entry::file(path, 1 + path.len() as u64, Hash::of(path.as_bytes()))
}

fn member(shard: &str, name: &str) -> Entry {
    Entry { path: format!("{shard}\0{name}"), kind: EntryKind::Member, sample: Sample::None, ..file(name) }
}

/// A tree with everything that a listing treats in its own way.
static TREE: LazyLock<Vec<Entry>> = LazyLock::new(tree);

fn tree() -> Vec<Entry> {
    let mut all = vec![
        file("a-b/c"),
        file("a/1"),
        file("a/2"),
        file("a/b/c/deep"),
        Entry::symlink("a/up", "../z"),
        Entry::symlink("a/over", "up"),
        Entry::symlink("dangling", "nowhere"),
        Entry::symlink("in-dir/away", "/etc/passwd"),
        Entry::symlink("in-dir/out", "../../z"),
        Entry::symlink("links/only", "../nowhere/1"),
        Entry::symlink("loop", "loop"),
        Entry::symlink("to-dir", "a"),
        Entry::symlink("through", "to-dir/./b/../2"),
        Entry::symlink("slash", "z/"),
        file("odd \n é+%&<>\"'"),
        file("s.tar"),
        member("s.tar", "0.jpg"),
        member("s.tar", "1.jpg"),
        file("s.tar.txt"),
        Entry::empty_dir("void"),
        Entry::empty_dir("w/void"),
        file("z"),
        file("ÿ\u{10ffff}"),
    ];
    // Paths after which a part of the tables ends, so that a listing crosses parts.
    for dir in ["", "a/", "a/b/", "in-dir/", "w/"] {
        let ends = (0u32..).map(|i| format!("{dir}p{i}")).filter(|path| ends_part(path));
        all.extend(ends.take(2).map(|path| file(&path)));
    }
    all.sort_by(|a, b| a.path.cmp(&b.path));
    all
}

/// The keys of [`tree`], each with the path of the file that has its bytes.
fn keys() -> Vec<(String, Option<String>)> {
    let links = [("a/up", "z"), ("a/over", "z"), ("through", "a/2")];
    let mut keys = Vec::new();
    for entry in TREE.iter() {
        let own = entry.path.clone();
        match entry.kind {
            EntryKind::File => keys.push((own.clone(), Some(own))),
            EntryKind::EmptyDir => keys.push((own, None)),
            EntryKind::Symlink => {
                let to = links.iter().find(|(link, _)| *link == own);
                keys.extend(to.map(|(link, to)| ((*link).to_owned(), Some((*to).to_owned()))));
            }
            EntryKind::Member => {}
        }
    }
    keys
}

/// An item as text: a key, with the file that it leads to, or a common prefix.
fn shown(item: &KeyItem) -> (String, Option<String>) {
    match item {
        KeyItem::Prefix(prefix) => (prefix.clone(), Some("common prefix".to_owned())),
        KeyItem::Key(Key { path, file }) => {
            (path.clone(), file.as_ref().map(|file| file.entry().path.to_owned()))
        }
    }
}

/// What an object store with [`keys`] lists from `from` on.
fn model(prefix: &str, delimiter: Option<&str>, from: &[u8]) -> Vec<(String, Option<String>)> {
    let (mut out, mut rolled) = (Vec::new(), BTreeSet::new());
    for (key, file) in keys() {
        if !key.starts_with(prefix) || key.as_bytes() < from {
            continue;
        }
        let end = delimiter.and_then(|d| Some(prefix.len() + key[prefix.len()..].find(d)? + d.len()));
        match end {
            None => out.push((key, file)),
            Some(end) if rolled.insert(key[..end].to_owned()) => {
                out.push((key[..end].to_owned(), Some("common prefix".to_owned())));
            }
            Some(_) => {}
        }
    }
    out
}

async fn listed(v: &Version, range: KeyRange<'_>, page: usize) -> Vec<(String, Option<String>)> {
    let (mut out, mut from) = (Vec::new(), range.from.to_vec());
    loop {
        let items = v.keys(KeyRange { from: &from, ..range }, page).await.expect("a good version");
        assert!(items.len() <= page);
        out.extend(items.iter().map(shown));
        match items.last().and_then(KeyItem::next) {
            Some(next) => from = next,
            None => return out,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(80))]

    #[test]
    fn a_listing_is_that_of_an_object_store(
        prefix in prop_oneof![
            Just(""), Just("a"), Just("a/"), Just("a/b/"), Just("a-"), Just("s"), Just("s.tar"), Just("v"),
            Just("void/"), Just("w/"), Just("in-dir/"), Just("links"), Just("o"), Just("zz"), Just("ÿ"),
            Just("s.tar\0"),
        ],
        delimiter in prop_oneof![
            Just(None), Just(Some("/")), Just(Some("a")), Just(Some("b/c")), Just(Some(".")), Just(Some("é"))
        ],
        from in prop_oneof![
            Just(&b""[..]), Just(&b"a/2"[..]), Just(&b"a/2\0"[..]), Just(&b"s.tar\0"[..]), Just(&b"t"[..]),
            Just(&b"\xff"[..]),
        ],
        page in 1usize..6,
        keeps_nothing: bool,
    ) {
        let made = make(&TREE);
        let cache = PartCache::new(if keeps_nothing { 0 } else { 64 << 20 });
        runtime().block_on(async {
            let v = made.open_with(made.files.clone(), cache).await.expect("a good version");
            let range = KeyRange { prefix, delimiter, from };
            assert_eq!(listed(&v, range, page).await, model(prefix, delimiter, from));
        });
    }
}

#[test]
fn one_key_is_what_its_listing_says() {
    let made = make(&TREE);
    runtime().block_on(async {
        let v = made.open().await;
        for (key, file) in keys() {
            let found = v.find_key(&key).await.expect("good").expect("a key");
            assert_eq!(shown(&KeyItem::Key(found)), (key, file));
        }
        let none =
            ["", "a", "a/", "void", "dangling", "loop", "to-dir", "to-dir/1", "slash", "s.tar\x000.jpg"];
        for key in none.into_iter().chain(["in-dir/out", "in-dir/away", "links/only", "/z", "z/"]) {
            assert!(v.find_key(key).await.expect("good").is_none(), "{key:?}");
        }
    });
}

#[test]
fn a_successor_comes_after_all_that_begins_so() {
    assert_eq!(successor(b"d/").as_deref(), Some(&b"d0"[..]));
    assert_eq!(successor(b"a\xff\xff").as_deref(), Some(&b"b"[..]));
    assert_eq!(successor("\u{10ffff}".as_bytes()).as_deref(), Some(&b"\xf4\x8f\xbf\xc0"[..]));
    assert_eq!((successor(b""), successor(b"\xff")), (None, None));
}
