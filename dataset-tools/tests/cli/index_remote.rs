//! Datasets in a bucket: the same root as the same tree on a disk, every object read once.

use crate::common::{Fixture, bytes};
use fletch_testkit::{Backing, EmulatorConfig, Fault, OriginEmulator};
use std::fs;

struct Bucket {
    w: Fixture,
    origin: OriginEmulator,
    uri: String,
}

/// A tree on disk and the same in a bucket, under `set/`.
fn bucket() -> Bucket {
    let w = Fixture::new();
    let origin = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    for (i, size) in [9_000_000usize, 4 << 20, 100_000].into_iter().chain([700; 60]).enumerate() {
        let (name, content) = (format!("d{}/f{i:03} #{i}", i % 5), bytes(i as u64, size));
        w.write(&name, &content);
        origin.insert(&format!("set/{name}"), content);
    }
    for name in ["a", "a-b", "a.c/x", "empty"] {
        w.write(name, if name == "empty" { "" } else { name });
        origin.insert(&format!("set/{name}"), if name == "empty" { "" } else { name });
    }
    // Another dataset of the same bucket, whose prefix begins alike.
    origin.insert("set-2/other", "not ours");
    let prefix = origin.uri();
    w.configure(&origin);
    let uri = format!("{prefix}/set");
    Bucket { w, origin, uri }
}

impl Bucket {
    /// GETs of the dataset's own objects, not of its tables.
    fn gets(&self) -> Vec<(String, u64)> {
        let counts = self.origin.counts();
        counts.gets.into_iter().filter(|(k, _)| !k.starts_with("set/fletch/")).collect()
    }

    fn run(&self, args: &[&str]) -> crate::common::Ran {
        let mut args = args.to_vec();
        args.extend(["--config", "fletch.toml"]);
        self.w.run(&args)
    }
}

#[test]
fn a_bucket_has_the_root_of_the_same_tree_and_each_object_is_read_once() {
    let b = bucket();
    let report = b.run(&["index", &b.uri, "--json"]).ok().json();
    assert_eq!(report["root"].as_str(), Some(b.w.full_root(&[]).as_str()));
    for (key, n) in b.gets() {
        let size = b.origin.object(&key).expect("object").len();
        // An object over 4 MiB by slices of 4 MiB, every other in one request.
        assert_eq!(n, size.div_ceil(4 << 20) as u64, "{key}");
    }
    assert!(b.gets().iter().all(|(k, _)| k.starts_with("set/")));
    assert_eq!(report["bytes_read"], report["bytes"]);
    b.run(&["verify", &b.uri]).ok();
    assert_eq!(b.run(&["ls", &format!("{}@latest", b.uri), "a.c"]).ok().stdout, "x\n");

    // A second run reads nothing; after a change only what changed.
    b.origin.reset_counts();
    let again = b.run(&["index", &b.uri, "--parent", "auto", "--json"]).ok().json();
    assert_eq!((&again["root"], &again["bytes_read"]), (&report["root"], &0.into()));
    assert_eq!(b.gets(), []);
    b.origin.insert("set/a", "A");
    b.w.write("a", "A");
    let changed = b.run(&["index", &b.uri, "--parent", "auto", "--json"]).ok().json();
    assert_eq!(changed["root"].as_str(), Some(b.w.full_root(&[]).as_str()));
    assert_eq!(b.gets(), [("set/a".to_owned(), 1)]);
}

#[test]
fn verify_finds_lost_added_and_changed_objects_of_a_bucket() {
    let b = bucket();
    b.run(&["index", &b.uri, "--to", "to"]).ok();
    b.origin.insert("set/extra", "x");
    b.origin.insert("set/a-b", "b-a");
    b.origin.set_fault("set/empty", Fault::Error { status: 404, rate: 1.0 }, None);
    b.origin.set_fault("set/d1/", Fault::FlipBit { byte: 5 }, Some(1));
    let ran = b.run(&["verify", "to"]).code(3);
    let mut found: Vec<&str> =
        ran.stdout.lines().filter_map(|l| l.rsplit_once('\t').map(|(f, _)| f)).collect();
    found.sort_unstable();
    assert_eq!(found.len(), 4, "{found:?}");
    assert_eq!(found[0], "changed\ta-b");
    assert!(found[1].starts_with("corrupt\td1/"), "{found:?}");
    assert_eq!(found[2..], ["extra\textra", "missing\tempty"]);
}

#[test]
fn an_origin_that_refuses_is_denied() {
    let b = bucket();
    b.origin.set_fault("set/fletch/", Fault::Error { status: 403, rate: 1.0 }, None);
    b.run(&["index", &b.uri]).code(5).says("--tables");
    b.origin.clear_faults();
    // What was read is remembered.
    let report = b.run(&["index", &b.uri, "--json"]).ok().says("resuming").json();
    assert_eq!(report["bytes_read"], 0);
    b.origin.set_fault("set/a", Fault::Error { status: 403, rate: 1.0 }, None);
    b.run(&["index", &b.uri, "--to", "to"]).code(1).says("set/a").says("denied");
}

/// The same bucket as a plain server: read-only, and nothing lists it.
fn plain(b: &Bucket) -> String {
    let server = b.origin.endpoint();
    let config = format!("[[origin]]\nprefix = \"{server}\"\nallow_http = true\n");
    fs::write(b.w.path("fletch.toml"), config).expect("write");
    format!("{server}/bucket/set")
}

/// A URI of a plain server, as a browser would write it.
fn encoded(name: &str) -> String {
    name.replace('%', "%25").replace(' ', "%20").replace('#', "%23")
}

#[test]
fn a_plain_server_is_indexed_by_a_list_of_names() {
    let b = bucket();
    let url = plain(&b);
    b.run(&["index", &url, "--to", "to"]).code(2).says("--list FILE");
    let mut names = crate::common::files(&b.w.data());
    // In any order, some as URIs, one twice.
    names.reverse();
    let lines: Vec<String> = names
        .iter()
        .enumerate()
        .map(|(i, n)| if i % 2 == 0 { n.clone() } else { format!("{url}/{}", encoded(n)) })
        .chain([names[0].clone()])
        .collect();
    fs::write(b.w.path("list"), lines.join("\n")).expect("write");
    b.run(&["index", &url, "--list", "list"]).code(2).says("--tables URI");
    let report = b.run(&["index", &url, "--list", "list", "--to", "to", "--json"]).ok().json();
    assert_eq!(report["root"].as_str(), Some(b.w.full_root(&[]).as_str()));
    assert_eq!(report["bytes_read"], report["bytes"]);
    assert_eq!(b.origin.counts().list, 0, "nothing was listed");
    b.run(&["verify", "to"]).ok().says("no listing");
    b.origin.insert("set/a-b", "b-a");
    assert!(b.run(&["verify", "to"]).code(3).stdout.starts_with("changed\ta-b"));

    // What a list names and the server lacks is a fault like others.
    fs::write(b.w.path("list"), "a\nnot there\n").expect("write");
    b.run(&["index", &url, "--list", "list", "--to", "to"]).code(1).says("not there: ");
    let skip = ["index", &url, "--list", "list", "--to", "to", "--skip-failed", "--json"];
    b.run(&skip).code(1).says("--allow-loss 99%");
    let some = b.run(&[&skip[..], &["--allow-loss", "100%"]].concat());
    assert_eq!(some.code(3).json()["entries"], 1);
    b.run(&["index", "data", "--list", "list"]).code(2).says("a directory is walked");
    fs::write(b.w.path("list"), "a\n../b\n").expect("write");
    b.run(&["index", &url, "--list", "list", "--to", "to"]).code(2).says("list, line 2");
}

#[test]
fn a_server_without_ranges_gives_small_files_and_says_what_is_too_large() {
    let b = bucket();
    let url = plain(&b);
    b.origin.set_fault("set/", Fault::IgnoreRange, None);
    let names = crate::common::files(&b.w.data());
    fs::write(b.w.path("list"), names.join("\n")).expect("write");
    // 9 MB are read whole for each of their slices; no more than 16 MiB would be.
    let report = b.run(&["index", &url, "--list", "list", "--to", "to", "--json"]).ok().json();
    assert_eq!(report["root"].as_str(), Some(b.w.full_root(&[]).as_str()));
    b.run(&["verify", "to"]).ok();
    b.origin.insert("set/big", bytes(7, (16 << 20) + 1));
    fs::write(b.w.path("list"), "big").expect("write");
    b.run(&["index", &url, "--list", "list", "--to", "to"]).code(1).says("does not support ranges");
}

#[test]
fn a_list_is_packed_too_and_limits_what_a_bucket_shows() {
    let b = bucket();
    fs::write(b.w.path("list"), "a\na-b\n").expect("write");
    let report = b.run(&["index", &b.uri, "--list", "list", "--to", "to", "--json"]).ok().json();
    assert_eq!((&report["entries"], b.origin.counts().list), (&2.into(), 0));
    let url = plain(&b);
    let packed = b.run(&["pack", &url, "--list", "list", "--to", "packed", "--json"]).ok().json();
    assert_eq!(packed["root"], report["root"]);
}
