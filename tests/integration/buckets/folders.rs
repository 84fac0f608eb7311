//! Markers of folders: what consoles, `mkdir` of file systems over stores, and analytics programs leave.

use crate::form::{Form, check, objects};
use fletch_testkit::{Api, Manners};

/// The 15 characters that sort between a name and the same name with a slash.
const BELOW_SLASH: std::ops::RangeInclusive<char> = ' '..='.';

#[test]
fn markers_of_folders() {
    let mut keys = vec!["m/()".to_owned(), "m/1".to_owned()];
    keys.extend(BELOW_SLASH.map(|c| format!("m{c}x")));
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let without: Vec<&str> = keys.iter().copied().filter(|key| *key != "m/()").collect();
    let train = ["train/()", "train.csv", "train/1.jpg"];
    let shown = ["train.csv", "train/1.jpg"];
    let gcs = Manners { api: Api::Gcs, ..Manners::default() };
    check(&[
        Form::entries("a marker beside a longer name", &train, &shown).mounted(),
        Form::entries("a marker beside a longer name, at GCS", &train, &shown).with(gcs),
        Form::entries("a marker beside all 15 characters below the slash", &keys, &without),
        Form::entries(
            "markers at every depth",
            &["a/()", "a/b/()", "a/b-1/()", "a/b-1/x", "a/b.x", "a/b/c/()", "a/b/c/d", "a-b/()", "a-b/x"],
            &["a/b-1/x", "a/b.x", "a/b/c/d", "a-b/x"],
        ),
        Form::entries("a stub without a slash", &["train()", "train.csv", "train/1.jpg"], &shown).mounted(),
        Form::entries("a stub and a marker", &["train()", "train/()", "train.csv", "train/1.jpg"], &shown),
        Form::entries("a stub above a stub", &["a()", "a/b()", "a/b.c", "a/b/c"], &["a/b.c", "a/b/c"]),
        Form::entries("an empty marker", &["a", "void/()"], &["a", "void/"]).mounted(),
        Form::entries("an empty marker beside a longer name", &["void/()", "void.x"], &["void.x", "void/"]),
        Form::entries("a stub with its own marker alone", &["void()", "void/()", "x"], &["void/", "x"]),
        Form::entries("markers within markers", &["void/()", "void/in/()", "x"], &["void/in/", "x"]),
        Form::entries("a marker of the dataset itself", &["()", "a"], &["a"]),
        Form::entries("an empty file is no marker", &["e()", "e.x", "f()"], &["e", "e.x", "f"]),
        Form::entries("markers as common prefixes", &train, &shown)
            .with(Manners { folders_as_prefixes: true, ..Manners::default() }),
        Form::faults(
            "an object with bytes that ends in a slash",
            &["full/", "full/in", "x"],
            &["full/in", "x"],
            &["full/"],
        ),
        Form::faults("an object with bytes beside its folder", &["a", "a.x", "a/b"], &["a", "a.x"], &["a/b"]),
    ]);
}

#[test]
fn a_marker_that_is_added_later_changes_nothing() {
    use crate::bucket::Bucket;
    use serde_json::Value;
    let bucket = Bucket::new(&Manners::default(), &objects(&["train.csv", "train/1.jpg", "x/y"]));
    let root = |more: &[&str]| -> Value {
        let said = bucket.read("index", "tables", more).ok();
        serde_json::from_str::<Value>(&said.stdout).expect("JSON")["root"].clone()
    };
    let first = root(&[]);
    bucket.origin.console_folder("set/train");
    bucket.origin.insert("set/x", "");
    bucket.user.say(&["verify", &bucket.user.text("tables")]).ok();
    assert_eq!(root(&["--parent", "auto"]), first);
    assert_eq!(root(&[]), first);
}
