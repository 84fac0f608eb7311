//! What `index` reads and writes: every byte once, tables that can be believed, tags.

use crate::common::{Fixture, bytes, files, keys};
use std::fs;

/// Bytes passed to read calls by `index` of this world, from the kernel's own count.
fn rchar(w: &Fixture, to: &str) -> u64 {
    let script = r#"
        "$0" index data --quiet --allow-empty --to "$1" --state-dir "$1-state" >/dev/null &&
        grep ^rchar /proc/$$/io"#;
    let out = std::process::Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_fletch"), to])
        .current_dir(w.dir.path())
        .output()
        .expect("sh");
    let text = String::from_utf8(out.stdout).expect("UTF-8");
    text.trim().strip_prefix("rchar: ").and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{text}"))
}

#[test]
fn every_byte_is_read_once() {
    let w = Fixture::new();
    let base = rchar(&w, "to-empty");
    let mut total = 0;
    for (i, size) in
        [21_000_000usize, 4 << 20, (4 << 20) + 1, 300_000, 262_144].into_iter().chain([5000; 200]).enumerate()
    {
        w.write(&format!("d{}/f{i:04}", i % 7), bytes(i as u64, size));
        total += size as u64;
    }
    let read = rchar(&w, "to") - base;
    // Beside the dataset only its own tables are read, when they are put in place.
    assert!((total..total + 400_000).contains(&read), "{read} bytes read of {total}");
}

#[test]
fn tables_are_published_once_and_the_root_is_the_same_everywhere() {
    let w = Fixture::new();
    w.write("a/1.jpg", "one");
    w.write("a/1.cls", "1");
    w.write("big", bytes(1, 9_000_000));
    fs::create_dir_all(w.data().join("empty/below")).expect("mkdir");
    let root = w.index(&[]);
    assert_eq!(root.len(), 64);
    let names = files(&w.data().join("fletch"));
    assert_eq!(names.len(), 7, "{names:?}");
    let manifest = w.data().join(format!("fletch/versions/{root}/manifest.json"));
    let first = fs::read(&manifest).expect("manifest");
    assert_eq!(w.index(&["--threads", "3"]), root);
    assert_eq!(w.index(&["--no-tag", "--to", "elsewhere"]), root);
    assert_eq!(fs::read(&manifest).expect("manifest"), first, "an existing version keeps its time");
    assert!(!w.path("elsewhere/fletch/tags").exists(), "--no-tag moves none");
    let show = w.json(&["show", &format!("elsewhere@{root}")]);
    assert!(show["origin"].as_str().expect("the dataset's URI").ends_with("/data"));
    w.run(&["verify", &format!("elsewhere@{root}")]).ok();
    // Another rule is another root.
    let stem = w.index(&["--sample-rule", "stem", "--samples", "a/*"]);
    assert_ne!(stem, root);
    let entry = w.json(&["show", "data", "a/1.cls"]);
    assert_eq!((&entry["sample"]["kind"], &entry["sample"]["key"]), (&"keyed".into(), &"a/1".into()));
    assert_eq!(w.json(&["show", "data"])["samples"], 1);
    // The hash of the whole is what b3sum says of the file.
    let big = w.json(&["show", "data", "big"]);
    let want = blake3::hash(&bytes(1, 9_000_000)).to_hex().to_string();
    assert_eq!(big["blake3"], want.as_str());
    assert_eq!(big["slices"].as_array().map(Vec::len), Some(3));
}

/// Returns `groups.bin` of the only layout below a place, and what `layout.json` says of it.
fn groups(w: &Fixture, place: &str) -> (Option<Vec<u8>>, serde_json::Value) {
    let below = w.path(place);
    let find = |name: &str| files(&below).into_iter().find(|file| file.ends_with(name));
    let layout = fs::read(below.join(find("layout.json").expect("a layout"))).expect("read");
    let layout: serde_json::Value = serde_json::from_slice(&layout).expect("JSON");
    (
        find("groups.bin").map(|file| fs::read(below.join(file)).expect("read")),
        layout["grouped_chunks"].clone(),
    )
}

#[test]
fn hashes_of_groups_are_written_and_taken_over_from_the_parent() {
    let w = Fixture::new();
    for (name, size) in [("long", 9_000_000), ("one", 300_000), ("short", 200_000), ("same", 300_000)] {
        w.write(name, bytes(u64::from(name != "same") + size as u64, size));
    }
    fs::copy(w.data().join("one"), w.data().join("same")).expect("copied");
    w.index(&["--to", "first"]);
    let (first, rows) = groups(&w, "first");
    let first = first.expect("there are long chunks");
    assert_eq!(rows, 4, "three slices, and one chunk of two files");
    let lists = |sizes: &[usize]| sizes.iter().map(|size| size.div_ceil(16 << 10) * 32).sum::<usize>();
    let long = lists(&[4 << 20, 4 << 20, 9_000_000 - (8 << 20), 300_000]);
    assert_eq!(first.len(), 16 + 4 * 48 + long);
    // A run that reads one file more has the other lists from its parent.
    std::thread::sleep(std::time::Duration::from_millis(2100));
    w.index(&["--to", "first"]);
    w.write("new", bytes(77, 1 << 20));
    let again = w.json(&["index", "data", "--to", "first", "--parent", "auto"]);
    assert_eq!(again["files_reused"], 4, "{again}");
    let latest = again["root"].as_str().expect("a root").to_owned();
    let file = files(&w.path("first")).into_iter().find(|f| f.contains(&latest) && f.ends_with("groups.bin"));
    let taken = fs::read(w.path("first").join(file.expect("a file"))).expect("read");
    assert_eq!(taken.len(), first.len() + 48 + lists(&[1 << 20]));
    // `pack` writes those of the files that stay where they are.
    w.run(&["pack", "data", "--to", "packed"]).ok();
    let packed = files(&w.path("packed")).into_iter().filter(|file| file.ends_with("groups.bin")).count();
    assert_eq!(packed, 2, "the pack and its index");
    let empty = Fixture::new();
    empty.write("short", bytes(5, 200_000));
    empty.index(&["--to", "none"]);
    assert_eq!(groups(&empty, "none"), (None, serde_json::Value::Null));
}

#[test]
fn damaged_tables_are_mended_by_indexing_again() {
    let w = Fixture::new();
    w.write("f", "x");
    let root = w.index(&[]);
    for name in ["entries.parquet", "manifest.json"] {
        let path = w.data().join(format!("fletch/versions/{root}/{name}"));
        let mut table = fs::read(&path).expect("table");
        let middle = table.len() / 2;
        table[middle] ^= 0x55;
        table[middle + 1] ^= 0x55;
        fs::write(&path, table).expect("write");
        assert_eq!(w.index(&[]), root);
        w.run(&["verify", "data"]).ok();
    }
}

#[test]
fn tags() {
    let w = Fixture::new();
    w.write("f", "1");
    let one = w.index(&["--tag", "v1"]);
    w.write("f", "2");
    let two = w.index(&[]);
    let tag =
        |name: &str| w.json(&["tag", "data", name])["tags"][0]["root"].as_str().expect("root").to_owned();
    assert_eq!((tag("v1"), tag("latest")), (one.clone(), two.clone()));
    w.run(&["tag", "data", "stable", "v1"]).ok();
    assert_eq!(tag("stable"), one);
    w.run(&["tag", "data", "stable", &two]).ok();
    assert_eq!(tag("stable"), two);
    let all = w.json(&["tag", "data"]);
    assert_eq!(keys(&all), ["tags", "uri"]);
    let names: Vec<&str> =
        all["tags"].as_array().expect("list").iter().filter_map(|t| t["tag"].as_str()).collect();
    assert_eq!(names, ["latest", "stable", "v1"]);
    assert_eq!(keys(&all["tags"][0]), ["created", "layout", "root", "tag"]);
    w.run(&["tag", "data", "stable", "--delete"]).ok();
    w.run(&["tag", "data", "stable", "--delete"]).code(1).says("no tag stable");
    w.run(&["tag", "data", "x", "none-such"]).code(1).says("none-such");
    w.run(&["tag", "data", "x", &"0".repeat(64)]).code(1).says("no version");
    w.run(&["tag", "data", "bad/name"]).code(2);
    w.run(&["ls", "data@v1"]).ok();
    w.run(&["ls", &format!("data@{one}")]).ok();
}

#[test]
fn a_directory_with_an_at_in_its_name() {
    let w = Fixture::new();
    let dir = w.path("a@b/c@d");
    fs::create_dir_all(&dir).expect("mkdir");
    fs::write(dir.join("f"), "x").expect("write");
    let root = w.run(&["index", "a@b/c@d"]).ok().stdout.trim().to_owned();
    w.run(&["tag", "a@b/c@d", "t", "latest"]).ok();
    assert_eq!(w.json(&["show", "a@b/c@d/"])["root"], root.as_str());
    assert_eq!(w.json(&["show", "a@b/c@d@t"])["root"], root.as_str());
    // The path exists, so the text is that path.
    let ran = w.run(&["show", "a@b/c@d"]).ok().says("a@b/c@d is the path of that name here");
    assert!(ran.stdout.contains(&root), "{}", ran.stdout);
}
