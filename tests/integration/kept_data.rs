//! What is kept of a dataset, seen by one user: its size, old versions that go, files that are erased.

use fletch_tests::bins::command;
use fletch_tests::fixture::files;
use fletch_tests::require::{Need, have};
use fletch_tests::user::{User, shows};
use fletch_tests::watch::until;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Makes a tar of `members` files beside the other files of a dataset.
fn add_shard(dataset: &Path, name: &str, members: usize) {
    let scratch = tempfile::tempdir().expect("scratch");
    let names: Vec<String> = (0..members).map(|i| format!("{i:04}.txt")).collect();
    for (i, name) in names.iter().enumerate() {
        fs::write(scratch.path().join(name), vec![b'x'; 100 + i]).expect("write");
    }
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(scratch.path()).arg("-cf").arg(dataset.join(name)).args(&names);
    assert!(tar.status().expect("tar runs").success());
}

/// Every command, the page and the mount give one size, whatever is inside of tar shards.
#[test]
fn a_dataset_has_one_size_everywhere() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let user = User::new("size");
    user.dataset("photos", 20);
    for shard in ["train-0.tar", "train-1.tar"] {
        add_shard(&user.path("photos"), shard, 50);
    }
    let all = files(&user.path("photos"));
    let sizes = all.iter().map(|file| fs::metadata(user.path("photos").join(file)).expect("stat").len());
    let (number, bytes) = (all.len() as u64, sizes.sum::<u64>());
    let is = |what: &str, value: &Value, of: [&str; 2]| {
        let got = (value[of[0]].as_u64(), value[of[1]].as_u64());
        assert_eq!(got, (Some(number), Some(bytes)), "{what}: {value}");
    };
    let json = |words: &[&str]| -> Value {
        let said = user.say(words).ok();
        serde_json::from_str(&said.stdout).unwrap_or_else(|e| panic!("{e}: {said:?}"))
    };
    is("--dry-run", &json(&["mount", "photos", "mnt", "--dry-run", "--json"]), ["files", "bytes"]);
    is("a mount of a draft", &user.mount("photos", "draft", &[]), ["files", "bytes"]);
    let sealed = user.say(&["seal", "photos"]).ok();
    assert!(sealed.stdout.contains(&format!("{number} files")), "{sealed:?}");
    let refreshed = json(&["refresh", "photos", "--json"]);
    is("refresh", &refreshed, ["files", "file_bytes"]);
    assert_eq!(refreshed["entries"].as_u64(), Some(number + 100), "members are entries: {refreshed}");
    is("show", &json(&["show", "photos", "--json"]), ["files", "file_bytes"]);
    is("a mount of a version", &user.mount("photos", "mnt", &[]), ["files", "bytes"]);
    let shown: Vec<_> = files(&user.path("mnt"));
    assert_eq!(shown, all, "the mount itself");
    let status = json(&["status", "--json"]);
    assert_eq!(status["accounts"]["datasets"][0]["version_bytes"].as_u64(), Some(bytes), "{status}");
    let text = user.say(&["refresh", "photos"]).ok();
    assert!(text.stdout.contains(&format!("photos: {number} files, ")), "{text:?}");
    user.say(&["down"]).ok();
}

#[test]
fn a_version_that_a_mount_shows_is_no_garbage() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let user = User::new("gc");
    let all = user.dataset("photos", 20);
    user.mount("photos", "mnt", &["--index"]);
    fs::write(user.path("photos/new"), b"new").expect("write");
    user.say(&["refresh", "photos"]).ok();
    let gc = |more: &[&str]| -> Value {
        let said = user.say(&[&["gc", "photos", "--older-than", "0s", "--json"], more].concat()).ok();
        serde_json::from_str(&said.stdout).unwrap_or_else(|e| panic!("{e}: {said:?}"))
    };
    let shown = gc(&["--yes"]);
    assert_eq!((shown["kept_versions"].as_u64(), shown["bytes"].as_u64()), (Some(2), Some(0)), "{shown}");
    shows(&user.path("mnt"), &all);
    let unmounted =
        Command::new("fusermount3").arg("-u").arg(user.path("mnt")).status().expect("fusermount3");
    assert!(unmounted.success());
    until("the server knows that the mount is gone", Duration::from_secs(40), || {
        gc(&[])["kept_versions"].as_u64() == Some(1)
    });
    let done = gc(&["--yes"]);
    assert_eq!(done["versions"].as_array().map(Vec::len), Some(1), "{done}");
    user.mount("photos", "mnt", &[]);
    assert_eq!(fs::read(user.path("mnt/new")).expect("readable"), b"new");
}

/// Returns whether any file below a directory contains these bytes.
fn is_below(dir: &Path, needle: &[u8]) -> bool {
    files(dir).iter().any(|file| {
        let content = fs::read(dir.join(file)).unwrap_or_default();
        content.windows(needle.len()).any(|window| window == needle)
    })
}

#[test]
fn a_file_is_erased_from_packs_and_caches() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let user = User::new("erase");
    let mut all = user.dataset("photos", 40);
    let secret: Vec<u8> = (0..4000u32).flat_map(|i| (i ^ 0x5eed_1234).to_le_bytes()).collect();
    fs::write(user.path("photos/d1/ann"), &secret).expect("write");
    all.insert(PathBuf::from("d1/ann"), secret.clone());
    let packs = user.text("packs");
    user.mount("photos", "mnt", &["--pack", &packs]);
    shows(&user.path("mnt"), &all);
    user.say(&["warmup", "photos", "--wait", "--quiet"]).ok();
    let text = user.say(&["show", "photos", "--json"]).ok().stdout;
    let old =
        serde_json::from_str::<Value>(&text).expect("JSON")["root"].as_str().expect("a root").to_owned();
    user.say(&["tag", &packs, "before", &old]).ok();
    let erase = |more: &[&str]| user.say(&[&["erase", "photos", "d1/ann"], more].concat());
    erase(&["--yes"]).mistake(1, &["d1/ann is still in ", "nothing was erased", "delete it there first"]);
    user.say(&["erase", "photos", "d1/bob"]).mistake(1, &["no version of photos lists d1/bob"]);
    assert!(is_below(&user.path("packs"), &secret[..64]), "the pack has it");

    fs::remove_file(user.path("photos/d1/ann")).expect("remove");
    all.remove(Path::new("d1/ann"));
    let shown = erase(&[]).ok();
    for part in ["1 version list it, 1 packed chunk held it", "same command with --yes"] {
        assert!(shown.stdout.contains(part) || shown.stderr.contains(part), "{part:?}: {shown:?}");
    }
    assert!(is_below(&user.path("packs"), &secret[..64]), "nothing is erased yet");
    let done = erase(&["--yes", "--json"]).ok();
    for part in
        ["tags that name versions with it: before", "mounts that may still have it", "fletch gc photos"]
    {
        assert!(done.stderr.contains(part), "{part:?}: {done:?}");
    }
    assert!(!is_below(&user.path("packs"), &secret[..64]), "no object has it");
    Command::new("fusermount3").arg("-u").arg(user.path("mnt")).status().expect("fusermount3");
    // The version before has every other file, and not this one, which no cache has any more.
    user.mount("photos", "new", &[]);
    shows(&user.path("new"), &all);
    let server = format!("unix:{}", user.socket().display());
    let mut before = command("fletch-mount");
    before
        .args(["photos@before", &user.text("old"), "--server", &server, "--daemon"])
        .env("HOME", user.dir.path());
    before.env("FLETCH_STATE_DIR", user.path("state"));
    fs::create_dir(user.path("old")).expect("mkdir");
    assert!(before.status().expect("fletch-mount").success());
    for (rel, bytes) in &all {
        assert_eq!(fs::read(user.path("old").join(rel)).expect("readable"), *bytes, "{}", rel.display());
    }
    assert!(fs::read(user.path("old/d1/ann")).is_err(), "its bytes are gone");
    let verified = user.say(&["verify", &format!("{packs}@before")]);
    assert_eq!(verified.code, 3, "{verified:?}");
    // Again: it finds nothing more to do.
    erase(&["--yes"]).ok();
    user.say(&["tag", &packs, "before", "--delete"]).ok();
    Command::new("fusermount3").arg("-u").arg(user.path("old")).status().expect("fusermount3");
    until("no version lists it", Duration::from_secs(40), || {
        user.say(&["gc", "photos", "--older-than", "0s", "--yes"]).ok();
        erase(&[]).ok().stdout.contains("0 versions list it")
    });
}
