//! Tests of the command line.

use super::*;
use fletch_core::DatasetName;

fn into_settings(args: &[&str]) -> Result<Settings> {
    match Cli::try_parse_from([&["fletch-mount"], args].concat())?.into_action()? {
        Action::Mount(settings) => Ok(*settings),
        Action::Datasets(_) => panic!("one mount was asked for"),
    }
}

fn all_datasets(args: &[&str]) -> Result<DatasetsSettings> {
    let given = [&["fletch-mount", "--datasets", "d", "--server", "http://h:1"], args].concat();
    match Cli::try_parse_from(given)?.into_action()? {
        Action::Datasets(settings) => Ok(*settings),
        Action::Mount(_) => panic!("all datasets were asked for"),
    }
}

#[test]
fn all_datasets_have_settings_of_their_own() {
    let s = all_datasets(&[]).expect("usable");
    assert!(s.dir.is_absolute() && s.tags.is_none() && s.ready_file.is_none());
    assert_eq!((s.mounts_max, s.keep, s.interval), (256, KEEP, INTERVAL.0));
    let s = all_datasets(&["--tags", "v*", "--keep", "1h", "--metrics-listen", "0.0.0.0:9400"]);
    let s = s.expect("usable");
    assert!(s.tags.is_some_and(|t| t.is_match("v2") && !t.is_match("latest")));
    assert_eq!(s.keep, Duration::from_secs(3600));
    assert!(s.process.metrics.is_some_and(|a| !a.ip().is_loopback()));
    let label = |args: &[&str]| all_datasets(args).expect("usable").node_label;
    assert_eq!(label(&["--ready-file", "/r"]), None);
    let set = label(&["--label-node", "n", "--ready-file", "/r"]).expect("a label");
    assert_eq!((set.when, set.account), (vec!["/r".into()], ACCOUNT_DIR.into()));
    let set = label(&["--label-node", "n", "--label-when", "/a,/b"]).expect("a label");
    assert_eq!(set.when, [PathBuf::from("/a"), "/b".into()]);
    let cases: &[(&[&str], &str)] = &[
        (&["--origin-fallback"], "--origin-fallback applies to one mount"),
        (&["--report", "r"], "--report"),
        (&["--mounts-max", "0"], "1 to 4096"),
        (&["--interval", "1ms"], "1s to 1h"),
        (&["photos", "m"], "cannot be used with"),
        (&["--tags", "["], "--tags"),
        (&["--label-node", "n"], "give --ready-file"),
        (&["--label-when", "f"], "--label-node"),
    ];
    for (args, says) in cases {
        let e = all_datasets(args).expect_err("refused");
        assert!(format!("{e:#}").contains(says), "{args:?}: {e:#}");
    }
}

#[test]
fn the_command_is_well_formed_and_has_its_defaults() {
    use clap::CommandFactory;
    Cli::command().debug_assert();
    let s = into_settings(&["photos@v1", "m", "--server", "http://127.0.0.1:7380"]).expect("usable");
    assert_eq!(s.target, Target { dataset: DatasetName::new("photos").expect("name"), version: "v1".into() });
    assert_eq!((s.process.memory_bytes, s.process.tables_bytes), (256 << 20, None));
    assert!(s.process.push && !s.process.allow_other && s.dir.is_absolute());
    assert!((2..=4).contains(&s.process.threads));
    let s = into_settings(&["photos", "m", "--server", "unix:/x"]).expect("usable");
    assert_eq!((s.target.version.as_str(), s.process.memory_bytes), ("latest", 64 << 20));
    assert!(s.process.job.as_str().starts_with("mount-"));
}

#[test]
fn tables_are_kept_in_the_cache_directory() {
    let of = |more: &[&str]| {
        let settings = ["photos", "m", "--server", "unix:/x", "--cache-dir"];
        into_settings(&[&settings[..], more].concat()).expect("usable").process
    };
    let dir = tempfile::tempdir().expect("tempdir");
    let (at, own) = (dir.path().display().to_string(), format!("tables-{}", nix::unistd::geteuid()));
    let process = of(&[&at]);
    let expected = TablesDisk { dir: dir.path().join(&own), bytes: 4 << 30 };
    assert_eq!(process.tables_disk, Some(expected));
    let cache = process.part_cache();
    assert_eq!(cache.local().expect("writable").dir(), dir.path().join(&own));
    assert_eq!(of(&[&at, "--tables-disk", "1GiB"]).tables_disk.expect("given").bytes, 1 << 30);
    assert_eq!(of(&[&at, "--tables-disk", "0"]).tables_disk, None);
    // A file in the place of the directory: the mount works, in memory.
    let file = dir.path().join("file").display().to_string();
    std::fs::write(&file, "").expect("write");
    assert!(of(&[&file]).part_cache().local().is_none());
}

#[test]
fn help_begins_with_examples_and_gives_each_option_a_line() {
    use clap::CommandFactory;
    let asked = Cli::command().term_width(110).try_get_matches_from(["fletch-mount", "--help"]);
    let help = asked.expect_err("the help is no mount").to_string();
    let at = |text: &str| help.find(text).unwrap_or_else(|| panic!("{text:?} is not in\n{help}"));
    assert!(at("Examples:") < at("Usage:") && at("Usage:") < at("Options:"), "{help}");
    let options = Cli::command().get_arguments().count();
    let lines = help.lines().count();
    // The examples, the usage, the headings with a blank line before each, and the end take the rest.
    assert!(lines <= options + 28, "{lines} lines for {options} options\n{help}");
    assert!(help.lines().all(|l| l.chars().count() <= 110), "{help}");
}

#[test]
fn tables_allow_a_mount_without_a_server() {
    let s = into_settings(&["d", "m", "--tables", "/"]).expect("usable");
    let without = s.fallback.expect("goes on without");
    assert!(s.process.server.is_none() && without.uri.is_none() && without.tables.is_some());
    assert!(into_settings(&["d", "m", "--server", "unix:/x"]).expect("usable").fallback.is_none());
    let s = into_settings(&["d", "m", "--server", "unix:/x", "--origin-fallback"]).expect("usable");
    assert!(s.fallback.is_some_and(|w| w.tables.is_none()));
}

#[test]
fn usage_errors_say_what_to_give() {
    let cases: &[(&[&str], &str)] = &[
        (&["d", "m"], "--server"),
        (&["a/b", "m", "--server", "unix:/x"], "dataset name"),
        (&["d@..", "m", "--server", "unix:/x"], "tag name"),
        (&["d", "m", "--server", "localhost"], "http://host:port"),
        (&["d", "m", "--server", "unix:/x", "--tables", "/t"], "--origin-fallback"),
        (&["d", "m", "--tables", "ftp://x/y"], "ftp"),
        (&["d", "m", "--server", "unix:/x", "--memory", "1MiB"], "at least"),
        (&["d", "m", "--server", "unix:/x", "--threads", "99"], "1 to 16"),
        (&["d", "m", "--server", "unix:/x", "--metrics", "0.0.0.0:9"], "loopback"),
        (&["d", "m", "--server", "unix:/x", "--io-timeout", "1ms"], "100ms"),
        (&["d", "m", "--server", "unix:/x", "--map-timeout", "25h"], "at most 24h"),
        (&["d", "m", "--server", "unix:/x", "--keep", "1h"], "--datasets DIR"),
    ];
    for (args, says) in cases {
        let e = into_settings(args).expect_err("refused");
        assert!(format!("{e:#}").contains(says), "{args:?}: {e:#}");
    }
}

#[test]
fn flags_win_over_the_file() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("mount.toml");
    let text = "server = \"unix:/file\"\n[memory]\nmax = \"64MiB\"\n\
                [io]\ntimeout = \"2s\"\nmap_timeout = \"1h\"\n[fuse]\npush = \"off\"\n";
    std::fs::write(&path, text).expect("write");
    let path = path.to_str().expect("utf-8");
    let s = into_settings(&["d", "m", "--config", path]).expect("usable");
    let server = |s: &Settings| s.process.server.as_ref().map(ToString::to_string).unwrap_or_default();
    assert_eq!((server(&s).as_str(), s.process.memory_bytes), ("unix:/file", 64 << 20));
    assert_eq!((s.process.io_timeout, s.process.push), (Duration::from_secs(2), false));
    assert_eq!(s.process.map_timeout, Duration::from_secs(3600));
    let s = into_settings(&["d", "m", "--config", path, "--server", "unix:/flag", "--push", "on"])
        .expect("usable");
    assert_eq!((server(&s).as_str(), s.process.push), ("unix:/flag", true));
    std::fs::write(path, "memory.mx = \"1GiB\"\n").expect("write");
    let e = into_settings(&["d", "m", "--config", path]).expect_err("unknown key");
    assert!(format!("{e:#}").contains("memory.max"), "{e:#}");
}
