//! One bucket name at two stores, one container of two accounts, and a folder in place of another: each
//! command shows the store that the environment names, or says why not.

use crate::bucket::listed;
use fletch_testkit::{Backing, EmulatorConfig, OriginEmulator, servers};
use fletch_tests::require::{Need, have};
use fletch_tests::user::{Said, User, plain};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

type Files = BTreeMap<String, Vec<u8>>;

/// Returns files whose names, or only whose bytes, are those of one store.
fn content(of: &str, names: &[&str]) -> Files {
    names.iter().map(|name| ((*name).to_owned(), format!("{name} of {of}").into_bytes())).collect()
}

/// Starts a store with a bucket that has these files below `set/`.
fn store(files: &Files) -> OriginEmulator {
    let origin = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    for (path, bytes) in files {
        origin.insert(&format!("set/{path}"), bytes.clone());
    }
    origin
}

/// Lets the environment name a store.
fn name_store(user: &mut User, origin: &OriginEmulator) {
    for (name, value) in [
        ("AWS_ACCESS_KEY_ID", "AKIATESTTEST".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "hunter2secret".to_owned()),
        ("AWS_REGION", "us-east-1".to_owned()),
        ("AWS_ENDPOINT_URL", origin.endpoint()),
    ] {
        user.more.insert(name, value);
    }
}

#[track_caller]
fn says(said: &Said, parts: &[&str]) {
    for part in parts {
        assert!(said.stderr.contains(part), "{part:?} is not in: {said:?}");
    }
    plain(&said.stderr);
}

/// Returns the names that `fletch ls` shows of a target.
fn names(said: Said) -> Vec<String> {
    let shown: Value = serde_json::from_str(&said.ok().stdout).expect("JSON");
    let children = shown["children"].as_array().cloned().unwrap_or_default();
    children.iter().map(|child| child["name"].as_str().unwrap_or_default().to_owned()).collect()
}

#[test]
fn a_bucket_of_the_same_name_at_another_store_is_another_dataset() {
    if !have(&[Need::Fuse]) {
        return;
    }
    // One name has other bytes of the same length, and each store has a file that the other lacks.
    let (first, second) = (content("A", &["same", "only-a"]), content("B", &["same", "only-b"]));
    let (a, b) = (store(&first), store(&second));
    let uri = format!("{}/set", a.uri());
    let mut user = User::new("one");
    name_store(&mut user, &a);
    user.say(&["mount", "--index", &uri, "mnt-a"]).ok();
    assert_eq!(listed(&user.path("mnt-a")), first);
    assert_eq!(b.counts().requests(), 0);

    // The same command, while the environment names the other store.
    let (of_a, of_b) = (a.address().to_string(), b.address().to_string());
    name_store(&mut user, &b);
    a.reset_counts();
    let mounted = user.say(&["mount", "--index", &uri, "mnt-b", "--json"]).ok();
    let said = format!("{} was read from {of_a}; AWS_ENDPOINT_URL now names {of_b}", a.uri());
    says(&mounted, &[&said, " now, 2 files"]);
    let shown: Value = serde_json::from_str(&mounted.stdout).expect("JSON");
    let name = format!("set-at-{}", of_b.replace(':', "-"));
    let there = format!("{}~{of_b}/set", b.uri());
    assert_eq!((shown["name"].as_str(), shown["source"].as_str()), (Some(&*name), Some(&*there)), "{shown}");
    assert_eq!(listed(&user.path("mnt-b")), second);
    assert_eq!(listed(&user.path("mnt-a")), first, "the mount of the first store shows it as before");
    assert_eq!(a.counts().requests(), 0, "the first store was asked nothing");

    // The second run reads nothing again. Its URI and its name say the same.
    b.reset_counts();
    for source in [uri.as_str(), &there, &name] {
        let dir = format!("again-{}", source.len());
        let again = user.mount(source, &dir, &[]);
        assert_eq!(again["name"].as_str(), Some(&*name), "{source}");
        assert_eq!(listed(&user.path(&dir)), second, "{source}");
    }
    assert_eq!(b.counts().get, 0);
    for source in [uri.as_str(), &there, &name] {
        assert_eq!(names(user.say(&["ls", source, "--json"])), ["only-b", "same"], "{source}");
    }

    // What was read from the first store is not read or shown as if it were at the second.
    let why = format!("was read from {of_a}; AWS_ENDPOINT_URL now names {of_b}");
    let hint = format!("let it name {of_a}");
    user.say(&["mount", "set", "mnt-c"]).mistake(1, &[&why, &hint]);
    user.say(&["refresh", "set"]).mistake(1, &[&why, &hint]);
    user.say(&["verify", "set"]).mistake(1, &[&why, &hint]);
    assert_eq!(names(user.say(&["ls", &uri, "--json"])), ["only-b", "same"]);
    assert_eq!(names(user.say(&["ls", "set", "--json"])), ["only-a", "same"], "the name is of the first");
    user.say(&["verify", &uri]).ok();
    let doctor = user.say(&["doctor", &uri]);
    assert!(doctor.stderr.contains(&said), "{doctor:?}");

    // A refresh reads the store that the environment names.
    b.insert("set/new", "new of B");
    let refreshed = user.say(&["refresh", &uri]).ok();
    assert!(refreshed.stdout.contains(&name) && refreshed.stdout.contains("3 files"), "{refreshed:?}");
    let status = user.say(&["status"]).ok();
    for origin in [a.uri(), format!("{}~{of_b}", b.uri())] {
        assert!(status.stdout.contains(&origin), "{origin}: {status:?}");
    }

    // The first store again, also after a restart of the server, which forgets the credentials.
    for is_restarted in [false, true] {
        if is_restarted {
            user.say(&["down"]).ok();
        }
        name_store(&mut user, &a);
        let back = user.say(&["mount", &uri, "mnt-d"]).ok();
        assert!(!back.stderr.contains("was read from"), "{back:?}");
        assert_eq!(listed(&user.path("mnt-d")), first);
        user.say(&["refresh", "set"]).ok();
        let why = format!("{there} was read from {of_b}; AWS_ENDPOINT_URL now names {of_a}");
        user.say(&["mount", &name, "mnt-e"]).mistake(1, &[&why]);
        if !is_restarted {
            user.say(&["down"]).ok();
        }
    }
    let datasets = user.say(&["datasets"]).ok().stdout;
    assert!(datasets.contains(&format!("set\t{uri}")) && datasets.contains(&there), "{datasets}");
}

#[test]
fn index_register_and_refresh_without_a_mount_know_the_store() {
    let (first, second) = (content("A", &["x", "y"]), content("B", &["x", "z"]));
    let (a, b) = (store(&first), store(&second));
    let uri = format!("{}/set", a.uri());
    let mut user = User::new("one");
    name_store(&mut user, &a);
    user.say(&["index", &uri, "--tables", &user.text("tables")]).ok();
    assert_eq!(names(user.say(&["ls", &uri, "--json"])), ["x", "y"]);

    name_store(&mut user, &b);
    let (of_a, of_b) = (a.address().to_string(), b.address().to_string());
    let not_yet = user.say(&["ls", &uri]);
    assert_eq!(not_yet.code, 1, "{not_yet:?}");
    says(&not_yet, &[&of_a, &of_b]);
    assert!(not_yet.stderr.contains("not indexed yet"), "{not_yet:?}");
    user.say(&["show", &uri]).fails(&["not indexed yet"]);
    user.say(&["verify", &uri]).fails(&["not indexed yet"]);
    // The tables name the bucket, which was that of the first store.
    user.say(&["verify", &user.text("tables")]).mistake(1, &["was read from", &of_a]);

    user.say(&["index", &uri, "--tables", &user.text("tables-b")]).ok();
    assert_eq!(names(user.say(&["ls", &uri, "--json"])), ["x", "z"]);
    user.say(&["verify", &uri]).ok();
    name_store(&mut user, &a);
    assert_eq!(names(user.say(&["ls", &uri, "--json"])), ["x", "y"]);
    user.say(&["verify", &uri]).ok();
}

#[test]
fn what_an_older_build_wrote_is_read_as_before() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let (first, second) = (content("A", &["x"]), content("B", &["z"]));
    let (a, b) = (store(&first), store(&second));
    let uri = format!("{}/set", a.uri());
    let mut user = User::new("one");
    name_store(&mut user, &a);
    user.mount(&uri, "mnt", &[]);
    user.say(&["down"]).ok();
    // Older builds had no such files.
    fs::remove_dir_all(user.path("state/meanings")).expect("removed");

    let again = user.say(&["mount", &uri, "mnt"]).ok();
    assert!(!again.stderr.contains("reads ") && again.stdout.contains("set is at "), "{again:?}");
    says(&again, &["was read by an older fletch", &a.address().to_string()]);
    assert_eq!(listed(&user.path("mnt")), first);
    let quiet = user.say(&["mount", &uri, "mnt2"]).ok();
    assert!(!quiet.stderr.contains("older fletch"), "{quiet:?}");
    name_store(&mut user, &b);
    user.say(&["mount", &uri, "mnt3"]).ok();
    assert_eq!(listed(&user.path("mnt3")), second);
}

#[test]
fn a_container_of_the_same_name_of_another_account_is_another_dataset() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let Some(azure) = servers::azure("container") else { return };
    let accounts = [servers::AZURE_ACCOUNT, servers::AZURE_SECOND_ACCOUNT];
    servers::azure_container(&azure, accounts[1], "container");
    let mut user = User::new("one");
    let held = accounts.map(|account| content(account, &["same", &format!("only-{account}")]));
    for (account, files) in accounts.into_iter().zip(&held) {
        for (path, bytes) in files {
            servers::azure_blob_of(&azure, account, ("container", &format!("set/{path}")), bytes);
        }
    }
    let uri = "az://container/set";
    for (round, (account, files)) in
        accounts.into_iter().zip(&held).chain([(accounts[0], &held[0])]).enumerate()
    {
        for (name, value) in [
            ("AZURE_STORAGE_ACCOUNT", account.to_owned()),
            ("AZURE_STORAGE_KEY", servers::AZURE_KEY.to_owned()),
            ("AZURE_STORAGE_ENDPOINT", format!("{}/{account}", azure.endpoint())),
        ] {
            user.more.insert(name, value);
        }
        let dir = format!("mnt-{round}");
        let mounted = user.say(&["mount", "--index", uri, &dir]).ok();
        assert_eq!(listed(&user.path(&dir)), *files, "{mounted:?}");
        let is_second = account == accounts[1];
        assert_eq!(mounted.stderr.contains("az://container was read from"), is_second, "{mounted:?}");
        user.say(&["refresh", uri]).ok();
        user.say(&["verify", uri]).ok();
    }
    let datasets = user.say(&["datasets"]).ok().stdout;
    assert_eq!(datasets.lines().count(), 2, "{datasets}");
    let second = format!("+{}/set", accounts[1]);
    assert!(datasets.contains("az://container~") && datasets.contains(&second), "{datasets}");
}

#[test]
fn a_folder_in_place_of_another_is_read_anew() {
    if !have(&[Need::Fuse]) {
        return;
    }
    let user = User::new("one");
    let write = |files: &Files| {
        fs::create_dir(user.path("data")).expect("mkdir");
        for (path, bytes) in files {
            fs::write(user.path("data").join(path), bytes).expect("write");
        }
    };
    let (first, second) = (content("A", &["same", "only-a"]), content("B", &["same", "only-b"]));
    write(&first);
    user.mount("./data", "mnt-a", &["--index"]);
    assert_eq!(listed(&user.path("mnt-a")), first);

    fs::rename(user.path("data"), user.path("old")).expect("rename");
    write(&second);
    let why = "is not the folder that was read before: another folder is at this path now";
    let shown = user.say(&["ls", &user.text("data")]).ok();
    assert!(shown.stderr.contains(why), "{shown:?}");
    let doctor = user.say(&["doctor", "./data"]);
    assert!(doctor.stderr.contains(why), "{doctor:?}");
    let mounted = user.say(&["mount", "--index", "./data", "mnt-b"]).ok();
    says(&mounted, &[why, " now, 2 files"]);
    assert_eq!(listed(&user.path("mnt-b")), second);
    let again = user.say(&["mount", "./data", "mnt-c"]).ok();
    assert!(!again.stderr.contains(why) && !again.stderr.contains("reads "), "{again:?}");

    // The old one is back: it is another one than the last.
    fs::remove_dir_all(user.path("data")).expect("removed");
    fs::rename(user.path("old"), user.path("data")).expect("rename");
    let refreshed = user.say(&["refresh", &user.text("data")]).ok();
    assert!(refreshed.stderr.contains(why) && refreshed.stdout.contains("read 2 files"), "{refreshed:?}");
    user.mount("./data", "mnt-d", &[]);
    assert_eq!(listed(&user.path("mnt-d")), first);

    // A disk that is not mounted leaves an empty folder.
    fs::rename(user.path("data"), user.path("old")).expect("rename");
    fs::create_dir(user.path("data")).expect("mkdir");
    let empty = user.say(&["mount", "./data", "mnt-e"]).fails(&[why]);
    assert!(!empty.stdout.contains("is at"), "{empty:?}");
}

/// A file system that a test mounted, until the test ends.
struct Mounted(PathBuf);

impl Mounted {
    /// Mounts an empty file system in memory, and writes files to it.
    fn with(at: &Path, files: &Files) -> Self {
        mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::empty(), Some("size=1m")).expect("mounted");
        for (path, bytes) in files {
            fs::write(at.join(path), bytes).expect("write");
        }
        Mounted(at.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        umount2(&self.0, MntFlags::MNT_DETACH).expect("unmounted");
    }
}

/// As with a disk that is exchanged, or that is not there yet after a start of the machine.
#[test]
fn a_folder_that_is_another_mount_now_is_read_anew() {
    if !have(&[Need::Fuse, Need::Root]) {
        return;
    }
    let user = User::new("one");
    let (first, second) = (content("A", &["same", "only-a"]), content("B", &["same", "only-b"]));
    let data = user.path("data");
    fs::create_dir(&data).expect("mkdir");
    let disk = Mounted::with(&data, &first);
    user.mount("./data", "mnt-a", &[]);
    assert_eq!(listed(&user.path("mnt-a")), first);
    drop(disk);

    let disk = Mounted::with(&data, &second);
    let why = "is not the folder that was read before";
    for command in [["ls", "./data"], ["doctor", "./data"]] {
        let said = user.say(&command);
        assert!(said.stderr.contains(why), "{said:?}");
    }
    says(&user.say(&["mount", "--index", "./data", "mnt-b"]).ok(), &[why]);
    assert_eq!(listed(&user.path("mnt-b")), second);
    drop(disk);

    // No disk is mounted.
    user.say(&["mount", "./data", "mnt-c"]).fails(&[why]);
}
