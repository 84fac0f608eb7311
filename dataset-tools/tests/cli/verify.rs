//! `verify` finds what differs from the tables, and damage of the tables.

use crate::common::{Fixture, bytes, keys};
use std::fs;

fn world() -> (Fixture, String) {
    let w = Fixture::new();
    w.write("d/a", bytes(1, 5000));
    w.write("d/b", bytes(2, 5000));
    w.write("big", bytes(3, 9_500_000));
    w.write("empty", "");
    fs::create_dir(w.data().join("dir")).expect("mkdir");
    std::os::unix::fs::symlink("d/a", w.data().join("link")).expect("link");
    let root = w.index(&[]);
    w.run(&["verify", "data"]).ok();
    (w, root)
}

fn faults(w: &Fixture) -> Vec<(String, String)> {
    let ran = w.run(&["verify", "data", "--json"]).code(3);
    let doc = ran.json();
    assert_eq!(keys(&doc), ["faults", "layout", "root", "summary"]);
    assert_eq!(keys(&doc["summary"]), ["bytes_read", "entries", "faults"]);
    let list = doc["faults"].as_array().expect("list");
    assert_eq!(doc["summary"]["faults"], list.len());
    let text = |f: &serde_json::Value, k: &str| f[k].as_str().expect("text").to_owned();
    list.iter().map(|f| (text(f, "path"), text(f, "fault"))).collect()
}

fn one(w: &Fixture, path: &str, fault: &str) {
    assert_eq!(faults(w), [(path.to_owned(), fault.to_owned())]);
}

#[test]
fn a_flipped_bit_a_truncation_and_a_swap() {
    let (w, _) = world();
    let path = w.data().join("big");
    let good = fs::read(&path).expect("read");
    for at in [0, 4 << 20, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        fs::write(&path, &bad).expect("write");
        one(&w, "big", "changed");
    }
    fs::write(&path, &good[..good.len() - 1]).expect("write");
    one(&w, "big", "changed");
    fs::write(&path, &good).expect("write");
    // The same bytes at another time are the same bytes.
    w.run(&["verify", "data"]).ok();
    let (a, b, tmp) = (w.data().join("d/a"), w.data().join("d/b"), w.path("tmp"));
    fs::rename(&a, &tmp).expect("mv");
    fs::rename(&b, &a).expect("mv");
    fs::rename(&tmp, &b).expect("mv");
    assert_eq!(faults(&w).iter().map(|(p, _)| p.as_str()).collect::<Vec<_>>(), ["d/a", "d/b"]);
}

#[test]
fn bytes_that_differ_under_the_same_times_are_damage_of_the_storage() {
    use fletch_core::manifest::{Entry, LayoutParams, SampleRule};
    use fletch_tables::{NewRow, Provenance, TablesWriter, TagDoc, paths};
    // A lying disk: the pin is that of the file, the hash that of what was once written to it.
    let w = Fixture::new();
    w.write("f", "what is there now");
    let hash = fletch_core::Hash::of(b"what was once in!");
    let pin = fletch::source::pin::pin_of(&fs::metadata(w.data().join("f")).expect("stat"));
    let scratch = tempfile::tempdir().expect("tempdir");
    let mut writer =
        TablesWriter::create(scratch.path(), SampleRule::file(), LayoutParams::INDEX).expect("writer");
    let content = fletch::source::content::Content::whole(hash, 17);
    writer.push(NewRow::indexed(Entry::file("f", 17, hash), content.slices, &pin)).expect("push");
    let written = writer
        .finish(Provenance {
            created_unix_ns: 1,
            indexed_at_ns: 1,
            tool: "test".into(),
            origin: None,
            faults: vec![],
        })
        .expect("finish");
    let put = |rel: &str, bytes: Vec<u8>| {
        let path = w.data().join(rel);
        fs::create_dir_all(path.parent().expect("parent")).expect("mkdir");
        fs::write(path, bytes).expect("write");
    };
    for (rel, file) in &written.files {
        put(rel, fs::read(file).expect("read"));
    }
    let tag = TagDoc::new(written.root, written.layout, 1).to_bytes().expect("tag");
    put(&paths::tag(&fletch_core::TagName::latest()), tag);
    one(&w, "f", "corrupt");
}

#[test]
fn missing_extra_and_changed_kinds() {
    let (w, _) = world();
    fs::remove_file(w.data().join("d/a")).expect("rm");
    one(&w, "d/a", "missing");
    w.write("d/a", bytes(1, 5000));
    w.write("d/extra", "x");
    one(&w, "d/extra", "extra");
    fs::remove_file(w.data().join("d/extra")).expect("rm");
    fs::create_dir(w.data().join("extra-dir")).expect("mkdir");
    one(&w, "extra-dir/", "extra");
    fs::remove_dir(w.data().join("extra-dir")).expect("rmdir");
    fs::remove_dir(w.data().join("dir")).expect("rmdir");
    one(&w, "dir/", "missing");
    fs::create_dir(w.data().join("dir")).expect("mkdir");
    fs::remove_file(w.data().join("link")).expect("rm");
    std::os::unix::fs::symlink("d/b", w.data().join("link")).expect("link");
    one(&w, "link", "changed");
    fs::remove_file(w.data().join("link")).expect("rm");
    one(&w, "link", "missing");
    std::os::unix::fs::symlink("d/a", w.data().join("link")).expect("link");
    w.write("empty", "no more");
    one(&w, "empty", "changed");
    w.write("empty", "");
    fs::remove_file(w.data().join("d/b")).expect("rm");
    nix::unistd::mkfifo(&w.data().join("d/b"), nix::sys::stat::Mode::S_IRWXU).expect("fifo");
    let found = faults(&w);
    assert!(found.contains(&("d/b".into(), "unreadable".into())), "{found:?}");
    // The text form, a line each.
    let ran = w.run(&["verify", "data"]).code(3).says("faults");
    assert!(ran.stdout.lines().any(|l| l.starts_with("unreadable\td/b\t")), "{}", ran.stdout);
}

#[test]
fn damaged_tables_are_a_failure() {
    let (w, root) = world();
    let path = w.data().join(format!("fletch/versions/{root}/entries.parquet"));
    let good = fs::read(&path).expect("read");
    let mut bad = good.clone();
    for b in &mut bad[8..40] {
        *b ^= 0xff;
    }
    fs::write(&path, &bad).expect("write");
    w.run(&["verify", "data"]).code(1);
    fs::write(&path, &good[..good.len() / 2]).expect("write");
    w.run(&["verify", "data"]).code(1).says("index the dataset again");
    fs::write(&path, &good).expect("write");
    w.run(&["verify", "data"]).ok();
}
