use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::os::unix::fs::symlink;

fn steps(base: &Path, symlinks: Symlinks, exclude: &[&str], budget: usize) -> Vec<Step> {
    let scratch = tempfile::tempdir().expect("tempdir");
    let options = WalkOptions {
        base: base.to_owned(),
        symlinks,
        exclude: exclude.iter().map(|s| s.to_string()).collect(),
        one_file_system: false,
        names_bytes_max: budget,
    };
    let mut walk = Walk::new(options, scratch.path()).expect("walk");
    let mut out = Vec::new();
    while let Some(step) = walk.next_step().expect("step") {
        out.push(step);
    }
    out
}

/// The entries that a run makes of steps: files, links, and directories without entries.
fn entries(steps: &[Step]) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    for s in steps {
        match s {
            Step::File { path, .. } | Step::Link { path } => out.push(path.clone()),
            Step::DirEnd { path } | Step::OtherFileSystem { path } => {
                if !out.last().is_some_and(|l| l.starts_with(&format!("{path}/"))) {
                    out.push(format!("{path}/"));
                }
            }
            Step::Fault { path, why } | Step::Unreadable { path, why } => panic!("{path}: {why}"),
            Step::Outage { path, errno } => panic!("{path}: {errno}"),
        }
    }
    out
}

/// A tree: names to files (None) or directories.
#[derive(Debug, Clone)]
enum Tree {
    File,
    Dir(BTreeMap<String, Tree>),
}

fn tree() -> impl Strategy<Value = BTreeMap<String, Tree>> {
    // Characters around `/` in byte order, so that `a`, `a-b`, `a/` and `a0` meet.
    let name = "[ab!.0\u{e9}-]{1,3}".prop_filter("dots", |n| n != "." && n != "..");
    let leaf = Just(Tree::File);
    let node = leaf.prop_recursive(4, 60, 6, {
        let name = name.clone();
        move |inner| prop::collection::btree_map(name.clone(), inner, 0..6).prop_map(Tree::Dir)
    });
    prop::collection::btree_map(name, node, 0..8)
}

fn make(dir: &Path, tree: &BTreeMap<String, Tree>, prefix: &str, out: &mut Vec<String>) {
    for (name, node) in tree {
        let path = format!("{prefix}{name}");
        match node {
            Tree::File => {
                std::fs::write(dir.join(name), b"").expect("write");
                out.push(path);
            }
            Tree::Dir(inner) => {
                std::fs::create_dir(dir.join(name)).expect("mkdir");
                if inner.is_empty() {
                    out.push(format!("{path}/"));
                }
                make(&dir.join(name), inner, &format!("{path}/"), out);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    /// Invariant 1: the walk's order is that of the full entry paths, in memory and spilled.
    #[test]
    fn order_is_that_of_sorted_paths(tree in tree()) {
        let dir = tempfile::tempdir().expect("tempdir");
        let mut want = Vec::new();
        make(dir.path(), &tree, "", &mut want);
        want.sort();
        for budget in [NAMES_BYTES_MAX, 64, 1] {
            prop_assert_eq!(&entries(&steps(dir.path(), Symlinks::Keep, &[], budget)), &want);
        }
    }
}

#[test]
fn names_of_many_directories_stay_within_the_budget() {
    let dir = tempfile::tempdir().expect("tempdir");
    let mut want = Vec::new();
    let mut at = dir.path().to_owned();
    let mut prefix = String::new();
    // A chain of directories, each with enough names before and after the next one.
    for depth in 0..6 {
        for i in 0..600 {
            for side in ["a", "z"] {
                let name = format!("{side}{}{i:04}", "n".repeat(150));
                std::fs::write(at.join(&name), b"").expect("write");
                want.push(format!("{prefix}{name}"));
            }
        }
        at = at.join(format!("d{depth}"));
        prefix = format!("{prefix}d{depth}/");
        std::fs::create_dir(&at).expect("mkdir");
    }
    want.push(prefix);
    want.sort();
    let scratch = tempfile::tempdir().expect("tempdir");
    let budget = 400_000;
    let options = WalkOptions {
        base: dir.path().to_owned(),
        symlinks: Symlinks::Keep,
        exclude: BTreeSet::new(),
        one_file_system: false,
        names_bytes_max: budget,
    };
    let mut walk = Walk::new(options, scratch.path()).expect("walk");
    let (mut got, mut held_max) = (Vec::new(), 0);
    while let Some(step) = walk.next_step().expect("step") {
        held_max = held_max.max(walk.stack.iter().map(|f| f.names.memory_bytes()).sum::<usize>());
        got.push(step);
    }
    assert_eq!(entries(&got), want);
    // What is moved out keeps one read buffer.
    assert!(held_max <= budget + 6 * SPILL_BYTES_MIN, "{held_max}");
    assert!(walk.stack.is_empty());
    assert_eq!(std::fs::read_dir(scratch.path()).expect("dir").count(), 0, "the spill file has no name");
}

fn faults(steps: &[Step]) -> Vec<(String, String)> {
    let fault = |s: &Step| match s {
        Step::Fault { path, why } | Step::Unreadable { path, why } => Some((path.clone(), why.clone())),
        _ => None,
    };
    steps.iter().filter_map(fault).collect()
}

#[test]
fn links_by_policy() {
    let dir = tempfile::tempdir().expect("tempdir");
    let base = dir.path();
    std::fs::create_dir_all(base.join("d/e")).expect("mkdir");
    std::fs::write(base.join("d/f"), b"x").expect("write");
    symlink("d/f", base.join("to-file")).expect("link");
    symlink("d", base.join("to-dir")).expect("link");
    symlink("nowhere", base.join("broken")).expect("link");
    symlink("..", base.join("d/e/up")).expect("link");
    symlink("self", base.join("self")).expect("link");

    let keep = steps(base, Symlinks::Keep, &[], NAMES_BYTES_MAX);
    assert_eq!(entries(&keep), ["broken", "d/e/up", "d/f", "self", "to-dir", "to-file"]);
    let skip = steps(base, Symlinks::Skip, &[], NAMES_BYTES_MAX);
    assert_eq!(entries(&skip), ["d/e/", "d/f"]);
    let error = faults(&steps(base, Symlinks::Error, &[], NAMES_BYTES_MAX));
    assert_eq!(error.len(), 5, "{error:?}");
    assert!(error.iter().all(|(_, why)| why.contains("--symlinks")));

    let follow = steps(base, Symlinks::Follow, &[], NAMES_BYTES_MAX);
    let files: Vec<_> = follow
        .iter()
        .filter_map(
            |s| if let Step::File { path, follow } = s { Some((path.as_str(), *follow)) } else { None },
        )
        .collect();
    assert_eq!(files, [("d/f", false), ("to-dir/f", false), ("to-file", true)]);
    let bad = faults(&follow);
    let why = |p: &str| bad.iter().find(|(path, _)| path == p).map_or("", |(_, why)| why);
    assert!(why("broken").contains("link to nothing"), "{bad:?}");
    assert!(why("d/e/up").contains("loop"), "{bad:?}");
    assert!(why("to-dir/e/up").contains("loop"), "{bad:?}");
    assert!(why("self").contains("itself"), "{bad:?}");
}

#[test]
fn odd_names_and_excluded_places() {
    let dir = tempfile::tempdir().expect("tempdir");
    let base = dir.path();
    for d in ["fletch/versions", "sub/fletch", "out/fletch"] {
        std::fs::create_dir_all(base.join(d)).expect("mkdir");
        std::fs::write(base.join(d).join("f"), b"").expect("write");
    }
    std::fs::write(base.join("fletch/strange"), b"").expect("write");
    let bad = std::ffi::OsStr::from_bytes(b"bad-\xff\nname");
    std::fs::write(base.join("sub").join(bad), b"").expect("write");
    nix::unistd::mkfifo(&base.join("pipe"), nix::sys::stat::Mode::S_IRWXU).expect("fifo");
    let _socket = std::os::unix::net::UnixListener::bind(base.join("sock")).expect("socket");
    let all = steps(base, Symlinks::Keep, &["fletch", "out"], NAMES_BYTES_MAX);
    let f = faults(&all);
    assert_eq!(
        f.iter().map(|(p, _)| p.as_str()).collect::<Vec<_>>(),
        ["pipe", "sock", "sub/bad-\\xff\\nname"]
    );
    assert!(f[0].1.contains("named pipe") && f[1].1.contains("socket") && f[2].1.contains("UTF-8"), "{f:?}");
    let good: Vec<_> =
        all.into_iter().filter(|s| !matches!(s, Step::Fault { .. } | Step::Unreadable { .. })).collect();
    assert_eq!(entries(&good), ["sub/fletch/f"]);
    let extras = |symlinks| reserved_extras(base, symlinks).expect("list");
    assert_eq!(extras(Symlinks::Keep), [("fletch/strange".to_owned(), "not a name of Fletch")]);
    // A file in the place of a directory of Fletch, and the reserved directory behind a link.
    std::fs::write(base.join("fletch/tags"), b"").expect("write");
    let both = extras(Symlinks::Keep);
    assert_eq!(both[1], ("fletch/tags".to_owned(), "not a directory"), "{both:?}");
    std::fs::rename(base.join("fletch"), base.join("real")).expect("rename");
    symlink("real", base.join("fletch")).expect("link");
    assert_eq!(extras(Symlinks::Keep), [], "the link is an entry");
    let followed = extras(Symlinks::Follow);
    assert_eq!(followed[0], ("fletch".to_owned(), "a link to a directory"), "{followed:?}");
}

/// `/dev/shm` and `/tmp` are two file systems, and a followed link is a directory like any other.
#[test]
fn a_directory_on_another_file_system_is_left_out_only_on_request() {
    use std::os::unix::fs::MetadataExt;
    let (dir, other) =
        (tempfile::tempdir().expect("tempdir"), tempfile::tempdir_in("/dev/shm").expect("shm"));
    let device = |path: &Path| std::fs::metadata(path).expect("stat").dev();
    let base = dir.path();
    std::fs::create_dir_all(base.join("a/b")).expect("mkdir");
    std::fs::write(base.join("a/b/f"), b"").expect("write");
    std::fs::write(other.path().join("secret"), b"").expect("write");
    symlink(other.path(), base.join("a/shm")).expect("link");
    let walk = |one_file_system| {
        let options = WalkOptions {
            base: base.to_owned(),
            symlinks: Symlinks::Follow,
            exclude: BTreeSet::new(),
            one_file_system,
            names_bytes_max: NAMES_BYTES_MAX,
        };
        let scratch = tempfile::tempdir().expect("tempdir");
        let mut walk = Walk::new(options, scratch.path()).expect("walk");
        std::iter::from_fn(move || walk.next_step().expect("step")).collect::<Vec<_>>()
    };
    assert_eq!(entries(&walk(false)), ["a/b/f", "a/shm/secret"]);
    if device(base) == device(other.path()) {
        eprintln!("skipped: /dev/shm and {} are one file system here", base.display());
        return;
    }
    let left_out = walk(true);
    assert!(left_out.contains(&Step::OtherFileSystem { path: "a/shm".into() }), "{left_out:?}");
    assert_eq!(entries(&left_out), ["a/b/f", "a/shm/"]);
}

#[test]
fn a_path_too_long_for_the_system_is_a_fault() {
    use nix::fcntl::{AT_FDCWD, OFlag, openat};
    use nix::sys::stat::{Mode, mkdirat};
    let dir = tempfile::tempdir().expect("tempdir");
    let mut at = openat(AT_FDCWD, dir.path(), OFlag::O_DIRECTORY, Mode::empty()).expect("open");
    let name = "n".repeat(250);
    for _ in 0..17 {
        mkdirat(&at, name.as_str(), Mode::S_IRWXU).expect("mkdir");
        at = openat(&at, name.as_str(), OFlag::O_DIRECTORY, Mode::empty()).expect("open");
    }
    let f = faults(&steps(dir.path(), Symlinks::Keep, &[], NAMES_BYTES_MAX));
    assert_eq!(f.len(), 1, "{f:?}");
    assert!(f[0].1.contains("longer than the system can open"), "{f:?}");
}
