//! Every odd input has its rule or its clear error, and every fault its exit code.

use crate::common::{Fixture, files};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;

fn chmod(path: &std::path::Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("chmod");
}

fn world_with_faults() -> Fixture {
    let w = Fixture::new();
    w.write("good/a", "a");
    w.write("good/b", "b");
    w.write("only-bad/x", "x");
    fs::rename(w.data().join("only-bad/x"), w.data().join("only-bad").join(OsStr::from_bytes(b"\xfe")))
        .expect("mv");
    nix::unistd::mkfifo(&w.data().join("a-pipe"), nix::sys::stat::Mode::S_IRWXU).expect("fifo");
    let _socket = std::os::unix::net::UnixListener::bind(w.data().join("z-sock")).expect("socket");
    w
}

#[test]
fn the_first_fault_stops_the_run_and_nothing_is_written() {
    let w = world_with_faults();
    let ran = w.run(&["index", "data"]).code(1).says("a-pipe").says("named pipe").says("--skip-failed");
    assert_eq!(ran.stdout, "");
    assert!(!w.data().join("fletch").exists());
    assert_eq!(
        files(&w.path("state")).iter().filter(|f| f.contains("scratch")).count(),
        0,
        "scratch is gone"
    );
}

#[test]
fn keep_going_reports_all_and_writes_nothing() {
    let w = world_with_faults();
    let ran = w.run(&["index", "data", "--keep-going", "--json"]).code(1);
    let doc = ran.json();
    assert_eq!(doc["error"]["code"], "failed");
    let paths: Vec<&str> =
        doc["faults"].as_array().expect("list").iter().filter_map(|f| f["path"].as_str()).collect();
    assert_eq!(paths, ["a-pipe", "only-bad/\\xfe", "z-sock"]);
    assert!(ran.stderr.contains("UTF-8") && ran.stderr.contains("a socket"), "{}", ran.stderr);
    assert!(!w.data().join("fletch").exists());
}

#[test]
fn skip_failed_writes_the_rest_and_lists_them() {
    let w = world_with_faults();
    let ran = w.run(&["index", "data", "--skip-failed"]).code(3);
    let root = ran.stdout.trim().to_owned();
    let show = w.json(&["show", "data"]);
    assert_eq!(show["root"], root.as_str());
    let skipped: Vec<&str> =
        show["skipped"].as_array().expect("list").iter().filter_map(|f| f["path"].as_str()).collect();
    assert_eq!(skipped, ["a-pipe", "only-bad/\\xfe", "z-sock"]);
    // A directory of which nothing could be indexed is an empty one.
    assert_eq!(show["entries"], 3);
    w.run(&["show", "data", "only-bad"]).ok();
    // What was left out is no surprise to verify.
    w.run(&["verify", "data"]).ok();
}

#[test]
fn unreadable_files_and_directories_are_named() {
    let w = Fixture::new();
    w.write("ok", "x");
    w.write("secret", "x");
    w.write("locked/f", "x");
    chmod(&w.data().join("secret"), 0);
    chmod(&w.data().join("locked"), 0);
    for dir in [w.dir.path().to_owned(), w.data()] {
        chmod(&dir, 0o777);
    }
    let mut c = w.command(&["index", "data", "--keep-going", "--json"]);
    c.env("FLETCH_STATE_DIR", w.path("nobody-state"));
    if nix::unistd::geteuid().is_root() {
        // Nothing is unreadable for root.
        c.uid(65534).gid(65534);
        let bin = w.path("fletch-copy");
        fs::copy(env!("CARGO_BIN_EXE_fletch"), &bin).expect("copy");
        chmod(&bin, 0o755);
        let mut d = std::process::Command::new(&bin);
        d.args(c.get_args()).current_dir(w.dir.path()).uid(65534).gid(65534);
        d.env("FLETCH_STATE_DIR", w.path("nobody-state"));
        c = d;
    }
    let ran = crate::common::Ran::from(c.output().expect("spawn")).code(1);
    let doc = ran.json();
    let paths: Vec<&str> =
        doc["faults"].as_array().expect("list").iter().filter_map(|f| f["path"].as_str()).collect();
    assert_eq!(paths, ["locked/", "secret"], "{}", ran.stderr);
    chmod(&w.data().join("locked"), 0o755);
}

#[test]
fn a_place_that_cannot_be_written_is_told_before_reading() {
    let w = Fixture::new();
    w.write("f", "x");
    // `/proc` takes no directories, from anybody.
    let ran = w.run(&["index", "data", "--to", "/proc/fletch-tables"]);
    assert!([1, 5].contains(&ran.code), "{ran:?}");
    assert!(ran.stderr.contains("--tables"), "{}", ran.stderr);
    w.run(&["index", "nowhere"]).code(1).says("nowhere");
    w.run(&["index", "data/f"]).code(1).says("not a directory");
    w.run(&["index", "http://host/x"]).code(2).says("http");
    w.run(&["index", "s3://bucket/x"]).code(1).says("[[origin]]");
    w.run(&["index", "data", "--samples", "a["]).code(2).says("glob");
    w.run(&["index", "data", "--keep-going", "--skip-failed"]).code(2);
    w.run(&["index", "data", "--parent", "none-such"]).code(1).says("none-such");
    w.run(&["index", "data", "--threads", "0"]).code(2);
}

#[test]
fn links_by_policy_and_loops() {
    let w = Fixture::new();
    w.write("d/f", "content");
    symlink("d/f", w.data().join("l")).expect("link");
    let keep = w.index(&[]);
    assert_eq!(w.json(&["show", "data", "l"])["target"], "d/f");
    let follow = w.index(&["--symlinks", "follow"]);
    let l = w.json(&["show", "data", "l"]);
    assert_eq!((l["kind"].as_str(), l["size"].as_u64()), (Some("file"), Some(7)));
    w.run(&["verify", "data"]).ok();
    let skip = w.index(&["--symlinks", "skip"]);
    w.run(&["show", "data", "l"]).code(1).says("not in version");
    w.run(&["verify", "data"]).ok();
    assert!(keep != follow && follow != skip && keep != skip);
    w.run(&["index", "data", "--symlinks", "error"]).code(1).says("symbolic link");
    symlink("..", w.data().join("d/loop")).expect("link");
    w.run(&["index", "data", "--symlinks", "follow"]).code(1).says("d/loop").says("loop");
    symlink("gone", w.data().join("a-broken")).expect("link");
    w.run(&["index", "data", "--symlinks", "follow"]).code(1).says("a-broken").says("link to nothing");
    let bad = OsStr::from_bytes(b"\xff");
    symlink(bad, w.data().join("a-bad-target")).expect("link");
    w.run(&["index", "data"]).code(1).says("a-bad-target").says("UTF-8");
}

#[test]
fn our_own_places_in_the_tree_are_not_indexed() {
    let w = Fixture::new();
    w.write("f", "x");
    let root = w.full_root(&[]);
    // Tables in the tree, in a directory of the tree, and the state directory in the tree.
    assert_eq!(w.index(&[]), root);
    assert_eq!(w.index(&[]), root);
    assert_eq!(w.index(&["--to", "data/tables"]), root);
    let ran = w
        .run(&["index", "data", "--to", "data/tables", "--state-dir", "data/st"])
        .ok()
        .says("not part of the version: tables/");
    assert_eq!(ran.stdout.trim(), root);
    // The directories of the state, and its records of the tables' place and of the folder.
    w.run(&["verify", "data/tables"]).code(3).says(": 3 faults\n");
    fs::remove_dir_all(w.data().join("st")).expect("rm");
    w.run(&["verify", "data/tables"]).ok();
    fs::write(w.data().join("fletch/mine"), b"x").expect("write");
    w.run(&["index", "data"]).ok().says("fletch/mine is not part of the version");
    // Below the top `fletch/` is a name like any other.
    w.write("sub/fletch/f", "x");
    w.index(&[]);
    w.run(&["show", "data", "sub/fletch/f"]).ok();
}

/// The top-level name `fletch` is Fletch's own. What is in its place is an entry, or is named.
#[test]
fn a_reserved_name_in_the_way_is_told_before_reading() {
    for command in ["index", "pack"] {
        let w = Fixture::new();
        w.write("f", "x");
        let fletch = w.data().join("fletch");
        let refused = |what: &str| {
            let ran = w.run(&[command, "data"]).code(1).says(what).says("--tables").says("not a directory");
            assert!(ran.stderr.contains("data/fletch"), "{}", ran.stderr);
            w.run(&[command, "data", "--to", "to"]).ok()
        };
        // A file is an entry of a version whose tables are elsewhere.
        fs::write(&fletch, "a file").expect("write");
        refused("a file");
        w.run(&["show", "to", "fletch"]).ok();
        // The tables that this account wrote elsewhere are found.
        w.run(&["show", "data"]).ok();
        fs::remove_file(&fletch).expect("rm");
        // So is a link to nothing.
        symlink("nowhere", &fletch).expect("link");
        refused("a link to nothing");
        assert_eq!(w.json(&["show", "to", "fletch"])["kind"], "symlink");
        fs::remove_file(&fletch).expect("rm");
        // A followed link to a directory is the reserved directory.
        fs::create_dir(w.path("elsewhere")).expect("mkdir");
        fs::write(w.path("elsewhere/mine"), "x").expect("write");
        symlink("../elsewhere", &fletch).expect("link");
        let followed = [command, "data", "--to", "to", "--symlinks", "follow"];
        w.run(&followed).ok().says("fletch is not part of the version").says("fletch/mine is not");
        fs::remove_file(&fletch).expect("rm");
        // A file in the place of a directory of tables is left out, and said to be.
        w.write("fletch/versions", "x");
        refused("data/fletch/versions: the path is a file")
            .says("fletch/versions is not part of the version: it is not a directory");
        w.run(&["show", "to", "fletch/versions"]).code(1);
    }
}

/// `/dev/shm` and the directory of the dataset are two file systems.
#[test]
fn one_file_system_leaves_out_the_content_of_others_and_says_so() {
    use std::os::unix::fs::MetadataExt;
    let w = Fixture::new();
    let shm = tempfile::tempdir_in("/dev/shm").expect("shm");
    w.write("a", "x");
    fs::write(shm.path().join("secret"), "x").expect("write");
    symlink(shm.path(), w.data().join("shm")).expect("link");
    let device = |path: &std::path::Path| fs::metadata(path).expect("stat").dev();
    if device(shm.path()) == device(&w.data()) {
        eprintln!("skipped: /dev/shm is on the file system of the tests");
        return;
    }
    let root = w.index(&["--symlinks", "follow"]);
    w.run(&["show", "data", "shm/secret"]).ok();
    for command in ["index", "pack"] {
        let args = [command, "data", "--symlinks", "follow", "--one-file-system"];
        let ran = w.run(&args).ok().says("not part of the version: the content of shm/");
        assert_ne!(ran.stdout.trim(), root);
        assert_eq!(w.json(&["show", "data", "shm/"])["kind"], "empty-dir");
        w.run(&["verify", "data", "--one-file-system"]).ok();
    }
}

#[test]
fn an_empty_dataset_and_names_of_all_sorts() {
    let w = Fixture::new();
    w.index(&["--allow-empty"]);
    assert_eq!(w.json(&["show", "data"])["entries"], 0);
    w.run(&["verify", "data"]).ok();
    for name in [
        "with space",
        "new\nline",
        "quo\"te",
        "back\\slash",
        "é",
        "#hash?x=1&y",
        "-dash",
        "a%20b",
        "@at@",
        "~",
    ] {
        w.write(name, name);
    }
    w.write(&"n".repeat(255), "long");
    w.index(&[]);
    w.run(&["verify", "data"]).ok();
    let names = w.json(&["ls", "data"]);
    let names: Vec<&str> =
        names["children"].as_array().expect("list").iter().filter_map(|c| c["name"].as_str()).collect();
    assert!(names.contains(&"new\nline") && names.contains(&"@at@") && names.len() == 11, "{names:?}");
}

#[test]
fn a_file_that_vanishes_while_the_tree_is_read_is_a_fault() {
    use fletch::index::Outcome;
    use fletch::index::local::{TreeReads, run};
    use fletch::run::Counters;
    use fletch::source::walk::Step;
    let w = Fixture::new();
    w.write("a", "a");
    let file = |p: &str| Step::File { path: p.into(), follow: false };
    let mut steps = vec![file("a"), file("gone"), Step::Link { path: "gone-too".into() }].into_iter();
    let mut got = Vec::new();
    run(
        TreeReads { base: &w.data(), threads: 2, draft: None, groups: None },
        &Counters::default(),
        &false.into(),
        || Ok(steps.next().map(|s| (s, None))),
        |o| {
            got.push(o);
            Ok(())
        },
    )
    .expect("faults are outcomes");
    assert!(matches!(&got[0], Outcome::File { path, .. } if path == "a"));
    for (o, want) in got[1..].iter().zip(["gone", "gone-too"]) {
        assert!(
            matches!(o, Outcome::Lost { path, why } if path == want && why.contains("vanished")),
            "{o:?}"
        );
    }
}

/// A mount whose process is gone, until this value is dropped.
struct DeadMount(std::path::PathBuf);

impl DeadMount {
    /// `None` where mounts cannot be made.
    fn at(dir: std::path::PathBuf) -> Option<Self> {
        fs::create_dir_all(&dir).expect("mkdir");
        let device = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
        let mounted = device.and_then(|device| {
            let fd = std::os::fd::AsRawFd::as_raw_fd(&device);
            let options = format!("fd={fd},rootmode=40000,user_id=0,group_id=0");
            let flags = nix::mount::MsFlags::empty();
            let mounted = nix::mount::mount(Some("gone"), &dir, Some("fuse"), flags, Some(options.as_str()));
            mounted.map_err(std::io::Error::from)
        });
        match mounted {
            Ok(()) => Some(DeadMount(dir)),
            Err(e) => {
                let required = std::env::var("FLETCH_TEST_REQUIRE").unwrap_or_default();
                assert!(!required.split(',').any(|name| name == "fuse"), "no mount can be made: {e}");
                eprintln!("skipped: no mount can be made: {e}");
                None
            }
        }
    }
}

impl Drop for DeadMount {
    fn drop(&mut self) {
        let _gone = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
    }
}

#[test]
fn a_file_system_that_fails_ends_the_run_and_empties_no_version() {
    let w = Fixture::new();
    w.write("a/x", "x");
    w.write("z/y", "y");
    let Some(dead) = DeadMount::at(w.data().join("dead")) else { return };
    for command in ["index", "pack"] {
        let ran = w.run(&[command, "data", "--to", "to", "--skip-failed"]).code(4);
        ran.says("data/dead").says("mount it again").says("no version was written");
        assert!(!w.path("to/fletch/tags").exists(), "{command}");
    }
    drop(dead);
    w.run(&["index", "data", "--to", "to"]).ok();
    let dead = DeadMount::at(w.data().join("dead")).expect("as before");
    w.run(&["verify", "to"]).code(4).says("data/dead");
    drop(dead);
}
